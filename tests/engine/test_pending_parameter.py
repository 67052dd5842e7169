"""A parameter that lacks its last step: what waits for it, what does not, and that nothing of it is left behind."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offbeat.engine.pending_gradient import pending
from offbeat.engine.pending_parameter import PendingParameter, can_pend, pend, settle

if TYPE_CHECKING:
    from collections.abc import Callable

USES: dict[str, Callable[[Any], object]] = {
    "data": lambda p: p.data.clamp_(0, 0.5),
    "set data": lambda p: setattr(p, "data", torch.zeros(2, 2)),
    "detach": lambda p: p.detach(),
    "numpy": lambda p: p.data.numpy(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "linear": lambda p: F.linear(torch.ones(3, 2), p),
    "foreach": lambda p: torch._foreach_mul([torch.ones(2, 2), p], 2.0),
    "out": lambda p: torch.add(torch.ones(2, 2), 1, out=p.data),
    "gradient first": lambda p: pending(torch.ones(2, 2), lambda: None) + p,
    "norm of several": lambda p: nn.utils.get_total_norm([torch.ones(2), p.detach()]),
    "print": repr,
    "storage": lambda p: p.untyped_storage(),
    "pointer": lambda p: p.data_ptr(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "wrap again": nn.Parameter,
    "vmap": lambda p: torch.vmap(lambda x: x @ p)(torch.ones(3, 2)),
}
QUESTIONS: dict[str, Callable[[Any], object]] = {
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", torch.ones(2, 2)),
    "freeze": lambda p: p.requires_grad_(True),
    "shape": lambda p: (p.shape, p.size(0), p.dim(), p.numel(), p.stride(), len(p)),
    "kind": lambda p: (p.dtype, p.device, p.layout, p.is_leaf, p.is_cuda, p.is_sparse, p.is_floating_point()),
    "class": lambda p: (isinstance(p, nn.Parameter), type(p).__name__ == "Parameter", torch.is_tensor(p)),
    "like": lambda p: (torch.zeros_like(p), p.new_zeros(3)),
    "identity": lambda p: {p: hash(p)},
    "optimizer": lambda p: torch.optim.Adam([p]).zero_grad(),
    "module": lambda p: nn.Module().register_parameter("p", p),
}


class Stepped:
    """A parameter whose step makes it zeros, and who has used it before."""

    def __init__(self) -> None:
        self.parameter, self.used = nn.Parameter(torch.ones(2, 2)), list[str]()
        pend(self.parameter, self._on_use)

    def _on_use(self, what: str, caller: Any) -> None:
        self.used.append(what)
        settle(self.parameter)
        self.parameter.data.zero_()


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_once_and_finds_an_ordinary_parameter(use: str) -> None:
    one = Stepped()
    USES[use](one.parameter)
    USES[use](one.parameter)
    assert len(one.used) == 1
    assert type(one.parameter) is nn.Parameter
    assert not one.parameter.__dict__


def test_a_use_finds_what_was_waited_for() -> None:
    assert torch.equal(Stepped().parameter + 0, torch.zeros(2, 2))
    assert torch.equal(pickle.loads(pickle.dumps(Stepped().parameter)), torch.zeros(2, 2))
    copied = copy.deepcopy(Stepped().parameter)
    assert torch.equal(copied, torch.zeros(2, 2))
    assert type(copied) is nn.Parameter
    again = nn.Parameter(Stepped().parameter)
    assert torch.equal(again, torch.zeros(2, 2))
    assert type(again) is nn.Parameter


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_waits_for_nothing(question: str) -> None:
    one = Stepped()
    answer = QUESTIONS[question](one.parameter)
    assert one.used == []
    assert isinstance(one.parameter, PendingParameter)
    settle(one.parameter)
    if question in ("shape", "kind", "class"):
        assert answer == QUESTIONS[question](one.parameter)


def test_a_class_of_the_users_own_is_its_own_again() -> None:
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.ones(2))
    assert can_pend(parameter)
    pend(parameter, lambda *_: None)
    assert isinstance(parameter, Own)
    parameter.sum().backward()
    assert type(parameter) is Own
    assert parameter.grad is not None


def test_another_process_shares_the_memory_of_a_parameter_that_was_pending() -> None:
    one = Stepped()
    ForkingPickler.dumps(one.parameter)
    assert one.used == [""]
    assert one.parameter.is_shared()
