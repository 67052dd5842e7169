"""Who announces and does not send is found out, in real jobs too; who sends slowly is waited for."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from offbeat.attack_spec import AttackSpec
from offbeat.fault_spec import Fault
from offbeat.server.shard.push_watch import Mark, PushWatch
from offbeat.server.shard.update_scheduler import UpdateScheduler
from offbeat.sync import Apply, Push
from offbeat.testing import attacker, faults
from tests.cli.commands import COMMAND, clean_environment, script

ROOT = Path(__file__).parent.parent.parent
STEPS = 6
TRAIN = """
import os, time
import torch, offbeat
run = offbeat.init()
torch.manual_seed(0)
model = torch.nn.Linear(SIZE, SIZE)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(6):
    model(torch.randn(3, SIZE)).sum().backward()
    began_s = time.monotonic()
    optimizer.step()
    optimizer.zero_grad()
    print(f"worker {run.rank} step {step} took {time.monotonic() - began_s:.2f} s", flush=True)
run.close()
"""


class Watched:
    """A watch of 2 s over one contribution, number 3 of worker 1."""

    def __init__(self) -> None:
        self.awaited: list[tuple[int, Push]] = [(0, (1, 3))]
        self.mark: Mark | None = (1, 100)
        self.overdue: list[tuple[int, Push]] = []
        self.watch = PushWatch(
            2.0,
            awaited=lambda: self.awaited,
            mark=lambda worker: self.mark,
            overdue=lambda model, push: self.overdue.append((model, push)),
        )

    def wait(self, seconds: float, *marks: Mark | None) -> None:
        """Time passes, in which the worker's pushes are at these marks one after the other, or where they were."""
        for index in range(round(seconds / 0.5)):
            self.mark = marks[index % len(marks)] if marks else self.mark
            self.watch.look(0.5)


def test_who_brings_nothing_is_overdue_after_the_timeout() -> None:
    watched = Watched()
    watched.wait(2.0)
    assert watched.overdue == [], "at the first look nothing is known of before"
    watched.wait(0.5)
    assert watched.overdue == [(0, (1, 3))]


def test_any_byte_is_enough() -> None:
    watched = Watched()
    for left in range(99, 90, -1):
        watched.wait(1.5, (1, left))
    assert watched.overdue == []


def test_time_in_which_the_link_is_away_counts_for_nothing() -> None:
    watched = Watched()
    watched.wait(1.5, (1, 100))
    watched.wait(30.0, None)
    assert watched.overdue == []
    watched.wait(1.0, (1, 100))
    assert watched.overdue == [(0, (1, 3))]


def test_what_has_come_is_not_watched_any_more() -> None:
    watched = Watched()
    watched.wait(1.5)
    watched.awaited = []
    watched.wait(5.0)
    watched.awaited = [(0, (1, 4))]
    watched.wait(2.0)
    assert watched.overdue == []


def test_awaited_are_contributions_of_updates_that_are_not_whole_here() -> None:
    scheduler = UpdateScheduler([0, 1])
    for worker in (0, 1):
        scheduler.admit(worker, 0)
    scheduler.arrive((0, 0), 0, "a")
    assert scheduler.awaited() == [], "in no update yet"
    pushes = ((0, 0), (1, 0))
    scheduler.apply(Apply(pushes), dict.fromkeys(pushes))
    assert sorted(scheduler.awaited()) == [(0, 0), (1, 0)]
    scheduler.arrive((0, 0), 1, "b")
    assert scheduler.awaited() == [(1, 0)]
    scheduler.lose(1)
    assert scheduler.awaited() == []
    empty = UpdateScheduler([])
    empty.admit(1, 0)
    empty.apply(Apply(((1, 0),)), {(1, 0): None})
    assert empty.awaited() == [], "a shard that holds no block waits for none"


def trained(folder: Path, variables: dict[str, str], *options: str, size: int = 4) -> tuple[int, str, float]:
    """Three workers and a server whose timeout is a second; how it ended, what was said, and how long it took."""
    train = script(folder, TRAIN.replace("SIZE", str(size)))
    began_s = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "run", "--workers", "3", "--fabric", "ParameterServer()", "--timeout", "1", *options,
         str(ROOT / "offbeat/testing/run_with_faults.py"), str(train)],
        cwd=folder, env={**clean_environment(), **variables}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began_s


def steps_of(said: str, worker: int) -> list[float]:
    return [
        float(took)
        for took in re.findall(rf"^\[{worker}\] worker {worker} step \d+ took ([\d.]+) s", said, re.MULTILINE)
    ]


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--servers", "2"), marks=pytest.mark.slow)], ids=["one-shard", "two-shards"]
)
def test_a_liar_that_never_sends_stops_nobody(tmp_path: Path, options: tuple[str, ...]) -> None:
    attacks, log = [AttackSpec(workers=[1], kind="drop", from_step=2)], tmp_path / "lies"
    code, said, _ = trained(tmp_path, attacker.environment(attacks, log), *options)
    attacker.assert_forged(attacks, log)
    assert len(steps_of(said, 1)) == 2
    for worker in (0, 2):
        steps = steps_of(said, worker)
        assert len(steps) == STEPS, said
        assert sum(took > 1.5 for took in steps) == 1, "it held them up once, and not again"
    assert re.search(
        r"Rank 1 is gone: .*it announced contribution 2, and has pushed nothing more of it for 2 s\.", said
    )
    assert "Cannot continue with rank 1: it announced contribution 2, and has pushed nothing more of it for 2 s" in said
    assert code != 0, "a worker was lost"


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_slow_link_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    """2.6 MB at 0.4 MB/s take three times what a worker may be without a byte."""
    struck, log = [Fault(worker=1, step=1, kind="slow-link", seconds=8.0, factor=30.0)], tmp_path / "fired"
    code, said, _ = trained(tmp_path, faults.environment(struck, log), "--servers", "1", size=800)
    faults.assert_fired(struck, log)
    assert [len(steps_of(said, worker)) for worker in range(3)] == [STEPS] * 3, said
    assert max(steps_of(said, 0)) > 4.5
    assert "is gone" not in said
    assert code == 0
