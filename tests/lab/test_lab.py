"""`offbeat lab`: from a scenario to a result file and a picture; what cannot work ends in one sentence and code 2."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from offbeat.cli import lab as cli
from offbeat.errors import DisagreementError, NetworkError, ScenarioError, WorkerLostError
from offbeat.lab import lab_registry, launch, lower_bounds, results, runner
from offbeat.lab.jobs import jobs
from offbeat.lab.namespace import DIRECTORY
from offbeat.lab.refusals import lacking_data
from offbeat.model_profiles import size_bytes
from offbeat.report.records import Records, StepRecord
from offbeat.report.scheduled_steps import scheduled_steps
from offbeat.safe_read import read_file
from offbeat.scenario import Replay, Scenario
from offbeat.scheduling import MadeSchedule
from tests.cli.commands import alive, clean_environment, descendants, offbeat, start
from tests.lab.permissions import needs_root
from tests.patience import soon
from tests.switch.kernel_replay import why_not

if TYPE_CHECKING:
    from offbeat.lab.results import ResultFile
    from offbeat.lab.run_result import RunResult

ROOT = Path(__file__).parent.parent.parent

# Trains nothing, and measures that: what the lab does around a script, in milliseconds.
SCRIPT = """
import os, time
from offbeat.lab.recorder import Recorder, Work
work = Work.from_environment()
recorder = Recorder(compute_s=0.001, gradient_bytes=8)
recorder.note("made-up data")
for step in range(work.warmup_steps + work.steps):
    time.sleep(0.002)
    recorder.step(4)
recorder.metric(0.5)
recorder.finish(digest=DIGEST)
"""
LOOPBACK = """
[scenario]
name = "quick"
description = "two workers that train nothing"
[hosts]
count = 2
network = "loopback"
[workload]
kind = "script"
path = "work.py"
[run]
repeats = 2
steps = 3
warmup_steps = 3
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "ours"
system = "offbeat"
"""
# Two hosts, 0.25 MB of gradients: 20 ms on these links, beside 12 ms of computation.
REPLAY = """
[scenario]
name = "tiny"
description = "two hosts"
[hosts]
count = 2
rate_mbps = 100
[workload]
kind = "replay"
profile = "resnet50"
scale = 0.0025
forward_s = 0.004
backward_s = 0.008
batch = 8
bucket_bytes = 65536
[run]
repeats = 1
steps = 4
warmup_steps = 3
[[row]]
name = "ddp"
system = "ddp"
[[row]]
name = "offbeat"
system = "offbeat"
"""
RING = """
[topology]
kind = "ring"
dims = [3]
rate_mbps = 20
[[fault]]
worker = 0
step = 4
kind = "rate"
link = ["h1", "h2"]
to_mbps = 2"""


def scenario(folder: Path, text: str = LOOPBACK, *, digest: str = "'same'", script: str = SCRIPT) -> Path:
    """The scenario's file, with its script beside it."""
    (folder / "work.py").write_text(script.replace("DIGEST", digest))
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


def run_first_row(folder: Path, path: Path) -> RunResult:
    job = jobs(Scenario.from_toml(path.read_text()), folder)[0]
    runs = folder / "runs"
    runs.mkdir()
    return runner.run_once(job, launch.loopback_places(["h0", "h1"]), runs, 0, None)


@pytest.mark.slow
def test_from_a_scenario_to_a_result_and_a_picture(tmp_path: Path) -> None:
    """Without root: plain processes on loopback."""
    path = scenario(tmp_path)
    code, output = offbeat("lab", "run", path, "--json", "out.json", "--png", "out.png", folder=tmp_path)
    assert code == 0, output
    report = results.read(tmp_path / "out.json")
    assert report.scenario == path.read_text()
    assert [(row.row, row.system, row.repeats) for row in report.rows] == [("ddp", "ddp", 2), ("ours", "offbeat", 2)]
    assert [(raw.row, raw.repeat, raw.rank) for raw in report.raw if raw.repeat == 0] == [
        ("ddp", 0, 0),
        ("ddp", 0, 1),
        ("ours", 0, 0),
        ("ours", 0, 1),
    ]
    for row in report.rows:
        assert 0.002 <= row.seconds_per_step.min <= row.seconds_per_step.median <= row.seconds_per_step.max
        assert row.bound_s == 0.001
        assert row.events == ["made-up data"]
        assert row.final_metric == 0.5
    assert all(len(raw.step_s) == 3 for raw in report.raw), "warm-up is dropped"
    assert report.command.startswith("offbeat lab run ") or "lab run" in report.command
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "quick" in output
    assert "1 of 4: repeat 1, ddp" in output, "a line per run, where nobody sees a bar"
    assert "ours" in output
    assert "\x1b[" not in output, "not a terminal: no progress, no colours"


@pytest.mark.slow
def test_a_row_with_a_schedule_tells_how_far_its_blocks_end_from_where_that_predicts(tmp_path: Path) -> None:
    text = REPLAY.replace("rate_mbps = 100", 'network = "loopback"').replace("steps = 3", "steps = 9")
    first = '[[row]]\nname = "Prophet"\nsystem = "offbeat"\nplan = { scheduling = { kind = "Prophet" } }\n'
    path = scenario(tmp_path, text.replace("[[row]]", f"{first}[[row]]", 1))
    workers = run_first_row(tmp_path, path).workers
    made = read_file(tmp_path / "runs/run/schedule.json", MadeSchedule.from_bytes)
    records = Records(tmp_path / "runs/run/metrics.jsonl").all()
    for worker in workers:
        own = [one for one in records if isinstance(one, StepRecord) and one.rank == worker.rank]
        error = scheduled_steps(made, own).block_end_error
        assert error is not None
        assert worker.block_end_error == pytest.approx(error, abs=1e-4)


def test_the_other_rows_are_measured_where_one_fails(tmp_path: Path) -> None:
    script = "import os\nif os.environ['OFFBEAT_LAB_SYSTEM'] == 'ddp': raise ValueError('no data')\n" + SCRIPT
    code, output = offbeat("lab", "run", scenario(tmp_path, script=script), "--json", "out.json", folder=tmp_path)
    assert code == 1, output
    assert "Row 'ddp' has failed and is not run again. Cannot measure row 'ddp', repeat 0: rank " in output
    assert "ValueError: no data" in output
    assert "Failed: 'ddp'. out.json has 2 of 4 runs." in output
    report = results.read(tmp_path / "out.json")
    assert [(row.row, row.repeats, row.baseline) for row in report.rows] == [("ours", 2, "ours")]
    assert list(report.failed) == ["ddp"]
    assert not (tmp_path / "out.json.draft").exists()


def test_who_is_interrupted_keeps_what_was_measured(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['OFFBEAT_LAB_SYSTEM'] == 'offbeat': time.sleep(300)\n" + SCRIPT
    path = scenario(tmp_path, script=script)
    with start("lab", "run", path, "--json", "out.json", folder=tmp_path) as process:
        try:
            assert soon((tmp_path / "out.json").exists, within_s=40)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=10)
        finally:
            process.kill()
    assert "out.json has 1 of 4 runs." in output
    assert [row.row for row in results.read(tmp_path / "out.json").rows] == ["ddp"]


def test_fewer_steps_and_repeats_on_request(tmp_path: Path) -> None:
    path = scenario(tmp_path)
    code, output = offbeat("lab", "run", path, "--json", "out.json", "--repeats", 1, "--steps", 2, folder=tmp_path)
    assert code == 0, output
    report = results.read(tmp_path / "out.json")
    assert [row.repeats for row in report.rows] == [1, 1]
    assert all(len(raw.step_s) == 2 for raw in report.raw)


def test_data_that_are_not_there_are_told_before_the_first_row(tmp_path: Path) -> None:
    text = LOOPBACK.replace('path = "work.py"', 'path = "work.py"\ndata = "pictures"\ntarget = 0.9')
    path = scenario(tmp_path, text, script='"""A race.\n\nReads pictures\nof cats.\n\nFast.\n"""' + SCRIPT)
    lacks = "There is no pictures (workload.data), so what is measured is not on the data of this scenario, nor is "
    lacks += 'the time to accuracy 0.9. work.py says: "Reads pictures of cats."'
    quick = ("--json", "out.json", "--repeats", 1, "--steps", 2)
    code, output = offbeat("lab", "run", path, *quick, folder=tmp_path)
    assert code == 0, output
    assert output.index(lacks) < output.index("1 of 2: repeat 1, ddp")
    assert lacks in offbeat("lab", "show", path, folder=tmp_path)[1]
    (tmp_path / "pictures").mkdir()
    for arguments in (("run", path, *quick), ("show", path)):
        assert "There is no" not in offbeat("lab", *arguments, folder=tmp_path)[1]


@pytest.mark.parametrize("name", ["mnist", "chars"])
def test_our_workloads_say_where_their_data_are_to_be_had(name: str, tmp_path: Path) -> None:
    folder = ROOT / "benchmarks/scenarios"
    found = Scenario.from_toml((folder / f"accuracy_{name}.toml").read_text().replace("../shared/data", "no/data"))
    assert f'../workloads/{name}.py says: "Reads ' in (told := lacking_data(found, folder))
    assert "https://" in told


def test_show_draws_and_counts(tmp_path: Path) -> None:
    code, output = offbeat("lab", "show", ROOT / "benchmarks/scenarios/uniform.toml", folder=tmp_path)
    assert code == 0
    assert "┌── 200 Mbit/s ── h0" in output
    assert "replay of resnet50: 6.13 MB of gradients in 54 layers" in output
    code, output = offbeat("lab", "show", ROOT / "benchmarks/scenarios/mesh.toml", folder=tmp_path)
    assert code == 0
    assert "h0 ─── h1 ─── h2 ─── h3\n│" in output
    assert "at least 2.000 s per step, 3.000 s if all is summed before it is gathered" in output
    assert "needs root, pyroute2 and 16 namespaces" in output
    code, output = offbeat("lab", "show", scenario(tmp_path), folder=tmp_path)
    assert code == 0
    assert "plain processes on loopback: h0, h1" in output
    assert "offbeat lab run needs no root. It makes 4 runs of 2 worker processes." in output


def test_show_says_what_run_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is only known where it would run: rights, more hosts than addresses; and what a row is spared."""
    (tmp_path / "many.toml").write_text(
        REPLAY.replace("count = 2\nrate_mbps = 100", "count = 300\nrate_mbps = 50")
        + '[[fault]]\nworker = 0\nstep = 5\nkind = "sigkill"\n[[fault]]\nworker = 0\nstep = 4\nkind = "deaf"'
    )
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    cli.show(tmp_path / "many.toml")
    lines = capsys.readouterr().out.splitlines()
    refused = [line for line in lines if line.startswith("offbeat lab run would refuse this here: ")]
    assert "Cannot build a lab as user 1000" in refused[0]
    assert "Cannot build 300 hosts: a lab has at most 250" in refused[1]
    assert any("needs root, pyroute2 and 301 namespaces, and /dev/net/tun for links" in line for line in lines)
    assert "left out of ddp: sigkill of worker 0 at its step 5, which takes others that continue" in lines
    with pytest.raises(NetworkError, match="as user 1000"):
        runner.run(*(cli.read_scenario(tmp_path / "many.toml")), tmp_path, command="", tell=lambda row, repeat: None)


def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ScenarioError, match="matplotlib is not installed"):
        cli.run(scenario(tmp_path), json=tmp_path / "out.json", png=tmp_path / "out.png")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('network = "loopback"', "rate_mbps = 0", "Cannot shape a link to 0 Mbit/s: .*(hosts.rate_mbps)."),
        ('"work.py"', '"walk.py"', "Cannot run the script 'walk.py': .*(workload.path)."),
        ('"offbeat"', '"offbeat"\nplan = {codex = {kind = "Cast"}}', "Cannot use the plan of row 'ours' (row[1].plan)"),
        ('"offbeat"', '"offbeat"\nplan = "no.toml"', "there is no file 'no.toml' in .*(row[1].plan)."),
        ("repeats", "repeets", "Unknown key 'repeets' (did you mean 'repeats'?).*(run.repeets)."),
    ],
)
def test_bad_scenarios_end_in_one_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = scenario(tmp_path, LOOPBACK.replace(old, new))
    code, output = offbeat("lab", "run", path, "--json", "out.json", folder=tmp_path)
    assert code == 2, output
    assert len(output.splitlines()) == 1, output
    assert offbeat("lab", "show", path, folder=tmp_path) == (2, output)
    for part in says.split(".*"):
        assert part in output
    assert not (tmp_path / "out.json").exists()


def test_a_result_that_has_no_place_is_refused_before_measuring(tmp_path: Path) -> None:
    code, output = offbeat("lab", "run", scenario(tmp_path), "--json", "no/out.json", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1)
    assert "there is no folder no" in output
    code, output = offbeat("lab", "show", "no.toml", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1)
    assert "Cannot read the scenario no.toml" in output


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fifo.toml", "it is no regular file"),
        ("/dev/zero", "it is no regular file"),
        ("folder.toml", "it is no regular file"),
        ("latin.toml", "it is not UTF-8 (byte 0 is 0xff)"),
        ("large.toml", "it has more than 256 KiB"),
        ("n" * 300, "File name too long"),
    ],
    ids=lambda value: value[:10],
)
def test_a_scenario_or_plan_that_is_no_file_of_text_is_refused_at_once(tmp_path: Path, name: str, says: str) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "large.toml").write_text("#" * 300_000)
    with pytest.raises(ScenarioError, match="Cannot read the scenario ") as caught:
        cli.read_scenario(tmp_path / name)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500
    if len(name) < 300:
        text = LOOPBACK.replace('"offbeat"', f'"offbeat"\nplan = "{name}"')
        with pytest.raises(ScenarioError, match="Cannot read the plan of row 'ours', ") as caught:
            jobs(Scenario.from_toml(text), tmp_path)
        assert says in str(caught.value)


def test_a_script_or_plan_of_an_endless_name_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"Cannot run the script 'sss.*\(workload\.path\)"):
        jobs(Scenario.from_toml(LOOPBACK.replace('"work.py"', f'"{"s" * 300}"')), tmp_path)
    (tmp_path / "work.py").write_text("")
    text = LOOPBACK.replace('"offbeat"', f'"offbeat"\nplan = "{"p" * 300}"')
    with pytest.raises(ScenarioError, match=r"there is no file 'ppp.*\(row\[1\]\.plan\)"):
        jobs(Scenario.from_toml(text), tmp_path)


@pytest.mark.parametrize("arguments", [["run", "scenario.toml", "--json", "out.json"], ["clean"]])
def test_without_root_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    scenario(tmp_path, LOOPBACK.replace('network = "loopback"', "rate_mbps = 100"))
    code = "import os; os.geteuid = lambda: 1000\nfrom offbeat.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "lab", *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Cannot build a lab as user 1000: making network namespaces needs root." in done.stderr


def test_replicas_that_differ_at_the_end_are_not_believed(tmp_path: Path) -> None:
    path = scenario(tmp_path, digest="os.environ['RANK']")
    with pytest.raises(
        DisagreementError, match=r"row 'ddp': at the end of repeat 0 ranks \[0, 1\] hold different values"
    ):
        run_first_row(tmp_path, path)


def test_who_did_not_settle_is_told_to(tmp_path: Path) -> None:
    """With a server, or with steps of a worker's own, replicas differ until then, and the lab cannot do it later."""
    text = LOOPBACK.replace('"offbeat"', '"offbeat"\nplan = { sync = { kind = "LocalSGD", every = 4 } }')
    path = scenario(tmp_path, text, digest="os.environ['RANK']")
    job = jobs(Scenario.from_toml(path.read_text()), tmp_path)[1]
    with pytest.raises(DisagreementError, match=r"row 'ours': .*call bound\.settle\(\) in the script"):
        runner.run_once(job, launch.loopback_places(["h0", "h1"]), tmp_path, 0, None)


def test_a_script_that_records_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"recorded no result.*\(workload\.path\)"):
        run_first_row(tmp_path, scenario(tmp_path, script="pass"))


def test_a_script_that_fails_is_quoted(tmp_path: Path) -> None:
    script = "import os\nif os.environ['RANK'] == '1': raise ValueError('no data')\nelse: os.kill(os.getpid(), 19)"
    with pytest.raises(WorkerLostError, match=r"rank 1 on host h1 ended with exit code 1(.|\n)*ValueError: no data"):
        run_first_row(tmp_path, scenario(tmp_path, script=script))


def test_plans_reach_the_workers(tmp_path: Path) -> None:
    """A table, a file, or none; and the bucket size of the workload is every row's."""
    (tmp_path / "plan.toml").write_text('[codec]\nkind = "Cast"\ndtype = "fp16"\n')
    rows = """
[[row]]
name = "table"
system = "offbeat"
plan = { codec = { kind = "Cast" } }
[[row]]
name = "file"
system = "offbeat"
plan = "plan.toml"
"""
    path = scenario(tmp_path, LOOPBACK.replace('"work.py"', '"work.py"\nbucket_bytes = 4096') + rows)
    made = {job.row.name: job for job in jobs(Scenario.from_toml(path.read_text()), tmp_path)}
    assert "Cast(dtype='bf16')" in made["table"].plan
    assert "Cast(dtype='fp16')" in made["file"].plan
    assert "4096" in made["table"].plan
    environment = made["file"].environment(tmp_path / "run")
    assert 'dtype = "fp16"' in environment["OFFBEAT_PLAN"]
    assert environment["OFFBEAT_LAB_SYSTEM"] == "offbeat"
    assert "OFFBEAT_PLAN" not in made["ddp"].environment(tmp_path / "run")
    # What is lossy is allowed to be; what is not, is not.
    assert made["ours"].tolerance is not None
    assert made["table"].tolerance is not None
    assert made["ours"].tolerance < 1e-4 < made["table"].tolerance


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_replay_that_sums_wrongly_fails(tmp_path: Path) -> None:
    """Nothing sums without rounding: with no tolerance for it, the workers' own check must end the run."""
    text = REPLAY.replace("rate_mbps = 100", 'network = "loopback"')
    job = dataclasses.replace(jobs(Scenario.from_toml(text), tmp_path)[0], tolerance=1e-12)
    with pytest.raises(WorkerLostError, match=r"the mean gradient of .* is wrong by"):
        runner.run_once(job, launch.loopback_places(["h0", "h1"]), tmp_path, 0, None)


class TestInNamespaces:
    pytestmark = needs_root

    @pytest.mark.timeout(180)
    def test_a_replay_of_two_hosts(self, tmp_path: Path) -> None:
        """Stock DDP and offbeat on the same shaped links: the sums are right and bit for bit the same."""
        path = scenario(tmp_path, REPLAY)
        code, output = offbeat("lab", "run", path, "--json", "out.json", folder=tmp_path, timeout_s=170)
        assert code == 0, output
        report = results.read(tmp_path / "out.json")
        self.check(report, Scenario.from_toml(REPLAY))

    @pytest.mark.slow
    @pytest.mark.timeout(240)
    def test_a_ring_of_three_hosts(self, tmp_path: Path) -> None:
        """Every direction is measured and counted; a link that becomes slower in the middle makes the steps behind it
        longer, and is as it was in the next run."""
        text = REPLAY.replace("[hosts]\ncount = 2\nrate_mbps = 100", RING).replace("repeats = 1", "repeats = 2")
        text = text.partition('[[row]]\nname = "offbeat"')[0]
        path = scenario(tmp_path, text)
        code, output = offbeat("lab", "run", path, "--json", "out.json", folder=tmp_path, timeout_s=230)
        assert code == 0, output
        report = results.read(tmp_path / "out.json")
        links = {f"h{a}>h{b}" for a in range(3) for b in range(3) if a != b}
        assert set(report.goodput_mbps) == links
        assert all(17 <= goodput <= 19.5 for goodput in report.goodput_mbps.values())
        assert {raw.digest for raw in report.raw} == {report.raw[0].digest}
        # Gloo's ring goes one way, and only acknowledgements come back.
        one_way = 4 / 3 * report.raw[0].gradient_bytes * len(report.raw[0].step_s)
        payload = sorted(one.payload_bytes / one_way for one in report.arcs)
        assert max(payload[:3]) < 0.05
        # But for small talk, and for what is sent again when a rate changes.
        assert payload[3:] == pytest.approx([1.0] * 3, abs=0.1)
        bytes_ = {f"{one.source}>{one.target}": one.sent_bytes for one in report.arcs}
        assert set(bytes_) == links
        assert all(one.share == pytest.approx(0.5, abs=0.5) for one in report.arcs)
        (row,) = report.rows
        assert row.events[0].startswith("fault: rate of 2 Mbit/s at the link h1-h2 at step 4 of worker 0")
        assert report.bounds == {"ddp": lower_bounds.CUTS}
        assert row.bound_s <= row.seconds_per_step.median
        for raw in report.raw:
            before, behind = raw.step_s[:2], raw.step_s[3:]
            assert min(behind) > 3 * min(before), "in each repeat: before it links are as they were"
        assert sum(raw.bytes_sent for raw in report.raw if raw.repeat == 0) == pytest.approx(
            sum(bytes_.values()), rel=0.1
        )

    def check(self, report: ResultFile, wanted: Scenario) -> None:
        assert isinstance(wanted.workload, Replay)
        gradient_bytes = size_bytes(wanted.workload.layers())
        wire_s = wanted.topology.allreduce_bound_s(gradient_bytes)
        assert {raw.digest for raw in report.raw} == {report.raw[0].digest}
        assert all(85 <= goodput <= 97 for goodput in report.goodput_mbps.values()), "85: what the lab itself refuses"
        for raw in report.raw:
            assert raw.gradient_bytes == gradient_bytes
            assert raw.gradient_error is not None
            assert raw.gradient_error < 1e-5
            # Two workers send their gradients once each; headers, acknowledgements and the small talk come on top.
            assert 1.0 <= raw.bytes_sent / (4 * gradient_bytes) <= 1.25
        for row in report.rows:
            assert row.bound_s == pytest.approx(max(wire_s, 0.012))
            assert row.bound_s <= row.seconds_per_step.median < 1
            assert len(row.wait_s_per_worker) == 2

    @pytest.mark.timeout(180)
    @pytest.mark.slow
    def test_the_link_of_the_server_is_watched(self, tmp_path: Path) -> None:
        """What passed there is what two workers sent; where no row uses it, that of rank 0 is."""
        served = 'system = "offbeat"\nplan = { fabric = { kind = "ParameterServer", block_bytes = 65536 } }'
        text = REPLAY.replace("count = 2", "count = 2\nservers = 1").replace('system = "offbeat"', served)
        path = scenario(tmp_path, text.replace("steps = 4", "steps = 20"))
        code, output = offbeat("lab", "run", path, "--json", "a.json", "--png", "a.png", folder=tmp_path, timeout_s=170)
        assert code == 0, output
        report = results.read(tmp_path / "a.json")
        assert report.bounds == {"ddp": lower_bounds.ALLREDUCE, "offbeat": lower_bounds.TOGETHER}
        ring, server = report.links
        assert [(use.row, use.host) for use in (ring, server)] == [("ddp", "h0"), ("offbeat", "s0")]
        sent_bytes = sum(raw.bytes_sent for raw in report.raw if raw.row == "offbeat")
        # All but the first and last intervals of the measured steps, and what they are cut to.
        assert 0.7 * sent_bytes <= sum(server.received_bytes) <= 1.1 * sent_bytes
        assert sum(server.sent_bytes) >= 0.7 * sent_bytes
        assert 0 < server.share <= 1.1
        assert "uneven" in output

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_ctrl_c_leaves_nothing(self, tmp_path: Path, number: signal.Signals) -> None:
        text = LOOPBACK.replace('network = "loopback"', "rate_mbps = 100")
        path = scenario(tmp_path, text, script="import time\ntime.sleep(300)")
        with start("lab", "run", path, "--json", "out.json", folder=tmp_path) as process:
            try:
                claims: list[lab_registry.LabRecord] = []

                def begun() -> bool:
                    claims[:] = [claim for claim in lab_registry.leftovers() if claim.owner_pid == process.pid]
                    return sum("work.py" in _command(pid) for pid in descendants(process.pid)) == 2

                assert soon(begun, within_s=40)
                family = descendants(process.pid)
                namespaces = [DIRECTORY / name for name in claims[0].namespaces]
                assert len(namespaces) == 3
                assert all(place.exists() for place in namespaces)
                process.send_signal(number)
                process.wait(10)
            finally:
                process.kill()
            assert soon(lambda: not alive(family))
            assert soon(lambda: not any(place.exists() for place in namespaces))
            assert not lab_registry.path_of(claims[0].lab).exists()
            assert not (tmp_path / "out.json").exists()

    def test_clean_says_what_it_removed_and_what_it_kept(self, tmp_path: Path) -> None:
        """A claim of this living test is kept."""
        claim = lab_registry.LabRecord.mine(f"{os.getpid():08x}"[-8:], [])
        path = lab_registry.write(claim)
        try:
            code, output = offbeat("lab", "clean", folder=tmp_path)
            assert code == 0, output
            assert f"kept lab {claim.lab}: process {os.getpid()} still runs it (--force removes it, too)" in output
            assert path.exists()
        finally:
            path.unlink()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: builds network namespaces")
@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["udp", "ebpf"])
def test_a_switch_sums_rightly_over_links_that_damage_frames(tmp_path: Path, target: str) -> None:
    """A run whose gradients are wrong, or whose replicas differ, is an error."""
    if target == "ebpf" and why_not():
        pytest.skip(why_not())
    hosts = f'count = 3\nrate_mbps = 30\nswitch = "{target}"'  # a busy machine carries no more on all links at once
    text = REPLAY.replace("count = 2\nrate_mbps = 100", hosts).replace("65536", "400_000")
    text = text.replace('[[row]]\nname = "ddp"\nsystem = "ddp"\n', "")
    text = text.replace("[run]", '[impair]\ncorrupt = 0.02\n[run]\nbaseline = "offbeat"')
    text += 'plan = { fabric = { kind = "Switch" } }\n'
    path = scenario(tmp_path, text)
    code, output = offbeat("lab", "run", path, "--json", "out.json", folder=tmp_path, timeout_s=150)
    assert code == 0, output
    report = results.read(tmp_path / "out.json")
    assert [row.row for row in report.rows] == ["offbeat"]


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: builds network namespaces")
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_delay_on_the_links_costs_each_round_of_the_ring(tmp_path: Path) -> None:
    """Two hosts, two rounds per bucket, 30 ms each way: at least 60 ms more, which the simulator knows."""
    step_s, simulated_s = {}, {}
    for name, impair in (("good", ""), ("late", "[impair]\ndelay_ms = 30\n")):
        path = scenario(tmp_path, REPLAY.replace("[run]", f"{impair}[run]").replace("65536", "4_000_000"))
        code, output = offbeat("lab", "run", path, "--json", "out.json", folder=tmp_path, timeout_s=85)
        assert code == 0, output
        report = results.read(tmp_path / "out.json")
        step_s[name] = next(row.seconds_per_step.median for row in report.rows if row.row == "offbeat")
        simulated_s[name] = next(one.seconds_per_step for one in report.simulated if one.row == "offbeat")
    assert step_s["late"] > step_s["good"] + 0.06
    assert simulated_s["late"] > simulated_s["good"] + 0.05
