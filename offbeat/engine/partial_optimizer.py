"""The user's own optimizer, stepping some of its parameters, as it was told to when its `step()` was called.

A view of it: an object of its class with its state, the same objects, and groups that hold some of the parameters only.
Whatever steps each parameter by itself, as all of torch.optim do but for LBFGS, makes the same bits of it.

It steps in the middle of a forward pass; so what the script has said of that pass, such as that it is to be autocast,
does not hold for it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Of torch.optim, those that step a parameter by what they know of others.
_TOGETHER = (torch.optim.LBFGS, torch.optim.SparseAdam)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class PartialOptimizer:
    """Steps parameters of an optimizer, some at a time.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._devices = {one.device.type for group in optimizer.param_groups for one in group["params"]}
        self._attributes: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}  # a parameter, by its id

    @property
    def objection(self) -> str:
        """The reason why it cannot be done; "" if it can."""
        kind = type(self._optimizer)
        if kind in _TOGETHER or getattr(torch.optim, kind.__name__, None) is not kind:
            return f"{kind.__name__} is not known to step each parameter by itself"
        return ""

    def capture(self) -> None:
        """Take all but the state as it is now: `step` goes by it, whatever others make of it meanwhile.

        Hyper-parameters, which a schedule changes, and what `GradScaler` tells a fused optimizer for one step.
        """
        self._attributes = dict(self._optimizer.__dict__)
        self._attributes.pop("step", None)  # that of a learning rate scheduler counts calls
        self._attributes.update({name: OrderedDict() for name in _HOOKS})
        self._groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        self._group_of = {id(one): index for index, group in enumerate(self._groups) for one in group["params"]}

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Whether it was to step this parameter when `capture` was called."""
        return id(parameter) in self._group_of

    def step(self, gradients: Collection[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Step these parameters with these gradients; `.grad` is afterwards as it was before."""
        chosen: list[list[torch.nn.Parameter]] = [[] for _ in self._groups]
        before, group_of = [], self._group_of
        for parameter, gradient in gradients:
            before.append(parameter.grad)
            parameter.grad = gradient
            if (index := group_of.get(id(parameter))) is not None:
                chosen[index].append(parameter)
        kind = type(self._optimizer)
        view = object.__new__(kind)
        view.__dict__.update(self._attributes)
        view.param_groups = [
            {**group, "params": some} for group, some in zip(self._groups, chosen, strict=True) if some
        ]
        # Around it torch calls hooks for all optimizers of the process: they have run in the script's step.
        step: Any = kind.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        try:
            with _outside(self._devices):
                step(view)
        finally:
            for (parameter, _), grad in zip(gradients, before, strict=True):
                parameter.grad = grad


@contextlib.contextmanager
def _outside(devices: Collection[str]) -> Iterator[None]:
    """Leave what holds for a forward pass: inference mode, autocast, dispatch modes."""
    with contextlib.ExitStack() as entered:
        entered.enter_context(torch.inference_mode(mode=False))
        for device in devices:
            if torch.is_autocast_enabled(device):
                entered.enter_context(torch.autocast(device, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            entered.enter_context(_disable_current_modes())
        yield
