"""The witness of a wait: reports where this worker is, and asks the sentinel who has not arrived."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from offbeat.diagnosis.explain import END_OF_RUN, Culprit, Diagnosis, explain, gone
from offbeat.diagnosis.startup_barrier import look_at
from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from offbeat.diagnosis.sentinel_client import SentinelClient
    from offbeat.diagnosis.wait import WaitContext
    from offbeat.wire.messages import ClusterReport

_log = logging.getLogger("offbeat")
# Part of the run's timeout that an answer may take: who waits begins to ask at 85 % of it, and may ask twice.
_ASK_PART = 0.12
_ASK_LEAST = timedelta(seconds=0.2)
_MOST_STACKS = 4
# A stack tells more about these than the reason does.
_HAVE_A_STACK = frozenset({"computing", "sleeping", "gil", "starting"})


class SentinelWitness:
    """The witness of a worker with a sentinel.

    Args:
        watch: this worker's handle on it.
        rank: this worker's.
        timeout: the run's.
        members: ranks that take part now, where the others go on without one that is lost; None where they do not.
        workers: a file that names the processes of this machine's workers; None if there is none.
    """

    def __init__(
        self,
        watch: SentinelClient,
        rank: int,
        timeout: timedelta,
        members: Callable[[], Sequence[int]] | None = None,
        workers: Path | None = None,
    ) -> None:
        self._watch, self._rank, self._members, self._timeout = watch, rank, members, timeout
        self._workers = workers
        self._patience = max(_ASK_LEAST, _ASK_PART * timeout)
        self._leaving = False
        self.exchanges, self._stamp = 0, 0  # of all models together, in the same order on every rank

    @property
    def watch(self) -> SentinelClient:
        """The worker's handle on its sentinel."""
        return self._watch

    def waiting(self, awaited: WaitContext) -> None:
        self._leaving = self._leaving or awaited.operation == END_OF_RUN
        self._watch.say(
            "finished" if self._leaving else _phase(awaited),
            step=self.exchanges,
            model=awaited.model,
            bucket=awaited.bucket,
            buckets=awaited.buckets,
            stamp=self._stamp,
            operation=awaited.operation.encode(),
        )

    def resumed(self) -> None:
        phase = "finished" if self._leaving else "computing"
        self._watch.say(phase, step=self.exchanges, stamp=self._stamp)

    def exchanged(self, stamp: int) -> None:
        self.exchanges, self._stamp = self.exchanges + 1, stamp
        self.resumed()

    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> Diagnosis | None:
        try:
            cluster = self._watch.ask_all(self._patience)
            diagnosis = self._explain(cluster, awaited, waited_s)
            late = [c.rank for c in diagnosis.culprits if c.reason in _HAVE_A_STACK][:_MOST_STACKS]
            if late:
                stacks = self._watch.ask_all(self._patience, tuple(late))
                diagnosis = self._explain(_with_stacks(cluster, stacks), awaited, waited_s)
        except NetworkError as error:
            _log.warning("%s", error)
            return None
        diagnosis = replace(diagnosis, culprits=tuple(_seen(one, self._workers) for one in diagnosis.culprits))
        if self._members is not None and not diagnosis.disagrees:
            diagnosis = replace(diagnosis, fatal=False)
        return diagnosis.with_server(server) if server else diagnosis

    def gone(self) -> dict[int, str]:
        """List the workers that take no further part, and why; none if that cannot be known now."""
        try:
            cluster = self._watch.ask_all(self._patience)
        except NetworkError as error:
            _log.warning("%s", error)
            return {}
        return gone(cluster, patience_s=self._timeout.total_seconds())

    def ended(self) -> dict[int, str]:
        """List the workers that take no further part, whether lost or done."""
        try:
            cluster = self._watch.ask_all(self._patience)
        except NetworkError as error:
            _log.warning("%s", error)
            return {}
        done = {words.rank: "is done." for words in cluster.words if words.phase == "finished"}
        return done | gone(cluster, patience_s=self._timeout.total_seconds())

    def _explain(self, cluster: ClusterReport, awaited: WaitContext, waited_s: float) -> Diagnosis:
        if self._members is not None:
            here = set(self._members())
            cluster = msgspec.structs.replace(cluster, words=tuple(w for w in cluster.words if w.rank in here))
        return explain(
            cluster,
            rank=self._rank,
            step=self.exchanges,
            phase=_phase(awaited),
            operation=awaited.operation,
            place=str(awaited),
            waited_s=waited_s,
            model=awaited.model,
        )


def _seen(culprit: Culprit, workers: Path | None) -> Culprit:
    """The same; of one that nobody has heard of yet, with what the kernel knows, if it is on this machine."""
    seen = look_at(culprit.rank, workers) if culprit.reason == "absent" else None
    if seen is None:
        return culprit
    if seen.state == "running":
        return replace(culprit, reason="starting", text="is still starting: it has not reported yet.")
    return replace(culprit, reason=seen.state, text=f"is {seen.state}, and had not reported yet.")


def _phase(awaited: WaitContext) -> str:
    if awaited.alone:
        return "starting" if awaited.starts else "busy"
    return "exchanging" if awaited.is_exchange else "waiting"


def _with_stacks(cluster: ClusterReport, stacks: ClusterReport) -> ClusterReport:
    """Add stacks to what was known before they were asked for: to be asked may wake a sleeper."""
    by_rank = {words.rank: words.stack for words in stacks.words}
    words = tuple(msgspec.structs.replace(w, stack=by_rank.get(w.rank, "")) for w in cluster.words)
    return msgspec.structs.replace(cluster, words=words)
