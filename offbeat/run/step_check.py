"""Training without `run.prepare` in a script with several workers: each trains a model of its own, and nothing fails.

A warning says so once, in the first steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat.loading.loader_check import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle


class StepCheck:
    """Counts the steps of all optimizers in this process until a model is prepared.

    Args:
        world: number of workers.
        tell: called once with what is wrong.

    Attributes:
        is_apart: whether this worker has trained a model that was not prepared; False as soon as one is.
    """

    def __init__(self, world: int, tell: Callable[[str], None]) -> None:
        self._world, self._tell, self._steps = world, tell, 0
        self.is_apart = False
        self._hook: RemovableHandle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == STEPS:
            self.is_apart = True
            self._tell(
                f"{STEPS} steps were made, and no model is prepared: each of the {self._world} workers trains a model "
                "of its own. Call model, optimizer, loader = run.prepare(model, optimizer, loader) before the loop."
            )

    def prepared(self) -> None:
        """A model is prepared: what was before is nobody's business."""
        self.is_apart = False
        self.close()

    def close(self) -> None:
        """Count no longer."""
        self._hook.remove()
