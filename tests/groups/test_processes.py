"""Tests of fits by processes of this machine, and of what an ended fit has left."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor
from torch import nn

from offbeat.groups import (
    Estimator,
    Grid,
    GroupDataError,
    GroupedTrainer,
    Linear,
    Net,
    Processes,
    Ranks,
    Small,
    ThisProcess,
    Trees,
)
from offbeat.groups.fitting import GroupStatus
from tests.groups.test_ranks import BUCKET, fit_by, skewed, trainer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from offbeat.groups.fitting import BucketFit, BucketTask


@dataclass(frozen=True)
class Deadly(Linear):
    """Kills its process where a group has more rows than `most`."""

    most: int = 1_000_000

    def fit(self, task: BucketTask, configs: Sequence[Any]) -> BucketFit:
        if np.diff(task.offsets).max() > self.most:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(task, configs)


def test_processes_make_the_same_models() -> None:
    """Also of what only this file knows, such as a lambda."""
    table, seen = skewed(), list[tuple[int, int]]()
    net = Net(lambda features: nn.Linear(features, 1), batch=Grid(32, 64), epochs=1)
    alone = trainer_of(net, executor=ThisProcess(BUCKET)).fit(table).records
    found = trainer_of(net, executor=Processes(2, BUCKET)).fit(table, lambda *told: seen.append(told)).records
    np.testing.assert_array_equal(found.coefficients, alone.coefficients)
    assert seen[-1] == (60, 60)


def test_a_group_that_kills_its_process_is_a_row() -> None:
    """The other groups of its bucket are fitted."""
    table = skewed()
    table = table.filter(np.asarray(table["key"]) < 4)
    counts = np.bincount(table["key"].to_numpy())
    trainer = trainer_of(Deadly(most=int(counts.max()) - 1), executor=Processes(2, 1 << 20))
    alone = trainer_of(Linear(), executor=ThisProcess(1 << 20)).fit(table).records
    found = trainer.fit(table).records
    is_killed = counts == counts.max()
    np.testing.assert_array_equal(found.status == GroupStatus.KILLED, is_killed)
    np.testing.assert_allclose(found.coefficients[~is_killed], alone.coefficients[~is_killed], rtol=1e-10)


def test_models_that_are_objects_are_made_on_one_machine(tmp_path: Path) -> None:
    """Processes give them back; but for texts, they are not left in a folder, nor exchanged by workers."""
    table = skewed(1_000)
    for model in (Estimator(DecisionTreeRegressor(), max_depth=Grid(2, 4)), Trees(rounds=3)):
        alone = trainer_of(model, executor=ThisProcess(BUCKET)).fit(table)
        found = trainer_of(model, executor=Processes(2, BUCKET)).fit(table)
        assert found.predict(table).equals(alone.predict(table))
        assert found.models.equals(alone.models)
        if isinstance(model, Trees):
            continue
        with pytest.raises(GroupDataError, match="Cannot leave models of"):
            trainer_of(model).fit(table, folder=tmp_path / "left")
        with pytest.raises(GroupDataError, match="by several workers: they exchange models as numbers or texts"):
            fit_by(2, trainer_of(model), [table] * 2)
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize("count", [0, True, 1.5])
def test_no_number_of_processes(count: Any) -> None:
    with pytest.raises(GroupDataError, match="number of 1 or more"):
        Processes(count)


# -- what an ended fit has left --------------------------------------------------------------------------------------


class Ended(Exception):
    """A fit was ended."""


def end_after(groups: int) -> Callable[[int, int], None]:
    def progress(ended: int, total: int) -> None:
        if ended >= groups:
            raise Ended

    return progress


def test_an_ended_fit_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, fitted, fit = skewed(), list[int](), Linear.fit

    def counting(self: Linear, task: BucketTask, configs: Sequence[Any]) -> BucketFit:
        fitted.append(len(task.hashes))
        return fit(self, task, configs)

    monkeypatch.setattr(Linear, "fit", counting)
    trainer = trainer_of(Linear(), executor=ThisProcess(BUCKET))
    alone, whole = trainer.fit(table).records, sum(fitted)
    fitted.clear()
    with pytest.raises(Ended):
        trainer.fit(table, end_after(20), folder=tmp_path)
    first = sum(fitted)
    assert 20 <= first < whole
    np.testing.assert_array_equal(trainer.fit(table, folder=tmp_path).records.coefficients, alone.coefficients)
    assert sum(fitted) == whole, "nothing was fitted twice"
    trainer.fit(table, folder=tmp_path)
    assert sum(fitted) == whole


def test_workers_continue_where_one_was(tmp_path: Path) -> None:
    """With another number of workers, in one folder that all of them see, or in one of each."""
    small = Small(fallback="global")
    table, trainer = skewed(), trainer_of(Linear(), small=small, executor=ThisProcess(BUCKET))
    alone = trainer.fit(table).records
    with pytest.raises(Ended):
        trainer.fit(table, end_after(20), folder=tmp_path / "0")
    for folders in ([tmp_path / "0"] * 2, [tmp_path / "0", tmp_path / "1"]):
        for made in fit_by(2, trainer, [table] * 2, folders=folders):
            np.testing.assert_allclose(made.records.coefficients, alone.coefficients, rtol=1e-10)
            np.testing.assert_allclose(made.records.fallback, alone.fallback, rtol=1e-10)


def test_a_folder_of_another_fit_is_refused(tmp_path: Path) -> None:
    table = skewed()
    folder = tmp_path / "made" / "here"
    trainer_of(Linear(), executor=ThisProcess(BUCKET)).fit(table, folder=folder)
    for model, data, other in (
        (Linear(l2=2.0), table, "model"),
        (Linear(), table.slice(1), "groups"),
        (Net(lambda features: nn.Linear(features, 1)), table, "model"),
    ):
        with pytest.raises(GroupDataError, match=f"other {other}"):
            trainer_of(model, executor=ThisProcess(BUCKET)).fit(data, folder=folder)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(GroupDataError, match="holds other things"):
        trainer_of(Linear()).fit(table, folder=tmp_path)


def test_a_damaged_file_is_fitted_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table, trainer = skewed(), trainer_of(Linear(), executor=ThisProcess(BUCKET))
    alone = trainer.fit(table, folder=tmp_path).records
    first, second, third, *_ = sorted(tmp_path.glob("*.npz"))
    first.write_bytes(first.read_bytes()[:-40])
    damaged = bytearray(second.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    second.write_bytes(damaged)
    third.write_bytes(first.read_bytes()[:0])
    np.testing.assert_array_equal(trainer.fit(table, folder=tmp_path).records.coefficients, alone.coefficients)
    assert caplog.text.count("Fitting a bucket again") == 3


def test_a_net_that_computes_otherwise_is_another_fit(tmp_path: Path) -> None:
    """A lambda is known by what it does: its address differs in each process."""

    def trainer(width: int) -> GroupedTrainer:
        makes = {4: lambda features: nn.Linear(features, 1), 8: lambda features: nn.Linear(features, 1, bias=False)}
        return trainer_of(Net(makes[width], epochs=1), executor=ThisProcess(BUCKET))

    trainer(4).fit(skewed(), folder=tmp_path)
    trainer(4).fit(skewed(), folder=tmp_path)
    with pytest.raises(GroupDataError, match="other model"):
        trainer(8).fit(skewed(), folder=tmp_path)


def test_ranks_without_a_job_are_this_process() -> None:
    table = skewed()
    found = trainer_of(Linear(), executor=Ranks(bucket_bytes=BUCKET)).fit(table).records
    alone = trainer_of(Linear(), executor=ThisProcess(BUCKET)).fit(table).records
    np.testing.assert_array_equal(found.coefficients, alone.coefficients)
