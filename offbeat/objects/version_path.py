"""The choice of the objects that lead a reader to a version with the fewest bytes from the network.

Each version that is described is reached from its whole, or from another version by its delta; what the reader has, and
what is on its machine already, costs nothing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.protocol.object_versions import delta_name
from offbeat.protocol.objects import ObjectName

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from offbeat.protocol.object_versions import VersionRecord


@dataclass(frozen=True)
class VersionPath:
    """The way to a version.

    Args:
        whole: the version whose whole comes first; None for what the reader has.
        deltas: the versions whose deltas follow.
        cost_bytes: from the network.
        size_bytes: of all of these objects.
    """

    whole: int | None = None
    deltas: tuple[int, ...] = ()
    cost_bytes: int = 0
    size_bytes: int = 0

    def names(self, id_: str) -> list[ObjectName]:
        """The objects to get."""
        whole = [] if self.whole is None else [ObjectName(id_, self.whole)]
        return whole + [delta_name(id_, version) for version in self.deltas]


def cheapest(
    id_: str,
    records: Sequence[VersionRecord],
    *,
    held: str,
    here: Collection[ObjectName] = (),
    gone: Collection[ObjectName] = (),
) -> VersionPath | None:
    """The way to the last of these versions that takes the fewest bytes.

    Args:
        id_: of the versions.
        records: of all of them that are described, ascending.
        held: the digest of what the reader has; "" if it has nothing.
        here: the objects that are on its machine.
        gone: the objects that nobody has.

    Returns:
        The way, of those that cost the same the one with less to read; None if there is none.
    """
    best: dict[int, VersionPath] = {}
    for record in records:
        ways = [VersionPath()] if held and record.digest == held else []
        name = ObjectName(id_, record.version)
        if record.is_kept and name not in gone:
            ways.append(VersionPath(record.version, (), 0 if name in here else record.size_bytes, record.size_bytes))
        name = delta_name(id_, record.version)
        if record.base in best and name not in gone:
            before = best[record.base]
            ways.append(
                VersionPath(
                    before.whole,
                    (*before.deltas, record.version),
                    before.cost_bytes + (0 if name in here else record.delta_bytes),
                    before.size_bytes + record.delta_bytes,
                )
            )
        if ways:
            best[record.version] = min(ways, key=lambda way: (way.cost_bytes, way.size_bytes))
    return best.get(records[-1].version)
