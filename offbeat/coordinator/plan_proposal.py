"""A plan that has been proposed, and who has agreed to it; one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.batching import BatchTuning, Keeps
    from offbeat.control import Controller
    from offbeat.protocol.plan_swap import PlanAgreement
    from offbeat.robust import TooFew
    from offbeat.sync import Policy

    Tell = Callable[[str, str], None]  # what has changed, or why nothing has


class JudgingRule(Protocol):
    """A rule by which contributions are compared, as far as the coordinator looks at it."""

    @property
    def needs_validator(self) -> bool: ...
    @property
    def needs_losses(self) -> bool: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def is_calibrated(self) -> bool: ...

    def least(self) -> int:
        """The fewest contributions of which it can make an update."""

    def check(self, n: int) -> str:
        """Say why it can make no update of n contributions, and the way out; "" if it can."""


class DecidingParts(Protocol):
    """The parts of a plan that decide.

    Attributes:
        sync: when workers may go on.
        tuning: how large their batches are; None if that is not tuned.
        keeps: what stays as it is when workers come and go, if it is not.
        controller: swaps the policy; None if nobody but people do.
        judging_rule: compares contributions, perhaps with those of validators; None where they are only averaged.
        too_few: what to do when so many workers are lost that fewer take part than that needs.
        is_served: whether parameters live at a server.
        is_tabled: whether each worker's own optimizer steps, and a switch sums their changes.
        has_elastic_group: whether there is no server, and the others go on without a worker that is lost.
        digest: of its TOML.
    """

    @property
    def sync(self) -> Policy: ...
    @property
    def tuning(self) -> BatchTuning | None: ...
    @property
    def keeps(self) -> Keeps: ...
    @property
    def controller(self) -> Controller | None: ...
    @property
    def judging_rule(self) -> JudgingRule | None: ...
    @property
    def too_few(self) -> TooFew: ...
    @property
    def is_served(self) -> bool: ...
    @property
    def is_tabled(self) -> bool: ...
    @property
    def has_elastic_group(self) -> bool: ...
    @property
    def digest(self) -> str: ...
    def to_toml(self) -> str: ...

    def swapped(self, part: str, *, whole: bool = False) -> DecidingParts:
        """The plan with another part; or another `whole` plan.

        Raises:
            PlanError: if it cannot be, or not while training.
        """

    def controlled(self, sync: Policy) -> DecidingParts:
        """The plan with another of its controller's policies.

        Raises:
            PlanError: if it cannot be, or not while training.
        """

    def check_world(self, world: int) -> None:
        """Refuse what cannot be with so many workers.

        Raises:
            PlanError: if so.
        """


@dataclass
class PlanProposal:
    """A plan that all workers vote on.

    Args:
        number: of the proposal.
        parts: the plan, read.
        plan: as TOML.
        tell: those who wanted it.
        since_s: when it was proposed.
        by: who wanted it.
        reason: of the controller that wanted it; "" if a person did.
        waiting: workers that have not answered.
        asked: all that were asked.
        passed: how many places of its script each worker had passed when it answered, and its contributions until then.
    """

    number: int
    parts: DecidingParts
    plan: str
    tell: list[Tell]
    since_s: float
    by: list[str]
    reason: str = ""
    waiting: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    refusal: str = ""
    passed: set[tuple[int, int]] = field(default_factory=set)

    def hear(self, worker: int, agreed: PlanAgreement) -> None:
        """Count a worker's vote."""
        if agreed.number != self.number or worker not in self.waiting:
            return  # of an earlier one
        self.waiting.discard(worker)
        self.passed.add((agreed.place, agreed.pushed))
        if agreed.digest != self.parts.digest and not self.refusal:
            why = (
                agreed.refusal or f"it reads a plan with the digest {agreed.digest!r} in it, not {self.parts.digest!r}"
            )
            self.refusal = f"Rank {worker} cannot go by that plan: {why}"

    @property
    def sync_point(self) -> int:
        """The first place that no worker had passed."""
        return max((passed for passed, _ in self.passed), default=0)

    @property
    def are_level(self) -> bool:
        """Whether all will have brought as many contributions when they are there, if each place is behind one.

        With a scheduler a worker may have passed a place with a contribution that waits for the others' to come.
        """
        return len({pushed - passed for passed, pushed in self.passed}) == 1

    @property
    def is_decided(self) -> bool:
        """Whether nobody is waited for any more."""
        return not self.waiting or bool(self.refusal)
