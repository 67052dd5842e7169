"""What is the order of gradients worth, on the model alone? `python -m benchmarks.schedules`, some seconds.

Schedules of ResNet-50's gradients played on the timeline that schedulers plan from (`offbeat.scheduling.timeline`): a
serial link, nothing measured. Gradients are complete in the bursts that the program released with Prophet (Zhang et
al., ICPP 2021) has in a table: its borders, which are of 157 tensors, scaled to the 161 there are here, and its pauses,
of a batch of 64. Forward takes half as long as backward, each gradient's layer the same share of it. The link carries
half its line rate in gradients, as a push and a pull, or a ring of many, leave of it. An exchange takes a latency
beyond its bytes, which is hidden while others have the link; with a gap it also has the link for that time at least,
however small it is. The result is benchmarks/results/schedules.json; benchmarks/page.py shows it. It is the same on
every machine.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec

from offbeat.lab import hardware
from offbeat.model_profiles import profile as profile_of
from offbeat.scheduling import (
    FIFO,
    BackwardProfile,
    Credit,
    GradientTimes,
    MergedGradient,
    Priority,
    Prophet,
    ReduceScatterGather,
    Scheduler,
    lower_bound_s,
    play,
)

RESULT = Path(__file__).parent / "results/schedules.json"
COMMAND = "python -m benchmarks.schedules"
LATENCIES_MS = (0.1, 0.5, 2.0)
RATES_GBPS = (2, 5, 10)
_BORDERS = (-1, 9, 22, 35, 50, 62, 77, 90, 103, 117, 130, 143, 156)
"""Of the release: the last gradient of each burst, in order of the forward pass."""
_PAUSES_MS = (16, 15, 9, 10, 12, 18, 15, 21, 30, 25, 20, 5)
"""Of the release: behind each burst, in the order in which they are complete; backward ends behind the last one."""
_SIZES = tuple(1 << power for power in range(16, 25))
_CREDITS = tuple(1 << power for power in range(16, 28))
BOUND = "lower bound"
COLUMNS = {
    "DDP, each gradient": "each gradient by itself, as it is complete; the forward pass waits for all",
    "DDP, 25 MiB": "buckets of 25 MiB as they are complete; the forward pass waits for all",
    "FIFO, each gradient": "`FIFO(1)`: each gradient by itself, as it is complete",
    "FIFO": "`FIFO()`: buckets of 1 MiB as they are complete",
    "MergedGradient": "`MergedGradient()`",
    "Priority": "`Priority()`: slices of 200 kB",
    "Priority, best": "`Priority` with the best of slices of 64 KiB to 16 MiB, for each cell",
    "Credit": "`Credit()`: slices of 4 MB, 16 MB under way",
    "Credit, best": "`Credit` with the best of slices of 64 KiB to 16 MiB and of 64 KiB to 128 MiB under way, for each "
    "cell",
    "ReduceScatterGather": "`ReduceScatterGather()`, whose two rounds have a latency each",
    "Prophet": "`Prophet()`",
    BOUND: "what no schedule can be faster than",
}
"""The columns of the table, and what each is."""


class ScheduleCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One link.

    Args:
        latency_ms: of an exchange, beyond its bytes.
        gap_ms: that it has the link at least.
        rate_gbps: its line rate; gradients have half of that.
        step_ms: from the beginning of backward to the end of the next forward pass, by column.
    """

    latency_ms: float
    gap_ms: float
    rate_gbps: float
    step_ms: dict[str, float]

    def ratio(self, column: str, against: str = BOUND) -> float:
        """The time of a step as a multiple of another's."""
        return self.step_ms[column] / self.step_ms[against]


class Schedules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        backward_ms, forward_ms: what a step computes.
        size_mb: of all gradients.
    """

    command: str
    versions: dict[str, str]
    backward_ms: float
    forward_ms: float
    size_mb: float
    cells: list[ScheduleCell]


def links() -> list[tuple[float, float, float]]:
    """The latency, gap and rate of each link."""
    return [
        (latency, latency if has_gap else 0.0, rate)
        for has_gap in (False, True)
        for latency in LATENCIES_MS
        for rate in RATES_GBPS
    ]


def link(latency_ms: float, gap_ms: float, rate_gbps: float) -> BackwardProfile:
    """ResNet-50's gradients on such a link."""
    shapes = [(layer.name, shape) for layer in profile_of("resnet50") for shape in layer.shapes]
    count = len(shapes)
    borders = [round((border + 1) * count / (_BORDERS[-1] + 1)) for border in _BORDERS]
    ready_s = [0.0] * count
    *at_s, backward_s = (0.0, *itertools.accumulate(pause / 1000 for pause in _PAUSES_MS))
    for burst_s, (first, end) in zip(at_s, reversed(list(itertools.pairwise(borders))), strict=True):
        ready_s[first:end] = [burst_s] * (end - first)
    return BackwardProfile(
        tuple(
            GradientTimes(f"{name}.{i}", math.prod(shape), 4, "float32", ready_s[i], backward_s / 2 / count)
            for i, (name, shape) in enumerate(shapes)
        ),
        backward_s,
        latency_ms / 1000,
        rate_gbps * 1e9 / 8 / 2,
        gap_ms / 1000,
    )


def hidden_s(profile: BackwardProfile, scheduler: Scheduler) -> float:
    """The time of a step whose exchange is hidden behind the next forward pass, too."""
    return play(profile, scheduler.schedule(profile)).step_s


def waited_s(profile: BackwardProfile, scheduler: Scheduler) -> float:
    """The time of a step whose forward pass begins when all is done."""
    return max(profile.backward_s, play(profile, scheduler.schedule(profile)).done[-1]) + profile.forward_s


def simulate(latency_ms: float, gap_ms: float, rate_gbps: float) -> ScheduleCell:
    """Play all schedules on one link."""
    profile = link(latency_ms, gap_ms, rate_gbps)
    pairs = [(size, credit) for size in _SIZES for credit in _CREDITS if size <= credit]
    found_s = {
        "DDP, each gradient": waited_s(profile, FIFO(1)),
        "DDP, 25 MiB": waited_s(profile, FIFO(25 << 20)),
        "FIFO, each gradient": hidden_s(profile, FIFO(1)),
        "FIFO": hidden_s(profile, FIFO()),
        "MergedGradient": hidden_s(profile, MergedGradient()),
        "Priority": hidden_s(profile, Priority()),
        "Priority, best": min(hidden_s(profile, Priority(size)) for size in _SIZES),
        "Credit": hidden_s(profile, Credit()),
        "Credit, best": min(hidden_s(profile, Credit(size, credit)) for size, credit in pairs),
        "ReduceScatterGather": hidden_s(profile, ReduceScatterGather()),
        "Prophet": hidden_s(profile, Prophet()),
        BOUND: lower_bound_s(profile),
    }
    return ScheduleCell(
        latency_ms=latency_ms,
        gap_ms=gap_ms,
        rate_gbps=rate_gbps,
        step_ms={name: round(1000 * s, 2) for name, s in found_s.items()},
    )


def run() -> Schedules:
    """All links."""
    profile = link(*links()[0])
    return Schedules(
        command=COMMAND,
        versions=hardware.versions(),
        backward_ms=round(1000 * profile.backward_s, 2),
        forward_ms=round(1000 * profile.forward_s, 2),
        size_mb=round(profile.size_bytes / 1e6, 2),
        cells=[simulate(*one) for one in links()],
    )


def read(path: Path = RESULT) -> Schedules:
    """What was simulated."""
    return msgspec.json.decode(path.read_bytes(), type=Schedules)


def rows(found: Schedules) -> list[list[str]]:
    """A line for each link."""
    return [[_name(cell), *(f"{cell.step_ms[column]:.0f}" for column in COLUMNS)] for cell in found.cells]


def _name(cell: ScheduleCell) -> str:
    gap = f"{cell.latency_ms:g} ms" + (" and gap" if cell.gap_ms else "")
    return f"{gap}, {cell.rate_gbps:g} Gbit/s"


def claims(found: Schedules) -> list[tuple[str, str, bool]]:
    """Say what was claimed before, what came of it, and whether it was met."""
    told = []
    for words, value, most in (
        ("`Prophet()` is within 3 % of the lower bound everywhere", [c.ratio("Prophet") for c in found.cells], 1.03),
        ("and never behind `Credit()`, which is not tuned", [c.ratio("Prophet", "Credit") for c in found.cells], 1.0),
        (
            "and never more than 1 % behind first in, first out, hidden likewise, of either size",
            [c.ratio("Prophet", column) for c in found.cells for column in ("FIFO", "FIFO, each gradient")],
            1.01,
        ),
    ):
        told.append((words, f"{max(value):.4f} x at most", max(value) <= most))
    return told


if __name__ == "__main__":
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
