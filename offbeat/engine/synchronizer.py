"""One model's exchange with the other workers, as the front end sees it.

Call order, each step: `on_forward` for each forward pass that trains; `on_output_grad` when its backward begins;
`on_step` before and `after_step` behind the optimizer's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.layout import Layout
    from offbeat.plan import Plan

RUN_IS_CLOSED = (
    "Cannot train this replica any further: its run is closed, and the other workers no longer take part. Close the "
    "run after the last step, or go on alone with the replica's .module."
)


class Synchronizer(Protocol):
    """Keeps one model together with the other workers' replicas.

    Attributes:
        sync: False while gradients are only accumulated.
    """

    plan: Plan
    sync: bool

    @property
    def share(self) -> BatchAccount:
        """This worker's part in the next exchange."""

    @property
    def meter(self) -> StepMetrics:
        """Where measurements go."""

    @property
    def layout(self) -> Layout:
        """Where the parameters' gradients lie."""

    @property
    def step(self) -> int:
        """Exchanges, or steps where not every step has one."""

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""

    def on_output_grad(self) -> None:
        """The gradient of the model's output is known."""

    def on_step(self) -> None:
        """The optimizer is about to step."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def settle(self) -> None:
        """Make all replicas equal; with a server, bring what has not been brought. Collective."""

    def refreshed(self) -> None:
        """The newest parameters of a server are here."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def close(self) -> None:
        """The run is over."""
