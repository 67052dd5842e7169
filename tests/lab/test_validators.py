"""Rows whose plan has a validator: it runs beside the server, is in no figure, and the run fails with it."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from benchmarks.workloads import race
from benchmarks.workloads.mnist import Digits
from offbeat.errors import ScenarioError, WorkerLostError
from offbeat.lab import launch, runner, validator_process
from offbeat.lab.jobs import jobs
from offbeat.lab.predictions import known_of, predictions
from offbeat.lab.refusals import needs
from offbeat.lab.validator_process import ValidatorProcess
from offbeat.scenario import Scenario
from tests.cli.commands import alive, descendants
from tests.patience import soon

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
# Each honest gradient is 4 in every element.
SCRIPT = """
import itertools, json, os, torch
from pathlib import Path
from offbeat.lab.systems import bind
from offbeat.lab.recorder import RESULT, Recorder, Work
work = Work.from_environment()
model = torch.nn.Linear(8, 1)
torch.nn.init.zeros_(model.weight)
bound = bind(work.system, model, torch.optim.SGD(model.parameters(), lr=0.01))
validates = bound.run.is_validator
seen = os.getpid(), validates, os.environ.get("OFFBEAT_VALIDATOR_TOKEN", ""), RESULT in os.environ
Path(__file__).with_name("seen" + os.environ["RANK"]).write_text(json.dumps(seen))
recorder = Recorder(compute_s=0.001, gradient_bytes=36, work=work)
for step in itertools.count() if validates else range(work.warmup_steps + work.steps):
    bound.model(torch.ones(4, 8)).sum().backward()
    bound.optimizer.step()
    bound.optimizer.zero_grad()
    recorder.step(4)
bound.settle()
recorder.finish(digest=str(model.weight.flatten().tolist()[0]))
bound.close()
"""
TEXT = """
[scenario]
name = "judged"
[hosts]
count = 2
network = "loopback"
[workload]
kind = "script"
path = "work.py"
[run]
repeats = 1
steps = 20
warmup_steps = 4
baseline = "ZenoPS"
timeout_s = 80
[[row]]
name = "ZenoPS"
system = "offbeat"
plan = { sync = SYNC, fabric = { kind = "ParameterServer" }, validator = { kind = "ZenoPS" } }
attack = [{ workers = [1], kind = "sign", scale = 6 }]
""".replace("SYNC", '{ kind = "LocalSGD", every = 2 }')
REPLAY = """
[scenario]
name = "timed"
[hosts]
count = 2
network = "loopback"
[workload]
kind = "replay"
profile = "resnet50"
scale = 0.0025
forward_s = 0.004
backward_s = 0.008
[run]
repeats = 1
steps = 4
warmup_steps = 3
baseline = "ZenoPS"
timeout_s = 80
[[row]]
name = "mean"
system = "offbeat"
plan = { fabric = { kind = "ParameterServer" } }
[[row]]
name = "ZenoPS"
system = "offbeat"
plan = { fabric = { kind = "ParameterServer" }, validator = { kind = "ZenoPS" } }
"""
PLACES = ["h0", "h1", "s0"]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_what_it_rejects_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers lies, and the model ends where the honest one alone would bring it."""
    monkeypatch.setenv("OFFBEAT_VALIDATOR_TOKEN", "of somebody else's job")
    (tmp_path / "work.py").write_text(SCRIPT)
    (job,) = jobs(Scenario.from_toml(TEXT), tmp_path)
    folder = tmp_path / "runs"
    folder.mkdir()
    done = runner.run_once(job, launch.loopback_places(PLACES), folder, 0, None)
    assert done.events[0] == "attack: sign (scale 6) of worker 1: 13 lies of worker 1"
    assert [float(one.digest) for one in done.workers] == [pytest.approx(-0.01 * 4 * 24, rel=1e-4)] * 2
    seen = [msgspec.json.decode((tmp_path / f"seen{rank}").read_bytes()) for rank in range(3)]
    assert [(validates, records) for _, validates, _, records in seen] == [(False, True), (False, True), (True, False)]
    tokens = [token for _, _, token, _ in seen]
    assert tokens[:2] == ["", ""], "no worker knows it"
    assert len(tokens[2]) == 64, "of this run"
    assert not alive({pid for pid, *_ in seen})
    assert not list(folder.glob("rank2*"))


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_replay_has_one_that_replays(tmp_path: Path) -> None:
    job = jobs(Scenario.from_toml(REPLAY), tmp_path)[1]
    done = runner.run_once(job, launch.loopback_places(PLACES), tmp_path, 0, None)
    assert [len(one.step_s) for one in done.workers] == [4, 4]


@contextmanager
def started(folder: Path, code: str, validators: str) -> Iterator[tuple[launch.Workers, ValidatorProcess]]:
    """A worker, and a validator, of that code each."""
    command = [sys.executable, "-S", "-c"]
    (host, server), environment = launch.loopback_places(["h0", "s0"]), {"OWN": "its own"}
    begin: Any = {"folder": folder, "environment": environment}
    with (
        ValidatorProcess([*command, validators], place=server, world=1, token="v" * 32, **begin) as validator,
        launch.Workers([*command, code], places=[host], each=[{}], **begin) as workers,
    ):
        yield workers, validator


SLEEP = "import time; time.sleep(300)"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; print('at step 7', flush=True); os.kill(os.getpid(), 9)", "was killed by SIGKILL before"),
        ("import sys; print('at step 7'); sys.exit(3)", "ended with exit code 3 before the workers were done"),
        ("print('at step 7')", r"ended with exit code 0, and 0\.5 s later workers still run\. .* \(workload\.path\)"),
    ],
)
def test_a_run_fails_with_its_validator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    monkeypatch.setattr(validator_process, "LINGERS_S", 0.5)
    with (
        started(tmp_path, SLEEP, code) as (workers, validator),
        pytest.raises(WorkerLostError, match=f"the validator on host s0 {says}(.|\n)* was\n  at step 7$"),
    ):
        workers.wait(30, validator=validator)


def test_one_that_ends_with_the_job_fails_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "import time; time.sleep(0.5)", "") as (workers, validator):
        workers.wait(30, validator=validator)


def test_one_that_does_not_end_is_ended_with_the_run(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', '{SLEEP}'])"
    with started(tmp_path, "", child) as (workers, validator):
        workers.wait(30, validator=validator)
        assert soon(lambda: len(descendants(os.getpid()) - before) >= 2)
        family = descendants(os.getpid()) - before
    assert soon(lambda: not alive(family))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (', fabric = { kind = "ParameterServer" }', "", "no server that workers have no hold on sees contributions"),
        ('"ZenoPS" } }', '"ZenoPlusPlus" }, rule = { kind = "Median" } }', "already combined by Median"),
        ('network = "loopback"', "rate_mbps = 100", r"there is no host for its parameter server.*\(hosts\.servers\)"),
        ("attack = [", 'swap = [{ step = 3, policy = "ASP()" }]\nattack = [', r"whose word alone .*\(row\[0\]\.swap\)"),
        (
            "workers = [1]",
            "workers = [2]",
            r"Cannot have worker 2 lie: there are 2.*\(row\[0\]\.attack\[0\]\.workers\)",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, old: str, new: str, says: str) -> None:
    (tmp_path / "work.py").write_text("")
    assert old in TEXT
    with pytest.raises(ScenarioError, match=says):
        jobs(Scenario.from_toml(TEXT.replace(old, new)), tmp_path)


def test_it_is_named_in_what_a_run_takes(tmp_path: Path) -> None:
    mean, judged = jobs(scenario := Scenario.from_toml(REPLAY), tmp_path)
    assert needs(scenario, [mean]).endswith("and 1 of a server where the plan has one.")
    assert needs(scenario, [judged]).endswith(
        "a server where the plan has one, with a validator beside it where the plan has one."
    )
    assert (mean.validated, judged.validated) == (False, True)
    assert judged.tolerance is None, "what moves the model is not the sum of all"


def test_the_simulator_leaves_it_out(tmp_path: Path) -> None:
    scenario = Scenario.from_toml(REPLAY)
    mean, judged = predictions(scenario, tmp_path, known_of(scenario, None))
    assert judged.seconds_per_step == mean.seconds_per_step


def test_its_samples_are_nobody_elses() -> None:
    digits = Digits(None, "mlp", trusted=200)
    assert digits.samples + digits.trusted == Digits(None, "mlp").samples
    theirs = [race.shares(digits.samples, batch=32, rank=rank, world=3) for rank in range(3)]
    workers = {int(i) for share in theirs for indices in itertools.islice(share, 50) for i in indices}
    own = {int(i) for indices in itertools.islice(race.trusted(digits, 32), 12) for i in indices}
    assert max(workers) < digits.samples <= min(own)
    assert max(own) < digits.samples + digits.trusted
    assert "200 of those to train on are trusted" in digits.note


def test_a_workload_without_trusted_samples_cannot_validate() -> None:
    task: Any = SimpleNamespace(samples=100, trusted=8)
    with pytest.raises(ScenarioError, match=r"with 8 trusted samples: a batch has 32.* \(workload\.args\)"):
        race.trusted(task, 32)
