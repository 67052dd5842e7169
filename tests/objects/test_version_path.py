"""Which objects lead to a version with the fewest bytes; compared with trying all of them."""

from __future__ import annotations

import random

import pytest

from offbeat.objects.version_path import cheapest
from offbeat.protocol.object_versions import VersionRecord, delta_name
from offbeat.protocol.objects import ObjectName

WHOLE = 1000


def chain(count: int, delta_bytes: int = 30, kept: int = 2) -> list[VersionRecord]:
    """So many versions, each with a delta to the one before."""
    return [
        VersionRecord(
            version, f"d{version}", WHOLE, version >= count - kept, version - 1 if version else None, delta_bytes
        )
        for version in range(count)
    ]


def test_a_reader_with_the_version_before_gets_the_delta() -> None:
    path = cheapest("w", chain(5), held="d3")
    assert path is not None
    assert path.names("w") == [delta_name("w", 4)]


def test_a_reader_two_versions_behind_gets_two_deltas() -> None:
    path = cheapest("w", chain(5), held="d2")
    assert path is not None
    assert path.names("w") == [delta_name("w", 3), delta_name("w", 4)]


def test_the_whole_where_deltas_are_more_bytes() -> None:
    path = cheapest("w", chain(5, delta_bytes=400), held="d1")
    assert path is not None
    assert path.names("w") == [ObjectName("w", 4)]


def test_nothing_to_get_for_a_reader_that_has_it() -> None:
    path = cheapest("w", chain(5), held="d4")
    assert path is not None
    assert path.names("w") == []


def test_a_reader_with_something_else_gets_the_whole() -> None:
    for held in ("", "another"):
        path = cheapest("w", chain(5), held=held)
        assert path is not None
        assert path.names("w") == [ObjectName("w", 4)]


def test_an_older_whole_that_is_on_this_machine() -> None:
    path = cheapest("w", chain(5), held="", here={ObjectName("w", 3)})
    assert path is not None
    assert path.names("w") == [ObjectName("w", 3), delta_name("w", 4)]
    assert path.cost_bytes == 30


def test_an_older_whole_where_nobody_has_the_newest() -> None:
    path = cheapest("w", chain(5), held="", gone={ObjectName("w", 4)})
    assert path is not None
    assert path.names("w") == [ObjectName("w", 3), delta_name("w", 4)]
    assert cheapest("w", chain(5), held="", gone={ObjectName("w", 4), delta_name("w", 4)}) is None


@pytest.mark.parametrize("seed", range(100))
def test_no_other_way_takes_fewer_bytes(seed: int) -> None:
    dice = random.Random(seed)
    records = [
        VersionRecord(
            version,
            f"d{dice.randrange(6)}",
            dice.randrange(1, 50),
            dice.random() < 0.5,
            dice.randrange(version) if version and dice.random() < 0.8 else None,
            dice.randrange(1, 50),
        )
        for version in range(7)
    ]
    names = [ObjectName("w", version) for version in range(7)] + [delta_name("w", version) for version in range(7)]
    held, here, gone = f"d{dice.randrange(6)}", set(dice.sample(names, 3)), set(dice.sample(names, 3))
    by = {record.version: record for record in records}

    def costs(version: int) -> list[int]:
        """The costs of all ways to a version."""
        record, found = by[version], []
        if record.digest == held:
            found.append(0)
        if record.is_kept and ObjectName("w", version) not in gone:
            found.append(0 if ObjectName("w", version) in here else record.size_bytes)
        if record.base is not None and (name := delta_name("w", version)) not in gone:
            found += [cost + (0 if name in here else record.delta_bytes) for cost in costs(record.base)]
        return found

    path, all_costs = cheapest("w", records, held=held, here=here, gone=gone), costs(6)
    assert (path is None) == (not all_costs)
    if path is not None:
        assert path.cost_bytes == min(all_costs)
        assert not gone & set(path.names("w"))
