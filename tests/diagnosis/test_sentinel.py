"""A sentinel speaks for its worker when that cannot, does it no harm, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from offbeat.diagnosis.explain import Diagnosis, explain
from offbeat.diagnosis.hub import Hub
from offbeat.diagnosis.process_state import catches
from offbeat.diagnosis.sentinel import STACK_SIGNAL
from offbeat.diagnosis.sentinel_client import SentinelClient
from offbeat.diagnosis.status_page import StatusPage
from offbeat.errors import NetworkError
from offbeat.wire.messages import ClusterReport, WorkerReport
from tests.cli.commands import alive, descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = b"x" * 32
ASK = timedelta(seconds=5)
BOUND_S = 5.0

# The other worker: reports, waits for a line, does `deed`, and closes.
WORKER = """
import itertools, os, signal, sys, time
from offbeat.diagnosis.sentinel_client import SentinelClient
watch = SentinelClient.start(rank={rank}, world=2, token=b"x" * 32, hub={hub!r})
watch.say("computing", step=7)
print(watch.hub, watch._process.pid, flush=True)

def forward():
    if not sys.stdin.readline():
        os._exit(9)  # the test has ended
    {deed}

forward()
watch.close()
print("closed", flush=True)
"""


class Other:
    """A worker in a process of its own.

    Args:
        rank: its rank of two; rank 0 opens the hub.
        deed: a Python statement, done at `go`.
    """

    def __init__(self, rank: int, deed: str, hub: str | None) -> None:
        code = WORKER.format(rank=rank, deed=deed, hub=hub)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.hub, sentinel = self.process.stdout.readline().split()
        self.sentinel = int(sentinel)

    @property
    def pid(self) -> int:
        return self.process.pid

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin() -> Iterator[Callable[..., Other]]:
    """Starts other workers, and sees to it that neither they nor their sentinels stay."""
    others: list[Other] = []

    def start(rank: int, deed: str, hub: str | None = None) -> Other:
        others.append(Other(rank, deed, hub))
        return others[-1]

    yield start
    for other in others:
        other.end()
    left = {other.sentinel for other in others}
    until(lambda: not alive(left), "sentinels were left behind")


@pytest.fixture
def hub() -> Iterator[SentinelClient]:
    """The watch of rank 0, in this process."""
    watch = SentinelClient.start(rank=0, world=2, token=TOKEN, hub=None)
    watch.say("exchanging", step=7, operation=b"all-reduce")
    yield watch
    watch.close()
    assert not {pid for pid in descendants(os.getpid()) if pid == watch._process.pid}


def until(condition: Callable[[], object], otherwise: str) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)


def look(watch: SentinelClient, rank: int, stacks: tuple[int, ...] = ()) -> Diagnosis:
    """What `rank` finds out while it waits in the exchange of step 7."""
    return judge(watch.ask_all(ASK, stacks), rank)


def judge(cluster: ClusterReport, rank: int) -> Diagnosis:
    here = {"step": 7, "phase": "exchanging", "operation": "all-reduce", "place": "all-reduce of bucket 1/1"}
    return explain(cluster, rank=rank, waited_s=4.0, **here)  # type: ignore[arg-type]


DEEDS = {
    "paused": "os.kill(os.getpid(), signal.SIGSTOP)",
    "dead": "os.kill(os.getpid(), signal.SIGKILL)",
    "raised": "watch.last_words('raised', 'RuntimeError: the disk is full'); os._exit(1)",
    # A sum over a C iterator never lets go of the GIL, and unlike a sleep in C no signal cuts it short.
    "gil": "sum(itertools.repeat(0, 10**12))",
    "sleeping": "time.sleep(20)",
    "done": "watch.close(); time.sleep(20)",
}


@pytest.mark.parametrize("reason", DEEDS)
def test_it_speaks_for_its_worker(reason: str, hub: SentinelClient, begin: Callable[..., Other]) -> None:
    other = begin(1, DEEDS[reason], hub.hub)
    until(lambda: hub.ask_all(ASK).words[1].step == 7, "it has not reported")
    # A process that has just started was busy a moment ago.
    until(lambda: reason != "sleeping" or hub.ask_all(ASK).words[1].busy < 0.05, "it does not come to rest")
    other.go()
    until(lambda: [c.reason for c in look(hub, 0).culprits] == [reason], f"rank 1 is not found {reason}")
    found = look(hub, 0, stacks=(1,))
    assert [c.rank for c in found.culprits] == [1]
    assert found.fatal == (reason in {"dead", "raised", "done"})
    if reason == "raised":
        assert "| RuntimeError: the disk is full" in found.text
    if reason in {"gil", "sleeping"}:
        assert "in forward" in found.text, "its stack is shown, whoever holds the GIL"


def test_the_stack_of_the_hubs_own_worker_is_shown(begin: Callable[..., Other]) -> None:
    first = begin(0, DEEDS["gil"])
    watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=first.hub)
    try:
        until(lambda: watch.ask_all(ASK).hub_lost_s is None, "no connection to the hub")
        first.go()
        until(lambda: [c.reason for c in look(watch, 1).culprits] == ["gil"], "rank 0 is not found")
        assert "in forward" in look(watch, 1, stacks=(0,)).text
    finally:
        watch.close()


@pytest.mark.slow
def test_how_rank_0_ended_is_known_long_after_its_hub_is_gone(begin: Callable[..., Other]) -> None:
    """Who was busy meanwhile, and comes to wait only now, learns it as well."""
    first = begin(0, DEEDS["raised"])
    watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=first.hub)
    try:
        until(lambda: watch.ask_all(ASK).hub_lost_s is None, "no connection to the hub")
        first.go()
        until(lambda: not alive({first.sentinel}), "the hub does not end")
        until(lambda: watch.ask_all(ASK).hub_lost_s is not None, "the hub is not missed")
        found = look(watch, 1)
        assert [(c.rank, c.reason) for c in found.culprits] == [(0, "raised")]
        assert "RuntimeError: the disk is full" in found.text
        assert found.fatal
    finally:
        watch.close()


def test_a_wrong_token_ends_in_no_roster(hub: SentinelClient) -> None:
    stranger = SentinelClient.start(rank=1, world=2, token=b"y" * 32, hub=hub.hub)
    try:
        began_s = time.monotonic()
        assert stranger.ask_all(ASK).hub_lost_s is not None
        assert time.monotonic() - began_s < BOUND_S
        assert hub.ask_all(ASK).words[1].process == "unreachable"
    finally:
        stranger.close()


def test_a_frozen_hub_is_given_up_in_time(hub: SentinelClient) -> None:
    """The caller's timeout decides, so that a report can be out within the run's."""
    watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=hub.hub)
    try:
        until(lambda: watch.ask_all(ASK).hub_lost_s is None, "no connection to the hub")
        os.kill(hub._process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        first = watch.ask_all(timedelta(seconds=1))
        assert time.monotonic() - began_s < 1
        second = watch.ask_all(timedelta(seconds=1))
        assert first.hub_lost_s is not None
        assert second.hub_lost_s is not None
        assert second.hub_lost_s > first.hub_lost_s + 0.5, "it is lost since the first question without an answer"
        assert [(c.rank, c.reason) for c in judge(second, 1).culprits] == [(0, "unreachable")]
    finally:
        os.kill(hub._process.pid, signal.SIGCONT)
        watch.close()


# -- it does no harm -------------------------------------------------------------------------------------------------


def test_a_question_for_the_stack_does_not_end_a_worker_that_closes(
    hub: SentinelClient, begin: Callable[..., Other]
) -> None:
    """The signal comes while the worker closes: its sentinel was asleep and finds question and good-bye together."""
    other = begin(1, "pass", hub.hub)
    until(lambda: hub.ask_all(ASK).words[1].step == 7, "it has not reported")
    os.kill(other.sentinel, signal.SIGSTOP)
    asker = threading.Thread(target=hub.ask_all, args=(ASK, (1,)))
    asker.start()
    time.sleep(0.2)
    other.go()
    time.sleep(0.2)
    os.kill(other.sentinel, signal.SIGCONT)
    asker.join()
    output, _ = other.process.communicate(timeout=10)
    assert (other.process.returncode, output) == (0, "closed\n")


def test_a_process_without_the_handler_is_not_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not catches(process.pid, STACK_SIGNAL)
        assert not catches(process.pid, signal.SIGUSR1)
        until(lambda: catches(process.pid, signal.SIGINT), "Python handles Ctrl-C")
    assert not catches(process.pid, STACK_SIGNAL), "nor one that is gone"


def test_all_who_ask_at_once_get_one_stack() -> None:
    """Every rank that waits asks for the culprit's; and its ordinary reports are no answer."""
    shown = 0

    async def story() -> list[str]:
        def show() -> None:
            nonlocal shown
            shown += 1
            ours.report(WorkerReport(rank=0, step=8))
            asyncio.get_running_loop().call_later(0.1, ours.report, WorkerReport(rank=0, step=8, stack="in forward"))

        ours = Hub(token=TOKEN, world=2)
        ours.on_show = show
        clusters = await asyncio.gather(*(ours.ask_all((0,)) for _ in range(20)))
        assert (await ours.ask_all())[0].stack == "", "who does not ask is not shown what others asked for"
        return [cluster[0].stack for cluster in clusters]

    assert asyncio.run(story()) == ["in forward"] * 20
    assert shown == 1


def test_a_closed_watch_is_silent(hub: SentinelClient) -> None:
    watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=hub.hub)
    watch.close()
    watch.say("computing", step=8)
    watch.last_words("raised", "too late")
    watch.close()
    last = hub.ask_all(ASK).words[1]
    assert (last.phase, last.traceback) == ("finished", "")


def test_a_worker_that_is_done_before_its_sentinel_has_reached_the_hub(hub: SentinelClient) -> None:
    os.kill(hub._process.pid, signal.SIGSTOP)
    try:
        watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=hub.hub)
        closer = threading.Thread(target=watch.close)
        closer.start()
        time.sleep(0.3)
    finally:
        os.kill(hub._process.pid, signal.SIGCONT)
    closer.join(BOUND_S)
    assert hub.ask_all(ASK).words[1].phase == "finished"


def test_a_watch_that_is_closed_while_another_thread_asks(hub: SentinelClient) -> None:
    watch = SentinelClient.start(rank=1, world=2, token=TOKEN, hub=hub.hub)
    until(lambda: watch.ask_all(ASK).hub_lost_s is None, "no connection to the hub")
    os.kill(hub._process.pid, signal.SIGSTOP)  # so that there is no answer
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(watch.ask_all(timedelta(seconds=30)))
        except NetworkError as error:
            outcome.append(error)

    asker = threading.Thread(target=ask)
    try:
        asker.start()
        time.sleep(0.3)
        watch.close()
        asker.join(BOUND_S)
        assert isinstance(outcome[0], NetworkError)
    finally:
        os.kill(hub._process.pid, signal.SIGCONT)


def test_a_forked_child_says_nothing_for_the_worker(hub: SentinelClient) -> None:
    if (child := os.fork()) == 0:
        hub.say("waiting", step=99)
        try:
            hub.ask_all(ASK)
        except NetworkError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, "nor may it ask"
    assert hub.ask_all(ASK).words[0].step == 7


def test_a_traceback_with_a_file_name_that_is_no_text() -> None:
    page = StatusPage()
    page.last_words("raised", "FileNotFoundError: 'cat\udcff.png'")
    assert page.text() == "FileNotFoundError: 'cat\\udcff.png'"
    page.close()


def test_the_users_modules_do_not_get_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secrets.py").write_text("raise ImportError('the user has a module of this name')\n")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([sys.executable, "-c", "import secrets"], capture_output=True, check=False).returncode == 1
    watch = SentinelClient.start(rank=0, world=1, token=TOKEN, hub=None)
    assert [words.rank for words in watch.ask_all(ASK).words] == [0]
    watch.close()


def test_the_page_needs_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the first write into a mapped file is a SIGBUS; without a disk there is none."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    page = StatusPage()
    assert "memfd:" in os.readlink(f"/proc/self/fd/{page.fd}")
    page.close()


def test_words_without_a_hub_are_judged_by_the_farewell() -> None:
    gone = WorkerReport(rank=0, host="a", phase="finished", step=8, process="dead")
    ahead = judge(ClusterReport(1, (gone, WorkerReport(rank=1)), 3.0), 1)
    assert ahead.culprits == (), "it is done and owes nothing"
    assert not ahead.fatal
    silent = judge(ClusterReport(1, (WorkerReport(rank=1),), 3.0), 1)
    assert [(c.rank, c.reason) for c in silent.culprits] == [(0, "unreachable")]
