"""`offbeat swap`, as an operator runs it beside a job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from offbeat.exit_codes import how_it_ended
from tests.cli.commands import offbeat, script, start

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

TRAIN = """
import time, torch, offbeat
from pathlib import Path
run = offbeat.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
while run.mean(float(Path("enough").exists())) == 0:  # all see it in the same step
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
print(f"went by {run.plan.sync!r}")
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = script(tmp_path, TRAIN)
    arguments = ("run", "--workers", 2, "--run-dir", "runs", "--fabric", "ParameterServer()", path)
    with start(*arguments, folder=tmp_path) as process:
        deadline_s = time.monotonic() + 40
        while not list(tmp_path.glob("runs/**/server.json")) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        yield process
        (tmp_path / "enough").touch()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def trains_alone(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job without a server, whose run folder is `job`."""
    path = script(tmp_path, TRAIN)
    with start("run", "--workers", 2, "--run-dir", "job", path, folder=tmp_path) as process:
        deadline_s = time.monotonic() + 40
        while not (tmp_path / "job" / "metrics.jsonl").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        yield process


def test_who_asks_before_a_job_trains_is_told_to_ask_again(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "plan.toml").write_text("")
    ended, output = offbeat("swap", "LocalSGD(3)", "--job", "job", folder=tmp_path)
    assert ended == 2
    assert "it has not reached run.prepare yet: ask again when it trains" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_without_a_server_is_asked_through_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with trains_alone(tmp_path) as process:
        for policy, code, says in (
            ("LocalSGD(3)", 0, "LocalSGD(every=3) decides when workers may go on, not BSP() any more"),
            ("LocalSGD(3)", 0, "The plan stays as it is: LocalSGD(every=3)."),
            ("SSP(4)", 2, "Cannot use SSP(bound=4) on ProcessGroup()"),
            ("BSP()", 0, "BSP() decides when workers may go on, not LocalSGD(every=3) any more"),
        ):
            ended, output = offbeat("swap", policy, "--job", folder, folder=tmp_path)
            assert (ended, says in " ".join(output.split())) == (code, True), output
        (folder / "wish.json").write_text("nonsense")
        deadline_s = time.monotonic() + 10
        while (folder / "wish.json").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 0, output
    assert output.count("went by BSP()") == 2
    assert "Cannot understand the request in" in " ".join(output.split())
    code, output = offbeat("swap", "BSP()", "--job", folder, folder=tmp_path)
    assert (code, "it has ended." in output, (folder / "wish.json").exists()) == (2, True, False), output


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_goes_over_to_a_server_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with trains_alone(tmp_path) as process:
        code, output = offbeat("swap", "SSP(4)", "--fabric", "ParameterServer()", "--job", folder, folder=tmp_path)
        assert (code, "SSP(bound=4) decides when workers may go on" in " ".join(output.split())) == (0, True), output
        code, output = offbeat("top", "--job", folder, "--once", "--json", folder=tmp_path)
        (scene,) = json.loads(output)["scenes"]
        assert 'kind = "ParameterServer"' in scene["plan"], "who joins begins with it"
        code, output = offbeat("top", "--job", folder, "--once", folder=tmp_path)
        assert "SSP(bound=4)" in output
        code, output = offbeat("swap", "BSP()", "--fabric", "ProcessGroup()", "--job", folder, folder=tmp_path)
        assert (code, "may go on from the next loop over data that all begin" in " ".join(output.split())) == (
            0,
            True,
        ), output
        deadline_s = time.monotonic() + 40
        while (folder / "server.json").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        code, output = offbeat("swap", "LocalSGD(2)", "--job", folder, folder=tmp_path)
        assert (code, "LocalSGD(every=2" in output) == (0, True), output
        code, output = offbeat("swap", "BSP()", "--job", folder, folder=tmp_path)
        assert code == 0, output
        process.send_signal(signal.SIGTERM)  # without a server not all would see the file behind the same step
        process.communicate(timeout=40)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_operator_swaps_and_is_refused(tmp_path: Path, job: subprocess.Popen[str]) -> None:
    (place,) = tmp_path.glob("runs/**/server.json")
    folder = place.parent
    for _ in range(100):  # until training has begun
        code, output = offbeat("swap", "SSP(4)", "--job", folder, folder=tmp_path)
        if code == 0:
            break
        assert "training has not begun" in " ".join(output.split()), output
        time.sleep(0.2)
    assert "SSP(bound=4) decides when workers may go on, not BSP() any more" in " ".join(output.split())
    for policy, says in (
        ("SSP(4)", "The plan stays as it is"),
        ("KSync(9)", "Cannot make updates of 9 contributions with 2 workers"),
        ("SPS(4)", "did you mean 'SSP'"),
    ):
        code, output = offbeat("swap", policy, "--job", folder, folder=tmp_path)
        assert code == (0 if "stays" in says else 2), output
        assert says in " ".join(output.split())
        assert "Traceback" not in output
    code, output = offbeat("swap", "ASP", "--job", folder, "--job-name", "another", folder=tmp_path)
    assert code == 2
    assert "Traceback" not in output
    code, output = offbeat("top", "--job", folder, "--once", folder=tmp_path)
    assert "SSP(bound=4)" in output
    (tmp_path / "enough").touch()
    output, _ = job.communicate(timeout=40)
    assert job.returncode == 0, (how_it_ended(job.returncode), output)
    assert output.count("went by SSP(bound=4)") == 2
    assert "SSP(bound=4) decides" in (folder / "metrics.jsonl").read_text()
    assert os.path.exists(folder)
