"""Other versions of Python than the one that runs the tests: those that are declared, where an interpreter is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
VERSIONS = [found[1] for one in CLASSIFIERS if (found := re.search(r"Python :: (3\.\d+)$", one))]

# Compiles every source, with warnings (such as of a bad escape) as errors.
COMPILE = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
paths = [path for room in ("offbeat", "tests", "examples", "benchmarks") for path in Path(room).rglob("*.py")]
for path in paths:
    compile(path.read_text(), str(path), "exec")
print(len(paths))
"""
# Loads what needs nothing but the standard library: a change of that would show.
LOAD = """
import importlib, warnings
warnings.simplefilter("error")
for name in ("errors", "clock", "float_sum", "exit_codes", "sync", "lab.netns_exec"):
    importlib.import_module(f"offbeat.{name}")
from offbeat.sync import BSP, SSP, Hybrid
print(Hybrid(BSP(), SSP(bound=2), groups=4), dir(importlib.import_module("offbeat"))[0])
"""


@pytest.fixture(params=VERSIONS)
def interpreter(request: pytest.FixtureRequest) -> Iterator[str]:
    """An interpreter of a declared version: on the path, or one of pyenv's."""
    places = [shutil.which(f"python{request.param}")]
    places += map(str, sorted(Path.home().glob(f".pyenv/versions/{request.param}.*/bin/python")))
    for place in filter(None, places):
        asked = subprocess.run(
            [place, "-I", "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.stdout.strip() == request.param:
            yield place
            return
    pytest.skip(f"there is no Python {request.param} here")


def run(interpreter: str, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [interpreter, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_source_compiles(interpreter: str) -> None:
    assert int(run(interpreter, COMPILE)) > 300


def test_what_needs_no_other_package_loads(interpreter: str) -> None:
    assert run(interpreter, LOAD).startswith("Hybrid(inner=BSP(), outer=SSP(bound=2), groups=4) ASP")


def test_this_version_is_declared() -> None:
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in VERSIONS
    assert VERSIONS == ["3.11", "3.12", "3.13"]
    assert "Operating System :: POSIX :: Linux" in CLASSIFIERS


@pytest.mark.parametrize("wrong", ["/no/such/python", "false"])
def test_make_says_which_versions_do(tmp_path: Path, wrong: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", f"PYTHON={wrong}", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "offbeat needs Python 3.11, 3.12 or 3.13: install one" in done.stdout
    assert not (tmp_path / ".venv").exists()
