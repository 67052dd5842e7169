"""What do attacks do to rules in real jobs? `python -m benchmarks.byzantine_jobs [FOLDER WITH MNIST]`.

The data, the model and the cells are those of benchmarks/byzantine_table.py; here each cell is a job. Seven workers,
two of which lie, train through a parameter server, each in a process of its own; a validator beside them has the
trusted samples. Liars know their own updates alone (`offbeat.testing.attacker`). The history of each job is verified.

Where nobody waits for the others (`ASP`) workers and the validator keep pace: between two of the validator's steps an
honest worker makes one. A liar that repeats its gradient computes nothing, and pushes ten times as often.

The result is benchmarks/results/byzantine_jobs.json, written after each job; what is in there is not run again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from benchmarks.byzantine_table import DATA, LABELS, Bench, Cell, Table
from offbeat.attack_spec import AttackSpec
from offbeat.audit import verify
from offbeat.cli import shard_main
from offbeat.lab import hardware
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
    Rule,
    TrimmedMean,
    Zeno,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)
from offbeat.server.launch import ShardSettings
from offbeat.testing.attacker import Attacker, assert_forged

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

RESULT = Path(__file__).parent / "results/byzantine_jobs.json"
COMMAND = "python -m benchmarks.byzantine_jobs"
WORKERS, LIARS, BATCH, STEPS, LR, SEED = 7, (5, 6), 32, 150, 0.2, 1
REPEATS = 10  # contributions of a liar that repeats itself, for each of an honest worker
REPEAT = "repeat"
_TOKEN, _SECRET = "t" * 32, "v" * 32
_PATIENCE_S = 300.0
_AT_ONCE = 4

LIES: dict[str, dict[str, Any] | None] = {
    "none": None,
    REPEAT: {"kind": "repeat"},
    "IPM 0.5": {"kind": "ipm", "epsilon": 0.5},
    "ALIE": {"kind": "alie"},
    LABELS: {"kind": "label-flip"},
    "sign x 6": {"kind": "sign", "scale": 6.0},
    "gaussian": {"kind": "gaussian"},
}
"""By name, the lie of two workers; ALIE's deviations are as many as hide among seven."""
_RULES: tuple[Rule, ...] = (
    Mean(),
    ClippedMean(),
    Median(),
    TrimmedMean(2),
    Phocas(2),
    MeaMed(2),
    Krum(2),
    MultiKrum(2),
    Bulyan(1),
    GeometricMedian(),
    FABA(2),
    CentredClipping(),
)
_SERVED = offbeat.ParameterServer(patience_s=_PATIENCE_S)
PLANS: dict[str, offbeat.Plan] = {
    **{repr(rule): offbeat.Plan(fabric=_SERVED, rule=rule) for rule in _RULES},
    **{repr(rule): offbeat.Plan(fabric=_SERVED, validator=rule) for rule in (FLTrust(), ZenoPS(), Zeno(2))},
    "mean, one by one": offbeat.Plan(sync=offbeat.ASP(), fabric=_SERVED),
    **{
        f"{rule!r}, one by one": offbeat.Plan(sync=offbeat.ASP(), fabric=_SERVED, validator=rule)
        for rule in (FLTrust(), ZenoPlusPlus(), ZenoPSAsync(alpha=1.0))
    },
}


class Pace:
    """How far each process is, for all of one job.

    Args:
        honest: ranks of those that wait for each other.
    """

    def __init__(self, context: multiprocessing.context.ForkContext, honest: tuple[int, ...]) -> None:
        self._honest, self._made, self._changed = honest, context.Array("l", WORKERS + 1), context.Condition()

    def wait(self, rank: int, step: int, each: int) -> None:
        """Wait until a process that makes `each` steps in a round may make this one."""
        with self._changed:
            self._made[rank] = step
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: step < each * (1 + min(self._made[one] for one in self._honest)), _PATIENCE_S
            )

    def end(self, rank: int) -> None:
        """Have nobody wait for a process that is done."""
        with self._changed:
            self._made[rank] = 1 << 30
            self._changed.notify_all()


@dataclass(frozen=True)
class Job:
    """One job.

    Args:
        bench: data and model, which processes share with the one that they are forked from.
        plan: of all.
        lie: of two workers; None for none.
        folder: for what is written.
    """

    bench: Bench
    plan: offbeat.Plan
    lie: dict[str, Any] | None
    folder: Path

    @property
    def attacks(self) -> list[AttackSpec]:
        """The attacks of the liars."""
        return [] if self.lie is None else [msgspec.convert({"workers": list(LIARS), **self.lie}, AttackSpec)]

    def run(self) -> tuple[float, tuple[float, float] | None]:
        """Train; returns the accuracy, and the part of honest and of liars' contributions that counted."""
        context = multiprocessing.get_context("fork")
        world = WORKERS + (self.plan.validator is not None)
        liars = LIARS if self.lie is not None else ()
        pace = None
        if self.plan.sync == offbeat.ASP():
            pace = Pace(context, tuple(rank for rank in range(world) if rank not in liars))
        ends = [context.Pipe(duplex=False) for _ in range(world + 1)]
        server = context.Process(target=self._serve, args=(ends[-1][1],))
        server.start()
        address = ends[-1][0].recv()
        workers = [
            context.Process(target=self._train, args=(rank, address, pace, ends[rank][1])) for rank in range(world)
        ]
        try:
            for worker in workers:
                worker.start()
            for end in (end for pair in ends[:-1] for end in pair[1:]):
                end.close()
            accuracies = [ends[rank][0].recv() for rank in range(WORKERS)]
            for process in (*workers, server):
                process.join(_PATIENCE_S)
        finally:
            for process in (*workers, server):
                process.kill()
        if self.attacks:
            assert_forged(self.attacks, self.folder / "lies")
        return accuracies[0], self._accepted()

    def _accepted(self) -> tuple[float, float] | None:
        found = verify(self.folder / "history")
        assert found.holds, found.violations[0]
        if not found.judged:
            return None
        parts: dict[bool, list[float]] = {False: [], True: []}
        for rank, one in found.by_rank.items():
            parts[bool(self.lie) and rank in LIARS].append(1 - one.rejected / one.judged)
        return statistics.fmean(parts[False]), statistics.fmean(parts[True] or [0.0])

    def _serve(self, end: Connection) -> None:
        settings = ShardSettings(
            job="j", token=_TOKEN, validator_token=_SECRET, timeout_s=60, history=str(self.folder / "history")
        )
        asyncio.run(shard_main.serve(settings, end.send))

    def _train(self, rank: int, address: str, pace: Pace | None, end: Connection) -> None:
        validates = rank >= WORKERS
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE="1" if validates else str(WORKERS),
            LOCAL_WORLD_SIZE="1",
            GLOO_SOCKET_IFNAME="lo",
            OFFBEAT_SERVERS=address,
            OFFBEAT_JOB="j",
            OFFBEAT_TOKEN=_TOKEN,
        )
        if validates:
            os.environ.update(OFFBEAT_JOINS=str(WORKERS), OFFBEAT_ROLE="validator", OFFBEAT_VALIDATOR_TOKEN=_SECRET)
        else:
            os.environ["OFFBEAT_STORE"] = str(self.folder / "store")
        attacker = Attacker(self.attacks, self.folder / "lies", rank, WORKERS)
        try:
            end.send(self._accuracy(rank, pace))
        finally:
            attacker.close()
            if pace is not None:
                pace.end(rank)

    def _accuracy(self, rank: int, pace: Pace | None) -> float:
        """Train as one process of the job; returns the accuracy of its model in the end."""
        floods = rank in LIARS and self.lie == LIES[REPEAT] and pace is not None
        each = REPEATS if floods else 1
        generator = torch.Generator().manual_seed(1000 * SEED + rank)
        net, bench = self.bench.model, self.bench
        with offbeat.init(self.plan, seed=SEED, timeout=timedelta(seconds=60), history=self.folder / "history") as run:
            images, labels = bench.trusted if run.is_validator else (bench.images[rank], bench.labels[rank])
            model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=LR))
            step = 0
            while run.is_validator or step < each * STEPS:
                if pace is not None:
                    pace.wait(rank, step, each)
                drawn = torch.randint(len(labels), (BATCH,), generator=generator)
                x, y = images[drawn], labels[drawn]
                if run.is_validator and self.plan.validator is not None and self.plan.validator.needs_losses:
                    run.score_by(functools.partial(_loss, model, x, y))
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            run.settle()
        return _accuracy_of(net, bench)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _accuracy_of(net: nn.Module, bench: Bench) -> float:
    with torch.no_grad():
        return float((net(bench.test.flatten(1)).argmax(1) == bench.answers).float().mean())


def server_only(bench: Bench) -> float:
    """The accuracy of a model that has seen the trusted samples alone."""
    flat = bench.parameters()
    for _ in range(STEPS):
        flat += bench.reference(flat, LR)
    return bench.accuracy(flat)


def measure(data: str, tell: Callable[[str], None]) -> None:
    """Run the jobs that are not in the result yet, a few at once: nothing depends on how long they take.

    Args:
        data: folder with MNIST.
    """
    bench = Bench(SEED, WORKERS, data)
    cells = {(cell.rule, cell.threat): cell for cell in read().cells} if RESULT.exists() else {}
    missing = [(data, rule, threat) for threat in LIES for rule in PLANS if (rule, threat) not in cells]
    began_s = time.monotonic()
    with ProcessPoolExecutor(_AT_ONCE, multiprocessing.get_context("fork")) as pool:
        for cell in pool.map(_cell, *zip(*missing, strict=True)) if missing else ():
            cells[cell.rule, cell.threat] = cell
            place = f"{cell.threat:10} {cell.rule:40.40}"
            tell(f"{time.monotonic() - began_s:6.0f} s  {place} {cell.mean:.3f}  {cell.accepted or ''}")
            _write(bench, [cells[rule, threat] for threat in LIES for rule in PLANS if (rule, threat) in cells])


def _cell(data: str, rule: str, threat: str) -> Cell:
    bench, lie = Bench(SEED, WORKERS, data), LIES[threat]
    with tempfile.TemporaryDirectory(prefix="offbeat-jobs-") as folder:
        accuracy, accepted = Job(bench, PLANS[rule], lie, Path(folder)).run()
    return Cell(rule=rule, threat=threat, liars=len(LIARS) if lie else 0, accuracy=[accuracy], accepted=accepted)


def _write(bench: Bench, cells: list[Cell]) -> None:
    found = Table(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        settings={
            "workers": WORKERS,
            "liars": list(LIARS),
            "trusted": len(bench.trusted[1]),
            "batch": BATCH,
            "steps": STEPS,
            "lr": LR,
            "repeats": REPEATS,
            "seed": SEED,
        },
        note=bench.note,
        server_only=[server_only(bench)],
        cells=cells,
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read() -> Table:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Table)


def main() -> None:
    torch.set_num_threads(1)  # processes are forked from this one, which may have no threads
    logging.getLogger("offbeat").setLevel(logging.ERROR)
    data: str = sys.argv[1] if len(sys.argv) > 1 else DATA
    measure(data, lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201


if __name__ == "__main__":
    main()
