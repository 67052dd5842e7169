"""The explanation of a stall: a pure function from the last words of all workers to who has not arrived, and why.

Each worker counts the exchanges it has completed. In an exchange, who waits in the same one has arrived, and who has
completed more is ahead: it owes nothing. Everyone else needs a reason, looked for from the certain to the vague:

    dead, raised, done         it will not come: fatal
    unreachable, paused        it may come
    holds the GIL, is busy,
    computes                   it will come
    waits elsewhere            if nobody else is late, the workers disagree about where they are: fatal

That a worker still waits in an earlier exchange is no disagreement: on one ordered channel it only means that data is
still on its way to it. Nor is it one that a worker waits in a first broadcast and others elsewhere: along a tree of
slow links that comes to the last long after it came to the first, and before it all have said which model they prepare.
Nor that others wait elsewhere as long as they move on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from offbeat.protocol.worker_status import residual_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.wire.messages import ClusterReport, WorkerReport

# A thread ticks every 0.2 s; on a crowded machine it may be late, but not by this much.
GIL_S = 1.0
# Last words may be up to a second old; who waits where is only taken for settled after this.
SETTLED_S = 1.5
_SETTLED = 0.3  # of the time for which the one that asks has waited
QUOTED = "    | "  # before each line of a stack or a traceback
_TRACEBACK, _FRAME = "Traceback (most recent call last)", '  File "'
_IDLE = 0.05
_STACK_LINES = 8
_STARTERS = ('File "<frozen runpy>"', 'offbeat/cli/worker_main.py"')
END_OF_RUN = "the end of the run"
FIRST_BROADCAST = "the first broadcast of"
_FATAL = frozenset({"dead", "raised", "done"})
_DISAGREE = "The workers disagree about the step: each must call backward, and offbeat's collectives, equally often."
_MOVING = "Some have come there only just now: data may still be on its way. Who stays there is apart from the others."
_ALL_HERE = "All have arrived: the transfer itself is slow, or the network has lost it."
_ALL_WAIT = "All workers wait for it."


@dataclass(frozen=True)
class Culprit:
    """One worker that has not arrived.

    Args:
        reason: "dead", "raised", "done", "unreachable", "paused", "gil", "computing", "sleeping", "starting", "absent"
            (it has never been heard of), "busy" or "elsewhere".
        text: the same in words, with what is known.
        detail: a traceback or a stack, or "".
    """

    rank: int
    host: str
    reason: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The known facts about a stall.

    Args:
        rank: of the worker that waits.
        place: what it waits for, in words.
        waited_s: for how long.
        arrived: ranks that wait at the same place.
        culprits: those that do not, and why.
        fatal: whether a culprit can no longer come.
        note: what else is to be said.
        server: what is wrong with the parameter server, or the switch, that stands between the workers, or "".
        within: `place` is an exchange of a step, in which it waits; else something that it waits for.
    """

    rank: int
    step: int
    place: str
    waited_s: float
    arrived: tuple[int, ...]
    culprits: tuple[Culprit, ...]
    fatal: bool
    note: str = ""
    server: str = ""
    within: bool = False

    def with_server(self, trouble: str) -> Diagnosis:
        """The same with the trouble of a parameter server or a switch: who waits may wait for that, also elsewhere."""
        if self.note not in (_ALL_HERE, _ALL_WAIT, _DISAGREE):
            return replace(self, server=trouble)
        fatal = any(culprit.reason in _FATAL for culprit in self.culprits)
        return replace(self, server=trouble, note="", fatal=fatal)

    @property
    def disagrees(self) -> bool:
        """Whether the workers are apart, rather than one of them late or lost."""
        return self.note == _DISAGREE

    @property
    def is_on_its_way(self) -> bool:
        """Whether all that is missing is known to be starting."""
        return bool(self.culprits) and not self.server and all(c.reason == "starting" for c in self.culprits)

    @property
    def text(self) -> str:
        """One screen."""
        where = f"{'in' if self.within else 'for'} {self.place}"
        lines = [f"step {self.step}: rank {self.rank} has waited {self.waited_s:.1f} s {where}."]
        for culprit in self.culprits:
            lines.append(f"  rank {culprit.rank} on {culprit.host or 'an unknown host'} {culprit.text}")
            lines += [f"{QUOTED}{line}" for line in culprit.detail.splitlines()]
        if self.arrived:
            lines.append(f"  arrived: {_ranks(self.arrived)}")
        lines += [f"  {said}" for said in (self.server, self.note) if said]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "rank": self.rank,
            "step": self.step,
            "place": self.place,
            "waited_s": self.waited_s,
            "arrived": list(self.arrived),
            "culprits": [vars(culprit) for culprit in self.culprits],
            "fatal": self.fatal,
            "note": self.note,
            "server": self.server,
        }


def explain(
    cluster: ClusterReport,
    *,
    rank: int,
    step: int,
    phase: str,
    operation: str,
    place: str,
    waited_s: float,
    model: int = 0,
) -> Diagnosis:
    """Explain why `rank` still waits.

    Args:
        cluster: last words of all workers.
        rank: of the worker that asks.
        step, phase, operation: where it waits, as its own last words have it.
        place: the same for people.
        waited_s: for how long it has.
        model: of several prepared, the one whose exchange it waits in.
    """
    here = _WaitPlace(step, phase, operation, model)
    if cluster.hub_lost_s is not None:
        found = _without_hub(cluster, cluster.hub_lost_s, rank, here, place, waited_s)
    else:
        found = _with_all(cluster, rank, here, place, waited_s)
    return replace(found, within=phase == "exchanging")


def _with_all(cluster: ClusterReport, rank: int, here: _WaitPlace, place: str, waited_s: float) -> Diagnosis:
    """Explain from the last words of all workers."""
    step = here.step
    others = [words for words in cluster.words if words.rank != rank]
    verdicts = {words.rank: _judge(words, here) for words in others}
    late = [c for c in verdicts.values() if c is not None and not _is_elsewhere(c)]
    elsewhere = [c for c in verdicts.values() if c is not None and _is_elsewhere(c)]
    certain = [c for c in late if c.reason in _FATAL]
    # Who died only because another had died is no culprit if that other is known.
    lost = {words.rank for words in others if words.phase == "lost"}
    first_hand = [c for c in certain if c.rank not in lost]
    gave_up = [c for c in certain if c.rank in lost]
    # Who had left before another died has nothing to do with it.
    first_hand = [c for c in first_hand if c.reason != "done"] or first_hand
    arrived = tuple(sorted([rank, *(w.rank for w in others if verdicts[w.rank] is None and here.same(w))]))
    if first_hand:
        return Diagnosis(rank, step, place, waited_s, arrived, tuple(first_hand), True)
    slow = [c for c in late if c.reason not in _FATAL]
    if gave_up:
        # It gave up on somebody: on one of those that are still not here, if there are any.
        settled = elsewhere if waited_s > SETTLED_S else []
        note = _DISAGREE if settled and not slow else ""
        return Diagnosis(rank, step, place, waited_s, arrived, (*(slow or settled), *gave_up), True, note)
    if slow:
        return Diagnosis(rank, step, place, waited_s, arrived, tuple(slow), False)
    if elsewhere and waited_s > SETTLED_S:
        stays = all(
            w.since_s + w.age_s > max(SETTLED_S, waited_s * _SETTLED) for w in others if _is_elsewhere(verdicts[w.rank])
        )
        return Diagnosis(rank, step, place, waited_s, arrived, tuple(elsewhere), stays, _DISAGREE if stays else _MOVING)
    return Diagnosis(
        rank, step, place, waited_s, arrived, (), False, _ALL_HERE if here.phase == "exchanging" else _ALL_WAIT
    )


def _is_elsewhere(verdict: Culprit | None) -> bool:
    return verdict is not None and verdict.reason == "elsewhere"


def gone(cluster: ClusterReport, *, patience_s: float) -> dict[int, str]:
    """List the workers that take no further part, with the reason: dead, failed, or long out of reach.

    Args:
        cluster: last words of all workers.
        patience_s: how long somebody may be out of reach.
    """
    lost = {}
    for words in cluster.words if cluster.hub_lost_s is None else ():
        verdict = _judge(words, _WaitPlace(words.step, "exchanging", "", words.model))
        if verdict is None:
            continue
        silent = verdict.reason == "unreachable" and words.age_s > patience_s and bool(words.host)
        if silent or verdict.reason in ("dead", "raised"):
            lost[words.rank] = f"{verdict.text} {error_line(verdict.detail)}".rstrip() + residual_lost(words.residual)
    return lost


def error_line(detail: str) -> str:
    """Find the line of a traceback that has the exception's type and message; of a message alone, its first line.

    What follows it is the rest of the message, which may be a stall report of many lines.

    >>> error_line('Traceback (most recent call last):\\n  File "<in>", line 1\\nValueError: no.\\n  All is lost.\\n')
    'ValueError: no.'
    """
    lines = detail.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith((_TRACEBACK, _FRAME))]
    below = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in below if line and not line[0].isspace()), lines[-1] if lines else "")


def without_quoted(text: str) -> str:
    """Remove stacks and tracebacks from `Diagnosis.text`."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(QUOTED.rstrip()))


@dataclass(frozen=True)
class _WaitPlace:
    """The place where a worker waits."""

    step: int
    phase: str
    operation: str
    model: int = 0

    def same(self, words: WorkerReport) -> bool:
        if self.operation == END_OF_RUN:
            return words.phase == "finished"
        if words.phase != self.phase or words.step != self.step:
            return False
        return words.model == self.model if self.phase == "exchanging" else words.operation == self.operation


def _judge(words: WorkerReport, here: _WaitPlace) -> Culprit | None:
    """Say why this worker has not arrived; None if it has, or is ahead."""
    at = f"last seen {_doing(words)}"

    def culprit(reason: str, text: str, detail: str = "") -> Culprit:
        return Culprit(words.rank, words.host, reason, text, detail)

    ahead = here.phase == "exchanging" and words.step > here.step
    if words.phase == "finished":
        if ahead or here.same(words):
            return None
        return culprit("done", f"is done after {_steps(words.step)}, and takes no further part.")
    if words.phase in ("raised", "lost"):
        return culprit("raised", f"raised an exception after {_steps(words.step)}:", words.traceback)
    if words.process == "dead":
        ago_s = words.state_since_s + words.age_s
        return culprit("dead", f"died {ago_s:.1f} s ago without a word (killed?), {at}.", words.traceback)
    if words.process == "unreachable":
        if not words.host:
            return culprit("absent", "has not reported yet: it may still be starting, or cannot reach rank 0.")
        return culprit("unreachable", f"has been out of reach for {words.age_s:.1f} s (machine or link down?), {at}.")
    if words.process == "paused":
        return culprit("paused", f"has been paused (SIGSTOP) for {words.state_since_s + words.age_s:.1f} s, {at}.")
    if ahead or here.same(words):
        return None
    if words.phase in ("exchanging", "waiting"):
        return _judge_waiting(words, here)
    if words.heartbeat_age_s > GIL_S:
        return culprit("gil", f"has held the GIL for {words.heartbeat_age_s:.1f} s, {at}.", _tail_of(words.stack))
    if words.phase == "starting" and words.operation:
        return culprit("starting", f"has been {words.operation} for {words.since_s + words.age_s:.1f} s.")
    if words.phase == "starting":
        return culprit("starting", "is still starting.", _tail_of(words.stack))
    if words.phase == "busy":
        return culprit("busy", f"has been {words.operation} for {words.since_s + words.age_s:.1f} s.")
    return _judge_computing(words)


def _judge_waiting(words: WorkerReport, here: _WaitPlace) -> Culprit | None:
    """A worker that waits, but not here."""
    is_broadcast = any(one.startswith(FIRST_BROADCAST) for one in (words.operation, here.operation))
    if words.step < here.step or is_broadcast:
        return None  # data of an earlier exchange, or broadcast, is still on its way
    text = f"waits elsewhere, for {words.since_s:.1f} s now: {_doing(words)}."
    return Culprit(words.rank, words.host, "elsewhere", text)


def _judge_computing(words: WorkerReport) -> Culprit:
    since_s = words.since_s + words.age_s
    stack = _tail_of(words.stack)
    if words.busy < _IDLE:
        text = f"has been in its own part of step {words.step} for {since_s:.1f} s, sleeping: it uses no processor."
        return Culprit(words.rank, words.host, "sleeping", text, stack)
    text = f"has been computing step {words.step} for {since_s:.1f} s ({words.busy:.0%} of a core)."
    return Culprit(words.rank, words.host, "computing", text, stack)


def _without_hub(
    cluster: ClusterReport, lost_s: float, rank: int, here: _WaitPlace, place: str, waited_s: float
) -> Diagnosis:
    """Judge rank 0 alone: by how it said it ended, if that was heard, else by its silence."""
    verdict: Culprit | None = None
    if rank != 0:
        farewell = [_judge(words, here) for words in cluster.words if words.rank == 0]
        verdict = farewell[0] if farewell else _hub_lost(lost_s)
    culprits = () if verdict is None else (verdict,)
    fatal = verdict is not None and verdict.reason in _FATAL
    note = "Nothing is known of the other workers without rank 0."
    return Diagnosis(rank, here.step, place, waited_s, (rank,), culprits, fatal, note)


def _hub_lost(lost_s: float) -> Culprit:
    text = f"cannot be reached since {lost_s:.1f} s, nor can its sentinel (machine or link down?)."
    return Culprit(0, "its host", "unreachable", text)


def _doing(words: WorkerReport) -> str:
    if words.phase in ("exchanging", "waiting"):
        model = f" of model {words.model + 1}" if words.model else ""
        return f"waiting {'in' if words.phase == 'exchanging' else 'for'} {words.operation}{model} at step {words.step}"
    if words.operation and words.phase in ("busy", "starting"):
        return words.operation
    return f"computing step {words.step}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _tail_of(stack: str) -> str:
    """The main thread's innermost frames, without those that started it."""
    lines = stack.strip().splitlines()
    own = [line for line in lines if not any(starter in line for starter in _STARTERS)]
    return "\n".join(own[: _STACK_LINES + 1])


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 16:
        return " ".join(map(str, ranks))
    return f"{len(ranks)} ranks"
