"""Exit codes of processes, in words."""

from __future__ import annotations

import signal

# Of a worker that trained a model which was never prepared, beside others; it has done so to the end of its script.
UNPREPARED = 78
# Of a worker that was sent SIGTERM, and left the others in order; one whom that killed has the signal instead.
LEFT = 128 + signal.SIGTERM


def how_it_ended(code: int) -> str:
    """Put a return code of `subprocess` into words, as the end of a sentence.

    >>> how_it_ended(-9), how_it_ended(-40), how_it_ended(3)
    ('was killed by SIGKILL', 'was killed by signal 40', 'ended with exit code 3')
    >>> how_it_ended(-15), how_it_ended(LEFT)
    ('was killed by SIGTERM', 'was asked to end by SIGTERM, and left cleanly')
    """
    if code == LEFT:
        return "was asked to end by SIGTERM, and left cleanly"
    if code == UNPREPARED:
        return "trained a model of its own, which was not prepared"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"
