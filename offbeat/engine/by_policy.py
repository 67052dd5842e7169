"""One model at a server, by whichever policy holds: gradients in every step, or changes of steps of the worker's own.

A worker goes over at a border of its own, whenever it hears of the swap:

    to LocalSGD     before a step: the parameters are the server's, so they are the anchor; the step at hand is the
                    first of its own. The optimizer here takes over what the server's copy has gathered.
    from LocalSGD   behind a step: it brings the change it has, of however many steps, and has the server's parameters.
                    The server's copy of the optimizer goes on from where it was.

So each gradient is in one contribution, whatever the others have heard by then; the server applies what is of the
earlier kind by itself (`offbeat.sync.apart`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine.at_server import AtServer
from offbeat.engine.local import Local
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from offbeat.engine.exchanger import Exchanger
    from offbeat.engine.served import Served
    from offbeat.engine.waiting import Waiter
    from offbeat.plan import Plan


class ByPolicy:
    """An `Exchanger` that stands before two: `Served`, and a `Local` around it while steps are the worker's own.

    Args:
        served: of the model.
        parameters: trainable parameters by name.
        waiter: the one waiting primitive.
        model: which of several prepared, from 0.
    """

    def __init__(
        self, *, served: Served, parameters: Mapping[str, torch.nn.Parameter], waiter: Waiter, model: int = 0
    ) -> None:
        self.layout, self.share, self.meter = served.layout, served.share, served.meter
        self._plan = served.plan
        self._served, self._parameters, self._waiter, self._model = served, dict(parameters), waiter, model
        self._local: Local | None = None
        self._averaging: AtServer | None = None
        if isinstance(policy := served.plan.sync, LocalSGD):
            self._local = self._own_steps(policy, policy.step_of(served.begins_at), 0)

    # -- called by the front end ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The one that holds."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = self._served.plan = plan
        if self._local is not None and self._local.plan.sync == plan.sync:
            self._local.plan = plan

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self._now.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._served.sync = sync
        if self._local is not None:
            self._local.sync = sync

    @property
    def step(self) -> int:
        """Steps of this worker."""
        return self._now.step

    @property
    def staleness(self) -> int:
        """Updates between the parameters of this worker's last contribution and its own update."""
        return self._served.staleness

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self._now.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self._now.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step; steps of the worker's own may begin with this one.

        Raises:
            NumericsError: if what is brought holds NaN or Inf and the plan says to raise.
            WorkerLostError, NetworkError: if the server is gone.
        """
        policy = self.plan.sync
        if self._local is None and isinstance(policy, LocalSGD):
            self._served.land(in_place=False)
            begun = self._served.step
            self._local = self._own_steps(policy, begun, policy.step_of(self._served.number) - begun)
            self._local.sync = self._served.sync
        self._tell_end()
        self._now.on_step()

    def after_step(self) -> None:
        """The optimizer has stepped; steps of the worker's own may end with this one."""
        self._now.after_step()
        self._end_own_steps()

    def settle(self) -> None:
        """Bring what has not been brought."""
        self._tell_end()
        self._now.settle()
        self._end_own_steps()

    def refreshed(self) -> None:
        """The newest parameters of the server are here."""
        self._now.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """As that of whoever is at work."""
        if self._local is None:
            return self._served.state_dict()
        return {**self._local.state_dict(), "ahead": self._local.ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if self._local is not None:
            self._local.ahead = int(state.get("ahead", 0))
        self._now.load_state_dict(state)

    def close(self) -> None:
        """The run is over."""
        self._served.close()

    # -- going over ----------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Exchanger:
        return self._served if self._local is None else self._local

    @property
    def _is_to_end(self) -> bool:
        return self._local is not None and self._local.plan.sync != self.plan.sync

    def _own_steps(self, policy: LocalSGD, step: int, ahead: int) -> Local:
        self._averaging = AtServer(self._served, self._parameters, policy)
        return Local(
            exchanger=self._served,
            averaging=self._averaging,
            parameters=self._parameters,
            waiter=self._waiter,
            step=step,
            ahead=ahead,
            model=self._model,
        )

    def _tell_end(self) -> None:
        """Have this worker bring the change it has next, if another policy decides."""
        if self._local is not None and self._averaging is not None:
            self._local.ends = self._averaging.ends = self._is_to_end

    def _end_own_steps(self) -> None:
        """Go over, if it is time; the change has been brought."""
        if self._local is None or not self._is_to_end:
            return
        if not self._local.is_even:  # a swap that came since the optimizer began to step
            return
        self._served.step, sync = self._local.step, self._local.sync
        self._local = None
        self._served.sync = sync
        self._served.land(in_place=True)
