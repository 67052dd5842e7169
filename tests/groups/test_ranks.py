"""Tests of a fit by several workers."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch import nn

from offbeat.errors import DisagreementError, OffbeatError, PeerError
from offbeat.groups import (
    SGD,
    AdamW,
    Grid,
    GroupDataError,
    GroupedTrainer,
    HoldOut,
    Linear,
    Logistic,
    Net,
    Ranks,
    Small,
    ThisProcess,
    Trees,
    partition,
)
from offbeat.groups.carrier import LocalBoard, LocalCarrier
from offbeat.groups.fitting import BucketTask, GroupStatus
from offbeat.groups.hopping import HopCourse, HopGroup, blocks_of, replay
from offbeat.groups.net import _models
from offbeat.groups.records import GroupRecords
from offbeat.groups.shared_fit import SharedFit
from offbeat.groups.split_hops import HopCoordinator, HoppingShards, ShardRows
from offbeat.groups.stacked_module import StackedModule
from offbeat.groups.table_input import open_table
from offbeat.groups.table_messages import table_in, table_message
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat.groups.records import GroupModels

BUCKET = 64 << 10


def skewed(rows: int = 6_000, features: int = 3, seed: int = 0) -> pa.Table:
    """Two large groups and many small ones, mixed."""
    chance = np.random.default_rng(seed)
    key = np.where(chance.random(rows) < 0.7, chance.integers(0, 2, rows), chance.integers(2, 60, rows))
    x = chance.normal(size=(rows, features))
    weights = chance.normal(size=(60, features))
    y = (x * weights[key]).sum(1) + chance.normal(size=rows)
    columns = {f"x{at}": x[:, at] for at in range(features)}
    return pa.table({"key": key, "day": chance.integers(0, 30, rows), **columns, "y": y, "is": y > 0})


def fit_by(
    workers: int, trainer: GroupedTrainer, tables: Sequence[Any], folders: Sequence[Path] | None = None, **how: Any
) -> list[GroupModels]:
    """The models that each of some threads has; the error that one of them ended with is raised."""
    board, made = LocalBoard(), dict[int, Any]()
    settings = {"own_rows": False, "bucket_bytes": BUCKET, **how}

    def work(rank: int) -> None:
        try:
            carrier = LocalCarrier(rank, workers, board)
            fit = SharedFit(carrier, trainer, open_table(tables[rank]), **settings)
            made[rank] = fit.run(lambda ended, groups: None, None if folders is None else folders[rank])
        except OffbeatError as error:
            made[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for _, one in sorted(made.items()):
        if isinstance(one, OffbeatError):
            raise one
    return [made[rank] for rank in range(workers)]


def trainer_of(model: Any, target: str = "y", **more: Any) -> GroupedTrainer:
    return GroupedTrainer(model, by="key", target=target, features=["x0", "x1", "x2"], **more)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.groups.table_input._BATCH_ROWS", 500)
    monkeypatch.setattr("offbeat.groups.partition.MOST_IMBALANCE", 0.0)  # groups are split at every border


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("own_rows", [False, True])
def test_all_workers_have_the_models_of_one(workers: int, own_rows: bool) -> None:
    table = skewed()
    trainer = trainer_of(Linear(l2=1.0), executor=ThisProcess(BUCKET))
    alone = trainer.fit(table)
    parts = [table.slice(rank * 6_000 // workers, 6_000 // workers) if own_rows else table for rank in range(workers)]
    for made in fit_by(workers, trainer, parts, own_rows=own_rows):
        assert made.index.keys.equals(alone.index.keys)
        np.testing.assert_array_equal(made.index.rows, alone.index.rows)
        np.testing.assert_allclose(made.records.coefficients, alone.records.coefficients, rtol=1e-10)
        is_same = (made.records.coefficients == alone.records.coefficients).all(1)
        assert own_rows or is_same[2:].all(), "rows of whole groups come in the order of the table"
        assert not is_same[:2].all(), "one of the large groups was split"


@pytest.mark.parametrize("by", [None, "day"])
def test_a_configuration_is_chosen_for_a_split_group(by: str | None) -> None:
    table = skewed()
    trainer = trainer_of(
        Logistic(l2=Grid(0.1, 10.0, 1000.0)), "is", validation=HoldOut(by=by), executor=ThisProcess(BUCKET)
    )
    alone, found = trainer.fit(table).records, fit_by(3, trainer, [table] * 3)
    for made in found:
        np.testing.assert_array_equal(made.records.coefficients, found[0].records.coefficients)
        np.testing.assert_array_equal(made.records.chosen, alone.chosen)
        if by is not None:  # the very same rows are held out
            np.testing.assert_allclose(made.records.held_losses, alone.held_losses, rtol=1e-9)


def test_the_model_of_all_rows_is_a_sum_over_all_workers() -> None:
    table = skewed()
    trainer = trainer_of(Linear(l2=Grid(1.0, 2.0)), small=Small(fallback="global"), executor=ThisProcess(BUCKET))
    alone = trainer.fit(table)
    for made in fit_by(3, trainer, [table] * 3):
        np.testing.assert_allclose(made.records.fallback, alone.records.fallback, rtol=1e-10)


@pytest.mark.parametrize(("loss", "target"), [("squared", "y"), ("log", "is")])
def test_trees_of_split_groups_are_those_of_all_rows(loss: str, target: str, tmp_path: Path) -> None:
    table = skewed(3_000)
    spec = Trees(loss, rounds=Grid(2, 12), learning_rate=0.2, num_leaves=7)
    trainer = trainer_of(
        spec, target, small=Small(fallback="global"), validation=HoldOut(by="day"), executor=ThisProcess(BUCKET)
    )
    alone = trainer.fit(table)
    by_two = fit_by(2, trainer, [table] * 2)
    by_three = fit_by(3, trainer, [table] * 3, [tmp_path] * 3)
    (tmp_path / "000000.npz").unlink()
    resumed = fit_by(2, trainer, [table] * 2, [tmp_path] * 2)
    seen: dict[int, str] = {}
    for made in (*by_two, *by_three, *resumed):
        assert made.records.status.tolist() == alone.records.status.tolist()
        texts = made.records.coefficients[:, 0]
        split = np.flatnonzero(texts != alone.records.coefficients[:, 0])
        assert 1 <= len(split) <= 2
        assert split.max() <= 1, "whole groups are LightGBM's, everywhere"
        for group in split.tolist():
            assert seen.setdefault(group, texts[group]) == texts[group], "however it was split"
        np.testing.assert_array_equal(made.records.chosen[:2], alone.records.chosen[:2])
        np.testing.assert_allclose(made.records.held_losses[:2], alone.records.held_losses[:2], rtol=0.05)
        assert made.records.fallback[0].startswith("tree\nversion=v4")
    assert by_three[0].records.fallback[0] == by_two[0].records.fallback[0]


def test_why_trees_failed_is_known_to_all_workers() -> None:
    """The failed groups are split ones and whole ones."""
    table = skewed(3_000)
    counts = np.where(np.isin(table["key"].to_numpy(), (0, 1, 30)), -1.0, 1.0 + table["day"].to_numpy())
    table = table.set_column(table.column_names.index("y"), "y", pa.array(counts))
    for made in fit_by(3, trainer_of(Trees("poisson", rounds=2)), [table] * 3):
        failed = np.flatnonzero(made.records.status == GroupStatus.FAILED)
        assert made.index.keys["key"].take(pa.array(failed)).to_pylist() == [0, 1, 30]
        assert set(made.records.errors[failed]) == {"a target is less than 0, or all are 0"}


@pytest.mark.parametrize("model", [Linear(), Net(lambda features: nn.Linear(features, 1), epochs=1)])
def test_a_split_group_that_cannot_be_fitted_is_a_row(model: Any) -> None:
    table = skewed()
    broken = table.set_column(2, "x0", pa.array([np.nan, *table["x0"].to_pylist()[1:]]))
    number = table["key"][0].as_py()
    for made in fit_by(2, trainer_of(model), [broken] * 2):
        expected = np.full(60, GroupStatus.OK)
        expected[number] = GroupStatus.NOT_FINITE
        np.testing.assert_array_equal(made.records.status, expected)
        assert np.isnan(made.records.coefficients[number]).all()


def test_files_are_read_in_parts(tmp_path: Path) -> None:
    table = skewed()
    for number in range(3):
        part = table.slice(number * 2_000, 2_000)
        pa.parquet.write_table(part, tmp_path / f"{number}.parquet", row_group_size=700)
        pa.csv.write_csv(part, tmp_path / f"{number}.csv")
    trainer = trainer_of(Linear(), executor=ThisProcess(BUCKET))
    alone = trainer.fit(table).records
    for pattern in ("*.parquet", "*.csv"):
        for made in fit_by(2, trainer, [str(tmp_path / pattern)] * 2):
            np.testing.assert_allclose(made.records.coefficients, alone.coefficients, rtol=1e-8)


def test_workers_of_other_settings_are_refused() -> None:
    """Also where models have as many numbers; a function is known by what it does, not by its address."""

    def each(trainers: Sequence[GroupedTrainer]) -> list[str]:
        board, told = LocalBoard(), dict[int, str]()

        def work(rank: int) -> None:
            fit = SharedFit(
                LocalCarrier(rank, 2, board), trainers[rank], open_table(skewed()), own_rows=False, bucket_bytes=BUCKET
            )
            try:
                fit.run(lambda ended, groups: None)
                told[rank] = "fitted"
            except DisagreementError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [told[rank] for rank in range(2)]

    settings = Linear(l2=1.0), Linear(l2=2.0)
    assert each([trainer_of(one) for one in settings]) == [
        "Cannot fit together: workers 0 and 1 differ in the model. Give all of them the same GroupedTrainer.",
        "Cannot fit together: workers 1 and 0 differ in the model. Give all of them the same GroupedTrainer.",
    ]
    smalls = Small(2), Small(3)
    assert "differ in the small groups" in each([trainer_of(Linear(), small=one) for one in smalls])[0]
    nets = [Net(functools.partial(wide, 4), epochs=1) for _ in range(2)]
    assert each([trainer_of(net) for net in nets]) == ["fitted", "fitted"]


def wide(width: int, features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1))


def test_what_differs_between_workers_is_refused() -> None:
    table = skewed()
    with pytest.raises(DisagreementError, match="worker 1 Linear of 1 configurations"):
        fit_by(2, trainer_of(Linear()), [table, table.set_column(2, "x0", table["x0"].cast(pa.float32()))])
    net = Net(mlp, epochs=1)
    with pytest.raises(GroupDataError, match="one Net to the rows of all workers"):
        fit_by(2, trainer_of(net, small=Small(fallback="global")), [table] * 2)
    with pytest.raises(GroupDataError, match="no column 'x2'"):
        fit_by(2, trainer_of(Linear()), [table.drop_columns(["x2"])] * 2)
    with pytest.raises(GroupDataError, match="Cannot fit parents of groups with Ranks"):
        fit_by(2, trainer_of(Linear(shrink=1.0), small=Small(fallback="parent")), [table] * 2)


# -- models that hop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("configs", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_each_block_visits_each_shard_once_in_an_epoch(configs: int, shards: int) -> None:
    """Also where there are more shards than configurations, or no multiple; and at one worker at a time."""
    epochs = [2 + number % 2 for number in range(configs)]
    holders = tuple(range(shards))
    blocks = tuple((number,) for number in range(configs))
    groups = {
        0: HopGroup(holders, tuple(range(10, 10 + shards)), blocks, tuple(epochs)),
        1: HopGroup((0, shards), (5, 6), ((0, 1),), (3,)),
    }
    course = HopCourse(groups)
    chance = np.random.default_rng(configs * 10 + shards)
    running: dict[int, Any] = {}
    while not course.is_done:
        for worker in chance.permutation(shards + 1).tolist():
            if worker not in running and (visit := course.next(worker)) is not None:
                assert groups[visit.group].holders[visit.shard] == worker
                assert (visit.group, visit.block) not in {(one.group, one.block) for one in running.values()}
                running[worker] = visit
        worker = chance.choice(list(running))
        del running[worker]
        course.done(worker, float(chance.random()))
    for (group, block), visits in course.visits.items():
        assert len(visits) == groups[group].epochs[block] + 1
        for shards_of_epoch in visits:
            assert sorted(shards_of_epoch) == list(range(len(groups[group].holders)))


def hop(net: Net, parts: list[BucketTask], workers: int) -> tuple[Any, LocalBoard]:
    """Train the configurations of one group, of which each worker has a part, by threads."""
    names = [f"x{at}" for at in range(parts[0].features.shape[1])]
    schema = pa.schema([("key", pa.int64()), *((name, pa.float64()) for name in names), ("y", pa.float64())])
    job = GroupedTrainer(net, by="key", target="y").job(schema, None)
    blocks = blocks_of(net, job.configs, len(parts))
    epochs = tuple(net.epochs_of(job.configs[block[0]]) for block in blocks)
    rows = tuple(len(part.target) for part in parts)
    groups = {7: HopGroup(tuple(range(workers)), rows, tuple(map(tuple, blocks)), epochs)}
    board = LocalBoard()
    coordinator = HopCoordinator(LocalCarrier(0, workers, board), groups, job)

    def work(rank: int) -> None:
        has_come, shard = threading.Event(), {7: ShardRows(parts[rank], BucketTask.empty(len(names)))}
        hops = HoppingShards(LocalCarrier(rank, workers, board), job, groups, shard, has_come.set, waits=True)
        while not hops.has_ended:
            has_come.wait(60)
            has_come.clear()
            if hops.is_ready:
                hops.advance(waits=True)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    return coordinator, board


def parts_of(counts: Sequence[int], features: int = 4) -> list[BucketTask]:
    chance = np.random.default_rng(1)
    made = []
    for count in counts:
        x = chance.normal(size=(count, features))
        y = np.tanh(x @ np.arange(features)) + 0.1 * chance.normal(size=count)
        made.append(BucketTask(x, y, np.array([0, count]), np.array([99], np.uint64)))
    return made


def mlp(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 1))


def with_norm(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.filterwarnings("ignore:Training nets one by one")
@pytest.mark.parametrize("make", [mlp, with_norm])
def test_a_replay_of_the_visits_gives_the_same_bits(make: Any) -> None:
    net = Net(make, optimizer=AdamW(lr=Grid(1e-2, 3e-2)), batch=Grid(16, 32), epochs=2)
    parts = parts_of([100, 64, 37])
    coordinator, board = hop(net, parts, 3)
    for block, places in enumerate(coordinator.groups[7].blocks):
        visits = coordinator.course.visits[7, block]
        configs = [coordinator.job.configs[at] for at in places]
        state = replay(net, parts, configs, visits[:-1])
        name = f"hop/state/7/{block}/{sum(map(len, visits))}"
        came = board.want(name).get(5)
        assert state.keys() == came.keys()
        for key, value in state.items():
            assert torch.equal(value, came[key]), key
    record = coordinator.records(7)
    assert (record.steps == [[2 * sum(-(-len(p.target) // b) for p in parts) for b in (16, 32, 16, 32)]]).all()


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_of_the_coordinator_ends_all_workers(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, following = itertools.count(1), HopCourse.next

    def fails(course: HopCourse, worker: int) -> Any:
        if next(calls) == at:
            raise RuntimeError("a mistake of ours")
        return following(course, worker)

    monkeypatch.setattr(HopCourse, "next", fails)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        hop(Net(mlp, optimizer=AdamW(lr=Grid(1e-2, 3e-2)), epochs=2), parts_of([50, 50, 50]), 3)


def test_models_that_hop_are_trained_by_torch_over_the_shards_one_after_another() -> None:
    """The order of rows in a shard is drawn anew, so batches of a whole shard are what is compared."""
    net = Net(mlp, optimizer=SGD(lr=0.1, momentum=0.9), batch=200, epochs=3)
    parts = parts_of([100, 64, 37])
    coordinator, _ = hop(net, parts, 3)
    visits = coordinator.course.visits[7, 0][:-1]
    module = mlp(4)
    torch.nn.utils.vector_to_parameters(initial_of(net, parts[0]), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for shard in itertools.chain.from_iterable(visits):
        x = torch.from_numpy(parts[shard].features.astype(np.float32))
        y = torch.from_numpy(parts[shard].target.astype(np.float32))
        optimizer.zero_grad()
        (0.5 * (module(x)[:, 0] - y).square()).mean().backward()
        optimizer.step()
    made = coordinator.records(7).coefficients[0]
    expected = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-6)


def initial_of(net: Net, part: BucketTask) -> torch.Tensor:
    """The weights with which a group's net begins."""
    models = _models(part, np.zeros(1, np.int64), [net])
    return StackedModule(net.make, part.features.shape[1], net.seed).initial(models.seeds)[0]


def test_nets_of_several_workers_predict_like_those_of_one() -> None:
    table = skewed()
    net = Net(mlp, optimizer=AdamW(lr=Grid(1e-2, 1e-3)), batch=64, epochs=3)
    trainer = trainer_of(net, executor=ThisProcess(BUCKET))
    alone = trainer.fit(table).records
    for made in fit_by(3, trainer, [table] * 3):
        whole = np.arange(2, 60)
        np.testing.assert_array_equal(made.records.coefficients[whole], alone.coefficients[whole])
        np.testing.assert_array_equal(made.records.chosen, alone.chosen)
        np.testing.assert_allclose(made.records.held_losses[:2], alone.held_losses[:2], rtol=0.3)
        assert (made.records.status == GroupStatus.OK).all()


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers", [np.array([3], np.int64), np.array([-1], np.int64), np.array([0.0]), np.array([[0]], np.int64)]
)
def test_records_of_groups_that_are_not_there_are_refused(numbers: np.ndarray) -> None:
    records = GroupRecords.empty(3, 1, 2)
    part = records.of(np.array([0]))
    records.put(np.array([2]), part)
    with pytest.raises(PeerError, match="not there"):
        records.put(numbers, part)
    del part["steps"]
    with pytest.raises(PeerError, match="lack steps"):
        records.put(np.array([0]), part)


def test_a_table_that_is_damaged_on_its_way_is_refused() -> None:
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    made, has_more = table_in(table_message(table, has_more=True), table.schema)
    assert made.equals(table)
    assert has_more
    with pytest.raises(PeerError, match="columns"):
        table_in(table_message(table), pa.schema([("a", pa.int64())]))
    message = table_message(table)
    chance = np.random.default_rng(0)
    for _ in range(300):
        damaged = message["table"].clone()
        for at in chance.integers(0, len(damaged), 3):
            damaged[at] = int(chance.integers(0, 256))
        try:
            table_in({**message, "table": damaged[: chance.integers(1, len(damaged) + 1)]}, table.schema)
        except PeerError:
            continue


# -- processes -------------------------------------------------------------------------------------------------------


def fit_here(victim: int, fault: str) -> tuple[np.ndarray, np.ndarray] | str:
    """Fit linear models, then nets, as a worker of a job; the victim has a fault at its second visit."""
    table, visits = skewed(), 0
    partition.MOST_IMBALANCE = 0.0
    alone = trainer_of(Linear(l2=1.0), executor=ThisProcess(BUCKET)).fit(table).records
    found = trainer_of(Linear(l2=1.0), executor=Ranks(bucket_bytes=BUCKET)).fit(table).records
    np.testing.assert_allclose(found.coefficients, alone.coefficients, rtol=1e-10)

    class Fragile(Net):
        def visit(self, *args: Any) -> Any:
            nonlocal visits
            visits += 1
            if int(os.environ["RANK"]) == victim and visits == 2:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise GroupDataError("its disk is full")
            return super().visit(*args)

    net = Fragile(mlp, optimizer=AdamW(lr=Grid(1e-2, 1e-3)), batch=64, epochs=3)
    trainer = trainer_of(net, executor=Ranks(bucket_bytes=BUCKET))
    try:
        made = trainer.fit(table).records
    except OffbeatError as error:
        return str(error)
    return made.coefficients, made.held_losses


def test_processes_fit_together() -> None:
    first, *others = run_workers(3, fit_here, -1, "", timeout_s=80)
    assert np.isfinite(first[0]).all()
    for other in others:
        np.testing.assert_array_equal(first[0], other[0])


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_lost_worker_is_named(victim: int) -> None:
    for rank, told in enumerate(run_workers(3, fit_here, victim, "kill", timeout_s=80, faulty=victim)):
        assert rank == victim or told.startswith(f"Cannot fit without worker {victim}: ")


def test_all_say_why_one_has_failed() -> None:
    told = run_workers(3, fit_here, 1, "disk", timeout_s=80)
    assert told == ["worker 1 failed: its disk is full", "its disk is full", "worker 1 failed: its disk is full"]
