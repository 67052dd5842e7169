"""What becomes of what is not sent? `python -m benchmarks.reset_toy`, some twenty minutes.

Eight workers train a small student (`workloads/teacher.py`), each plan with an equal part of the bytes of synchronous
SGD, and with the same learning rate: error feedback in each step, error feedback of eight steps' change
(QSparse-local-SGD; Basu et al., NeurIPS 2019), and error reset in three variants. What counts is the loss of the mean
of all replicas in the end. The claim is that of Xie et al. (CSER, NeurIPS 2020): where little is sent, error feedback
lags or diverges, and error reset does not.

The result is benchmarks/results/reset_toy.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.codec import GRBS, ErrorFeedback, ErrorReset
from offbeat.lab import hardware
from offbeat.plan import Plan
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/reset_toy.json"
COMMAND = "python -m benchmarks.reset_toy"
WORKERS, STEPS, LR, BLOCK = 8, 1500, 0.1, 4
SEEDS = (0, 1)
EF, QSPARSE, EXPLICIT, BLOCKS, PARTIAL = (
    "error feedback",
    "QSparse",
    "error reset, explicit",
    "error reset, blocks",
    "partial local SGD",
)
METHODS = (EF, QSPARSE, EXPLICIT, BLOCKS, PARTIAL)


def _reset(r1: int, r2: int, every: int, variant: str) -> Plan:
    codec = ErrorReset(GRBS(r1, BLOCK), step=GRBS(r2, BLOCK), every=every, variant=variant)  # type: ignore[arg-type]
    return Plan(codec=codec)


PLANS: dict[int, dict[str, Plan]] = {
    ratio: {
        EF: Plan(codec=ErrorFeedback(GRBS(ratio, BLOCK))),
        QSPARSE: Plan(sync=LocalSGD(h), codec=ErrorFeedback(GRBS(r, BLOCK))),
        EXPLICIT: _reset(r1, r2, every, "explicit"),
        BLOCKS: _reset(r1, r2, every, "block_average"),
        PARTIAL: Plan(sync=LocalSGD(steps), codec=ErrorReset(GRBS(r1_alone, BLOCK))),
    }
    for ratio, (r, h), (r2, r1, every), (r1_alone, steps) in (
        (8, (2, 4), (16, 2, 8), (4, 2)),
        (32, (4, 8), (64, 4, 16), (8, 4)),
        (256, (32, 8), (512, 16, 32), (16, 16)),
    )
}
"""By how many times fewer bytes than synchronous SGD, and by method; the settings of the paper's authors."""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan's losses, of each seed; NaN is written as null."""

    ratio: int
    method: str
    plan: str
    losses: list[float | None]
    accuracies: list[float]
    fewer_bytes: float

    @property
    def loss(self) -> float:
        """The mean loss; infinite, if one is none."""
        return statistics.fmean(math.inf if one is None else one for one in self.losses)


class ResetToy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    workers: int
    steps: int
    lr: float
    seeds: list[int]
    whole: Run
    runs: list[Run]

    def loss(self, ratio: int, method: str) -> float:
        """The loss of one cell."""
        return next(run.loss for run in self.runs if (run.ratio, run.method) == (ratio, method))


def train(plan: Plan, seed: int, steps: int = STEPS, workers: int = WORKERS) -> dict[str, float]:
    """Train once; what the first worker says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(plan.to_toml())
        done = subprocess.run(
            [
                *(sys.executable, "-m", "offbeat", "run", "-n", str(workers), "--plan", str(path), "--run-dir", folder),
                *(str(ROOT / "benchmarks/workloads/teacher.py"), "--steps", str(steps)),
                *("--lr", str(LR), "--seed", str(seed)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{plan!r}: {done.stderr[-2000:]}")
    line = next(line for line in done.stdout.splitlines()[::-1] if '"loss"' in line)
    said: dict[str, float] = json.loads(line[line.index("{") :])
    return said


def measure(tell: Callable[[str], None], seeds: tuple[int, ...] = SEEDS, steps: int = STEPS) -> ResetToy:
    """Play all of them."""

    def run(ratio: int, method: str, plan: Plan, whole_bytes: float) -> Run:
        said = [train(plan, seed, steps) for seed in seeds]
        sent = statistics.fmean(one["sent_bytes"] for one in said)
        made = Run(
            ratio=ratio,
            method=method,
            plan=repr(plan),
            losses=[one["loss"] if math.isfinite(one["loss"]) else None for one in said],
            accuracies=[one["accuracy"] for one in said],
            fewer_bytes=whole_bytes / sent if whole_bytes else sent,
        )
        tell(f"{ratio:4} x  {method:22} loss {made.loss:.3f}, {made.fewer_bytes:.4g} x fewer bytes")
        return made

    first = run(1, "synchronous SGD", Plan(), 0.0)
    runs = [run(ratio, method, PLANS[ratio][method], first.fewer_bytes) for ratio in PLANS for method in METHODS]
    return ResetToy(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        workers=WORKERS,
        steps=steps,
        lr=LR,
        seeds=list(seeds),
        whole=msgspec.structs.replace(first, fewer_bytes=1.0),
        runs=runs,
    )


def read() -> ResetToy:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=ResetToy)


def claims(found: ResetToy) -> list[tuple[str, float, bool]]:
    """The claims: in words, the figure, and whether it holds."""
    resets = (EXPLICIT, BLOCKS, PARTIAL)
    said = []
    for ratio in (32, 256):
        worst = max(found.loss(ratio, method) for method in resets)
        said.append((f"{ratio} x: the worst error reset against QSparse", worst / found.loss(ratio, QSPARSE)))
        said.append((f"{ratio} x: QSparse against error feedback", found.loss(ratio, QSPARSE) / found.loss(ratio, EF)))
    return [(words, value, value < 1) for words, value in said]


def main() -> None:
    found = measure(lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
