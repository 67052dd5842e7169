"""Tests of who gets which rows of which group."""

import itertools

import numpy as np
import pytest

from offbeat.groups.partition import GroupPartition, constrained, distribute, latin_rotation, wrap_around


def shapes(seed: int) -> tuple[np.ndarray, int, int, int]:
    chance = np.random.default_rng(seed)
    groups, workers, configs = int(chance.integers(1, 40)), int(chance.integers(1, 9)), int(chance.integers(1, 13))
    rows = np.maximum(0, (chance.pareto(1.1, groups) * 50).astype(np.int64))
    return rows, workers, configs, int(chance.choice([1, 1, 8, 32]))


def check_coverage(made: GroupPartition, rows: np.ndarray, workers: int) -> None:
    """Each row of each group belongs to one worker."""
    of_group: dict[int, list[tuple[int, int, int]]] = {}
    for shard in made.shards:
        of_group.setdefault(shard.group, []).append((shard.begin, shard.end, shard.worker))
    for group, count in enumerate(rows.tolist()):
        if made.home[group] >= 0:
            assert group not in of_group
            assert made.home[group] < workers
            continue
        parts = of_group[group]
        assert len(parts) > 1
        assert parts[0][0] == 0
        assert parts[-1][1] == count
        assert all(end == begin for (_, end, _), (begin, _, _) in itertools.pairwise(parts))
        assert len({worker for _, _, worker in parts}) == len(parts), "no worker has two shards of a group"
    assert made.loads(rows, workers).sum() == rows.sum()


@pytest.mark.parametrize("seed", range(200))
def test_each_row_is_at_one_worker(seed: int) -> None:
    rows, workers, configs, batch = shapes(seed)
    made = wrap_around(rows, workers, configs, batch=batch)
    check_coverage(made, rows, workers)
    check_coverage(constrained(rows, workers), rows, workers)
    assert len({shard.group for shard in made.shards}) < workers, "few groups are split"
    assert made.loads(rows, workers).max() <= made.capacity + batch
    assert all(shard.begin % batch == 0 for shard in made.shards)
    for group in {shard.group for shard in made.shards}:
        assert sum(shard.group == group for shard in made.shards) <= configs + 1


def test_one_group_is_split_into_as_many_shards_as_there_are_configurations() -> None:
    made = wrap_around(np.array([1200]), workers=8, configs=3)
    assert [(shard.worker, shard.rows) for shard in made.shards] == [(0, 400), (1, 400), (2, 400)]
    assert wrap_around(np.array([1200]), workers=8, configs=1).home.tolist() == [0], "one model trains in one place"


def test_equal_shards_go_to_different_workers() -> None:
    made = constrained(np.array([900, 10, 20, 30]), 4)
    assert sorted((shard.worker, shard.rows) for shard in made.shards) == [(0, 225), (1, 225), (2, 225), (3, 225)]
    assert constrained(np.array([1, 1000]), 2).home[0] >= 0, "a small group is whole"


@pytest.mark.parametrize("holders", range(1, 7))
@pytest.mark.parametrize("configs", range(1, 9))
def test_a_rotation_brings_each_configuration_to_each_holder_once(configs: int, holders: int) -> None:
    workers = [10 + at for at in range(holders)]
    seen = []
    for turn in range(holders):
        now = latin_rotation(configs, workers, turn)
        at_once = [config for taken in now.values() for config in taken]
        assert sorted(at_once) == list(range(configs)), "each is at one holder"
        assert max(map(len, now.values())) - min(map(len, now.values())) <= 1
        seen += [(config, worker) for worker, taken in now.items() for config in taken]
    assert len(set(seen)) == len(seen) == configs * holders


def test_groups_are_whole_where_that_balances() -> None:
    nothing = np.zeros(5, np.bool_)
    made = distribute(np.array([50, 40, 30, 30, 20]), 2, 4, nothing)
    assert not made.shards
    assert made.loads(np.array([50, 40, 30, 30, 20]), 2).tolist() == [80, 90]
    rows = np.array([100, 10, 10, 10, 10])
    made = distribute(rows, 2, 4, nothing)
    assert [shard.group for shard in made.shards] == [0, 0]
    assert made.loads(rows, 2).tolist() == [70, 70]
    assert not distribute(rows, 2, 4, rows > 50).shards, "it may not be split"
