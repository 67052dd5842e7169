"""Another plan while training: who is asked, who is waited for, and what is said, whoever comes and goes meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import tomli_w
import torch

from offbeat.coordinator.instructions import Outbox
from offbeat.coordinator.plan_proposal import PlanProposal
from offbeat.coordinator.plan_swap import PlanSwaps
from offbeat.errors import NetworkError
from offbeat.fabric import ParameterServer, ProcessGroup
from offbeat.plan import Plan, table_of
from offbeat.protocol.plan_swap import PlanAgreement, PlanProposed
from offbeat.server.client.client import Client
from offbeat.server.client.plan_judge import PlanVerdict
from offbeat.sync import ASP, BSP, SSP, RoundRobin
from tests.server.in_process import Together
from tests.server.test_shard import SOON, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.server.client.requests import ServerRequest
    from offbeat.sync import Policy

PLAN = Plan(fabric=ParameterServer())


def test_all_meet_at_the_first_place_that_nobody_has_passed() -> None:
    proposal = PlanProposal(1, PLAN, "", [], 0.0, ["rank 0"], waiting={0, 1, 2})
    for worker, place in ((0, 3), (1, 7), (2, 5)):
        proposal.hear(worker, PlanAgreement(1, PLAN.digest, place=place))
    assert proposal.is_decided
    assert proposal.sync_point == 7


@pytest.mark.parametrize(("second", "are_level"), [((3, 5), True), ((4, 5), False), ((3, 4), False), ((4, 6), True)])
def test_who_is_within_a_step_is_not_level_with_who_is_behind_it(second: tuple[int, int], are_level: bool) -> None:
    """As many contributions, of more steps: the last one was pushed in a step that is not over."""
    proposal = PlanProposal(1, PLAN, "", [], 0.0, ["rank 0"], waiting={0, 1})
    for worker, (place, pushed) in enumerate(((3, 5), second)):
        proposal.hear(worker, PlanAgreement(1, PLAN.digest, place=place, pushed=pushed))
    assert proposal.are_level == are_level


class Judge:
    """A worker's plans: goes by all that can be, or says why not."""

    def __init__(self) -> None:
        self.present, self.refusal, self.digest = PLAN, "", ""
        self.adopted: list[Policy] = []

    def judge(self, plan: str) -> PlanVerdict:
        if self.refusal:
            return PlanVerdict("", self.refusal)
        return PlanVerdict(self.digest or self.present.swapped(plan).digest)

    def adopt(self, plan: str, text: str, sync_point: int | None) -> None:
        self.present = Plan.from_toml(plan)
        self.adopted.append(self.present.sync)

    def let_go(self) -> None:
        pass


class Job(Together):
    """Workers that train by `PLAN`, and may hold back what they make of another one."""

    def __init__(self, world: int) -> None:
        super().__init__(BSP(), world, read_plan=Plan.from_toml)
        self.judges = [Judge() for _ in self.clients]
        for client, judge in zip(self.clients, self.judges, strict=True):
            client._plans = judge
        self.held: list[tuple[Client, int, Any]] = []

    def train(self, clients: list[Client]) -> list[Worker]:
        with ThreadPoolExecutor(len(clients)) as pool:
            return list(pool.map(lambda client: Worker(client, plan=PLAN.to_toml()), clients))

    def hold_back(self, rank: int) -> None:
        """Let the worker not answer what is proposed, until `let_go`."""
        client, there = self.clients[rank], threading.Event()
        hear = client.hear

        def hear_later(shard: int, message: Any) -> None:
            if isinstance(message, PlanProposed):
                self.held.append((client, shard, message))
                there.set()
            else:
                hear(shard, message)

        client.hear = hear_later  # type: ignore[method-assign]
        self._hear, self.is_asked = hear, there

    def let_go(self) -> None:
        for _, shard, message in self.held:
            self.loop.call(self._hear, shard, message)

    def swap(self, rank: int, policy: Policy) -> ServerRequest[str]:
        return self.clients[rank].swap(tomli_w.dumps({"sync": table_of(policy)}))

    @property
    def policy(self) -> Policy:
        assert self.shard._coordinator is not None
        return self.shard._coordinator.models[0].runner.policy


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job(3)
    yield one
    one.close()


def step_all(workers: list[Worker]) -> None:
    with ThreadPoolExecutor(len(workers)) as pool:
        for staleness in [pool.submit(worker.step, torch.ones(100)) for worker in workers]:
            staleness.result()


def test_all_hear_of_it_and_go_on(job: Job) -> None:
    workers = job.train(job.clients)
    step_all(workers)
    swap = job.swap(1, ASP())
    assert swap.wait(SOON)
    assert (swap.value, job.policy) == ("", ASP())
    step_all(workers)
    assert [judge.adopted for judge in job.judges] == [[ASP()]] * 3


@pytest.mark.parametrize(("refusal", "digest"), [("it has no such policy.", ""), ("", "ff" * 32)])
def test_one_that_cannot_keeps_the_old_plan_for_all(job: Job, refusal: str, digest: str) -> None:
    workers = job.train(job.clients)
    job.judges[2].refusal, job.judges[2].digest = refusal, digest
    swap = job.swap(0, SSP(3))
    assert swap.wait(SOON)
    assert f"Rank 2 cannot go by that plan: {refusal or 'it reads a plan with the digest'}" in swap.value
    step_all(workers)
    assert job.policy == BSP()
    assert [judge.adopted for judge in job.judges] == [[]] * 3


def test_two_swaps_at_once(job: Job) -> None:
    workers = job.train(job.clients)
    job.hold_back(2)
    first = job.swap(0, SSP(3))
    assert job.is_asked.wait(5)
    other, same = job.swap(1, RoundRobin()), job.swap(1, SSP(3))
    assert other.wait(SOON)
    assert "another swap is under way" in other.value
    assert not first.is_over
    assert not same.is_over
    job.let_go()
    assert first.wait(SOON)
    assert same.wait(SOON)
    assert (first.value, same.value, job.policy) == ("", "", SSP(3))
    step_all(workers)


def test_who_is_lost_is_not_waited_for(job: Job) -> None:
    workers = job.train(job.clients)
    job.hold_back(2)
    swap = job.swap(0, SSP(3))
    assert job.is_asked.wait(5)
    job.loop.call(job.ends[2].cut, NetworkError("It was killed."))
    assert swap.wait(SOON)
    assert (swap.value, job.policy) == ("", SSP(3))
    step_all(workers[:2])


def test_who_joins_meanwhile_is_asked_as_well_and_told(job: Job) -> None:
    workers = job.train(job.clients)
    step_all(workers)
    job.hold_back(1)
    swap = job.swap(0, ASP())
    assert job.is_asked.wait(5)
    late = Client(job.loop, rank=3, world=3)  # type: ignore[arg-type]
    judge = Judge()
    late._plans = judge
    job.clients.append(late)
    job.ends.append(job._link(late))
    (newcomer,) = job.train([late])
    assert not swap.is_over
    job.let_go()
    assert swap.wait(SOON)
    assert job.policy == ASP()
    step_all([*workers, newcomer])
    assert judge.adopted == [ASP()]


def test_who_joins_later_with_the_plan_of_the_beginning_is_told_which_one_holds(job: Job) -> None:
    workers = job.train(job.clients)
    step_all(workers)
    assert job.swap(0, ASP()).wait(SOON)
    late = Client(job.loop, rank=3, world=3)  # type: ignore[arg-type]
    judge = Judge()
    late._plans = judge
    job.clients.append(late)
    job.ends.append(job._link(late))
    (newcomer,) = job.train([late])
    step_all([*workers, newcomer])
    assert judge.adopted == [ASP()]


def test_who_leaves_a_server_is_told_from_when_on_in_one_sentence() -> None:
    told: list[tuple[str, str]] = []
    swaps = PlanSwaps(Plan.from_toml, Outbox(), lambda *_: None, lambda: 0.0)
    swaps.begin(PLAN.to_toml())
    part = tomli_w.dumps({"fabric": table_of(ProcessGroup())})
    swaps.swap(part, lambda text, refusal: told.append((text, refusal)), {0}, has_begun=True, ranks={0}, by="rank 0")
    digest = Plan(fabric=ProcessGroup()).digest
    swaps.agree(0, PlanAgreement(1, digest, place=3))
    ((text, refusal),) = told
    assert refusal == ""
    assert text.startswith(
        "BSP() decides when workers may go on from the next loop over data that all begin (the next step, if no data "
        "is dealt out); if there is none, it does not take effect (wanted by rank 0, "
    )
