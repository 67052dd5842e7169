"""Scenarios in which workers lie: they do, in real training, as often as the result says, and only they know of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.attack_spec import ATTACKS, AttackSpec
from offbeat.errors import ScenarioError
from offbeat.lab import launch, runner
from offbeat.lab.fault_injection import FaultRun
from offbeat.lab.jobs import jobs
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from offbeat.lab.run_result import RunResult

# Each honest gradient is 4 in every element.
SCRIPT = """
import torch
from offbeat.lab.systems import bind
from offbeat.lab.recorder import Recorder, Work
work = Work.from_environment()
model = torch.nn.Linear(8, 1)
torch.nn.init.zeros_(model.weight)
bound = bind(work.system, model, torch.optim.SGD(model.parameters(), lr=LR))
recorder = Recorder(compute_s=0.001, gradient_bytes=36, work=work)
for step in range(work.warmup_steps + work.steps):
    LOSS.backward()
    bound.optimizer.step()
    bound.optimizer.zero_grad()
    recorder.step(4)
bound.settle()
recorder.finish(digest=str(model.weight.flatten().tolist()[0]))
bound.close()
"""
CONSTANT = "bound.model(torch.ones(4, 8)).sum()"
# Two classes, and each worker says that all samples are of the second.
LABELLED = """torch.nn.functional.cross_entropy(
        torch.cat((torch.zeros(4, 1), bound.model(torch.ones(4, 8))), 1), torch.ones(4, dtype=torch.int64))"""
TEXT = """
[scenario]
name = "lies"
[hosts]
count = 2
network = "loopback"
[workload]
kind = "script"
path = "work.py"
[run]
repeats = 1
steps = 20
warmup_steps = 3
baseline = "server"
[[row]]
name = "server"
system = "offbeat"
plan = { fabric = { kind = "ParameterServer" } }
[[row]]
name = "all-reduce"
system = "offbeat"
plan = { codec = { kind = "Cast", dtype = "bf16" } }
[[row]]
name = "local"
system = "offbeat"
plan = { sync = { kind = "LocalSGD", every = 2 }, fabric = { kind = "ParameterServer" } }
[[row]]
name = "local all-reduce"
system = "offbeat"
plan = { sync = { kind = "LocalSGD", every = 2 } }
[[row]]
name = "three"
system = "offbeat"
plan = { fabric = { kind = "ParameterServer" }, rule = { kind = "Median" } }
"""
STEPS, LR = 23, 0.01


def run(
    folder: Path, row: str, *attacks: dict[str, Any], loss: str = CONSTANT, workers: int = 2, timeout_s: float = 100
) -> RunResult:
    (folder / "work.py").write_text(SCRIPT.replace("LOSS", loss).replace("LR", str(LR)))
    scenario = Scenario.from_toml(TEXT.replace("count = 2", f"count = {workers}"))
    specs = [msgspec.convert({"workers": [1], **table}, AttackSpec) for table in attacks]
    (one,) = (msgspec.structs.replace(one, attack=specs) for one in scenario.row if one.name == row)
    limits = msgspec.structs.replace(scenario.run, timeout_s=timeout_s)
    (job,) = jobs(msgspec.structs.replace(scenario, row=[one], run=limits), folder)
    runs = folder / "runs"
    runs.mkdir()
    names = [f"h{index}" for index in range(workers)]
    return runner.run_once(job, launch.loopback_places([*names, *(["s0"] if job.served else [])]), runs, 0, None)


def lies(done: RunResult) -> list[int]:
    """How many lies each attack has told."""
    return [int(n) for event in done.events for n in re.findall(r"^attack: .*: (\d+) lies of worker 1$", event)]


def moved(forged: float, told: int = STEPS, steps: int = STEPS) -> float:
    """Where the parameters end if one of two workers has sent this in so many steps, and all else was honest."""
    return -LR * (4 * (steps - told) + (4 + forged) / 2 * told)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", ["server", pytest.param("all-reduce", marks=pytest.mark.slow)])
def test_a_liar_moves_the_mean_by_what_it_says(tmp_path: Path, row: str) -> None:
    done = run(tmp_path, row, {"kind": "sign", "scale": 2})
    assert lies(done) == [STEPS]
    assert float(done.workers[0].digest) == pytest.approx(moved(-8), rel=1e-2)
    assert done.events[0] == f"attack: sign (scale 2) of worker 1: {STEPS} lies of worker 1"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_lies_about_what_is_encoded_in_a_part_of_the_steps(tmp_path: Path) -> None:
    done = run(tmp_path, "server", {"kind": "inflate", "scale": 10, "when": "after", "rate": 0.4, "from_step": 3})
    (told,) = lies(done)
    assert 2 <= told <= 16
    assert float(done.workers[0].digest) == pytest.approx(moved(40, told), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("row", ["local", "local all-reduce"])
def test_changes_are_forged_as_gradients_are(tmp_path: Path, row: str) -> None:
    """A liar's own optimizer steps honestly; it is the change that it turns round."""
    done = run(tmp_path, row, {"kind": "sign", "scale": 3})
    assert lies(done) == [12], "of 2 steps each, and the last one"
    assert float(done.workers[0].digest) == pytest.approx(moved(-12), rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_labels_are_flipped_where_the_loss_is_computed(tmp_path: Path) -> None:
    """One pulls towards the second class, the other towards the first, so that in the mean nothing moves.

    Both honest come to 0.08 by then: each of 8 equal parameters moves by 0.01 x 0.5 in a step, and a little less later.
    """
    done = run(tmp_path, "server", {"kind": "label-flip"}, loss=LABELLED)
    assert lies(done) == [STEPS]
    assert abs(float(done.workers[0].digest)) < 0.03


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_median_bears_one_liar_of_three(tmp_path: Path) -> None:
    done = run(tmp_path, "three", {"kind": "nan"}, workers=3)
    assert lies(done) == [STEPS]
    assert float(done.workers[0].digest) == pytest.approx(-4 * LR * STEPS, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_who_announces_and_never_sends_is_left_behind(tmp_path: Path) -> None:
    """For twice the timeout of 5 s the others wait, once; then the mean is of them alone."""
    done = run(tmp_path, "server", {"kind": "drop", "from_step": 5})
    assert [worker.rank for worker in done.workers] == [0]
    assert lies(done) == [1]
    assert float(done.workers[0].digest) == pytest.approx(-4 * LR * STEPS, rel=1e-4)
    assert sum(step_s > 8 for step_s in done.workers[0].step_s) == 1
    assert any("it announced contribution 5, and has pushed nothing more of it" in event for event in done.events)


def test_only_liars_hear_of_it_and_plans_are_equal(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    text = TEXT + '[[row.attack]]\nworkers = [1]\nkind = "sign"\n'
    honest, job = jobs(Scenario.from_toml(text), tmp_path)[3:]
    assert honest.attacks == []
    run = FaultRun(job, tmp_path, None)
    assert run.environment == {}
    assert run.environment_of(0) == {}
    assert json.loads(run.environment_of(1)[ATTACKS])[0]["kind"] == "sign"
    assert job.command[-1].endswith("work.py")
    assert "offbeat.testing.run_with_faults" in job.command
    (work,) = job.each(launch.loopback_places(["h0"]))[0].values()
    assert json.loads(work).get("tolerance") is None


def test_an_attack_that_never_lies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    scenario = Scenario.from_toml(TEXT + '[[row.attack]]\nworkers = [0, 1]\nkind = "sign"\nfrom_step = 90\n')
    job = jobs(scenario, tmp_path)[-1]
    with pytest.raises(ScenarioError, match=r"sign .* of workers 0 and 1: worker 0; .*: worker 1 told none"):
        FaultRun(job, tmp_path, None).events(0.0)


REPLAY = TEXT.replace('kind = "script"\npath = "work.py"', 'kind = "replay"\nprofile = "resnet50"')
DDP = '[[row]]\nname = "ddp"\nsystem = "ddp"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('workers = [1]\nkind = "sing"', "Unknown kind 'sing' (did you mean 'sign'?). * (attack[0].kind)."),
        (
            'workers = [1]\nkind = "sign"\nscael = 6',
            "Unknown key 'scael' (did you mean 'scale'?). * (attack[0].scael).",
        ),
        ('workers = [2]\nkind = "sign"', "Cannot have worker 2 lie: there are 2, from 0. * (attack[0].workers)."),
        ('workers = []\nkind = "sign"', "Cannot set workers to a list: * (attack[0].workers)."),
        ('workers = [1, 1]\nkind = "sign"', "Cannot have worker 1 lie twice: * (attack[0].workers)."),
        (
            'workers = [1]\nkind = "sign"\nstd = 2.0',
            "Cannot give 'sign' the std 2: it has scale alone. Leave std out (attack[0].std).",
        ),
        (
            'workers = [1]\nkind = "nan"\nscale = 2.0',
            "Cannot give 'nan' the scale 2: it has no strength. Leave scale out (attack[0].scale).",
        ),
        ('workers = [1]\nkind = "sign"\nrate = 1.5', "Cannot set rate to 1.5: * (attack[0].rate)."),
        (
            'workers = [1]\nkind = "sign"\nwhen = "during"',
            "Unknown when 'during'* Use one of after, before (attack[0].when).",
        ),
        (
            'workers = [1]\nkind = "drop"\nwhen = "after"',
            "Cannot have 'drop' after encoding: nothing is sent, whatever is encoded. Leave when out (attack[0].when).",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(text: str, told: str) -> None:
    refused(TEXT + f"[[attack]]\n{text}\n", told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            REPLAY + '[[attack]]\nworkers = [1]\nkind = "label-flip"',
            "Cannot flip labels: a replay learns nothing, and has none. Use a script (attack[0].kind).",
        ),
        (
            TEXT + DDP + '[[row.attack]]\nworkers = [1]\nkind = "sign"',
            "Cannot have 'sign' forge what ddp sends in row 'ddp': * (row[5].attack[0].kind).",
        ),
        (
            TEXT + '[[attack]]\nworkers = [1]\nkind = "drop"',
            "Cannot have workers announce and not send in row 'all-reduce': * (attack[0].kind).",
        ),
        (
            TEXT + '[[attack]]\nworkers = [1]\nkind = "zero"\nwhen = "after"',
            "Cannot have workers lie after encoding in row 'all-reduce': * (attack[0].when).",
        ),
        (
            TEXT.replace('{ kind = "Median" }', '{ kind = "Median" }, scheduling = { kind = "FIFO" }')
            + '[[row.attack]]\nworkers = [1]\nkind = "zero"',
            "Cannot have 'zero' forge gradients in row 'three': with FIFO(* (row[4].attack[0]).",
        ),
    ],
)
def test_what_a_row_has_no_place_for_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    refused(text, told, tmp_path)


def refused(text: str, told: str, folder: Path | None = None) -> None:
    pattern = "^" + re.escape(told).replace(r"\*", ".*") + "$"
    with pytest.raises(ScenarioError, match=pattern):
        jobs(Scenario.from_toml(text), folder or Path())


def test_what_was_measured_without_attacks_is_still_of_the_same_scenario() -> None:
    plain = Scenario.from_toml(TEXT)
    lying = Scenario.from_toml(TEXT + '[[row.attack]]\nworkers = [1]\nkind = "sign"\n')
    assert plain.digest != lying.digest
    assert plain.digest == msgspec.structs.replace(plain, attack=[]).digest
