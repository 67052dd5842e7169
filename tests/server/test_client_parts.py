"""The parts of a worker's end of a server, each by itself: what is said again, and what is given up, without links."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from offbeat.errors import DisagreementError, ModelError, NetworkError, PeerError
from offbeat.protocol.data_leases import DataState, RegisterLoader
from offbeat.protocol.messages import from_peer
from offbeat.protocol.plan_swap import SwapResult
from offbeat.protocol.training import AllWorkersAnswer, ContributionInfo, PullBlock, PullOrder, ReleaseWorker
from offbeat.server.blocks import Block, ParameterSlice
from offbeat.server.client.coordinator_requests import CoordinatorRequests
from offbeat.server.client.lease_requests import LeaseRequests
from offbeat.server.client.model_exchanges import ModelExchanges
from offbeat.server.client.model_state import ModelState
from offbeat.server.client.question_client import QuestionClient
from offbeat.server.client.requests import ServerRequest
from offbeat.server.client.state_transfer import DataStateFetch, DataStateUpload, StateTransfers
from tests.server.in_process import kind_of

if TYPE_CHECKING:
    from offbeat.server.client.connections import ShardConnections

NOW = timedelta(0)
GONE = NetworkError("It is gone.")


class Connections:
    """Links that keep what is said over them."""

    def __init__(self, shards: int = 1) -> None:
        self.is_up, self.entry, self.survives = True, 0, False
        self.links: list[Any] = [self] * shards
        self.said: list[str] = []
        self.orders: list[tuple[int, ...]] = []

    def say(self, message: object) -> None:
        self.said.append(type(message).__name__)

    def send(self, metadata: bytes, body: bytes = b"") -> None:
        self.said.append(kind_of(metadata))
        if isinstance(message := from_peer(metadata), PullOrder):
            self.orders.append(message.blocks)

    def progressed(self) -> None:
        """Nothing is dialled here."""

    @property
    def as_links(self) -> ShardConnections:
        return cast("ShardConnections", self)


def test_a_look_is_asked_again_and_a_swap_is_not() -> None:
    """Whether the plan was swapped is not known, and to swap it twice is not what was wanted."""
    links = Connections()
    requests = CoordinatorRequests(links.as_links)
    look, swap = ServerRequest[Any](), ServerRequest[str]()
    requests.look(look)
    requests.swap(swap, "", False)
    links.is_up = False
    requests.stranded()
    assert "not known whether the plan was swapped" in swap.value
    links.is_up = True
    requests.arrived()
    assert links.said == ["GetStatus", "SwapPlan", "GetStatus"]
    requests.seen(0, ())
    requests.swapped(SwapResult(0, refusal="of another time"))
    assert look.value == ()
    assert "not known whether the plan was swapped" in swap.value


def test_no_swap_is_asked_for_without_links() -> None:
    links, swap = Connections(), ServerRequest[str]()
    links.is_up = False
    CoordinatorRequests(links.as_links).swap(swap, "", False)
    assert (links.said, swap.done()) == ([], True)
    assert "the connection to the server is lost" in swap.value


def test_a_question_is_asked_until_it_is_answered() -> None:
    links = Connections()
    questions = QuestionClient(links.as_links)
    questions.begin_at(7)
    first, second = ServerRequest[AllWorkersAnswer](), ServerRequest[AllWorkersAnswer]()
    numbers = [questions.add(one, "the mean", (1.0,), refresh=False, refusal="").number for one in (first, second)]
    assert numbers == [7, 8], "as those who were there before count"
    questions.ask_again()
    questions.answer(AllWorkersAnswer(7, (2.0,), 2))
    assert (first.value.numbers, [one.number for one in questions.answered]) == ((2.0,), [7])
    questions.ask_again()
    questions.answer(AllWorkersAnswer(8, (), 2, disagreement="the mean and the sum"))
    with pytest.raises(DisagreementError, match="the mean and the sum"):
        second.wait(NOW)
    assert not questions.is_asking
    assert links.said == ["AskAllWorkers"] * 3


def test_what_is_said_about_data_waits_until_the_worker_has_enrolled() -> None:
    links = Connections()
    leases = LeaseRequests(links.as_links)
    about = RegisterLoader(loader=0, plan="", world=2, samples=40, seed=3, shuffle=True, drop_last=False, batch=4)
    queue = leases.queues.hold(about)
    leases.enrol(queue)
    links.entry = 1  # the links were lost, and are there again
    leases.queues.out_of_memory(0, 4, ())
    assert links.said == ["RegisterLoader"], "it has not enrolled again"
    leases.enrol_again()
    leases.enrol_again()
    leases.queues.out_of_memory(0, 4, ())
    assert links.said == ["RegisterLoader", "RegisterLoader", "MemoryExhausted"]
    draw = ServerRequest[None]()
    leases.draw(draw, queue)
    leases.fail(GONE)
    with pytest.raises(NetworkError, match="It is gone"):
        draw.wait(NOW)


def test_transfers_begin_again_and_fail_together() -> None:
    links = Connections()
    transfers = StateTransfers(links.links)
    fetch, upload, late = DataStateFetch(), DataStateUpload(b"there"), DataStateFetch()
    transfers.add(fetch)
    transfers.add(upload)
    transfers.begin_due()
    transfers.stranded()
    transfers.begin_due()
    assert links.said == ["GetDataState", "SetDataState"] * 2
    transfers.stock(DataState(0), b"of the links that were lost")
    assert not fetch.request.is_over
    transfers.stock(DataState(2), b"here")
    transfers.stock(DataState(3, "it is of other data"), b"")
    assert fetch.request.value == b"here"
    with pytest.raises(ModelError, match="it is of other data"):
        upload.request.wait(NOW)
    transfers.add(late)
    transfers.fail(GONE)
    with pytest.raises(NetworkError, match="It is gone"):
        late.request.wait(NOW)


def exchanges(links: Connections) -> tuple[ModelExchanges, ModelState]:
    """A model of four blocks, of which every other one is at the second shard."""
    questions, leases = QuestionClient(links.as_links), LeaseRequests(links.as_links)
    models = ModelExchanges(
        links.as_links, questions=questions, leases=leases, transfers=StateTransfers(links.links), world=1
    )
    blocks = [Block(i, 0, 0, "float32", 4, (ParameterSlice("a", i, 1),)) for i in range(4)]
    state = ModelState(0, blocks, (0, 1, 0, 1), [torch.zeros(1) for _ in blocks])
    models.add(state)
    return models, state


def released(models: ModelExchanges, step: int, *, values: bool = False) -> None:
    models.released(ReleaseWorker(0, step, version=0, staleness=0, values=values))


def test_shards_hear_in_which_order_blocks_are_wanted_whenever_they_let_a_worker_in() -> None:
    links = Connections(shards=2)
    models, _ = exchanges(links)
    models.pull_in_order(0, (3, 2, 1, 0))
    assert links.orders == [], "no shard has opened the model"
    released(models, 0)
    assert links.orders == [(2, 0), (3, 1)]
    models.pull_in_order(0, (0, 1, 2, 3))
    released(models, 1)
    assert links.orders[2:] == [(0, 2), (1, 3)]
    models.stranded()
    released(models, 1)
    assert links.orders[4:] == [(0, 2), (1, 3)], "they are others now"


def pushing(links: Connections) -> tuple[ModelExchanges, ModelState]:
    """One that has brought a contribution, pushes early, and computes the next one."""
    models, state = exchanges(links)
    released(models, 0)
    parts, about = {block: torch.zeros(1) for block in range(4)}, ContributionInfo(1.0, ())
    models.announce(ServerRequest(), 0, parts, about, (), pushes_early=True)
    models.granted(0, 0)
    released(models, 1, values=True)
    for block in range(4):
        models.pulled(PullBlock(0, 1, block, version=1))
    assert links.said[-1] == "PullDone"
    links.said.clear()
    return models, state


def test_what_is_complete_is_pushed_when_the_turn_has_come() -> None:
    links = Connections(shards=2)
    models, state = pushing(links)
    for block in (3, 1):
        models.push_early(0, block, torch.zeros(1))
    assert links.said == []
    models.granted(0, 1)
    assert (links.said, state.pushed) == (["PushBlock"] * 2, {1, 3})
    models.push_early(0, 2, torch.zeros(1))
    parts = {block: torch.zeros(1) for block in (3, 1, 2, 0)}
    models.announce(ServerRequest(), 0, parts, ContributionInfo(1.0, ()), (), pushes_early=True)
    assert links.said == ["PushBlock"] * 3 + ["Announce", "PushBlock"], "it waits for nothing more"


def test_a_turn_that_comes_with_the_step_is_waited_for() -> None:
    links = Connections(shards=2)
    models, _ = pushing(links)
    models.push_early(0, 3, torch.zeros(1))
    parts = {block: torch.zeros(1) for block in range(4)}
    models.announce(ServerRequest(), 0, parts, ContributionInfo(1.0, ()), (), pushes_early=True)
    assert links.said == ["Announce"]
    models.granted(0, 1)
    assert links.said == ["Announce"] + ["PushBlock"] * 4, "each once"


@pytest.mark.parametrize("number", [0, 2])
def test_a_turn_of_another_contribution_is_refused(number: int) -> None:
    models, _ = pushing(Connections(shards=2))
    with pytest.raises(PeerError, match=f"granted contribution {number}, this worker computes 1"):
        models.granted(0, number)


def test_who_steps_out_with_a_question_has_no_turn() -> None:
    """Its turn may be on its way to it."""
    links = Connections(shards=2)
    questions = QuestionClient(links.as_links)
    models, state = pushing(links)
    models._questions = questions
    questions.add(ServerRequest[AllWorkersAnswer](), "the mean", (), refresh=False, refusal="")
    models.forget_pushes()
    models.granted(0, 1)
    questions.answer(AllWorkersAnswer(0, (), 1))
    models.push_early(0, 3, torch.zeros(1))
    assert (links.said, state.pushed) == ([], set())


def test_an_answer_stays_when_all_fails() -> None:
    request = ServerRequest[str]()
    request.finish("answered")
    request.fail(GONE)
    assert request.wait(NOW)
    assert request.done()
