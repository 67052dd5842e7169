"""Averages of local steps without a server: the mean change is summed over the fabric, and applied by every worker.

Buffers travel with each average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.engine.communicator import Communicator
from offbeat.engine.nonfinite import leave_out
from offbeat.layout import arrange
from offbeat.payload import Sum, Total
from offbeat.sync.local_sgd import apply_change_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.codec import Exchange, State
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.step_times import StepTimes
    from offbeat.fabric import Fabric
    from offbeat.layout import Bucket
    from offbeat.pending import Pending
    from offbeat.plan import Plan
    from offbeat.sync import LocalSGD, OuterSGD


class AllReduceAverager:
    """One model's averages. An `Averager`.

    Args:
        reducer: of the same model; share and meter are its.
        parameters: trainable parameters by name, in order of registration.
        fabric: this worker's end of the fabric; the reducer's.
        buffers: the model's, or None if they are not to be synchronised.
        waiter: the one waiting primitive.
        policy: how many steps are between two averages, and how the mean change is applied.
        model: which of several prepared, from 0, for reports.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        parameters: Mapping[str, torch.nn.Parameter],
        fabric: Fabric,
        buffers: Buffers | None,
        waiter: BlockingWait,
        policy: LocalSGD,
        model: int = 0,
    ) -> None:
        self._reducer = reducer
        self._plan, self._share, self._meter = reducer.plan, reducer.share, reducer.meter
        self._outer, self._every, self._buffers = policy.outer, policy.every, buffers
        self._channel = Communicator(fabric, waiter, reducer.meter, model)
        buckets = arrange(parameters, bucket_bytes=self._plan.bucket_bytes).buckets
        self._channel.buckets = len(buckets)
        self._changes = [BucketDelta(bucket, parameters, self._plan.codec.init(bucket)) for bucket in buckets]
        self.make_room()

    def make_room(self) -> None:
        """For what is told along with a change now: how long all compute. Between averages, alike on all."""
        self._changes[-1].make_room(self._reducer.times, self._every)

    def begin(self) -> None:
        """Anchor here."""
        for change in self._changes:
            change.anchor.here()

    def stepped(self) -> None:
        """Nothing to do: nobody else could compute what this worker drew."""

    def average(self, step: int, steps: int, part: float) -> list[tuple[float, float]]:
        """Exchange the changes, and apply their mean; when each bucket was issued and done. Collective."""
        channel, share = self._channel, self._share
        weight = share.weight * part
        bad = [name for change in self._changes for name in change.make(self._plan, weight, channel.world)]
        if leave_out(bad, self._plan.nonfinite, what="change", step=step, meter=self._meter):
            weight = 0.0
            for change in self._changes:
                change.make(self._plan, weight, channel.world)
        issued_s = []
        for change in self._changes:
            issued_s.append(self._meter.now_s())
            change.send(channel, weight, calls=self._reducer.calls)
        source = share.source
        broadcasts = [] if self._buffers is None else self._buffers.start(source)
        done_s = []
        sums = set()
        for change in self._changes:
            total, called = change.finish(channel, self._outer)
            self._reducer.called = called or self._reducer.called
            sums.add(total)
            done_s.append(self._meter.now_s())
        self._reducer.channel.weights = (weight, *sums)
        if self._buffers is not None:
            for pending in broadcasts:
                channel.wait(pending, "broadcast of the buffers")
            self._buffers.finish(source)
        channel.step += 1
        return list(zip(issued_s, done_s, strict=True))

    def refreshed(self, steps: int) -> None:
        """Nothing to do: there is no server."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Anchors, outer momentum and codec state, by parameter name."""
        own: dict[str, dict[str, torch.Tensor]] = {}
        for change in self._changes:
            own.update(change.state_dict())
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], exchanger: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, and have the reducer take over its own."""
        self._reducer.load_state_dict(exchanger)
        for change in self._changes:
            change.load_state_dict(state)


class BucketDelta:
    """One bucket: anchor, change, outer momentum.

    Args:
        bucket: what lies in it.
        parameters: by name.
        state: the codec's.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter], state: State) -> None:
        self._bucket, self._state = bucket, state
        self.anchor = Anchor(bucket, parameters)
        self._times: StepTimes | None = None
        self._place(0)
        self._momentum = torch.zeros_like(self._change)
        self._exchange: Exchange
        self._payload: Sum
        self._pending: Pending

    def make_room(self, times: StepTimes, every: int) -> None:
        """For these, in averages of so many steps."""
        room = times.room(every)
        self._times = times if room else None
        self._place(room)

    def _place(self, room: int) -> None:
        bucket, end = self._bucket, self._bucket.numel
        memory = torch.zeros(end + 2 + room, dtype=bucket.dtype, device=bucket.device)
        # The worker's weight, and whether it wants to confer; times, if any are told.
        self._change, self._tail = memory[:end], memory[end:]

    def make(self, plan: Plan, weight: float, world: int) -> list[str]:
        """What is to be sent: how far this worker came, weighed; parameters in it with NaN or Inf, if that matters."""
        if weight:
            self.anchor.change(self._change)
            self._change.mul_(weight / world)
        else:
            self._change.zero_()
        self._exchange = plan.codec.exchange(self._change, self._state)
        payload = next(self._exchange)
        assert isinstance(payload, Sum)
        self._payload = payload
        if plan.nonfinite == "pass" or bool(torch.isfinite(payload.tensor).all()):
            return []
        views = self.anchor.views_in(payload.tensor)
        return [name for name, view in views.items() if not bool(torch.isfinite(view).all())]

    def send(self, channel: Communicator, weight: float, *, calls: bool) -> None:
        """Send it."""
        self._tail.zero_()
        self._tail[0], self._tail[1] = weight, float(calls)
        if self._times is not None:
            self._times.write(self._tail[2:])
        self._pending = channel.start(Sum(self._payload.tensor, self._tail.to(self._payload.tensor.dtype)))

    def finish(self, channel: Communicator, outer: OuterSGD | None) -> tuple[float, bool]:
        """Receive the mean change and apply it; the parameters are the new anchor.

        Returns:
            The sum of the weights, and whether a worker wants to confer.
        """
        reply = channel.wait_for_bucket(self._pending, self._bucket)
        assert isinstance(reply, Total)
        assert reply.tail is not None
        weight, called = float(reply.tail[0]) / channel.world, bool(reply.tail[1])
        if self._times is not None:
            self._times.read(reply.tail[2:])
        while True:
            try:
                payload = self._exchange.send(Total(reply.tensor, weight or 1.0))
            except StopIteration as stop:
                mean = stop.value.update
                break
            answer = channel.wait_for_bucket(channel.start(payload), self._bucket)
            assert isinstance(answer, Total)
            reply = answer
        if weight:  # else nobody has moved, and the outer momentum must not move them
            apply_change_(self.anchor.values, mean, outer=outer, momentum=self._momentum)
        self.anchor.return_()
        return weight * channel.world, called

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name."""
        momentum = self.anchor.views_in(self._momentum)
        return {
            name: {"anchor": anchor.clone(), "momentum": momentum[name].clone(), **self._state.get(name, {})}
            for name, _, anchor in self.anchor.slots
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over what `state_dict` returned."""
        momentum = self.anchor.views_in(self._momentum)
        for name, _, anchor in self.anchor.slots:
            state_checks.copy_(anchor, state[name], name, "anchor")
            state_checks.copy_(momentum[name], state[name], name, "momentum")
            for key, tensor in self._state.get(name, {}).items():
                state_checks.copy_(tensor, state[name], name, key)
