"""Scenarios in which something goes wrong: it does, at its step, in every row it can, and the result says so."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from offbeat.errors import ScenarioError
from offbeat.fault_spec import Fault, Fired
from offbeat.lab import launch, plots, results, runner
from offbeat.lab.emulator import Direction, Law
from offbeat.lab.fault_cost import recoveries
from offbeat.lab.fault_injection import FaultRun
from offbeat.lab.jobs import jobs
from offbeat.lab.predictions import known_of, predictions
from offbeat.lab.recorder import MeasuredStep
from offbeat.lab.results import RawRun
from offbeat.lab.timeline_plot import draw_courses, steps_per_s
from offbeat.scenario import Scenario
from tests.lab.permissions import needs_root

if TYPE_CHECKING:
    from offbeat.lab.recorder import Line
    from offbeat.lab.run_result import RunResult

# Six steps of the smallest model.
SCRIPT = """
import time, torch
from offbeat.lab.systems import bind
from offbeat.lab.recorder import Recorder, Work
from offbeat.lab.peer_checkpoint import Snapshots
work = Work.from_environment()
model = torch.nn.Linear(8, 1)
torch.nn.init.zeros_(model.weight)
bound = bind(work.system, model, torch.optim.SGD(model.parameters(), lr=0.01))
kept = Snapshots(model, bound.optimizer, work)
done = kept.load()
recorder = Recorder(compute_s=0.001, gradient_bytes=36, work=work, done=done)
for step in range(done, work.warmup_steps + work.steps):
    time.sleep(PAUSE_S)
    bound.model(torch.ones(4, 8)).sum().backward()
    bound.optimizer.step()
    bound.optimizer.zero_grad()
    recorder.step(4)
    kept.save(step + 1)
if bound.run is not None:
    bound.run.settle()
recorder.finish(digest=str(model.weight.tolist()))
bound.close()
"""
TEXT = """
[scenario]
name = "struck"
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
baseline = "BASELINE"
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "server"
system = "offbeat"
plan = { sync = { kind = "ASP" }, fabric = { kind = "ParameterServer" } }
[[row]]
name = "elastic"
system = "offbeat"
plan = { fabric = { kind = "Elastic" } }
[[row]]
name = "restarts"
system = "ddp+restarts"
save_every = 5
"""


def run(folder: Path, row: int, *faults: dict[str, Any], steps: int = 20) -> RunResult:
    (folder / "work.py").write_text(SCRIPT.replace("PAUSE_S", "0.04" if steps > 20 else "0.0"))
    scenario = Scenario.from_toml(TEXT.replace("BASELINE", "ddp").replace("steps = 20", f"steps = {steps}"))
    struck = [msgspec.convert({"worker": 1, "step": 5, **table}, Fault) for table in faults]
    scenario = msgspec.structs.replace(scenario, fault=struck)
    job = jobs(scenario, folder)[row]
    runs = folder / "runs"
    runs.mkdir()
    places = launch.loopback_places(["h0", "h1", *(["s0"] if job.served else [])])
    return runner.run_once(job, places, runs, 0, None)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_is_stopped_and_the_result_says_when(tmp_path: Path) -> None:
    """Stock DDP, which knows nothing of it; what takes a server is left out of its row."""
    stop = {"kind": "sigstop", "seconds": 0.5}
    left_out = [{"kind": "sigkill", "target": "server"}, {"kind": "wrong-token"}, {"kind": "sigkill"}]
    done = run(tmp_path, 0, stop, *left_out)
    assert sum(event.startswith("left out: ") for event in done.events) == 3
    (event,) = (event for event in done.events if event.startswith("fault: "))
    assert event.startswith("fault: sigstop of worker 1 for 0.5 s at its step 5, ")
    assert event.endswith(" s after the first measured step began")
    assert done.events[0].startswith("left out: "), "a result keeps only the first events"
    slowest = max(range(20), key=done.workers[0].step_s.__getitem__)
    assert slowest in (2, 3), "three steps were dropped"
    assert done.workers[0].step_s[slowest] > 0.4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_is_killed_is_missed_by_nobody_and_a_server_comes_back(tmp_path: Path) -> None:
    kills = [{"kind": "sigkill", "target": "coordinator", "worker": 0}, {"kind": "sigkill", "step": 8}]
    done = run(tmp_path, 1, *kills)
    assert [worker.rank for worker in done.workers] == [0]
    assert len([event for event in done.events if event.startswith("fault: sigkill of ")]) == 2
    assert any("The parameter server was restarted" in event for event in done.events)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_replay_from_which_one_is_killed_is_a_result(tmp_path: Path) -> None:
    """What the killed one computed is in no sum, so that of all is not what the others have to come to."""
    work = 'kind = "replay"\nlayer = [{ name = "a", shapes = [[8]], backward_s = 0.01 }]'
    text = TEXT[: TEXT.rindex("[[row]]")].replace("BASELINE", "ddp").replace('kind = "script"\npath = "work.py"', work)
    kill = Fault(worker=1, step=5, kind="sigkill")
    scenario = msgspec.structs.replace(Scenario.from_toml(text), fault=[kill])
    job = jobs(scenario, tmp_path)[1]
    runs = tmp_path / "runs"
    runs.mkdir()
    done = runner.run_once(job, launch.loopback_places(["h0", "h1", "s0"]), runs, 0, None)
    assert [worker.rank for worker in done.workers] == [0]


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        (True, {"kind": "sigkill"}),
        (True, {"kind": "join"}),
        (True, {"kind": "stale"}),
        (True, {"kind": "sigstop", "seconds": 8.0}),
        (True, {"kind": "sigkill", "target": "server"}),
        (False, {"kind": "sigterm", "target": "server"}),
        (False, {"kind": "sigstop", "seconds": 1.0}),
        (False, {"kind": "duplicate"}),
    ],
)
def test_what_changes_no_sum_leaves_the_proof_as_it_is(tmp_path: Path, changes: bool, table: dict[str, Any]) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    fault = msgspec.convert({"worker": 1, "step": 5, **table}, Fault)
    assert fault.changes_sum == changes
    scenario = Scenario.from_toml(TEXT.replace("BASELINE", "ddp").replace('"ASP"', '"BSP"'))
    job = jobs(msgspec.structs.replace(scenario, fault=[fault]), tmp_path)[1]
    (given,) = job.each(launch.loopback_places(["h0"]))
    (work,) = given.values()
    assert (json.loads(work).get("tolerance") is None) == changes


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_all_reduce_goes_on_without_who_is_killed(tmp_path: Path) -> None:
    """The server's faults are left out, and it is said what they take."""
    done = run(tmp_path, 2, {"kind": "sigkill"}, {"kind": "sigkill", "target": "server"})
    assert [worker.rank for worker in done.workers] == [0]
    assert len(done.workers[0].step_s) == 20
    assert done.events[0] == "left out: sigkill of the server at step 5 of worker 1, which takes a server"
    assert done.events[1].startswith("fault: sigkill of worker 1 at its step 5, ")
    (cost,) = done.recoveries
    assert cost.fault == "sigkill of worker 1 at its step 5"
    assert cost.others_s is not None
    assert cost.others_s == pytest.approx(max(done.workers[0].step_s), rel=0.2), "usual ones take milliseconds"
    assert cost.others_s < 1.5
    assert any("rank 1" in text.lower() for text in cost.said), cost.said


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_another_worker_joins_all_reduce(tmp_path: Path) -> None:
    """It comes in while the others train, through the store that is in the first of them."""
    done = run(tmp_path, 2, {"kind": "join", "worker": 0, "step": 5}, steps=900)
    assert any(event.startswith("fault: join of worker 0 at its step 5, ") for event in done.events)
    assert [len(worker.step_s) for worker in done.workers] == [900, 900]
    (cost,) = done.recoveries
    assert any("Rank 2 has joined at step" in text for text in cost.said), cost.said


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_torchrun_starts_all_again_and_no_time_is_hidden(tmp_path: Path) -> None:
    """Killed at step 7, with a snapshot of 5 steps: the sum is that of 23 steps, the two between are done again."""
    done = run(tmp_path, 3, {"kind": "sigkill", "step": 7}, {"kind": "sigstop", "step": 8})
    assert done.events[0] == (
        "left out: sigstop of worker 1 for 1 s at its step 8, which takes workers that are not started again"
    )
    for worker in done.workers:
        assert len(worker.step_s) == 20
        assert worker.samples == 80
        assert json.loads(worker.digest)[0] == pytest.approx([-0.01 * 4 * 23] * 8, abs=1e-6)
        assert max(worker.step_s) > 1, "a start of Python and torch takes longer"
    (cost,) = done.recoveries
    assert cost.redone_steps in (2, 3), "the other one may have done the step at which it struck"
    assert cost.back_s is not None
    assert cost.back_s > 1
    assert cost.others_s is None


def test_what_a_fault_cost_is_what_the_others_waited_longer() -> None:
    """Steps of 1 s; the first fault makes one of them 4 s long, the second none; who is struck counts for nothing."""
    now_s, clock_s = time.time(), time.perf_counter()
    kill, stop = (Fault(worker=1, step=7, kind="sigkill"), Fault(worker=0, step=9, kind="sigstop"))
    fired = [Fired(number=0, fault=kill, time_s=now_s + 2.5), Fired(number=1, fault=stop, time_s=now_s + 8.5)]
    took_s = [[1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 5.0], [1.0, 1.0, 3.0, 1.0, 2.0, 1.0, 1.0]]
    lines: list[list[Line]] = [
        [MeasuredStep(i, step_s, 0.0, 1, clock_s + sum(own[: i + 1])) for i, step_s in enumerate(own)] for own in took_s
    ]
    job = jobs(Scenario.from_toml(TEXT.replace("BASELINE", "ddp").replace("work.py", __file__)), Path())[0]
    first, second = recoveries(job, 0, fired, lines, [(now_s + 1, "a"), (now_s + 3, "b"), (now_s + 9, "c")])
    assert (first.others_s, first.said) == (3.0, ["b"])
    assert (second.others_s, second.said) == (0.0, ["c"]), "worker 2's step of 2 s had ended"
    assert first.words == "sigkill of worker 1 at its step 7: the others' longest step took 3.00 s more than usual"


def test_what_never_fired_is_no_result(tmp_path: Path) -> None:
    fault = Fault(worker=1, step=5, kind="gil")
    (tmp_path / "work.py").write_text(SCRIPT)
    scenario = msgspec.structs.replace(Scenario.from_toml(TEXT.replace("BASELINE", "ddp")), fault=[fault])
    strikes = FaultRun(jobs(scenario, tmp_path)[0], tmp_path, None)
    with pytest.raises(ScenarioError, match="Cannot tell what gil of worker 1 for 1 s at its step 5 does: it never"):
        strikes.events(0.0)


def test_a_fault_that_cannot_be_played_is_refused(tmp_path: Path) -> None:
    text = TEXT.replace("BASELINE", "server").replace('kind = "script"\npath = "work.py"', 'kind = "replay"')
    text = text.replace('kind = "replay"', 'kind = "replay"\nprofile = "resnet50"\nscale = 0.01')
    text = text.replace('[[row]]\nname = "ddp"\nsystem = "ddp"', "", 1).partition('[[row]]\nname = "restarts"')[0]
    scenario = Scenario.from_toml(f'{text}\n[[fault]]\nworker = 1\nstep = 5\nkind = "lossy"')
    with pytest.raises(ScenarioError, match="Cannot simulate lossy of worker 1 for 1 s at its step 5"):
        predictions(scenario, tmp_path, known_of(scenario, None))


def test_a_slow_link_passes_its_rate_and_loses_what_would_wait_long() -> None:
    """1000 frames of 100 bytes in a second, where 50 kB/s pass."""
    direction, passed = Direction("up", law=Law(rate_bytes_per_s=50_000)), []
    for number in range(1000):
        direction.take(bytes(100), number * 0.001)
    while direction.waiting:
        due_s = direction.waiting[0][0]
        assert direction.due(due_s) is not None
        passed.append(due_s)
    assert len(passed) == pytest.approx(550, abs=5), "500 in the second, 50 in the queue"
    assert direction.counts.lost == 1000 - len(passed)
    assert passed[-1] == pytest.approx(1.1, abs=0.01)
    assert all(late - early > 0.0019 for early, late in itertools.pairwise(passed))


NAMESPACES = """
[scenario]
name = "cut-off"
[hosts]
count = 2
servers = 1
rate_mbps = 50
[workload]
kind = "script"
path = "work.py"
[run]
repeats = 1
steps = 20
warmup_steps = 3
baseline = "server"
[[fault]]
worker = 1
step = 6
kind = "deaf"
seconds = 1.5
[[row]]
name = "server"
system = "offbeat"
plan = { sync = { kind = "BSP" }, fabric = { kind = "ParameterServer" } }
"""


class TestALinkOfTheNetwork:
    pytestmark = needs_root

    @pytest.mark.slow
    @pytest.mark.timeout(120)
    def test_it_is_struck_and_mended(self, tmp_path: Path) -> None:
        (tmp_path / "work.py").write_text(SCRIPT.replace("PAUSE_S", "0.0"))
        report = runner.run(
            Scenario.from_toml(NAMESPACES), NAMESPACES, tmp_path, command="test", tell=lambda row, repeat: None
        )
        assert any(
            event.startswith("fault: deaf of worker 1 for 1.5 s at its step 6, ") for event in report.rows[0].events
        )
        assert max(report.raw[0].step_s) > 1.2
        assert [one.row for one in report.simulated] == ["server"]


RATES = """
[scenario]
name = "rates"
[hosts]
count = 2
rate_mbps = 80
[workload]
kind = "replay"
[[workload.layer]]
name = "one"
shapes = [[250000]]
backward_s = 0.01
[run]
repeats = 2
steps = 16
warmup_steps = 3
[[fault]]
worker = 1
step = 10
kind = "rate"
to_mbps = 20
target = "workers"
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "offbeat"
system = "offbeat"
"""


class TestTheRateOfLinks:
    pytestmark = needs_root

    @pytest.mark.slow
    @pytest.mark.timeout(120)
    def test_it_changes_for_every_system_and_is_as_before_in_the_next_run(self, tmp_path: Path) -> None:
        """1 MB around two hosts: 0.1 s, and 0.4 s from the eighth measured step on; as the simulator says."""
        report = runner.run(Scenario.from_toml(RATES), RATES, tmp_path, command="test", tell=lambda row, repeat: None)
        assert report.failed == {}
        for raw in report.raw:
            before, after = raw.step_s[:7], raw.step_s[9:]
            assert 0.1 < np.median(before) < 0.16, (raw.row, raw.repeat, raw.step_s)
            assert 0.4 < np.median(after) < 0.5, (raw.row, raw.repeat, raw.step_s)
        for row in report.rows:
            (event, *_) = row.events
            assert event.startswith("fault: rate of 20 Mbit/s at the links of the workers at step 10 of worker 1, ")
        assert report.recoveries == [], "nobody recovers from it"
        for row, predicted in zip(report.rows, report.simulated, strict=True):
            assert predicted.seconds_per_step == pytest.approx(row.seconds_per_step.median, rel=0.2)
            assert row.bound_s == pytest.approx((8 * 0.1 + 8 * 0.4) / 16)
            assert row.percent_of_bound <= 100


def test_steps_are_counted_in_the_half_second_in_which_they_end() -> None:
    raw = msgspec.convert(RAW, RawRun)
    assert steps_per_s([raw, raw], [0.0, 0.5, 1.0, 1.5, 2.0]) == [4.0, 4.0, 0.0, 4.0]


def test_the_picture_shows_when_something_went_wrong(tmp_path: Path) -> None:
    """A dotted line in each strip, and no row without one; where a policy was swapped, another line, with its name."""
    figure = Figure()
    report = results.read(RESULTS / "ps_uniform.json")
    struck = {report.rows[0].row: [(1.5, "sigkill of worker 1 at its step 5")]}
    draw_courses(figure, report, struck, {report.rows[1].row: [(2.5, "ASP()")]})
    dotted = [
        [np.asarray(line.get_xdata())[0] for line in axes.lines if line.get_linestyle() == ":"] for axes in figure.axes
    ]
    assert dotted[:3] == [[1.5]] * 3
    assert dotted[3:] == [[]] * (3 * len(report.rows) - 3)
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["ASP()"]
    assert 2.5 in [np.asarray(line.get_xdata())[0] for line in figure.axes[3].lines]
    events = [f"fault: x, 2.25 {AFTER}", f"swap: ASP(), 3.50 {AFTER}", "fault: y"]
    row = msgspec.structs.replace(report.rows[0], events=events)
    assert plots._happened(row, "fault") == [(2.25, "x")]
    assert plots._happened(row, "swap") == [(3.5, "ASP()")]


def test_the_way_to_the_target_shows_where_policies_were_swapped() -> None:
    report = results.read(RESULTS / "swap.json")
    rows = [msgspec.structs.replace(row, events=[f"swap: SSP(bound=8), 2.00 {AFTER}"]) for row in report.rows[:1]]
    axes = Figure().subplots()
    plots._draw_curves(axes, msgspec.structs.replace(report, rows=rows))
    assert "SSP(bound=8)" in [text.get_text() for text in axes.texts]
    (line,) = (line for line in axes.lines if line.get_linestyle() == ":")
    raw = next(raw for raw in report.raw if raw.row == rows[0].row and raw.repeat == 0)
    assert raw.metrics
    warmup_s = np.asarray(line.get_xdata())[0] - 2.0
    assert 0 < warmup_s < raw.metrics[-1][0] - 0.9 * sum(raw.step_s)


AFTER = "s after the first measured step began"
RESULTS = Path(__file__).parent.parent.parent / "benchmarks/results"
RAW = {
    "row": "a", "repeat": 0, "rank": 0, "host": "h", "step_s": [0.4, 0.5, 0.7], "wait_s": [0.0] * 3, "bytes_sent": 0,
    "samples": 3, "gradient_bytes": 1, "compute_s": 0.1, "digest": "", "gradient_error": None, "metrics": [],
    "notes": [],
}  # fmt: skip
