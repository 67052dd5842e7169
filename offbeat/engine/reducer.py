"""The way of gradients: from autograd into the buckets, through the codec and the fabric, and back.

Every parameter has a hook that runs when its gradient is complete. When all of a bucket's have, the bucket is packed
and issued while backward goes on. A callback at the end of backward, the fence, issues what is left (parameters that
got no gradient contribute zeros), waits in order, and leaves the mean in `.grad`.

Rules:

* **Order.** Buckets are issued in the same order on every rank (`issue_queue`), whatever arrives first; later rounds of
  an exchange, the sparse gradients and the buffers follow in the fence, in a fixed order. Nothing depends on arrival.
* **Unused parameters** need no graph walk and no flag. Each bucket's trailer says who used what; a parameter that
  nobody used keeps its `.grad` as it was (usually None), so the optimizer skips it everywhere.
* **The first backward does not overlap.** It learns how often each parameter's hook runs (checkpointing can make it
  several times) and in which order gradients arrive; buckets are then arranged anew in rank 0's order.
* **A rank whose backward touched no parameter** takes part at `optimizer.step()`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from offbeat.codec import ErrorFeedback, Turn
from offbeat.engine import sparse, state_checks, worker_questions
from offbeat.engine.batch_accounting import BatchAccount
from offbeat.engine.bucket_buffer import BucketBuffer, GradEntry
from offbeat.engine.bucket_exchange import BucketExchange, finish_together
from offbeat.engine.communicator import Communicator
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.gradient_order import GradientOrder
from offbeat.engine.issue_queue import IssueQueue, first_in_first_out
from offbeat.engine.optimizer_state import load
from offbeat.engine.prepared_model import check_sums_some
from offbeat.engine.step_times import StepTimes
from offbeat.engine.synchronizer import RUN_IS_CLOSED
from offbeat.errors import ModelError, NumericsError
from offbeat.layout import Layout, arrange
from offbeat.server.optimizer_checkpoint import from_bytes
from offbeat.server.optimizers import OUTER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.bucket_buffer import BucketTrailer
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.step_metrics import HiddenExchange
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.pending import Pending
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")


class Reducer:
    """The synchronizer that keeps the gradients of one model equal on all workers. A `GradientSync`.

    Args:
        model: its parameters, and this worker's end of the fabric.
        plan: codec and policies.
        context: of this worker.
        buffers: the model's buffers, or None if they are not to be synchronised.
        accounting: this worker's part in the next exchange, if it goes on from another synchronizer's.
    """

    is_collective = True
    in_two_rounds = False  # whether sums are made by a reduce-scatter and an all-gather

    def __init__(
        self,
        model: PreparedModel,
        plan: Plan,
        context: WorkerContext,
        *,
        buffers: Buffers | None = None,
        accounting: BatchAccount | None = None,
    ) -> None:
        self._model, self._plan, self._context, self._buffers = model, plan, context, buffers
        self.accounting = accounting or BatchAccount()
        self.sync = True  # False inside no_sync()
        self.pending_result: ExchangeResult | None = None
        self.communicator = Communicator(model.fabric, context, model.number)
        # A controller is told of the model that was prepared first.
        are_told = plan.controller is not None and not model.number
        self.times = StepTimes(
            self.communicator.rank, self.communicator.world, context.metrics.take_own, are_told=are_told
        )
        self._check_finite = plan.nonfinite != "pass"
        self._entries = {name: GradEntry(name, p) for name, p in model.parameters.items()}
        self._under_way: list[tuple[BucketBuffer, BucketExchange]] = []
        self._polled: list[BucketExchange] = []  # of these, those that were not seen to be done yet
        self._build(model.layout(plan, is_served=False))
        self._open = False  # inside a backward that communicates
        self._closed = False
        self._any_fired = False
        self._arrivals: GradientOrder | None = GradientOrder(model.parameters)  # until they are known
        self._forward_due = False  # a forward pass that should lead to an exchange has run
        self._exchanged = False  # an exchange happened since the last optimizer step
        self._landmark: GradEntry | None = None  # one that had a gradient after the last exchange
        self._drops_padding = False
        self._told_unused = self._told_graph = False
        self._check_sums_some(plan)
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(functools.partial(self._on_grad, entry))
            for entry in self._entries.values()
        ]

    # -- called by the front end ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The one that it goes by."""
        return self._plan

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from here on; on all workers at the same place, since buckets may be laid out anew."""
        self._check_sums_some(plan)
        self._plan = plan
        self._tell_times(self.times.ranks)

    def _check_sums_some(self, plan: Plan) -> None:
        """See that nothing of a step has to wait for all, if the plan says so.

        Raises:
            ModelError: if something has to.
        """
        if plan.has_quorum and self.communicator.world > 1:
            check_sums_some(self._model, plan)

    @property
    def step(self) -> int:
        """Exchanges so far; steps, where not every one had an exchange."""
        return self.communicator.step

    @step.setter
    def step(self, step: int) -> None:
        self.communicator.step = step

    @property
    def number(self) -> int:
        """The number of the next contribution: that of the step."""
        return self.communicator.step

    @property
    def gradient_scale(self) -> float:
        """Each gradient is multiplied by 1/N, so that their sum is the mean."""
        return 1 / self.communicator.world

    @property
    def ranks(self) -> int:
        """The number of workers that have a place for their computing times."""
        return self.times.ranks

    @ranks.setter
    def ranks(self, ranks: int) -> None:
        self._tell_times(ranks)

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins.

        Args:
            inputs: what it gets.

        Raises:
            ModelError: if the last backward was cut short by an exception after it had begun to communicate, or it
                cannot be known whether this batch counts.
        """
        self._context.metrics.forward(inputs)
        self.accounting.forward()
        if self.accounting.padding and not self._drops_padding:
            self._drop_padding()
        if not self.sync:
            return
        if self._open and torch._C._current_graph_task_id() == -1:
            raise ModelError(
                f"Cannot continue after step {self.step}: its backward was cut short by an exception while other "
                "workers were already receiving its gradients. Let the exception end this worker, or avoid it in "
                "backward."
            )
        if self._exchanged and self._landmark is not None and self._landmark.parameter.grad is None:
            self._exchanged = False  # gradients were cleared: the optimizer's step was left out (as GradScaler does)
        self._forward_due = True

    def on_backward(self) -> None:
        """Begin to exchange: the gradient of the model's output is known.

        Raises:
            ModelError: if the run is closed and there were other workers: the replicas would silently drift apart.
        """
        if self._closed and self.communicator.world > 1:
            raise ModelError(RUN_IS_CLOSED)
        if self.sync and not self._open:
            self._begin()

    def before_step(self) -> None:
        """Take part now if this rank's backward has reached no parameter, or its inputs have ended."""
        is_due = self._forward_due and not self._exchanged
        if self.sync and (is_due or self.accounting.absent is not None):
            self._open = True
            self._reset_counts()
            self._fire()
            self._fence()
        self._exchanged = False

    def after_step(self) -> ExchangeResult | None:
        """Return what was found out when the gradient was exchanged."""
        result, self.pending_result = self.pending_result, None
        return result

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not exchanged, because it is being accumulated."""
        return any(entry.used for entry in self._entries.values())

    def synchronize(self) -> None:
        """Do nothing: all of a step is done when its backward is."""

    def explain(self, error: BaseException) -> str:
        """Say nothing: no parameter is stepped between a forward pass and its backward."""
        return ""

    @property
    def wants_vote(self) -> bool:
        """Whether there is something to be decided by all: never."""
        return False

    def vote(self) -> None:
        """Do nothing: there is nothing to decide."""

    def even_out(self) -> None:
        """Do nothing: whoever joins has all that it takes to go on."""

    def settle(self) -> None:
        """Give all workers the buffers of the first, if they have come apart; all else is equal after every step."""
        if self.plan.has_quorum and self._buffers is not None:
            self._broadcast_buffers(self._buffers, self._context.control.leader)

    def refreshed(self) -> None:
        """Do nothing: there is no server."""

    def state_dict(self) -> dict[str, Any]:
        """Step count, and what the first backward has taught of the gradients."""
        return {
            "step": self.step,
            "layout": {
                "learnt": self._arrivals is None,
                "order": [*self.layout.names, *self.layout.sparse],
                "version": self.layout.version,
                "expected": {name: entry.expected for name, entry in self._entries.items()},
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or at a server; between steps, alike on all workers.

        Raises:
            ModelError: if it is damaged, or of another model.
        """
        self.step = state_checks.whole(state["step"], "step")
        if "layout" in state:  # else it was written before this was kept: the next backward learns the order
            self._load_layout(state["layout"])
        if at_server := state.get("server"):  # what the optimizer had gathered there
            states = {name: one for name, one in from_bytes(at_server).items() if name in self._entries}
            own = {name: {k: v for k, v in one.items() if k != OUTER} for name, one in states.items()}
            load(self._model.optimizer, self._model.parameters, own)

    def _load_layout(self, state: Mapping[str, Any]) -> bool:
        """Have each gradient lie where it lay: where it lies decides in which order the workers' are added.

        Returns:
            Whether the parameters are the same.
        """
        order, expected = state_checks.texts(state["order"], "order of gradients"), state["expected"]
        if len(order) != len(self._entries) or set(order) != self._entries.keys():
            return False  # other parameters are trained now
        version = state_checks.whole(state["version"], "version of the layout")
        counts = {name: state_checks.whole(expected[name], f"gradients of {name}", least=1) for name in order}
        for name, count in counts.items():
            self._entries[name].expected = count
        self._arrivals = None if state["learnt"] is True else GradientOrder(self._model.parameters)
        self._build(self._arranged(order if self._arrivals is None else None, version))
        return True

    def _arranged(self, order: list[str] | None, version: int) -> Layout:
        parameters, sparse_ones = self._model.parameters, self.layout.sparse
        return arrange(
            parameters, bucket_bytes=self.plan.bucket_bytes, sparse=sparse_ones, order=order, version=version
        )

    def _tell_times(self, ranks: int) -> None:
        """Have so many workers tell each other how long they compute, if a controller wants to know."""
        times, are_told = self.times, self.plan.controller is not None and not self._model.number
        if (are_told, ranks) != (times.are_told, times.ranks):
            times.are_told, times.ranks = are_told, ranks
            times.forget()
            self._build(self.layout)

    def detach(self, *, has_own_optimizer: bool) -> None:
        """Take the hooks off: parameters and optimizer are here."""
        self.close()

    def close(self) -> None:
        """Take the hooks off; `.grad` stays."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _drop_padding(self) -> None:
        """Send no gradient from now on for a batch that only keeps the loop going, however it would have come."""
        self._drops_padding = True

        def drop(grad: torch.Tensor) -> torch.Tensor | None:
            return torch.zeros_like(grad) if self.accounting.padding else None

        self._hooks += [e.parameter.register_hook(drop) for e in self._entries.values() if e.parameter.requires_grad]

    # -- during backward -----------------------------------------------------------------------------------------

    def _on_grad(self, entry: GradEntry, parameter: torch.Tensor) -> None:
        # The hook runs, too, where a parameter was frozen behind the forward pass: then there is no gradient.
        entry.used = entry.used or parameter.grad is not None
        self.accounting.computed()
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
        if self._arrivals is not None:
            self._arrivals.note(entry.name)
        elif entry.fired == entry.expected:
            for buffer in entry.buffers:
                buffer.missing -= 1
                if buffer.missing == 0:
                    self._queue.add(buffer.bucket.index)
        elif entry.fired > entry.expected and entry.buffers:
            self._on_late(entry)

    def _on_late(self, entry: GradEntry) -> None:
        expected, entry.expected = entry.expected, entry.fired
        if any(self._queue.has_issued(buffer.bucket.index) for buffer in entry.buffers):
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
        """Note that something will certainly be exchanged."""
        self._any_fired = True
        if self.accounting.before_exchange is not None:
            self.accounting.before_exchange()

    def _reset_counts(self) -> None:
        for buffer in self._buckets:
            buffer.missing = len(buffer.entries)
        for entry in self._entries.values():
            entry.fired = 0
        self._under_way, self._polled = [], []
        self._queue.restart()

    def _issue(self, index: int) -> None:
        self._polled = [earlier for earlier in self._polled if not earlier.poll()]
        buffer, exchange = self._prepared(index, self.communicator)
        exchange.issue(buffer.trailer)
        self._under_way.append((buffer, exchange))
        self._polled.append(exchange)

    def _prepared(self, index: int, communicator: Communicator) -> tuple[BucketBuffer, BucketExchange]:
        """Pack a bucket, and encode it, to go by this way."""
        buffer, accounting = self._buckets[index], self.accounting
        scale = accounting.scale if accounting.weight and accounting.absent is None else 0.0
        buffer.pack(scale=scale, check_finite=self._check_finite)
        codec = self._model.codec_state.working(self._plan.working_codec)
        state = self._model.codec_state.of(codec, buffer.bucket)
        turn = Turn(buffer.bucket, self.step, communicator.rank, communicator.world, self._context.seed)
        exchange = BucketExchange(turn, buffer.grad, codec, state, communicator, in_two_rounds=self.in_two_rounds)
        buffer.write_trailer(accounting, exchange.trailer_dtype)
        return buffer, exchange

    # -- at its end ----------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        if not self._any_fired:
            self._open = False  # such as autograd.grad() with respect to an input
            return
        self._context.metrics.compute_done()
        self._queue.flush()
        communicator, source = self.communicator, self.accounting.source
        dangling = [
            communicator.start(sparse.payload_of(e, accounting=self.accounting, world=communicator.world))
            for e in self._sparse
        ]
        # In a sum of some workers nothing is to wait for all: then buffers are even only when all settle.
        buffers = None if self._plan.has_quorum else self._buffers
        broadcasts = [] if buffers is None else buffers.start(source)
        trailers = self._finish(self._under_way)
        # A sum can overflow where no contribution did; the mean has the same bits on every rank, so all find the same.
        bad = [
            buffer.bucket.label
            for (buffer, _), trailer in zip(self._under_way, trailers, strict=True)
            if trailer.nonfinite or not self._is_finite(buffer.grad)
        ]
        mine = [name for buffer, _ in self._under_way for name in buffer.nonfinite]
        for entry, pending in zip(self._sparse, dangling, strict=True):
            reply = communicator.wait(pending, "exchange of the sparse gradient", entry.name)
            assert isinstance(reply, list)
            if not self._is_finite(sparse.combine(entry, reply)):
                bad.append(entry.name)
                own = next(one for one in reply if one.worker == communicator.rank)
                mine += [] if self._is_finite(own.tensors[1]) else [entry.name]
        if buffers is not None:
            self._finish_buffers(buffers, broadcasts, source)
        self._complete(trailers)
        if bad:
            self._on_nonfinite(bad, mine)

    def _finish(self, under_way: Sequence[tuple[BucketBuffer, BucketExchange]]) -> list[BucketTrailer]:
        """Complete all buckets' exchanges, round by round; what the workers said along with each."""
        trailers = [self._receive(buffer, exchange) for buffer, exchange in under_way]
        finish_together([exchange for _, exchange in under_way])
        for (buffer, _), trailer in zip(under_way, trailers, strict=True):
            buffer.unpack()
            buffer.hand_out(trailer.used_elsewhere)
        return trailers

    def _receive(self, buffer: BucketBuffer, exchange: BucketExchange) -> BucketTrailer:
        """Wait for the first round of one bucket's exchange; what the workers said along with it."""
        total, part = exchange.wait()
        if not exchange.includes_own:
            buffer.leave_out()
        trailer = buffer.read_trailer(total, part)
        if not trailer.in_step:
            raise worker_questions.different_batches(self._context.control, step=self.step, stamp=self.accounting.stamp)
        exchange.begin_to_finish(trailer.weight or 1.0)  # nobody had data: the sum is zero, and so is the mean
        return trailer

    def _broadcast_buffers(self, buffers: Buffers, source: int) -> None:
        self._finish_buffers(buffers, buffers.start(source), source)

    def _finish_buffers(self, buffers: Buffers, broadcasts: list[Pending], source: int) -> None:
        for pending in broadcasts:
            self.communicator.wait(pending, "broadcast of the buffers")
        buffers.finish(source)

    def _is_finite(self, tensor: torch.Tensor | None) -> bool:
        return tensor is None or not self._check_finite or bool(torch.isfinite(tensor).all())

    def _complete(self, trailers: list[BucketTrailer]) -> None:
        """Leave everything as the next exchange is to find it."""
        if self._arrivals is not None:
            self._learn(self._arrivals)
        result = self._result_of(trailers, [exchange for _, exchange in self._under_way], self.accounting.weight)
        self.pending_result = result.after(self.pending_result)
        self._context.waiter.witness.exchanged(self.accounting.stamp)
        self._count_exchange(result.spans, dropped=result.dropped)

    def _count_exchange(
        self, spans: Sequence[tuple[float, float]], *, dropped: bool, hidden: HiddenExchange | None = None
    ) -> None:
        """Count an exchange.

        Args:
            spans: when each bucket was issued and done, in clock seconds.
            dropped: what this worker brought is not in the sum.
            hidden: the spans are those of an earlier step's exchange.
        """
        step, weight = self.step, self.accounting.weight
        self.communicator.step += 1
        self._context.metrics.exchange_done(
            step, spans, weight, model=self._model.number, dropped=dropped, hidden=hidden
        )
        self.accounting.exchanged()
        unused = [entry.name for entry in self._entries.values() if not entry.used]
        for entry in self._entries.values():
            entry.used = False
        self._open = self._any_fired = self._forward_due = False
        self._exchanged = True
        self._landmark = next((entry for entry in self._entries.values() if entry.parameter.grad is not None), None)
        if unused and not self._told_unused and weight and self.accounting.absent is None:
            self._told_unused = True
            self._tell(
                step, "unused", f"step {step}: no gradient for {worker_questions.some(unused)}; they contribute zeros."
            )

    def _result_of(
        self, trailers: Sequence[BucketTrailer], exchanges: Sequence[BucketExchange], weight: float
    ) -> ExchangeResult:
        """The findings of an exchange in which this worker had so much weight."""
        sums = [trailer.weight * self.communicator.world for trailer in trailers]
        given = [weight if exchange.includes_own else 0.0 for exchange in exchanges]
        has_quorum = self._plan.has_quorum
        return ExchangeResult(
            weights=(weight, *(sums if has_quorum else dict.fromkeys(sums))),
            given=tuple(given) if has_quorum else (),
            dropped=weight > 0 and not any(given) and not isinstance(self._plan.working_codec, ErrorFeedback),
            vote_requested=any(trailer.vote_requested for trailer in trailers),
            step_times=next((trailer.step_times for trailer in trailers if trailer.step_times), {}),
            spans=tuple((one.issued_s, one.done_s) for one in exchanges if one.done_s is not None),
        )

    def _learn(self, arrivals: GradientOrder) -> None:
        """Learn from the first exchange how often each hook runs, and the order in which gradients arrive."""
        self._arrivals = None
        for entry in self._entries.values():
            entry.expected = max(1, entry.fired)
        order = arrivals.agreed(self.communicator)
        if order != [*self.layout.names, *self.layout.sparse]:
            self._build(self._arranged(order, self.layout.version + 1))

    def _build(self, layout: Layout) -> None:
        """Give every gradient its place. Gradients in older buckets stay where they are until the next backward."""
        self.layout = layout
        self._buckets: list[BucketBuffer] = []
        for entry in self._entries.values():
            entry.buffers = ()
        for bucket in layout.buckets:
            entries = [self._entries[slot.name] for slot in bucket.slots]
            times = self.times if bucket is layout.buckets[-1] else None
            self._buckets.append(BucketBuffer(bucket, entries, self.communicator.world, times))
        self._sparse = [self._entries[name] for name in layout.sparse]
        self._queue = IssueQueue(first_in_first_out(layout), self._issue)
        self.communicator.buckets = len(self._buckets)

    def _on_nonfinite(self, places: list[str], mine: list[str]) -> None:
        step = self.step - 1
        text = f"step {step}: {worker_questions.nonfinite(self._context.control, places, mine)}"
        if self.plan.nonfinite == "raise":
            raise NumericsError(
                f"{text}. Lower the learning rate or clip; nonfinite='skip' skips such steps, 'pass' lets them through."
            )
        self._tell(step, "skipped", f"{text}; the step is skipped on every rank.")
        for entry in self._entries.values():
            entry.parameter.grad = None

    def _tell(self, step: int, what: str, text: str) -> None:
        self._context.metrics.event(what, text, step)
        _log.warning("%s", text)
