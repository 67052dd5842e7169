"""One model's exchange, on whichever kind of fabric is at work; what the front end and its hooks keep hold of.

Which of the two it is, and what goes over from one to the other, is another's to say (`offbeat.run.fabric_migration`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.engine.allreduce_switch import AllReduceSwitch
    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.server_switch import ServerSwitch
    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.layout import Layout
    from offbeat.plan import Plan


class SynchronizerProxy:
    """A `Synchronizer` that stands before one that may be exchanged for another.

    Args:
        now: the one at work; whoever puts another in its place closes it.
    """

    def __init__(self, now: ServerSwitch | AllReduceSwitch) -> None:
        self.now = now

    @property
    def plan(self) -> Plan:
        """The one that holds."""
        return self.now.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.now.plan = plan

    @property
    def share(self) -> BatchAccount:
        """This worker's part in the next exchange."""
        return self.now.share

    @property
    def meter(self) -> StepMetrics:
        """Where measurements go."""
        return self.now.meter

    @property
    def layout(self) -> Layout:
        """Where the gradients lie."""
        return self.now.layout

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self.now.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self.now.sync = sync

    @property
    def step(self) -> int:
        """Exchanges, or steps where not every one has one."""
        return self.now.step

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self.now.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self.now.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step; what is at work raises as it does alone."""
        self.now.on_step()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self.now.after_step()

    def settle(self) -> None:
        """Make all replicas equal, or bring what has not been brought."""
        self.now.settle()

    def refreshed(self) -> None:
        """The newest parameters of a server are here."""
        self.now.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """As that of what is at work."""
        return self.now.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.now.load_state_dict(state)

    def close(self) -> None:
        """The run is over."""
        self.now.close()
