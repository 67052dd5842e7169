"""Imports go strictly down the tiers, and no room of tier 1 imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import offbeat

ROOT = Path(offbeat.__file__).parent
TIERS = {
    "errors": -1,
    "sealed": -1,
    "toml_text": 0,
    "clock": 0,
    "exits": 0,
    "topology": 0,
    "layout": 0,
    "payload": 0,
    "fault": 0,
    "rng": 0,
    "sync": 1,
    "codec": 1,
    "pacing": 1,
    "control": 1.5,
    "history": 1.5,
    "wire": 2,
    "fabric": 2.5,
    "plan": 3,
    "scenario": 3,
    "audit": 3.1,
    "luck": 3.1,
    "profiles": 3.1,
    "engine": 4,
    "sim": 4,
    "serve": 3.5,
    "course": 4.5,
    "loader": 6,
    "leased": 6.1,
    "replica": 6,
    "rendezvous": 6,
    "trainable": 6.2,
    "data": 6.3,
    "exchanging": 6.3,
    "crossing": 6.4,
    "membership": 6.4,
    "swapping": 6.45,
    "run": 6.5,
    "checkpoints": 6.6,
    "report": 7,
    "lab": 7,
    "cli": 7.5,
    "__main__": 7.6,
    "testing": 9,
    "": 10,
}
# `wire` starts in a few milliseconds beside every worker, the command line answers at once: neither may load torch.
LIGHT = ("wire", "report", "cli")
NOT_A_ROOM = {"utils", "common", "helpers", "base", "core", "misc"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """Rooms of offbeat that a file imports anywhere in it, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full"
            names = [
                f"{node.module}.{alias.name}" if node.module == "offbeat" else node.module or "" for alias in node.names
            ]
        for name in names:
            if name == "offbeat" or name.startswith("offbeat."):
                room = name.split(".")[1] if "." in name else ""
                found.append((room if room in TIERS else "", node.lineno))  # type: ignore[attr-defined]
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here = module_of(path)
    assert here in TIERS, f"{here} has no tier: give it one here and in the design"
    for room, line in imports(path):
        if room in (here, ""):
            continue  # "" is the version and the public names, which are loaded lazily
        assert TIERS[room] < TIERS[here], f"{path}:{line}: {here} (tier {TIERS[here]}) imports {room} ({TIERS[room]})"


def test_no_drawer_for_odds_and_ends() -> None:
    names = {p.stem for p in FILES} | {p.name for p in ROOT.rglob("*") if p.is_dir()}
    assert not names & NOT_A_ROOM


def test_an_upward_edge_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from offbeat.engine import Reducer\n    import offbeat.cli.run\n")
    assert imports(file) == [("engine", 2), ("cli", 3)]
