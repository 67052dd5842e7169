"""Tests of `offbeat groups`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.groups.test_trainer import sales
from tests.patience import stretched

if TYPE_CHECKING:
    from pathlib import Path


def groups(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", "groups", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_from_a_table_to_predictions(tmp_path: Path) -> None:
    data, models, out = tmp_path / "sales.parquet", tmp_path / "shops.models", tmp_path / "predicted.csv"
    pyarrow.parquet.write_table(sales(), data)
    settings = ["--by", "country,shop", "--target", "sold", "--features", "price,day", "--l2", "0.1,10"]
    made = groups("fit", data, *settings, "--out", models, "--results", tmp_path / "tried.csv")
    assert made.returncode == 0, made.stderr
    assert "12 groups" in made.stdout
    assert "12 ok" in made.stdout
    assert pyarrow.csv.read_csv(tmp_path / "tried.csv").num_rows == 24
    made = groups("predict", models, data, "--out", out)
    assert made.returncode == 0, made.stderr
    assert "720 rows" in made.stdout
    assert pyarrow.csv.read_csv(out)["model"].unique().to_pylist() == ["group"]
    shown = groups("show", models)
    assert "shop 3" in shown.stdout
    assert groups("show", models, "--out", tmp_path / "page.html").returncode == 0
    assert "shop 3" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "sales.parquet"
    pyarrow.parquet.write_table(sales().drop_columns(["country"]), data)
    for arguments in (
        ("fit", tmp_path / "absent.csv", "--by", "shop", "--target", "sold"),
        ("fit", tmp_path / "absent.csv", "--by", "shop", "--target", "sold", "--l2", "much"),
        ("fit", data, "--by", "shop", "--target", "sold", "--out", tmp_path / "nowhere" / "models"),
        ("fit", data, "--by", "shop", "--target", "sold", "--results", tmp_path / "tried.txt"),
        ("show", tmp_path / "absent"),
    ):
        made = groups(*arguments)
        assert made.returncode == 2
        assert "Traceback" not in made.stderr
        assert "Cannot" in made.stderr


@pytest.mark.parametrize("command", [[], ["-m", "offbeat", "run", "--workers", "2"]], ids=["python", "run"])
def test_the_example_of_groups(command: list[str], tmp_path: Path) -> None:
    """In one process, and by two workers: the same models."""
    out = tmp_path / "stores.models"
    told = subprocess.run(
        [sys.executable, *command, "examples/groups.py", "--stores", "30", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=stretched(100),
    )
    assert told.returncode == 0, told.stderr
    assert "30 models" in told.stdout
    shown = groups("show", out)
    assert "region 0" in shown.stdout
