"""Faults planted in the history of a healthy job, each of which an audit has to find."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.history import HistoryLog, ParametersAfter, PolicyStep, StepGranted, UpdateMade, actions_of, write_log
from offbeat.sync import Apply

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[Any], list[Any]]  # one record to those that stand in its place
    Fits = Callable[[Any], bool]


def _is_exchange(record: Any) -> bool:
    """Whether a worker without a server says that something of its own is in a mean."""
    if not isinstance(record, ParametersAfter) or len(record.weights) < 2:
        return False
    return any(record.given) if record.given else record.weights[0] > 0


def _is_given(record: Any) -> bool:
    """Whether a worker says that the server used what it pushed."""
    return isinstance(record, ParametersAfter) and bool(record.numbers) and record.counted and record.samples > 0


def _is_applied(record: Any) -> bool:
    return isinstance(record, PolicyStep) and any(isinstance(one, Apply) for one in actions_of(record))


def _is_made(record: Any) -> bool:
    return isinstance(record, UpdateMade) and any(one.weight for one in record.used)


def _gives_more(record: ParametersAfter) -> list[Any]:
    given = tuple(2 * one for one in record.given)
    return [msgspec.structs.replace(record, weights=(2 * record.weights[0], *record.weights[1:]), given=given)]


def _sums_more(record: ParametersAfter) -> list[Any]:
    own, first, *others = record.weights
    return [msgspec.structs.replace(record, weights=(own, first + own, *others))]


def _weighs_more(record: UpdateMade) -> list[Any]:
    used = tuple(msgspec.structs.replace(one, weight=one.weight + 1) for one in record.used)
    return [msgspec.structs.replace(record, used=used)]


NOTHING = "a worker gave nothing"
OTHER = "a worker has other parameters"
PLANTS: dict[str, tuple[Fits, Change]] = {
    "a worker gave twice as much": (_is_exchange, _gives_more),
    "more is in a mean": (_is_exchange, _sums_more),
    NOTHING: (_is_exchange, lambda record: []),
    "a worker pushed what nobody announced": (
        _is_given,
        lambda record: [msgspec.structs.replace(record, numbers=(record.numbers[-1] + 1000,))],
    ),
    "a worker pushed it twice": (_is_given, lambda record: [record, record]),
    "a worker computed from more samples": (
        _is_given,
        lambda record: [msgspec.structs.replace(record, samples=record.samples + 1)],
    ),
    "an update was not decided": (_is_applied, lambda record: []),
    "an update was decided twice": (_is_applied, lambda record: [record, record]),
    "an update was not made": (_is_made, lambda record: []),
    "an update was made twice": (_is_made, lambda record: [record, record]),
    "a block was updated twice": (
        _is_made,
        lambda record: [msgspec.structs.replace(record, times=record.times + 1)],
    ),
    "a contribution weighs more": (_is_made, _weighs_more),
    "a worker was let go too early": (
        lambda record: isinstance(record, StepGranted),
        lambda record: [msgspec.structs.replace(record, clock=record.clock + 1000)],
    ),
    OTHER: (
        lambda record: isinstance(record, ParametersAfter) and record.digest is not None,
        lambda record: [msgspec.structs.replace(record, digest=record.digest ^ 1)],
    ),
}


def _digest_of(record: Any) -> int | None:
    return record.digest if isinstance(record, ParametersAfter) else None


def plant(folder: Path, name: str, draw: random.Random) -> str:
    """Plant a fault in a random record; what was changed, or "" if no record can have it."""
    fits, change = PLANTS[name]
    logs = {path: list(HistoryLog(path)) for path in sorted(folder.glob("*.log"))}
    found = [(path, index) for path, records in logs.items() for index, record in enumerate(records) if fits(record)]
    if name == NOTHING:  # a worker without a last record may have left while its average was on its way
        found = [place for place in found if any(place < other and place[0] == other[0] for other in found)]
    if name == OTHER:  # than another worker, which in truth has the same
        held = Counter(digest for records in logs.values() for digest in set(map(_digest_of, records)))
        found = [(path, index) for path, index in found if held[_digest_of(logs[path][index])] > 1]
    if not found:
        return ""
    path, index = draw.choice(found)
    told = f"{name}: {path.name}, record {index}: {logs[path][index]}"
    logs[path][index : index + 1] = change(logs[path][index])
    write_log(path, logs[path])
    return told
