"""A part is sent of local steps at a server, and the rest leads the next steps alone (see `local_offset`)."""

from __future__ import annotations

from offbeat.codec.local_offset import LocalOffset


class LookAhead(LocalOffset):
    """A codec whose offset leads the next steps, and is gone with them: what is sent is of the last steps alone.

    >>> LookAhead()
    LookAhead(inner=GRBS(ratio=5, block=256))
    """

    offset = "dropped"
