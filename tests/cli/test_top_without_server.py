"""`offbeat top` at jobs without a server: by the hub in rank 0's sentinel, and from there to a server and back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.cli import status_client as onlooker_module
from offbeat.cli.job_address import find_hub
from offbeat.cli.status_client import HubOnlooker, JobEnded, JobOnlooker
from offbeat.cli.top import top
from offbeat.diagnosis.hub import Hub
from offbeat.engine import leave_file
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.worker_status import TrainingStatus
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.messages import WorkerReport
from tests.cli.commands import offbeat, script, start
from tests.cli.test_top import Served, leave_address

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from offbeat.protocol.status import ModelStatus

TOKEN = b"t" * 32


class Watched:
    """A job of two workers, as far as its hub knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loop = folder, LoopThread()
        self.hub = Hub(token=TOKEN, world=2)
        self.address = self.loop.run(self.hub.serve("127.0.0.1"))
        leave_file(folder / "hub.json", {"address": self.address, "token": TOKEN.hex()})

    def step(self, step: int, phase: str = "computing") -> None:
        for rank in range(2):
            words = WorkerReport(rank=rank, host="a", phase=phase, step=step)
            said = TrainingStatus(
                host="a", step=step, exchanges=step, policy="BSP()", fabric="Elastic()", values={"loss": 0.5}
            )
            self.loop.call(self.hub.report, words, said)

    def hang_up(self) -> None:
        """Without a good-bye."""

        def cut() -> None:
            for stream in list(self.hub._onlookers):
                stream.close()
            self.hub._onlookers.clear()

        self.loop.call(cut)

    def end(self) -> None:
        self.loop.call(self.hub.close)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    made.step(7)
    yield made
    made.end()
    made.loop.run(asyncio.sleep(0.05))  # for what was closed to be gone
    made.loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.end()
    server.loop.close()


def test_one_look(job: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (job.folder, job.folder / "hub.json"):
        top(job=str(where))
        text = capsys.readouterr().out
        assert re.match(r"BSP\(\) on Elastic\(\)  7 steps \([\d.,]+/s in all\), running for", text), text
        assert re.search(r"\nloss 0\.5, 2 workers on 1 host\n", text)
        assert re.search(r"\n +1  computing for \d\.\d s +7 +0\.5 ", text)
    top(job=str(job.folder), once=True, json=True)
    (scene,) = msgspec.json.decode(capsys.readouterr().out)["scenes"]
    assert (scene["version"], [worker["made"] for worker in scene["workers"]]) == (7, [7, 7])
    assert TOKEN.hex() not in json.dumps(scene)


def test_looks_until_the_job_ends(job: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        for step in range(8, 12):
            job.step(step)
            time.sleep(0.15)
        job.end()

    stepping = threading.Timer(0.2, train)
    stepping.start()
    top(job=str(job.folder), interval=0.1, json=True)
    stepping.join()
    out, err = capsys.readouterr()
    made = [msgspec.json.decode(line)["scenes"][0]["version"] for line in out.splitlines()]
    assert made == sorted(made)
    assert made[-1] == 11
    assert re.fullmatch(r"The job has ended\. When last seen it had made 11 steps in .* s\.\n", err)


def test_a_hub_that_is_lost(job: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onlooker_module, "_DIAL", onlooker_module._DIAL / 10)
    with JobOnlooker(str(job.folder), {}) as looker:
        assert looker.look(10.0)
        job.hang_up()
        looker.rest(10.0)
        assert looker.look(10.0), "it comes again"
        job.hang_up()
        job.end()
        looker.rest(10.0)
        # Somebody else may listen at its port by now.
        with pytest.raises((NetworkError, PeerError), match=r"and nobody answers there any more|it is no hub"):
            looker.look(10.0)
        end = {"kind": "end", "rank": 0, "step": 9, "time_s": 1.0, "steps": 9, "error": None}
        (job.folder / "metrics.jsonl").write_text(json.dumps(end) + "\n")
        with pytest.raises(JobEnded):
            looker.look(10.0)


def test_who_may_not_look(job: Watched, tmp_path: Path) -> None:
    leave_file(tmp_path / "hub.json", {"address": job.address, "token": "00" * 32})
    with pytest.raises(PeerError, match=r"Cannot look at the job at 127.*it did not prove that it knows the token"):
        top(job=str(tmp_path))
    assert (tmp_path / "hub.json").stat().st_mode & 0o777 == 0o600, "the token is in it"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "here", "127.0.0.1:x", "127.0.0.1:99999999"])
def test_nobody_is_there(address: str, tmp_path: Path) -> None:
    leave_file(tmp_path / "hub.json", {"address": address, "token": TOKEN.hex()})
    with pytest.raises(NetworkError, match=r"Cannot reach the hub of the workers at .*ended: `offbeat report .*` says"):
        top(job=str(tmp_path))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"address": 3}', b"\xff", b'{"address": "a", "token": 3}'])
def test_a_damaged_hub_json(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "hub.json").write_bytes(text)
    with pytest.raises(NetworkError, match=r"Cannot read .*hub\.json: .* Look as the user who runs the job\."):
        top(job=str(tmp_path))


def test_an_address_and_a_folder_without_a_job_have_no_hub(tmp_path: Path) -> None:
    assert find_hub(str(tmp_path)) is None
    assert find_hub("127.0.0.1:7000") is None
    assert find_hub(str(tmp_path / "nothing")) is None


def where(looker: JobOnlooker) -> tuple[ModelStatus, ...]:
    scenes = looker.look(10.0)
    assert scenes is not None
    return scenes


def test_a_job_that_goes_over_to_a_server_and_back(
    job: Watched, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onlooker_module, "_TRY_S", 0.0)
    served.workers(2)
    with JobOnlooker(str(job.folder), {}) as looker:
        assert where(looker)[0].fabric == "Elastic()"
        leave_address(job.folder, served.address)
        assert where(looker)[0].policy == "SSP(bound=2)"
        (job.folder / "server.json").unlink()
        served.end()
        looker.rest(10.0)
        assert where(looker)[0].fabric == "Elastic()"
        job.end()
        looker.rest(10.0)
        with pytest.raises(JobEnded):
            looker.look(10.0)


def test_a_server_that_another_run_left_behind_is_passed_over(job: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.cli.job_address._DIAL", onlooker_module._DIAL / 10)
    leave_address(job.folder, "127.0.0.1:1")
    with JobOnlooker(str(job.folder), {}) as looker:
        assert where(looker)[0].fabric == "Elastic()"
        assert isinstance(looker._now, HubOnlooker)


def test_figures_for_others_need_certificates(job: Watched) -> None:
    with pytest.raises(NetworkError, match=r"on 0\.0\.0\.0 without certificates: anybody could read them\."):
        top(job=str(job.folder), prometheus=0, bind="0.0.0.0")


TRAIN = """
import time, torch, offbeat
from pathlib import Path
run = offbeat.init()
model = torch.nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
run.expect(steps=100000)
while not run.mean(float(Path("enough").exists())):
    loss = model(torch.ones(4, 1)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=0.25)
    if not run.rank:
        Path("step.new").write_text(str(run.step))
        Path("step.new").rename("step")
    time.sleep(0.01)
"""


@pytest.mark.timeout(120)
def test_a_real_job(tmp_path: Path) -> None:
    """Its workers say all this themselves; and a launched job is found by its folder, and left when it ends."""
    with start("run", "--workers", 2, "--run-dir", "job", script(tmp_path, TRAIN), folder=tmp_path) as process:
        try:
            deadline_s = time.monotonic() + 60
            seen: dict[str, Any] = {}
            while time.monotonic() < deadline_s and not all(
                one["status"] for one in seen.get("workers", [{"status": 0}])
            ):
                time.sleep(0.3)
                code, output = offbeat("top", "--job", "job", "--once", "--json", folder=tmp_path)
                (seen,) = json.loads(output)["scenes"] if code == 0 else ({},)
            before = int((tmp_path / "step").read_text())
            code, output = offbeat("top", "--job", "job", "--once", "--json", folder=tmp_path)
            after = int((tmp_path / "step").read_text())
        finally:
            (tmp_path / "enough").touch()
            process.communicate(timeout=60)
    (seen,) = json.loads(output)["scenes"]
    assert (seen["policy"], seen["fabric"], len(seen["workers"])) == ("BSP()", "ProcessGroup()", 2)
    step, status = seen["workers"][0]["made"], seen["workers"][0]["status"]
    assert before - 30 <= step <= after + 1, "a look is at most as old as the sentinel's last"
    assert (status["values"], status["total_steps"], status["host"]) == ({"loss": 0.25}, 100000, os.uname().nodename)
    code, output = offbeat("top", "--job", "job", folder=tmp_path)
    assert code == 2
    assert "has probably ended: `offbeat report job` says how" in " ".join(output.split())
