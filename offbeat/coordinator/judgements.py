"""The judgement of updates by a robust rule that compares whole contributions.

Each shard that holds blocks measures an update once all its contributions are there, and waits. Gram matrices of parts
of vectors add up: when all shards have measured it, the rule decides by what each contribution is multiplied, and the
shards make the update. Sums are rounded once, so that they do not depend on which shard came first.

A contribution that is rejected moves nothing. To its worker it looks like any other: who lies is not told of it.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from offbeat.errors import PeerError
from offbeat.history import UpdateJudged
from offbeat.protocol.shards import ScaleContributions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.coordinator.job_record import JobRecord
    from offbeat.protocol.shards import MeasuredContribution, UpdateMeasured

    JudgeUpdate = Callable[[int, Sequence[MeasuredContribution], Sequence[float]], Sequence[float]]

_MOST_WAITING = 1024  # updates of a model that some shards have measured, and others have not


class Judgements:
    """The updates of one job that wait to be judged.

    Args:
        judge: called with a model, the contributions that are compared, and their Gram matrix row by row, with the
            reference last if there is one; returns the scale of each row. Raises PeerError if nothing is to be judged.
    """

    def __init__(self, job: JobRecord, judge: JudgeUpdate) -> None:
        self._job, self._judge = job, judge

    def measured(self, message: UpdateMeasured) -> None:
        """A shard has measured its part of an update.

        Raises:
            PeerError: if that cannot be.
        """
        one, version = self._job.model(message.model), message.version
        parts = one.measured.get(version, [])
        if version > one.runner.state.version or (not parts and len(one.measured) >= _MOST_WAITING):
            raise PeerError(f"A shard has measured update {version} of model {message.model}, which does not wait.")
        if parts and (parts[0].rows, len(parts[0].gram)) != (message.rows, len(message.gram)):
            raise PeerError(f"A shard has measured other contributions to update {version} than the others.")
        _check(message)
        one.measured[version] = parts = [*parts, message]
        if len(parts) == one.holders:
            del one.measured[version]
            self._decide(parts)

    def _decide(self, parts: Sequence[UpdateMeasured]) -> None:
        """Judge an update that all shards have measured."""
        first, rows = parts[0], parts[0].rows
        gram = [_sum(values) for values in zip(*map(_values, parts), strict=True)]
        if len({part.reference for part in parts}) == 1:
            scales = tuple(map(float, self._judge(first.model, rows, gram)))
        else:  # some do not keep snapshots, and so have made other updates before this one
            scales = (0.0,) * _count(first)
            self._job.out.log(f"Update {first.version} is left out: shards have compared it with other references.")
        judged = tuple((row.worker, row.clock, scale) for row, scale in zip(rows, scales, strict=False))
        has_reference = len(scales) > len(rows)
        reference, is_finite = scales[-1] if has_reference else 0.0, not has_reference or math.isfinite(gram[-1])
        self._job.out.record(UpdateJudged(first.model, first.version, judged, reference))
        self._job.out.decide(ScaleContributions(first.model, first.version, judged, reference, is_finite))


def _check(message: UpdateMeasured) -> None:
    """See that it is a Gram matrix of what it says.

    Raises:
        PeerError: if it is not.
    """
    count = _count(message)
    if len(message.gram) != 8 * count**2 or count - len(message.rows) not in (0, 1):
        raise PeerError(f"Cannot judge {len(message.rows)} contributions by {len(message.gram)} bytes.")
    gram = _values(message)
    squares = gram[:: count + 1]
    if not all(square > -math.inf for square in squares) or not all(
        math.isfinite(value) for place, value in enumerate(gram) if place % (count + 1)
    ):
        raise PeerError("Cannot judge by a Gram matrix that is not finite beside its diagonal.")


def _count(message: UpdateMeasured) -> int:
    """Count the rows of its Gram matrix."""
    return math.isqrt(len(message.gram) // 8)


def _values(message: UpdateMeasured) -> tuple[float, ...]:
    return struct.unpack(f"<{len(message.gram) // 8}d", message.gram)


def _sum(values: Sequence[float]) -> float:
    """Sum exactly and round once; infinite if it does not fit."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
