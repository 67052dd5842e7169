"""Models that differ from the others', or cannot be held."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

import offbeat
from offbeat.protocol.messages import pack
from offbeat.protocol.training import InitBlock, ModelOpened, OpenModel, PieceOf, Reconnect, Refused, ReleaseWorker
from offbeat.server.shard.model_shard import _memory_bytes
from tests.rejected_peers.job import (
    BAD,
    GOOD,
    HYPER,
    OTHER_PLAN,
    PLAN,
    Heard,
    Job,
    block,
    details,
    in_log,
    own_address,
    told,
    wait_for,
)

if TYPE_CHECKING:
    from pathlib import Path


def opened(job: Job, rank: int = BAD, **changes: Any) -> tuple[Any, str, str]:
    """What a worker with other details is told: the message, what ends the link, and its address."""
    heard = Heard()
    link = job.dial(lambda link: heard, rank)
    address = own_address(link)
    job.loop.call(link.send, pack(OpenModel(0)), pack(details(**changes)))
    assert heard.over.wait(10)
    return heard.messages, str(heard.error), address


def test_another_layout(job: Job) -> None:
    other = "0123456789abcdef"
    messages, said, address = opened(job, layout=other)
    says = (
        f"Cannot admit rank 0: its layout is {other!r}, that of the job here is {details().layout!r}. Start every "
        "worker with the same plan, the same seed, the same model and the same optimizer."
    )
    assert messages == [Refused(says, disagrees=True)]
    assert says.removesuffix(".") in said
    in_log(job, address, says.removesuffix("."))
    job.goes_on()


def test_another_model_is_told_where_it_differs(job: Job) -> None:
    ours = details()
    other = (*ours.names[:-1], "elsewhere")
    (refused,), _, _ = opened(job, layout="0123", names=other)
    assert f"; it has the parameter 'elsewhere' where the job's model has {ours.names[-1]!r}. Start" in refused.reason
    block = ours.blocks[0]
    piece = msgspec.structs.replace(block.pieces[0], numel=block.pieces[0].numel + 1)
    blocks = (msgspec.structs.replace(block, pieces=(piece, *block.pieces[1:])), *ours.blocks[1:])
    (refused,), _, _ = opened(job, layout="0123", blocks=blocks)
    told = re.search(r"; of '(\w+)' it has (\d+) elements for this shard, and the job's model (\d+)\. ", refused.reason)
    assert told is not None
    assert told[1] == ours.names[piece.name]
    assert int(told[2]) == int(told[3]) + 1
    job.goes_on()


def test_another_plan(job: Job) -> None:
    """Both are named by their digests, which `offbeat plan show` prints."""
    messages, _, address = opened(job, plan=OTHER_PLAN)
    theirs, ours = (offbeat.Plan.from_toml(text).digest for text in (OTHER_PLAN, PLAN))
    (refused,) = messages
    assert refused.disagrees
    assert f"its plan is {theirs!r}, that of the job here is {ours!r}; where it says" in refused.reason
    in_log(job, address, theirs)
    job.goes_on()


DETAILS: dict[str, tuple[dict[str, Any], str]] = {
    "another world": ({"world": 5}, "its number of workers is '5', that of the job here is '2'"),
    "another optimizer": (
        {"optimizer": msgspec.structs.replace(details().optimizer, kind="RMSprop", groups=({"lr": 0.5},))},
        "its optimizer is 'RMSprop', that of the job here is 'SGD'",
    ),
    "another momentum": (
        {"optimizer": msgspec.structs.replace(details().optimizer, groups=({**HYPER[0], "momentum": 0.25},))},
        "its optimizer is 'group 0: momentum=0.25', that of the job here is 'group 0: momentum=0.5'",
    ),
    "an optimizer that is none": (
        {"optimizer": msgspec.structs.replace(details().optimizer, kind="LBFGS")},
        "Cannot hold an optimizer 'LBFGS'",
    ),
    "another seed": ({"seed": 4}, "its seed is '4', that of the job here is '3'"),
    "other shards": ({"shards": 3}, "its number of shards is '3', that of the job here is '1'"),
}


@pytest.mark.parametrize("name", DETAILS)
def test_other_details(job: Job, name: str) -> None:
    changes, says = DETAILS[name]
    _, said, address = opened(job, **changes)
    assert says in said
    in_log(job, address, says)
    job.goes_on()


def test_a_rank_that_is_here(job: Job) -> None:
    _, said, address = opened(job, rank=1)
    assert "Cannot admit rank 1: one is here already, from 127.0.0.1:" in said
    in_log(job, address, "Cannot admit rank 1")
    job.goes_on()


def test_who_comes_back_before_it_is_missed(server: Job) -> None:
    server.begin()
    heard = Heard()
    client = server.clients[0]
    known, secret = client.state(0), client._models._secrets[0]
    back = Reconnect(life=known.life, clock=known.clock, version=known.version, holds=False, waits=True, secret=secret)
    link = server.dial(lambda link: heard, GOOD[0])
    server.loop.call(link.send, pack(OpenModel(0, 1)), pack(details(back=back)))
    wait_for(lambda: any(isinstance(message, ReleaseWorker) for message in heard.messages), "it is not let in")
    server.loop.run(link.close())


SGD = {"kind": "SGD", "groups": ({"lr": 0.1},), "members": (("b",),)}
FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({"plan": "p"}, "Cannot coordinate by this worker's plan"),
    "no policy": ({"plan": "[sync]\nkind = 'SPS'\n"}, "Unknown sync 'SPS' (did you mean 'SSP' or 'BSP'?)"),
    "a type of parameters": ({"blocks": (block(0, "int8"),)}, "Cannot hold parameters of type 'int8' at a server"),
    "no blocks": ({"blocks": ()}, "Cannot hold a model without blocks"),
    "a block twice": ({"blocks": (block(), block())}, "Cannot hold 2 blocks: 1 come twice"),
    "a large block": (
        {"blocks": (block(0, "float32", PieceOf(0, 0, 1 << 30)),)},
        "Cannot hold a block of 4294967296 b",
    ),
    "more than there is memory": (
        {
            "blocks": tuple(
                block(i, "float64", PieceOf(0, 0, 1 << 21)) for i in range(_memory_bytes() // (16 << 20) + 1)
            )
        },
        " bytes: this server's machine has ",
    ),
    "a piece twice": ({"blocks": (block(0, "float32", PieceOf(0, 0, 4), PieceOf(0, 4, 4)),)}, "has two pieces in it"),
    "a piece of nothing": ({"blocks": (block(0, "float32", PieceOf(9, 0, 4)),)}, "a piece belongs to no parameter"),
    "LBFGS": ({"optimizer": {**SGD, "kind": "LBFGS"}}, "Cannot hold an optimizer 'LBFGS'"),
    "code": ({"optimizer": {**SGD, "kind": "os.system"}}, "Cannot hold an optimizer 'os.system'"),
    "a negative learning rate": (
        {"optimizer": {**SGD, "groups": ({"lr": -1.0},)}},
        "Cannot make SGD from these hyper-param",
    ),
    "a learning rate that is none": (
        {"optimizer": {**SGD, "groups": ({"lr": None},)}},
        "Cannot make SGD from these hyper-parameters",
    ),
    "a rate that divides by zero": (
        {"optimizer": {**SGD, "kind": "Adam", "groups": ({"betas": (1.0, 0.9)},)}},
        "Cannot make Adam from these hyper-parameters: Invalid beta parameter at index 0: 1.0",
    ),
    "a group without members": ({"optimizer": {**SGD, "members": ()}}, "Cannot hold an optimizer 'SGD'"),
}


def test_the_first_that_comes_may_be_wrong(server: Job) -> None:
    """Nothing of it stays: the job that it is refused for begins with the next."""
    known = {
        "world": 2,
        "shards": 1,
        "holders": 1,
        "plan": PLAN,
        "layout": "d",
        "names": ("b",),
        "blocks": (block(),),
        "optimizer": SGD,
    }
    for name, (changes, says) in FIRST.items():
        said, address = told(server, (OpenModel(0), msgspec.msgpack.encode({**known, **changes})))
        assert says in said, name
        assert len(said.splitlines()) == 1
        in_log(server, address, says[:40])
    server.begin()
    server.goes_on()


def large(share: float) -> dict[str, Any]:
    """A model that takes this share of the machine's memory."""
    count = int(share * _memory_bytes()) // (16 << 20)
    blocks = tuple(block(i, "float64", PieceOf(0, 16 * i, 1 << 21)) for i in range(count))
    return {"blocks": blocks, "names": ("b",), "layout": "d", "optimizer": SGD}


def test_models_count_together_and_are_made_at_once(server: Job) -> None:
    """Two models of 60 % each would end the job; nothing is written into either, so neither takes time nor memory."""
    heard = Heard()
    link = server.dial(lambda link: heard, BAD)
    known = msgspec.to_builtins(details())
    began_s = time.monotonic()
    server.loop.call(link.send, pack(OpenModel(0)), msgspec.msgpack.encode({**known, **large(0.6)}))
    wait_for(lambda: any(isinstance(m, ModelOpened) for m in heard.messages), "the first one is not taken")
    assert time.monotonic() - began_s < 5, "zeroing it would take as long as reading so much memory"
    server.loop.call(link.send, pack(OpenModel(1)), msgspec.msgpack.encode({**known, **large(0.6)}))
    assert heard.over.wait(10)
    assert re.search(
        r"Cannot hold parameters of [\d,]+ bytes, and [\d,]+ of other models: this server's", str(heard.error)
    )
    assert psutil.Process(server.process.pid).memory_info().rss < 2 << 30
    server.begin()
    server.goes_on()


def test_models_come_only_from_those_that_train(job: Job) -> None:
    said, address = told(job, (OpenModel(1), msgspec.msgpack.encode({**msgspec.to_builtins(details()), **large(0.2)})))
    assert "Cannot open model 1: rank 0 takes part in none of this job's models. Prepare the models" in said
    in_log(job, address, "Cannot open model 1")
    job.goes_on()


def test_the_first_that_comes_may_leave_before_it_has_sent_its_parameters(server: Job) -> None:
    """One of those that wait for them sends its own instead, and nothing is left of the first one's."""
    heard = Heard()
    link = server.dial(lambda link: heard, BAD)
    server.loop.call(link.send, pack(OpenModel(0)), pack(details(world=3)))
    server.loop.call(link.send, pack(InitBlock(0, 0)), bytes(56))
    wait_for(lambda: any(isinstance(m, ModelOpened) and m.wants_values for m in heard.messages), "no values are wanted")
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(server.begin, 3)
        wait_for(
            lambda: len(server.clients) == 2 and all(c._models.states for c in server.clients), "the others do not come"
        )
        server.loop.call(link.abort)
        beginning.result(20)
    server.goes_on()
    assert "Rank 0 is gone: Lost the link of rank 0 with 127.0.0.1:" in server.log()


def test_a_server_that_nobody_told_of_the_others(server: Job) -> None:
    """Two were started without --coordinator, so that each believes to be the only one."""
    (refused,), _, _ = opened(server, shards=2)
    assert "Cannot serve this worker with 2 shards: this one coordinates 1. Start all but the first" in refused.reason


def test_a_worker_may_take_its_time_before_it_trains(tmp_path: Path) -> None:
    """The server ends when nobody has come for so long; who has come may prepare its data."""
    slow = Job(tmp_path, patience_s=0.5)
    slow.begin(after_s=1.5)
    assert slow.step(1) > 0
    slow.close()
