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

from offbeat.engine import sparse, state_checks, worker_questions
from offbeat.engine.batch_accounting import BatchAccount
from offbeat.engine.bucket_buffer import BucketBuffer, GradEntry
from offbeat.engine.bucket_exchange import BucketExchange
from offbeat.engine.communicator import Communicator
from offbeat.engine.gradient_order import GradientOrder
from offbeat.engine.step_times import StepTimes
from offbeat.engine.synchronizer import RUN_IS_CLOSED
from offbeat.errors import ModelError, NumericsError
from offbeat.layout import Layout, arrange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.codec import Codec, State
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.control_group import ControlGroup
    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.fabric import Fabric
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")


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
        model: which of several prepared, from 0, for reports.
        share: this worker's part in the next exchange, if it goes on from another exchanger's.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        plan: Plan,
        fabric: Fabric,
        control: ControlGroup,
        buffers: Buffers | None,
        waiter: BlockingWait,
        meter: StepMetrics,
        model: int = 0,
        share: BatchAccount | None = None,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.share = share or BatchAccount()
        self.meter = meter
        self.sync = True  # False inside no_sync()
        self._codec: Codec = plan.codec
        self._check_finite = plan.nonfinite != "pass"
        self.calls = self.called = False  # whether this worker wants all to confer, or one of them did
        self._sums: set[float] = set()  # of all workers' weights, in the exchange at hand
        self._channel = Communicator(fabric, waiter, meter, model)
        # A controller is told of the model that was prepared first.
        are_told = plan.controller is not None and not model
        self.times = StepTimes(self._channel.rank, self._channel.world, meter.take_own, are_told=are_told)
        self._control = control
        self._buffers = buffers
        self._waiter = waiter
        self._parameters = dict(parameters)
        self._entries = {name: GradEntry(name, p) for name, p in parameters.items()}
        self._states: State = {}
        self._flats: list[BucketBuffer] = []
        self._build(layout)
        self._flights: list[BucketExchange] = []
        self._open = False  # inside a backward that communicates
        self._closed = False
        self._any_fired = False
        self._arrivals: GradientOrder | None = GradientOrder(self._parameters)  # until they are known
        self._forward_due = False  # a forward pass that should lead to an exchange has run
        self._exchanged = False  # an exchange happened since the last optimizer step
        self._landmark: GradEntry | None = None  # one that had a gradient after the last exchange
        self._drops_padding = False
        self._told_unused = self._told_graph = False
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(functools.partial(self._on_grad, entry))
            for entry in self._entries.values()
        ]

    # -- called by the front end ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Exchanges so far; steps, where not every one had an exchange."""
        return self._channel.step

    @step.setter
    def step(self, step: int) -> None:
        self._channel.step = step

    @property
    def channel(self) -> Communicator:
        """To the other workers; in the same order on every rank."""
        return self._channel

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins.

        Args:
            inputs: what it gets.

        Raises:
            ModelError: if the last backward was cut short by an exception after it had begun to communicate, or it
                cannot be known whether this batch counts.
        """
        self.meter.forward(inputs)
        self.share.forward()
        if self.share.padding and not self._drops_padding:
            self._drop_padding()
        if not self.sync:
            return
        if self._open and torch._C._current_graph_task_id() == -1:
            raise ModelError(
                f"Cannot go on after step {self.step}: its backward was cut short by an exception while other workers "
                "were already receiving its gradients. Let the exception end this worker, or avoid it in backward."
            )
        if self._exchanged and self._landmark is not None and self._landmark.parameter.grad is None:
            self._exchanged = False  # gradients were cleared: the optimizer's step was left out (as GradScaler does)
        self._forward_due = True

    def on_output_grad(self) -> None:
        """The gradient of the model's output is known: the outermost backward has begun.

        Raises:
            ModelError: if the run is closed and there were other workers: the replicas would silently drift apart.
        """
        if self._closed and self._channel.world > 1:
            raise ModelError(RUN_IS_CLOSED)
        if self.sync and not self._open:
            self._begin()

    def on_step(self) -> None:
        """The optimizer is about to step: take part now if this rank's backward reached no parameter."""
        if self.sync and self._forward_due and not self._exchanged:
            self._open = True
            self._reset_counts()
            self._fire()
            self._fence()
        self._exchanged = False

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not exchanged, because it is being accumulated."""
        return any(entry.used for entry in self._entries.values())

    def take_part(self) -> None:
        """Exchange nothing, as a worker whose inputs have ended, while others have a gradient."""
        self._forward_due, self._exchanged = True, False
        self.on_step()

    def after_step(self) -> None:
        """Nothing to do: the gradient was exchanged before."""

    def settle(self) -> None:
        """Nothing to do: replicas are equal after every step."""

    def refreshed(self) -> None:
        """Nothing to do: there is no server."""

    def state_dict(self) -> dict[str, Any]:
        """Step count, what the first backward has taught of the gradients, and codec state, by parameter name."""
        return {
            "step": self.step,
            "layout": {
                "learnt": self._arrivals is None,
                "order": [*self.layout.names, *self.layout.sparse],
                "version": self.layout.version,
                "expected": {name: entry.expected for name, entry in self._entries.items()},
            },
            "codec": {name: dict(tensors) for name, tensors in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; between steps, alike on all workers.

        Raises:
            ModelError: if it is damaged, or of another model.
        """
        self._channel.step = state_checks.whole(state["step"], "step")
        if "layout" in state:  # else it was written before this was kept: the next backward learns the order
            self._load_layout(state["layout"])
        for name, tensors in state["codec"].items():
            for key in tensors:
                state_checks.copy_(self._states[name][key], tensors, name, key)

    def _load_layout(self, state: Mapping[str, Any]) -> None:
        """Have each gradient lie where it lay: where it lies decides in which order the workers' are added."""
        order, expected = state_checks.texts(state["order"], "order of gradients"), state["expected"]
        if len(order) != len(self._entries) or set(order) != self._entries.keys():
            return  # other parameters are trained now
        version = state_checks.whole(state["version"], "version of the layout")
        counts = {name: state_checks.whole(expected[name], f"gradients of {name}", least=1) for name in order}
        for name, count in counts.items():
            self._entries[name].expected = count
        self._arrivals = None if state["learnt"] is True else GradientOrder(self._parameters)
        self._build(
            arrange(
                self._parameters,
                bucket_bytes=self.plan.bucket_bytes,
                sparse=self.layout.sparse,
                order=order if self._arrivals is None else None,
                version=version,
            )
        )

    def tell_times(self, *, are_told: bool, ranks: int) -> None:
        """Whether workers tell each other how long they compute, and how many may; between steps, alike on all."""
        times = self.times
        if (are_told and not self._channel.model, ranks) != (times.are_told, times.ranks):
            times.are_told, times.ranks = are_told and not self._channel.model, ranks
            times.forget()
            self._build(self.layout)

    def close(self) -> None:
        """Take the hooks off; `.grad` stays."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _drop_padding(self) -> None:
        """From now on a batch that only keeps the loop going sends no gradient, however it would have come."""
        self._drops_padding = True

        def drop(grad: torch.Tensor) -> torch.Tensor | None:
            return torch.zeros_like(grad) if self.share.padding else None

        self._hooks += [e.parameter.register_hook(drop) for e in self._entries.values() if e.parameter.requires_grad]

    # -- during backward -----------------------------------------------------------------------------------------

    def _on_grad(self, entry: GradEntry, parameter: torch.Tensor) -> None:
        entry.used = True
        self.share.computed()
        if not self.sync:
            return
        if not self._open:
            self._begin()
        if not self._any_fired:
            self._fire()
        entry.fired += 1
        if not self._told_graph and parameter.grad is not None and parameter.grad.requires_grad:
            self._told_graph = True
            _log.warning(
                "backward(create_graph=True): the averaged gradients carry no graph, as with DistributedDataParallel. "
                "For second derivatives call torch.autograd.grad(..., create_graph=True) inside the loss."
            )
        flat = entry.flat
        if self._arrivals is not None:
            self._arrivals.note(entry.name)
        elif flat is None:
            return
        elif entry.fired == entry.expected:
            flat.missing -= 1
            if flat.missing == 0:
                self._issue_complete()
        elif entry.fired > entry.expected:
            self._on_late(entry, flat)

    def _on_late(self, entry: GradEntry, flat: BucketBuffer) -> None:
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

    def _fire(self) -> None:
        """It is certain that something will be exchanged."""
        self._any_fired = True
        if self.share.asks is not None:
            self.share.asks()

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

    def _issue(self, flat: BucketBuffer) -> None:
        for flight in self._flights:
            flight.look()
        weight, stamp = self.share.weight, self.share.stamp
        flat.pack(
            scale=self.share.scale if weight and self.share.absent is None else 0.0, check_finite=self._check_finite
        )
        state = {slot.name: self._states[slot.name] for slot in flat.bucket.slots}
        self._flights.append(
            BucketExchange(
                flat,
                self._codec,
                state,
                self._channel,
                self.meter.now_s,
                weight=weight,
                stamp=stamp,
                calls=self.calls,
            )
        )

    # -- at its end ----------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        if not self._any_fired:
            self._open = False  # such as autograd.grad() with respect to an input
            return
        self.meter.fence_begins()
        for flat in self._flats[len(self._flights) :]:
            self._issue(flat)
        channel, source = self._channel, self.share.source
        dangling = [channel.start(sparse.payload_of(e, share=self.share, world=channel.world)) for e in self._sparse]
        broadcasts = [] if self._buffers is None else self._buffers.start(source)
        bad = [flight.flat.bucket.label for flight in self._flights if self._finish(flight)]
        mine = [name for flight in self._flights for name in flight.flat.nonfinite]
        for entry, pending in zip(self._sparse, dangling, strict=True):
            reply = channel.wait(pending, "exchange of the sparse gradient", entry.name)
            assert isinstance(reply, list)
            if not self._is_finite(sparse.combine(entry, reply)):
                bad.append(entry.name)
                own = next(one for one in reply if one.worker == channel.rank)
                mine += [] if self._is_finite(own.tensors[1]) else [entry.name]
        if self._buffers is not None:
            for pending in broadcasts:
                channel.wait(pending, "broadcast of the buffers")
            self._buffers.finish(source)
        self._settle()
        if bad:
            self._on_nonfinite(bad, mine)

    def _finish(self, flight: BucketExchange) -> bool:
        """Complete one bucket's exchange; whether NaN or Inf was found in it, in a contribution or in the mean."""
        tail = flight.arrive()
        if not tail.in_step:
            raise worker_questions.different_batches(self._control, step=self.step, stamp=self.share.stamp)
        self.called = self.called or tail.called
        self._sums.add(tail.weight * self._channel.world)
        flight.land(tail.weight or 1.0)  # nobody had data: the sum is zero, and so is the mean
        flight.flat.settle(tail.used_elsewhere)
        # A sum can overflow where no contribution did; the mean has the same bits on every rank, so all find the same.
        return tail.nonfinite or not self._is_finite(flight.flat.grad)

    def _is_finite(self, tensor: torch.Tensor | None) -> bool:
        return tensor is None or not self._check_finite or bool(torch.isfinite(tensor).all())

    def _settle(self) -> None:
        if self._arrivals is not None:
            self._learn(self._arrivals)
        spans = [(f.issued_s, f.done_s) for f in self._flights if f.done_s is not None]
        step, weight = self.step, self.share.weight
        self._channel.step += 1
        self._channel.weights, self._sums = (weight, *self._sums), set()
        self.meter.fence_ends(step, spans, weight, model=self._channel.model)
        self._waiter.witness.exchanged(self.share.stamp)
        self.share.exchanged()
        unused = [entry.name for entry in self._entries.values() if not entry.used]
        for entry in self._entries.values():
            entry.used = False
        self._open = self._any_fired = self._forward_due = False
        self._exchanged = True
        self._landmark = next((entry for entry in self._entries.values() if entry.parameter.grad is not None), None)
        if unused and not self._told_unused and weight and self.share.absent is None:
            self._told_unused = True
            self._tell(
                step, "unused", f"step {step}: no gradient for {worker_questions.some(unused)}; they contribute zeros."
            )

    def _learn(self, arrivals: GradientOrder) -> None:
        """After the first exchange: how often each hook runs, and the order in which gradients arrive."""
        self._arrivals = None
        for entry in self._entries.values():
            entry.expected = max(1, entry.fired)
        order = arrivals.agreed(self._channel)
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
            times = self.times if bucket is layout.buckets[-1] else None
            self._flats.append(BucketBuffer(bucket, entries, self._channel.world, times))
            fresh = self._codec.init(bucket)
            for slot in bucket.slots:
                self._states.setdefault(slot.name, fresh.get(slot.name, {}))
        self._sparse = [self._entries[name] for name in layout.sparse]
        self._channel.buckets = len(self._flats)

    def _on_nonfinite(self, places: list[str], mine: list[str]) -> None:
        step = self.step - 1
        text = f"step {step}: {worker_questions.nonfinite(self._control, places, mine)}"
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
