"""docs/using.md: what it shows runs, and nothing public is missing from it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.plan import Plan

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "using.md").read_text()


def test_checkpoints_go_out_and_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, own = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown: dict[str, Any] = {}
    exec(kept + own, shown)
    with shown["run"] as run:
        assert run.step == 32
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
        assert run.step == 32, "both epochs were done"
        kept_there = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt"))
        assert kept_there == ["run-000024.pt", "run-000032.pt"]
        again["resume"](tmp_path / "own.pt")
        assert run.step == 37
        assert again["model"].module.weight.equal(weight)


def test_plans_are_plans() -> None:
    whole, inside = (Plan.from_toml(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    assert whole == Plan(codec=offbeat.Cast("bf16"))
    assert inside == Plan(codec=offbeat.ErrorFeedback(offbeat.Cast("bf16")))


def test_every_option_of_ddp_is_there() -> None:
    """Those of the torch that is installed; and what its model has beside them."""
    (table,) = re.findall(r"\| DDP's option .*?\n\n", PAGE, re.DOTALL)
    options = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"}
    missing = {name for name in options | {"register_comm_hook", "join", "no_sync"} if f"`{name}`" not in table}
    assert not missing


def test_arguments_stand_there_with_their_defaults() -> None:
    (shown,) = re.findall(r"\| `offbeat\.init\((.*?)\)` \|", PAGE)
    assert [one.partition("=")[0] for one in shown.split(", ")] == list(inspect.signature(offbeat.init).parameters)
    assert "seed=0" in shown
    assert "timeout=5" in shown
    weight = inspect.signature(offbeat.Run.mean).parameters["weight"]
    assert f"`run.mean(value, weight={weight.default})`" in PAGE


def test_every_public_name_of_a_run_is_there() -> None:
    with offbeat.init() as run:
        names = {name for name in dir(run) if not name.startswith("_")}
    assert names - {name for name in names if f"run.{name}" in PAGE} == {"plan", "run_dir"}
