"""One model without a server, by whichever policy holds: gradients in every step, or changes of steps of their own.

All go over at the same border, behind an exchange in which one of them had called the others together (`calls`):

    to LocalSGD     the parameters are the same on all workers, so they are the anchor, and so is what the optimizer
                    has gathered; the next step is the first of their own
    from LocalSGD   behind an average: the parameters are the same again. What each optimizer has gathered is not, and
                    would take them apart, so that is averaged, too. The outer momentum ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine.gathered import average_states
from offbeat.engine.local import Local
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from offbeat.engine.exchanger import Exchanger
    from offbeat.engine.local import Averaging
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.waiting import Waiter
    from offbeat.layout import Layout
    from offbeat.plan import Plan
    from offbeat.sync import OuterSGD


class Together:
    """An `Exchanger` that stands before two: `Reducer`, and a `Local` around it while steps are the workers' own.

    Args:
        reducer: of the model.
        average: makes what averages changes, given how their mean is applied.
        parameters: trainable parameters by name, in order of registration.
        optimizer: the user's.
        waiter: the one waiting primitive.
        model: which of several prepared, from 0.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        average: Callable[[OuterSGD | None], Averaging],
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        waiter: Waiter,
        model: int = 0,
    ) -> None:
        self.share, self.meter = reducer.share, reducer.meter
        self._plan, self._reducer, self._average = reducer.plan, reducer, average
        self._parameters, self._optimizer = dict(parameters), optimizer
        self._waiter, self._model = waiter, model
        self._local: Local | None = None
        if isinstance(policy := reducer.plan.sync, LocalSGD):
            self._local = self._own_steps(policy, begun=0)

    # -- called by the front end ---------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where the gradients lie."""
        return self._reducer.layout

    @property
    def plan(self) -> Plan:
        """The one that holds."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        """Go over to another one's policy. Collective, at a border that is the same for all."""
        before, self._plan, self._reducer.plan = self._plan.sync, plan, plan
        if plan.sync == before:
            return
        step, sync, policy = self.step, self.sync, plan.sync
        if self._local is not None:
            if not self._local.is_even:  # another model's step is the border
                self._local.settle()
            if not isinstance(policy, LocalSGD):
                self._reducer.step = step
                average_states(self._optimizer, self._parameters, self._reducer.channel)
        self._local = self._own_steps(policy, begun=step) if isinstance(policy, LocalSGD) else None
        self.sync = sync

    @property
    def calls(self) -> bool:
        """Whether this worker wants all to confer behind the next exchange."""
        return self._reducer.calls

    @calls.setter
    def calls(self, calls: bool) -> None:
        self._reducer.calls = calls

    def take_call(self) -> bool:
        """Whether a worker had called in the last exchange; the same on all. Once."""
        called, self._reducer.called = self._reducer.called, False
        return called

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self._now.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._now.sync = sync

    @property
    def step(self) -> int:
        """Steps of all."""
        return self._now.step

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self._now.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self._now.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step."""
        self._now.on_step()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._now.after_step()

    def settle(self) -> None:
        """Make all replicas equal. Collective."""
        self._now.settle()

    def refreshed(self) -> None:
        """Nothing to do: there is no server."""

    def state_dict(self) -> dict[str, Any]:
        """As that of whoever is at work."""
        if self._local is None:
            return self._reducer.state_dict()
        return {**self._local.state_dict(), "ahead": self._local.ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if self._local is not None:
            self._local.ahead = int(state.get("ahead", 0))
        self._now.load_state_dict(state)

    def close(self) -> None:
        """The run is over."""
        self._now.close()

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Exchanger:
        return self._reducer if self._local is None else self._local

    def _own_steps(self, policy: LocalSGD, *, begun: int) -> Local:
        return Local(
            exchanger=self._reducer,
            averaging=self._average(policy.outer),
            parameters=self._parameters,
            waiter=self._waiter,
            step=begun,
            ahead=policy.step_of(begun) - begun,
            model=self._model,
        )
