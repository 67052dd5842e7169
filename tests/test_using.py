"""docs/using.md: what it shows runs, and nothing public is missing from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import offbeat
from offbeat.plan import Plan

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "using.md").read_text()


def test_checkpoints_go_out_and_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, own = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown: dict[str, Any] = {}
    exec(kept + own, shown)
    with shown["run"] as run:
        assert run.step == 16
        for step, (x,) in enumerate(shown["loader"]):
            shown["model"](x).sum().backward()
            shown["optimizer"].step()
            if step == 4:
                break
        shown["save"](tmp_path / "own.pt")
        weight = shown["model"].module.weight.detach().clone()
    again: dict[str, Any] = {}
    exec(kept + own, again)
    with again["run"] as run:
        assert run.step == 16, "the epoch was done"
        kept_there = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt"))
        assert kept_there == ["run-000008.pt", "run-000016.pt"]
        again["resume"](tmp_path / "own.pt")
        assert run.step == 21
        assert again["model"].module.weight.equal(weight)


def test_the_plan_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert Plan.from_toml(block) == Plan(codec=offbeat.Cast("bf16"))


def test_every_public_name_of_a_run_is_there() -> None:
    with offbeat.init() as run:
        names = {name for name in dir(run) if not name.startswith("_")}
    assert names - {name for name in names if f"run.{name}" in PAGE} == {"plan", "run_dir"}
