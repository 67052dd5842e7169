"""examples/notebook.ipynb: its cells run from top to bottom, as Jupyter would run them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import clean_environment

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def execute(cell: str, variables: dict[str, Any]) -> str:
    """What a cell prints; `%%writefile` and `!command` do what they do in Jupyter."""
    if cell.startswith("%%writefile "):
        name, _, text = cell.removeprefix("%%writefile ").partition("\n")
        Path(name).write_text(text)
        return ""
    out = io.StringIO()
    shell = re.compile(r"^!(.*)$", re.MULTILINE)
    with contextlib.redirect_stdout(out):
        exec(compile(shell.sub(lambda found: f"_shell(f{found[1]!r})", cell), "notebook", "exec"), variables)
    return out.getvalue()


def _shell(command: str) -> None:
    done = subprocess.run(
        command, shell=True, check=False, capture_output=True, text=True, timeout=100, env=clean_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    for folder in ("scenarios", "results"):
        shutil.copytree(ROOT / "benchmarks" / folder, tmp_path / "benchmarks" / folder)
    monkeypatch.chdir(examples)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    variables: dict[str, Any] = {"_shell": _shell}
    alone, _, several, metrics, plans, simulated, measured = (execute(cell, variables) for cell in CELLS)
    assert "rank 0 of 1: 16 steps" in alone
    assert "rank 0 of 2: 8 steps" in several
    assert "rank 1 of 2: 8 steps" in several
    assert metrics.count(" at first, ") == 2
    assert 'kind = "SSP"' in plans
    assert "Cannot use ASP() on ProcessGroup()" in plans
    assert "round-robin" in simulated
    assert "ssp(8)" in measured
    assert execute(CELLS[0], variables) == alone, "a cell can be run again"


def test_it_is_a_notebook_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])
