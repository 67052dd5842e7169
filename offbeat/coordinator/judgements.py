"""The judgement of updates by a robust rule that compares whole contributions.

Each shard that holds blocks measures an update once all its contributions are there, and waits. Gram matrices of parts
of vectors add up: when all shards have measured it, the rule decides by what each contribution is multiplied, and the
shards make the update. Sums are rounded once, so that they do not depend on which shard came first. A rule that goes by
losses decides once a validator has found these out (see `loss_questions`).

A contribution that is rejected moves nothing. To its worker it looks like any other: who lies is not told of it.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from offbeat.coordinator.loss_questions import LossQuestion, LossQuestions
from offbeat.errors import PeerError
from offbeat.history import UpdateJudged
from offbeat.protocol.shards import ScaleContributions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.coordinator.job_record import JobRecord
    from offbeat.protocol.loss_scores import ContributionsScored
    from offbeat.protocol.shards import MeasuredContribution, UpdateMeasured

    JudgeUpdate = Callable[[int, Sequence[MeasuredContribution], Sequence[float], Sequence[float]], Sequence[float]]

_MOST_WAITING = 1024  # updates of a model that some shards have measured, and others have not


class Judgements:
    """The updates of one job that wait to be judged.

    Args:
        judge: called with a model, the contributions that are compared, their Gram matrix row by row, with the
            reference last if there is one, and the losses, if the rule goes by any: without a contribution, and with
            each that is finite; returns the scale of each row. Raises PeerError if nothing is to be judged.

    Attributes:
        losses: that are being found out.
    """

    def __init__(self, job: JobRecord, judge: JudgeUpdate) -> None:
        self._job, self._judge = job, judge
        self.losses = LossQuestions(job)

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

    def scored(self, validator: int, message: ContributionsScored) -> None:
        """A validator has found out losses.

        Raises:
            PeerError: if nobody asked it to.
        """
        self._job.model(message.model, validator)
        self.losses.hear(validator, message)

    def _decide(self, parts: Sequence[UpdateMeasured]) -> None:
        """Judge an update that all shards have measured, or have a validator find out first what it takes for that."""
        first = parts[0]
        gram = [_sum(values) for values in zip(*map(_values, parts), strict=True)]
        if len({part.reference for part in parts}) > 1:
            # Some do not keep snapshots, and so have made other updates before this one.
            self._job.out.log(f"Update {first.version} is left out: shards have compared it with other references.")
            self._scale(first, gram, (0.0,) * _count(first))
            return
        squares = zip(first.rows, _diagonal(gram, _count(first)), strict=False)
        pushes = tuple((row.worker, row.clock) for row, square in squares if math.isfinite(square))
        if not self._job.needs_losses or not pushes:
            self._scale(first, gram, self._judge(first.model, first.rows, gram, ()))
            return

        def answered(losses: Sequence[float]) -> None:
            self._scale(first, gram, self._judge(first.model, first.rows, gram, losses), losses)

        self.losses.add(first.model, first.version, LossQuestion(pushes, first.change, first.rate, answered))

    def _scale(
        self, first: UpdateMeasured, gram: Sequence[float], judged: Sequence[float], losses: Sequence[float] = ()
    ) -> None:
        """Have all shards make an update by these scales."""
        scales, rows = tuple(map(float, judged)), first.rows
        by_push = tuple((row.worker, row.clock, scale) for row, scale in zip(rows, scales, strict=False))
        has_reference = len(scales) > len(rows)
        reference, is_finite = scales[-1] if has_reference else 0.0, not has_reference or math.isfinite(gram[-1])
        squares = tuple(_diagonal(gram, _count(first))) if losses else ()
        self._job.out.record(
            UpdateJudged(first.model, first.version, by_push, reference, squares=squares, losses=tuple(losses))
        )
        self._job.out.decide(ScaleContributions(first.model, first.version, by_push, reference, is_finite))


def _check(message: UpdateMeasured) -> None:
    """See that it is a Gram matrix of what it says.

    Raises:
        PeerError: if it is not.
    """
    count = _count(message)
    if len(message.gram) != 8 * count**2 or count - len(message.rows) not in (0, 1):
        raise PeerError(f"Cannot judge {len(message.rows)} contributions by {len(message.gram)} bytes.")
    gram = _values(message)
    if not all(square > -math.inf for square in _diagonal(gram, count)) or not all(
        math.isfinite(value) for place, value in enumerate(gram) if place % (count + 1)
    ):
        raise PeerError("Cannot judge by a Gram matrix that is not finite beside its diagonal.")


def _count(message: UpdateMeasured) -> int:
    """Count the rows of its Gram matrix."""
    return math.isqrt(len(message.gram) // 8)


def _diagonal(gram: Sequence[float], count: int) -> Sequence[float]:
    """The squares of the norms."""
    return gram[:: count + 1]


def _values(message: UpdateMeasured) -> tuple[float, ...]:
    return struct.unpack(f"<{len(message.gram) // 8}d", message.gram)


def _sum(values: Sequence[float]) -> float:
    """Sum exactly and round once; infinite if it does not fit."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
