"""The plan of a run, and its swaps while it trains.

With a server the server says so; without one the workers vote behind an exchange (`offbeat.engine.plan_vote`); all go
from one to the other at the same place of the script (`offbeat.run.fabric_migration`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Any

from offbeat.control import RoundController, swap_sentence
from offbeat.engine import PlanVote, addresses_of, check_sums_some, connect, start_beside
from offbeat.errors import NetworkError, OffbeatError, PlanError
from offbeat.fabric import ProcessGroup, Served
from offbeat.protocol.worker_status import TableClock
from offbeat.run.fabric_migration import FabricMigration
from offbeat.short_name import short_name
from offbeat.switch.packet import distance
from offbeat.sync import ASP, BSP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.factory import SynchronizerFactory
    from offbeat.engine.local_sgd_switch import SwitchAverager
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.switchable_sync import SwitchableSync
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.fabric import FabricSpec
    from offbeat.fabric.switch_table import SwitchTable
    from offbeat.loading.manager import LoaderManager
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")
_LOOK_S = 1.0  # between two looks at who is on the table
_SILENT_S = 3.0  # then another one looks instead


class PlanManager:
    """One worker's part.

    Args:
        plan: of the beginning.
        context: of this worker.
        models: those prepared; more may come.
        data: of the run's loops.
        factory: makes what exchanges a model's gradients.

    Attributes:
        plan: that holds.
        server: at work; None without one.
    """

    def __init__(
        self,
        plan: Plan,
        context: WorkerContext,
        models: ModelRegistry,
        data: LoaderManager,
        factory: SynchronizerFactory,
    ) -> None:
        self.plan, self._thread = plan, threading.current_thread()
        self._met_for: FabricSpec = ProcessGroup() if plan.is_served else plan.fabric
        self.server: ServerSession | None = None
        self._had_server = False
        self._leaving: Plan | None = None  # the plan at the server, once another without it is agreed on
        self._context, self._data, self._models = context, data, models
        self._control, self._waiter, self._clock = context.control, context.waiter, context.clock
        self._migration = FabricMigration(context, models, data, factory)
        self._vote = PlanVote(context.control, context.clock.now_s, context.run_dir, self._check)
        self._controller = RoundController(context.clock.now_s())
        self._leads_table = not context.rank  # of those on a table: it looks for wishes, and asks the controller
        self._looked_s = 0.0  # who that is

    # -- the server ----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find or start the server of the plan, if it has one. Collective.

        Raises:
            NetworkError: if it cannot be reached.
            PlanError: if this worker joins a job that has one, and its plan has none.
        """
        fabric, named = self.plan.fabric, ",".join(self._context.launcher.servers)
        if not self.plan.is_served:
            if self._context.joins and named:
                raise PlanError(
                    f"Cannot join the job of the parameter server at {named}: this worker's plan has "
                    f"{short_name(fabric)}, so it would train alone. Give it the job's plan (`offbeat run --plan`) - "
                    "at `plan.fabric`."
                )
            if self._context.rank == 0 and named:
                _log.warning(
                    "Nobody uses the parameter server at %s: the plan's fabric is %s. Give the plan "
                    "fabric=ParameterServer() (or `offbeat run --fabric 'ParameterServer()'`), or leave out --servers "
                    "and OFFBEAT_SERVERS.",
                    named, short_name(fabric),
                )  # fmt: skip
            return
        assert isinstance(fabric, Served), "checked when the plan was made"
        if self.plan.validator is not None and not (fabric.addresses or named):
            raise PlanError(
                f"Cannot judge by {short_name(self.plan.validator)}: the server would be one that a worker starts, "
                "and so in its hands. Start it apart from them, with `offbeat run --servers 1` or `offbeat serve` - "
                "at `plan.validator`."
            )
        # A worker that is alone needs no server, unless one is there.
        if self._control.world > 1 or fabric.addresses or named:
            self.server = self._data.server = self._reach(self.plan)

    def _reach(self, plan: Plan, **how: Any) -> ServerSession:
        assert isinstance(plan.fabric, Served), "checked when the plan was made"
        return connect(plan, plan.fabric, self._context, self._stays, **how)

    def _stays(self, plan: Plan) -> str:
        """The reason why this worker could not leave the server to go by another plan, or ""."""
        if not self._takes_part:
            return "It has joined the job later."
        has_switch = "switch" in (self._met_for.offers.holds, plan.fabric.offers.holds)
        is_other = has_switch and plan.fabric != self._met_for
        if is_other or plan.has_elastic_group != (self._context.group is not None):
            here = short_name(self._met_for)
            return (
                f"Cannot leave the server for {short_name(plan.fabric)}: the workers have met for {here}. Go on with "
                f"fabric={here}, or begin with {short_name(plan.fabric)} - at `plan.fabric`."
            )
        return self._migration.stays

    @property
    def _takes_part(self) -> bool:
        """Whether this worker is one of those that can do without a server."""
        return not self._context.joins or self._control.world > 1

    def _check(self, plan: Plan) -> None:
        """See that this worker can go by another plan.

        Raises:
            OffbeatError: if it cannot.
        """
        self._migration.check(plan)
        self._check_quorum(plan)
        if plan.is_tabled == self.plan.is_tabled or self._control.world == 1:
            return
        here, there = short_name(self.plan.sync), short_name(plan.sync)
        if self._data.leased:
            raise PlanError(
                f"Cannot swap {here} for {there} on a switch while training: the workers share out the samples of a "
                "prepared loader step by step, which takes that all are at the same one. Begin with a policy like "
                f"{there}, or give the loader a sampler for distributed data - at `plan.sync`."
            )
        if len(self._models) > 1:
            raise PlanError(
                f"Cannot swap {here} for {there} on a switch while training: {len(self._models)} models are prepared, "
                "and their steps end at different places. Save a checkpoint, and start again - at `plan.sync`."
            )

    def _check_quorum(self, plan: Plan) -> None:
        if not plan.has_quorum or self._control.world == 1:
            return
        if self._data.leased:
            raise PlanError(
                f"Cannot swap {short_name(self.plan.sync)} for {short_name(plan.sync)} on a switch while training: the "
                "workers share out the samples of a prepared loader step by step, and so wait for all. Begin with a "
                f"policy like {short_name(plan.sync)}, or give the loader a sampler for distributed data - at "
                "`plan.sync`."
            )
        for one in self._models.prepared:
            check_sums_some(one, plan)

    # -- called while training -----------------------------------------------------------------------------------

    def swap(self, plan: Plan | None, **parts: Any) -> None:
        """Have another plan hold; see `offbeat.Run.swap`."""
        if plan is None and parts.get("sync", self.plan.sync) != self.plan.sync:
            parts = {"controller": None, **parts}  # it would swap back
        wanted = dataclasses.replace(self.plan if plan is None else plan, **parts)
        self.plan.swapped(wanted.to_toml(), whole=True)
        if self.server is not None:
            self.server.swap(wanted.to_toml(), self._waiter)
            if threading.current_thread() is self._thread:  # else the one that trains does before its next step
                self.take_plan()
        elif self._control.world > 1:
            self._vote.propose(wanted)
            self._swap_table()
            for one in self._models.together:
                one.accounting.requests_vote = True
        else:
            self.adopt(wanted)

    def take_plan(self) -> None:
        """Go by the plan that the server says holds."""
        if self.server is None or (plans := self.server.plans).present is plans.taken:
            return
        plan = plans.taken = plans.present
        self._leaving = None if plan.is_served else self._leaving or self.plan
        # One without a server holds once that is left; steps of the own end before.
        self.adopt(plan if plan.is_served else dataclasses.replace(self.plan, sync=ASP(), controller=None))
        while plans.notices:
            self._context.metrics.event("swap", plans.notices.popleft(), self._models.step, plan=plan.to_toml())

    def adopt(self, plan: Plan, *, by_controller: bool = False) -> None:
        """Go by it from now on. Collective where exchanges are: see `SwitchableSync.adopt`."""
        if plan.controller != self.plan.controller:
            self._controller.replaced()
        if plan.is_tabled != self.plan.is_tabled:
            self._controller.begin_anew()
        if plan.sync != self.plan.sync:
            self._controller.swapped(self.plan.sync, self._context.clock.now_s(), by_controller=by_controller)
        self.plan = plan
        if self.server is None:
            self._context.history.record_plan(plan)
        for synchronizer in self._models.synchronizers:
            synchronizer.adopt(plan)

    def wants_vote(self, *, looks: bool, step_times: Mapping[int, Sequence[float]] | None = None) -> bool:
        """Whether this worker, which has no server, wants all to confer behind their next exchange.

        Args:
            looks: whether it is the one that looks for wishes that somebody has left.
            step_times: how long each step has taken each worker, if there was an exchange.
        """
        self._ask_controller(looks=looks, step_times=step_times or {})
        return self._vote.is_wanted(self.plan, looks=looks) or self._migration.wants_vote

    def _ask_controller(self, *, looks: bool, step_times: Mapping[int, Sequence[float]]) -> None:
        """Ask the plan's controller behind a step, if there is one, and this is the worker that does."""
        # One that is alone has none of a plan with a server; nor does it matter to that one which policy decides.
        if (controller := self.plan.controller) is None or self.plan.is_served or not len(self._models):
            return
        step, samples = self._models.synchronizers[0].step, self._context.metrics.last_samples
        late = set(self._control.members) - step_times.keys() if self.plan.has_quorum else ()
        now_s = self._context.clock.now_s()
        if not self._controller.stepped(controller, step, samples, step_times, now_s, late=late):
            return
        if looks and self._migration.due is None and not self._vote.is_due:
            decision = self._controller.ask(controller, self.plan.sync)
            if decision is not None:
                self._vote.propose(self.plan.controlled(decision.sync), decision.reason)

    def go_on_from(self, plan: Plan) -> None:
        """A checkpoint was made with that plan: what this plan's controller had come to holds, if it is the same."""
        if self.plan.is_served or plan.controller is None or plan.controller != self.plan.controller:
            return
        if plan == self.plan.controlled(plan.sync):
            self.adopt(plan)

    def joined(self, ranks: Sequence[int]) -> None:
        """Go on with these, too. On all workers at the same place."""
        for one in self._models.together:
            one.admit(ranks)

    def hold_vote(self) -> None:
        """Have another plan hold if one of all wants it and none refuses. Collective, behind a step of all."""
        before, outcome = self.plan, self._vote.decide(self.plan)
        refusal, text = outcome.refusal, f"The plan stays as it is: {short_name(before.sync)}."
        if outcome.plan.is_served and not refusal:
            text = self._expect_server(outcome.plan)
        elif outcome.plan.digest != before.digest and not refusal:
            text, refusal = self._go_by(outcome.plan, outcome.reason)
        if refusal:
            self._tell(f"The plan stays as it is. {refusal}")
            if outcome.reason:
                self._controller.refused(before.controller)
        if self._migration.is_due():
            text, refusal = self._go_over()
        if self._migration.due is None or self._data.leased:
            self._vote.answer(text, refusal)

    def at_sync_point(self) -> None:
        """Migrate here to a server, or away from it, if that is due, or go by the policy that a table has meanwhile."""
        if self.plan.is_tabled:
            self._steer_table()
            self._take_table_plan()
            self._meet_where_half_full()
        elif self._migration.due is not None:
            self._go_over()
        elif self.server is not None:
            pushed = sum(one.number for one in self._models.synchronizers)
            if self.server.plans.sync_point.reached(self._waiter, pushed):
                self._leave_server(self.server)

    def _steer_table(self) -> None:
        """Have the policy hold that people or the controller want; behind a step, and while this worker waits."""
        if (table := self._table) is not None:
            table.while_waiting = self._steer_table
            try:
                self._look_at_table(table, self._models.synchronizers[0].step)
            except NetworkError as error:  # its own wait says so, if it stays away
                _log.debug("Cannot ask the switch how far all are: %s", error)
        self._vote.is_wanted(self.plan, looks=self._leads_table)
        self._swap_table()

    @property
    def _table(self) -> SwitchTable | None:
        """The first model's table, once it is open; None if there is none."""
        one = self._models.synchronizers[0].table if len(self._models) else None
        return None if one is None else one.opened

    def clocks(self) -> tuple[TableClock, ...]:
        """The clocks of all workers on the first model's table, if this is the worker that looks; on any thread."""
        table = self._table if self.plan.is_tabled and self._leads_table else None
        known = None
        with contextlib.suppress(NetworkError):  # whoever waits for the table says so
            known = None if table is None else table.status()
        members = () if known is None else known.members
        return tuple(TableClock(one.worker, one.lag, one.waited_s, one.silent_s) for one in members)

    def _look_at_table(self, table: SwitchTable, step: int) -> None:
        """See who is the first worker, which the others find out nowhere else while they exchange nothing, and ask the
        plan's controller by what the switch knows, if this is the one.
        """
        now_s, controller = self._clock.now_s(), self.plan.controller if self._leads_table else None
        asks = controller is not None and not self._vote.is_due and self._controller.is_due(controller, now_s)
        if (not asks and now_s - self._looked_s < _LOOK_S) or (known := table.status()) is None:
            return
        self._looked_s = now_s
        rank = self._context.rank
        there = [one.worker for one in known.members if one.worker == rank or (one.silent_s or 0.0) < _SILENT_S]
        self._leads_table = min(there, default=-1) == rank
        if controller is None or not asks:
            return
        ahead = {member.worker: distance(member.finished, table.clock) for member in known.members}
        steps = {rank: step + lead for rank, lead in ahead.items() if abs(lead) < known.ring - 2}  # the others rest
        waited_s = {member.worker: member.waited_s for member in known.members if member.worker in steps}
        self._controller.read(controller, now_s, steps, waited_s, self._context.metrics.last_samples)
        decision = None if table.is_changing else self._controller.ask(controller, self.plan.sync)
        if decision is not None:
            self._vote.propose(self.plan.controlled(decision.sync), decision.reason)

    def _meet_where_half_full(self) -> None:
        """Have all begin with an empty table before the values of this one have come too far."""
        for one in self._models.synchronizers if self._leads_table else ():
            table = None if one.table is None else one.table.opened
            if one.table is not None and table is not None and table.is_half_full and not table.is_changing:
                one.table.meet(self.plan)

    def _swap_table(self) -> None:
        """Have the policy hold that this worker wants, if it does, as soon as the last one is in effect for all."""
        if not self._vote.is_due or not self.plan.is_tabled:
            return
        wanted, _, reason = self._vote.withdraw(self.plan)
        try:
            self._check(wanted)
            are_set = [one.table.swap(wanted, reason) for one in self._models.synchronizers if one.table is not None]
        except OffbeatError as error:
            self._tell(f"The plan stays as it is. {error}")
            self._vote.answer("", str(error))
            if reason and isinstance(error, PlanError):  # else it may be wanted again
                self._controller.refused(self.plan.controller)
            return
        if not are_set or not all(are_set):  # of several models' tables some may be asked twice, which changes nothing
            self._vote.propose(wanted, reason)

    def _take_table_plan(self) -> None:
        """Go by the plan whose policy has come to hold at the switch."""
        for one in self._models.synchronizers:
            told = None if one.table is None else one.table.new_plan()
            if told is None or not told.plan:
                continue
            plan = self.plan.swapped(told.plan, whole=True)
            if told.strategy.renews and one.table is not None:
                self._begin_table_anew(one, one.table)
            elif plan == self.plan:
                pass
            elif plan.is_served:  # all are at the same step, and exchange gradients until they are at the server
                self._take(self.plan, dataclasses.replace(self.plan, sync=BSP(), controller=None), self._clock.now_s())
                sentence, refusal = self._expect_server(plan), ""
                if self._migration.is_due():
                    sentence, refusal = self._go_over()
                if self._migration.due is None:
                    self._vote.answer(sentence, refusal)
            else:
                self._vote.answer(self._take(self.plan, plan, self._clock.now_s(), told.reason), "")

    def _begin_table_anew(self, one: SwitchableSync, table: SwitchAverager) -> None:
        """Go on with an empty table, where all are at the same step for that. Collective."""
        began_s = self._clock.now_s()
        table.begin_anew()
        self._context.history.record_plan(self.plan)
        took_ms = 1000 * (self._clock.now_s() - began_s)
        self._tell(
            f"From step {one.step} on the table at the switch is an empty one: parameters have moved half as far as "
            f"its integers reach ({took_ms:.0f} ms)."
        )

    def close(self) -> None:
        """The run is over."""
        if self._migration.due is not None:
            self._tell(f"The run has ended before all workers moved to {short_name(self._migration.due.fabric)}.")
        if self._migration.starting is not None:
            self._migration.starting.abandon()

    # -- going over ----------------------------------------------------------------------------------------------

    def _expect_server(self, plan: Plan) -> str:
        """All have agreed to go over to a server: see that there is one; what is to be said. Collective."""
        assert isinstance(plan.fabric, Served), "checked when the plan was made"
        self._migration.due, when = plan, "now"
        if not addresses_of(plan.fabric, self._context, again=self._had_server):
            self._migration.starting = start_beside(self._context)
            when = "when the server has been started"
        if self._data.leased:
            when = "where the next loop over the data begins"
        text = f"All workers move to {short_name(plan.fabric)} {when}."
        if when != "now":
            self._tell(text)
        return text

    def _go_over(self) -> tuple[str, str]:
        """Migrate to the plan that is due; what is to be said, and why it does not hold. Collective."""
        assert self._migration.due is not None
        text, refusal = self._go_by(self._migration.due)
        if refusal:
            self._tell(f"The plan stays as it is. {refusal}")
        return text, refusal

    def _go_by(self, plan: Plan, reason: str = "") -> tuple[str, str]:
        """Have another plan hold, behind a step of all; what is to be said, and why it does not. Collective.

        Args:
            reason: of the controller that wants it.
        """
        before, began_s, refusal = self.plan, self._clock.now_s(), ""
        if plan.is_served:
            how = {"patience": self._context.timeout, "again": self._had_server, "starting": self._migration.starting}
            self.server, refusal = self._migration.to_server(plan, lambda: self._reach(plan, **how))
            if refusal:
                self._forget_server(before)
        return ("", refusal) if refusal else (self._take(before, plan, began_s, reason), "")

    def _forget_server(self, plan: Plan) -> None:
        """Adopt this plan, which has no server, and leave no trace of one to look for."""
        if self._context.run_dir is not None and self._control.is_leader:
            (self._context.run_dir / "server.json").unlink(missing_ok=True)
        if not plan.has_elastic_group:
            self._context.launcher.note_survival(False)

    def _take(self, before: Plan, plan: Plan, began_s: float, reason: str = "") -> str:
        """Go by it from now on; what is said of it."""
        if plan.is_tabled != before.is_tabled and not plan.is_served and self._control.world > 1:
            self._data.go_alone(alone=plan.is_tabled)
        self.adopt(plan, by_controller=bool(reason))
        new, old = short_name(plan.fabric), short_name(before.fabric)
        where = "" if plan.fabric == before.fabric else f", on {new}, not {old} any more"
        since, took_ms = f"From step {self._models.step} on ", 1000 * (self._clock.now_s() - began_s)
        text = swap_sentence(before, plan, since=since, where=where, reason=reason, took=f"; it took {took_ms:.0f} ms")
        self._tell(text)
        return text

    def _tell(self, text: str) -> None:
        self._context.log.all("swap", text, plan=self.plan)

    def _go_on_with(self, there: Sequence[int]) -> None:
        """Go on without a server with those that have left it; they form the generation, if there is one."""
        if (group := self._context.group) is not None:
            why = "had gone while there was a server."
            group.exclude({rank: why for rank in group.members if rank not in there})

    def _leave_server(self, server: ServerSession) -> None:
        """Go on without it, unless somebody is gone since all had agreed to. Collective."""
        before, began_s = self.plan, self._clock.now_s()
        for synchronizer in self._models.synchronizers:
            synchronizer.settle()
        self._data.give_back()
        there = server.leave(self._waiter)
        for synchronizer in self._models.synchronizers:
            synchronizer.refreshed()
        self.take_plan()
        plan = server.plans.present
        if plan.is_served or (len(there) < self._control.world and not plan.has_elastic_group):
            return
        self._go_on_with(there)
        self._migration.to_group(plan, server)
        self.server, self._had_server = None, True
        self._forget_server(plan)
        self._take(self._leaving or before, plan, began_s)
        self._leaving = None
