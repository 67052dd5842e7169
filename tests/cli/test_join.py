"""`offbeat run --join`: workers that come to a job while it trains."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from offbeat.cli.job_address import JobAddress
from offbeat.cli.join_target import look_for
from offbeat.cli.operator_client import ask_coordinator
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.rank_reservation import RanksReserved, ReserveRanks
from offbeat.server.launch import ShardSettings, start_shard
from tests.cli.commands import offbeat, script, start
from tests.cli.test_top import JOB, SECRET, Served, step_all
from tests.patience import soon

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

# Goes on until it is told that it is enough, over data of which each sample says that it was computed.
TRAIN = """
import time, torch, offbeat
from pathlib import Path
run = offbeat.init()
torch.manual_seed(run.rank)
model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.arange(4000, dtype=torch.float32).unsqueeze(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
first = model.module.weight.item()
steps, seen = 0, []
for epoch in range(1000):
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        seen += [(epoch, int(i)) for i in x.flatten()]
        time.sleep(0.005)
        if Path("enough").exists():
            break
    else:
        continue
    break
mean = run.mean(1.0)
run.settle()
print(f"RESULT {run.rank} {steps} {mean} {model.module.weight.item():.9f}")
"""


# Comes to its job when that is over.
LATE = """
import time
from pathlib import Path
Path("waits").touch()
while not Path("over").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = script(tmp_path, TRAIN)
    plan = ("--sync", "SSP(4)", "--fabric", "ParameterServer()")
    with start("run", "--workers", 2, "--run-dir", "job", *plan, path, folder=tmp_path) as process:
        assert soon((tmp_path / "job/server.json").exists)
        yield process
        (tmp_path / "enough").touch()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


def present(folder: Path) -> dict[int, int]:
    """Contributions of each worker that takes part."""
    code, output = offbeat("top", "--job", "job", "--once", "--json", folder=folder)
    if code:
        return {}
    if not (scenes := json.loads(output)["scenes"]):
        return {}  # the server is up, and no worker has come yet
    (scene,) = scenes
    return {one["worker"]: one["applied"] for one in scene["workers"] if one["phase"] != "gone" and scene["started"]}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_join_and_train_with_the_others(
    tmp_path: Path, job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert soon(lambda: len(present(tmp_path)) == 2)
    # Two others look for it at the same moment, and have not come to the server yet: one has its folder, one does not.
    about = json.loads((tmp_path / "job/server.json").read_text())
    monkeypatch.setenv("OFFBEAT_TOKEN", about["token"])
    monkeypatch.setenv("OFFBEAT_JOB", about["job"])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(look_for, [str(tmp_path / "job"), about["address"]], [1, 1]))
    assert {one.first_rank for one in found} == {2, 3}
    monkeypatch.undo()
    joiner = ("run", "--join", "job", "--workers", 2, "--run-dir", "joined", tmp_path / "train.py")
    with start(*joiner, folder=tmp_path) as newcomers:
        assert soon(lambda: set(present(tmp_path)) == {0, 1, 4, 5} and min(present(tmp_path).values()) > 10)
        (tmp_path / "enough").touch()
        theirs, _ = newcomers.communicate(timeout=60)
    ours, _ = job.communicate(timeout=60)
    assert (job.returncode, newcomers.returncode) == (0, 0), ours + theirs
    assert re.search(
        r"^Reached the job: SSP\(bound=4\), 2 workers train, [\d,]+ updates so far\. Starting", theirs, re.M
    )
    assert "Starting rank 4, 5, which join it." in theirs
    assert re.search(r"^\[4\] Rank 4 has joined at version \d+\.$", theirs, re.M)
    results = [line.partition("RESULT ")[2].split() for line in (ours + theirs).splitlines() if "RESULT" in line]
    assert sorted(int(rank) for rank, *_ in results) == [0, 1, 4, 5]
    assert {mean for _, _, mean, _ in results} == {"1.0"}, "all answer the same question"
    assert len({weight for *_, weight in results}) == 1, "all end with the same parameters"
    # A third one finds nobody any more.
    code, output = offbeat("run", "--join", "job", tmp_path / "train.py", folder=tmp_path)
    assert code == 2
    assert "Cannot join the job in job: it has ended. `offbeat report job` says how." in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_comes_when_the_job_has_just_ended_is_told_at_once(tmp_path: Path, job: subprocess.Popen[str]) -> None:
    assert soon(lambda: len(present(tmp_path)) == 2)
    (tmp_path / "late.py").write_text(LATE + TRAIN)
    with start("run", "--join", "job", "--workers", 1, "--run-dir", "late", "late.py", folder=tmp_path) as newcomer:
        assert soon((tmp_path / "waits").exists)
        (tmp_path / "enough").touch()
        job.communicate(timeout=60)
        (tmp_path / "over").touch()
        output, _ = newcomer.communicate(timeout=60)
    assert newcomer.returncode == 76
    assert "Cannot join: the job has ended. Start it again." in output
    took_s = time.time() - (tmp_path / "over").stat().st_mtime
    assert took_s < 15, "it is not dialled for 20 s"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_would_load_a_checkpoint_as_it_joins_is_refused(tmp_path: Path, job: subprocess.Popen[str]) -> None:
    assert soon(lambda: len(present(tmp_path)) == 2)
    loads = TRAIN.replace("steps, seen", "run.load_state_dict(run.state_dict())\nsteps, seen")
    (tmp_path / "loads.py").write_text(loads)
    code, output = offbeat("run", "--join", "job", "--workers", 1, "--run-dir", "loads", "loads.py", folder=tmp_path)
    assert code == 2, output
    assert "Cannot load a checkpoint as rank 2: this worker has just joined" in output
    before = present(tmp_path)[0]
    assert soon(lambda: present(tmp_path)[0] > before), "the others go on"


# Without a server: what each step used is written down behind it.
TOGETHER = """
import json, os, time, torch, offbeat
from pathlib import Path
run = offbeat.init()
torch.manual_seed(run.rank)
model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.arange(12000, dtype=torch.float32).unsqueeze(1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
Path(f"pid-{run.rank}").write_text(str(os.getpid()))
used = open(f"used-{run.rank}", "a", buffering=1)
while run.progress < 1:
    for (x,) in loader:
        if not Path("enough").exists():
            time.sleep(0.04)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.has_data:
            used.write(json.dumps(x.flatten().int().tolist()) + "\\n")
print(f"RESULT {run.rank} {run.step} {run.mean(1.0)} {model.module.weight.item():.9f}")
"""


def used_by(folder: Path, rank: int) -> list[int]:
    return [i for line in (folder / f"used-{rank}").read_text().splitlines() for i in json.loads(line)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_join_without_a_server_and_one_that_is_told_to_end_loses_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, TOGETHER)
    with start("run", "--workers", 3, "--run-dir", "job", "--fabric", "Elastic()", path, folder=tmp_path) as process:
        assert soon((tmp_path / "job/store.json").exists)
        joiner = ("run", "--join", "job", "--workers", 2, "--run-dir", "joined", path)
        with start(*joiner, folder=tmp_path) as newcomers:
            assert soon(lambda: all((tmp_path / f"used-{rank}").exists() for rank in range(5)))
            os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
            assert soon(
                lambda: (
                    "Rank 1 was asked to leave, and left cleanly behind its step"
                    in (tmp_path / "job/metrics.jsonl").read_text()
                )
            )
            (tmp_path / "enough").touch()
            theirs, _ = newcomers.communicate(timeout=60)
        ours, _ = process.communicate(timeout=60)
    assert (process.returncode, newcomers.returncode) == (0, 0), ours + theirs
    told = [line.removeprefix("[3] ") for line in theirs.splitlines()]
    for begins in (
        "Reached the job: Elastic(), begun with 3 workers. Starting rank 3, 4, which join it.",
        "Rank 3 has reached the job, and prepares what its workers have.",
        "Rank 3 is ready, and waits to be admitted behind one of their steps.",
        "Rank 3, 4 have joined at step ",
        "Rank 1 was asked to leave, and left cleanly behind its step ",
    ):
        assert sum(line.startswith(begins) for line in told) == 1, theirs
    assert sorted(i for rank in range(5) for i in used_by(tmp_path, rank)) == list(range(12000))
    results = [line.partition("RESULT ")[2].split() for line in (ours + theirs).splitlines() if "RESULT" in line]
    assert sorted(int(rank) for rank, *_ in results) == [0, 2, 3, 4]
    assert len({tuple(rest) for _, *rest in results}) == 1, "all end alike"
    code, output = offbeat("run", "--join", "job", path, folder=tmp_path)
    assert code != 0
    assert "Cannot join: the job has ended" in " ".join(output.split())


def test_however_many_ask_a_server_at_once_each_gets_ranks_of_its_own() -> None:
    server = Served()
    try:
        step_all(server.workers(2), 1)
        target = JobAddress(address=server.address, job=JOB, token=SECRET)

        def reserve(count: int) -> range:
            words = {"ended": "it has ended", "silent": "it is silent"}
            asked = ask_coordinator(target, ReserveRanks(count), RanksReserved, patience_s=10, **words)
            first = asyncio.run(asked).first
            return range(first, first + count)

        with ThreadPoolExecutor(8) as pool:
            given = list(pool.map(reserve, [1, 2, 3, 1, 2, 3, 1, 2]))
        assert sorted(rank for ranks in given for rank in ranks) == list(range(2, 17))
        refused = asyncio.run(
            ask_coordinator(target, ReserveRanks(4096), RanksReserved, patience_s=10, ended="", silent="")
        )
        assert refused.refusal == "Cannot give 4096 more workers ranks: this job has had 17, and 4096 is the most."
    finally:
        server.end()
        server.loop.close()


def test_however_many_come_to_a_folder_at_once_each_gets_ranks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    about = {"place": str(tmp_path / "store"), "prefix": "offbeat-0", "world": 3}
    (tmp_path / "store.json").write_text(json.dumps(about))
    (tmp_path / "plan.toml").write_text('[fabric]\nkind = "Elastic"\n')
    counts = [1, 2, 3, 1, 2, 3, 1, 2]
    with ThreadPoolExecutor(8) as pool:
        firsts = list(pool.map(lambda count: look_for(str(tmp_path), count).first_rank, counts))
    given = [rank for first, count in zip(firsts, counts, strict=True) for rank in range(first, first + count)]
    assert min(given) >= 3
    assert len(given) == len(set(given))


@pytest.mark.parametrize(
    ("fabric", "says"),
    [
        ("Switch", "Cannot join a job that trains on Switch(): the switch learns at the beginning how many workers"),
        ("ProcessGroup", "Cannot join a job without a server with ProcessGroup(): its workers have Elastic()."),
    ],
)
def test_a_job_that_takes_nobody_in_refuses_at_once(tmp_path: Path, fabric: str, says: str) -> None:
    (tmp_path / "store").touch()
    about = {"place": str(tmp_path / "store"), "prefix": "offbeat-0", "world": 3}
    (tmp_path / "store.json").write_text(json.dumps(about))
    (tmp_path / "plan.toml").write_text(f'[fabric]\nkind = "{fabric}"\n')
    code, output = offbeat("run", "--join", ".", script(tmp_path, TRAIN), folder=tmp_path, timeout_s=20)
    assert code == 2
    assert says in " ".join(output.split())
    assert not (tmp_path / "newcomers").exists(), "nobody has taken a rank"


def test_a_job_that_ended_without_a_server_is_said_to_have_ended(tmp_path: Path) -> None:
    end = {"kind": "end", "rank": 0, "time_s": 1.0, "steps": 3, "error": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    with pytest.raises(NetworkError, match=r"Cannot join the job in .*: it has ended\."):
        look_for(str(tmp_path), 1)


def test_what_cannot_be_joined(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    cases = (("nowhere", "no such folder"), (path, "no such folder"), (".", "it has no server.json"))
    for where, says in cases:
        code, output = offbeat("run", "--join", where, path, folder=tmp_path)
        assert code == 2
        assert says in " ".join(output.split())
    code, output = offbeat("run", "--join", ".", "--servers", 1, path, folder=tmp_path)
    assert code == 2
    assert "Cannot start servers for a job that is joined" in " ".join(output.split())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server to which no worker has come, and the environment of a command."""
    for name in ("CERTIFICATE", "KEY", "AUTHORITY", "VALIDATOR_TOKEN", "TOKEN"):
        monkeypatch.delenv(f"OFFBEAT_{name}", raising=False)
    monkeypatch.setenv("OFFBEAT_JOB", JOB)
    process, address = start_shard(ShardSettings(job=JOB, token=SECRET, validator_token="v" * 32))
    yield address
    process.terminate()
    process.wait(10)


def test_who_has_no_token_is_told_of_no_option_that_the_command_lacks(server: str) -> None:
    for validates in (False, True):
        with pytest.raises(PeerError) as caught:
            look_for(server, 1, validates=validates)
        assert str(caught.value).endswith(
            f"Give the token that its workers have (OFFBEAT_TOKEN), and its name (OFFBEAT_JOB; now it is {JOB!r})."
        )


@pytest.mark.parametrize("shown", ["", "w" * 32], ids=["none", "another"])
def test_who_is_no_validator_is_told_at_once(server: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any worker has come, which a validator waits for."""
    monkeypatch.setenv("OFFBEAT_TOKEN", SECRET)
    monkeypatch.setenv("OFFBEAT_VALIDATOR_TOKEN", shown)
    with pytest.raises(PeerError) as caught:
        look_for(server, 1, validates=True)
    assert str(caught.value) == (
        f"Cannot validate for the job at {server}. Cannot join {server}: it refused: it is no validator: it does not "
        "show the token of validators. Give the token that its server has for validators (OFFBEAT_VALIDATOR_TOKEN), or "
        "a certificate of `offbeat certs --validator`."
    )


def test_a_validator_says_what_it_waits_for(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("offbeat.cli.join_target._START_S", 0.3)
    monkeypatch.setenv("OFFBEAT_TOKEN", SECRET)
    monkeypatch.setenv("OFFBEAT_VALIDATOR_TOKEN", "v" * 32)
    with pytest.raises(NetworkError, match="it does not train now"):
        look_for(server, 1, validates=True)
    assert capsys.readouterr().err == f"Waiting up to 0.3 s for the workers of the job at {server}.\n"
    nowhere = tmp_path / "nowhere"
    for says in ("There is no such folder yet. ", ""):
        with pytest.raises(NetworkError):
            look_for(str(nowhere), 1, validates=True)
        assert capsys.readouterr().err == f"{says}Waiting up to 0.3 s for the job in {nowhere} to begin.\n"
        nowhere.mkdir(exist_ok=True)
