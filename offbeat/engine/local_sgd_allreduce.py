"""Averages of local steps without a server: the mean delta is summed over the fabric, and applied by every worker.

Buffers travel with each average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.engine.bucket_exchange import BucketExchange
from offbeat.engine.communicator import Communicator
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.nonfinite import leave_out
from offbeat.engine.state_average import average_states
from offbeat.layout import arrange
from offbeat.payload import Gather
from offbeat.sync.outer_sgd import apply_change_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.codec import Codec, State
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.step_times import StepTimes
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.layout import Bucket
    from offbeat.sync import OuterSGD, StepsLocally


class AllReduceAverager:
    """One model's averages. An `Averager`.

    Args:
        model: whose deltas are averaged.
        reducer: of its gradients.
        buffers: the model's, or None if they are not to be synchronised.
        policy: how many steps are between two averages, and how the mean delta is applied.
        context: of this worker.
    """

    table = None

    def __init__(
        self,
        model: PreparedModel,
        reducer: Reducer,
        buffers: Buffers | None,
        policy: StepsLocally,
        context: WorkerContext,
    ) -> None:
        self._model, self._reducer, self._buffers, self._context = model, reducer, buffers, context
        self._outer, self._every = policy.outer, policy.every
        self._communicator = Communicator(model.fabric, context, model.number)
        buckets = arrange(model.parameters, bucket_bytes=reducer.plan.bucket_bytes).buckets
        self._communicator.buckets = len(buckets)
        self._deltas = [BucketDelta(bucket, model.parameters) for bucket in buckets]

    def begin(self) -> None:
        """Anchor here."""
        for delta in self._deltas:
            delta.anchor.set_to_parameters_()

    def stepped(self) -> None:
        """Do nothing: nobody else could compute what this worker drew."""

    def average(self, step: int, steps: int, part: float, *, is_last: bool) -> ExchangeResult:
        """Exchange the deltas, and apply their mean. Collective."""
        communicator, accounting, plan = self._communicator, self._reducer.accounting, self._reducer.plan
        self._deltas[-1].make_room(self._reducer.times, self._every)
        weight = accounting.weight * part
        self._encode(weight)
        bad = [] if plan.nonfinite == "pass" else [name for delta in self._deltas for name in delta.nonfinite()]
        if leave_out(bad, plan.nonfinite, what="change", step=step, metrics=self._context.metrics):
            weight = 0.0
            self._encode(weight)
        for delta in self._deltas:
            delta.issue(weight, requests_vote=accounting.requests_vote)
        source = accounting.source
        broadcasts = [] if self._buffers is None else self._buffers.start(source)
        results = [delta.finish(communicator.world, self._outer) for delta in self._deltas]
        if self._buffers is not None:
            for pending in broadcasts:
                communicator.wait(pending, "broadcast of the buffers")
            self._buffers.finish(source)
        communicator.step += 1
        return ExchangeResult(
            weights=(weight, *dict.fromkeys(one.weights[0] for one in results)),
            vote_requested=any(one.vote_requested for one in results),
            step_times=results[-1].step_times,
            spans=tuple(span for one in results for span in one.spans),
        )

    def end(self, *, evens_optimizers: bool) -> None:
        """Average what the optimizers have gathered, which would take replicas apart. Collective."""
        if evens_optimizers:
            one, control = self._model, self._context.control
            average_states(one.optimizer, one.parameters, self._communicator, control)

    def leave(self) -> None:
        """Do nothing: who leaves says so to the others."""

    def refreshed(self, steps: int) -> None:
        """Do nothing: there is no server."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Anchors and outer momentum, by parameter name."""
        own: dict[str, dict[str, torch.Tensor]] = {}
        for delta in self._deltas:
            own.update(delta.state_dict())
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], gradients: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, and have the reducer take over its own."""
        self._reducer.load_state_dict(gradients)
        for delta in self._deltas:
            delta.load_state_dict(state)

    def _encode(self, weight: float) -> None:
        codec, kept = self._reducer.plan.codec, self._model.codec_state
        for delta in self._deltas:
            state = kept.of(codec, delta.bucket, deltas=True)
            delta.encode(weight / self._communicator.world, codec, state, self._communicator)


class BucketDelta:
    """One bucket's anchor, delta and outer momentum.

    Args:
        bucket: what lies in it.
        parameters: by name.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.bucket = bucket
        self.anchor = Anchor(bucket, parameters)
        self._times: StepTimes | None = None
        self._place(0)
        self._momentum = torch.zeros_like(self._delta)
        self._exchange: BucketExchange

    def make_room(self, times: StepTimes, every: int) -> None:
        """Tell these, in averages of so many steps, if anybody wants to know."""
        room = times.room(every)
        self._times = times if room else None
        if room != len(self._trailer) - 2:
            self._place(room)

    def _place(self, room: int) -> None:
        bucket, end = self.bucket, self.bucket.numel
        memory = torch.zeros(end + 2 + room, dtype=bucket.dtype, device=bucket.device)
        # The worker's weight, and whether it requests a vote; times, if any are told.
        self._delta, self._trailer = memory[:end], memory[end:]

    def encode(self, scale: float, codec: Codec, state: State, communicator: Communicator) -> None:
        """Make what is to be sent of how far this worker came; a second time instead of the first.

        Args:
            scale: by which that is multiplied; 0 for nothing.
        """
        if scale:
            self.anchor.delta(self._delta)
            self._delta.mul_(scale)
        else:
            self._delta.zero_()
        self._exchange = BucketExchange(self.bucket, self._delta, codec, state, communicator)

    def nonfinite(self) -> list[str]:
        """Names of the parameters in which there is NaN or Inf, as it is sent."""
        payload = self._exchange.payload
        tensors = payload.tensors if isinstance(payload, Gather) else (payload.tensor,)
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            return []
        whole = tensors[0] if tensors[0].shape == self._delta.shape else self._delta
        views = self.anchor.views_in(whole)
        return [name for name, view in views.items() if not bool(torch.isfinite(view).all())] or list(views)

    def issue(self, weight: float, *, requests_vote: bool) -> None:
        """Send it."""
        self._trailer.zero_()
        self._trailer[0], self._trailer[1] = weight, float(requests_vote)
        if self._times is not None:
            self._times.write(self._trailer[2:])
        self._exchange.issue(self._trailer)

    def finish(self, world: int, outer: OuterSGD | None) -> ExchangeResult:
        """Receive the mean delta and apply it; the parameters are the new anchor. `weights` is the sum alone."""
        trailer, _ = self._exchange.wait()
        weight = float(trailer[0]) / world
        self._exchange.finish(weight or 1.0)
        if weight:  # else nobody has moved, and the outer momentum must not move them
            apply_change_(self.anchor.values, self._delta, outer=outer, momentum=self._momentum)
        self.anchor.restore_parameters_()
        done_s = self._exchange.done_s
        return ExchangeResult(
            weights=(weight * world,),
            vote_requested=bool(trailer[1]),
            step_times={} if self._times is None else self._times.read(trailer[2:]),
            spans=() if done_s is None else ((self._exchange.issued_s, done_s),),
        )

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state by parameter name."""
        momentum, slots = self.anchor.views_in(self._momentum), self.anchor.slots
        return {name: {"anchor": anchor.clone(), "momentum": momentum[name].clone()} for name, _, anchor in slots}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over what `state_dict` returned."""
        momentum = self.anchor.views_in(self._momentum)
        for name, _, anchor in self.anchor.slots:
            state_checks.copy_(anchor, state[name], name, "anchor")
            state_checks.copy_(momentum[name], state[name], name, "momentum")
