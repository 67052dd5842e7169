"""What do attacks do to rules? `python -m benchmarks.byzantine_table`, some minutes.

Ten workers in one process train a perceptron (784 - 100 - 10) on MNIST, and some of them lie. All attacks meet all
rules: those that compare workers with each other, and those that hold them against a reference, the gradient of a few
trusted samples that no worker has. Of the asynchronous ones each update is judged by itself, on parameters that are up
to ten versions old, beside a reference that is renewed at every tenth. "server only" trains on the trusted samples
alone: a rule that is not better has no use for its workers.

Where six of ten lie, a rule is told of as many liars as its own check allows. The mean that a rule is held against is
of as many updates that are applied in the same way: all of a step at once, or one by one.

The result is benchmarks/results/byzantine_table.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from benchmarks.workloads import mnist
from offbeat.lab import hardware
from offbeat.robust import Mean, Median, MultiKrum, TrimmedMean, Zeno, ZenoPlusPlus, ZenoPS, ZenoPSAsync
from offbeat.testing.attacks import (
    Gaussian,
    InnerProduct,
    LittleIsEnough,
    RandomDirection,
    SignFlip,
    flipped_labels,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.testing.attacks import Attack

ROOT = Path(__file__).parent.parent
DATA = str(ROOT.parent / "shared/data")
RESULT = ROOT / "benchmarks/results/byzantine_table.json"
COMMAND = "python -m benchmarks.byzantine_table"
WORKERS, TRUSTED, BATCH, STEPS, LR = 10, 256, 32, 600, 0.1
# Of an asynchronous run: as many updates, their learning rate, that of ZenoPS' authors for eleven processes.
UPDATES, ASYNC_LR, STALENESS, LAZINESS = STEPS * WORKERS, LR * (1 / 11) ** 0.5, 10, 10
SEEDS = (1, 2, 3)
SERVER_ONLY = "server only"
LABELS = "labels"


@dataclass(frozen=True)
class Threat:
    """What some workers do.

    Args:
        name: for people.
        liars: how many.
        attack: of their updates; None if they lie about labels, or not at all.
    """

    name: str
    liars: int = 0
    attack: Attack | None = None


THREATS = (
    Threat("none"),
    Threat("sign x 6", 2, SignFlip()),
    Threat("gaussian", 2, Gaussian()),
    Threat("random x 8", 2, RandomDirection()),
    Threat(LABELS, 2),
    Threat("IPM 0.5", 2, InnerProduct()),
    Threat("ALIE 0.3", 2, LittleIsEnough(z=0.3)),
    Threat("sign x 6, six", 6, SignFlip()),
    Threat("labels, six", 6),
    Threat("IPM 0.5, six", 6, InnerProduct()),
)


RULES: dict[str, tuple[bool, Callable[[int], Any]]] = {
    "mean": (False, lambda f: Mean()),
    "trimmed mean": (True, lambda f: TrimmedMean(min(f, TrimmedMean(0).most_faulty(WORKERS)))),
    "median": (True, lambda f: Median()),
    "multi-Krum": (True, lambda f: MultiKrum(min(f, MultiKrum(0).most_faulty(WORKERS)))),
    "Zeno": (False, Zeno),
    "ZenoPS": (False, lambda f: ZenoPS()),
    "mean, asynchronous": (False, lambda f: Mean()),
    "ZenoPS, asynchronous": (False, lambda f: ZenoPSAsync(alpha=1.0)),
    "Zeno++": (False, lambda f: ZenoPlusPlus(penalty=0.01)),
}
"""By name, whether it ranks workers among each other, and what makes it for so many liars."""
ASYNCHRONOUS = ("mean, asynchronous", "ZenoPS, asynchronous", "Zeno++")


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule under one threat.

    Args:
        rule, threat: their names.
        accuracy: of the model in the end, on images held out, for each seed.
        accepted: the part of honest workers' updates that counted, and of liars'; where a rule chooses.
    """

    rule: str
    threat: str
    liars: int
    accuracy: list[float]
    accepted: tuple[float, float] | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    settings: dict[str, float | list[int]]
    note: str
    server_only: list[float]
    cells: list[Cell]


class Bench:
    """The data, the model, and all workers' gradients at once."""

    def __init__(self, seed: int, workers: int = WORKERS, data: str = DATA) -> None:
        (images, labels), (self.test, self.answers), self.note = mnist.load(data)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)
        images, labels = images[order].flatten(1), labels[order]
        self.trusted = images[:TRUSTED], labels[:TRUSTED]
        each = (len(labels) - TRUSTED) // workers
        used = slice(TRUSTED, TRUSTED + each * workers)
        self.images, self.labels = images[used].view(workers, each, -1), labels[used].view(workers, each)
        torch.manual_seed(seed)
        self.model = mnist.mlp(self.test.shape[-1])
        self.names = [name for name, _ in self.model.named_parameters()]
        self.shapes = [parameter.shape for parameter in self.model.parameters()]
        self.generator = generator
        self._gradients = vmap(self.gradient, in_dims=(None, 0, 0))

    def parameters(self) -> torch.Tensor:
        """Those that training begins with [D]."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def loss(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross entropy of parameters [D] on samples."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        named = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        return F.cross_entropy(functional_call(self.model, named, (x,)), y)

    def gradient(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = grad(self.loss)(flat, x, y)
        return gradient

    def accuracy(self, flat: torch.Tensor) -> float:
        """On images that were held out."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        named = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        with torch.no_grad():
            said = functional_call(self.model, named, (self.test.flatten(1),)).argmax(1)
        return float((said == self.answers).float().mean())

    def updates(self, flat: torch.Tensor, threat: Threat, lr: float) -> torch.Tensor:
        """The updates [n, D] of all workers, the liars' among them: they are the last."""
        drawn = torch.randint(self.images.shape[1], (WORKERS, BATCH), generator=self.generator)
        rows = torch.arange(WORKERS)[:, None]
        x, y = self.images[rows, drawn], self.labels[rows, drawn]
        honest = WORKERS - threat.liars
        if threat.liars and threat.attack is None:
            y[honest:] = flipped_labels(y[honest:], 10)
        made = -lr * self._gradients(flat, x, y)
        if threat.attack is not None:
            others = made[:honest].clone()
            for rank in range(honest, WORKERS):
                made[rank] = threat.attack.forge(made[rank], others, self.generator)
        return made

    def reference(self, flat: torch.Tensor, lr: float) -> torch.Tensor:
        """The update [D] of as many trusted samples as a worker draws."""
        drawn = torch.randint(TRUSTED, (BATCH,), generator=self.generator)
        return self.gradient(flat, self.trusted[0][drawn], self.trusted[1][drawn]).mul_(-lr)

    def losses(self, flat: torch.Tensor, updates: torch.Tensor) -> list[float]:
        """The losses [1 + n] on a few trusted samples, without an update and with each."""
        drawn = torch.randint(TRUSTED, (BATCH,), generator=self.generator)
        x, y = self.trusted[0][drawn], self.trusted[1][drawn]
        after = vmap(lambda one: self.loss(flat + one, x, y))(updates)
        return [float(self.loss(flat, x, y)), *after.tolist()]


def synchronous(bench: Bench, rule: Any, threat: Threat) -> tuple[float, tuple[float, float] | None]:
    """All workers' updates at once, some hundred times."""
    flat = bench.parameters()
    counts = torch.zeros(WORKERS)
    for _ in range(STEPS):
        updates = bench.updates(flat, threat, LR)
        if isinstance(rule, Zeno):
            squares = torch.diag(updates.square().sum(1))
            scales = rule.judge(squares, torch.ones(WORKERS, dtype=torch.float64), bench.losses(flat, updates))
            flat += Mean().combine(updates, scales)
            counts += scales[:WORKERS] > 0
        elif rule.needs_reference:
            stack = torch.cat((updates, bench.reference(flat, LR)[None]))
            scales = rule.judge(_gram(stack), torch.ones(WORKERS, dtype=torch.float64))
            flat += rule.combine(stack, scales)
            counts += scales[:WORKERS] > 0
        else:
            flat += rule(updates)
    chooses = isinstance(rule, Zeno) or rule.needs_reference
    return bench.accuracy(flat), _parts(counts / STEPS, threat) if chooses else None


def asynchronous(bench: Bench, rule: Any, threat: Threat) -> tuple[float, tuple[float, float] | None]:
    """One update at a time, each on parameters that are up to some versions old."""
    past = [bench.parameters()]
    reference = bench.reference(past[-1], ASYNC_LR)
    counted, sent = torch.zeros(WORKERS), torch.zeros(WORKERS)
    latest = bench.updates(past[-1], threat, ASYNC_LR)
    for number in range(UPDATES):
        if number % LAZINESS == 0:
            reference = bench.reference(past[-1], ASYNC_LR)
        age = int(torch.randint(STALENESS + 1, (1,), generator=bench.generator))
        rank = int(torch.randint(WORKERS, (1,), generator=bench.generator))
        update = _one_update(bench, past[max(0, len(past) - 1 - age)], threat, rank, latest)
        stack = torch.stack((update, reference)) if rule.needs_reference else update[None]
        scales = rule.judge(_gram(stack), torch.ones(1, dtype=torch.float64))
        sent[rank] += 1
        counted[rank] += float(scales[0] > 0)
        past = [*past[-STALENESS:], past[-1] + rule.combine(stack, scales)]
    accepted = _parts(counted / sent.clamp(min=1), threat) if rule.needs_reference else None
    return bench.accuracy(past[-1]), accepted


def _one_update(bench: Bench, flat: torch.Tensor, threat: Threat, rank: int, latest: torch.Tensor) -> torch.Tensor:
    """The update of one worker; a liar knows the last ones of the honest."""
    drawn = torch.randint(bench.images.shape[1], (BATCH,), generator=bench.generator)
    x, y = bench.images[rank, drawn], bench.labels[rank, drawn]
    honest = WORKERS - threat.liars
    if rank >= honest and threat.attack is None:
        y = flipped_labels(y, 10)
    own = bench.gradient(flat, x, y).mul_(-ASYNC_LR)
    if rank < honest:
        latest[rank] = own
        return own
    if threat.attack is not None:
        own = threat.attack.forge(own, latest[:honest], bench.generator)
    return own


def _gram(stack: torch.Tensor) -> torch.Tensor:
    wide = stack.double()
    return wide @ wide.T


def _parts(counted: torch.Tensor, threat: Threat) -> tuple[float, float]:
    honest = WORKERS - threat.liars
    return float(counted[:honest].mean()), float(counted[honest:].mean()) if threat.liars else 0.0


def server_only(bench: Bench) -> float:
    """The accuracy of a model that has seen the trusted samples alone."""
    flat = bench.parameters()
    for _ in range(STEPS):
        flat += bench.reference(flat, LR)
    return bench.accuracy(flat)


def cell(threat: Threat, name: str) -> Cell:
    """Play one rule under one threat, with each seed."""
    torch.set_num_threads(1)
    play, (_, make) = asynchronous if name in ASYNCHRONOUS else synchronous, RULES[name]
    played = [play(Bench(seed), make(threat.liars), threat) for seed in SEEDS]
    chosen = [accepted for _, accepted in played if accepted is not None]
    accepted = tuple(statistics.fmean(column) for column in zip(*chosen, strict=True)) if chosen else None
    return Cell(
        rule=name,
        threat=threat.name,
        liars=threat.liars,
        accuracy=[accuracy for accuracy, _ in played],
        accepted=accepted,  # type: ignore[arg-type]
    )


def measure(tell: Callable[[str], None]) -> Table:
    """Play all of them, as many at once as there are cores: nothing depends on how long it takes."""
    cells, began_s = [], time.monotonic()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        threats, rules = zip(*itertools.product(THREATS, RULES), strict=True)
        for one in pool.map(cell, threats, rules):
            cells.append(one)
            place = f"{one.threat:15} {one.rule:22}"
            tell(f"{time.monotonic() - began_s:6.0f} s  {place} {one.mean:.3f}  {one.accepted or ''}")
    return Table(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        settings={
            "workers": WORKERS,
            "trusted": TRUSTED,
            "batch": BATCH,
            "steps": STEPS,
            "lr": LR,
            "updates_asynchronous": UPDATES,
            "lr_asynchronous": ASYNC_LR,
            "staleness": STALENESS,
            "laziness": LAZINESS,
            "seeds": list(SEEDS),
        },
        note=Bench(SEEDS[0]).note,
        server_only=[server_only(Bench(seed)) for seed in SEEDS],
        cells=cells,
    )


def read() -> Table:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Table)


def claims(table: Table) -> list[tuple[str, float, bool]]:
    """The aims: in words, the worst figure in points of accuracy, and whether it is reached."""
    of = {(cell.rule, cell.threat): 100 * cell.mean for cell in table.cells}
    few = [threat.name for threat in THREATS if 0 < threat.liars <= WORKERS // 2]
    many = [threat.name for threat in THREATS if threat.liars > WORKERS // 2]
    zeno = [name for name in RULES if name.startswith("Zeno")]
    ranked = [name for name, (is_ranked, _) in RULES.items() if is_ranked]
    clean, alone = of["mean", "none"], 100 * statistics.fmean(table.server_only)
    own = {name: of["mean, asynchronous" if name in ASYNCHRONOUS else "mean", "none"] for name in zeno}
    calm = max(own[name] - of[name, "none"] for name in zeno)
    lost = max(own[name] - of[name, threat] for name in zeno for threat in few)
    lost_many = max(own[name] - of[name, threat] for name in zeno for threat in many)
    best_ranked = max(clean - of[name, threat] for name in ranked for threat in many)
    above = min(of[name, threat] - alone for name in zeno for threat in (*few, *many, "none"))
    return [
        ("no attack: points that the worst rule with trusted samples is below the mean, at most 1", calm, calm <= 1),
        ("a fifth of the workers lie: points that it is below the mean without attack, at most 3", lost, lost <= 3),
        ("six of ten lie: points that the worst of these is below, at most 8", lost_many, lost_many <= 8),
        ("six of ten lie: points that the worst rank-based rule is below", best_ranked, best_ranked > 8),
        ("always above the server alone: points, at least 0", above, above > 0),
    ]


def main() -> None:
    table = measure(lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


if __name__ == "__main__":
    main()
