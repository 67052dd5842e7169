"""Workers at their own pace without a server: each steps by itself, and a switch keeps the sum of their changes.

    parameters = those of the beginning - table        read by each worker when the policy lets it go on
    table     += its change / number of workers        behind each of its steps

A table reaches some way. Where values have come half as far all meet, and begin with an empty one where they are.

So the optimizer is each worker's own: its momentum is that of its own gradients, where a server's is that of all. The
factor is the same in every mode (Nunes et al., "No worker left (too far) behind", 2025). Buffers stay each worker's own
until all `settle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.engine.communicator import Communicator
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.state_average import average_states
from offbeat.errors import ModelError
from offbeat.fabric import HoldsTables
from offbeat.layout import arrange
from offbeat.payload import Total
from offbeat.protocol.switch_control import Strategy
from offbeat.short_name import short_name
from offbeat.switch.fixed_point import MOST_EXPONENT
from offbeat.switch.strategy import compile_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from offbeat.engine.buffers import Buffers
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.fabric.switch_table import SwitchTable, TablePending
    from offbeat.plan import Plan
    from offbeat.protocol.switch_control import SwitchPlan
    from offbeat.sync import Policy

_HEADROOM = 3  # a parameter may move 2**3 times as far as the largest lies from 0
_LEAST_EXPONENT = 3


class SwitchAverager:
    """One model's table. An `Averager`, of which each step averages, without waiting for all.

    Args:
        model: whose changes are pushed.
        reducer: of its gradients, which has no work meanwhile.
        buffers: the model's, or None if they are not to be synchronised.
        policy: who may go on when, at the beginning.
        context: of this worker.

    Attributes:
        policy: who may go on when.

    Raises:
        ModelError: if the parameters are not float32 on CPUs, or have no values.
    """

    def __init__(
        self, model: PreparedModel, reducer: Reducer, buffers: Buffers | None, policy: Policy, context: WorkerContext
    ) -> None:
        self._model, self._reducer, self._buffers, self._context = model, reducer, buffers, context
        self.policy = policy
        buckets = arrange(model.parameters, bucket_bytes=reducer.plan.bucket_bytes).buckets
        if any(bucket.dtype != torch.float32 or bucket.device.type != "cpu" for bucket in buckets):
            raise ModelError(
                f"Cannot train this model with {short_name(policy)} on a switch: its table adds float32 on CPUs. Use "
                "BSP(), or fabric=ParameterServer()."
            )
        if not any(bucket.numel for bucket in buckets):
            raise ModelError(
                f"Cannot train this model with {short_name(policy)} on a switch: its parameters have no values, nor "
                "would its table. Use BSP()."
            )
        self._anchors = [Anchor(bucket, model.parameters) for bucket in buckets]
        self._ends = np.cumsum([bucket.numel for bucket in buckets])
        self._base = np.zeros(self._ends[-1], np.float32)
        self._change = np.zeros_like(self._base)
        self._table: SwitchTable | None = None

    @property
    def table(self) -> SwitchAverager:
        """The averager itself: the switch decides by which plan all go."""
        return self

    @property
    def common(self) -> dict[str, torch.Tensor]:
        """Name nothing: each worker has what the table was for it."""
        return {}

    @property
    def is_even(self) -> bool:
        """Whether nothing is on its way: always, behind `average`."""
        return True

    def begin(self) -> None:
        """Anchor here, and join the table. Collective."""
        for anchor, base in zip(self._anchors, self._parts(self._base), strict=True):
            anchor.set_to_parameters_()
            base.copy_(anchor.values)
        self._join()

    def _join(self) -> SwitchTable:
        fabric = self._model.fabric
        if not isinstance(fabric, HoldsTables):
            raise ModelError(f"Cannot train with {short_name(self.policy)} on this fabric: it holds no table.")
        largest = float(np.abs(self._base).max())
        exponent = max(_LEAST_EXPONENT, int(np.frexp(largest)[1]) + _HEADROOM)
        if exponent > MOST_EXPONENT:
            raise ModelError(
                f"Cannot train this model with {short_name(self.policy)} on a switch: its largest parameter is "
                f"{largest:.3g}, and a table takes none of 2^{MOST_EXPONENT - _HEADROOM} or more. Scale the model, or "
                "use BSP()."
            )
        strategy = compile_policy(self.policy)
        number, size = self._model.number, len(self._base)
        self._table = self._context.waiter.call(
            lambda: fabric.open_table(number, size, strategy, exponent), WaitContext("the switch's table")
        )
        return self._table

    def before_step(self) -> None:
        """Do nothing: what is pushed is how far this worker is from the anchor."""

    def stepped(self) -> None:
        """Do nothing: nobody else could compute what this worker drew."""

    def average(self, step: int, steps: int, part: float, *, fragment: int | None, is_last: bool) -> ExchangeResult:
        """Push this worker's change, wait until it may go on, and take over the table.

        With no `steps` since the last time, make all replicas equal. Collective then.
        """
        if not steps:
            self._settle(step)
            return ExchangeResult()
        metrics, table = self._context.metrics, self._opened
        issued_s, barrier_s, resent = metrics.now_s(), table.spent_s["clock"], table.resent
        for anchor, change in zip(self._anchors, self._parts(self._change), strict=True):
            anchor.delta(change)
        self._change /= self._context.world
        pending = table.push(self._change)
        metrics.sent_bytes += pending.sent_bytes
        self._take(self._wait(pending, f"the next step ({short_name(self.policy)})", step))
        if table.grant is not None:
            self._context.history.record_grant(self._model.number, table.grant)
        return ExchangeResult(
            weights=(part,),
            spans=((issued_s, metrics.now_s()),),
            barrier_s=table.spent_s["clock"] - barrier_s,
            resent=table.resent - resent,
            lead=None if table.grant is None else table.grant.lead,
        )

    def _settle(self, step: int) -> None:
        control, table = self._context.control, self._opened
        table.rest()
        control.sum("all have pushed to the switch's table what they had")
        clocks = control.numbers_of("how far all say they are", table.halt())
        self._take(self._wait(table.resume(max(clocks.values()), len(self._base)), "the table that all read", step))
        control.sum("all have read the switch's table")  # nobody pushes before
        table.settle()
        self._even_buffers(step)
        parameters = self._model.parameters.values()
        self._context.history.record_parameters(self._model.number, table.clock, parameters)

    def _even_buffers(self, step: int) -> None:
        """Give all workers the buffers of the first. Collective."""
        if self._buffers is None:
            return
        source = self._context.control.leader
        for pending in self._buffers.start(source):
            self._context.waiter.wait(pending, WaitContext("broadcast of the buffers", step))
        self._buffers.finish(source)

    def _wait(self, pending: TablePending, what: str, step: int) -> NDArray[np.float32]:
        reply = self._context.waiter.wait(pending, WaitContext(what, step, model=self._model.number))
        assert isinstance(reply, Total)
        values: NDArray[np.float32] = reply.tensor.numpy()
        return values

    def _take(self, table: NDArray[np.float32]) -> None:
        """Have the parameters that the table says."""
        for anchor, values in zip(self._anchors, self._parts(self._base - table), strict=True):
            anchor.values.copy_(values)
            anchor.restore_parameters_()

    def end(self, *, evens_optimizers: bool) -> None:
        """Leave the table, with equal parameters: gradients are exchanged from here on. Collective."""
        control = self._context.control
        if evens_optimizers:
            communicator = Communicator(self._model.fabric, self._context, self._model.number)
            average_states(self._model.optimizer, self._model.parameters, communicator, control)
        control.sum("all leave the switch's table")
        self._even_buffers(0)
        self._opened.close()

    def leave(self) -> None:
        """Have the others go on without this worker."""
        if self._table is not None:
            self._table.leave()

    def meet(self, plan: Plan) -> bool:
        """Have nobody go further than a step that all make, so that all can begin with an empty table behind it.

        Args:
            plan: that holds, and goes on to.
        """
        return self._opened.set_strategy(Strategy("table", window=0, renews=True), plan.to_toml())

    def begin_anew(self) -> None:
        """Have an empty table, where all have the same parameters: they may move as far again. Collective."""
        before = self._opened
        self.begin()
        before.close()

    def swap(self, plan: Plan, reason: str = "") -> bool:
        """Have another plan's policy hold for all workers; see `SwitchTable.set_strategy`.

        If that needs no table, nobody goes further than the step from which on it holds: there all are equal.
        """
        strategy = compile_policy(plan.sync) if plan.is_tabled else Strategy("table", window=0)
        return self._table is not None and self._table.set_strategy(strategy, plan.to_toml(), reason)

    def new_plan(self) -> SwitchPlan | None:
        """The plan that has come to hold since the last call; see `SwitchTable.new_plan`."""
        return None if self._table is None else self._table.new_plan()

    @property
    def opened(self) -> SwitchTable | None:
        """The table; None before the first step."""
        return self._table

    def refreshed(self, steps: int) -> None:
        """Do nothing: there is no server."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Anchors, by parameter name."""
        return {name: {"anchor": value.clone()} for anchor in self._anchors for name, _, value in anchor.slots}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], gradients: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Collective."""
        self._reducer.load_state_dict(gradients)
        for anchor in self._anchors:
            for name, _, value in anchor.slots:
                state_checks.copy_(value, state[name], name, "anchor")
            anchor.restore_parameters_()
        if self._table is None:
            self.begin()
        else:  # what it holds belongs to other parameters
            self.begin_anew()

    @property
    def _opened(self) -> SwitchTable:
        assert self._table is not None, "a table is opened with the first step"
        return self._table

    def _parts(self, whole: NDArray[np.float32]) -> list[torch.Tensor]:
        """The stretches of a vector [D] that belong to each bucket, in the same memory."""
        return [torch.from_numpy(part) for part in np.split(whole, self._ends[:-1])]
