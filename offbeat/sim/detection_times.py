"""When is somebody missed, and when is it back? What the transport does, as times.

* *Silence.* A link ticks `TICKS` times per timeout, and counts as a whole one also the tick in which it heard something
  last. So a peer that is silent is missed half a tick before the last one, on average (`offbeat.wire.session`).
* *A process that is gone.* Its kernel says so; it is waited for until the grace is over, by the same ticks.
* *A link that is cut.* TCP sends again what was not acknowledged, each time after twice as long (RFC 6298; Linux begins
  with a fifth of a second): it finds out only then that the link is whole. After half a timeout of silence offbeat lets
  go of the connection and dials, again and again, for a second at a time (`offbeat.wire.connector`).
* *A server that is killed* has another in its place at once, which has loaded torch already.

`START_S` and `JOIN_S` were measured on a machine like the one that the lab's results are from, with nothing else on it:
in kill.toml steps across a server's end took 0.48 to 0.60 s longer; for a newcomer 0.4 to 0.6 s are `offbeat run`'s,
and 3.4 to 3.7 s a worker's imports.
"""

from __future__ import annotations

from datetime import timedelta

from offbeat.wire.session import TICKS, Limits

TIMEOUT_S = 5.0
"""A job's default, which the lab leaves as it is where faults strike."""
START_S = 0.5
"""From a server's end until the next one serves."""
JOIN_S = 4.1
"""From asking for another worker until it dials."""
MEND_S = 0.3
"""Until those that are left of an all-reduce are connected anew: they ask four times a second who is gone, and look at
the store fifty times (`offbeat.fabric.elastic_group`)."""

_LIMITS = Limits(timeout=timedelta(seconds=TIMEOUT_S))
_TICK_S = TIMEOUT_S / TICKS
_BEAT_S = TIMEOUT_S / 5  # with nothing else to say, a peer says that it is there
_RETRY_S = 0.2  # TCP's first, beyond the time there and back
_DIAL_S = 1.0  # for how long an attempt is made
_PAUSES_S = (0.0, 0.05, 0.1)  # before each of the first ones; behind them it is `_PAUSE_S`
_PAUSE_S = 0.2


def gone_s() -> float:
    """Seconds from the end of a process until the server goes on without it.

    >>> gone_s()
    0.875
    """
    return _LIMITS.grace.total_seconds() - _TICK_S / 2


def silent_s(unheard_s: float) -> float:
    """Seconds from when a peer falls silent until it is missed.

    Args:
        unheard_s: for how long it had had nothing to say but that it was there.

    >>> silent_s(0.0), silent_s(0.5), silent_s(1.25)
    (4.625, 4.125, 4.375)
    """
    return TIMEOUT_S - 1.5 * _TICK_S - unheard_s % _BEAT_S


def retried_s(sent_s: float, whole_s: float, there_and_back_s: float) -> float:
    """The time when TCP sends again what it sent into a link that is cut, and whole from `whole_s` on.

    >>> [round(retried_s(0.0, whole_s, 0.02), 2) for whole_s in (0.1, 0.5, 3.0)]
    [0.22, 0.66, 3.3]
    """
    again_s, after_s = sent_s, _RETRY_S + there_and_back_s
    while again_s < whole_s:
        again_s += after_s
        after_s *= 2
    return again_s


def dialled_s(cut_s: float, whole_s: float, unheard_s: float) -> float:
    """The time when a new connection is there, of one that was cut for so long that both sides let go of it.

    >>> round(dialled_s(0.0, 3.0, 0.0), 3), round(dialled_s(0.0, 20.0, 0.0), 3)
    (3.425, 20.125)
    """
    dialled_at_s = cut_s + TIMEOUT_S / 2 - _TICK_S / 2 - unheard_s % _BEAT_S
    number = 0
    while dialled_at_s < whole_s:
        number += 1
        dialled_at_s += _DIAL_S + (_PAUSES_S[number] if number < len(_PAUSES_S) else _PAUSE_S)
    return dialled_at_s


def through_s(cut_s: float, whole_s: float, unheard_s: float, there_and_back_s: float) -> float:
    """The time when something passes again between a worker and a server; what is sent is sent when the link is cut."""
    if whole_s - cut_s < TIMEOUT_S / 2 - unheard_s % _BEAT_S:
        return retried_s(cut_s, whole_s, there_and_back_s)
    return dialled_s(cut_s, whole_s, unheard_s)
