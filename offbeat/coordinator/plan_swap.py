"""The plan of a job, and its swaps: another plan is proposed to all, then agreed to by all, or dropped.

What the controller of the plan decides is proposed as well. But a worker that is stopped answers nothing, and may be
the very reason; it has agreed to all policies of the controller when it agreed to the plan. So a controller's proposal
is refused by whoever says so, and taken as agreed to by whoever is silent for `CONSENT_S`.

Under a plan without a server all are about to leave, at a sync point that they have agreed upon with it. Until then
each comes there by itself, as with `ASP`, unless all are in step. If one is lost before, the plan before comes to hold
again, and all stay; but where workers go on without one that is lost, they leave without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.control import swap_sentence
from offbeat.coordinator.instructions import ConsentTimer
from offbeat.coordinator.plan_proposal import PlanProposal
from offbeat.errors import PeerError, PlanError
from offbeat.protocol.plan_swap import AdoptPlan, PlanProposed
from offbeat.short_name import short_name
from offbeat.sync import StepsLocally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from offbeat.coordinator.instructions import Outbox
    from offbeat.coordinator.plan_proposal import DecidingParts, Tell
    from offbeat.protocol.plan_swap import PlanAgreement
    from offbeat.protocol.training import ModelInfo
    from offbeat.sync import Policy

CONSENT_S = 0.2
_MOST_LISTED = 4


class PlanSwaps:
    """The plan of one job.

    Args:
        read_plan: from TOML.
        out: what this leads to.
        adopted: called with the plan that holds from now on, what is to be told of it, and who wanted it.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        read_plan: Callable[[str], DecidingParts],
        out: Outbox,
        adopted: Callable[[DecidingParts, AdoptPlan, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._read_plan, self._out, self._adopted, self._now_s = read_plan, out, adopted, now_s
        self.present: DecidingParts | None = None
        self.count = 0  # of swaps, in all lives of the server
        self.are_level = False  # workers about to leave will have brought as many contributions when they meet
        self._before: DecidingParts | None = None  # what holds again if not all leave who are about to
        self._proposal: PlanProposal | None = None
        self._proposals = 0

    def begin(self, plan: str, count: int = 0) -> DecidingParts:
        """The plan that holds: the first one that was begun with.

        Args:
            count: how often it had been swapped.

        Raises:
            PlanError: if it cannot be read.
        """
        if self.present is None:
            self.present, self.count = self._read_plan(plan), count
        return self.present

    def forget(self) -> None:
        """All have left before anything had begun."""
        self.present, self.count = None, 0

    def swap(
        self,
        part: str,
        tell: Tell,
        workers: Set[int],
        *,
        has_begun: bool,
        whole: bool = False,
        ranks: Set[int] = frozenset(),
        by: str = "",
    ) -> None:
        """Request another plan; all workers are asked whether they can go by it.

        Args:
            part: of it, as TOML.
            tell: called, perhaps later, with what has changed, or why nothing has.
            workers: that are connected.
            has_begun: whether anything was decided yet.
            whole: what is not in `part` has its default.
            ranks: of the workers that the job began with here.
            by: who that is.
        """
        try:
            if self.present is None or not has_begun:
                raise PlanError("Cannot swap anything yet: training has not begun. Try again when it has.")
            if self._before is not None and part != self.present.to_toml():
                raise PlanError(
                    "Cannot swap the plan now: all workers are about to leave the server. Try again when they have."
                )
            parts = self.present.swapped(part, whole=whole)
            parts.check_world(len(workers))
            if not parts.is_served and not parts.has_elastic_group and workers != ranks:
                there = ", ".join(map(str, sorted(workers)))
                raise PlanError(
                    f"Cannot leave the server: the workers' process group is of the {len(ranks)} that the job began "
                    f"with, and rank {there} takes part now. Go on with the server, or start again from a checkpoint - "
                    "at `plan.fabric`."
                )
        except PlanError as error:
            tell("", str(error))
            return
        if self._proposal is not None and self._proposal.parts.digest == parts.digest:
            self._proposal.tell.append(tell)  # all workers run the same script
            self._proposal.by.append(by)
        elif self._proposal is not None:
            tell("", "Cannot swap the plan twice at once: another swap is under way. Try again when it is over.")
        elif parts.digest == self.present.digest:
            tell(f"The plan stays as it is: {short_name(self.present.sync)}.", "")
        else:
            self._propose_to_all(parts, [tell], workers, by)

    def control(self, sync: Policy, reason: str, tell: Tell, workers: Set[int]) -> None:
        """The plan's controller wants another policy; it has to wait if another plan is under way."""
        if self.present is None or self._proposal is not None or self._before is not None:
            return
        try:
            parts = self.present.controlled(sync)
            parts.check_world(len(workers))
        except PlanError as error:
            tell("", str(error))
            return
        self._propose_to_all(parts, [tell], workers, "the controller", reason)
        if self._proposal is not None:
            self._out.set_timer(ConsentTimer(self._proposal.number), self._now_s() + CONSENT_S)

    def consent(self, number: int) -> None:
        """Count all who have not voted by now on this proposal of a controller as agreeing."""
        if self._proposal is not None and self._proposal.number == number:
            self._proposal.waiting.clear()
            self._decide()

    def _propose_to_all(
        self, parts: DecidingParts, tell: list[Tell], workers: Set[int], by: str, reason: str = ""
    ) -> None:
        self._proposals += 1
        self._proposal = PlanProposal(self._proposals, parts, parts.to_toml(), tell, self._now_s(), [by], reason)
        for worker in sorted(workers):
            self._propose(self._proposal, worker)
        self._decide()

    def agree(self, worker: int, message: PlanAgreement) -> None:
        """Handle a worker's vote on the proposed plan."""
        if self._proposal is not None:
            self._proposal.hear(worker, message)
            self._decide()

    def join(self, worker: int, details: ModelInfo, *, life: int, is_trusted: bool = True) -> None:
        """Tell a worker that comes with an earlier plan which one holds, and ask it as the others were.

        If the server was set back to before a swap, the workers know better: that plan had been agreed upon.

        Args:
            life: of the server.
            is_trusted: whether its word counts about which plan holds.

        Raises:
            PeerError: if the worker's plan cannot be read, or cannot have come of this one.
        """
        present, back = self.present, details.back
        assert present is not None
        if self._before is not None and back is None:
            raise PeerError(f"Cannot admit rank {worker} now: all workers are about to leave the server.")
        try:
            if back is not None and back.life != life and back.swaps > self.count and is_trusted:
                by = f"rank {worker}, which reconnected with it"
                self._adopt(present.swapped(details.plan, whole=True), details.plan, back.swaps, by)
            elif self._read_plan(details.plan).digest != present.digest:
                self._out.send(worker, AdoptPlan(present.to_toml(), self.count))
        except PlanError as error:
            raise PeerError(f"Cannot admit rank {worker} with its plan: {error}") from error
        if self._proposal is not None:
            self._propose(self._proposal, worker)

    def leave(self, worker: int) -> None:
        """A worker is gone, and not waited for."""
        proposal = self._proposal
        if proposal is not None:
            proposal.waiting.discard(worker)
            if not proposal.parts.is_served and not proposal.parts.has_elastic_group and not proposal.refusal:
                proposal.refusal = f"Cannot leave the server: rank {worker} is gone, which all would wait for."
            self._decide()
        elif self._before is not None and self.present is not None and not self.present.has_elastic_group:
            reason = f"rank {worker} is gone, so that the others stay at the server"
            before, self._before = self._before, None
            self._adopt(before, before.to_toml(), self.count + 1, "the server", reason)

    def until_left(self, *, together: bool) -> str:
        """The plan that holds until all who are about to leave have left, as TOML.

        Args:
            together: all are in step.
        """
        assert self._before is not None
        return (self._before if together else self._before.swapped('[sync]\nkind = "ASP"\n')).to_toml()

    def left(self) -> None:
        """All have met who were about to leave: they are no longer this server's."""
        self._before = None

    def _propose(self, proposal: PlanProposal, worker: int) -> None:
        proposal.waiting.add(worker)
        proposal.asked.add(worker)
        self._out.send(worker, PlanProposed(proposal.number, proposal.plan))

    def _decide(self) -> None:
        """Adopt what was proposed if all have agreed; let it be if one has not."""
        proposal = self._proposal
        if proposal is None or not proposal.is_decided:
            return
        self._proposal, text = None, ""
        if proposal.refusal:
            self._out.log(f"The plan stays as it is. {proposal.refusal}")
            if not proposal.parts.is_served:
                self._release(proposal.asked)
        else:
            took_ms = (self._now_s() - proposal.since_s) * 1e3
            sync_point = None
            if not proposal.parts.is_served:
                self._before, sync_point, self.are_level = self.present, proposal.sync_point, proposal.are_level
            by = _listed(proposal.by)
            text = self._adopt(proposal.parts, proposal.plan, self.count + 1, by, proposal.reason, took_ms, sync_point)
        for tell in proposal.tell:
            tell(text, proposal.refusal)

    def _release(self, workers: Set[int]) -> None:
        """Tell those who have agreed that the plan stays: they pass no place of their script before."""
        assert self.present is not None
        for worker in sorted(workers):
            self._out.send(worker, AdoptPlan(self.present.to_toml(), self.count))

    def _adopt(
        self,
        new: DecidingParts,
        plan: str,
        count: int,
        by: str,
        reason: str = "",
        took_ms: float | None = None,
        sync_point: int | None = None,
    ) -> str:
        """Have another plan hold, the job's `count`-th swap; what is to be said of it.

        Args:
            by: who wanted it.
            took_ms: from the proposal until all had agreed.
            sync_point: how many places of their script the workers pass before they leave the server, if they do.
        """
        old, self.present, self.count = self.present, new, count
        assert old is not None
        until, notes = "", []
        if sync_point is not None:
            until = " from the next loop over data that all begin (the next step, if no data is dealt out)"
            notes.append("if there is none, it does not take effect")
        if sync_point is None and isinstance(new.sync, StepsLocally) and not isinstance(old.sync, StepsLocally):
            notes.append("each worker's own optimizer begins with what the server's has gathered, such as momentum")
        if isinstance(old.sync, StepsLocally) and (sync_point is not None or not isinstance(new.sync, StepsLocally)):
            notes.append("the server's optimizer resumes from its own earlier state, not from the workers'")
        agreed = "" if took_ms is None else f"wanted by {by}, agreed upon within {took_ms:.1f} ms; "
        text = swap_sentence(old, new, until=until, reason=reason, notes=notes, agreed=agreed)
        self._adopted(new, AdoptPlan(plan, count, text, sync_point), by)
        return text


def _listed(by: Sequence[str]) -> str:
    """Name those who requested it; of many, such as all workers of a script that swaps, the first."""
    each = list(dict.fromkeys(by))
    return ", ".join(each) if len(each) <= _MOST_LISTED else f"{each[0]} and {len(each) - 1} others"
