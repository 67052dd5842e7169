"""The user's own optimizer, stepping some of its parameters, as it was told to when its `step()` was called.

A view of it: an object of its class with its state, the same objects, and groups that hold some of the parameters only.
Whatever steps each parameter by itself, as all of torch.optim do but for LBFGS, makes the same bits of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

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
        self._groups: list[dict[str, Any]] = []

    @property
    def objection(self) -> str:
        """The reason why it cannot be done; "" if it can."""
        kind = type(self._optimizer)
        if kind in _TOGETHER or getattr(torch.optim, kind.__name__, None) is not kind:
            return f"{kind.__name__} is not known to step each parameter by itself"
        return ""

    def capture(self) -> None:
        """Take the hyper-parameters as they are now: `step` goes by them, whatever a schedule makes of them."""
        self._groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def step(self, gradients: Collection[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Step these parameters with these gradients; `.grad` is afterwards as it was before."""
        chosen = {id(parameter) for parameter, _ in gradients}
        kind = type(self._optimizer)
        view = object.__new__(kind)
        view.__dict__.update(self._optimizer.__dict__)
        view.__dict__.pop("step", None)  # that of a learning rate scheduler counts calls
        view.__dict__.update({name: OrderedDict() for name in _HOOKS})
        view.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in self._groups
        ]
        before = [parameter.grad for parameter, _ in gradients]
        for parameter, gradient in gradients:
            parameter.grad = gradient
        try:
            kind.step(view)
        finally:
            for (parameter, _), grad in zip(gradients, before, strict=True):
                parameter.grad = grad
