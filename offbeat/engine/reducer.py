"""From autograd into the buckets, through the codec and the fabric, and back.

Every parameter has a hook that runs when its gradient is complete. When all of a bucket's have, the bucket is packed
and issued while backward goes on. A callback at the end of backward, the fence, issues what is left (parameters that
got no gradient contribute zeros), waits in order, and leaves the mean in `.grad`.

Rules:

* **Order.** Bucket k is issued before bucket k+1 on every rank, whatever arrives first; later rounds of an exchange,
  the sparse gradients and the buffers follow in the fence, in a fixed order. Nothing depends on arrival.
* **Unused parameters** need no graph walk and no flag. Each bucket's tail says who used what; a parameter that nobody
  used keeps its `.grad` as it was (usually None), so the optimizer skips it everywhere.
* **The first backward does not overlap.** It learns how often each parameter's hook runs (checkpointing can make it
  several times) and in which order gradients arrive; buckets are then arranged anew in rank 0's order.
* **A rank whose backward touched no parameter** takes part at `optimizer.step()`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import sparse
from offbeat.engine.control import odd_ones
from offbeat.engine.flat import Entry, Flat
from offbeat.engine.waiting import Awaited
from offbeat.errors import DisagreementError, ModelError, NumericsError
from offbeat.layout import Layout, arrange
from offbeat.payload import Gather, Reply, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.codec import Codec, Exchange, Exchanged, State
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.control import Control
    from offbeat.engine.meter import Meter
    from offbeat.engine.waiting import Waiter
    from offbeat.fabric import Fabric, Pending
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")


class Flight:
    """One bucket's exchange under way."""

    __slots__ = ("done_s", "flat", "generator", "issued_s", "pending", "tail_pending")

    def __init__(
        self, flat: Flat, generator: Exchange, pending: Pending, tail_pending: Pending | None, issued_s: float
    ) -> None:
        self.flat = flat
        self.generator = generator
        self.pending = pending
        self.tail_pending = tail_pending
        self.issued_s = issued_s
        self.done_s: float | None = None


class Reducer:
    """Keeps the gradients of one model equal on all workers.

    Args:
        parameters: trainable parameters by name, in order of registration.
        layout: where their gradients lie.
        plan: codec and policies.
        fabric: this worker's end of the fabric.
        control: this worker's end of the control group.
        buffers: the model's buffers, or None if they are not to be synchronised.
        waiter: the one waiting primitive.
        meter: where measurements go.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        plan: Plan,
        fabric: Fabric,
        control: Control,
        buffers: Buffers | None,
        waiter: Waiter,
        meter: Meter,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.step = 0  # exchanges so far
        self.stamp = 0  # batches drawn so far, if the loader was prepared
        self._batches = self._batches_with_data = 0  # drawn since the last exchange
        self.buffer_source = 0  # rank whose buffers count
        self.sync = True  # False inside no_sync()
        self.padding = False  # the batch at hand only keeps the loop going
        self._codec: Codec = plan.codec
        self._check_finite = plan.nonfinite != "pass"
        self._fabric, self._control = fabric, control
        self._buffers = buffers
        self._waiter = waiter
        self.meter = meter
        self._parameters = dict(parameters)
        self._entries = {name: Entry(name, p) for name, p in parameters.items()}
        self._states: State = {}
        self._flats: list[Flat] = []
        self._build(layout)
        self._flights: list[Flight] = []
        self._open = False  # inside a backward that communicates
        self._closed = False
        self._any_fired = False
        self._learning = True
        self._arrivals: list[str] = []
        self._forward_due = False  # a forward pass that should lead to an exchange has run
        self._exchanged = False  # an exchange happened since the last optimizer step
        self._told_unused = self._told_graph = False
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(functools.partial(self._on_grad, entry))
            for entry in self._entries.values()
        ]

    # -- called by the front end ---------------------------------------------------------------------------------

    def on_batch(self, *, real: bool, source: int) -> None:
        """The prepared loader gave out a batch.

        Args:
            real: False if it is a repetition that only keeps the loop going; it must not count.
            source: lowest rank that has data, whose buffers count.
        """
        self.stamp += 1
        self._batches += 1
        self._batches_with_data += real
        self.padding = not real
        self.buffer_source = source

    @property
    def weight(self) -> float:
        """This worker's weight in the next exchange: the share of its batches since the last one that are real."""
        return self._batches_with_data / self._batches if self._batches else 1.0

    def on_forward(self) -> None:
        """A forward pass begins whose backward will communicate.

        Raises:
            ModelError: if the last backward was cut short by an exception after it had begun to communicate.
        """
        if self._open and torch._C._current_graph_task_id() == -1:
            raise ModelError(
                f"Cannot go on after step {self.step}: its backward was cut short by an exception while other workers "
                "were already receiving its gradients. Let the exception end this worker, or avoid it in backward."
            )
        self._forward_due = True

    def on_output_grad(self) -> None:
        """The gradient of the model's output is known: the outermost backward has begun.

        Raises:
            ModelError: if the run is closed and there were other workers: the replicas would silently drift apart.
        """
        if self._closed and self._fabric.world > 1:
            raise ModelError(
                "Cannot train this replica any further: its run is closed, and the other workers no longer take part. "
                "Close the run after the last step, or go on alone with the replica's .module."
            )
        if self.sync and not self._open:
            self._begin()

    def on_step(self) -> None:
        """The optimizer is about to step: take part now if this rank's backward reached no parameter."""
        if self.sync and self._forward_due and not self._exchanged:
            self._open = self._any_fired = True
            self._reset_counts()
            self._fence()
        self._exchanged = False

    def state_dict(self) -> dict[str, Any]:
        """Step count and codec state, by parameter name."""
        return {"step": self.step, "codec": {name: dict(tensors) for name, tensors in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.step = int(state["step"])
        for name, tensors in state["codec"].items():
            for key, tensor in tensors.items():
                self._states[name][key].copy_(tensor)

    def close(self) -> None:
        """Take the hooks off; `.grad` stays."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- during backward -----------------------------------------------------------------------------------------

    def _on_grad(self, entry: Entry, parameter: torch.Tensor) -> None:
        entry.used = True
        if not self.sync:
            return
        if not self._open:
            self._begin()
        self._any_fired = True
        entry.fired += 1
        if not self._told_graph and parameter.grad is not None and parameter.grad.requires_grad:
            self._told_graph = True
            _log.warning(
                "backward(create_graph=True): the averaged gradients carry no graph, as with DistributedDataParallel. "
                "For second derivatives call torch.autograd.grad(..., create_graph=True) inside the loss."
            )
        flat = entry.flat
        if self._learning:
            self._arrivals.append(entry.name)
        elif flat is None:
            return
        elif entry.fired == entry.expected:
            flat.missing -= 1
            if flat.missing == 0:
                self._issue_complete()
        elif entry.fired > entry.expected:
            self._on_late(entry, flat)

    def _on_late(self, entry: Entry, flat: Flat) -> None:
        expected, entry.expected = entry.expected, entry.fired
        if flat.bucket.index < len(self._flights):
            raise ModelError(
                f"Cannot add another gradient to {entry.name}: its bucket was sent after {expected}, as in earlier "
                f"steps, and now a further one came in the same backward. Use the model in the same way in each step, "
                "or wrap the steps that differ in run.no_sync()."
            )

    def _begin(self) -> None:
        self._open = True
        self._any_fired = False
        self._reset_counts()
        # Runs when the outermost backward ends, after every gradient is complete.
        torch.autograd.Variable._execution_engine.queue_callback(self._fence)

    def _reset_counts(self) -> None:
        for flat in self._flats:
            flat.missing = len(flat.entries)
        for entry in self._entries.values():
            entry.fired = 0
        self._flights = []

    def _issue_complete(self) -> None:
        """Issue, in order, every bucket whose gradients are all there."""
        while len(self._flights) < len(self._flats) and self._flats[len(self._flights)].missing == 0:
            self._issue(self._flats[len(self._flights)])

    def _issue(self, flat: Flat) -> None:
        self._note_done()
        weight = self.weight
        flat.pack(weight=weight, check_finite=self._check_finite)
        state = {slot.name: self._states[slot.name] for slot in flat.bucket.slots}
        generator = self._codec.exchange(flat.grad, state)
        payload = next(generator)
        tail_pending = None
        issued_s = self.meter.now_s()
        if isinstance(payload, Sum):
            flat.write_tail(weight=weight, stamp=self.stamp, dtype=payload.tensor.dtype)
            pending = self._start(Sum(payload.tensor, flat.tail))
        else:
            flat.write_tail(weight=weight, stamp=self.stamp, dtype=flat.tail.dtype)
            pending = self._start(payload)
            tail_pending = self._start(Sum(flat.tail))
        self._flights.append(Flight(flat, generator, pending, tail_pending, issued_s))

    def _start(self, payload: Sum | Gather) -> Pending:
        pending = self._fabric.start(payload)
        self.meter.sent_bytes += pending.sent_bytes
        return pending

    def _note_done(self) -> None:
        for flight in self._flights:
            if flight.done_s is None and flight.pending.done():
                flight.done_s = self.meter.now_s()

    # -- at its end ----------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        if not self._any_fired:
            self._open = False  # such as autograd.grad() with respect to an input
            return
        self.meter.fence_begins(self.step)
        for flat in self._flats[len(self._flights) :]:
            self._issue(flat)
        dangling = [
            self._start(sparse.payload_of(e, weight=self.weight, world=self._fabric.world)) for e in self._sparse
        ]
        source = self.buffer_source
        broadcasts = [] if self._buffers is None else self._buffers.start(source)
        bad = [flight.flat for flight in self._flights if self._finish(flight)]
        for entry, pending in zip(self._sparse, dangling, strict=True):
            reply = self._wait(pending, "exchange of the sparse gradient", entry.name)
            assert isinstance(reply, list)
            sparse.combine(entry, reply)
        if self._buffers is not None:
            for pending in broadcasts:
                self._wait(pending, "broadcast of the buffers", "")
            self._buffers.finish(source)
        self._settle(bad)

    def _finish(self, flight: Flight) -> bool:
        """Complete one bucket's exchange; whether NaN or Inf was found in it, in a contribution or in the mean."""
        flat, stamp = flight.flat, self.stamp
        reply = self._wait(flight.pending, "all-reduce", flat.bucket.label, flat.bucket.index)
        if flight.done_s is None:
            flight.done_s = self.meter.now_s()
        if flight.tail_pending is not None:
            total = self._wait(flight.tail_pending, "all-reduce", flat.bucket.label, flat.bucket.index)
        else:
            total = reply
        assert isinstance(total, Total)
        tail = flat.read_tail(total.tensor if total.tail is None else total.tail, stamp)
        if not tail.in_step:
            self._disagree()
        weight = tail.weight or 1.0  # nobody had data: the sum is zero, and so is the mean
        exchanged = self._run_rounds(flight, reply, weight)
        if exchanged.update.data_ptr() != flat.grad.data_ptr():
            flat.grad.copy_(exchanged.update)
        flat.settle(tail.used_elsewhere)
        # A sum can overflow where no contribution did; the mean has the same bits on every rank, so all find the same.
        return tail.nonfinite or (self._check_finite and not bool(torch.isfinite(flat.grad).all()))

    def _run_rounds(self, flight: Flight, reply: Reply, weight: float) -> Exchanged:
        while True:
            if isinstance(reply, Total):
                reply = Total(reply.tensor, weight)
            try:
                payload = flight.generator.send(reply)
            except StopIteration as stop:
                exchanged: Exchanged = stop.value
                return exchanged
            bucket = flight.flat.bucket
            reply = self._wait(self._start(payload), "all-reduce", bucket.label, bucket.index)

    def _wait(self, pending: Pending, operation: str, label: str, bucket: int = -1) -> Reply:
        awaited = Awaited(operation, self.step, bucket, len(self._flats), label)
        return self._waiter.wait(pending, awaited)

    def _settle(self, bad: list[Flat]) -> None:
        if self._learning:
            self._learn()
        spans = [(f.issued_s, f.done_s) for f in self._flights if f.done_s is not None]
        step, self.step = self.step, self.step + 1
        weight = self.weight
        self._batches = self._batches_with_data = 0
        self.meter.fence_ends(step, spans, weight)
        self._waiter.witness.exchanged(self.stamp)
        unused = [entry.name for entry in self._entries.values() if not entry.used]
        for entry in self._entries.values():
            entry.used = False
        self._open = self._any_fired = self._forward_due = False
        self._exchanged = True
        if unused and not self._told_unused and weight:
            self._told_unused = True
            self._tell(step, "unused", f"step {step}: no gradient for {_some(unused)}; they contribute zeros.")
        if bad:
            self._on_nonfinite(step, bad)

    def _learn(self) -> None:
        """After the first exchange: how often each hook runs, and the order in which gradients arrive."""
        self._learning = False
        for entry in self._entries.values():
            entry.expected = max(1, entry.fired)
        # The last arrival counts: only then is the gradient complete.
        last = {name: i for i, name in enumerate(self._arrivals)}
        registered = list(self._parameters)
        rest = [name for name in reversed(registered) if name not in last]
        order = sorted(last, key=last.__getitem__) + rest
        index = {name: i for i, name in enumerate(registered)}
        device = next(iter(self._parameters.values())).device
        ranks = torch.tensor([index[name] for name in order], dtype=torch.int64, device=device)
        self._wait(self._fabric.broadcast(ranks, 0), "broadcast of the bucket order", "")
        order = [registered[i] for i in ranks.tolist()]
        self._arrivals = []
        if order != [*self.layout.names, *self.layout.sparse]:
            self._build(
                arrange(
                    self._parameters,
                    bucket_bytes=self.plan.bucket_bytes,
                    sparse=self.layout.sparse,
                    order=order,
                    version=self.layout.version + 1,
                )
            )

    def _build(self, layout: Layout) -> None:
        """Give every gradient its place. Gradients in older buckets stay where they are until the next backward."""
        self.layout = layout
        self._flats = []
        for bucket in layout.buckets:
            entries = [self._entries[slot.name] for slot in bucket.slots]
            self._flats.append(Flat(bucket, entries, self._fabric.world))
            fresh = self._codec.init(bucket)
            for slot in bucket.slots:
                self._states.setdefault(slot.name, fresh.get(slot.name, {}))
        self._sparse = [self._entries[name] for name in layout.sparse]

    def _disagree(self) -> None:
        texts = self._control.texts("the comparison of batches", str(self.stamp))
        odd, usual = odd_ones(texts)
        where = ", ".join(f"rank {rank} is at batch {texts[rank]}" for rank in odd)
        raise DisagreementError(
            f"The workers disagree about the step: at exchange {self.step} {where}, the others at batch "
            f"{texts[usual]}. A worker skipped a step, or took one more; let every worker call backward once per batch."
        )

    def _on_nonfinite(self, step: int, bad: list[Flat]) -> None:
        mine = _some([name for flat in bad for name in flat.nonfinite])
        texts = self._control.texts("the search for NaN and Inf", mine)
        culprits = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        summed = f"the mean of {_some([flat.bucket.label for flat in bad])}, in none of the workers' own"
        text = f"step {step}: NaN or Inf in the gradient of {culprits or summed}"
        if self.plan.nonfinite == "raise":
            raise NumericsError(
                f"{text}. Lower the learning rate or clip; nonfinite='skip' skips such steps, 'pass' lets them through."
            )
        self._tell(step, "skipped", f"{text}; the step is skipped on every rank.")
        for entry in self._entries.values():
            entry.parameter.grad = None

    def _tell(self, step: int, what: str, text: str) -> None:
        self.meter.event(what, text, step)
        _log.warning("%s", text)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
