"""All jobs whose histories are there, one after another, held against the laws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.audit.contributions import listed
from offbeat.audit.exchanges import check_exchanges
from offbeat.audit.findings import AuditResult
from offbeat.audit.grants import check_grants
from offbeat.audit.log_files import find_jobs
from offbeat.audit.policy_replay import PolicyReplay
from offbeat.audit.rejections import JudgedContributions, added
from offbeat.audit.replacements import check_replaced
from offbeat.audit.replicas import WorkerHistory, check_borders, check_replicas, read_worker
from offbeat.audit.updates import ShardUpdates, UpdateAudit, check_shards
from offbeat.history import (
    ContributionsWithdrawn,
    HistoryEnded,
    LifeBegan,
    NoticeGiven,
    ParametersReplaced,
    PlanAdopted,
    PolicyStep,
    ShardServes,
    UpdateJudged,
    UpdateMade,
    WorkerReturned,
)

if TYPE_CHECKING:
    import os

    from offbeat.audit.contributions import ContributionFate
    from offbeat.audit.log_files import JobHistory
    from offbeat.history import HistoryLog


def verify(*paths: str | os.PathLike[str]) -> AuditResult:
    """Check laws 1, 2 and 3 in what was recorded.

    Args:
        paths: folders of runs, of histories, or single files; those of one job belong together.

    Raises:
        HistoryError: if one cannot be read.
    """
    result, histories = AuditResult(), list[WorkerHistory]()
    for job in find_jobs(map(Path, paths)):
        result.jobs += 1
        result.files += len(job.coordinators) + len(job.shards) + len(job.workers)
        audit = _Audit(job, result)
        audit.run()
        histories += audit.histories
    check_borders(histories, result)
    return result


def contributions(*paths: str | os.PathLike[str]) -> list[ContributionFate]:
    """List the fate of each contribution to a server, one by one.

    Args:
        paths: as `verify` takes them.

    Raises:
        HistoryError: if one cannot be read.
    """
    found: list[ContributionFate] = []
    for job in find_jobs(map(Path, paths)):
        audit = _Audit(job, AuditResult())
        audit.run()
        found += [one for model, fates in audit.fates.items() for one in listed(model, fates, audit.histories)]
    return found


class _Audit:
    """The audit of one job.

    Args:
        result: what is found goes there.

    Attributes:
        fates: what became of the contributions to each model.
        histories: what each worker process recorded.
    """

    def __init__(self, job: JobHistory, result: AuditResult) -> None:
        self._job, self._result = job, result
        self.fates: dict[int, UpdateAudit] = {}
        self.histories: list[WorkerHistory] = []
        self._decisions: list[PolicyReplay] = []  # in their order
        self._held: list[ShardUpdates] = []
        self._replaced: list[tuple[int, ParametersReplaced]] = []  # with the server's life
        self._is_whole: dict[int, bool] = {}  # by life: whether nothing is missing from its coordinator's history
        self._unrecorded: set[int] = set()  # lives that went on when nothing more of them could be written
        self._stopped: set[int] = set()  # lives that were asked to stop: what was decided last need not be made

    def run(self) -> None:
        """Look at everything.

        Raises:
            HistoryError: if something cannot be read.
        """
        job, result = self._job, self._result
        judged = JudgedContributions()
        for log in job.coordinators:
            self._read_coordinator(log, judged)
        result.by_rank = added(result.by_rank, of_job := judged.by_rank())
        result.rejected += sum(one.rejected for one in of_job.values())
        for log in job.shards:
            self._read_shard(log)
        self.histories = histories = [self._read_worker(log) for log in job.workers]
        result.lives += len({decisions.life for decisions in self._decisions})
        if self._decisions:
            result.checked |= {2, 3}
            self._check_decisions(histories)
            check_replaced(self._replaced, histories, result)
        elif any(has.life for history in histories for has in history.has):
            result.notes.append("The coordinator's history is not there: laws 2 and 3 are not checked.")
        check_exchanges(histories, result)
        check_grants(histories, result)
        check_replicas(histories, result)

    def _check_decisions(self, histories: list[WorkerHistory]) -> None:
        result = self._result
        for model in sorted({decisions.model for decisions in self._decisions}):
            fates = self.fates[model] = UpdateAudit()
            was_whole = True
            lives = self._of(model)
            versions_kept = [*(decisions.began.version for decisions in lives[1:]), math.inf]
            for decisions, kept in zip(lives, versions_kept, strict=True):
                is_whole = self._is_whole[decisions.life]
                held = [one for one in self._held if (one.serves.model, one.serves.life) == (model, decisions.life)]
                result.updates += len(decisions.updates)
                result.judged += len(decisions.judged)
                missing = {}
                if not decisions.is_broken:
                    is_done = decisions.life not in self._stopped
                    missing = check_shards(decisions, held, result, is_whole=is_whole, is_done=is_done, kept=kept)
                fates.begin(decisions, result, was_whole=was_whole)
                fates.add(decisions, held, missing, result)
                was_whole = is_whole
            is_whole = all(self._is_whole.values())
            is_broken = any(one.is_broken for one in self._of(model))  # then nothing is known of what followed
            for history in () if is_broken else histories:
                for has in history.has:
                    if has.model == model and has.is_brought:
                        recorded = self._is_whole.keys() - self._unrecorded
                        went_on = bool(self._unrecorded) and has.life not in recorded
                        fates.brought(history.rank, has, result, is_whole=is_whole, went_on=went_on)
            fates.count(result)

    def _of(self, model: int) -> list[PolicyReplay]:
        """Decisions about a model; of a life only the last, if all had left before it had any parameters."""
        last = {decisions.life: decisions for decisions in self._decisions if decisions.model == model}
        return list(last.values())

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_coordinator(self, log: HistoryLog, judged: JudgedContributions) -> None:
        present: dict[int, PolicyReplay] = {}
        held: dict[int, ShardUpdates] = {}
        is_whole, lives = False, set[int]()
        for record in log:
            if isinstance(record, LifeBegan | UpdateJudged):
                judged.hear(record)
            if isinstance(record, LifeBegan):
                if present and record.life not in lives:
                    present = {}
                lives.add(record.life)
                present[record.model] = PolicyReplay(record, self._result)
                self._decisions.append(present[record.model])
            elif isinstance(record, PlanAdopted):
                if present and record.by:
                    self._result.swapped_by.append(record.by)
                for decisions in present.values():
                    decisions.hear(record)
            elif isinstance(record, PolicyStep | WorkerReturned | UpdateJudged | ContributionsWithdrawn):
                if record.model in present:
                    present[record.model].hear(record)
                    made = held[record.model].made if record.model in held else {}
                    if isinstance(record, UpdateJudged) and record.version in made:
                        self._result.violated(2, f"Update {record.version} is judged after it was made.")
                else:
                    self._result.violated(2, f"Model {record.model} is decided about, but never began.")
            elif isinstance(record, ShardServes | UpdateMade | ParametersReplaced):
                self._take(log, held, record)
            elif isinstance(record, NoticeGiven):
                self._result.notes.append(record.what)
            elif isinstance(record, HistoryEnded):
                is_whole = not record.gave_up
                self._stopped |= lives if record.why and is_whole else set()
                self._unrecorded |= lives if record.gave_up else set()
        self._tell_torn(log)
        for life in lives:
            self._is_whole[life] = is_whole
        for one in held.values():
            one.is_whole = is_whole

    def _read_shard(self, log: HistoryLog) -> None:
        held: dict[int, ShardUpdates] = {}
        is_whole = False
        for record in log:
            if isinstance(record, ShardServes | UpdateMade | ParametersReplaced):
                self._take(log, held, record)
            is_whole = isinstance(record, HistoryEnded) and not record.why
        self._tell_torn(log)
        for one in held.values():
            one.is_whole = is_whole

    def _take(
        self, log: HistoryLog, held: dict[int, ShardUpdates], record: ShardServes | UpdateMade | ParametersReplaced
    ) -> None:
        if isinstance(record, ShardServes):
            before = held.get(record.model)
            if before is not None and before.serves.life == record.life:
                self._held.remove(before)  # all had left before there were any parameters
            held[record.model] = ShardUpdates(log.path.name, record)
            self._held.append(held[record.model])
        elif record.model not in held:
            what = "made an update" if isinstance(record, UpdateMade) else "let somebody replace the parameters"
            self._result.violated(2, f"{log.path.name} has {what} of model {record.model}, and holds none of it.")
        elif isinstance(record, UpdateMade):
            held[record.model].take(record, self._result)
        else:
            self._replaced.append((held[record.model].serves.life, record))

    def _read_worker(self, log: HistoryLog) -> WorkerHistory:
        history = read_worker(log)
        self._tell_torn(log)
        return history

    def _tell_torn(self, log: HistoryLog) -> None:
        if log.gave_up:
            self._result.notes.append(
                f"{log.path.name} ends before its process did, which could write no more of it: {log.gave_up}."
            )
        elif log.is_torn:
            self._result.notes.append(
                f"{log.path.name} ends in the middle of a record: its process was killed, or its disk was full."
            )
