"""The way of gradients that are hidden behind the next forward pass as well as behind backward.

    step t     forward | backward                      | step()  returns at once
    sent               |  block 1 | block 2 | block 3 | block 4 | block 5 ...        in the order of a `Scheduler`
    step t+1                                                    forward: each module waits for what it reads, and has
                                                                it stepped; then backward

The first steps are a barrier, as `Reducer` has it: what a gradient takes to be complete and when its parameter is
needed is learnt in them (`schedule_learner`). Then all workers make the same schedule, and blocks of gradients are sent
in its order by a thread (`communication_thread`). Rules:

* `optimizer.step()` finds no gradient, and does nothing: what it was to do is noted, with its hyper-parameters.
* A parameter is stepped whole, on the training thread, when all of its gradient has landed and somebody needs it:
  before the forward pass of a module that reads it, or where all are brought to their end (`synchronize`).
* All of a step has landed and is stepped before the next backward: so a block's memory holds one step's gradient.
* Who uses `.grad` between backward and the step waits for it, and finds the mean there (`pending_gradient`).
* A script that uses a parameter after the step waits for that step, wherever it does so (`pending_parameter`). One
  step in a hundred is a barrier, and is watched for other tensors that share a parameter's memory (`freshness_mode`).
  If one worker finds some, all go back to the barrier.
* Where a worker lacks a gradient or has no data the step is a barrier, there alone: what is sent, and its order, is the
  same.
* What the workers have said along with a step's gradients counts one step later, on all of them.
* Buffers are sent as they are when the first gradient is complete. Where backward writes to them behind that, it has to
  be a barrier; if it begins to when steps are ahead, all have what was sent until they have voted to go back there.
* Where a schedule has two rounds the thread reduces all blocks in the order of backward, and then gathers them in that
  of the next forward pass. A gradient has landed when it is gathered, and so has what the workers have said.
* A plan in which only whole steps can be made (`Plan.barrier_reason`) stays a barrier, and says so once.
* Every step is watched (`schedule_monitor`), each round of a block by itself. Where what the schedule was made from has
  moved, a worker asks for a vote, and behind a step all make the schedule anew from what all have found, if that is
  worth it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from offbeat.diagnosis.wait import BlockingWait, WaitContext
from offbeat.engine import state_checks, worker_questions
from offbeat.engine.communication_thread import (
    BlockInFlight,
    BroadcastInFlight,
    CommunicationThread,
    GatherInFlight,
    ReduceInFlight,
)
from offbeat.engine.communicator import Communicator
from offbeat.engine.forward_watch import hook_readers
from offbeat.engine.freshness_mode import FreshnessMode, line_of
from offbeat.engine.module_hook import ModuleHook
from offbeat.engine.partial_optimizer import PartialOptimizer
from offbeat.engine.pending_gradient import PendingGradient, pending
from offbeat.engine.pending_parameter import can_pend, pend, settle
from offbeat.engine.reducer import Reducer
from offbeat.engine.schedule_learner import BLIND, ScheduleLearner
from offbeat.engine.schedule_monitor import OperationTimes, ScheduleMonitor, StepTaken, agreed, to_text
from offbeat.engine.schedule_state import checked_profile, checked_schedule, schedule_state
from offbeat.engine.step_metrics import HiddenExchange
from offbeat.errors import PlanError
from offbeat.layout import Bucket, Layout, Slot
from offbeat.safe_write import write_whole
from offbeat.scheduling import MadeSchedule, can_be_worth_it, is_worth_it, lower_bound_s, play
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from types import FrameType

    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.bucket_buffer import BucketTrailer, GradEntry
    from offbeat.engine.bucket_exchange import BucketExchange
    from offbeat.engine.buffers import Buffers
    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.plan import Plan
    from offbeat.scheduling import BackwardProfile, Schedule

_log = logging.getLogger("offbeat")
_NEVER = timedelta(days=365)
_MOST_USED = 8  # steps in a row in which gradients are used before the optimizer's step: each is a barrier by itself
_WRITTEN = "modified by an inplace operation"  # torch's words, where a tensor that backward needs is another by then
_EACH = 100  # steps that are ahead: one of them is a barrier, and is watched for uses of a parameter's memory


@dataclasses.dataclass
class Flight:
    """One step's blocks, on their way.

    Args:
        step: whose.
        blocks: in the order in which they land.
        weight, stamp: of this worker's batches in it.
        taken: what the step took beside its blocks; None if it did not go by the schedule as usual.
    """

    step: int
    blocks: Sequence[BlockInFlight]
    weight: float
    stamp: int
    taken: StepTaken | None = None
    _landed: int = 0

    @property
    def landed(self) -> int:
        """The number of the first blocks that have landed."""
        while self._landed < len(self.blocks) and self.blocks[self._landed].has_landed:
            self.blocks[self._landed].take_up()
            self._landed += 1
        return self._landed


class CrossIterationReducer(Reducer):
    """The synchronizer that hides the exchange of gradients behind the next forward pass, too. A `GradientSync`.

    Args:
        model, plan, context, buffers, accounting: as of a `Reducer`.
    """

    def __init__(
        self,
        model: PreparedModel,
        plan: Plan,
        context: WorkerContext,
        *,
        buffers: Buffers | None = None,
        accounting: BatchAccount | None = None,
    ) -> None:
        self._learner: ScheduleLearner | None = None
        self._thread: CommunicationThread | None = None
        self._flight: Flight | None = None
        self._blocks: list[BlockInFlight] = []  # issued in this backward
        self._broadcast: BroadcastInFlight | None = None
        self._optimizer = PartialOptimizer(model.optimizer)
        self._gradients: dict[str, torch.Tensor] = {}  # that step() was called with, of parameters that are not stepped
        self._results: deque[tuple[int, ExchangeResult]] = deque()
        self._spans: list[tuple[float, float]] = []  # of each block
        self._between: list[tuple[float, float]] = []  # the two rounds of each: one was done, the other issued
        self._waits: list[tuple[float, float, int]] = []  # for a block: began, ended, its index
        self._landed_step = -1  # of which the spans and the waits are
        self._profile: BackwardProfile | None = None  # that the schedule was made from, if it is known
        self._monitor: ScheduleMonitor | None = None
        self._looks = False  # in this step: when each gradient is complete
        self._forward_began_s = self._forward_s = self._backward_began_s = 0.0
        self._waited_before_s = 0.0
        self._watch_hooks: list[Any] = []
        self._names: list[str] = []  # of the gradients that the schedule counts
        self.schedule: Schedule | None = None
        self._order: list[str] = []  # in which gradients are complete
        self._landing: dict[int, int] = {}  # of each block: how many land before it
        self._last_landing: dict[str, int] = {}  # of each gradient's blocks
        self._is_used = False  # a gradient was used while blocks were on their way
        self._used_steps = 0  # in a row
        self._why_barrier = ""  # no step is hidden behind the next one any more, as all have agreed
        self._told_plan = False  # that it is the plan that has gradients waited for behind backward
        self._rewritten: list[str] = []  # buffers that were written to in backward
        self._freshness = context.freshness
        self._watch = FreshnessMode(self._memory_used)
        self._until_watched = -1  # so many steps; below 0 the next one is
        self._why_copied = ""  # a parameter's memory is used by another tensor, which waits for nothing
        self._told_use = False  # that a parameter is used before a module reads it
        self._uses = {name: functools.partial(self._parameter_used, name) for name in model.parameters}
        super().__init__(model, plan, context, buffers=buffers, accounting=accounting)
        # The thread's own way to the fabric; what it waits for is explained by whoever waits for the thread.
        silent = dataclasses.replace(context, waiter=BlockingWait(clock=context.clock, timeout=_NEVER))
        self._carrier = Communicator(model.fabric, silent, model.number, is_apart=True)
        self._learn_anew()

    @property
    def in_two_rounds(self) -> bool:  # type: ignore[override]
        """Whether sums are made by a reduce-scatter and an all-gather: as the schedule says, at barriers too."""
        return self.schedule is not None and bool(self.schedule.gathers)

    @property
    def is_ahead(self) -> bool:
        """Whether steps are hidden behind the next one by now."""
        return self._thread is not None

    # -- called by the front end ---------------------------------------------------------------------------------

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins; raises as that of a `Reducer`."""
        super().on_forward(inputs)
        if self.sync and self.is_ahead:
            self._forward_began_s = self._context.metrics.now_s()
            self._waited_before_s = self._context.waiter.waited_s
        if self._learner is not None and self.sync:
            self._learner.forward_begins()

    def on_backward(self) -> None:
        """Begin to exchange, once all of the step before is done; raises as that of a `Reducer`."""
        if self._learner is not None and self.sync:
            self._learner.backward_begins()
        super().on_backward()

    def before_step(self) -> None:
        """Take part now if that is due; `_take_gradients` comes next."""
        self._step_all()  # of an earlier call
        self._watch.close()
        super().before_step()
        self._used_steps = self._used_steps + 1 if self._is_used else 0
        self._is_used = False

    def _take_gradients(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note what the optimizer is to do, and leave it nothing; with a closure it does so by itself."""
        if args[1:] or options:  # the first is the optimizer
            return
        self._optimizer.capture()
        for entry in self._entries.values():
            if (grad := entry.parameter.grad) is not None:
                self._gradients[entry.name] = grad
                entry.parameter.grad = None
        self._expect(self._gradients)

    def after_step(self) -> ExchangeResult | None:
        """Let gradients be looked at again; what was found out when those of the step before were exchanged."""
        for name, grad in self._gradients.items():
            self._entries[name].parameter.grad = grad
        if self.is_ahead:
            is_kept = self._context.history.is_kept
            self._until_watched -= 1
            if is_kept or self._why_copied or self._until_watched < 0:
                self.synchronize()
            elif self._flight is None:
                self._step_all()
            self._watch_if_due()
            return self._result_before(self.communicator.step if is_kept else self.communicator.step - 1)
        result = super().after_step()
        if self._learner is not None and self._learner.is_done:
            self._go_ahead(self._learner)
            self._watch_if_due()
        elif not self._told_plan and self.plan.barrier_reason and self.communicator.world > 1:
            self._told_plan = True
            self._tell_barrier(self.plan.barrier_reason)
        return result

    def synchronize(self) -> None:
        """Have all of the last step landed and stepped. This worker's own: the others need not be here."""
        self._land_all()
        self._step_all()

    def close(self) -> None:
        """Take the hooks off, once all is done."""
        if self._context.waiter.failure is None:
            self.synchronize()
        self._land_ahead()
        if self._learner is not None:
            self._learner.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """The state of a `Reducer`, and the schedule."""
        state = super().state_dict()
        if self._why_barrier:
            return {**state, "barrier": self._why_barrier}
        if self.schedule is None:
            return state
        layout = {**state["layout"], "order": self._order}
        profile = {} if self._profile is None else {"profile": to_text(self._profile)}
        return {**state, "layout": layout, "schedule": {**schedule_state(self._names, self.schedule), **profile}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; its schedule is gone by from the next step but one on.

        Raises:
            ModelError: if it is damaged, or of another model.
        """
        self.synchronize()
        self._land_ahead()
        self._results.clear()
        super().load_state_dict(state)
        self._why_barrier = state_checks.texts([state.get("barrier", "")], "reason to wait behind backward")[0]
        sizes = {name: entry.parameter.numel() for name, entry in self._entries.items()}
        found = checked_schedule(state.get("schedule"), sizes)
        if found is not None and self.communicator.world > 1 and self._can_go_by(found[1]):
            self._adopt_schedule(*found, checked_profile(state["schedule"], found[0]))
        self._learn_anew()

    def even_out(self) -> None:
        """Wait behind backward, and learn the schedule anew: newcomers have to as well. On all at the same place."""
        if self.is_ahead:
            self._return_to_barrier()
        self._results.clear()  # which newcomers lack
        self._learn_anew()

    # -- ahead ---------------------------------------------------------------------------------------------------

    def _go_ahead(self, learner: ScheduleLearner) -> None:
        """Begin to hide steps behind the next one. Collective."""
        self._learner = None
        learner.close()
        if why := self._first_told("whether steps can be hidden behind the next one", self._objection(learner)):
            if self.schedule is not None:
                self._return_to_barrier()
            self._stay_at_barrier(why)
            return
        if self.schedule is not None:  # from a checkpoint
            self._begin_ahead(learner, self.schedule)
            return
        profile = learner.agree(self.communicator, self._context.control)
        schedule = self._made_by_all(profile)
        self._adopt_schedule([one.name for one in profile.gradients], schedule, profile)
        self._begin_ahead(learner, schedule)

    def _made_by_all(self, profile: BackwardProfile) -> Schedule:
        """The schedule of this profile, which all workers have come to. Collective.

        Raises:
            DisagreementError: if one has come to another; it names the first block that differs.
            PlanError: if the fabric does not carry what it has.
        """
        assert self.plan.scheduling is not None
        schedule = self.plan.scheduling.schedule(profile)
        if not self._can_go_by(schedule):
            raise PlanError(
                f"Cannot schedule with {short_name(self.plan.scheduling)} over {short_name(self.plan.fabric)}: its "
                "schedule has two rounds, and that fabric cannot reduce and gather apart. Use ProcessGroup() or "
                "Elastic() - at `plan.fabric`."
            )
        lines = schedule.describe(profile).splitlines()
        self._context.control.check_equal_now(
            "schedule of gradients",
            "\n".join(f"block {number}: {line}" for number, line in enumerate(lines, 1)),
            "Start all with the same plan and the same offbeat.",
        )
        return schedule

    def _can_go_by(self, schedule: Schedule) -> bool:
        """Whether the plan lets steps be hidden, and the fabric carries what a schedule has."""
        if self.plan.barrier_reason:
            return False
        return not schedule.gathers or self._model.fabric.offers.reduce_scatter

    def _adopt_schedule(self, names: Sequence[str], schedule: Schedule, profile: BackwardProfile | None) -> None:
        """Have each block be a bucket from here on."""
        if self.schedule is None:
            self._order = [*self.layout.names, *self.layout.sparse]
        self._names, self.schedule, self._profile = list(names), schedule, profile
        self._landing = {index: before for before, index in enumerate(schedule.landing)}
        self._build(self._scheduled(self._names, schedule))

    def _begin_ahead(self, learner: ScheduleLearner, schedule: Schedule) -> None:
        """Have blocks carried by a thread, and modules wait for what they read."""
        self._watch_hooks = hook_readers(learner.readers, self._before_module)
        self._start_thread(schedule)
        self._until_watched = -1
        self._build(self.layout)
        self._hook_optimizer_and_states()
        self._context.control.before_question.append(self.synchronize)
        if self._profile is not None:
            self._monitor = self._monitor_of(self._profile, schedule)
        self._leave_schedule("")
        text = f"step {self.step}: gradients are sent in {len(schedule.blocks)} blocks, in the order of"
        self._context.log.all(
            "scheduling", f"{text} {short_name(self.plan.scheduling)}, during the next forward pass as well."
        )

    def _start_thread(self, schedule: Schedule) -> None:
        # The buffers go first, while there are no gradients yet.
        ahead = () if self._buffers is None else (0,)
        after = (*ahead, *(n and n + len(ahead) for n in schedule.after))
        devices = dict.fromkeys(bucket.device for bucket in self.layout.buckets if bucket.device.type == "cuda")
        self._thread = CommunicationThread(after, tuple(devices))

    def _leave_schedule(self, why: str) -> None:
        """Write down the schedule that holds from here on, for those who look at the run."""
        context, number = self._context, self._model.number
        context.metrics.laid_out(self.step, [bucket.record for bucket in self.layout.buckets])
        if self._profile is None or self.schedule is None or context.run_dir is None or not context.is_first:
            return
        made = MadeSchedule(
            step=self.step,
            scheduler=repr(self.plan.scheduling),
            why=why,
            profile=self._profile,
            schedule=self.schedule,
        )
        path = context.run_dir / MadeSchedule.file_name(number)
        try:
            write_whole(path, made.to_bytes())
        except OSError as error:  # a full disk is no reason to end the run
            _log.warning("Cannot write %s: %s. `offbeat plan schedule` will not show it.", path, error.strerror)

    def _learn_anew(self) -> None:
        """Watch the next steps; one is enough if the schedule is known, and none if the plan itself is the barrier."""
        self._optimizer = PartialOptimizer(self._model.optimizer)
        self._rewritten, self._why_copied = [], ""
        if self._learner is not None:
            self._learner.close()
            self._learner = None
        if self.communicator.world > 1 and not (self._why_barrier or self.plan.barrier_reason):
            model, now_s, is_known = self._model, self._context.metrics.now_s, self.schedule is not None
            self._learner = ScheduleLearner(model.model, model.parameters, now_s, is_known=is_known)

    def _build(self, layout: Layout) -> None:
        super()._build(layout)
        for entry in self._entries.values() if self.is_ahead else ():
            assert entry.view is not None, "it was in a bucket at the beginning"
            self._last_landing[entry.name] = max(self._landing[buffer.bucket.index] for buffer in entry.buffers)
            entry.view = pending(entry.view, functools.partial(self._use, entry))

    def _hook_optimizer_and_states(self) -> None:
        """Have all done before somebody asks for the state of the model or of the optimizer, or sets it."""
        hook = ModuleHook(lambda *_: self.synchronize())
        for module in self._model.model.modules():
            self._watch_hooks.append(module.register_state_dict_pre_hook(hook))
            self._watch_hooks.append(module.register_load_state_dict_pre_hook(hook))
        self._watch_hooks += [
            self._model.optimizer.register_step_pre_hook(self._take_gradients),  # behind what calls `before_step`
            self._model.optimizer.register_state_dict_pre_hook(lambda _: self.synchronize()),
            self._model.optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
        ]

    def explain(self, error: BaseException) -> str:
        """Say what a hidden step may have to do with an error of backward; "" if nothing."""
        if not (self.is_ahead and isinstance(error, RuntimeError) and _WRITTEN in str(error)):
            return ""
        return (
            f"offbeat may have stepped that tensor: with {short_name(self.plan.scheduling)} it steps a parameter when "
            "a module that reads the parameter begins its forward pass. A view that the script used before, or "
            "another tensor that shares the parameter's memory, did not wait for that. Use the parameter itself, "
            "call run.synchronize() after optimizer.step(), or leave scheduling out of the plan."
        )

    @property
    def wants_vote(self) -> bool:
        """Whether steps are no longer to be hidden behind the next one, or are by a schedule that is out of date."""
        is_due = self._used_steps >= _MOST_USED or bool(self._rewritten or self._why_copied or self._why_anew)
        return self.is_ahead and is_due

    @property
    def _why_anew(self) -> str:
        return "" if self._monitor is None else self._monitor.trigger.reason

    def vote(self) -> None:
        """Go back to waiting behind backward, if a worker has to wait there in each step; else make the schedule anew,
        if it is out of date. Collective.
        """
        if not self.is_ahead:
            return
        is_used = self._used_steps >= _MOST_USED
        mine = "gradients are used in each step, as by clipping or zero_grad(set_to_none=False)" if is_used else ""
        mine = mine or self._why_rewritten or self._why_copied
        if why := self._first_told("whether steps are hidden behind the next one", mine):
            self._return_to_barrier()
            self._stay_at_barrier(why)
        elif why := self._first_told("whether the schedule is made anew", self._why_anew):
            self._schedule_anew(why)
        # All has landed for the vote, so that nobody has to wait who would have: that is no other habit.
        self._is_used = self._is_used or self._used_steps > 0
        # Who has asked for a vote along with the last step has been heard in this one.
        heard = [(step, dataclasses.replace(result, vote_requested=False)) for step, result in self._results]
        self._results = deque(heard)

    @property
    def _why_rewritten(self) -> str:
        if not self._rewritten:
            return ""
        names = worker_questions.some(self._rewritten)
        return f"backward writes to {names}, as where activation checkpointing computes BatchNorm again"

    def _schedule_anew(self, why: str) -> None:
        """Make the schedule of what all have found by now, and go by it if that is worth it. Collective."""
        control, before = self._context.control, self.schedule
        assert before is not None
        monitor = self._monitor
        mine = "" if monitor is None else to_text(monitor.measured())
        profile = agreed(control.texts("what the last steps have taken", mine))
        assert monitor is not None, "else this worker's own text was not read"
        schedule = self._made_by_all(profile)
        is_new = is_worth_it(profile, schedule, instead_of=before)
        monitor.trigger.decided(is_new=is_new)
        was_s, is_s = (play(profile, one).step_s for one in (before, schedule))
        predicted = f"{is_s:.3g} s instead of {was_s:.3g} s, and at least {lower_bound_s(profile):.3g} s"
        if is_new:
            assert self._thread is not None
            self._thread.close()
            self._adopt_schedule(self._names, schedule, profile)
            self._start_thread(schedule)
            self._leave_schedule(why)
            now, then = len(schedule.blocks), len(before.blocks)
            blocks = f"{now} blocks" if now == then else f"{now} blocks instead of {then}"
            text = (
                f"step {self.step}: gradients are scheduled anew ({why}): {blocks}, and a step is to take {predicted}."
            )
            self._context.log.all("scheduling", text)
        else:
            self._profile = profile
            text = f"step {self.step}: the schedule stays ({why}): with a new one a step would take {predicted}."
            self._context.metrics.event("scheduling", text, self.step)
            _log.info("%s", text)
        self._monitor = self._monitor_of(profile, schedule if is_new else before, monitor)

    def _monitor_of(
        self, profile: BackwardProfile, schedule: Schedule, earlier: ScheduleMonitor | None = None
    ) -> ScheduleMonitor:
        is_of_host = all(bucket.device.type != "cuda" for bucket in self.layout.buckets)
        return ScheduleMonitor(profile, schedule, earlier, is_of_host=is_of_host)

    def _return_to_barrier(self) -> None:
        """Wait behind backward from here on; on all workers at the same step."""
        self.synchronize()
        self._land_ahead()
        self._build(self._arranged(self._order, self.layout.version + 1))
        self._context.metrics.laid_out(self.step, [bucket.record for bucket in self.layout.buckets])

    def _land_ahead(self) -> None:
        """End what was begun to be ahead, and forget the schedule."""
        if self.synchronize in (questions := self._context.control.before_question):
            questions.remove(self.synchronize)
        self._allow(self._entries)
        self.schedule = self._profile = self._monitor = None
        self._looks = False
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        for hook in self._watch_hooks:
            hook.remove()
        self._watch_hooks.clear()

    def _objection(self, learner: ScheduleLearner) -> str:
        """The reason why it has to stay a barrier, as far as this worker knows; "" if there is none."""
        if objection := self._optimizer.objection:
            return objection
        if self.layout.sparse:
            return f"the gradient of {self.layout.sparse[0]} is sparse"
        if self._rewritten:
            return self._why_rewritten
        if learner.is_compiled:
            return "the model is compiled, and what its modules read cannot be waited for one by one"
        if learner.is_blind:
            return BLIND
        if odd := next((e for e in self._entries.values() if not can_pend(e.parameter)), None):
            return f"{odd.name} is of {type(odd.parameter).__name__}, and nothing can wait where such a tensor is used"
        if learner.lacking and self.schedule is None:  # else it was in the schedule's own first steps that it counted
            return f"{worker_questions.some(learner.lacking)} had no gradient in some step"
        return ""

    def _first_told(self, question: str, mine: str) -> str:
        """The words of the first worker that says anything, and its rank; "" if none does. Collective."""
        told = self._context.control.texts(question, mine)
        return next((f"rank {rank}: {text}" for rank, text in told.items() if text), "")

    def _stay_at_barrier(self, why: str) -> None:
        self._why_barrier = why
        self._tell_barrier(why)

    def _tell_barrier(self, why: str) -> None:
        self._tell(self.step, "scheduling", f"step {self.step}: workers wait for the gradients after backward: {why}.")

    def _scheduled(self, names: Sequence[str], schedule: Schedule) -> Layout:
        """The layout in which each block of a schedule of these gradients is a bucket."""
        buckets = []
        for index, block in enumerate(schedule.blocks):
            slots, offset = [], 0
            like = self._entries[names[block.slices[0].gradient]].parameter
            dtype = like.dtype.to_real()
            reals = like.dtype.itemsize // dtype.itemsize  # a complex number is two
            for one in block.slices:
                name = names[one.gradient]
                parameter = self._entries[name].parameter
                is_part = one.numel < parameter.numel()
                shape = tuple(parameter.shape)
                slots.append(Slot(name, shape, offset, reals * one.numel, reals * one.start, is_part))
                offset += slots[-1].numel
            buckets.append(Bucket(index, dtype, like.device, tuple(slots)))
        return Layout(tuple(buckets), version=self.layout.version + 1)

    def _before_module(self, names: tuple[str, ...]) -> None:
        if self._gradients:
            self._step_some(names)
        self._allow(names)

    def _use(self, entry: GradEntry) -> None:
        """Wait for a gradient that is used."""
        if self._open:
            return  # within backward it is this worker's own
        if self._flight is not None:
            self._is_used = True
        self._land(entry.name)
        if entry.name in self._gradients:
            self._step_some((entry.name,))

    # -- who uses a parameter before its step is in it -----------------------------------------------------------

    def _expect(self, names: Iterable[str]) -> None:
        """Have whoever uses these parameters wait, until `_allow`; those that the optimizer is to step."""
        if not self.is_ahead:
            return
        stepped = {name: self._entries[name].parameter for name in names}
        stepped = {name: one for name, one in stepped.items() if self._optimizer.holds(one)}
        for mode in self._modes:
            mode.expect(stepped)
        for name, parameter in stepped.items():
            pend(parameter, self._uses[name])

    def _allow(self, names: Iterable[str]) -> None:
        """Let these parameters be used: their step is in them."""
        allowed = [self._entries[name].parameter for name in names]
        for parameter in allowed:
            settle(parameter)
        for mode in self._modes:
            mode.allow(allowed)
            if mode is self._watch and not mode.has_early:
                mode.close()

    @property
    def _modes(self) -> Sequence[FreshnessMode]:
        return [mode for mode in (self._freshness, self._watch) if mode is not None and mode.is_open]

    def _parameter_used(self, name: str, what: str, caller: FrameType) -> None:
        """Have a parameter's step in it: it is used where no module was seen to read it."""
        if what and (self._freshness is not None or not self._told_use) and (line := line_of(caller)):
            if self._freshness is not None:
                self._freshness.refuse(name, what, line)
            self._told_use = True
            text = (
                f"step {self.step}: {line} uses {name} ({what}) before a module that reads it begins its forward pass. "
                "offbeat waits there for the last step, so less of it is hidden."
            )
            self._context.log.all("scheduling", text)
        if self._gradients:
            self._step_some((name,))
        self._allow((name,))

    def _watch_if_due(self) -> None:
        """Watch a step that is done already, so that all that is used is as it should be whatever is found."""
        if not self.is_ahead or self._until_watched >= 0:
            return
        self._until_watched = _EACH - 1
        if self._freshness is None and self._watch.open(alone=True):
            self._optimizer.capture()
            self._expect(self._entries)

    def _memory_used(self, name: str, what: str, line: str) -> None:
        """Note that a parameter's memory is used where nothing can wait."""
        self._why_copied = self._why_copied or (
            f"{line} uses the memory of {name} ({what}) through another tensor, such as an earlier view, which cannot "
            "wait for a step; use the parameter itself there"
        )

    # -- during backward -----------------------------------------------------------------------------------------

    def _on_grad(self, entry: GradEntry, parameter: torch.Tensor) -> None:
        if self._flight is not None:  # of a backward that only accumulates
            self.synchronize()
        super()._on_grad(entry, parameter)
        if self._learner is not None and self.sync and entry.fired == entry.expected:
            self._learner.complete(entry.name)
        elif self._looks and self._monitor is not None and entry.fired == entry.expected:
            self._monitor.gradient_is_complete(entry.name, self._context.metrics.now_s() - self._backward_began_s)

    def _fire(self) -> None:
        super()._fire()
        if self._buffers is None:
            return
        if self._thread is None:
            self._buffers.mark()
        else:
            self._broadcast = BroadcastInFlight(self._buffers, self.accounting.source, self._carrier)
            self._thread.issue(self._broadcast)

    def _reset_counts(self) -> None:
        self.synchronize()  # an exchange begins: it takes the memory of the one before
        super()._reset_counts()
        self._blocks = []
        if self.is_ahead:
            self._carrier.step, self._carrier.buckets = self.step, len(self._buckets)
            self._backward_began_s = now_s = self._context.metrics.now_s()
            waited_s = self._context.waiter.waited_s - self._waited_before_s
            self._forward_s = max(0.0, now_s - self._forward_began_s - waited_s)
            self._looks = self._monitor is not None and self._monitor.watches_gradients

    def _issue(self, index: int) -> None:
        if self._thread is None:
            super()._issue(index)
            return
        complete_s = self._context.metrics.now_s()
        with torch._C.DisableTorchFunctionSubclass():
            buffer, exchange = self._prepared(index, self._carrier)
        first: BlockInFlight | ReduceInFlight
        if self.in_two_rounds:
            first = ReduceInFlight(buffer, exchange)
            self._blocks.append(GatherInFlight(first, complete_s))
        else:
            first = BlockInFlight(buffer, exchange, complete_s)
            self._blocks.append(first)
        self._under_way.append((buffer, exchange))
        self._thread.issue(first)

    # -- at its end ----------------------------------------------------------------------------------------------

    def _fence(self) -> None:
        if self._buffers is not None and self._any_fired:
            self._rewritten = self._rewritten or self._buffers.changed()
        if self._thread is None or not self._any_fired:
            if self._learner is not None and self._any_fired:
                self._learner.backward_ends()  # before what is waited for
            super()._fence()
            return
        metrics = self._context.metrics
        metrics.compute_done()
        ended_s = metrics.now_s()
        self._queue.flush()
        blocks = [self._blocks[index] for index in self._landing]
        for block in blocks if self.in_two_rounds else ():
            self._thread.issue(block)
        self._thread.finish()
        if self._broadcast is not None:
            self._context.waiter.wait(self._broadcast, WaitContext("broadcast of the buffers", self.step))
            self._broadcast.take_over()
        accounting = self.accounting
        self._flight = Flight(self.step, blocks, accounting.weight, accounting.stamp)
        is_whole = accounting.weight > 0 and accounting.absent is None and all(e.used for e in self._entries.values())
        backward_s = (self._backward_began_s, ended_s)
        hidden = HiddenExchange(self._landed_step, tuple(self._waits), backward_s, tuple(self._between))
        spans, self._spans, self._between, self._waits = tuple(self._spans), [], [], []
        if is_whole:
            self._flight.taken = StepTaken(
                (),
                self._backward_began_s,
                ended_s,
                self._forward_s,
                metrics.samples,
                len(self._context.control.members),
            )
            accounting.sent()
        else:
            self._land_all(hands_out=True)
        self._count_exchange(spans, dropped=False, hidden=hidden)

    def _land(self, name: str) -> None:
        """Wait for a gradient."""
        if (flight := self._flight) is None:
            return
        for buffer in self._entries[name].buffers:
            self._wait_for(flight, flight.blocks[self._landing[buffer.bucket.index]])

    def _wait_for(self, flight: Flight, block: BlockInFlight) -> None:
        if block.has_landed:
            block.take_up()
            return
        bucket = block.buffer.bucket
        context = WaitContext(
            "all-reduce", flight.step, bucket.index, len(flight.blocks), bucket.label, self._model.number
        )
        began_s = self._context.metrics.now_s()
        self._context.waiter.wait(block, context)
        block.take_up()
        self._waits.append((began_s, self._context.metrics.now_s(), bucket.index))

    def _land_all(self, *, hands_out: bool = False) -> None:
        """Wait for all of the flight, and read what the workers have said along with it.

        Args:
            hands_out: whether gradients that only others have are handed out.
        """
        if (flight := self._flight) is None:
            return
        for block in flight.blocks:
            self._wait_for(flight, block)
        self._flight = None
        self.accounting.landed()
        self._carrier.tell()
        trailers: list[BucketTrailer] = []
        for block in flight.blocks:
            assert block.trailer is not None
            if not block.trailer.in_step:
                raise worker_questions.different_batches(self._context.control, step=flight.step, stamp=flight.stamp)
            trailers.append(block.trailer)
        if hands_out:
            with torch._C.DisableTorchFunctionSubclass():
                for block, trailer in zip(flight.blocks, trailers, strict=True):
                    block.buffer.hand_out(trailer.used_elsewhere)
        result = self._result_of(trailers, [block.exchange for block in flight.blocks], flight.weight)
        in_order = sorted(flight.blocks, key=lambda block: block.buffer.bucket.index)  # of the schedule
        self._spans, self._between = _spans_of([block.exchange for block in in_order])
        self._landed_step = flight.step
        if self._monitor is not None and flight.taken is not None:
            self._monitor.step_taken(flight.taken._replace(operations=[*_times(in_order), *_rounds(flight.blocks)]))
            assert self.schedule is not None
            if self._why_anew and not can_be_worth_it(self._monitor.measured(), self.schedule):
                self._monitor.trigger.decided(is_new=False)  # a vote costs a step
        self._results.append((flight.step, result))
        self._context.waiter.witness.exchanged(flight.stamp)

    def _result_before(self, step: int) -> ExchangeResult | None:
        """The findings of exchanges before this one; the same are known on all workers by then."""
        found: ExchangeResult | None = None
        while self._results and self._results[0][0] < step:
            found = self._results.popleft()[1].after(found)
        return found

    # -- the optimizer's part ------------------------------------------------------------------------------------

    def _step_some(self, names: Iterable[str]) -> None:
        """Step these, and whatever else has landed by then, if they are to be stepped."""
        due = [name for name in names if name in self._gradients]
        if not due:
            return
        for name in due:
            self._land(name)
        landed = len(self._buckets) if self._flight is None else self._flight.landed
        self._step([name for name in self._gradients if self._last_landing[name] < landed])

    def _step_all(self) -> None:
        if self._gradients:
            self._land_all()
            self._step(list(self._gradients))
        self._allow(self._entries)

    def _step(self, names: Collection[str]) -> None:
        self._allow(names)
        gradients = [(self._entries[name].parameter, self._gradients.pop(name)) for name in names]
        self._optimizer.step([(p, g.plain if isinstance(g, PendingGradient) else g) for p, g in gradients])


def _spans_of(exchanges: Sequence[BucketExchange]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The times at which exchanges were issued and done; of two rounds, at which one was done, and the other issued."""
    spans = [(one.issued_s, one.done_s) for one in exchanges if one.done_s is not None]
    between = [
        (one.reduced_s, one.gathering_s)
        for one in exchanges
        if one.reduced_s is not None and one.gathering_s is not None
    ]
    return spans, between


def _times(blocks: Iterable[BlockInFlight]) -> list[OperationTimes]:
    """The times of each block's only round, or of the first of two; they have landed."""
    found = []
    for block in blocks:
        exchange = block.exchange
        done_s, is_seen = exchange.done_s, block.is_end_seen
        if isinstance(block, GatherInFlight):
            done_s, is_seen = exchange.reduced_s, block.reduce.is_end_seen
        assert done_s is not None, "it has landed"
        found.append(OperationTimes(block.complete_s, exchange.issued_s, done_s, is_seen))
    return found


def _rounds(blocks: Iterable[BlockInFlight]) -> list[OperationTimes]:
    """The times of the second round of each block that has two; they have landed."""
    found = []
    for block in blocks:
        if isinstance(block, GatherInFlight):
            reduced_s, issued_s, done_s = block.exchange.reduced_s, block.exchange.gathering_s, block.exchange.done_s
            assert reduced_s is not None
            assert issued_s is not None
            assert done_s is not None, "it has landed"
            found.append(OperationTimes(reduced_s, issued_s, done_s, block.is_end_seen))
    return found
