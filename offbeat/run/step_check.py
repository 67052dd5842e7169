"""The check for optimizers that bypass `run.prepare`: nothing fails, and the workers train different models.

no model is prepared    each worker trains a model of its own; a warning says so in the first steps
one is prepared         another optimizer steps its parameters, such as one that was made anew for a second phase;
                        `StepHooks` decides at its first step what that means
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offbeat.loading.loader_check import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class StepCheck:
    """The watch over the steps of all optimizers in this process.

    An optimizer that wraps a prepared one, or that a prepared one wraps, takes part in its steps.

    Call order: `prepared` for each optimizer that is given to `run.prepare`, `replaced` once another one takes its
    place; `close`.

    Args:
        world: number of workers.
        tell: called once with what is wrong if no model is prepared; None if that is nobody's business.

    Attributes:
        is_apart: whether this worker has trained a model that was not prepared; False as soon as one is.
        on_other: called after a step of another optimizer, until it returns True: there is nothing to find in it.
    """

    def __init__(self, world: int, tell: Callable[[str], None] | None) -> None:
        self._world, self._tell, self._steps = world, tell, 0
        self.is_apart = False
        self.on_other: Callable[[torch.optim.Optimizer], bool] = lambda _: False
        self._prepared = weakref.WeakSet[Any]()
        self._passed = weakref.WeakSet[Any]()  # others that may step
        self._has_prepared = self._is_within = False  # a model is prepared; a prepared optimizer's step is under way
        # Of other optimizers whose step is under way: how many steps prepared ones had made when it began.
        self._begun = weakref.WeakKeyDictionary[Any, int]()
        self._hooks = (
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._stepped),
        )

    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._prepared:
            self._is_within = True
        elif self._has_prepared and optimizer not in self._passed:
            self._begun[optimizer] = self._steps

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._prepared:
            self._steps += 1
            self._is_within = False
        elif not self._has_prepared:
            self._count()
        elif self._begun.pop(optimizer, None) == self._steps and not self._is_within and self.on_other(optimizer):
            self._passed.add(optimizer)

    def _count(self) -> None:
        self._steps += 1
        if self._steps == STEPS and self._tell is not None:
            self.is_apart = True
            self._tell(
                f"{STEPS} steps were made, and no model is prepared: each of the {self._world} workers trains a model "
                "of its own. Call model, optimizer, loader = run.prepare(model, optimizer, loader) before the loop."
            )

    def prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that this optimizer was prepared; the steps of before are nobody's business."""
        self.is_apart, self._has_prepared = False, True
        self._prepared.add(optimizer)

    def replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that another optimizer has taken the place of this one."""
        self._prepared.discard(optimizer)

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
