"""Which plan holds in a job, and how another one comes to: proposed to all, agreed to by all, or let be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offbeat.errors import PeerError, PlanError
from offbeat.fabric.server.lead.proposal import Proposal
from offbeat.fabric.server.messages import Adopt, Proposed

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from offbeat.fabric.server.lead.proposal import Parts, Tell
    from offbeat.fabric.server.messages import Agreed, Details, ToWorker

_log = logging.getLogger("offbeat")


class Swaps:
    """The plan of one job.

    Args:
        read_plan: from TOML.
        say: sends a message to a worker.
        adopted: called with the plan that holds from now on, and what is to be told of it.
    """

    def __init__(
        self,
        read_plan: Callable[[str], Parts],
        say: Callable[[int, ToWorker], None],
        adopted: Callable[[Parts, Adopt], None],
    ) -> None:
        self._read_plan, self._say, self._adopted = read_plan, say, adopted
        self.present: Parts | None = None
        self._count = 0  # of swaps, in all lives of the server
        self._proposal: Proposal | None = None
        self._proposals = 0

    def begin(self, plan: str, count: int = 0) -> Parts:
        """The plan that holds: the first one that was begun with.

        Args:
            count: how often it had been swapped.

        Raises:
            PlanError: if it cannot be read.
        """
        if self.present is None:
            self.present, self._count = self._read_plan(plan), count
        return self.present

    def swap(self, part: str, tell: Tell, workers: Set[int], *, has_begun: bool) -> None:
        """Somebody wants another plan; all workers are asked whether they can go by it.

        Args:
            part: of it, as TOML.
            tell: called, perhaps later, with what has changed, or why nothing has.
            workers: that are connected.
            has_begun: whether anything was decided yet.
        """
        try:
            if self.present is None or not has_begun:
                raise PlanError("Cannot swap anything yet: training has not begun. Try again when it has.")
            parts = self.present.swapped(part)
            parts.check_world(len(workers))
        except PlanError as error:
            tell("", str(error))
            return
        if self._proposal is not None and self._proposal.parts.digest == parts.digest:
            self._proposal.tell.append(tell)  # all workers run the same script
        elif self._proposal is not None:
            tell("", "Cannot swap the plan twice at once: another swap is under way. Try again when it is over.")
        elif parts.digest == self.present.digest:
            tell(f"The plan stays as it is: {self.present.sync!r}.", "")
        else:
            self._proposals += 1
            self._proposal = Proposal(self._proposals, parts, parts.to_toml(), [tell])
            for worker in sorted(workers):
                self._propose(self._proposal, worker)
            self._decide()

    def agree(self, worker: int, message: Agreed) -> None:
        """What a worker makes of the plan that was proposed."""
        if self._proposal is not None:
            self._proposal.hear(worker, message)
            self._decide()

    def join(self, worker: int, details: Details, *, life: int) -> None:
        """Tell a worker that comes with an earlier plan which one holds, and ask it as the others were.

        If the server was set back to before a swap, the workers know better: that plan had been agreed upon.

        Args:
            life: of the server.

        Raises:
            PeerError: if the worker's plan cannot be read, or cannot have come of this one.
        """
        present, back = self.present, details.back
        assert present is not None
        try:
            if back is not None and back.life != life and back.swaps > self._count:
                self._adopt(present.swapped(details.plan), details.plan, back.swaps)
            elif self._read_plan(details.plan).digest != present.digest:
                self._say(worker, Adopt(present.to_toml(), self._count))
        except PlanError as error:
            raise PeerError(f"Cannot take in rank {worker} with its plan: {error}") from error
        if self._proposal is not None:
            self._propose(self._proposal, worker)

    def leave(self, worker: int) -> None:
        """A worker is gone, and not waited for."""
        if self._proposal is not None:
            self._proposal.waiting.discard(worker)
            self._decide()

    def _propose(self, proposal: Proposal, worker: int) -> None:
        proposal.waiting.add(worker)
        self._say(worker, Proposed(proposal.number, proposal.plan))

    def _decide(self) -> None:
        """Adopt what was proposed if all have agreed; let it be if one has not."""
        proposal = self._proposal
        if proposal is None or not proposal.is_decided:
            return
        self._proposal, text = None, ""
        if proposal.refusal:
            _log.warning("The plan stays as it is. %s", proposal.refusal)
        else:
            text = self._adopt(proposal.parts, proposal.plan, self._count + 1)
        for tell in proposal.tell:
            tell(text, proposal.refusal)

    def _adopt(self, new: Parts, plan: str, count: int) -> str:
        """Have another plan hold, the job's `count`-th swap; what is to be said of it."""
        old, self.present, self._count = self.present, new, count
        assert old is not None
        text = (
            f"{new.sync!r} decides when workers may go on, not {old.sync!r} any more "
            f"(plan {new.digest[:12]}, was {old.digest[:12]})."
        )
        self._adopted(new, Adopt(plan, count, text))
        return text
