"""Tests of fitted groups in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat.groups import FittedGroups, Grid, GroupDataError, GroupedTrainer, Linear, Logistic
from tests.groups.test_trainer import sales

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    table = sales()
    model = Logistic(l2=Grid(0.1, 1.0), standardize=True)
    trainer = GroupedTrainer(model, by=["country", "shop"], target="many", features=["price", "day"])
    fitted = trainer.fit(table)
    fitted.save(tmp_path / "shops.models")
    found = FittedGroups.load(tmp_path / "shops.models")
    assert found.model == model
    assert found.models.equals(fitted.models)
    assert found.results.equals(fitted.results)
    assert found.predict(table).equals(fitted.predict(table))


def test_every_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "shops.models"
    GroupedTrainer(Linear(), by="shop", target="sold", features=["price"]).fit(sales(3)).save(path)
    whole = path.read_bytes()
    FittedGroups.load(path)
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(GroupDataError, match="damaged"):
            FittedGroups.load(path)
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(GroupDataError, match="damaged"):
            FittedGroups.load(path)


def test_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(GroupDataError, match="No such file"):
        FittedGroups.load(tmp_path / "absent")
    (tmp_path / "other").write_text("hello")
    with pytest.raises(GroupDataError, match="holds no groups"):
        FittedGroups.load(tmp_path / "other")
