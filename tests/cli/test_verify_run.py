"""`offbeat verify-run`: one screen about a run that was recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.errors import HistoryError
from offbeat.history import HistoryWriter
from offbeat.robust import Krum
from offbeat.sync import BSP, SSP
from tests.audit.recorded_runs import Recorded, rewrite
from tests.audit.test_verify import apply_twice, other_hash
from tests.cli.commands import TRAIN, offbeat, script, start
from tests.patience import soon

if TYPE_CHECKING:
    from pathlib import Path


def verify_run(*arguments: object) -> tuple[int, str]:
    """Exit code and output, without a process."""
    result = CliRunner().invoke(app, ["verify-run", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_one_screen(tmp_path: Path) -> None:
    job = Recorded(SSP(1), tmp_path, leaves={})
    code, output = verify_run(tmp_path)
    assert code == 0, output
    assert "4 files, 1 job, 1 life of a server" in output
    assert "law 2  each contribution once   holds         24 applied, 0 dropped, 0 lost (0 samples)" in output
    assert "24 releases, at most 1 ahead of 1 allowed" in output
    assert "law 5  the same again           not checked" in output
    code, output = verify_run(tmp_path, "--json")
    found = json.loads(output)
    assert (code, found["holds"], found["applied"], found["violations"]) == (0, True, 24, [])
    rewrite(job.coordinator, apply_twice)
    code, output = verify_run(tmp_path)
    assert code == 1
    assert "law 2  each contribution once   BROKEN" in output
    assert "\nlaw 2: " in output
    assert " s  Ready(worker=" in output, "the story"
    code, output = verify_run(tmp_path, "--json")
    assert (code, json.loads(output)["violations"][0]["law"]) == (1, 2)


def test_a_run_without_a_step_proves_nothing(tmp_path: Path) -> None:
    HistoryWriter(tmp_path, "worker-0", kind="worker", job="j").close()
    code, output = verify_run(tmp_path)
    assert code == 1
    assert "\nNothing was checked: no worker has made a step.\n" in output


def test_who_was_rejected(tmp_path: Path) -> None:
    Recorded(BSP(), tmp_path, leaves={}, rule=Krum(0))
    code, output = verify_run(tmp_path)
    assert code == 0, output
    rows = [line.split() for line in output[output.index("rank  judged  rejected") :].splitlines()]
    assert rows[0] == ["rank", "judged", "rejected"]
    assert [row[:2] for row in rows[1:4]] == [["0", "8"], ["1", "8"], ["2", "8"]]
    assert sum(int(row[2]) for row in rows[1:4]) == 16
    assert "8 applied, 0 dropped" in output
    code, output = verify_run(tmp_path, "--json")
    assert set(json.loads(output)["by_rank"]) == {"0", "1", "2"}


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="there is no such file or folder"):
        verify_run(tmp_path / "nothing")
    Recorded(SSP(1), tmp_path, leaves={})
    with pytest.raises(HistoryError, match="Cannot compare 2 runs with"):
        verify_run(tmp_path, tmp_path / "worker-0.log", "--against", tmp_path)


def test_a_run_that_was_recorded(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    code, output = offbeat("run", "--workers", 2, "--history", "--run-dir", "one", path, folder=tmp_path)
    assert code == 0, output
    code, output = verify_run(tmp_path / "one")
    assert code == 0, output
    assert "law 1  equal parameters         holds         8 of 8 hashes" in output
    rewrite(tmp_path / "one" / "history" / "worker-1.log", other_hash)
    code, output = verify_run(tmp_path / "one")
    assert code == 1
    assert "After step 3, rank " in output
    assert " has other parameters" in output
    log = tmp_path / "one" / "history" / "worker-0.log"
    data = bytearray(log.read_bytes())
    data[70] ^= 1
    log.write_bytes(data)
    with pytest.raises(HistoryError, match="The file was damaged after it was written"):
        verify_run(tmp_path / "one")


JOINED = """
import time, torch, offbeat
from pathlib import Path
run = offbeat.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
while not Path("enough").exists():
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    Path(f"trains{run.rank}").touch()
run.settle()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_that_join_are_in_it(tmp_path: Path) -> None:
    path = script(tmp_path, JOINED)
    plan = ("--sync", "SSP(4)", "--fabric", "ParameterServer()")
    with start("run", "--history", "--run-dir", "job", *plan, path, folder=tmp_path) as job:
        assert soon(lambda: (tmp_path / "trains1").exists(), 60)
        arguments = ("run", "--join", "job", "--history", "--run-dir", "more", "--workers", 1, path)
        with start(*arguments, folder=tmp_path) as more:
            assert soon(lambda: (tmp_path / "trains2").exists(), 60)
            (tmp_path / "enough").touch()
            more.communicate(timeout=60)
        output, _ = job.communicate(timeout=60)
        assert job.returncode == more.returncode == 0, output
    assert soon(lambda: verify_run(tmp_path / "job")[0] == 0)
    code, output = verify_run(tmp_path / "job", tmp_path / "more", "--json")
    found = json.loads(output)
    assert (code, found["files"], found["jobs"]) == (0, 4, 1), output
    assert found["compared"] >= 3, "after `settle` all have the same"
    assert found["lead"] <= found["bound"] == 4
