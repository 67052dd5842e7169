"""A part is sent of local steps at a server, and the rest with a later contribution (see `local_offset`)."""

from __future__ import annotations

from offbeat.codec.local_offset import LocalOffset


class Carry(LocalOffset):
    """A codec whose offset is carried: nothing of a worker's own steps is lost, whatever is sent of them, and when.

    >>> Carry()
    Carry(inner=GRBS(ratio=5, block=256))
    """

    offset = "carried"
