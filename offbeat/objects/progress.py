"""The progress of an object that a client waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from offbeat.protocol.object_calls import ProgressNote

if TYPE_CHECKING:
    from offbeat.objects.node_store import NodeStore
    from offbeat.protocol.objects import ObjectName

NOBODY = "nobody has put it"
"""The progress of an object that no store has."""
TOLD_S = 0.25
"""The seconds after which a client is told again."""


def progress_of(store: NodeStore, name: ObjectName, call: int) -> ProgressNote:
    """Return how far an object is in a store, as word to the client whose call waits for it."""
    stored, feeder, silent_s = store.objects.get(name), "", 0.0
    if stored is not None:
        feeder = next((stored.feeders[stripe] for stripe in stored.readings), "")
        silent_s = max(0.0, time.monotonic() - stored.came_s) if stored.came_s else 0.0
    waits = store.sums_that_wait.get(name)
    return ProgressNote(
        call=call,
        have_bytes=0 if stored is None else stored.have_bytes,
        size_bytes=0 if stored is None else stored.meta.size_bytes,
        feeder=feeder,
        silent_s=silent_s,
        away_s=store.directory_away_s(name),
        lacking=0 if waits is None else waits.lacking,
        missing=() if waits is None else waits.missing,
        more=0 if waits is None else waits.more,
    )


def told(note: ProgressNote) -> str:
    """Say how far an object is, for people.

    >>> told(ProgressNote(call=1, have_bytes=3, size_bytes=10, feeder="10.0.0.3:4711", silent_s=0.4))
    '3 of 10 bytes are here, from the store at 10.0.0.3:4711, the last of them 0.4 s ago'
    """
    if note.away_s and note.have_bytes == note.size_bytes:
        return f"its directory has been lost for {note.away_s:.0f} s, and is dialled"
    if note.lacking:
        names = ", ".join(f"{name}" for name in note.missing) + (f" and {note.more:,} others" if note.more else "")
        return f"it is a sum that waits for {note.lacking:,} more of its sources: nobody has all of {names}"
    if not note.size_bytes:
        return NOBODY
    where = f", from the store at {note.feeder}" if note.feeder else ", and no store feeds it just now"
    when = f", the last of them {note.silent_s:.1f} s ago" if note.have_bytes and note.silent_s else ""
    return f"{note.have_bytes:,} of {note.size_bytes:,} bytes are here{where}{when}"
