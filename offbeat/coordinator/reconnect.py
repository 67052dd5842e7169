"""The decision on who may reconnect, and with what: a worker that was left behind, or all workers, to a server that was
killed.

A *life* of a server lies between two of its starts; the coordinator draws its name, and every shard and worker is told.
A server begins with nothing, or with the newest snapshot that all its shards have, which is one version of every model.
If one of several shards is lost, the others begin a new life with it. If no shard was killed, that life continues from
their memory, which is as good as a snapshot of this very moment (see `offbeat.server.shard.live_image`): nothing is
lost, and "the snapshot" is that memory in what follows.

A worker that loses a shard lets go of all, dials all again, and opens its models with a `Reconnect`: what it was told
last. Numbers of contributions never go back: it goes on with the greater of what it says and what the server knows.

    the server's life   the worker            what becomes of it
    the same            computes              LATER: what it computes is outdated, nobody waits for it. It comes again
                                              when it has computed it
    the same            holds a contribution  JOIN: the contribution is not used (if an update had taken it before,
                                              it is in there once); it pulls, and takes part
    another             computes              GO_ON: it takes part, and what it computes will be its next contribution
    another             holds one that is in  JOIN: not a second time; it pulls, and takes part
                        the snapshot
    another             holds another one     AGAIN: it is announced again, under a number of this life
    either              waits for an answer   JOIN: it pulls, and asks again

What a worker was told is in the parameters, and is not in the snapshot, is lost, and is counted: each worker keeps
number and samples of those, until it hears that the last two snapshots have them (`SnapshotAck`), as the newest may be
found to be damaged, and says so when it comes back. So each contribution is in the parameters once, or reported as
dropped or lost, and never in there twice.

A server that goes on from a snapshot deals out again what was dealt out after it. So a contribution that was computed
from such leases would count samples twice: it takes its turn, weighs nothing, and is reported as dropped.

An answer to a collective question that some were given and others were not is not asked for again: who was given it
brings it along.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.protocol.training import Reconnect


class ReconnectAction(enum.Enum):
    """The decision about a worker that opens a model."""

    JOIN = "join"
    GO_ON = "go on"
    AGAIN = "again"
    LATER = "later"


def judge(back: Reconnect | None, *, life: int, decided: int) -> ReconnectAction:
    """Decide about a worker that reconnects.

    Args:
        life: of the server.
        decided: its first contribution that was neither applied nor dropped, as the server knows.
    """
    if back is None:
        return ReconnectAction.JOIN
    if back.life == life:
        return ReconnectAction.JOIN if back.waits else ReconnectAction.LATER
    if back.holds:
        return ReconnectAction.JOIN if back.clock < decided else ReconnectAction.AGAIN
    return ReconnectAction.JOIN if back.waits else ReconnectAction.GO_ON


@dataclass
class LostUpdates:
    """The contributions that were acknowledged in an earlier incarnation and are not in this one's snapshot.

    Args:
        version: of the snapshot.
        seen: the highest version that a worker had.
        by: number of contributions and of samples, by worker.
    """

    version: int
    seen: int = 0
    by: dict[int, tuple[int, float]] = field(default_factory=dict)

    def book(self, worker: int, back: Reconnect, decided: int) -> None:
        """Count what this worker was told was in the parameters, and is not."""
        self.seen = max(self.seen, back.version)
        lost = [samples for clock, samples in back.done if clock >= decided]
        self.add(worker, lost)

    def add(self, worker: int, lost: list[float]) -> None:
        """Count these contributions of a worker, by their samples."""
        if lost:
            count, samples = self.by.get(worker, (0, 0.0))
            self.by[worker] = (count + len(lost), samples + sum(lost))

    def __str__(self) -> str:
        if not self.by:
            return "nothing is lost"
        count, samples = (sum(numbers) for numbers in zip(*self.by.values(), strict=True))
        each = ", ".join(f"rank {worker}: {number}" for worker, (number, _) in sorted(self.by.items()))
        plural = "" if count == 1 else "s"
        return f"{_updates(self.version + 1, self.seen)} ({count:g} contribution{plural}, {samples:g} samples; {each})"


def _updates(first: int, last: int) -> str:
    if last < first:  # they had arrived, and were in no update yet
        return "what had arrived is lost"
    return f"update {first} is lost" if first == last else f"updates {first} to {last} are lost"
