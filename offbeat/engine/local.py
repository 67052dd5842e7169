"""Workers that step by themselves, and average now and then how far they came (`offbeat.sync.LocalSGD`).

    anchor      the parameters after the last average, the same on all workers
    change      anchor - parameters: what a worker's own steps added up to, with the sign of a gradient
    anchor     -= outer(mean of changes); parameters = anchor

A worker's change weighs as many batches as it saw. Gradients are averaged in the first steps, if the policy says so, by
the reducer; buffers travel with each average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine.channel import Channel
from offbeat.engine.flat import view_in
from offbeat.errors import NumericsError
from offbeat.layout import arrange
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.codec import Exchange, State
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.meter import Meter
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.waiting import Waiter
    from offbeat.fabric import Fabric, Pending
    from offbeat.layout import Bucket
    from offbeat.plan import Plan
    from offbeat.sync import OuterSGD


class Local:
    """One model's local steps and averages. Stands around a `Reducer`, which it lets work where the policy says so.

    Args:
        reducer: of the same model.
        parameters: trainable parameters by name, in order of registration.
        plan: codec and policy.
        fabric: this worker's end of the fabric; the reducer's.
        buffers: the model's, or None if they are not to be synchronised.
        waiter: the one waiting primitive.
        meter: where measurements go.
        outer: how the mean change is applied; None for a plain average.
        model: which of several prepared, from 0, for reports.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: Plan,
        fabric: Fabric,
        buffers: Buffers | None,
        waiter: Waiter,
        meter: Meter,
        outer: OuterSGD | None,
        model: int = 0,
    ) -> None:
        self.plan, self.layout = plan, reducer.layout
        self.share, self.meter = reducer.share, meter
        self.sync = True  # False inside no_sync()
        self.step = 0
        self._reducer, self._outer, self._buffers = reducer, outer, buffers
        self._waiter = waiter
        self._channel = Channel(fabric, waiter, meter, model)
        self._parameters = dict(parameters)
        buckets = arrange(parameters, bucket_bytes=plan.bucket_bytes).buckets
        self._channel.buckets = len(buckets)
        self._changes = [Change(bucket, parameters, plan.codec.init(bucket)) for bucket in buckets]
        self._anchored = False
        self._spans: list[tuple[float, float]] = []

    # -- called by the front end ---------------------------------------------------------------------------------

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self._reducer.sync = self.sync and self._mode == "gradient"
        self._reducer.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self._reducer.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step.

        Raises:
            NumericsError: if this worker's gradient holds NaN or Inf and the plan says to stop on it.
        """
        if self._mode == "gradient":
            self._reducer.on_step()
            return
        self.meter.fence_begins(self.step)
        if not self._anchored:
            self._anchored = True
            for change in self._changes:
                change.anchor_here()
        if self.share.padding or self._nonfinite():
            for parameter in self._parameters.values():
                parameter.grad = None  # so that the optimizer leaves it alone: this step does not count

    def after_step(self) -> None:
        """The optimizer has stepped: average, if it is time."""
        mode = self._mode
        if mode != "gradient":
            weight = self.share.weight
            if mode == "change":
                self._average(weight)
                self.share.exchanged()
            self.meter.fence_ends(self.step, self._spans, weight)
            self._waiter.witness.exchanged(self.share.stamp)
            self._spans = []
        self.step += 1

    def settle(self) -> None:
        """Average now, whatever the policy says; all replicas are equal afterwards. Collective."""
        if self._anchored:
            self._average(self.share.weight if self.share.drawn else 1.0)
            self.share.exchanged()

    def state_dict(self) -> dict[str, Any]:
        """Steps, and by parameter name: anchors, outer momentum, codec state."""
        own: dict[str, dict[str, torch.Tensor]] = {}
        for change in self._changes if self._anchored else ():
            own.update(change.state_dict())
        return {"step": self.step, "codec": {}, "local": own, "reducer": self._reducer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.step = int(state["step"])
        self._reducer.load_state_dict(state["reducer"])
        self._anchored = bool(state["local"])
        for change in self._changes if self._anchored else ():
            change.load_state_dict(state["local"])

    def close(self) -> None:
        """Take the hooks off."""
        self._reducer.close()

    # -- averaging -----------------------------------------------------------------------------------------------

    @property
    def _mode(self) -> str | None:
        return self.plan.sync.contributes(self.step)

    def _average(self, weight: float) -> None:
        channel = self._channel
        for change in self._changes:
            issued_s = self.meter.now_s()
            change.start(self.plan, channel, weight)
            self._spans.append((issued_s, issued_s))
        source = self.share.source
        broadcasts = [] if self._buffers is None else self._buffers.start(source)
        for index, change in enumerate(self._changes):
            change.finish(channel, self._outer)
            self._spans[index] = (self._spans[index][0], self.meter.now_s())
        if self._buffers is not None:
            for pending in broadcasts:
                channel.wait(pending, "broadcast of the buffers")
            self._buffers.finish(source)
        channel.step += 1

    def _nonfinite(self) -> bool:
        if self.plan.nonfinite == "pass":
            return False
        bad = [n for n, p in self._parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        if bad and self.plan.nonfinite == "raise":
            raise NumericsError(
                f"step {self.step}: the gradient of {', '.join(bad[:3])} holds NaN or Inf on this worker. Lower the "
                "learning rate or clip; nonfinite='skip' skips such steps, 'pass' lets them through."
            )
        return bool(bad)


class Change:
    """One bucket: anchor, change, outer momentum.

    Args:
        bucket: what lies in it.
        parameters: by name.
        state: the codec's.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter], state: State) -> None:
        self._bucket, self._state = bucket, state
        memory = torch.zeros(bucket.numel + 1, dtype=bucket.dtype, device=bucket.device)
        self._change, self._tail = memory[:-1], memory[-1:]  # the tail is the worker's weight
        self._anchor = torch.zeros_like(self._change)
        self._momentum = torch.zeros_like(self._change)
        self._slots = [
            (
                slot.name,
                parameters[slot.name],
                view_in(self._anchor, slot.offset, parameters[slot.name]),
                view_in(self._change, slot.offset, parameters[slot.name]),
                view_in(self._momentum, slot.offset, parameters[slot.name]),
            )
            for slot in bucket.slots
        ]
        self._exchange: Exchange
        self._pending: Pending

    def anchor_here(self) -> None:
        """The parameters are the same on all workers now."""
        for _, parameter, anchor, _, _ in self._slots:
            anchor.copy_(parameter.detach())

    def start(self, plan: Plan, channel: Channel, weight: float) -> None:
        """Send how far this worker came, weighed."""
        for _, parameter, anchor, change, _ in self._slots:
            torch.sub(anchor, parameter.detach(), out=change)
        if weight:
            self._change.mul_(weight / channel.world)
        else:
            self._change.zero_()
        self._exchange = plan.codec.exchange(self._change, self._state)
        payload = next(self._exchange)
        self._tail.fill_(weight)
        assert isinstance(payload, Sum)
        self._pending = channel.start(Sum(payload.tensor, self._tail.to(payload.tensor.dtype)))

    def finish(self, channel: Channel, outer: OuterSGD | None) -> None:
        """Receive the mean change and apply it; the parameters are the new anchor."""
        reply = channel.wait_for_bucket(self._pending, self._bucket)
        assert isinstance(reply, Total)
        assert reply.tail is not None
        weight = float(reply.tail[0]) / channel.world
        while True:
            try:
                payload = self._exchange.send(Total(reply.tensor, weight or 1.0))
            except StopIteration as stop:
                mean = stop.value.update
                break
            answer = channel.wait_for_bucket(channel.start(payload), self._bucket)
            assert isinstance(answer, Total)
            reply = answer
        self._apply(mean, outer)
        for _, parameter, anchor, _, _ in self._slots:
            parameter.data.copy_(anchor)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name."""
        return {
            name: {"anchor": anchor.clone(), "momentum": momentum.clone(), **self._state.get(name, {})}
            for name, _, anchor, _, momentum in self._slots
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over what `state_dict` returned."""
        for name, _, anchor, _, momentum in self._slots:
            anchor.copy_(state[name]["anchor"])
            momentum.copy_(state[name]["momentum"])
            for key, tensor in self._state.get(name, {}).items():
                tensor.copy_(state[name][key])

    def _apply(self, mean: torch.Tensor, outer: OuterSGD | None) -> None:
        if outer is None:
            self._anchor.sub_(mean)
            return
        self._momentum.mul_(outer.momentum).add_(mean)
        step = mean.add(self._momentum, alpha=outer.momentum) if outer.nesterov else self._momentum
        self._anchor.sub_(step, alpha=outer.lr)
