"""`offbeat run`: output with ranks in front, one culprit named, nothing left behind."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat import GRBS, LocalSGD, Plan
from offbeat.cli.app import run_app
from tests.cli.commands import TRAIN, alive, clean_environment, descendants, offbeat, script, start
from tests.docs.command_line import commands, options
from tests.patience import stretched

if TYPE_CHECKING:
    from pathlib import Path


def test_any_script_and_its_arguments(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import sys, os; print('hello', sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'], __name__)"
    )
    code, output = offbeat("run", "--workers", 3, path, "--flag", "-x", "5", folder=tmp_path, cold=True)
    assert code == 0, output
    for rank in range(3):
        assert f"[{rank}] hello ['--flag', '-x', '5'] {rank} 3 __main__" in output


def test_much_output_without_end_of_line(tmp_path: Path) -> None:
    # A signal may cut one write short.
    loop = "while rest:\n    rest = rest[os.write(1, rest):]"
    path = script(tmp_path, f"import os\nrest = b'\\xff' + b'y' * 3_000_000\n{loop}")
    code, output = offbeat("run", path, folder=tmp_path)
    assert code == 0
    assert output.count("y") == 6_000_000
    assert max(map(len, output.splitlines())) < 2_000_000


def test_a_last_line_without_end_while_a_child_has_the_output_open(tmp_path: Path) -> None:
    child = "import subprocess\nsubprocess.Popen(['sleep', '3'])\n"
    code, output = offbeat("run", "--workers", 1, script(tmp_path, f"{child}print('the end', end='')"), folder=tmp_path)
    assert code == 0
    assert "[0] the end\n" in output


def test_training_leaves_a_run_folder(tmp_path: Path) -> None:
    code, output = offbeat("run", "--run-dir", "out", script(tmp_path, TRAIN), folder=tmp_path)
    assert code == 0, output
    assert Plan.from_toml((tmp_path / "out/plan.toml").read_text()) == Plan()
    records = [msgspec.json.decode(line) for line in (tmp_path / "out/metrics.jsonl").read_bytes().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    assert sorted((r["rank"], r["step"]) for r in steps) == [(rank, step) for rank in (0, 1) for step in range(4)]
    for record in steps:
        assert 0 < record["compute_s"] <= record["step_s"]
        assert 0 <= record["wait_s"] <= record["step_s"]
        assert record["communication_s"] > 0
        assert record["bytes_sent"] > 0
    assert sum(r["kind"] == "end" and r["error"] is None for r in records) == 2


@pytest.mark.slow
def test_the_plan_reaches_the_workers(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[codec]\nkind = 'Cast'\n")
    text = "import offbeat\nwith offbeat.init() as run: print(run.plan.codec)"
    code, output = offbeat("run", "--plan", "plan.toml", script(tmp_path, text), folder=tmp_path)
    assert code == 0, output
    assert output.count("Cast(dtype='bf16')") == 2


FAILS = TRAIN.replace(
    "for step in range(4):",
    "def fail():\n    raise RuntimeError('the disk is full')\n"
    "for step in range(4):\n    if run.rank == 1 and step == 2: fail()",
)


OWN_PLAN = (
    "import offbeat\nwith offbeat.init(offbeat.Plan(sync=offbeat.LocalSGD(3))) as run:\n    print(run.plan.sync)\n"
)


def test_a_plan_of_the_scripts_own_is_in_the_run_folder_and_none_other_beside_it(tmp_path: Path) -> None:
    path = script(tmp_path, OWN_PLAN)
    code, output = offbeat("run", "--run-dir", "own", path, folder=tmp_path)
    assert (code, "LocalSGD(every=3" in output) == (0, True), output
    assert Plan.from_toml((tmp_path / "own/plan.toml").read_text()) == Plan(sync=LocalSGD(3))
    code, output = offbeat("run", "--scheduling", "Prophet()", "--run-dir", "two", path, folder=tmp_path)
    assert code == 2
    assert "Cannot go by two plans" in output


def test_options_refine_the_plan_of_the_script_when_asked(tmp_path: Path) -> None:
    path = script(tmp_path, OWN_PLAN)
    parts = ["--codec", "GRBS(4)", "--keeps", "global_batch", "--nonfinite", "skip", "--bucket-bytes", 4096]
    code, output = offbeat("run", "--refine", *parts, "--run-dir", "own", path, folder=tmp_path)
    assert code == 0, output
    refined = Plan(sync=LocalSGD(3), codec=GRBS(4), keeps="global_batch", nonfinite="skip", bucket_bytes=4096)
    assert Plan.from_toml((tmp_path / "own/plan.toml").read_text()) == refined
    code, output = offbeat("run", "--refine", path, folder=tmp_path)
    assert (code, "Cannot refine the plan of the script" in output) == (2, True), output


def test_every_part_of_a_plan_is_an_option(tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(Plan)}
    known = {option.removeprefix("--").replace("-", "_") for option in options(commands()["run"])}
    assert fields - known == set(), "`--validator` runs one; its rule is --validating-rule"
    served = ["--fabric", "ParameterServer()", "--rule", "TrimmedMean(1)", "--privacy", "GaussianMechanism(noise=2.0)"]
    told = offbeat("run", *served, "--tuning", "BatchTuning(smalest=1)", script(tmp_path, OWN_PLAN), folder=tmp_path)
    assert told[0] == 2
    assert "Unknown key 'smalest' of BatchTuning (did you mean 'smallest'" in " ".join(told[1].split())


def test_the_culprit_is_named_with_its_traceback(tmp_path: Path) -> None:
    code, output = offbeat("run", "--workers", 3, script(tmp_path, FAILS), folder=tmp_path)
    assert code == 1
    tail = output[output.rindex("rank 1 on ") :]
    assert "ended with exit code 1" in tail
    assert "in fail" in tail
    assert "RuntimeError: the disk is full" in tail
    assert "runpy" not in tail


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("import sys; sys.exit(7)", 7, "ended with exit code 7"),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            128 + 9,
            "was killed by SIGKILL",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            128 + 11,
            "was killed by SIGSEGV",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_exit_code_is_the_jobs(tmp_path: Path, fault: str, code: int, says: str) -> None:
    text = TRAIN.replace("for step in range(4):", f"for step in range(4):\n    if run.rank == 1 and step == 1: {fault}")
    got, output = offbeat("run", "--workers", 2, script(tmp_path, text), folder=tmp_path)
    assert got == code, output
    assert f"rank 1 on {__import__('socket').gethostname()} {says}" in output


def test_who_ends_without_a_word_is_summed_up_with_its_exit_code(tmp_path: Path) -> None:
    fault = "for step in range(4):\n    if run.rank == 1 and step == 2: import os; os._exit(7)"
    path = script(tmp_path, TRAIN.replace("for step in range(4):", fault))
    code, output = offbeat("run", "--run-dir", "out", path, folder=tmp_path)
    assert code == 7, output
    assert "Rank 1 ended with exit code 7 after " in output
    assert "Rank 1 ended with exit code 7 after " in (tmp_path / "out/report.html").read_text()
    assert "last word" not in output


TOLD_TO_END = TRAIN.replace("range(4)", "range(40)").replace(
    "    optimizer.step()",
    "    optimizer.step()\n    if run.rank == 1 and step == 9:\n        import os, signal\n"
    "        FIRST\n        os.kill(os.getpid(), signal.SIGTERM)",
)


@pytest.mark.parametrize(
    ("first", "says", "not_said"),
    [
        ("pass", "rank 1 was asked to end by SIGTERM, and left cleanly; the others continue.", "was killed"),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
            "rank 1 was killed by SIGTERM; the others continue.",
            "in order",
        ),
    ],
)
def test_who_is_told_to_end_left_in_order_or_was_killed(tmp_path: Path, first: str, says: str, not_said: str) -> None:
    path = script(tmp_path, TOLD_TO_END.replace("FIRST", first))
    code, output = offbeat("run", "--fabric", "Elastic()", path, folder=tmp_path)
    assert code == 0, output
    assert says in output
    assert not_said not in output


OUTLASTED = TRAIN.replace("range(4)", "range(10**6)").replace(
    "    optimizer.step()",
    """
    optimizer.step()
    import os, pathlib, signal
    first = pathlib.Path("first")
    if run.rank == 0 and step == 9:
        first.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGTERM)
    if run.rank > 0 and first.exists() and (pid := first.read_text()) and not os.path.exists(f"/proc/{pid}"):
        break""",
)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(("--sync", "ASP()", "--fabric", "ParameterServer()"), id="server"),
        pytest.param(("--fabric", "Elastic()"), id="elastic", marks=pytest.mark.slow),
    ],
)
def test_the_first_worker_too_leaves_in_order_however_long_the_others_go_on(
    tmp_path: Path, plan: tuple[str, ...]
) -> None:
    code, output = offbeat("run", *plan, script(tmp_path, OUTLASTED), folder=tmp_path)
    assert code == 0, output
    assert "rank 0 was asked to end by SIGTERM, and left cleanly; the others continue." in output
    assert "was killed" not in output


def test_a_job_that_is_interrupted_did_not_end_well(tmp_path: Path) -> None:
    """Its workers leave in order, each watched until it has."""
    text = TRAIN.replace("range(4)", "range(10**6)").replace(
        "    optimizer.step()", "    optimizer.step()\n    if step == 9: print('ready', flush=True)"
    )
    with start("run", "--fabric", "Elastic()", script(tmp_path, text), folder=tmp_path) as process:
        assert process.stdout is not None
        said, ready = "", 0
        while ready < 2:
            line = process.stdout.readline()
            assert line, said
            said += line
            ready += "ready" in line
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=20)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGINT: ending 2 workers." in said
    assert "All 2 workers were asked to stop, and left cleanly after" in said
    assert "sentinel is gone" not in said
    assert "ended well" not in said


REFUSED = TRAIN.replace(
    "for step in range(4):",
    "for step in range(4):\n    if run.rank == 1 and step == 2: optimizer.param_groups[0]['lr'] = -1.0",
)


def test_what_is_refused_of_one_worker_is_not_overlooked(tmp_path: Path) -> None:
    """With a server the others go on without it, and end well."""
    path = script(tmp_path, f"{REFUSED}\nprint('done', run.step)")
    code, output = offbeat("run", "-n", 2, "--sync", "ASP()", "--fabric", "ParameterServer()", path, folder=tmp_path)
    assert code == 2, output
    assert "[1] offbeat: Cannot continue in group 0 of SGD, as rank 1 has it: Invalid learning rate: -1.0." in output
    assert "rank 1 ended with exit code 2; the others continue." in output
    assert "[0] done 4" in output
    assert "rank 1 on " in output


LEAVES = TRAIN.replace("range(4)", "range(40)").replace("model(torch", "FAULT; model(torch")


@pytest.mark.slow
def test_who_leaves_early_is_named(tmp_path: Path) -> None:
    """Exit code 0 is no failure of its own, and yet the others can go no further."""
    text = LEAVES.replace("FAULT", "step == 9 and run.rank == 1 and __import__('sys').exit(0)")
    code, output = offbeat("run", "-n", 3, "--timeout", 1.5, script(tmp_path, text), folder=tmp_path)
    assert code == 76
    assert "rank 1 on " in output
    assert "ended with exit code 0 while the others still needed it." in output
    assert output.count("is done after 9 steps, and takes no further part.") >= 2, output
    assert "exit code 76" not in output


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('no data')",
        pytest.param("__import__('os').kill(__import__('os').getpid(), 15)", marks=pytest.mark.slow),
    ],
)
def test_last_records_are_written_and_the_traceback_is_told_once(tmp_path: Path, end: str) -> None:
    text = LEAVES.replace("FAULT", f"\n    if step == 9 and run.rank == 1: {end}\n    ").replace("    ; ", "    ")
    code, output = offbeat("run", "-n", 3, "--run-dir", "out", script(tmp_path, text), folder=tmp_path)
    assert code in (1, 128 + 15), output
    records = [msgspec.json.decode(line) for line in (tmp_path / "out/metrics.jsonl").read_bytes().splitlines()]
    for rank in range(3):
        assert [r["step"] for r in records if r["kind"] == "step" and r["rank"] == rank] == list(range(9))
    ends = {r["rank"]: r["error"] for r in records if r["kind"] == "end"}
    assert set(ends) == {0, 1, 2}
    assert "no data" in ends[1] or "SIGTERM" in ends[1]
    assert "runpy" not in output
    assert "Rank 1 ended after 9 steps with ValueError: no data." in output or "killed by SIGTERM" in output
    assert output.count("Traceback") <= 2, "its own, and the launcher's"


def test_a_forked_child_is_not_the_worker(tmp_path: Path) -> None:
    child = "import os\npid = os.fork()\nif pid == 0: raise SystemExit\nprint('child', os.waitpid(pid, 0)[1])\n"
    code, output = offbeat("run", script(tmp_path, TRAIN + child), folder=tmp_path)
    assert code == 0, output
    assert output.count("child 0") == 2


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    code, output = offbeat("run", "--run-dir", path / "out", path, folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "Choose another folder with --run-dir." in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_3_s(tmp_path: Path, number: signal.Signals) -> None:
    """Also workers that ignore signals, are stopped, or started something themselves."""
    text = """
    import os, signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    print("ready", flush=True)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
    """
    with start("run", "--workers", 2, script(tmp_path, text), folder=tmp_path, cold=True) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += "ready" in process.stdout.readline()
        below = descendants(process.pid)
        assert len(below) >= 4
        began_s = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=10)
        assert time.monotonic() - began_s < stretched(3.5)
        assert process.returncode == 128 + number
        assert not alive(below)


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    text = "import time; print('ready', flush=True); time.sleep(1000)"
    with start("run", script(tmp_path, text), folder=tmp_path, cold=True) as process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            pass
        below = descendants(process.pid)
        process.kill()
    deadline_s = time.monotonic() + 3
    while alive(below) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(below)


def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    # One write per line: under torchrun both workers write to the same pipe.
    tell = "weight = round(float(model.module.weight.detach().sum()), 4)\n"
    tell += "import os; os.write(1, f'weights {run.rank} {weight} {run.world}\\n'.encode())\nrun.close()\n"
    path = script(tmp_path, TRAIN + tell)
    code, ours = offbeat("run", path, folder=tmp_path)
    assert code == 0, ours
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs = sorted(line for line in done.stdout.splitlines() if line.startswith("weights"))
    assert len(theirs) == 2
    assert theirs == sorted(line.partition("] ")[2] for line in ours.splitlines() if "weights" in line)


# -- bad input: one sentence, exit code 2, no traceback ----------------------------------------------------------

MODELS = {
    "model.requires_grad_(False)": "no parameter with requires_grad",
    "model = torch.nn.Linear(4, 2 + run.rank)": "The model differs between workers",
}


@pytest.mark.parametrize(("line", "debug"), list(zip(MODELS, [False, True], strict=True)))
def test_a_refused_model_ends_with_code_2(tmp_path: Path, line: str, debug: bool) -> None:
    text = TRAIN.replace("model = torch.nn.Linear(4, 2)\n", f"model = torch.nn.Linear(4, 2)\n{line}\n")
    options = ["--debug"] if debug else []
    code, output = offbeat(*options, "run", script(tmp_path, text), folder=tmp_path)
    assert code == 2, output
    assert MODELS[line] in output
    assert ("Traceback" in output) == debug


def test_a_bad_plan_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[codec]\nkind = 'Cats'\n")
    for arguments in (["run", "--plan", "plan.toml", "train.py"], ["plan", "show", "plan.toml"]):
        script(tmp_path, TRAIN)
        code, output = offbeat(*arguments, folder=tmp_path)
        assert code == 2
        assert "plan.toml: Unknown codec 'Cats' (did you mean 'Cast'?) - at `plan.codec.kind`." in output
        assert "Traceback" not in output


def test_an_option_behind_the_script_is_said_to_be_the_scripts(tmp_path: Path) -> None:
    path = script(tmp_path, "import argparse; argparse.ArgumentParser().parse_args()")
    code, output = offbeat("run", path, "--workers=3", folder=tmp_path)
    assert code == 2
    assert "--workers stands after the script and was passed to it." in output
    code, output = offbeat("run", path, "--own", folder=tmp_path)
    assert code == 2
    assert "stands after the script" not in output
    path.write_text("import offbeat\noffbeat.init(offbeat.Plan(rule=offbeat.robust.Krum(1)))")
    code, output = offbeat("run", path, "--plan", "x", folder=tmp_path)
    assert code == 2
    assert "Cannot combine by Krum(faulty=1)" in output
    assert "stands after the script" not in output, "offbeat refused it, and not the script"


@pytest.mark.parametrize("workers", ["4097", "99999999999999999999"])
def test_more_workers_than_a_job_may_have_are_refused(
    workers: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["offbeat", "run", "-n", workers, "nothing.py"])
    with pytest.raises(SystemExit) as ended:
        run_app()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'--workers'" in said
    assert "4096" in said


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    code, output = offbeat("run", "nothing.py", folder=tmp_path)
    assert code == 2
    assert "Cannot run nothing.py: there is no such file." in output
    (tmp_path / "folder").mkdir()
    _, output = offbeat("run", "folder", folder=tmp_path)
    assert "Cannot run folder: it is no regular file." in output


@pytest.mark.parametrize("seconds", ["inf", "-inf", "nan", "1e400", "-1", "0", "0.01", "86401"])
@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_timeout_that_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, seconds: str
) -> None:
    arguments = [command, f"--timeout={seconds}", *(["train.py"] if command == "run" else [])]
    monkeypatch.setattr(sys, "argv", ["offbeat", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_app()
    said = capsys.readouterr().err
    assert (ended.value.code, len(said.splitlines())) == (2, 1), said
    assert said.startswith(
        f"offbeat: Cannot use a timeout of {float(seconds):g} s: choose a number of seconds from 0.1"
    )


@pytest.mark.parametrize("plan", ["offbeat.Plan(sync=offbeat.KSync(3), fabric=offbeat.Elastic())", "of_the_options"])
def test_what_is_refused_to_all_is_said_once_with_short_names(tmp_path: Path, plan: str) -> None:
    """Where the script makes the plan, and where the number of workers is what it does not go with."""
    options = () if "Plan" in plan else ("--sync", "KSync(9)", "--fabric", "ParameterServer()")
    path = script(tmp_path, TRAIN.replace("offbeat.init()", f"offbeat.init({'' if options else plan})"))
    code, output = offbeat("run", "--workers", 4, *options, path, folder=tmp_path)
    says = "Cannot make updates of 9 contributions" if options else "Cannot use KSync(k=3) on Elastic(): with it"
    assert code == 2, output
    assert output.count("Cannot ") == output.count(says) == 1, output
    assert "Each worker on" in output
    assert "No step was recorded.\n" in output


def test_what_is_refused_to_one_is_repeated_when_the_others_have_spoken(tmp_path: Path) -> None:
    says = "Cannot continue as rank 1."
    line = f"for step in range(4):\n    if run.rank == 1 and step == 2: raise offbeat.errors.PlanError({says!r})"
    path = script(tmp_path, TRAIN.replace("for step in range(4):", line))
    code, output = offbeat("run", "--workers", 3, path, folder=tmp_path)
    assert code == 2, output
    assert f"[1] offbeat: {says}" in output
    assert f"  offbeat: {says}" in output.partition("\nrank 1 on ")[2]


def test_a_refusal_may_name_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    refuses = "import offbeat\nraise offbeat.errors.PlanError('Cannot read /data/\\udcff: choose another.')"
    code, output = offbeat("run", "--workers", 2, script(tmp_path, refuses), folder=tmp_path)
    assert code == 2, output
    assert output.count(r"offbeat: Cannot read /data/\udcff: choose another.") == 1, output
    assert "Traceback" not in output


@pytest.mark.parametrize("line", ["model = torch.nn.Linear(4, 2)", "model = torch.nn.Linear(4, 2 + run.rank)"])
def test_under_torchrun_too_what_is_refused_to_all_is_said_once(tmp_path: Path, line: str) -> None:
    plan = "" if "rank" in line else "offbeat.Plan(sync=offbeat.KSync(9), fabric=offbeat.ParameterServer())"
    text = TRAIN.replace("offbeat.init()", f"offbeat.init({plan})").replace("model = torch.nn.Linear(4, 2)", line)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script(tmp_path, text))],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    says = "Cannot make updates of 9 contributions" if plan else "The model differs between workers"
    assert done.stderr.count(says) == 1, done.stderr
