"""One model's exchange, of whose two kinds the policy may be swapped: gradients in every step, or changes now and then.

Behind the first stands an exchanger of gradients; for the second a `LocalSGDSync` stands around that. Where one ends
and the other begins is another's to say: `server_switch` where there is a server, `allreduce_switch` where there is
none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from offbeat.engine import state_checks
from offbeat.engine.local_sgd import LocalSGDSync

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.local_sgd import Averager
    from offbeat.engine.synchronizer import Synchronizer
    from offbeat.layout import Layout
    from offbeat.plan import Plan
    from offbeat.sync import LocalSGD


class SwitchableSync(ABC):
    """An `Synchronizer` that stands before two.

    Args:
        gradients: of the model; at work unless steps are the worker's own.
        parameters: trainable parameters by name, in order of registration.
        waiter: the one waiting primitive.
        model: which of several prepared, from 0.
    """

    def __init__(
        self,
        gradients: Synchronizer,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        waiter: BlockingWait,
        model: int,
    ) -> None:
        self.share, self.meter = gradients.share, gradients.meter
        self._gradients, self._plan = gradients, gradients.plan
        self._parameters, self._waiter, self._model = dict(parameters), waiter, model
        self._local: LocalSGDSync | None = None

    # -- where one ends and the other begins ---------------------------------------------------------------------

    @abstractmethod
    def _go_by(self, plan: Plan) -> None:
        """Another plan holds."""

    @abstractmethod
    def _before_step(self) -> None:
        """The optimizer is about to step."""

    @abstractmethod
    def _before_bringing(self) -> None:
        """What has not been brought is about to be."""

    @abstractmethod
    def _after_bringing(self) -> None:
        """Something may have been brought."""

    def _own_steps(self, policy: LocalSGD, averaging: Averager, *, begun: int, ahead: int) -> LocalSGDSync:
        """Steps are the worker's own from number `begun` on, `ahead` of which the policy counts them."""
        return LocalSGDSync(
            exchanger=self._gradients,
            averaging=averaging,
            parameters=self._parameters,
            waiter=self._waiter,
            step=begun,
            ahead=ahead,
            model=self._model,
        )

    @property
    def _now(self) -> Synchronizer:
        return self._gradients if self._local is None else self._local

    # -- called by the front end ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The one that holds."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._go_by(plan)
        self._plan = plan

    @property
    def layout(self) -> Layout:
        """Where the gradients lie."""
        return self._gradients.layout

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self._now.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._now.sync = sync

    @property
    def step(self) -> int:
        """Steps, of this worker or of all."""
        return self._now.step

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self._now.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self._now.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step; what is at work raises as it does alone."""
        self._before_step()
        self._now.on_step()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._now.after_step()
        self._after_bringing()

    def settle(self) -> None:
        """Bring what has not been brought, or make all replicas equal."""
        self._before_bringing()
        self._now.settle()
        self._after_bringing()

    def refreshed(self) -> None:
        """The newest parameters of a server are here."""
        self._now.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """As that of what is at work."""
        if self._local is None:
            return self._gradients.state_dict()
        return {**self._local.state_dict(), "ahead": self._local.ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if self._local is not None:
            self._local.ahead = state_checks.whole(state.get("ahead", 0), "steps ahead")
        self._now.load_state_dict(state)

    def close(self) -> None:
        """The run is over."""
        self._gradients.close()
