"""docs/using.md: what it shows runs, and nothing public is missing from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import offbeat
from offbeat.plan import Plan

PAGE = (Path(__file__).parent.parent / "docs" / "using.md").read_text()


def test_the_checkpoint_goes_out_and_in(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown: dict[str, Any] = {}
    exec(block, shown)
    with shown["run"] as run:
        for step, (x,) in enumerate(shown["loader"]):
            shown["model"](x).sum().backward()
            shown["optimizer"].step()
            if step == 4:
                break
        shown["save"](tmp_path / "checkpoint.pt")
        weight = shown["model"].module.weight.detach().clone()
    again: dict[str, Any] = {}
    exec(block, again)
    with again["run"] as run:
        again["resume"](tmp_path / "checkpoint.pt")
        assert run.step == 5
        assert again["model"].module.weight.equal(weight)


def test_the_plan_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert Plan.from_toml(block) == Plan(codec=offbeat.Cast("bf16"))


def test_every_public_name_of_a_run_is_there() -> None:
    with offbeat.init() as run:
        names = {name for name in dir(run) if not name.startswith("_")}
    assert names - {name for name in names if f"run.{name}" in PAGE} == {"plan", "run_dir"}
