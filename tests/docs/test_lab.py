"""docs/lab.md: every key of a scenario is there with its default, and every example works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from offbeat.attack_spec import AttackKind, AttackSpec
from offbeat.fault_spec import Fault, Link, Process, Shaping, Stranger
from offbeat.fault_spec import Script as Within
from offbeat.lab import launch, runner
from offbeat.lab.jobs import jobs
from offbeat.scenario import (
    Hosts,
    HostTable,
    Impair,
    LayerTable,
    Replay,
    Rounds,
    Row,
    RowSwap,
    Scenario,
    ScenarioTable,
    TrainingScript,
)
from offbeat.straggler_model import StragglerLaw
from offbeat.topology_spec import LinkSpec, SwitchSpec, TopologyKind, TopologySpec

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parent.parent.parent / "docs/lab.md").read_text()
# Where each table of a scenario stands on the page.
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "`[scenario]`": ScenarioTable,
    "`[hosts]`": Hosts,
    "`[[host]]`": HostTable,
    "`[topology]`": TopologySpec,
    "`[[link]]`": LinkSpec,
    "`[[switch]]`": SwitchSpec,
    "`[straggle]`": StragglerLaw,
    "`[impair]`": Impair,
    "`[[fault]]`": Fault,
    "`[[attack]]`": AttackSpec,
    '`[workload]` with `kind = "replay"`': Replay,
    "`[[workload.layer]]`": LayerTable,
    '`[workload]` with `kind = "script"`': TrainingScript,
    "`[run]`": Rounds,
    "`[[row]]`": Row,
    "`[[row.swap]]`": RowSwap,
}


def blocks(language: str) -> list[str]:
    """The examples of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def documented(heading: str) -> dict[str, str]:
    """The keys of a section's table, and what it says is their default."""
    (section,) = re.findall(rf"^### {re.escape(heading)}.*?\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE))


def default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "none" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Every table that a scenario can hold."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
    inner = [field.type for field in getattr(kind, "fields", ())]
    for one in (*inner, *getattr(kind, "types", ()), *filter(None, [getattr(kind, "item_type", None)])):
        yield from structs(one)


def test_every_table_has_its_section() -> None:
    assert {*SECTIONS.values(), Scenario} == set(structs(msgspec.inspect.type_info(Scenario)))


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_has_its_line_and_its_default(heading: str) -> None:
    kind = msgspec.inspect.type_info(SECTIONS[heading])
    assert isinstance(kind, msgspec.inspect.StructType)
    wanted = {field.encode_name: default(field) for field in kind.fields}
    if kind.tag_field is not None:
        wanted[kind.tag_field] = "required"
    assert documented(heading) == wanted


def test_every_kind_of_fault_is_named() -> None:
    (section,) = re.findall(r"^### `\[\[fault\]\]`.*?\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"^\| `([a-z-]+)`.*?\|", section, re.MULTILINE)) | set(re.findall(r"`([a-z-]+)`", section))
    assert {kind for one in (Process, Within, Link, Stranger, Shaping) for kind in get_args(one)} <= named


def test_every_kind_of_topology_is_named() -> None:
    (section,) = re.findall(r"^### `\[topology\]`.*?\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'^\| `"([a-z-]+)"` \|', section, re.MULTILINE)) == set(get_args(TopologyKind))


def test_every_kind_of_attack_is_named() -> None:
    (section,) = re.findall(r"^### `\[\[attack\]\]`.*?\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert set(get_args(AttackKind)) <= set(re.findall(r"`([a-z-]+)`", section))


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.split('"')[1])
def test_every_scenario_can_be_read(text: str) -> None:
    assert Scenario.from_toml(text).row


def test_the_first_scenario_is_the_one_that_was_run() -> None:
    first, *_ = (Scenario.from_toml(text) for text in blocks("toml"))
    assert all(f"    {line}\n" in PAGE for line in first.topology.draw().splitlines())
    assert [row.name for row in first.row] == re.findall(r"^    (\S+) +[\d.]+ +[\d.]+ ", PAGE, re.MULTILINE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", [0, 1])
def test_the_script_runs_and_learns(tmp_path: Path, row: int) -> None:
    """On stock DDP and on offbeat, as the page says: beside its scenario."""
    (text,) = (text for text in blocks("toml") if '"train.py"' in text)
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script)
    scenario = Scenario.from_toml(text)
    assert isinstance(scenario.workload, TrainingScript)
    (tmp_path / "runs").mkdir()
    places = launch.loopback_places([host.name for host in scenario.topology.hosts])
    done = runner.run_once(jobs(scenario, tmp_path)[row], places, tmp_path / "runs", 0, None)
    assert done.time_to(scenario.workload) is not None
    assert all(len(worker.step_s) == scenario.run.steps for worker in done.workers)
