"""One model for each of many groups, beside loops over scikit-learn, torch and LightGBM: minutes.

    python -m benchmarks.groups

Each row is a table of its own. Systems take turns within one run, on one thread each: offbeat from the unsorted table
in memory to the models, the others from groups that are cut already. scikit-learn's solvers have the same objective,
which is compared in each group; nets take as many steps as torch's, and trees have LightGBM's parameters. The last row
reads a million groups from Parquet files in a process of its own, whose memory is watched. Writes
benchmarks/results/groups.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.lab import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/groups.json"
COMMAND = "python -m benchmarks.groups"
OFFBEAT, ROUNDS, FEATURES = "offbeat", 3, 20
PENALTIES = (0.1, 1.0, 10.0, 100.0)
MILLION, MILLION_FEATURES = 1_000_000, 4
SOLVERS = ("newton-cholesky", "lbfgs")
RATES, LEAVES, BOOSTING_ROUNDS = (1.0, 0.5, 0.1, 0.05), (10, 20, 30), 10


class GroupsTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One system on one table.

    Args:
        table, system: which.
        cpu_s, wall_s: of each round.
        worst: by how much the objective of any group is above the lowest of all systems, relative to it; None where
            they are not compared.
    """

    table: str
    system: str
    groups: int
    rows: int
    models: int
    cpu_s: list[float]
    wall_s: list[float]
    worst: float | None


class MillionGroups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fit of a million groups of 20 rows from files.

    Args:
        peak_mib: of the process above what it took before the fit.
    """

    groups: int
    rows: int
    seconds: float
    peak_mib: float


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    times: list[GroupsTime]
    million: MillionGroups


def sizes_of(table: str) -> np.ndarray:
    """Return the rows of each group."""
    import numpy as np

    if table == "5,000 groups of 80 rows":
        return np.full(5000, 80)
    chance = np.random.default_rng(0)
    return np.clip((chance.pareto(1.3, 500) + 1) * 80, 60, 20_000).astype(np.int64)


TABLES = {
    "500 groups by Pareto": (1.0,),
    "500 groups by Pareto, four values of l2": PENALTIES,
    "5,000 groups of 80 rows": (1.0,),
}


def rows_of(sizes: np.ndarray, features: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, classes and group of each row, in random order."""
    import numpy as np

    chance = np.random.default_rng(seed)
    group = chance.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = chance.normal(size=(len(group), features))
    truth = chance.normal(size=(len(sizes), features)) / features**0.5
    y = chance.random(len(group)) < 1 / (1 + np.exp(-(x * truth[group]).sum(1)))
    return x, y.astype(np.int64), group


def measure_table(table: str, penalties: Sequence[float]) -> list[GroupsTime]:
    """Measure all systems on one table, by turns."""
    import numpy as np
    import pyarrow as pa
    from sklearn.linear_model import LogisticRegression

    from offbeat.groups import Grid, GroupedTrainer, HoldOut, Logistic

    sizes = sizes_of(table)
    x, y, group = rows_of(sizes, FEATURES, 1)
    columns = {"group": group, **{f"x{at}": x[:, at] for at in range(FEATURES)}, "y": y}
    given = pa.table(columns)
    order = np.argsort(group, kind="stable")
    cut_x, cut_y = np.split(x[order], np.cumsum(sizes)[:-1]), np.split(y[order], np.cumsum(sizes)[:-1])

    def ours() -> list[np.ndarray]:
        l2 = Grid(*penalties) if len(penalties) > 1 else penalties[0]
        fitted = GroupedTrainer(Logistic(l2=l2), by="group", target="y", validation=HoldOut(0.2)).fit(given)
        return [fitted.records.coefficients]

    def theirs(solver: str) -> list[np.ndarray]:
        """Fit each group with each penalty; choosing one is left out, and so is what it costs."""
        made = []
        for l2 in penalties:
            models = [
                LogisticRegression(C=1 / l2, solver=solver).fit(gx, gy) for gx, gy in zip(cut_x, cut_y, strict=True)
            ]
            made.append(np.array([np.append(model.coef_[0], model.intercept_) for model in models]))
        return made

    systems: dict[str, Callable[[], list[np.ndarray]]] = {OFFBEAT: ours}
    systems |= {f"scikit-learn, {solver}": (lambda solver=solver: theirs(solver)) for solver in SOLVERS}  # type: ignore[misc]
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    wall: dict[str, list[float]] = {name: [] for name in systems}
    objectives: dict[str, np.ndarray] = {}
    ours()  # the first use of a thread pool and of code is nobody's cost
    for number in range(ROUNDS):
        for name in list(systems)[number % 2 :] + list(systems)[: number % 2]:
            begin, begin_wall = time.process_time(), time.perf_counter()
            made = systems[name]()
            cpu[name].append(time.process_time() - begin)
            wall[name].append(time.perf_counter() - begin_wall)
            if len(penalties) == 1:
                objectives[name] = _objectives(made[0], cut_x, cut_y, penalties[0])
    best = np.min(list(objectives.values()), 0) if objectives else None
    return [
        GroupsTime(
            table=table,
            system=name,
            groups=len(sizes),
            rows=len(group),
            models=len(sizes) * len(penalties),
            cpu_s=cpu[name],
            wall_s=wall[name],
            worst=None if best is None else float((objectives[name] / best - 1).max()),
        )
        for name in systems
    ]


def measure_nets() -> list[GroupsTime]:
    """Measure 200 MLPs with 50 steps of 32 rows each, by turns."""
    import numpy as np
    import pyarrow as pa
    import torch
    from torch import nn

    from offbeat.groups import AdamW, GroupedTrainer, Net

    sizes = np.full(200, 160)
    x, y, group = rows_of(sizes, FEATURES, 3)
    given = pa.table({"group": group, **{f"x{at}": x[:, at] for at in range(FEATURES)}, "y": y})
    order = np.argsort(group, kind="stable")
    cut = [torch.from_numpy(part.astype(np.float32)) for part in np.split(x[order], len(sizes))]
    classes = [torch.from_numpy(part.astype(np.float32)) for part in np.split(y[order], len(sizes))]

    def make(features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1))

    def ours() -> None:
        net = Net(make, optimizer=AdamW(lr=1e-3), loss="log", batch=32, epochs=10)
        GroupedTrainer(net, by="group", target="y").fit(given)

    def theirs() -> None:
        for features, target in zip(cut, classes, strict=True):
            net = make(FEATURES)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
            for _ in range(10):
                for rows in torch.randperm(len(target)).split(32):
                    optimizer.zero_grad()
                    margins = net(features[rows])[:, 0]
                    nn.functional.binary_cross_entropy_with_logits(margins, target[rows]).backward()
                    optimizer.step()

    counts = {"groups": len(sizes), "rows": len(group), "models": len(sizes)}
    return _by_turns("200 MLPs (20-32-1), 50 steps of AdamW", counts, ours, "loop over torch modules", theirs)


def measure_trees() -> list[GroupsTime]:
    """Measure the choice of one of 12 configurations of trees in each group, by turns."""
    import lightgbm
    import numpy as np
    import pyarrow as pa

    from offbeat.groups import Grid, GroupedTrainer, HoldOut, Trees

    sizes = sizes_of("500 groups by Pareto")
    x, y, group = rows_of(sizes, FEATURES, 4)
    given = pa.table({"group": group, **{f"x{at}": x[:, at] for at in range(FEATURES)}, "y": y})
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(sizes)[:-1]
    parts = list(zip(np.split(x[order], ends), np.split(y[order], ends), strict=True))
    spec = Trees(
        loss="log", rounds=BOOSTING_ROUNDS, learning_rate=Grid(*RATES), num_leaves=Grid(*LEAVES), lambda_l2=1.0
    )

    def ours() -> None:
        GroupedTrainer(spec, by="group", target="y", validation=HoldOut(0.2)).fit(given)

    def train(features: np.ndarray, target: np.ndarray, rate: float, leaves: int) -> lightgbm.Booster:
        least = min(20, max(1, len(target) // 10))
        parameters: dict[str, Any] = {
            "learning_rate": rate,
            "num_leaves": leaves,
            "min_data_in_leaf": least,
            "lambda_l2": 1.0,
        }
        parameters |= {"objective": "binary", "verbosity": -1, "num_threads": 1}
        return lightgbm.train(parameters, lightgbm.Dataset(features, target), BOOSTING_ROUNDS)

    def theirs() -> None:
        """Choose by the last fifth of a group's rows, which are in random order, and fit the chosen one to all."""
        for features, target in parts:
            cut = len(target) * 4 // 5
            losses: dict[tuple[float, int], float] = {}
            for rate in RATES:
                for leaves in LEAVES:
                    chance = np.asarray(train(features[:cut], target[:cut], rate, leaves).predict(features[cut:]))
                    losses[rate, leaves] = -float(np.log(np.where(target[cut:] == 1, chance, 1 - chance)).mean())
            train(features, target, *min(losses, key=lambda one: losses[one]))

    counts = {"groups": len(sizes), "rows": len(group), "models": len(sizes) * (len(RATES) * len(LEAVES) + 1)}
    table = f"500 groups by Pareto, trees of {BOOSTING_ROUNDS} rounds, 12 configurations"
    return _by_turns(table, counts, ours, "loop over lightgbm.train that chooses, too", theirs)


def _by_turns(
    table: str, counts: dict[str, int], ours: Callable[[], None], name: str, theirs: Callable[[], None]
) -> list[GroupsTime]:
    """Measure two systems by turns."""
    cpu: dict[str, list[float]] = {OFFBEAT: [], name: []}
    wall: dict[str, list[float]] = {OFFBEAT: [], name: []}
    ours()
    for _ in range(ROUNDS):
        for system, run in zip(cpu, (ours, theirs), strict=True):
            begin, begin_wall = time.process_time(), time.perf_counter()
            run()
            cpu[system].append(time.process_time() - begin)
            wall[system].append(time.perf_counter() - begin_wall)
    return [GroupsTime(table=table, system=one, cpu_s=cpu[one], wall_s=wall[one], worst=None, **counts) for one in cpu]


def _objectives(w: np.ndarray, xs: list[np.ndarray], ys: list[np.ndarray], l2: float) -> np.ndarray:
    """The objective of each group at these coefficients."""
    import numpy as np

    def of(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        margins = x @ w[:-1] + w[-1]
        return float(np.logaddexp(0, margins).sum() - margins @ y + l2 / 2 * w[:-1] @ w[:-1])

    return np.array([of(x, y, one) for x, y, one in zip(xs, ys, w, strict=True)])


def fit_million(folder: str) -> None:
    """Fit a million groups of Parquet files, in this process; prints seconds and memory."""
    import resource

    from offbeat.groups import GroupedTrainer, Logistic

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    fitted = GroupedTrainer(Logistic(), by="group", target="y").fit(f"{folder}/*.parquet")
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"groups": len(fitted.index), "seconds": seconds, "peak_mib": (peak - before) / 1024}))  # noqa: T201


def measure_million() -> MillionGroups:
    """Write the files, and fit them in a process of its own."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        chance = np.random.default_rng(2)
        for number in range(20):
            group = chance.permutation(MILLION)
            x = chance.normal(size=(MILLION, MILLION_FEATURES))
            y = (x.sum(1) + chance.normal(size=MILLION) > group % 3 - 1).astype(np.int8)
            columns = {"group": group, **{f"x{at}": x[:, at] for at in range(MILLION_FEATURES)}, "y": y}
            parquet.write_table(pa.table(columns), f"{folder}/{number:02d}.parquet")
        command = [sys.executable, "-m", "benchmarks.groups", "--million", folder]
        told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return MillionGroups(rows=20 * MILLION, **json.loads(told))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--million"]:
        fit_million(arguments[1])
        return
    import torch

    torch.set_num_threads(1)
    times = [one for table, penalties in TABLES.items() for one in measure_table(table, penalties)]
    found = Groups(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions() | _versions(),
        hardware=hardware.hardware(),
        times=times + measure_nets() + measure_trees(),
        million=measure_million(),
    )
    RESULT.write_text(json.dumps(msgspec.to_builtins(found), indent=1) + "\n")


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """Return the part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = msgspec.json.decode(RESULT.read_bytes(), type=Groups)
    own = {one.table: statistics.median(one.cpu_s) for one in found.times if one.system == OFFBEAT}
    rows = []
    for one in found.times:
        cpu, wall = statistics.median(one.cpu_s), statistics.median(one.wall_s)
        ratio = "" if one.system == OFFBEAT else f"{cpu / own[one.table]:.1f}"
        above = "" if one.worst is None else f"{one.worst:.0e}"
        rows.append([one.table, f"{one.rows:,}", one.system, f"{cpu:.2f}", f"{wall:.2f}", ratio, above])
    million = found.million
    headings = [
        "table",
        "rows",
        "system",
        "processor, s",
        "wall, s",
        "times offbeat's processor time",
        "above the lowest",
    ]
    rate = f"{million.rows / million.seconds:,.0f} rows a second"
    made_by = f"{found.hardware['processor']}, torch {found.versions['torch']}"
    return (
        "\n## groups\n\n"
        f"A model for each group; {FEATURES} features, one thread; medians of {ROUNDS} rounds in which systems take "
        "turns. offbeat begins with the unsorted table and ends with chosen models; the others begin with groups that "
        "are cut already, and choose only where it is said. The last "
        "column is by how much the objective of any group is above the lowest that a system has found, relative to it."
        f"\n\n{lines(headings, rows)}\n"
        f"{million.groups:,} groups of 20 rows with {MILLION_FEATURES} features, from 20 Parquet files: "
        f"{million.seconds:.0f} s, {rate}, at most {million.peak_mib:,.0f} MiB more than the idle process.\n\n"
        f"`{found.command}`, {found.date}, {made_by}, scikit-learn {found.versions['scikit-learn']}. "
        "[Raw records](groups.json).\n"
    )


def _versions() -> dict[str, str]:
    import lightgbm
    import pyarrow as pa
    import sklearn

    return {"pyarrow": pa.__version__, "scikit-learn": sklearn.__version__, "lightgbm": lightgbm.__version__}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
