"""Workers that end, in one way or another: all others are told how, and why, and it is seen."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.sync import ASP, Evict, Policy, State
from tests.server.in_process import Together
from tests.server.test_shard import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.protocol.status import WorkerStatus
    from offbeat.sync import Action


class TooSlow(ASP):
    """Evicts rank 1 as soon as it has brought two contributions."""

    def decide(self, state: State) -> Sequence[Action]:
        slow = state.members.get(1)
        return [Evict(1)] if slow is not None and slow.clock >= 2 else super().decide(state)


class Job:
    """Three workers that have made a step each; `told` is what each of them was told for people."""

    def __init__(self, policy: Policy) -> None:
        self.links = Together(policy, 3)
        self.told: dict[int, list[str]] = {rank: [] for rank in range(3)}
        for client in self.links.clients:
            client._tell = lambda text, waits, told=self.told[client.rank]: told.append(text)  # type: ignore[misc]
        self.workers = workers(self.links)
        for worker in self.workers:
            self.bring(worker)

    def bring(self, worker: Worker, step: int = 40) -> None:
        worker.bring(torch.ones(100), step=step)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Within it a worker ends; wait until the shard has heard of that."""
        heard = threading.Event()
        lose = self.links.shard.lose

        def lost(*about: object) -> None:
            lose(*about)  # type: ignore[arg-type]
            self.links.loop.loop.call_soon(self.links.loop.loop.call_soon, heard.set)

        self.links.shard.lose = lost  # type: ignore[assignment, method-assign]
        yield
        assert heard.wait(10)

    def seen(self) -> dict[int, WorkerStatus]:
        coordinator = self.links.shard._coordinator
        assert coordinator is not None
        return {seen.worker: seen for seen in coordinator.status(0.0)[0].workers}


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param if hasattr(request, "param") else ASP())
    yield made
    made.links.close()


def test_who_was_told_to_leave_is_said_to_have_left(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), job.ending():
        job.links.clients[1].close(41)
    text = "Rank 1 was asked to leave, and left cleanly behind its step 41: 2 workers continue; each keeps its batch"
    assert caplog.text.count(text) == 1
    assert [text in " ".join(job.told[rank]) for rank in range(3)] == [True, False, True]
    assert (job.seen()[1].phase, job.seen()[1].applied) == ("left", 1)


def test_who_is_done_is_not_told_of(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), job.ending():
        job.links.clients[1].close()
    assert "ank 1" not in caplog.text
    assert job.seen()[1].phase == "done"


def test_all_are_told_why_one_is_lost(job: Job) -> None:
    with job.ending():
        job.links.kill(1)
    assert [text for text in job.told[0] if text.startswith("Rank 1 is gone: It was killed. The others continue; ")]
    assert job.told[0] == job.told[2]
    assert job.seen()[1].phase == "gone"


@pytest.mark.parametrize("job", [TooSlow()], indirect=True)
def test_all_are_told_why_one_is_taken_out(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    slow = job.workers[1]
    with caplog.at_level(logging.WARNING), job.ending():
        slow.client.exchange(0, [torch.ones(block.numel) for block in slow.blocks], about=slow.about(1.0, step=41))
    text = "Rank 1 is evicted at version 4: it kept the others waiting for too long, by TooSlow()"
    assert text in caplog.text
    assert "Rank 1 is gone" not in caplog.text, "that it hangs up then is no news"
    assert [text in " ".join(job.told[rank]) for rank in range(3)] == [True, False, True]
    assert job.seen()[1].phase == "evicted"


def test_what_comes_of_one_that_was_taken_out_is_refused_with_the_cause() -> None:
    """It may have been on its way; the link ends with this, and the others hear of it."""
    job = Job(ASP())
    coordinator = job.links.shard._coordinator
    assert coordinator is not None
    coordinator._job.evicted[0, 7] = "it kept the others waiting for too long, by ASP()"
    with pytest.raises(
        Exception, match=r"Rank 7 was evicted from model 0: it kept the others waiting for too long, by"
    ):
        coordinator._job.model(0, 7)
    with pytest.raises(Exception, match=r"Rank 8 does not take part in model 0\."):
        coordinator._job.model(0, 8)
    job.links.close()


def test_the_step_that_is_seen_is_that_of_the_script(job: Job) -> None:
    """One who joins, or goes on from a checkpoint, counts other steps than the server does contributions."""
    assert {seen.made for seen in job.seen().values()} == {41}, "it has the parameters of the one behind"
    job.bring(job.workers[2], step=41)
    assert [seen.made for seen in job.seen().values()] == [41, 41, 42]
    assert job.seen()[2].step == 2
    assert PolicyRunner(ASP(), 1, lambda: 0.0).status(0, 0.0).workers == ()
