"""Updates that are judged by losses, which a validator finds out: it is asked, fetches, answers, and may be lost."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.coordinator.instructions import AppendHistory, SendToShards, SendToWorker
from offbeat.errors import PeerError
from offbeat.history import UpdateJudged
from offbeat.protocol.loss_scores import ContributionsScored, FetchContribution, FetchedBlock, ScoreContributions
from offbeat.protocol.messages import SAYS, pack
from offbeat.protocol.shards import CommitUpdates
from offbeat.robust import Zeno
from offbeat.server.client.loss_question import ParametersOrQuestion
from offbeat.server.client.state_transfer import ContributionFetch, StateTransfers
from offbeat.sync import BSP, KSync, Member, State
from tests.server import in_process
from tests.server.test_judged_updates import NUMEL, VALIDATOR, Together, gradients, stacked
from tests.server.test_shard import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat.history import Record
    from offbeat.server.client.client import Client
    from offbeat.sync import Policy, Push

SOON, AT_ONCE = timedelta(seconds=10), timedelta(milliseconds=200)
OTHER = VALIDATOR + 1
RULE = Zeno(1, penalty=0.0)


@pytest.fixture
def told() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    yield texts
    logging.getLogger("offbeat").removeHandler(handler)


# -- two shards and the coordinator's part -----------------------------------------------------------------------------


class Scored(Together):
    """Two shards whose updates are judged by losses; it keeps what the validators are asked."""

    def __init__(self, rule: Zeno, *here: int) -> None:
        super().__init__(rule)
        self.job.rule, self.job.validators = rule, {VALIDATOR, OTHER}
        self.here(*here)
        self.asked: list[tuple[int, ScoreContributions]] = []
        self.judged: list[UpdateJudged] = []

    def here(self, *validators: int) -> None:
        """These validators, and no others, take part from now on."""
        members = dict.fromkeys((*range(7), *validators), Member())
        self.job.models[0].runner.state = State(version=1000, members=members)
        self.judgements.losses.ask_all()

    def hold(self, brings: dict[int, torch.Tensor], **how: Any) -> None:
        """An update whose contributions are there, whole."""
        for worker, clock in self.apply(brings, **how):
            self.decide(CommitUpdates(0, worker, clock))
        while self.reports:
            self.judgements.measured(self.reports.pop(0))
        self.carry_out()

    def carry_out(self) -> None:
        for instruction in self.job.out.take():
            match instruction:
                case SendToShards(decision=decision):
                    self.decide(decision)
                case SendToWorker(worker=worker, message=ScoreContributions() as message):
                    self.asked.append((worker, message))
                case AppendHistory(record=UpdateJudged() as record):
                    self.judged.append(record)

    def fetch(self, version: int, push: Push | None) -> torch.Tensor:
        """A contribution out of both shards, or the parameters; of no elements if there is none."""
        found = dict(pair for one in self.model_shards for pair in one.fetch(version, push))
        return torch.cat([found[block] for block in sorted(found)]) if found else torch.zeros(0)

    def score(self, losses: tuple[float, ...], number: int | None = None, by: int = VALIDATOR) -> None:
        number = self.asked[-1][1].number if number is None else number
        self.judgements.scored(by, ContributionsScored(0, 1, number, losses))
        self.carry_out()


def test_the_mean_of_those_that_lower_the_loss_most_is_made() -> None:
    job, brings = Scored(Zeno(2), VALIDATOR, OTHER), gradients(5)
    job.hold(brings)
    ((validator, asked),) = job.asked
    assert (validator, asked.version, asked.change, asked.rate) == (VALIDATOR, 1, False, 1.0)
    assert asked.contributions == tuple((worker, 0) for worker in range(5))
    assert not job.values.any(), "it waits"
    job.score((3.0, 1.0, 2.0, 2.5, 9.0, 1.5))
    expected = stacked(brings)[[0, 1, 4]].mean(0)
    torch.testing.assert_close(-job.values, expected, rtol=1e-6, atol=1e-7)
    (record,) = job.judged
    assert record.scales == ((0, 0, 1 / 3), (1, 0, 1 / 3), (2, 0, 0.0), (3, 0, 0.0), (4, 0, 1 / 3))
    assert record.losses == (3.0, 1.0, 2.0, 2.5, 9.0, 1.5)
    assert record.squares == pytest.approx(stacked(brings).square().sum(1).tolist())


def test_what_is_fetched_is_what_is_judged_and_only_while_it_waits() -> None:
    job, brings = Scored(Zeno(1), VALIDATOR), gradients(3)
    job.hold(brings)
    assert not job.fetch(1, None).any()
    assert len(job.fetch(1, None)) == NUMEL
    for worker, gradient in brings.items():
        assert torch.equal(job.fetch(1, (worker, 0)), gradient)
    assert not len(job.fetch(1, (5, 0))), "nobody brought that"
    assert not len(job.fetch(2, (0, 0)))
    job.score((3.0, 1.0, 2.0, 2.5))
    assert not len(job.fetch(1, (0, 0))), "it is made"
    job.hold(gradients(3, 2))
    assert torch.equal(job.fetch(2, None), job.values)


def test_what_is_not_finite_is_not_asked_about_and_rejected(told: list[str]) -> None:
    job, brings = Scored(Zeno(1), VALIDATOR), gradients(4)
    brings[1][3] = float("nan")
    job.hold(brings)
    ((_, asked),) = job.asked
    assert asked.contributions == ((0, 0), (2, 0), (3, 0))
    job.score((3.0, 1.0, float("inf"), 2.0))
    torch.testing.assert_close(-job.values, (brings[0] + brings[3]) / 2)
    assert told == [
        "What rank 1 pushes holds NaN or Inf, and is rejected.",
        "What rank 2 pushes raises the loss on trusted samples, and is rejected.",
    ]


def test_what_is_not_finite_is_among_those_that_are_left_out() -> None:
    """Of three two lie, one of them with NaN: one honest worker is enough."""
    job, brings = Scored(Zeno(2), VALIDATOR), gradients(3)
    brings[0] = torch.full((NUMEL,), float("nan"))
    job.hold(brings)
    job.score((3.0, 1.0, 9.0))
    torch.testing.assert_close(-job.values, brings[1])


def test_losses_that_are_no_numbers_make_no_update(told: list[str]) -> None:
    job = Scored(Zeno(1), VALIDATOR)
    job.hold(gradients(3))
    job.score((float("nan"), 1.0, 2.0, 3.0))
    assert not job.values.any()
    text = told[-1]
    assert "by the loss on trusted samples Zeno(faulty=1) accepts no contribution" in text


def test_the_validators_own_contributions_are_neither_judged_nor_compared_with() -> None:
    job, brings = Scored(Zeno(1), VALIDATOR), gradients(3)
    job.hold({**brings, VALIDATOR: torch.full((NUMEL,), float("nan"))}, references=(VALIDATOR,))
    assert [len(asked.contributions) for _, asked in job.asked] == [3]
    job.score((3.0, 1.0, 2.0, 2.5))
    torch.testing.assert_close(-job.values, stacked(brings)[:2].mean(0))


def test_when_one_is_lost_the_next_is_asked_and_without_any_the_update_waits() -> None:
    job = Scored(Zeno(1), VALIDATOR, OTHER)
    job.hold(gradients(3))
    first = job.asked[0][1].number
    job.here(OTHER)
    job.carry_out()
    assert [validator for validator, _ in job.asked] == [VALIDATOR, OTHER]
    job.here()
    job.here(VALIDATOR)
    job.carry_out()
    assert [validator for validator, _ in job.asked] == [VALIDATOR, OTHER, VALIDATOR]
    job.score((3.0, 1.0, 2.0, 2.5), first)
    assert not job.values.any(), "it was asked again since"
    job.score((3.0, 1.0, 2.0, 2.5))
    moved = job.values
    assert moved.any()
    job.score((3.0, 2.5, 2.0, 1.0))
    assert torch.equal(job.values, moved), "it was answered before"
    assert len(job.judged) == 1


@pytest.mark.parametrize(
    ("number", "losses", "by", "says"),
    [
        (1, (1.0,) * 3, VALIDATOR, "Cannot take 3 losses from rank 9: update 1 has 3 contributions to be judged"),
        (1, (1.0,) * 5, VALIDATOR, "Cannot take 5 losses from rank 9"),
        (1, (1.0,) * 4, OTHER, "Cannot take losses from rank 10: rank 9 is asked for them"),
        (2, (1.0,) * 4, VALIDATOR, "Cannot take losses from rank 9: question 2 was never asked"),
        (1, (1.0,) * 4, 42, "Rank 42 does not take part in model 0"),
    ],
)
def test_what_is_no_answer_is_refused(number: int, losses: tuple[float, ...], by: int, says: str) -> None:
    job = Scored(Zeno(1), VALIDATOR, OTHER)
    job.hold(gradients(3))
    with pytest.raises(PeerError, match=says):
        job.score(losses, number, by=by)
    assert not job.values.any()
    job.score((3.0, 1.0, 2.0, 2.5), 1)
    assert job.values.any(), "it still waits for the answer"


def test_updates_that_nothing_is_to_be_judged_of_wait_for_nobody() -> None:
    job = Scored(Zeno(1))
    job.hold({VALIDATOR: torch.ones(NUMEL)}, references=(VALIDATOR,))
    assert [record.scales for record in job.judged] == [()]
    job.hold({0: torch.full((NUMEL,), float("inf"))})
    assert [record.scales for record in job.judged] == [(), ((0, 0, 0.0),)]
    assert not job.asked


# -- who may say what --------------------------------------------------------------------------------------------------


def test_only_a_validator_fetches_and_scores() -> None:
    for kind in (FetchContribution, ContributionsScored):
        assert [role for role, kinds in SAYS.items() if kind in kinds] == ["validator"]


def test_a_worker_that_wants_anothers_contribution_is_cut_off(jobs: Callable[..., Job]) -> None:
    for message in (FetchContribution(0, 1, 1, (1, 0)), ContributionsScored(0, 1, 1, (1.0, 1.0))):
        job = jobs(BSP())
        link = job.links.clients[0]._links[0]
        job.links.loop.call(link.send, pack(message))
        deadline_s = time.monotonic() + SOON.total_seconds()
        while job.links.ends[0].open and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert not job.links.ends[0].open


# -- real shards and clients -------------------------------------------------------------------------------------------


class Job:
    """Three workers, and validators that answer by a loss, at two shards."""

    def __init__(self, policy: Policy, validators: int = 1) -> None:
        self.records: list[Record] = []
        self.links = in_process.Together(
            policy,
            3,
            read_plan=lambda plan: _Judging(policy),
            record=self.records.append,
            shards=2,
            rule=RULE,
            validators=validators,
        )
        make = functools.partial(Worker, make=functools.partial(torch.optim.SGD, lr=0.5), shards=2)
        with ThreadPoolExecutor(len(self.links.clients)) as pool:
            self.members = list(pool.map(make, self.links.clients))
        self.truth = torch.randn(100, generator=torch.Generator().manual_seed(7))

    def bring(self, worker: int, gradient: torch.Tensor) -> Any:
        member = self.members[worker]
        parts = [gradient[b.offset : b.offset + b.numel].clone() for b in member.blocks]
        return member.client.exchange(0, parts, about=member.about(1.0))

    def validate(self, validator: int, request: Any, *, dies: bool = False) -> int:
        """Answer what a validator is asked until it has its next parameters; how often it was."""
        client, asked = self.members[validator].client, 0
        state = client.state(0)
        while not request.is_over:
            assert ParametersOrQuestion(request, state).wait(SOON)
            if request.is_over:
                break
            question, asked = state.take_question(), asked + 1
            assert question is not None
            before = self.fetch(client, question, None)
            assert before is not None
            if dies:
                self.links.kill(validator)
                return asked
            losses = [self.loss(before)]
            for push in question.contributions:
                gradient = self.fetch(client, question, push)
                assert gradient is not None
                losses.append(self.loss(before - 0.5 * gradient))
            client.tell_losses(question, losses)
        return asked

    def fetch(self, client: Client, question: ScoreContributions, push: Push | None) -> torch.Tensor | None:
        landing = torch.full((100,), float("nan"))
        blocks = self.members[0].blocks
        places = [landing[b.offset : b.offset + b.numel] for b in blocks]
        request = client.fetch_contribution(0, question.version, push, places)
        assert request.wait(SOON)
        return landing if request.value else None

    def loss(self, values: torch.Tensor) -> float:
        return float((values - self.truth).square().sum())

    def step(self, validators: tuple[int, ...] = (3,)) -> list[int]:
        """Two pull toward the truth, one away from it; how often each validator was asked."""
        here = self.members[0].values
        signs = (1.0, 1.0, -6.0)
        requests = [self.bring(i, sign * (here - self.truth) * (1 + 0.1 * i)) for i, sign in enumerate(signs)]
        own = [self.bring(validator, torch.zeros(100)) for validator in validators]
        counts = [self.validate(v, request) for v, request in zip(validators, own, strict=True)]
        for request in (*requests, *own):
            assert request.wait(SOON)
        return counts


@dataclasses.dataclass(frozen=True)
class _Judging(in_process.Parts):
    judging_rule = RULE  # type: ignore[assignment]


@pytest.fixture
def jobs() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*how: Any, **also: Any) -> Job:
        made.append(Job(*how, **also))
        return made[-1]

    yield make
    for one in made:
        one.links.close()


def test_shards_and_clients_make_what_lowers_the_loss(jobs: Callable[..., Job]) -> None:
    job = jobs(BSP())
    for _ in range(3):
        before = job.members[0].values.clone()
        assert job.step() == [1]
        expected = before - 0.5 * 1.05 * (before - job.truth)
        for member in job.members:
            torch.testing.assert_close(member.values, expected, rtol=1e-5, atol=1e-6)
    judged = [one for one in job.records if isinstance(one, UpdateJudged)]
    assert [[scale for *_, scale in one.scales] for one in judged] == [[0.5, 0.5, 0.0]] * 3


def test_of_several_the_first_is_asked(jobs: Callable[..., Job]) -> None:
    job = jobs(BSP(), 2)
    assert job.step((3, 4)) == [1, 0]


def test_a_validator_that_dies_while_it_scores_leaves_it_to_the_next(jobs: Callable[..., Job]) -> None:
    job = jobs(BSP(), 2)
    here = job.members[0].values.clone()
    requests = [job.bring(i, here - job.truth) for i in range(3)]
    first, second = job.bring(3, torch.zeros(100)), job.bring(4, torch.zeros(100))
    assert job.validate(3, first, dies=True) == 1
    assert not requests[0].wait(AT_ONCE), "nothing is made without losses"
    assert job.validate(4, second) == 1
    for request in requests:
        assert request.wait(SOON)
    torch.testing.assert_close(job.members[0].values, here - 0.5 * (here - job.truth), rtol=1e-5, atol=1e-6)


def test_one_that_comes_while_an_update_waits_has_the_parameters_before_it(jobs: Callable[..., Job]) -> None:
    """It could not find out losses otherwise, and nothing would ever be made."""
    job = jobs(BSP())
    here = job.members[0].values.clone()
    requests = [job.bring(i, here - job.truth) for i in range(3)]
    assert job.validate(3, job.bring(3, torch.zeros(100)), dies=True) == 1
    assert not requests[0].wait(AT_ONCE)
    newcomer = job.links.newcomer(4)
    job.members.append(Worker(newcomer, make=functools.partial(torch.optim.SGD, lr=0.5), shards=2))
    torch.testing.assert_close(job.members[4].values, here)
    request = job.bring(4, torch.zeros(100))
    deadline_s = time.monotonic() + SOON.total_seconds()
    while not newcomer.state(0).to_score and time.monotonic() < deadline_s:
        time.sleep(0.005)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(job.validate, 4, request)
        for one in requests:
            assert one.wait(SOON)
        again = [job.bring(i, job.members[i].values - job.truth) for i in range(3)]
        for one in again:
            assert one.wait(SOON)
        assert answered.result(10) == 2, "its own update is the next one"
    torch.testing.assert_close(job.members[4].values, job.members[0].values)


def test_the_validator_is_none_of_the_first_k(jobs: Callable[..., Job]) -> None:
    job = jobs(KSync(2))
    here = job.members[0].values.clone()
    first, own = job.bring(0, here - job.truth), job.bring(3, torch.zeros(100))
    assert not first.wait(AT_ONCE), "one of two is there"
    second = job.bring(1, 2 * (here - job.truth))
    job.validate(3, own)
    assert first.wait(SOON)
    assert second.wait(SOON)
    (judged,) = [one for one in job.records if isinstance(one, UpdateJudged)]
    assert len(judged.scales) == 2


# -- what a server may send --------------------------------------------------------------------------------------------


def test_a_block_is_taken_once_of_its_size_and_if_it_was_asked_for(jobs: Callable[..., Job]) -> None:
    job = jobs(BSP())
    state = job.members[3].client.state(0)
    transfers = StateTransfers([])
    landing = [torch.zeros(b.numel) for b in job.members[3].blocks]
    fetch = ContributionFetch(state, 1, None, landing)
    transfers._under_way[5] = fetch
    size_bytes = 4 * landing[0].numel()
    for message, size, says in (
        (FetchedBlock(0, 6, 0), size_bytes, "not asked for"),
        (FetchedBlock(0, 5, 99), size_bytes, "not asked for"),
        (FetchedBlock(0, 5, 0), size_bytes + 4, "to a block of"),
    ):
        with pytest.raises(PeerError, match=says):
            transfers.lands_block(message, size, state)
    assert len(transfers.lands_block(FetchedBlock(0, 5, 0), size_bytes, state)) == size_bytes
    with pytest.raises(PeerError, match="not asked for"):
        transfers.lands_block(FetchedBlock(0, 5, 0), size_bytes, state)
