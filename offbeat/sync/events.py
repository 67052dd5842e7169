"""Events: what happens to workers, as a synchronization policy observes it.

Each event has the time at which it happened, in monotonic seconds: policies read no clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """The worker has computed its contribution number `clock`.

    Args:
        weight: samples it was computed from; 0 if there were none.
    """

    worker: int
    clock: int
    at_s: float
    weight: float = 1.0


@dataclass(frozen=True)
class PushEnding:
    """A push is nearly done: most of contribution `clock` has arrived; a very short one may come without this event.

    Who is let push next takes a moment until its first bytes are here. What is still to come fills that moment.
    """

    worker: int
    clock: int
    at_s: float


@dataclass(frozen=True)
class Pushed:
    """Contribution `clock` has arrived whole."""

    worker: int
    clock: int
    at_s: float


@dataclass(frozen=True)
class Pulled:
    """The worker has the parameters it was released for, and computes.

    Args:
        pushes_early: it pushes what it has of its next contribution before that is ready, once it is granted.
    """

    worker: int
    at_s: float
    pushes_early: bool = False


@dataclass(frozen=True)
class Joined:
    """The worker takes part from now on; it has the current parameters, and computes.

    One that comes back goes on with the numbers of its contributions, so that none is ever used twice.
    """

    worker: int
    at_s: float


@dataclass(frozen=True)
class Left:
    """The worker is gone, in order or not; what it announced and had not delivered is lost.

    Args:
        returns: it only steps out, to wait for the others. Nobody waits for it, but a round keeps its size: what the
            others contribute meanwhile weighs no more than before.
    """

    worker: int
    at_s: float
    returns: bool = False


@dataclass(frozen=True)
class TakesEveryNth:
    """The worker takes part in every `every`-th round only, from its next release on; for one that is too slow.

    Nobody waits for it in the rounds between, and it does not count towards their size. What it brings is as many
    updates older as rounds are between.
    """

    worker: int
    every: int
    at_s: float


@dataclass(frozen=True)
class Deadline:
    """The time of a `Wake` has come."""

    at_s: float


@dataclass(frozen=True)
class Adopted:
    """Another policy decides from now on.

    Args:
        level: forget who is how many steps ahead; for a change from a policy without a bound. Otherwise whoever is
            ahead, perhaps by a thousand steps, waits until the others are there.
    """

    at_s: float
    level: bool = False


Event = Ready | PushEnding | Pushed | Pulled | Joined | Left | TakesEveryNth | Deadline | Adopted
