"""Descriptions of faults: what goes wrong, at which worker and step. `offbeat.testing.faults` makes it happen.

A fault strikes when the named worker begins a step, at that worker, or at a shard of its parameter server, or at the
switch that sums its gradients, or at links: then the worker's step only says when. It is written down before it
strikes, so that whoever asked for it can see that it did: a fault that never fires proves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

from offbeat.errors import ScenarioError
from offbeat.topology import check_rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Process = Literal["sigkill", "sigterm", "sigstop", "slow", "disk"]
"""To a process, from outside: killed; told to end; for `seconds` stopped, or stopped in `factor - 1` of every `factor`
moments, or unable to write to any file."""
Script = Literal["gil", "forward", "backward", "loader", "leave", "join", "clock", "nan", "inf", "huge", "stale"]
"""Within a worker: the GIL held in C for `seconds`; an exception in a forward pass, a hook of backward, the data; the
script ends well; another worker joins; the wall clock jumps by an hour; a gradient is NaN, infinite, 10^30, or that of
`AGE` steps ago; that of the optimizer's first parameter."""
Link = Literal[
    "partition", "deaf", "mute", "slow-link", "lossy", "cut",
    "flip", "truncate", "duplicate", "reorder", "replay", "lost-reply",
]  # fmt: skip
"""On the links to the server, for `seconds`: nothing passes; nothing to the worker; nothing from it; `factor` times as
long; pauses at random. Or once, to bytes from the worker: the connection breaks; a bit is flipped; bytes are missing,
come twice, or after those behind them; what was sent before comes on another connection; a reply is lost with its
connection."""
Stranger = Literal["wrong-token", "wrong-version", "wrong-certificate"]
"""Somebody dials the server who may not."""
Shaping = Literal["rate"]
"""To links of the lab: each carries `to_mbps` from then on, until another fault of this kind changes it."""
Target = Literal["worker", "workers", "server", "coordinator", "switch"]
Part = Literal["a server", "a switch", "room for new workers", "others that continue"]
"""What a job may have, and some faults take: see `Fault.takes`."""
AGE = 5
FAULTS, LOG, ASKED = "OFFBEAT_FAULTS", "OFFBEAT_FAULTS_LOG", "OFFBEAT_FAULTS_ASKED"
"""Variables: the faults of all workers as JSON; the file where each is written down before it strikes; and, where links
are somebody else's to strike, the file in which a worker asks for it."""

JOINED = "joined"
"""What a worker of a peer of the lab's says first, when it came later and the others have let it in."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault.

    Args:
        worker: rank of the worker whose step it is.
        step: which of its steps, from 0.
        kind: one of `Process`, `Script`, `Link`, `Stranger` and `Shaping`.
        seconds: for how long, where it lasts.
        factor: how many times slower, where something is slow.
        target: what it strikes: that worker, the first shard of the server, or the last one, or the switch, which is
            started again. Of links: those of the worker to all shards, or of all workers to that shard. Of rates: the
            link of the worker, those of all workers, or that of the shard. Of a lab's links that are not those of one
            switch: all that the host has, so that it forwards nothing either.
        link: the two ends of the one link of a lab that is struck instead; kinds "rate", "partition" and "slow-link".
        to_mbps: the new rate in each direction, in 10^6 bit/s; of kind "rate" alone.

    >>> Fault(worker=2, step=20, kind="sigstop", seconds=3.0).words
    'sigstop of worker 2 for 3 s at its step 20'
    """

    worker: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    step: Annotated[int, msgspec.Meta(ge=0)]
    kind: Process | Script | Link | Stranger | Shaping
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 1.0
    factor: Annotated[float, msgspec.Meta(gt=1, le=1000)] = 10.0
    target: Target = "worker"
    link: Annotated[list[str], msgspec.Meta(max_length=2)] = []
    to_mbps: float | None = None

    @property
    def words(self) -> str:
        """The fault in words: its kind, worker and step."""
        long = f" for {self.seconds:g} s" if self.kind in LASTING else ""
        kind = self.kind if self.to_mbps is None else f"{self.kind} of {self.to_mbps:g} Mbit/s at the link"
        if self.link:
            at = "" if self.to_mbps is not None else " of the link"
            return f"{kind}{at} {'-'.join(self.link)}{long} at step {self.step} of worker {self.worker}"
        if self.target == "worker":
            return f"{kind} of worker {self.worker}{long} at its step {self.step}"
        kind += "s" * (self.target == "workers")
        return f"{kind} of the {self.target}{long} at step {self.step} of worker {self.worker}"

    @property
    def takes(self) -> Part | None:
        """The part that a job needs for the fault to strike there, and to survive it; None if any will do."""
        if self.ends:
            return "others that continue"
        if self.kind == "join":
            return "room for new workers"
        if self.target == "switch":
            return "a switch"
        if self.target in ("server", "coordinator") or self.kind in (*PASSING, *get_args(Stranger)):
            return "a server"
        return None

    @property
    def ends(self) -> bool:
        """Whether a worker does not come to the end because of it."""
        return self.target == "worker" and self.kind in ENDING

    @property
    def changes_sum(self) -> bool:
        """Whether parameters may become another sum than that of all gradients, and rightly so.

        A worker ends or joins, a gradient is another, somebody may be given up, or a server goes on from a snapshot. To
        a switch that was killed all bring back what they had added.
        """
        long = self.kind in LASTING and self.seconds >= _GIVEN_UP_S
        killed = self.target in ("server", "coordinator") and self.kind == "sigkill"
        return self.ends or long or killed or self.kind in ("join", "nan", "inf", "huge", "stale")

    @property
    def on_links(self) -> bool:
        """Whether it happens to whole links, for a while, whatever passes there."""
        return self.kind in get_args(Link) and self.kind not in PASSING

    @property
    def stays(self) -> bool:
        """Whether it is not over by itself, so that nobody recovers from it: another rate."""
        return self.kind in get_args(Shaping)

    @property
    def is_asked_for(self) -> bool:
        """Whether a worker asks the lab for it, whose network and switch they are."""
        return self.on_links or self.stays or self.target == "switch"

    def check(self, path: str = "fault") -> None:
        """Refuse what cannot be.

        Args:
            path: of this fault, where it was written.

        Raises:
            ScenarioError: if this kind cannot strike that target, or not at that step.
        """
        if self.stays:
            self._check_rate(path)
        elif self.to_mbps is not None or self.target == "workers":
            key, value = ("to_mbps", f"{self.to_mbps:g}") if self.to_mbps is not None else ("target", "workers")
            raise ScenarioError(
                f'Cannot have {self.kind!r} strike with {key} = {value}: only "rate" takes that. Leave {key} out '
                f"({path}.{key})."
            )
        if self.link:
            self._check_link(path)
        if self.kind in get_args(Script) and self.target != "worker":
            raise ScenarioError(
                f"Cannot have {self.kind!r} strike the {self.target}: it happens within a training script. Leave out "
                f"target, or choose one of {', '.join([*get_args(Process), *get_args(Link)])} ({path}.kind)."
            )
        if self.target == "switch" and self.kind != "sigkill":
            raise ScenarioError(
                f'Cannot have {self.kind!r} strike the switch: it is killed, and started again. Choose "sigkill" '
                f"({path}.kind)."
            )
        if self.kind in ("forward", "backward", "loader", "stale") and self.step == 0:
            raise ScenarioError(
                f"Cannot have {self.kind!r} strike at step 0: it is prepared in the step before. Choose at least 1 "
                f"({path}.step)."
            )

    def _check_link(self, path: str) -> None:
        if self.kind not in ON_ONE_LINK:
            raise ScenarioError(
                f"Cannot have {self.kind!r} strike a link by its ends: {', '.join(sorted(ON_ONE_LINK))} can. Choose "
                f"one of them, or leave link out ({path}.link)."
            )
        if len(self.link) != 2 or self.target != "worker":
            why = f"it has two ends, and {len(self.link)} are named" if len(self.link) != 2 else "target names others"
            raise ScenarioError(
                f"Cannot tell which link to strike: {why}. Name the two nodes that it joins, and no target "
                f"({path}.link)."
            )

    def _check_rate(self, path: str) -> None:
        if self.to_mbps is None:
            raise ScenarioError(f"Cannot change a rate: the new one is not given. Give to_mbps ({path}.to_mbps).")
        check_rate(self.to_mbps, f"{path}.to_mbps")
        if self.target == "switch":
            raise ScenarioError(
                f'Cannot change the rate of the switch: links are those of hosts. Choose "workers" ({path}.target).'
            )


ENDING = frozenset({"sigkill", "sigterm", "forward", "backward", "loader", "leave"})
"""Kinds that end the worker they strike."""
PASSING = frozenset({"cut", "flip", "truncate", "duplicate", "reorder", "replay", "lost-reply"})
"""Kinds of `Link` that happen once, to bytes on their way to the server."""
LASTING = frozenset({"sigstop", "slow", "disk", "gil", "partition", "deaf", "mute", "slow-link", "lossy"})
"""Kinds that `seconds` say something about."""
ON_ONE_LINK = frozenset({"rate", "partition", "slow-link"})
"""Kinds that may strike a link which is named by its ends."""
_GIVEN_UP_S = 5.0
"""A job's timeout, if nothing else is said: beyond it a silent worker is left behind, and what it brings is dropped."""


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log: written, and on the disk, before the fault strikes.

    Args:
        number: which of the faults that were asked for.
        time_s: seconds since 1970.
        pid: the process it strikes; 0 for links.
    """

    number: int
    fault: Fault
    time_s: float
    pid: int = 0


def read_fired(log: Path) -> list[Fired]:
    """Read which faults have fired so far, in order of time; none if there is no file."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return sorted((msgspec.json.decode(line, type=Fired) for line in whole), key=lambda fired: fired.time_s)


def unfired(faults: Sequence[Fault], log: Path) -> list[Fault]:
    """List the faults that have not fired."""
    fired = {one.number for one in read_fired(log)}
    return [fault for number, fault in enumerate(faults) if number not in fired]
