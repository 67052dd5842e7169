"""docs/choosing.md: every plan on it works, and every figure is what the result file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

import offbeat
from benchmarks.claims import COST, MEASURES
from benchmarks.page import RESULTS
from offbeat.errors import PlanError
from offbeat.fabric import BindContext, ElasticGroup
from offbeat.fabric.staging import StagedFabric
from offbeat.lab import results
from offbeat.plan import Plan

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "choosing.md").read_text()
PLANS = sorted(set(re.findall(r"`(Plan\(.*?\))`", PAGE)))
LINK = r"\(\[(?P<scenario>\w+)\]\(\.\./benchmarks/results/README\.md#(?P=scenario)\)\)"
RATIO = re.compile(
    r"(?P<measure>time per step|time to target|throughput) of `(?P<row>[^`]+)` (?P<value>[\d.]+) x "
    rf"`(?P<against>[^`]+)`'s\s+{LINK}"
)
WAITED = re.compile(rf"the others waited (?P<value>[\d.]+) s at most with `(?P<row>[^`]+)` {LINK}")


@pytest.mark.parametrize("text", PLANS)
def test_every_plan_works(text: str) -> None:
    plan = eval(text, {name: getattr(offbeat, name) for name in offbeat.__all__})
    assert Plan.from_toml(plan.to_toml()) == plan
    plan.check_world(8)


def test_every_figure_is_that_of_the_file() -> None:
    for pattern in (RATIO, WAITED):
        for found in pattern.finditer(PAGE):
            report = results.read(RESULTS / f"{found['scenario']}.json")
            measure, against = (COST, "") if pattern is WAITED else (found["measure"], found["against"])
            value = MEASURES[measure](report, found["row"], against)
            assert f"{value:.2f}" == found["value"], found[0]
    figures = re.findall(r"\d\.\d+ (?:x|s) ", PAGE)
    assert len(figures) == len(RATIO.findall(PAGE)) + len(WAITED.findall(PAGE)) >= 15, "no figure stands by itself"


def test_all_policies_and_fabrics_are_there() -> None:
    for name in ("BSP", "LocalSGD", "SSP", "RoundRobin", "Hybrid", "ASP", "ProcessGroup", "Elastic", "ParameterServer"):
        assert f"{name}(" in PAGE
    assert len(PLANS) >= 10


@pytest.mark.parametrize("word", ["spot", "preempt", "Wi-Fi"])
def test_what_people_look_for_has_a_row(word: str) -> None:
    assert re.search(rf"^\| [^|]*{word}[^|]* \| `Plan\(", PAGE, re.MULTILINE)


# -- what its table says of models on GPUs, against the code; no GPU is needed for that ---------------------------

FABRICS = PAGE[PAGE.index("| fabric | policies |") :]
GPUS = dict(re.findall(r"^\| `(\w+)\(.*?\)`[^|]*\|[^|]*\|[^|]*\| ([^|]*) \|", FABRICS, re.MULTILINE))


def on_gpu(fabric: offbeat.Elastic | offbeat.Switch, tmp_path: Path) -> object:
    """The links that a fabric makes for a worker whose model is on a GPU."""
    group = ElasticGroup(FileStore(str(tmp_path / "store"), 1), 0, 1)
    return fabric.bind(BindContext(0, 1, backend="nccl", group=group))


def test_elastic_takes_models_on_gpus_over_routed_alone(tmp_path: Path) -> None:
    assert GPUS["Elastic"] == "no; `Elastic(over=Routed())` by way of the host's memory"
    with pytest.raises(PlanError, match=r"Elastic\(over=Routed\(\)\)"):
        on_gpu(offbeat.Elastic(), tmp_path)
    assert isinstance(on_gpu(offbeat.Elastic(over=offbeat.Routed()), tmp_path), StagedFabric)
    for page in ("README.md", "docs/synchronization.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert re.search(r"is for models on CPUs; (on GPUs take )?`Elastic\(over=Routed\(\)\)`", text)


def test_a_switch_takes_models_on_gpus_where_it_sums_for_all(tmp_path: Path) -> None:
    assert GPUS["Switch"] == "by way of the host's memory with `BSP` and `LocalSGD`; no with the others"
    assert isinstance(on_gpu(offbeat.Switch("memory://"), tmp_path), StagedFabric)
    assert "are for models on CPUs only" in (ROOT / "docs" / "switch.md").read_text()
