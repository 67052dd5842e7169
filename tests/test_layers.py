"""The architecture as imports have it: they go strictly down, and each file has a line in its room's docstring."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat

ROOT = Path(offbeat.__file__).parent
# Each line imports from those below it alone; what stands in one line does not import each other. The files at the
# root that are not named are nouns: they import each other alone.
LINES = [
    {"__main__"},
    {"testing"},
    {"cli"},
    {"lab", "integrations"},
    {"report", "audit", "c10d"},
    {"groups"},
    {"run"},
    {"loading", "sim"},
    {"engine"},
    {"scenario"},
    {"plan"},
    {"fabric"},
    {"server", "objects"},
    {"switch"},
    {"diagnosis"},
    {"wire"},
    {"coordinator"},
    {"control"},
    {"history"},
    {"protocol"},
    {"sync", "codec", "collective", "robust", "privacy", "batching", "scheduling"},
]
LEVELS = {room: level for level, line in enumerate(reversed(LINES), 1) for room in line}
NOUNS = {
    "attack_spec",
    "backoff",
    "clock",
    "contribution_hooks",
    "errors",
    "exit_codes",
    "fault_spec",
    "float_sum",
    "layout",
    "model_profiles",
    "number_range",
    "payload",
    "pending",
    "rng",
    "routing",
    "safe_read",
    "safe_write",
    "short_name",
    "straggler_model",
    "tensors",
    "timeline",
    "toml_reader",
    "topology",
    "topology_drawing",
    "topology_spec",
    "version",
}
# `wire` and `diagnosis` start in a few milliseconds beside every worker, the command line answers at once: neither may
# load torch.
NOT_A_ROOM = {"utils", "common", "helpers", "base", "core", "misc"}
FILES = sorted(ROOT.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES if path.parent != ROOT})


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """Rooms of offbeat that a file imports anywhere in it, for its types alone as well, with the line."""
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
                found.append((name.split(".")[1] if "." in name else "", node.lineno))  # type: ignore[attr-defined]  # noqa: PERF401
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here = room_of(path)
    if not here:
        return  # the public names, loaded when they are first used
    assert here in NOUNS or here in LEVELS, f"{here} has no level: give it one here and in the design"
    for room, line in imports(path):
        if room == here:
            continue
        assert room, f"{path}:{line}: import the name from the room that defines it, not from offbeat itself"
        assert LEVELS.get(room, 0) < LEVELS.get(here, 0) or {room, here} <= NOUNS, (
            f"{path}:{line}: {here} imports {room}"
        )


def test_no_drawer_for_odds_and_ends() -> None:
    names = {p.stem for p in FILES} | {p.name for p in ROOT.rglob("*") if p.is_dir()}
    assert not names & NOT_A_ROOM


@pytest.mark.parametrize("room", [ROOT, *ROOMS], ids=lambda p: str(p.relative_to(ROOT.parent)))
def test_every_file_of_a_room_is_listed(room: Path) -> None:
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = [p.stem for p in room.glob("*.py") if p.name != "__init__.py"]
    files += [p.name for p in room.iterdir() if (p / "__init__.py").exists()]
    assert not [name for name in sorted(files) if f"`{name}`" not in told]


def test_an_upward_edge_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from offbeat.engine import Reducer\n    import offbeat.cli.run\n")
    assert imports(file) == [("engine", 2), ("cli", 3)]


def test_circles_within_a_room_would_be_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            for one in edges.get(todo.pop(), set()) - found:
                found.add(one)
                todo.append(one)
        return found

    reach = {one: reached(one) for one in edges}
    groups = {frozenset({one} | {other for other in reach[one] if one in reach.get(other, set())}) for one in edges}
    return [set(group) for group in groups if len(group) > 1]


def test_no_circles() -> None:
    """Also not for types alone."""

    def name(path: Path) -> str:
        parts = ("offbeat", *path.relative_to(ROOT).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    modules = {name(path) for path in FILES}
    edges: dict[str, set[str]] = {}
    for path in FILES:
        if path.name == "__init__.py":
            continue
        here = edges.setdefault(name(path), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    here.add(full if full in modules else node.module)
            elif isinstance(node, ast.Import):
                here.update(alias.name for alias in node.names)
    assert not circles(edges)


def test_what_has_to_start_at_once_loads_no_torch() -> None:
    """A sentinel starts beside every worker, and the command line answers at once."""
    light = (
        "cli.app",
        "coordinator.coordinator",
        "diagnosis.sentinel",
        "protocol.messages",
        "report",
        "server.launch",
        "switch.serve",
    )
    program = "".join(f"import offbeat.{name}\n" for name in light) + "import sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_class_name_occurs_once() -> None:
    """A reader who searches for a name finds one thing; `State` is what each codec and policy calls its own."""
    where: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != "State":
                where.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


# Read where a process begins: by a run, by a client of objects, and by the edges, which start it. `settings_from` is
# handed the variables.
READS_THE_ENVIRONMENT = {
    "run/environment.py",
    "server/launch.py",
    "objects/local_store.py",
    "attack_spec.py",
    "fault_spec.py",
}
EDGES = {"cli", "lab", "testing"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if room_of(path) in EDGES or str(path.relative_to(ROOT)) in READS_THE_ENVIRONMENT:
        return
    names = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [name for name in names if isinstance(name, str) and re.fullmatch("OFFBEAT_[A-Z_]+", name)]
