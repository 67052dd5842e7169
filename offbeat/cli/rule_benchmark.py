"""The measurements of `offbeat bench rule`: what a robust rule takes at a shard, beside the mean.

A shard's own work on one update is timed, block after block: the contributions are there, as they came from workers.
Of a rule that compares whole contributions that is the Gram matrix of each block, the judgement, and the sum by scales.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from offbeat.protocol.training import DensePayload
from offbeat.robust import (
    FABA,
    Bulyan,
    CentredClipping,
    ClippedMean,
    FLTrust,
    GeometricMedian,
    Krum,
    MeaMed,
    Mean,
    Median,
    MultiKrum,
    Phocas,
    TrimmedMean,
    Zeno,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)
from offbeat.server.aggregator import BlockContribution, WeightedMean
from offbeat.server.pushed_block import PushedBlock
from offbeat.server.robust_aggregator import RobustAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.robust import Rule

_BLOCK_BYTES = 1 << 20  # as of `ParameterServer`


def rules(workers: int) -> list[Rule | None]:
    """All rules that a server has, each told of as many liars as it bears; the first is the mean without a rule."""
    rank_based: list[Rule] = [
        TrimmedMean((workers - 1) // 2),
        Phocas((workers - 1) // 2),
        MeaMed((workers - 1) // 2),
        FABA((workers - 1) // 2),
    ]
    compared: list[Rule] = [
        Krum(max(0, (workers - 3) // 2)),
        MultiKrum(max(0, (workers - 3) // 2)),
        Bulyan(max(0, (workers - 3) // 4)),
    ]
    others: list[Rule] = [Mean(), Median(), GeometricMedian(), CentredClipping(), ClippedMean()]
    beside: list[Rule] = [FLTrust(), ZenoPlusPlus(), ZenoPS(), ZenoPSAsync(), Zeno((workers - 1) // 2)]
    return [None, *others, *rank_based, *compared, *beside]


@dataclass
class RuleFigure:
    """The measurement of one rule.

    Args:
        rule: as it is written in a plan; "" for the mean without one.
        values: GB of contributions that are combined in a second, one per turn.
    """

    rule: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of all turns."""
        return statistics.median(self.values)


def measure_rules(
    found: Sequence[Rule | None],
    *,
    workers: int,
    size_bytes: int,
    seconds: float,
    repeats: int,
    tell: Callable[[str], None],
) -> list[RuleFigure]:
    """Measure each rule by turns.

    Args:
        found: the rules; None for the mean without one.
        workers: how many contributions are combined.
        size_bytes: of each, float32.
        seconds: that each turn takes; one update at least.
        repeats: turns of each.
        tell: what is measured now.
    """
    generator = torch.Generator().manual_seed(0)
    count, numel = max(1, round(size_bytes / _BLOCK_BYTES)), _BLOCK_BYTES // 4
    direction = [torch.randn(numel, generator=generator) for _ in range(count)]
    blocks = [
        [part + torch.randn(numel, generator=generator) for _ in range(workers + 1)]  # the last one is the reference
        for part in direction
    ]
    benches = [_RuleBench(rule, blocks) for rule in found]
    for repeat in range(repeats + 1):
        for bench in benches:
            name = bench.figure.rule or "the mean"
            tell(f"{name}, turn {repeat} of {repeats}" if repeat else f"{name}, to warm up")
            rate = bench.turn(seconds if repeat else 0.0)
            if repeat:
                bench.figure.values.append(rate)
    return [bench.figure for bench in benches]


class _RuleBench:
    """One rule's updates of all blocks."""

    def __init__(self, rule: Rule | None, blocks: Sequence[Sequence[torch.Tensor]]) -> None:
        self._rule = rule
        self._mean = WeightedMean()
        self._robust = None if rule is None else RobustAggregator(rule, lambda text: None)
        workers = len(blocks[0]) - 1
        self._size_bytes = workers * sum(4 * len(parts[0]) for parts in blocks)
        self._blocks = [
            [
                BlockContribution(worker, 1.0, PushedBlock(DensePayload(), part), is_reference=worker == workers)
                for worker, part in enumerate(parts)
            ]
            for parts in blocks
        ]
        self.figure = RuleFigure("" if rule is None else repr(rule))

    def turn(self, seconds: float) -> float:
        """Make updates for so long, or one; GB of contributions a second."""
        began_s, updates = time.perf_counter(), 0
        while not updates or time.perf_counter() - began_s < seconds:
            self._update()
            updates += 1
        return updates * self._size_bytes / (time.perf_counter() - began_s) / 1e9

    def _update(self) -> None:
        if self._robust is None or self._rule is None:
            for *parts, _ in self._blocks:
                self._mean.combine(parts, torch.float32)
            return
        needs = self._rule.needs_reference
        pairs = [(parts, reference if needs else None) for *parts, reference in self._blocks]
        scales: list[float] = []
        if self._rule.judges_model:
            gram = sum(self._robust.measure(parts, torch.float32, one) for parts, one in pairs)
            assert isinstance(gram, torch.Tensor)
            workers = [one.worker for one in pairs[0][0]]
            losses = [1.0, *(1 / (2 + worker) for worker in workers)]  # a validator's, if the rule goes by any
            scales = self._robust.judge.scales(gram, workers, [1.0] * len(workers), losses).tolist()
        for parts, reference in pairs:
            judged = [replace(one, scale=scale) for one, scale in zip(parts, scales, strict=False)] or parts
            last = replace(reference, scale=scales[-1]) if reference is not None and scales else reference
            self._robust.combine(judged, torch.float32, last)
