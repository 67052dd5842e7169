"""Averages of local steps without a server: the mean delta is summed over the fabric, and applied by every worker.

    send          each delta goes through the codec into the fabric, which carries it while the training thread computes
    receive       its mean is here
    apply         the anchor moves, and the parameters with it; see `offbeat.sync.local_sgd`

Without a delay these three follow each other. With one the last two come where the next average is sent, on all workers
behind the same step, however early the mean was there: so a run is the same each time. It is the fabric's own threads
that carry it, since what is sent is whole from the first round on; no thread of ours is needed for it.

Buffers travel with the average of the last fragment, once for all of the model.

With `ErrorReset(...)` each of these is a partial synchronization (see `offbeat.codec.error_reset`): the anchor is the
consensus, which all have in common, and the parameters keep what of them was not sent. Behind `settle` there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.codec import FULL, ErrorReset, Turn
from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.engine.bucket_exchange import BucketExchange, finish_together
from offbeat.engine.communicator import Communicator
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.nonfinite import leave_out
from offbeat.engine.state_average import average_states
from offbeat.errors import ModelError
from offbeat.float_sum import add_up
from offbeat.layout import arrange_fragments
from offbeat.payload import Gather
from offbeat.sync.outer_sgd import apply_change_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.codec import Codec, PartialSync, Purpose, State
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.reducer import Reducer
    from offbeat.engine.step_times import StepTimes
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.layout import Bucket
    from offbeat.pending import Pending
    from offbeat.sync import OuterSGD, StepsLocally


class AllReduceAverager:
    """One model's averages. An `Averager`.

    Args:
        model: whose deltas are averaged.
        reducer: of its gradients.
        buffers: the model's, or None if they are not to be synchronised.
        policy: how many steps are between two averages, of what, and how and when the mean delta is applied.
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
        self._policy = policy
        self._communicator = Communicator(model.fabric, context, model.number)
        parts = arrange_fragments(model.parameters, policy.fragments, bucket_bytes=reducer.plan.bucket_bytes)
        self._communicator.buckets = sum(map(len, parts))
        self._fragments = [
            ModelFragment([BucketDelta(bucket, model.parameters) for bucket in buckets]) for buckets in parts
        ]
        self._flight: AverageFlight | None = None
        self._has_parted = False  # from the anchor, by what was not sent

    def begin(self) -> None:
        """Anchor here."""
        for delta in self._deltas:
            delta.anchor.set_to_parameters_()

    def before_step(self) -> None:
        """Keep the parameters, if what the step changes is sent by itself."""
        codec = self._reducer.plan.codec
        if isinstance(codec, ErrorReset) and codec.sends_steps:
            for delta in self._deltas:
                delta.keep_before()

    def stepped(self) -> None:
        """Note when what is on its way is there; nobody else could compute what this worker drew."""
        if self._flight is not None:
            self._flight.poll()

    @property
    def is_even(self) -> bool:
        """Whether nothing is on its way, and no part of the model was left out by the last average."""
        return self._flight is None and not self._has_parted and not any(fragment.steps for fragment in self._fragments)

    def average(self, step: int, steps: int, part: float, *, fragment: int | None, is_last: bool) -> ExchangeResult:
        """Exchange the deltas, and apply their mean, or that of those before. Collective."""
        for one in self._fragments:
            one.count(steps, self._reducer.accounting.weight * part)
        if isinstance(codec := self._reducer.plan.codec, ErrorReset):
            return self._synchronize(codec, step, fragment)
        before = self._land()
        due = self._fragments if fragment is None else [self._fragments[fragment]]
        goes_on = fragment is not None and self._policy.delay > 0
        self._send(due, step, is_last=fragment in (None, len(self._fragments) - 1), goes_on=goes_on)
        if goes_on:
            return before if before is not None and before.weights else ExchangeResult(weights=self._given)
        result = self._land()
        return (result or ExchangeResult()).after(before)

    def _synchronize(self, codec: ErrorReset, step: int, fragment: int | None) -> ExchangeResult:
        """Make the partial synchronizations behind a step, one after the other, or a full one.

        Args:
            fragment: None to have all replicas equal behind it.
        """
        syncs = (FULL,) if fragment is None else codec.behind(step)
        result: ExchangeResult | None = None
        for sync in syncs:
            if sync is FULL or (codec.step is not None and sync.of == "residual"):
                # It is of all steps since the last reset, each worker's alike, and not of the last one.
                for one in self._fragments:
                    one.begin_anew()
                    one.count(1, 1.0)
            self._send(self._fragments, step, is_last=sync.of == "residual", goes_on=False, sync=sync)
            result = (self._land() or ExchangeResult()).after(result)
        self._has_parted = syncs != (FULL,)
        return result or ExchangeResult()

    def _send(
        self,
        due: Sequence[ModelFragment],
        step: int,
        *,
        is_last: bool,
        goes_on: bool,
        sync: PartialSync | None = None,
    ) -> None:
        """Send how far this worker came.

        Args:
            is_last: whether the buffers go along.
            goes_on: whether this worker makes steps while it travels.
            sync: what is sent of it; None for all, by the codec of the plan.
        """
        accounting, plan = self._reducer.accounting, self._reducer.plan
        if tellers := [delta for fragment in due for delta in fragment.deltas]:
            tellers[-1].make_room(self._reducer.times, self._policy.interval)
        self._encode(due, step, sync)
        bad = [] if plan.nonfinite == "pass" else [n for one in due for delta in one.deltas for n in delta.nonfinite()]
        if leave_out(bad, plan.nonfinite, what="change", step=step, metrics=self._context.metrics):
            for fragment in due:
                fragment.leave_out()
            self._encode(due, step, sync)
            for fragment in due if sync is not None else ():
                for delta in fragment.deltas:
                    delta.give_up()
        for fragment in due:
            for delta in fragment.deltas:
                if goes_on:
                    delta.keep_own(is_counted=fragment.weight > 0)
                delta.send(fragment.weight, requests_vote=accounting.requests_vote)
        buffers = self._buffers if is_last else None
        self._flight = AverageFlight(due, self._communicator, buffers, accounting.source)
        for fragment in due:
            fragment.begin_anew()

    @property
    def _given(self) -> tuple[float, ...]:
        """Return this worker's weight in the average that is on its way."""
        return () if self._flight is None else self._flight.given

    def _land(self) -> ExchangeResult | None:
        """Apply what is on its way, if anything is; what was found out then."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        result = flight.receive()
        flight.apply(self._policy.outer, self._buffers)
        return result

    def end(self, *, evens_optimizers: bool) -> None:
        """Average what the optimizers have gathered, which would take replicas apart. Collective."""
        if evens_optimizers:
            one, control = self._model, self._context.control
            average_states(one.optimizer, one.parameters, self._communicator, control)

    def leave(self) -> None:
        """Have what was sent, which the others wait for: who leaves says so to them."""
        if self._flight is not None:
            self._flight.receive()

    def refreshed(self, steps: int) -> None:
        """Do nothing: there is no server."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Anchors, outer momentum and what is on its way, by parameter name; that of buffers by theirs.

        What is on its way is waited for, so that a run that is resumed applies it where this one does.
        """
        own: dict[str, dict[str, torch.Tensor]] = {}
        if self._flight is not None:
            self._flight.receive()
            own.update({name: {"arrived": tensor.clone()} for name, tensor in self._flight.arrived.items()})
        for fragment in self._fragments:
            for delta in fragment.deltas:
                own.update(delta.state_dict(fragment.since if len(self._fragments) > 1 else None))
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], gradients: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, and have the reducer take over its own."""
        self._reducer.load_state_dict(gradients)
        if self._flight is not None:  # all have sent it, and none is to find it in the place of another
            self._flight.receive()
        self._flight = None
        sent = [fragment for fragment in self._fragments if fragment.load_state_dict(state)]
        if sent:
            arrived = {name: one["arrived"] for name, one in state.items() if "arrived" in one}
            self._flight = AverageFlight(sent, self._communicator, None, 0, received=True)
            for name in arrived:
                if self._buffers is not None and (memory := self._buffers.like(name)) is not None:
                    state_checks.copy_(memory, state[name], name, "arrived")
                    self._flight.arrived[name] = memory

    @property
    def common(self) -> dict[str, torch.Tensor]:
        """The anchors, by parameter name: the parameters after the last average that was applied."""
        return {name: anchor for delta in self._deltas for name, _, anchor in delta.anchor.slots}

    @property
    def _deltas(self) -> list[BucketDelta]:
        return [delta for fragment in self._fragments for delta in fragment.deltas]

    def _encode(self, due: Sequence[ModelFragment], step: int, sync: PartialSync | None) -> None:
        codec, kept = self._reducer.plan.codec, self._model.codec_state
        purpose: Purpose = "change"
        if sync is not None:
            codec, purpose = sync.codec, sync.purpose
        for fragment in due:
            for delta in fragment.deltas:
                state = kept.of(codec, delta.bucket, purpose)
                turn = Turn(
                    delta.bucket, step, self._communicator.rank, self._communicator.world, self._context.seed, purpose
                )
                scale = fragment.weight / self._communicator.world
                delta.encode(scale, codec, state, turn, self._communicator, sync)


class ModelFragment:
    """A part of the model that is averaged at once, and what this worker's delta of it weighs.

    Args:
        deltas: of its buckets; none if there are more fragments than parameters.
    """

    def __init__(self, deltas: Sequence[BucketDelta]) -> None:
        self.deltas = list(deltas)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Count from here on."""
        self._counted: list[tuple[int, float]] = []

    def count(self, steps: int, weight: float) -> None:
        """Count so many steps of this worker's own, and what they weigh on average."""
        self._counted.append((steps, weight))

    def leave_out(self) -> None:
        """Have all that was counted weigh nothing."""
        self._counted = [(steps, 0.0) for steps, _ in self._counted]

    @property
    def steps(self) -> int:
        """Steps of this worker's own since the last average of this part."""
        return sum(steps for steps, _ in self._counted)

    @property
    def weight(self) -> float:
        """The mean weight of these steps."""
        if len(self._counted) == 1:
            return self._counted[0][1]
        return add_up(steps * weight for steps, weight in self._counted) / max(1, self.steps)

    @property
    def since(self) -> torch.Tensor:
        """The same as [2] float64, for a checkpoint."""
        return torch.tensor([self.steps, self.weight], dtype=torch.float64)

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Take over what the deltas' `state_dict` returned; returns whether an average of it is on its way.

        Raises:
            ModelError: if it is damaged, of another model, or of other fragments.
        """
        sent = [delta.load_state_dict(state) for delta in self.deltas]
        self.begin_anew()
        name = self.deltas[0].anchor.slots[0][0] if self.deltas else ""
        if name and "since" in state[name]:
            since = torch.zeros(2, dtype=torch.float64)
            state_checks.copy_(since, state[name], name, "since")
            steps, weight = since.tolist()
            whole = state_checks.whole(int(steps), "steps since the last average")
            self.count(whole, state_checks.number(weight, "weight of these steps"))
        return any(sent)


class AverageFlight:
    """An average that was sent. Call order: `poll` any number of times, `receive`, again or not, `apply`.

    Args:
        fragments: of which it is; their weights were sent.
        communicator: to the other workers.
        buffers: that travel along; None for none.
        source: rank whose buffers count.
        received: whether it is here already, from a checkpoint.

    Attributes:
        given: this worker's weight in it; nothing if its fragments have different weights.
        arrived: what other buffers are to be, by name, once it was received.
    """

    def __init__(
        self,
        fragments: Sequence[ModelFragment],
        communicator: Communicator,
        buffers: Buffers | None,
        source: int,
        *,
        received: bool = False,
    ) -> None:
        self._deltas = [delta for fragment in fragments for delta in fragment.deltas]
        weights = {fragment.weight for fragment in fragments}
        self.given = tuple(weights) if len(weights) == 1 else ()
        self._communicator, self._buffers, self._source = communicator, buffers, source
        self._broadcasts: list[Pending] = [] if buffers is None else buffers.start(source)
        self._result: ExchangeResult | None = ExchangeResult() if received else None
        self.arrived: dict[str, torch.Tensor] = {}

    def poll(self) -> None:
        """Note of each bucket when it is there."""
        if self._result is None:
            for delta in self._deltas:
                delta.poll()

    def receive(self) -> ExchangeResult:
        """Wait for the mean; what was found out along with it. Not collective: all have sent theirs, or will."""
        if self._result is not None:
            return self._result
        communicator = self._communicator
        found = [delta.receive(communicator.world) for delta in self._deltas]
        finish_together([delta.exchange for delta in self._deltas])
        for pending in self._broadcasts:
            communicator.wait(pending, "broadcast of the buffers")
        if self._buffers is not None:
            self.arrived = self._buffers.take(self._source)
        communicator.step += 1
        self._result = ExchangeResult(
            weights=(*self.given, *dict.fromkeys(one.weights[0] for one in found)) if self.given else (),
            vote_requested=any(one.vote_requested for one in found),
            step_times=next((one.step_times for one in found if one.step_times), {}),
            spans=tuple(span for one in found for span in one.spans),
        )
        return self._result

    def apply(self, outer: OuterSGD | None, buffers: Buffers | None) -> None:
        """Move the anchor by what was received, and the parameters with it."""
        for delta in self._deltas:
            delta.apply(outer)
        if buffers is not None:
            buffers.set_(self.arrived)


class BucketDelta:
    """One bucket's anchor, delta and outer momentum.

    Args:
        bucket: what lies in it.
        parameters: by name.

    Attributes:
        exchange: of what was encoded last.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.bucket = bucket
        self.anchor = Anchor(bucket, parameters)
        self._times: StepTimes | None = None
        self._place(0)
        self._momentum = torch.zeros_like(self._delta)
        self._sent: torch.Tensor | None = None  # [D] the parameters where the delta was sent; None if none is
        self._weight = 0.0  # that is in the mean
        self._before: torch.Tensor | None = None  # [D] the parameters before the last step, if that is sent by itself
        self._scale = 0.0  # by which what is on its way was multiplied
        self._sync: PartialSync | None = None  # that it is of, unless nothing of it is kept here
        self.exchange: BucketExchange

    def keep_before(self) -> None:
        """Keep the parameters as they are before a step whose change is sent by itself."""
        if self._before is None:
            self._before = torch.empty_like(self._delta)
        self.anchor.read_parameters(self._before)

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

    def encode(
        self,
        scale: float,
        codec: Codec,
        state: State,
        turn: Turn,
        communicator: Communicator,
        sync: PartialSync | None = None,
    ) -> None:
        """Make what is to be sent of how far this worker came; a second time instead of the first.

        Args:
            scale: by which that is multiplied; 0 for nothing.
            turn: which exchange it is.
            sync: a partial synchronization; None if the parameters are to be where the anchor is.
        """
        self._scale, self._sync = scale, sync
        if not scale:
            self._delta.zero_()
        elif sync is not None and sync.of == "step":
            assert self._before is not None
            self.anchor.read_parameters(self._delta)
            torch.sub(self._before, self._delta, out=self._delta).mul_(scale)
        else:
            self.anchor.delta(self._delta)
            self._delta.mul_(scale)
        self.exchange = BucketExchange(
            turn, self._delta, codec, state, communicator, keep_sent=sync is not None and sync is not FULL
        )

    def give_up(self) -> None:
        """Go on from the anchor once the mean is here: nothing is kept of what this worker's parameters are ahead."""
        self._sync = None

    def nonfinite(self) -> list[str]:
        """Names of the parameters in which there is NaN or Inf, as it is sent."""
        payload = self.exchange.payload
        tensors = payload.tensors if isinstance(payload, Gather) else (payload.tensor,)
        if tensors[0].shape != self._delta.shape:  # it may be in what is not sent
            tensors = (*tensors, self._delta)
        if all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            return []
        whole = tensors[0] if tensors[0].shape == self._delta.shape else self._delta
        views = self.anchor.views_in(whole)
        return [name for name, view in views.items() if not bool(torch.isfinite(view).all())] or list(views)

    def keep_own(self, *, is_counted: bool) -> None:
        """Note where the parameters are: what they move from here on is kept when the mean is applied.

        Args:
            is_counted: whether what this worker did is in the mean; else it is given up.
        """
        if not is_counted:
            self.anchor.restore_parameters_()
        self._sent = torch.empty_like(self._delta)
        self.anchor.read_parameters(self._sent)

    def send(self, weight: float, *, requests_vote: bool) -> None:
        """Send it."""
        self._trailer.zero_()
        self._trailer[0], self._trailer[1] = weight, float(requests_vote)
        if self._times is not None:
            self._times.write(self._trailer[2:])
        self.exchange.issue(self._trailer)

    def poll(self) -> None:
        """Note when it is there."""
        self.exchange.poll()

    def receive(self, world: int) -> ExchangeResult:
        """Receive the first round of the mean delta. `weights` of what is returned is the sum alone."""
        trailer, _ = self.exchange.wait()
        self._weight = float(trailer[0]) / world
        self.exchange.begin_to_finish(self._weight or 1.0)
        done_s = self.exchange.done_s
        return ExchangeResult(
            weights=(self._weight * world,),
            vote_requested=bool(trailer[1]),
            step_times={} if self._times is None else self._times.read(trailer[2:]),
            spans=() if done_s is None else ((self.exchange.issued_s, done_s),),
        )

    def apply(self, outer: OuterSGD | None) -> None:
        """Move the anchor by the mean; the parameters are there, and what they have moved since it was sent."""
        if self._sync is not None and (sent := self.exchange.sent) is not None:
            # As if this worker had been where the others have heard that it was.
            self._sent = torch.sub(self.anchor.values, sent.div_(self._scale or 1.0), out=sent)
        if self._weight:  # else nobody has moved, and the outer momentum must not move them
            apply_change_(self.anchor.values, self._delta, outer=outer, momentum=self._momentum)
        if self._sent is None:
            self.anchor.restore_parameters_()
        else:
            self.anchor.lead_parameters_(self._sent)
        self._sent = None

    def state_dict(self, since: torch.Tensor | None) -> dict[str, dict[str, torch.Tensor]]:
        """The state by parameter name.

        Args:
            since: of its fragment; None if that is the whole model, and so counted elsewhere.
        """
        kept = {"momentum": self._momentum}
        if self._sent is not None:
            kept |= {"sent": self._sent} | ({"mean": self._delta} if self._weight else {})
        views = {key: self.anchor.views_in(values) for key, values in kept.items()}
        own = {
            name: {"anchor": anchor.clone(), **{key: view[name].clone() for key, view in views.items()}}
            for name, _, anchor in self.anchor.slots
        }
        if since is not None:
            own = {name: {**one, "since": since.clone()} for name, one in own.items()}
        return own

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Take over what `state_dict` returned; returns whether an average is on its way.

        Raises:
            ModelError: if it is damaged, of another model, or of other fragments.
        """
        for name, _, anchor in self.anchor.slots:
            state_checks.copy_(anchor, state[name], name, "anchor")
        self._load(state, "momentum", self._momentum)
        found = {key: [key in state[name] for name, _, _ in self.anchor.slots] for key in ("sent", "mean")}
        if any(any(there) != all(there) for there in found.values()) or any(found["mean"]) > any(found["sent"]):
            raise ModelError(
                f"Cannot load this state: of {self.bucket.label} a part is on its way to an average, and a part is "
                "not. Resume with the plan that it was written with, or save behind run.settle()."
            )
        self._sent, self._weight = None, float(any(found["mean"]))
        if any(found["sent"]):
            self._sent = torch.empty_like(self._delta)
            self._load(state, "sent", self._sent)
        if any(found["mean"]):
            self._load(state, "mean", self._delta)
        return self._sent is not None

    def _load(self, state: Mapping[str, Mapping[str, torch.Tensor]], key: str, values: torch.Tensor) -> None:
        views = self.anchor.views_in(values)
        for name, _, _ in self.anchor.slots:
            state_checks.copy_(views[name], state[name], name, key)
