"""The cost of a swap of the policy: how long some worker had to wait, and whether the loss leapt.

A swap lasts from when it was proposed until the last worker has taken it up. See `SwapCost` for what is measured.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.lab.recorder import MeasuredStep
from offbeat.lab.results import SwapCost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.lab.recorder import Line

AROUND = 10
"""Steps of each worker over which the loss is averaged, before a swap and behind it."""
_NAMED = re.compile(r"(?:From step \d+ on )?(?P<policy>.+?) decides when workers may go on")
_TOOK = re.compile(r"(?:agreed upon within|it took) (?P<ms>[\d.]+) ms")


@dataclass(frozen=True)
class TimedSwap:
    """Another policy came to decide: the first worker took it up at `begin_s`, the last at `end_s`.

    Seconds since 1970. `agreed_s` is how long it took from the proposal until all had agreed, as the job said.
    """

    policy: str
    begin_s: float
    end_s: float
    agreed_s: float


def swaps(said: Sequence[Sequence[tuple[float, str]]]) -> list[TimedSwap]:
    """The swaps of a job, in order.

    Args:
        said: when rank 0, 1, ... told of each, and what.
    """
    told = [[(time_s, text) for time_s, text in own if _NAMED.match(text)] for own in said]
    return [
        _swapped(time_s, text, [own[index][0] for own in told if index < len(own)])
        for index, (time_s, text) in enumerate(told[0] if told else [])
    ]


def _swapped(time_s: float, text: str, times_s: Sequence[float]) -> TimedSwap:
    named, took = _NAMED.match(text), _TOOK.search(text)
    assert named is not None
    return TimedSwap(
        policy=named["policy"],
        begin_s=min(time_s, *times_s),
        end_s=max(time_s, *times_s),
        agreed_s=0.0 if took is None else float(took["ms"]) / 1e3,
    )


def handovers(row: str, repeat: int, swapped: Sequence[TimedSwap], lines: Sequence[Sequence[Line]]) -> list[SwapCost]:
    """One for each swap within the measured steps, in order.

    Args:
        lines: what the recorders of rank 0, 1, ... wrote.
    """
    ahead_s = time.time() - time.perf_counter()  # of the clock of the recorders
    workers = [steps for own in lines if (steps := [line for line in own if isinstance(line, MeasuredStep)])]
    if not workers:
        return []
    begin_s = max(steps[0].end_s - steps[0].step_s for steps in workers)
    split = [list(_stretches(steps, swapped, ahead_s)) for steps in workers]
    made = []
    for index, one in enumerate(swapped):
        around = [(own[2 * index], own[2 * index + 1], own[2 * index + 2]) for own in split]
        if not all(before and during and after for before, during, after in around):
            continue
        longer_s = (max(_took(during)) - max(map(_usual_s, (before, after))) for before, during, after in around)
        made.append(
            SwapCost(
                row=row,
                repeat=repeat,
                policy=one.policy,
                time_s=round(max(0.0, one.begin_s - ahead_s - begin_s), 3),
                agreed_s=round(one.agreed_s, 4),
                longer_s=round(max(0.0, *longer_s), 4),
                loss_before=_loss([step for before, _, _ in around for step in before[-AROUND:]]),
                loss_after=_loss([step for _, _, after in around for step in after[:AROUND]]),
            )
        )
    return made


def _stretches(
    steps: Sequence[MeasuredStep], swapped: Sequence[TimedSwap], ahead_s: float
) -> Iterator[list[MeasuredStep]]:
    """A worker's steps by turns: between two swaps, and within one, to which the step behind it belongs as well."""
    rest = list(steps)
    for one in swapped:
        first_s, last_s = one.begin_s - one.agreed_s - ahead_s, one.end_s - ahead_s
        begin = next((index for index, step in enumerate(rest) if step.end_s > first_s), len(rest))
        end = next((index + 2 for index, step in enumerate(rest) if step.end_s > last_s), len(rest))
        yield rest[:begin]
        yield rest[begin:end]
        rest = rest[end:]
    yield rest


def _took(steps: Sequence[MeasuredStep]) -> list[float]:
    return [step.step_s for step in steps]


def _usual_s(steps: Sequence[MeasuredStep]) -> float:
    return statistics.median(_took(steps))


def _loss(steps: Sequence[MeasuredStep]) -> float | None:
    losses = [step.loss for step in steps if step.loss is not None]
    return round(statistics.fmean(losses), 4) if losses else None


def course(lines: Sequence[Sequence[Line]]) -> list[float]:
    """The loss of each measured step, mean over the workers that took it; empty if nobody measured it."""
    by_step: dict[int, list[float]] = {}
    for own in lines:
        for line in own:
            if isinstance(line, MeasuredStep) and line.loss is not None:
                by_step.setdefault(line.step, []).append(line.loss)
    return [round(statistics.fmean(by_step[step]), 4) for step in sorted(by_step)]
