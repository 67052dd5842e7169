"""Law 2 beyond one life of the coordinator: what shards made of its decisions, what a killed server took with it, and
under which numbers workers brought what.

A server that is killed goes on from a snapshot: what was decided after that is undone. So a contribution is in the
parameters if an update up to the snapshot's version holds it, or one of the last life; and it may be in only one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.audit.findings import AuditResult
    from offbeat.audit.policy_replay import DecidedUpdate, PolicyReplay
    from offbeat.history import ParametersAfter, ShardServes, UpdateMade, UsedContribution
    from offbeat.sync import Push

Fate = Literal["pending", "applied", "rejected", "reference", "dropped", "lost"]
"""What became of a contribution; one that a rule has rejected, or a validator has brought, is in an update, and moves
nothing."""
_A_LITTLE = 1e-9  # by which weights may differ


@dataclass
class ShardUpdates:
    """The updates that one shard made to its blocks of one model in one incarnation.

    Args:
        file: its name.
        is_whole: whether nothing is missing from its history.
    """

    file: str
    serves: ShardServes
    made: dict[int, UpdateMade] = field(default_factory=dict)
    is_whole: bool = False

    def take(self, made: UpdateMade, result: AuditResult) -> None:
        """The shard has made an update."""
        if made.version in self.made:
            result.violated(2, f"Update {made.version} was made twice, as {self.file} says.")
        self.made[made.version] = made


def check_shards(
    decisions: PolicyReplay,
    shards: list[ShardUpdates],
    result: AuditResult,
    *,
    is_whole: bool,
    is_done: bool,
    kept: float,
) -> dict[Push, bool]:
    """Hold what shards made against what was decided.

    Args:
        is_whole: nothing is missing from the coordinator's history of this life.
        is_done: nobody told the server to stop before the job had ended.
        kept: the version from which the next life went on; infinite if there is none.

    Returns:
        Contributions that are not in all blocks, although they were applied: whether they are in some.
    """
    blocks: dict[Push, int] = defaultdict(int)
    of: dict[Push, int] = defaultdict(int)
    for shard in shards:
        for version, made in sorted(shard.made.items()):
            update = decisions.updates.get(version)
            if update is None and not is_whole and version > decisions.version:
                continue  # it was decided in the moment before the coordinator was killed
            if decisions.judges and not is_whole and version not in decisions.judged:
                continue  # or judged then
            if wrong := _what_is_wrong(made, update, shard, decisions):
                result.violated(2, f"{wrong}, as {shard.file} says.", decisions.story())
                break  # what follows is numbered otherwise
            for used in made.used:
                blocks[(used.worker, used.clock)] += used.blocks
            for push in () if update is None else update.pushes:
                of[push] += shard.serves.blocks
        _check_all_made(decisions, shard, result, is_whole=is_whole and is_done, kept=kept)
    missing = {push: bool(blocks[push]) for push in of if blocks[push] < of[push]}
    for push in sorted(missing):
        if push not in decisions.unarrived:
            result.violated(
                2,
                f"Contribution {push} is in {blocks[push]} of {of[push]} blocks, although its worker was there until "
                "it had arrived.",
                decisions.story(push[0]),
            )
    return missing


def _what_is_wrong(made: UpdateMade, update: DecidedUpdate | None, shard: ShardUpdates, decisions: PolicyReplay) -> str:
    if update is None:
        return f"Update {made.version} was made, but never decided"
    if made.times != shard.serves.blocks:
        return f"Update {made.version} was made {made.times} times in {shard.serves.blocks} blocks"
    if strange := [one for one in made.used if (one.worker, one.clock) not in update.pushes]:
        push = (strange[0].worker, strange[0].clock)
        return f"Update {made.version} was made of contribution {push}, but decided of {_listed(update.pushes)}"
    if made.rate != update.rate:
        return f"Update {made.version} was made with the rate {made.rate:g}, but decided with {update.rate:g}"
    if wrong_scale := _what_is_wrong_with_scales(made, decisions):
        return wrong_scale
    if wrong := [one for one in made.used if not _weighs(one, decisions)]:
        one = wrong[0]
        push, announced = (one.worker, one.clock), decisions.weights.get((one.worker, one.clock), 0.0)
        limit = ", and is more than one for each reference" * (push in decisions.beyond_limit)
        return (
            f"Contribution {push} weighs {one.weight:g} in update {made.version}, but was announced with "
            f"{announced:g}{limit}"
        )
    return ""


def _what_is_wrong_with_scales(made: UpdateMade, decisions: PolicyReplay) -> str:
    """Hold the scales that an update was made with against those that a rule decided."""
    judged = decisions.judged.get(made.version)
    if judged is None:
        is_judged = decisions.judges or any(one.scale is not None for one in made.used)
        return f"Update {made.version} was made, but never judged" if is_judged else ""
    scales = {(worker, clock): scale for worker, clock, scale in judged.scales}
    used = {(one.worker, one.clock): one.scale for one in made.used}
    if lacking := sorted(scales.keys() - used.keys()):
        return f"Update {made.version} was made without contribution {lacking[0]}, which is judged"
    for push, scale in used.items():
        if scale != scales.get(push, 0.0):
            judged_as = scales.get(push, 0.0)
            return f"Contribution {push} has the scale {scale} in update {made.version}, but was judged {judged_as}"
    return ""


def _weighs(one: UsedContribution, decisions: PolicyReplay) -> bool:
    push = (one.worker, one.clock)
    expected = 0.0 if push in decisions.beyond_limit else decisions.weights.get(push, 0.0)
    return abs(one.weight - expected) <= _A_LITTLE * max(1.0, one.weight)


def _check_all_made(
    decisions: PolicyReplay, shard: ShardUpdates, result: AuditResult, *, is_whole: bool, kept: float
) -> None:
    """Check that every update was made whose contributions had arrived, if nobody ended the server before that.

    A shard that alone was told to end has all that it made in its snapshot and in its history, and the coordinator goes
    on deciding until it misses it: that is undone. A validator that is alone goes on until it hears that the workers
    are done; its last update moves nothing, and the job may be over before it is made.
    """
    if not (is_whole and shard.is_whole and shard.serves.blocks):
        return
    for version, update in decisions.updates.items():
        if decisions.has_validator and not any(decisions.weights.get(push) for push in update.pushes):
            continue
        if version <= kept and version not in shard.made and decisions.arrived.issuperset(update.pushes):
            result.violated(
                2,
                f"Update {version} was decided of {_listed(update.pushes)}, but {shard.file} says nothing of having "
                "made it.",
                decisions.story(),
            )
            return


def _listed(pushes: tuple[Push, ...]) -> str:
    return ", ".join(map(str, pushes[:6])) + (", ..." if len(pushes) > 6 else "")


class UpdateAudit:
    """The fate of each contribution to one model, over all incarnations of the server.

    Call order: `begin` and `add` for each life, `brought` for each step of each worker, `count`.
    """

    def __init__(self) -> None:
        self.fates: dict[Push, str] = {}
        self.weights: dict[Push, float] = {}
        self._rejected: set[Push] = set()  # in an update, and of no weight there
        self._validators: set[int] = set()
        self._shares: dict[Push, float] = {}  # of those in updates that shards have recorded
        self._in_part: set[Push] = set()
        self._brought: set[Push] = set()
        self._has_validator = False  # than which no contribution weighs more
        self._outdated = 0  # contributions that were dropped before they were announced
        self._lives: list[tuple[int, Mapping[int, int]]] = []  # and where each worker went on in it
        self._versions: dict[Push, int] = {}  # of the update that a contribution is in
        self._version = 0

    def begin(self, decisions: PolicyReplay, result: AuditResult, *, was_whole: bool) -> None:
        """A life begins: undo what its snapshot has not.

        Args:
            was_whole: nothing is missing from the history of the life before.
        """
        began = decisions.began
        self._lives.append((decisions.life, began.past))
        for push, fate in self.fates.items():
            if fate == "applied" and self._versions[push] > began.version:
                self.fates[push] = "lost"
            elif fate == "pending" or (fate == "dropped" and push[1] >= began.past.get(push[0], 0)):
                self.fates[push] = "lost"  # unless it is announced again
        if began.version > self._version and (self._version or self.fates):
            text = f"The server resumed from version {began.version}; its history ends at {self._version} before that."
            if was_whole:
                result.violated(2, text)
            else:
                result.notes.append(text)

    def add(
        self, decisions: PolicyReplay, shards: list[ShardUpdates], missing: dict[Push, bool], result: AuditResult
    ) -> None:
        """Add the decisions of one incarnation.

        Args:
            shards: what they made of it.
            missing: contributions that are not in all blocks: whether they are in some.
        """
        for push in decisions.fates:
            self._shares.pop(push, None)  # what that number had in an earlier life is undone
        for made in (one for shard in shards for one in shard.made.values()):
            total = sum(used.weight for used in made.used)
            shares = {
                (u.worker, u.clock): made.rate * (u.weight / total if u.scale is None else u.scale) if total else 0.0
                for u in made.used
            }
            self._shares |= {push: share for push, share in shares.items() if push in decisions.fates}
        of = {push: update.version for update in decisions.updates.values() for push in update.pushes}
        rejected = {(rank, n) for one in decisions.judged.values() for rank, n, scale in one.scales if scale == 0}
        rejected |= decisions.beyond_limit
        self._validators |= decisions.validators
        for push, fate in decisions.fates.items():
            if self.fates.get(push) == "applied":
                result.twice += fate == "applied"
                result.violated(
                    2,
                    f"Contribution {push} is {fate} in life {decisions.life} of the server, but was in update "
                    f"{self._versions[push]} of a life before, which its snapshot holds.",
                    decisions.story(push[0]),
                )
                continue
            self.fates[push] = fate
            self._rejected.discard(push)
            if fate == "applied":
                self._versions[push] = of.get(push, 0)
                if push in rejected:
                    self._rejected.add(push)
                if push in missing:
                    self.fates[push] = "lost"
                    if missing[push]:
                        self._in_part.add(push)
        self.weights |= decisions.weights
        self._has_validator = decisions.has_validator
        self._version = decisions.version

    def brought(
        self, rank: int, has: ParametersAfter, result: AuditResult, *, is_whole: bool, went_on: bool = False
    ) -> None:
        """A worker says under which numbers it announced one contribution: only one of them may be used.

        Args:
            is_whole: nothing is missing from the coordinator's history.
            went_on: what is missing there of this life could not be written, as the disk was full.
        """
        pushes = [(rank, number) for number in dict.fromkeys(has.numbers)]
        for push in self._brought.intersection(pushes):
            result.violated(
                2, f"Rank {rank} pushed contribution {push} in its step {has.step}, and another of that number before."
            )
        self._brought.update(pushes)
        known = [self.fates[push] for push in pushes if push in self.fates]
        if not known and not has.counted:  # its worker was lost before it had announced it, and was told so
            self._outdated += 1
            return
        if is_whole and (not known or (has.counted and set(known) <= {"dropped", "pending"})):
            what = f"is {known[0]}" if known else "was never announced"
            result.violated(
                2,
                f"Rank {rank} pushed contribution {pushes[-1]} in its step {has.step}, but as recorded it {what}.",
            )
        if has.counted and not is_whole and (not known or (went_on and set(known) <= {"dropped", "pending"})):
            self._take_unrecorded(pushes[-1], has, result, went_on=went_on)
        used = [push for push in pushes if self.fates.get(push) == "applied"]
        if len(used) > 1:
            result.twice += 1
            result.violated(
                2, f"Rank {rank} pushed one contribution under the numbers {has.numbers}, and {used} are all used."
            )
        for push in used:
            if has.samples and not self.weights.get(push) and rank not in self._validators:
                self.fates[push] = "dropped"  # others were given what it was computed from
        for push in pushes:
            if used and push not in used and self.fates.get(push) == "lost":
                del self.fates[push]  # it came again under another number
        weight = next((self.weights[push] for push in pushes if push in self.weights), 0.0)
        is_less = self._has_validator and weight < has.samples
        if weight and abs(weight - has.samples) > _A_LITTLE * max(1.0, weight) and not is_less:
            result.violated(
                2, f"Contribution {pushes[0]} was computed from {has.samples:g} samples, but weighs {weight:g}."
            )

    def _take_unrecorded(self, push: Push, has: ParametersAfter, result: AuditResult, *, went_on: bool) -> None:
        """A worker was told that a contribution is used, by a server that had not recorded that.

        Either it was killed before it could, or it could not, and goes on with what it used if it was not killed later.
        """
        lives = [life for life, _ in self._lives]
        following = lives.index(has.life) + 1 if has.life in lives else len(lives)
        past = self._lives[following][1] if following < len(lives) else {}
        was_kept = push[1] < past.get(push[0], 0) or (went_on and following == len(self._lives))
        self.fates[push] = "applied" if was_kept else "lost"
        self._versions[push], self.weights[push] = 0, has.samples
        result.unrecorded += 1

    def fate(self, push: Push) -> Fate:
        """The fate of a contribution in the end."""
        fate = self.fates[push]
        if fate == "applied" and push[0] in self._validators:
            return "reference"
        if fate == "applied" and push in self._rejected:
            return "rejected"
        assert fate in ("pending", "applied", "dropped", "lost"), fate
        return fate  # type: ignore[return-value]

    def share(self, push: Push) -> float | None:
        """The share of a contribution in its update, times the update's rate; None if that is not recorded."""
        return self._shares.get(push) if self.fates.get(push) == "applied" else 0.0

    def count(self, result: AuditResult) -> None:
        """Add up what became of all."""
        fates = [self.fate(push) for push in self.fates]
        result.applied += fates.count("applied")
        result.references += fates.count("reference")
        result.dropped += fates.count("dropped") + self._outdated
        result.pending += fates.count("pending")
        lost = [push for push, fate in self.fates.items() if fate == "lost"]
        result.lost += len(lost)
        result.in_part += len(self._in_part.intersection(lost))
        result.lost_samples += sum(self.weights.get(push, 0.0) for push in lost)
