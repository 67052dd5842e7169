"""One model without a server, by whichever policy holds: gradients in every step, or changes of steps of their own.

All go over at the same border, behind an exchange in which one of them had called the others together (`calls`):

    to LocalSGD     the parameters are the same on all workers, so they are the anchor, and so is what the optimizer
                    has gathered; the next step is the first of their own
    from LocalSGD   behind an average: the parameters are the same again. What each optimizer has gathered is not, and
                    would take them apart, so that is averaged, too. The outer momentum ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine.optimizer_state import load, load_optimizer_state, optimizer_state
from offbeat.engine.state_average import average_states
from offbeat.engine.swappable import SwitchableSync
from offbeat.server.optimizer_checkpoint import from_bytes
from offbeat.server.optimizers import OUTER
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.control_group import ControlGroup
    from offbeat.engine.local_sgd_allreduce import AllReduceAverager
    from offbeat.engine.reducer import Reducer
    from offbeat.plan import Plan


class AllReduceSwitch(SwitchableSync):
    """All workers go over at once.

    Args:
        reducer: exchanges gradients with the others.
        average: makes what averages changes, given how often, and how their mean is applied.
        optimizer: the user's.
        control: this worker's end of the control group.
        parameters, waiter, model: as of `SwitchableSync`.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        average: Callable[[LocalSGD], AllReduceAverager],
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        control: ControlGroup,
        waiter: BlockingWait,
        model: int = 0,
    ) -> None:
        super().__init__(reducer, parameters=parameters, waiter=waiter, model=model)
        self._reducer, self._average, self._optimizer, self._control = reducer, average, optimizer, control
        self._averaging: AllReduceAverager | None = None
        if isinstance(policy := reducer.plan.sync, LocalSGD):
            self._begin_own_steps(policy, begun=0)

    @property
    def calls(self) -> bool:
        """Whether this worker wants all to confer behind the next exchange."""
        return self._reducer.calls

    @calls.setter
    def calls(self, calls: bool) -> None:
        self._reducer.calls = calls

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; of one made with a server, what the server's optimizer had gathered.

        Raises:
            ModelError: if that is damaged, or of another model.
        """
        super().load_state_dict(state)
        if brought := state.get("reducer", state).get("server"):
            states = {name: one for name, one in from_bytes(brought).items() if name in self._parameters}
            own = {name: {k: v for k, v in one.items() if k != OUTER} for name, one in states.items()}
            load(self._optimizer, self._parameters, own)

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not exchanged, because it is being accumulated."""
        return self._reducer.holds_gradient

    def take_part(self) -> None:
        """Exchange nothing, as a worker whose inputs have ended, while others have a gradient."""
        self._reducer.take_part()

    def take_call(self) -> bool:
        """Whether a worker had called in the last exchange; the same on all. Once."""
        called, self._reducer.called = self._reducer.called, False
        return called

    def settle(self) -> None:
        """Make all replicas equal. Collective."""
        super().settle()
        self._reducer.channel.weights = ()  # of an average between two steps

    def take_weights(self) -> tuple[float, ...]:
        """This worker's in the exchange of the step that is over, and the sums over all workers; none without one."""
        channel = self._reducer.channel
        weights, channel.weights = channel.weights, ()
        return weights

    def take_times(self) -> dict[int, list[float]]:
        """How long each step since the exchange before took each worker, as told in the last one; by rank, once."""
        return self._reducer.times.take()

    def make_room(self, ranks: Iterable[int]) -> None:
        """These may tell how long they compute, too; on all workers at the same place."""
        self._tell_times(self.plan, max(self._reducer.times.ranks, *(rank + 1 for rank in ranks)))

    def even_out(self) -> None:
        """Have the same parameters on all workers. Collective."""
        if self._local is not None and not self._local.is_even:
            self.settle()

    def hand_over(self) -> dict[str, Any]:
        """All that a newcomer has to have of this model, but for parameters and buffers; in a dict of names."""
        return {
            "stamp": self.share.stamp,
            "ranks": self._reducer.times.ranks,
            "exchanger": self.state_dict(),
            "optimizer": optimizer_state(self._optimizer, self._parameters),
        }

    def take_over(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Take over what `hand_over` returned on another worker.

        Args:
            plan: that holds there.
        """
        self._plan = self._reducer.plan = plan
        self._local = self._averaging = None
        self._tell_times(plan, int(state["ranks"]))
        self.share.stamp = int(state["stamp"])
        if isinstance(policy := plan.sync, LocalSGD):
            self._begin_own_steps(policy, begun=0)
        self.load_state_dict(state["exchanger"])
        load_optimizer_state(self._optimizer, self._parameters, state["optimizer"])

    def go_on_from(self, step: int, *, were_apart: bool) -> None:
        """Begin where workers are that had a server. Collective.

        Args:
            step: they have made.
            were_apart: each worker's optimizer has stepped by itself: what it has gathered is made the same.
        """
        self._reducer.step = step
        if were_apart:
            average_states(self._optimizer, self._parameters, self._reducer.channel, self._control)

    def _go_by(self, plan: Plan) -> None:
        """Collective, at a border that is the same for all."""
        before, self._reducer.plan = self.plan.sync, plan
        self._tell_times(plan, self._reducer.times.ranks)
        if plan.sync == before:
            return
        step, sync, policy = self.step, self.sync, plan.sync
        if self._local is not None:
            if not self._local.is_even:  # another model's step is the border
                self._local.settle()
            if not isinstance(policy, LocalSGD):
                self._reducer.step = step
                if self._local.is_anchored:  # else none has stepped by itself
                    average_states(self._optimizer, self._parameters, self._reducer.channel, self._control)
        self._local = self._averaging = None
        if isinstance(policy, LocalSGD):
            self._begin_own_steps(policy, begun=step)
        self.sync = sync

    def _before_step(self) -> None:
        """Nothing: nobody goes over alone."""

    def _before_bringing(self) -> None:
        """Nothing: nobody goes over alone."""

    def _after_bringing(self) -> None:
        """Nothing: nobody goes over alone."""

    def _begin_own_steps(self, policy: LocalSGD, *, begun: int) -> None:
        averaging = self._averaging = self._average(policy)
        self._local = self._own_steps(policy, averaging, begun=begun, ahead=policy.step_of(begun) - begun)

    def _tell_times(self, plan: Plan, ranks: int) -> None:
        self._reducer.tell_times(are_told=plan.controller is not None, ranks=ranks)
        if self._averaging is not None:
            self._averaging.make_room()
