"""One model's synchronizer, as a run holds it: what is at work in it changes with the plan.

    gradients of every step    by all-reduce (`reducer`), or with a server (`server_sync`)
    deltas of local steps      around either of them (`local_sgd`), averaged the same way

Where exchanges are collective all workers change over together, behind an exchange in which one had requested a vote:

    to LocalSGD      the parameters are the same on all workers, so they are the anchor, and so is what the optimizer
                     has gathered; the next step is the first of their own
    from LocalSGD    behind an average: the parameters are the same again. What each optimizer has gathered is not, and
                     would take them apart, so that is averaged, too. The outer momentum ends.

On a switch they tell it there how many contributions make an update, if that is another number (`KSync`).

At a server each worker does so by itself, whenever it hears of the swap:

    to LocalSGD      before a step: the parameters are the server's, so they are the anchor; the step at hand is the
                     first of its own. The optimizer here takes over what the server's copy has gathered.
    from LocalSGD    behind a step: it pushes the delta it has, of however many steps, and has the server's parameters.
                     The server's copy of the optimizer goes on from where it was.

So each gradient is in one contribution, whatever the others have heard by then; the server applies what is of the
earlier kind by itself (`offbeat.sync.transition`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offbeat.engine import state_checks
from offbeat.engine.averaged_replicas import mean_of_replicas, shown
from offbeat.engine.communicator import Communicator
from offbeat.engine.local_sgd import LocalSGDSync
from offbeat.engine.local_sgd_server import ServerAverager
from offbeat.engine.optimizer_state import load, load_optimizer_state, optimizer_state
from offbeat.fabric import SumsSome
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.strategy import compile_policy
from offbeat.sync import BSP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.engine.local_sgd import Averager
    from offbeat.engine.local_sgd_switch import SwitchAverager
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.synchronizer import GradientSync, Synchronizer
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.layout import Layout
    from offbeat.plan import Plan

_MEASURE_S = 5.0  # from one look at what was not sent to the next


class Transport(NamedTuple):
    """A way from worker to worker: what takes gradients there, and what makes an averager of deltas for a policy."""

    gradients: GradientSync
    averager: Callable[[Plan], Averager]


class SwitchableSync:
    """A synchronizer that keeps one model together with the other workers' replicas, by whichever plan holds. A
    `Synchronizer`.

    Args:
        model: that is kept together.
        transport: of the beginning.
        context: of this worker.

    Attributes:
        unsent_norm: the norm of what this worker has computed and not sent, lately.
    """

    def __init__(self, model: PreparedModel, transport: Transport, context: WorkerContext) -> None:
        self._model, self._context = model, context
        self._gradients, self._averager = transport
        self._plan = self._gradients.plan
        self._local: LocalSGDSync | None = None
        self._unreported: ExchangeResult | None = None  # of an average between two steps
        self.unsent_norm, self._measured_s = 0.0, -_MEASURE_S
        self._is_shown = False  # what all have in common, in place of this worker's own replica
        self._settled_at = self._replica_saved_at = -1  # steps
        self._begin()

    # -- called around a step ------------------------------------------------------------------------------------

    @property
    def accounting(self) -> BatchAccount:
        """The account of this worker's batches for the next exchange."""
        return self._gradients.accounting

    @property
    def layout(self) -> Layout:
        """The layout of the gradients."""
        return self._gradients.layout

    @property
    def step(self) -> int:
        """Steps, of this worker or of all."""
        return self._active.step

    @property
    def number(self) -> int:
        """The number of the next contribution, as policies count."""
        return self._gradients.number

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self._active.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._active.sync = sync

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins."""
        self._active.on_forward(inputs)

    def on_backward(self) -> None:
        """Begin to exchange: the outermost backward has begun."""
        self._active.on_backward()

    def before_step(self) -> None:
        """Have in `.grad` what the optimizer is to step with; at a server local steps may begin with this one."""
        if self._local is None and self._plan.steps_locally:
            self._begin_local_steps()
        self._note_last_delta()
        self._active.before_step()

    def after_step(self) -> ExchangeResult | None:
        """Finish the step that the optimizer has made; return what exchanges have found out since the one before."""
        earlier, self._unreported = self._unreported, None
        result = self._active.after_step()
        self._end_local_steps_if_due()
        self._measure_unsent()
        return earlier if result is None else result.after(earlier)

    def _measure_unsent(self) -> None:
        """Measure now and then what is lost if this worker is; rarely enough to cost nothing."""
        if (now_s := self._context.clock.now_s()) < self._measured_s + _MEASURE_S:
            return
        self._measured_s = now_s
        kept = self._model.codec_state.residuals()
        values = self._model.parameters
        apart = (values[name].detach() - value.to(values[name].device) for name, value in self.anchors.items())
        # One by one: all differences at once were another model. A server's values are on the CPU.
        norms = (float(torch.linalg.vector_norm(one.float())) for one in itertools.chain(kept, apart))
        self.unsent_norm = math.hypot(*norms)

    def synchronize(self) -> None:
        """Have all of the steps that the optimizer was told to make done; this worker's own."""
        self._gradients.synchronize()

    def explain(self, error: BaseException) -> str:
        """Say what the exchange of gradients may have to do with an error that leaves the script; "" if nothing."""
        return self._gradients.explain(error)

    @property
    def wants_vote(self) -> bool:
        """Whether something of how gradients are exchanged is to be decided by all."""
        return self._gradients.wants_vote

    def vote(self) -> None:
        """Decide it, if there is something. Collective."""
        self._gradients.vote()

    def settle(self) -> None:
        """Push what has not been pushed, or make all replicas equal. Collective where exchanges are."""
        self.synchronize()
        self._note_last_delta()
        if (result := self._active.settle()) is not None:  # not of a step: no one's weights
            self._unreported = dataclasses.replace(result.after(self._unreported), weights=())
        self._settled_at = self.step
        self._end_local_steps_if_due()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the model be the mean of all replicas, then this worker's own again. Collective, where it begins."""
        self.synchronize()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # none where the others have the same, or a server has
        if self._keeps_replica and not self.is_collective:  # a server has what all have in common
            pairs = [(self._model.parameters[name], value) for name, value in self.anchors.items()]
        elif self._local is not None and self.is_collective and self._context.control.world > 1:
            communicator = Communicator(self._model.fabric, self._context, self._model.number)
            pairs = mean_of_replicas(self._model, communicator)
        with shown(pairs):
            self._is_shown = bool(pairs)
            try:
                yield
            finally:
                self._is_shown = False

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Have another optimizer step the model from here on; on all workers at the same place, without a server."""
        self.synchronize()
        self._model.optimizer = optimizer
        self._gradients.even_out()  # steps were hidden behind the next one for the optimizer of before

    def leave(self) -> None:
        """Have the others go on without this worker, which makes no further step."""
        if self._local is not None:
            self._local.leave()

    def refreshed(self) -> None:
        """Take over the newest parameters of a server, which are here."""
        self._active.refreshed()

    def close(self) -> None:
        """Take the hooks off: the run is over."""
        self._gradients.close()

    # -- what it can do ------------------------------------------------------------------------------------------

    @property
    def is_collective(self) -> bool:
        """Whether all workers meet in each exchange, so that they can vote behind it, and change over together."""
        return self._gradients.is_collective and not self._plan.is_tabled

    @property
    def needs_its_optimizer(self) -> str:
        """The reason why replicas come apart if another optimizer steps them; "" if `.grad` is all that it needs."""
        if self._plan.is_served:
            return "the server holds the parameters, and steps them with a copy of it"
        if self._plan.steps_locally:
            return "it is its steps that workers count, and average behind"
        return ""

    @property
    def can_average(self) -> bool:
        """Whether `averaged` shows what all have in common, where replicas differ."""
        return self._keeps_replica or self.is_collective

    @property
    def holds_own_replica(self) -> bool:
        """Whether the parameters are those of this worker alone, of which no checkpoint was begun at this step."""
        local = self._local
        if local is None or not local.is_anchored or self._is_shown or self._replica_saved_at == self.step:
            return False
        if not self._plan.is_served and self._context.control.world == 1:
            return False
        return not local.is_even or (self.table is not None and self._settled_at != self.step)

    @property
    def table(self) -> SwitchAverager | None:
        """The model's table at a switch, which decides by which plan all go; None if it has none."""
        return None if self._local is None else self._local.averager.table

    @property
    def anchors(self) -> dict[str, torch.Tensor]:
        """The parameters that all workers have in common while theirs never are, by name; empty if they sometimes are.

        They are those of the last average that was applied, of each fragment; or a server's.
        """
        if self._local is None or not self._local.is_anchored or not self._plan.replicas_differ:
            return {}
        return self._local.averager.common

    @property
    def history_values(self) -> Mapping[str, torch.Tensor]:
        """The values by name of which the history has a digest behind each step: the consensus, or the parameters."""
        return self.anchors if self._keeps_replica else self._model.parameters

    @property
    def in_common(self) -> Mapping[str, torch.Tensor]:
        """The values that all workers have in common at this place, by name: parameters, or anchors; empty if none."""
        if self._plan.replicas_differ and not self._plan.is_served:
            return self.anchors or self._model.parameters
        return self._model.parameters if isinstance(self._plan.sync, BSP) else {}

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not exchanged, because it is being accumulated."""
        return self._gradients.holds_gradient

    @property
    def pending_result(self) -> ExchangeResult | None:
        """The findings of an exchange whose step has not been made."""
        return self._gradients.pending_result

    # -- from one way to another ---------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The one that it goes by."""
        return self._plan

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from here on, where all may go over to it (see above). Collective where exchanges are: behind
        local steps all average.
        """
        self.synchronize()
        before, self._plan = self._plan, plan
        self._gradients.adopt(plan)
        if before.has_quorum and before.sync != plan.sync:
            self._set_strategy(Strategy())  # whatever else is exchanged before the next step is of all
        if self._local is not None and not self._is_to_end:
            self._local.adopt(plan)
            if (table := self.table) is not None:
                table.policy = plan.sync
        if not self.is_collective:
            return
        if self._local is not None and self._is_to_end:
            if not self._local.is_even:  # another model's step is the border
                self.settle()
            self._end_local_steps_if_due()
        if self._local is None and plan.steps_locally:
            self._begin_local_steps()
        if plan.has_quorum and before.sync != plan.sync:
            self._set_strategy(compile_policy(plan.sync))

    def _set_strategy(self, strategy: Strategy) -> None:
        """Have sums be made by another policy; nobody begins one before all have been told. Collective."""
        if isinstance(self._model.fabric, SumsSome):
            self._model.fabric.set_strategy(strategy)
            self._context.control.sum("the switch is told how many make an update")

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer here has stepped by itself, so that it is not as those of the other workers."""
        return self._local is not None and self._local.is_anchored

    def go_by(self, transport: Transport) -> None:
        """Have the gradients of every step go another way from here on; between two steps of all workers.

        Raises:
            WorkerLostError, NetworkError: if a server is left that is gone.
        """
        self.synchronize()
        sync = self.sync
        self._gradients.detach(has_own_optimizer=self.has_own_optimizer)
        self._local = None
        self._gradients, self._averager = transport
        self._plan = self._gradients.plan
        self._model.codec_state.rescale_(self._plan.working_codec, self._gradients.gradient_scale)
        self._gradients.sync = sync

    def _begin(self) -> None:
        self._model.codec_state.rescale_(self._plan.working_codec, self._gradients.gradient_scale)
        self._local = None
        if self._plan.steps_locally:
            self._local = self._local_sync(self._plan.step_of(self._gradients.number), 0)

    def _begin_local_steps(self) -> None:
        begun = self._gradients.step
        self._local = self._local_sync(begun, self._plan.step_of(self._gradients.number) - begun)

    def _local_sync(self, step: int, ahead: int) -> LocalSGDSync:
        averager = self._averager(self._plan)
        return LocalSGDSync(self._model, self._gradients, averager, self._context, step=step, ahead=ahead)

    def _note_last_delta(self) -> None:
        """Have this worker push the delta it has next, if another policy decides."""
        if self._local is not None:
            self._local.ends = self._is_to_end

    def _end_local_steps_if_due(self) -> None:
        """Exchange gradients from here on, if it is time, and the delta has been pushed."""
        if self._local is None or not self._is_to_end:
            return
        if self._local.is_even:  # else the swap has come since the optimizer began to step
            self._local.end(evens_optimizers=not self._plan.steps_locally)
            self._local = None

    @property
    def _is_to_end(self) -> bool:
        if self._local is None or self._local.plan.sync == self._plan.sync:
            return False
        return not (self._local.plan.is_tabled and self._plan.is_tabled)  # whose table goes on

    @property
    def _active(self) -> Synchronizer:
        return self._gradients if self._local is None else self._local

    # -- for checkpoints, and for newcomers without a server -----------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the present synchronizer."""
        self.synchronize()
        return {**self._shared_state(), "codec": self.codec_state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; codec state of another worker is left where it is.

        Raises:
            ModelError: if that is damaged, or of another model.
        """
        self.synchronize()
        self._load_shared(state)
        self.load_codec_state_dict(state["codec"])

    def codec_state_dict(self) -> dict[str, Any]:
        """The codec's state, with the rank of this worker, whose it is, and what it has spent of its privacy; empty if
        nothing is kept.
        """
        one = self._model
        state = one.codec_state.state_dict() | self._replica_state() | one.private.state_dict()
        return {"rank": self._context.rank, **state} if state else {}

    def load_codec_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `codec_state_dict` returned on a worker of this rank; begin anew with another's."""
        own = state if state.get("rank") == self._context.rank else {}
        codec = self._plan.codec if self._plan.codec.promises.offset else self._plan.working_codec
        self._model.codec_state.load_state_dict(codec, self.layout, own)
        self._model.private.load_state_dict(own)
        if self._keeps_replica:
            self._load_replica(own)

    @property
    def _keeps_replica(self) -> bool:
        """Whether this worker's parameters hold what it has not sent."""
        return bool(self._plan.codec.promises.offset) and self._local is not None and self._local.is_anchored

    def _replica_state(self) -> dict[str, Any]:
        """The parameters and the optimizer's state of this worker, if they hold what it has not sent."""
        if not self._keeps_replica:
            return {}
        self._replica_saved_at = self.step
        one = self._model
        parameters = {name: parameter.detach().clone() for name, parameter in one.parameters.items()}
        anchors = {name: anchor.clone() for name, anchor in self._anchors_of_its_own.items()}
        return {"replica": {"parameters": parameters, "optimizer": one.gathered(), "anchors": anchors}}

    @property
    def _anchors_of_its_own(self) -> dict[str, torch.Tensor]:
        """The parameters from which this worker's delta is measured, by name, if others have others; else empty."""
        averager = None if self._local is None else self._local.averager
        if self._plan.codec.promises.offset != "dropped" or not isinstance(averager, ServerAverager):
            return {}
        return averager.anchors

    def _load_replica(self, own: Mapping[str, Any]) -> None:
        """Take over the same of a checkpoint; one that has none begins with what all have in common."""
        one, replica = self._model, own.get("replica")
        values = self.anchors if replica is None else replica["parameters"]
        for name, parameter in one.parameters.items():
            state_checks.copy_(parameter.data, values, name, name)
        if replica is not None:
            for name, anchor in self._anchors_of_its_own.items():
                state_checks.copy_(anchor, replica["anchors"], name, name)
            load(one.optimizer, one.parameters, replica["optimizer"])

    def admit(self, ranks: Iterable[int]) -> None:
        """Have these tell how long they compute, too; on all workers at the same place."""
        self.synchronize()
        self._gradients.ranks = max(self._gradients.ranks, *(rank + 1 for rank in ranks))

    def even_out(self) -> None:
        """Have the same parameters on all workers, which newcomers begin with, and no findings they lack. Collective.

        Whoever still wants a vote requests it again.
        """
        self.synchronize()
        if self._local is not None and not self._local.is_even:
            self.settle()
        self._gradients.even_out()
        self._unreported = self._gradients.pending_result = None

    def hand_over(self) -> dict[str, Any]:
        """Collect what a new worker needs of this model, but for parameters and buffers; in a dict of names."""
        self.synchronize()
        return {
            "stamp": self.accounting.stamp,
            "ranks": self._gradients.ranks,
            "synchronizer": self._shared_state(),
            "optimizer": optimizer_state(self._model.optimizer, self._model.parameters),
        }

    def take_over(self, state: Mapping[str, Any], plan: Plan) -> None:
        """Take over what `hand_over` returned on another worker.

        Args:
            plan: that holds there.
        """
        self.synchronize()
        self._plan = plan
        self._gradients.adopt(plan)
        self._gradients.ranks = int(state["ranks"])
        self.accounting.stamp = int(state["stamp"])
        self._begin()
        self._load_shared(state["synchronizer"])
        load_optimizer_state(self._model.optimizer, self._model.parameters, state["optimizer"])

    def _shared_state(self) -> dict[str, Any]:
        ahead = {} if self._local is None else {"ahead": self._local.ahead}
        return {**self._active.state_dict(), **ahead}

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        if self._local is not None:
            self._local.ahead = state_checks.whole(state.get("ahead", 0), "steps ahead")
        self._active.load_state_dict(state)
