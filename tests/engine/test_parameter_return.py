"""Parameters that come back: what a forward pass has read stays as it was until backward is over."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import nn

from offbeat.engine.parameter_return import ParameterReturn
from offbeat.errors import NetworkError
from offbeat.server.blocks import Block, ParameterSlice
from offbeat.server.client.model_state import ModelState
from offbeat.server.client.requests import PulledParameters, ServerRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat.diagnosis.wait import BlockingWait, WaitContext
    from offbeat.server.client.pulled_blocks import PulledBlocks

NAMES = ("first", "second")


class Waiter:
    """Has what a server gives arrive while somebody waits, and nothing at any other time."""

    def __init__(self) -> None:
        self.arrivals: list[Callable[[], None]] = []

    def wait(self, pending: PulledBlocks, context: WaitContext) -> None:
        while not pending.done():
            assert not pending.wait(timedelta(0))
            self.arrivals.pop(0)()


class Job:
    """A model of two layers with a block each, [2, 2], and the server's end of it."""

    def __init__(self) -> None:
        self.model = nn.Sequential()
        for name in NAMES:
            self.model.add_module(name, nn.Linear(2, 2, bias=False))
        values = [torch.zeros(4) for _ in NAMES]
        blocks = [Block(i, 0, 0, "float32", 4, (ParameterSlice(f"{n}.weight", 0, 4),)) for i, n in enumerate(NAMES)]
        self.state = ModelState(0, blocks, (0, 0), values)
        self.request: ServerRequest[PulledParameters] = ServerRequest()
        self.waiter, self.rests = Waiter(), 0
        self.returns = ParameterReturn(
            self.model,
            {
                name: (parameter, value.view(2, 2))
                for (name, parameter), value in zip(self.model.named_parameters(), values, strict=True)
            },
            blocks,
            self.state,
            {f"{name}.weight": (self.model.get_submodule(name),) for name in NAMES},
            cast("BlockingWait", self.waiter),
            come_to_rest=self._rest,
        )
        self.read: dict[str, float] = {}  # by each module, as its forward pass began
        for name in NAMES:
            self.model.get_submodule(name).register_forward_pre_hook(
                lambda module, _, name=name: self.read.__setitem__(name, float(module.weight.detach()[0, 0]))
            )

    def _rest(self) -> None:
        self.rests += 1

    def begin(self) -> None:
        """A step has been announced."""
        self.request = ServerRequest()
        self.state.await_all()
        self.returns.begin(self.request)

    def come(self, block: int, number: int, value: float) -> None:
        """A block is here, as the event loop has it."""
        self.state.landing_place(block).fill_(value)
        with self.state.block_came:
            self.state.take(block, number)
            self.state.block_came.notify_all()

    def over(self) -> None:
        """All are here: the worker goes on."""
        self.state.last_number = self.state.number
        self.state.await_all()
        self.request.finish(PulledParameters(0, ()))
        self.state.tell_over()

    @property
    def values(self) -> list[float]:
        return [float(parameter.detach().unique()) for parameter in self.model.parameters()]


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.returns.close()


def test_each_module_waits_for_what_it_reads_and_for_nothing_else(job: Job) -> None:
    job.begin()
    job.come(0, 0, 1.0)
    job.waiter.arrivals = [lambda: job.come(1, 0, 2.0), job.over]
    job.model.get_submodule("first")(torch.ones(2))
    assert len(job.waiter.arrivals) == 2, "nobody has waited"
    job.model(torch.ones(2))
    assert (job.read, len(job.waiter.arrivals)) == ({"first": 1.0, "second": 2.0}, 1)


def test_what_is_given_again_is_taken_behind_backward(job: Job) -> None:
    """A worker was lost: the first module has read what it had brought, the second reads what is without it."""
    job.begin()
    job.waiter.arrivals = [
        lambda: job.come(0, 0, 1.0),
        lambda: job.come(0, 1, 5.0),  # while the second waits
        lambda: job.come(1, 1, 7.0),
    ]
    x = torch.ones(2, requires_grad=True)
    loss = job.model(x).sum()
    assert job.read == {"first": 1.0, "second": 7.0}
    job.over()
    job.returns.finish()
    assert job.values == [1.0, 7.0], "as the forward pass has read them"
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 * 2 * 1.0 * 7.0] * 2, "of what it has read"
    job.returns.take_again()
    assert job.values == [5.0, 7.0]


def test_what_is_given_again_before_it_was_read_is_taken_as_it_is(job: Job) -> None:
    job.begin()
    for block in range(2):
        job.come(block, 0, 1.0)
    for block in range(2):
        job.come(block, 1, 5.0)
    job.over()
    job.model(torch.ones(2))
    assert job.read == {"first": 5.0, "second": 5.0}
    job.returns.finish()
    job.returns.take_again()
    assert job.values == [5.0, 5.0]


def test_what_comes_twice_with_one_number_is_no_news(job: Job) -> None:
    """In a step after one in which something was given again, too."""
    for number in (1, 0):
        job.begin()
        for block in range(2):
            job.come(block, number, 3.0)
        job.model(torch.ones(2))
        job.over()
        job.returns.finish()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(9.0)
        job.returns.take_again()
        assert job.values == [9.0, 9.0], "nothing was taken again"


def test_a_block_lands_beside_its_values_while_these_may_be_read(job: Job) -> None:
    job.begin()
    job.come(0, 0, 1.0)
    half = job.state.landing_place(0)
    half[:2] = 8.0
    assert job.state.values[0].tolist() == [1.0] * 4, "half of it is here"
    job.state.landing_place(0).fill_(5.0)  # over a link that is new: from its beginning
    with job.state.block_came:
        job.state.take(0, 1)
    assert job.state.values[0].tolist() == [5.0] * 4
    job.state.landing_place(1).fill_(6.0)
    assert job.state.values[1].tolist() == [6.0] * 4, "nobody reads what is awaited"


def test_who_reads_the_state_of_the_model_waits(job: Job) -> None:
    job.begin()
    job.waiter.arrivals = [lambda: job.come(0, 0, 1.0), lambda: job.come(1, 0, 2.0)]
    job.model.state_dict()
    assert job.rests > 0
    job.returns.close()
    job.rests = 0
    job.model.state_dict()
    assert job.rests == 0


@pytest.mark.parametrize("use", [lambda p: p.data.sum(), lambda p: p.tolist(), copy.deepcopy, pickle.dumps])
def test_who_uses_a_parameter_waits_for_it_and_for_no_other(use: Callable[[torch.Tensor], object], job: Job) -> None:
    job.begin()
    job.waiter.arrivals = [lambda: job.come(0, 0, 1.0), lambda: job.come(1, 0, 2.0), job.over]
    first, second = job.model.parameters()
    assert (first.grad, first.shape, second.requires_grad) == (None, (2, 2), True)
    assert len(job.waiter.arrivals) == 3, "nobody has waited"
    use(first)
    assert len(job.waiter.arrivals) == 2
    assert type(first) is nn.Parameter
    assert float(first.detach()[0, 0]) == 1.0
    assert torch.equal(first + second, torch.full((2, 2), 3.0))


def test_who_waits_learns_that_the_server_is_gone(job: Job) -> None:
    job.begin()
    job.waiter.arrivals = [lambda: job.request.fail(NetworkError("It is gone."))]
    with pytest.raises(NetworkError, match="It is gone"):
        job.model(torch.ones(2))
