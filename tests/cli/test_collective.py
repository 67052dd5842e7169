"""`offbeat collective`: what it shows, what it proves, and what it says of files and networks that are none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.collective import Algorithm, MultiTree, Op, PipelinedTrees
from offbeat.errors import PlanError, ScenarioError
from offbeat.fabric.discovery import MeasuredNetwork
from offbeat.fabric.path_planner import SIZES, predicted
from offbeat.topology import Topology
from offbeat.wire.lane import blocks_on

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["collective", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_what_a_ring_does_is_shown() -> None:
    shown = run("show", "Ring()", "--hosts", "3", "--rate-mbps", "800", "--size", "3e6")
    assert shown.startswith("Ring(): all-reduce among 3 ranks, 3 chunks, 12 operations in 4 steps; each sends 1.33 of")
    assert "chunk 0, 0 to 1/3 of the vector" in shown
    assert "at least 40 ms by any method, 40 ms if all is summed before it is gathered" in shown


def test_what_is_written_is_proved(tmp_path: Path) -> None:
    network, file = tmp_path / "torus.toml", tmp_path / "a.bin"
    network.write_text('topology = { kind = "torus", dims = [3, 3], rate_mbps = 100 }')
    shown = run("show", "MultiTree()", "--network", str(network), "--out", str(file))
    made = MultiTree().plan(Topology.torus(3, 3, rate_mbps=100))
    assert f"digest {made.digest}" in shown
    assert run("verify", str(file), "--network", str(network)).splitlines()[1:] == [
        f"digest {made.digest}",
        "It is right.",
    ]
    wrong = Algorithm(made.name, made.nodes, made.chunks, (*made.ops, Op("reduce", 0, 1, 0, 99)))
    file.write_bytes(wrong.to_bytes())
    with pytest.raises(PlanError, match=r"operation \d+, by which rank 1 adds to rank 0 chunk 0 in step 99, is wrong"):
        run("verify", str(file))


def test_prices_are_those_by_which_routed_chooses(tmp_path: Path) -> None:
    """Blocks of a 256th of the vector, which nothing sends, had `PipelinedTrees()` cost 0.64 of what it does here."""
    network = tmp_path / "mesh.toml"
    network.write_text('topology = { kind = "mesh", dims = [4, 4], rate_mbps = 1000 }')
    mesh = Topology.mesh(4, 4, rate_mbps=1000)
    measured = MeasuredNetwork(mesh, message_s=0.0, block_bytes=blocks_on(mesh))
    for method in (MultiTree(), PipelinedTrees()):
        shown = run("show", repr(method), "--network", str(network), "--size", str(SIZES[-1]))
        (took,) = re.findall(r"bytes take ([\d.]+) ms", shown)
        assert float(took) / 1e3 == pytest.approx(predicted(method.plan(mesh), measured, SIZES[-1]), rel=0.01)


def test_pictures(tmp_path: Path) -> None:
    run("show", "WaterFilling(1)", "--trees", str(tmp_path / "a.png"), "--time-line", str(tmp_path / "b.png"))
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"did you mean 'MultiTree'"):
        run("show", "MultiTre()")
    with pytest.raises(PlanError, match=r"Cannot read .*nothing: No such file"):
        run("verify", str(tmp_path / "nothing"))
    with pytest.raises(ScenarioError, match=r"Cannot read .*nothing"):
        run("show", "Ring()", "--network", str(tmp_path / "nothing"))
    (tmp_path / "bad.toml").write_text("topology = { kind = 'blob' }")
    with pytest.raises(ScenarioError, match="Cannot read the topology"):
        run("show", "Ring()", "--network", str(tmp_path / "bad.toml"))
