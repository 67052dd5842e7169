"""A worker of the job that wants more than a worker may: another's rank, other parameters for all, another plan."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.coordinator.data_leases import LeaseManager
from offbeat.coordinator.data_requests import DataRequests
from offbeat.coordinator.hyperparameters import HyperparameterCheck
from offbeat.coordinator.instructions import SendToShards, SendToWorker
from offbeat.coordinator.job_record import JobRecord
from offbeat.coordinator.model_record import ModelRecord
from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.coordinator.questions import CollectiveQuestions
from offbeat.coordinator.replacements import Replacements
from offbeat.errors import DisagreementError, PeerError
from offbeat.protocol.checkpoints import LOADING, MayPut, PutState, PutStateDone, RequestReplacement
from offbeat.protocol.data_leases import SetDataState
from offbeat.protocol.messages import pack
from offbeat.protocol.optimizer_spec import OptimizerSpec
from offbeat.protocol.shards import AllowReplacement
from offbeat.protocol.status import GetStatus, StatusReply
from offbeat.protocol.training import AskAllWorkers, ModelOpened, Notice, OpenModel, Reconnect
from offbeat.sync import BSP
from tests.rejected_peers.job import (
    BAD,
    GOOD,
    HYPER,
    Heard,
    Job,
    announce,
    details,
    in_log,
    join,
    own_address,
    wait_for,
)
from tests.rejected_peers.test_models import opened

if TYPE_CHECKING:
    from offbeat.protocol.training import AllWorkersAnswer
    from offbeat.server.client.requests import ServerRequest
    from offbeat.wire.link import PeerLink

BLOCK_BYTES = 56
OTHER = 3  # a rank that the job did not begin with
SOON = timedelta(seconds=10)


def back_of(job: Job, **changes: Any) -> Reconnect:
    """What rank 1 would say that it was, as far as others can know."""
    known = job.clients[0].state(0)
    said = {"life": known.life, "clock": known.clock, "version": known.version, "holds": False, "waits": True}
    return Reconnect(**{**said, **changes})


@pytest.mark.parametrize("secret", [b"", b"x" * 16], ids=["none", "another"])
@pytest.mark.parametrize("life", [1, None], ids=["another-life", "this-life"])
def test_the_rank_of_a_worker_that_is_here(job: Job, life: int | None, secret: bytes) -> None:
    """All workers are told the name of the server's life: it tells nobody apart."""
    changes = {} if life is None else {"life": life}
    _, said, address = opened(job, rank=GOOD[0], back=back_of(job, secret=secret, **changes))
    assert "Cannot admit rank 1: one is here already, from 127.0.0.1:" in said
    in_log(job, address, "Cannot admit rank 1")
    job.goes_on()


def test_the_secret_of_another_rank(job: Job) -> None:
    one, other = (client._models._secrets[0] for client in job.clients)
    assert one != other
    assert len(one) == len(other) == 16
    _, said, _ = opened(job, rank=GOOD[0], back=back_of(job, secret=other))
    assert "Cannot admit rank 1: one is here already" in said
    job.goes_on()


def test_the_rank_of_a_worker_that_was_here(job: Job) -> None:
    """It may come back; somebody else may have its rank, but not what it had brought."""
    link, heard, number = join(job)
    (secret,) = {message.secret for message in heard.messages if isinstance(message, ModelOpened) and message.secret}
    address = own_address(link)
    job.loop.call(link.send, b"\xff")
    assert heard.over.wait(10)
    in_log(job, address, "Rank 0 is gone")
    for wrong in (b"", b"x" * 16):
        _, said, _ = opened(job, rank=BAD, back=back_of(job, clock=number, secret=wrong))
        assert "Cannot admit rank 0 as the one that was here before: it does not know the secret of that one" in said
    _, said, _ = opened(job, rank=BAD, layout="x")  # nobody's secret changes by one that is refused
    assert "Cannot train with rank 0" in said or "layout" in said
    again = Heard()
    link = job.dial(lambda link: again, BAD)
    job.loop.call(link.send, pack(OpenModel(0, 1)), pack(details(back=back_of(job, clock=number, secret=secret))))
    wait_for(lambda: any(isinstance(message, ModelOpened) for message in again.messages), "it is not let in")
    job.loop.call(link.abort)
    job.goes_on()


def test_other_parameters_in_the_middle_of_training(job: Job) -> None:
    """Not even from the worker that brings what one brings for all: the others do not wait for it."""
    link, heard, _ = join(job)
    address = own_address(link)
    job.loop.call(link.send, pack(RequestReplacement(0, 7)))
    job.loop.call(link.send, pack(GetStatus(1)))
    wait_for(lambda: any(isinstance(message, StatusReply) for message in heard.messages), "it is not answered")
    assert not [message for message in heard.messages if isinstance(message, MayPut)]
    job.loop.call(link.send, pack(PutState(0, 0)), bytes(BLOCK_BYTES))
    assert heard.over.wait(10)
    assert "Cannot take other parameters of model 0 from rank 0: the others do not wait for them. All load" in str(
        heard.error
    )
    in_log(job, address, "Cannot take other parameters of model 0 from rank 0")
    job.goes_on()


@pytest.mark.parametrize(
    ("message", "body", "what"),
    [(RequestReplacement(0, 7), b"", "other parameters"), (SetDataState(7), b"{}", "another place in the data")],
    ids=["parameters", "data"],
)
def test_another_worker_than_the_first(job: Job, message: Any, body: bytes, what: str) -> None:
    link, heard, _ = join(job, OTHER)
    address = own_address(link)
    job.loop.call(link.send, pack(message), body)
    assert heard.over.wait(10)
    assert f"Cannot take {what} from rank 3: rank 0 is the one that sends it for all." in str(heard.error)
    in_log(job, address, f"Cannot take {what} from rank 3")
    job.goes_on()


def test_the_place_in_the_data_in_the_middle_of_training(job: Job) -> None:
    link, heard, _ = join(job)
    job.loop.call(link.send, pack(SetDataState(7)), b"{}")
    job.loop.call(link.send, pack(GetStatus(1)))
    wait_for(lambda: any(isinstance(message, StatusReply) for message in heard.messages), "it is not answered")
    assert not [message for message in heard.messages if type(message).__name__ in ("DataState", "LeaseGrants")]
    job.loop.call(link.abort)
    job.goes_on()


def test_more_than_anybody_brings(job: Job) -> None:
    link, heard, _ = join(job)

    def ask_and_ask() -> None:
        for number in range(1000):
            link.send(pack(RequestReplacement(0, number)))

    job.loop.call(ask_and_ask)
    assert heard.over.wait(10)
    assert "Cannot take other parameters from rank 0: too much waits for the others already." in str(heard.error)
    job.goes_on()


def let_put(server: Job) -> tuple[PeerLink, Heard, str, list[ServerRequest[AllWorkersAnswer]]]:
    """Rank 0, which may put now; its address, and what the others wait for."""
    server.begin()
    link, heard, _ = join(server)
    waits = [client.ask(LOADING, refresh=True) for client in server.clients]
    server.loop.call(link.send, pack(RequestReplacement(0, 7)))
    wait_for(lambda: MayPut(7) in heard.messages, "it may not put")
    return link, heard, own_address(link), waits


def test_what_all_wait_for_is_taken(server: Job) -> None:
    """And no more than was said: afterwards nothing may be put any more."""
    link, heard, address, waits = let_put(server)
    for index, one in enumerate(details().blocks):
        twos = torch.full((sum(piece.numel for piece in one.pieces),), 2.0).numpy().tobytes()
        server.loop.call(link.send, pack(PutState(0, index)), twos)
    server.loop.call(link.send, pack(PutStateDone(0, 7)))
    server.loop.call(link.send, pack(AskAllWorkers(0, LOADING, True)))
    for worker, wait in zip(server.workers, waits, strict=True):
        assert wait.wait(SOON)
        assert worker.values.eq(2).all()
    in_log_of_all(server, "Rank 0 replaces what the server has at version 3: all load a checkpoint together.")
    puts_again(server, link, heard, address)


def puts_again(server: Job, link: PeerLink, heard: Heard, address: str) -> None:
    server.loop.call(link.send, pack(PutState(0, 0)), bytes(BLOCK_BYTES))
    assert heard.over.wait(10)
    assert "Cannot take other parameters of model 0 from rank 0" in str(heard.error)
    in_log(server, address, "Cannot take other parameters")


def test_what_may_be_put_ends_when_the_others_go_on(server: Job) -> None:
    """Also if it was never said that this was all."""
    link, heard, address, waits = let_put(server)
    server.loop.call(link.send, pack(AskAllWorkers(0, LOADING, True)))
    for wait in waits:
        assert wait.wait(SOON)
    puts_again(server, link, heard, address)
    server.goes_on()


@pytest.mark.parametrize("refusal", ["", "its copy is damaged"])
def test_what_the_others_do_not_wait_for_is_refused(server: Job, refusal: str) -> None:
    """Nobody would answer what they ask, nor what it asks: so it is told, and asks what they can all be answered."""
    server.begin()
    link, heard, _ = join(server)
    question = LOADING if refusal else "the mean"
    waits = [client.ask(question, refusal=refusal) for client in server.clients]
    server.loop.call(link.send, pack(RequestReplacement(0, 7)))
    wait_for(lambda: any(isinstance(message, MayPut) for message in heard.messages), "it is not told")
    (told,) = [message for message in heard.messages if isinstance(message, MayPut)]
    assert told.refused == "Not all load a checkpoint: rank 1, 2 waits for something else, or cannot load it."
    server.loop.call(link.send, pack(AskAllWorkers(0, LOADING, refusal="it is not brought")))
    for wait in waits:
        if refusal:
            assert wait.wait(SOON)
            assert wait.value.refused == "Rank 0: it is not brought"
        else:
            with pytest.raises(DisagreementError, match="the mean"):
                wait.wait(SOON)
    server.loop.run(link.close())


def test_a_learning_rate_of_its_own(job: Job) -> None:
    link, heard, number = join(job)
    job.loop.call(link.send, pack(announce(number, hyper=({**HYPER[0], "lr": 1e9},), weight=0.0)))
    says = "Rank 0 uses other hyper-parameters in its step 0 than rank"
    wait_for(lambda: any(isinstance(m, Notice) and m.text.startswith(says) for m in heard.messages), "it is not told")
    in_log_of_all(job, says)
    in_log_of_all(job, "lr=1e+09 and not 0.5.")
    job.loop.call(link.abort)
    job.goes_on()


def in_log_of_all(job: Job, says: str) -> None:
    wait_for(lambda: says in job.log(), f"{says!r} is not logged")


def test_schedules() -> None:
    same, other = ({"lr": 0.1, "momentum": 0.9},), ({"lr": 0.2, "momentum": 0.9},)
    one = HyperparameterCheck()
    assert one.hear(0, 1, same) == one.hear(1, 1, same) == one.hear(0, 2, other) == ""
    assert "Rank 1 uses other hyper-parameters in its step 2 than rank 0: lr=0.1 and not 0.2." in one.hear(1, 2, same)
    assert one.hear(1, 2, same) == "", "said once"
    assert "step 2 than rank 0: momentum=0.5 and not 0.9." in one.hear(2, 2, ({**other[0], "momentum": 0.5},))
    assert "lr='" + "x" * 36 + "... and not 0.1" in one.hear(3, 1, ({"lr": "x" * 99, "momentum": 0.9},))
    for step in range(1000):
        one.hear(0, 5 + step, same)
    assert len(one._first) == 64


def test_schedules_after_training_went_back() -> None:
    """All load what was three steps before, and go on with half the rate."""
    one = HyperparameterCheck()
    for worker in (0, 1):
        for step in range(6):
            assert one.hear(worker, step, ({"lr": 0.1},)) == ""
    for step in range(3, 9):
        assert one.hear(1, step, ({"lr": 0.05},)) == ""
        assert one.hear(0, step, ({"lr": 0.05},)) == ""
    assert "lr=0.1 and not 0.05" in one.hear(2, 8, ({"lr": 0.1},))
    one.forget()
    assert one.hear(2, 8, ({"lr": 0.1},)) == ""


def test_what_waits_goes_with_its_worker() -> None:
    job, questions = JobRecord(), CollectiveQuestions()
    runner = PolicyRunner(BSP(), 2, job.time_s, started=True)
    job.models[0] = ModelRecord(runner, OptimizerSpec("SGD", (), ()), 1, 0, 1, ranks=frozenset({0, 1}))
    leases = LeaseManager(lambda plan: None, job.time_s)
    one = Replacements(job, questions, DataRequests(job, leases, lambda plan: BSP()))

    def want(worker: int, number: int) -> None:
        one.want_parameters(worker, RequestReplacement(0, number))

    def done(*workers: int) -> list[object]:
        """What is answered when these are connected: the number, or why not."""
        job.workers = set(workers)
        one.look()
        answers = list[object]()
        for instruction in job.out.take():
            match instruction:
                case SendToShards(decision=AllowReplacement(number=number)):
                    answers.append(number)
                case SendToWorker(message=MayPut(refused=why)):
                    answers.append(why)
        return answers

    job.workers = {0, 1}
    with pytest.raises(PeerError, match="rank 0 is the one that sends it for all"):
        want(1, 7)
    want(0, 1)
    assert done(0, 1) == [], "the other trains on"
    one.leave(0)
    questions.ask(1, AskAllWorkers(0, LOADING))
    assert done(0, 1) == []
    job.workers = {0, 1, 2}
    want(0, 2)
    want(0, 3)
    assert done(0, 1, 2) == []
    assert done(0, 1) == [2, 3]
    questions.ask(2, AskAllWorkers(0, LOADING, refusal="no"))
    job.workers = {0, 1, 2}
    want(0, 4)
    assert done(0, 1, 2) == ["Not all load a checkpoint: rank 2 waits for something else, or cannot load it."]
