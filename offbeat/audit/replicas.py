"""Law 1: workers whose parameters should be equal have equal parameters.

With a server each block of the parameters has a version, so that whoever has the same versions, in the same life of the
server, has the same parameters, under every policy. Without one all workers have the same after each step, but for
`LocalSGD`, where they do after each average; with a delay, or in fragments, they never do while they train.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.history import (
    CheckpointLoaded,
    FabricMigrated,
    HistoryEnded,
    ModelPrepared,
    ParametersAfter,
    PlanAdopted,
    StepGranted,
    WorkersAdmitted,
)
from offbeat.plan import Plan
from offbeat.sync import StepsLocally

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from offbeat.audit.findings import AuditResult
    from offbeat.history import HistoryLog
    from offbeat.sync import Policy

_STORY = 6  # of a worker's last records


@dataclass
class WorkerHistory:
    """The records of one worker process.

    Args:
        plans: by model, the policy that it was prepared with; None if that cannot be read.
        world: how many workers there were then.
        has: after each step, in order.
        loads: how many of these were recorded before each checkpoint that was taken over.
        swaps: how many of these were recorded before each other policy that came to hold without a server.
        admitted: ranks that joined while it trained, without a server.
        granted: by what a switch's table let it go on, in order.
        decided: how many of these were recorded before each policy came to hold, in order.
        tables: how many of `has` and of `granted` were recorded before each place where a table at a switch is over:
            its clocks do not go on in the next one.
        crosses: where its stretch of the run borders on others.
        is_whole: nothing is missing at its end.
    """

    rank: int
    file: str
    plans: dict[int, Policy | None] = field(default_factory=dict)
    has: list[ParametersAfter] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    swaps: list[tuple[int, Policy | None]] = field(default_factory=list)
    admitted: set[int] = field(default_factory=set)
    granted: list[StepGranted] = field(default_factory=list)
    decided: list[tuple[int, Policy | None]] = field(default_factory=list)
    tables: list[tuple[int, int]] = field(default_factory=list)
    crosses: list[FabricMigrated] = field(default_factory=list)
    world: int = 0
    is_whole: bool = False

    def policy(self, index: int) -> Policy | None:
        """The policy that held when its `index`-th record was made; None if that is not known."""
        later = [policy for before, policy in self.swaps if before <= index]
        return later[-1] if later else self.plans.get(self.has[index].model)

    def decides(self, policy: Policy | None) -> None:
        """Note that a policy has come to hold here; the same one once more, where all begin with an empty table."""
        is_again = bool(self.decided) and self.decided[-1][1] == policy
        self.decided.append((len(self.granted), policy))
        if policy is None or policy.replicated or is_again:
            self.table_ends()

    def table_ends(self) -> None:
        """Note that a table, if there was one, is over here."""
        self.tables.append((len(self.has), len(self.granted)))

    def table(self, index: int) -> int:
        """Count the tables that were over when its `index`-th record was made."""
        return sum(has <= index for has, _ in self.tables)

    def table_of(self, grant: int) -> int:
        """Count the tables that were over when it went on by its `grant`-th grant."""
        return sum(granted <= grant for _, granted in self.tables)

    def loaded(self, index: int) -> int:
        """Count the checkpoints that had been loaded when its `index`-th record was made."""
        return sum(load <= index for load in self.loads)

    def story(self, index: int) -> tuple[str, ...]:
        """The last records up to its `index`-th."""
        return tuple(f"rank {self.rank}, {_told(one)}" for one in self.has[max(0, index - _STORY) : index + 1])


def read_worker(log: HistoryLog) -> WorkerHistory:
    """Read the history of a worker.

    Raises:
        HistoryError: if it cannot be read.
    """
    history = WorkerHistory(log.header.rank, log.path.name)
    for record in log:
        history.is_whole = isinstance(record, HistoryEnded) and not record.why
        if isinstance(record, ModelPrepared):
            history.world = max(history.world, record.world)
            history.plans[record.model] = _policy(record.plan)
            history.decides(history.plans[record.model])
        elif isinstance(record, PlanAdopted):
            history.swaps.append((len(history.has), _policy(record.plan)))
            history.decides(history.swaps[-1][1])
        elif isinstance(record, ParametersAfter):
            history.has.append(record)
        elif isinstance(record, WorkersAdmitted):
            history.admitted |= set(record.ranks)
        elif isinstance(record, StepGranted):
            history.granted.append(record)
        elif isinstance(record, FabricMigrated):
            history.crosses.append(record)
        elif isinstance(record, CheckpointLoaded):
            history.loads.append(len(history.has))
            history.table_ends()
    return history


def _policy(plan: str) -> Policy | None:
    try:
        return Plan.from_toml(plan).cadence
    except PlanError:
        return None


def check_replicas(histories: list[WorkerHistory], result: AuditResult) -> None:
    """Compare what workers have with what others have at the same place."""
    seen: dict[Hashable, tuple[int, WorkerHistory, int]] = {}
    counted: Counter[Hashable] = Counter()
    for history in histories:
        for key, index in _places(history):
            digest = history.has[index].digest
            if digest is None:
                continue
            counted[key] += 1
            first = seen.setdefault(key, (digest, history, index))
            if first[0] != digest:
                other, theirs = first[1], first[1].has[first[2]]
                result.violated(
                    1,
                    f"{_told(history.has[index], capital=True)} rank {history.rank} has other parameters "
                    f"({digest:016x}) than rank {other.rank} after its step {theirs.step} ({first[0]:016x}).",
                    (*other.story(first[2]), *history.story(index)),
                )
    result.hashes += counted.total()
    result.compared += sum(count for count in counted.values() if count > 1)
    if result.compared:
        result.checked.add(1)


def check_borders(histories: Sequence[WorkerHistory], result: AuditResult) -> None:
    """Compare what workers have on both sides of where they went to a server, or left it.

    Args:
        histories: of all stretches.
    """
    first: dict[str, tuple[WorkerHistory, FabricMigrated]] = {}
    for history in histories:
        for one in history.crosses:
            other, there = first.setdefault(one.border, (history, one))
            if (one.step, one.digest) != (there.step, there.digest):
                result.violated(
                    1,
                    f"Where one stretch ends and another begins, rank {history.rank} has {one.digest:016x} behind step "
                    f"{one.step} ({history.file}), and rank {other.rank} {there.digest:016x} behind step {there.step} "
                    f"({other.file}).",
                )
    result.borders += len(first)
    if first:
        result.checked.add(1)


def _places(history: WorkerHistory) -> Iterator[tuple[Hashable, int]]:
    """The place of each record: workers at the same place have the same parameters."""
    times: Counter[Hashable] = Counter()
    for index, has in enumerate(history.has):
        key: Hashable
        if has.life:
            key = (has.model, has.life, has.versions, _loaded_since(history, index))
        else:
            policy = history.policy(index)
            if policy is None or (isinstance(policy, StepsLocally) and not _is_even(history, policy, index)):
                continue
            step = (has.model, has.step, history.loaded(index), history.table(index))
            times[step] += 1  # the optimizer may step twice between two exchanges
            key = (*step, times[step])
        yield key, index


def _is_even(history: WorkerHistory, policy: Policy, index: int) -> bool:
    """Whether all have the same after a step: it ends with an average, or is made with the mean gradient.

    The step from which a policy counts is not recorded; it is 0 until another policy or a checkpoint comes to hold.
    Replicas are also equal where they are settled, which is not recorded.
    """
    has = history.has[index]
    if has.weights and isinstance(policy, StepsLocally) and policy.loss_class == "local":
        return True
    changes = [*history.loads, *(before for before, _ in history.swaps)]
    counts_from_zero = not history.crosses and all(index < before for before in changes)
    return counts_from_zero and policy.contributes(has.step) == "gradient"


def _loaded_since(history: WorkerHistory, index: int) -> int:
    """The checkpoint that is about to replace what it has, at the same versions; 0 if there is none."""
    has = history.has[index]
    for number, load in enumerate(history.loads, 1):
        if index < load < len(history.has) and history.has[load].versions == has.versions:
            return number
    return 0


def _told(has: ParametersAfter, *, capital: bool = False) -> str:
    digest = "" if has.digest is None or capital else f": {has.digest:016x}"
    at = ""
    if has.life:
        versions = f"{has.versions[0]} to {has.versions[1]}" if len(has.versions) > 1 else str(*has.versions)
        at = f" at version {versions} of life {has.life}"
    brought = f", contribution {', '.join(map(str, has.numbers))}" if has.numbers and not capital else ""
    return f"{'After' if capital else 'after'} step {has.step}{at}{brought}{digest}{',' if capital else ''}"
