"""What a server says was replaced, held against what workers say they loaded."""

from __future__ import annotations

import pytest

from offbeat.audit.findings import AuditResult
from offbeat.audit.replacements import check_replaced
from offbeat.audit.replicas import WorkerHistory
from offbeat.history import ParametersAfter, ParametersReplaced

LIFE = 7


def history(rank: int, versions: list[int], *, loads: list[int]) -> WorkerHistory:
    """Of a worker that had these versions, one after another, and loaded checkpoints before some of them."""
    has = [ParametersAfter(0, step, 0.0, None, life=LIFE, versions=(version,)) for step, version in enumerate(versions)]
    return WorkerHistory(rank, f"worker-{rank}.log", has=has, loads=loads)


def found(histories: list[WorkerHistory], version: int = 5) -> tuple[int, list[str], int]:
    result = AuditResult()
    check_replaced([(LIFE, ParametersReplaced(0, version, 0))] * 2, histories, result)  # two shards say so
    return result.broken, result.notes, result.replaced


def test_all_loaded_it() -> None:
    assert found([history(rank, [4, 5, 5, 6], loads=[2]) for rank in (0, 1)]) == (0, [], 1)


def test_one_did_not() -> None:
    broken, notes, _ = found([history(0, [4, 5, 5, 6], loads=[2]), history(1, [4, 5, 6], loads=[])])
    assert (broken, notes) == (1, [])


@pytest.mark.parametrize(
    "other",
    [
        history(1, [4, 5, 5], loads=[2]),
        history(1, [2, 3], loads=[]),
        history(1, [5, 6, 7], loads=[]),
    ],
    ids=["it was the last thing it did", "it had gone before", "it joined behind it"],
)
def test_who_was_not_there_need_not_have_loaded_anything(other: WorkerHistory) -> None:
    assert found([history(0, [4, 5, 5], loads=[2]), other]) == (0, [], 1)


def test_nobody_says_anything() -> None:
    broken, notes, _ = found([])
    assert broken == 0
    assert notes == [
        "Rank 0 replaced the parameters of model 0 at version 5 of life 7; no worker's history says whether all loaded "
        "a checkpoint there."
    ]


def test_before_anything_was_trained_whoever_comes_brings_it() -> None:
    assert found([history(0, [0, 1], loads=[])], version=0) == (0, [], 0)
