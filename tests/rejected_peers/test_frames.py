"""A wrong peer's frames and messages: what it gets, what is logged, and that the job of the others goes on."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings, strategies

from offbeat.errors import PeerError
from offbeat.protocol.data_leases import GetDataState, MemoryExhausted, RegisterLoader, RequestLease, ReturnLease
from offbeat.protocol.messages import SAYS, pack
from offbeat.protocol.shards import AdmitWorker, ModelFilled, PushDone, RegisterShard, WorkerRemoved
from offbeat.protocol.status import GetStatus
from offbeat.protocol.training import (
    Announce,
    AskAllWorkers,
    ContributionInfo,
    DensePayload,
    InitBlock,
    OpenModel,
    PullDone,
    PullOrder,
    PushBlock,
)
from offbeat.wire.frame import HEADER_BYTES, VERSION, Frame, Kind, encode
from offbeat.wire.messages import MAX_WORLD, HandshakeClaim, Role, Welcome
from offbeat.wire.messages import HandshakeRefused as TurnedAway
from tests.rejected_peers.job import (
    BAD,
    GOOD,
    JOB,
    SECRET,
    Heard,
    Job,
    details,
    in_log,
    told,
)
from tests.wire.peers import ByHand


def frame(metadata: bytes = b"m", body: bytes = b"", number: int = 1) -> bytearray:
    return bytearray(encode(Frame(metadata, body, kind=Kind.DATA, number=number)))


def changed(stream: bytearray, at: int, data: bytes) -> bytes:
    stream[at : at + len(data)] = data
    return bytes(stream)


FRAMES = {
    "magic": (b"GET / HTTP/1.1\r\n\r\n", "it does not speak offbeat's protocol"),
    "version": (changed(frame(), 4, bytes((VERSION + 1,))), f"it speaks version {VERSION + 1} of the protocol"),
    "checksum of metadata": (changed(frame(), HEADER_BYTES, b"x"), "its metadata was damaged on the way (checksum)"),
    "size": (changed(frame(), 12, b"\xff\xff\xff\xff"), "Cannot receive a body of 4294967295 bytes: the most that"),
    "number": (bytes(frame(number=9)), "frame 9 came after frame 0"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_none(job: Job, name: str) -> None:
    """It may have been the network, so the connection is closed; for the third time, so is the session."""
    stream, says = FRAMES[name]

    async def story() -> tuple[Any, str]:
        peer = ByHand(HandshakeClaim(rank=BAD, job=JOB, session=b"s" * 16), SECRET.encode())
        for _ in range(3):
            answer = await peer.enter(job.address)
            assert isinstance(answer, Welcome)
            peer.claim = msgspec.structs.replace(peer.claim, resumes=True)
            host, port = peer.writer.get_extra_info("sockname")
            peer.say(stream)
            while await peer.reader.read(1000):
                pass
            peer.writer.close()
        answer = await peer.enter(job.address)
        peer.writer.close()
        return answer, f"{host}:{port}"

    answer, _ = job.loop.run(story())
    assert isinstance(answer, TurnedAway)
    assert answer.reason.startswith("its session is over: ")
    assert says in answer.reason
    assert re.search(r"127\.0\.0\.1:\d+: .*" + re.escape(says), job.log())
    job.goes_on()


def test_a_body_with_a_wrong_checksum(job: Job) -> None:
    """Whatever was received of it is not taken for values."""
    stream = frame(pack(OpenModel(1)), pack(details()))
    stream[-1] ^= 1

    async def story() -> Any:
        peer = ByHand(HandshakeClaim(rank=BAD, job=JOB, session=b"s" * 16), SECRET.encode())
        for _ in range(3):
            assert isinstance(await peer.enter(job.address), Welcome)
            peer.claim = msgspec.structs.replace(peer.claim, resumes=True)
            peer.say(bytes(stream))
            while await peer.reader.read(1000):
                pass
            peer.writer.close()
        answer = await peer.enter(job.address)
        peer.writer.close()
        return answer

    assert "its body was damaged on the way (checksum)" in job.loop.run(story()).reason
    assert "its body was damaged on the way (checksum)" in job.log()
    job.goes_on()


STRAY: dict[str, tuple[Any, bytes, str]] = {
    "no message": (b"\xc1", b"", "Cannot understand this peer"),
    "nothing": (b"", b"", "Cannot understand this peer"),
    "a decision": (AdmitWorker(0, BAD, 0), b"", "Cannot understand this peer: Invalid value 'AdmitWorker'"),
    "an eviction of another": (WorkerRemoved(0, 1), b"", "Cannot understand this peer: Invalid value 'WorkerRemoved'"),
    "too large a number": (b"\x82\xa4type\xa9GetStatus\xa6number\xcf" + b"\xff" * 8, b"", "Expected `int` <"),
    "no text": (b"\x81\xa4type\xa2\xff\xfe", b"", "Cannot understand this peer"),
    "a body where none belongs": (PullDone(0, 1), b"body", "PullDone has no body"),
    "a shard's enlisting": (RegisterShard(), b"", "RegisterShard is not for a worker to say."),
    "a shard's filled": (ModelFilled(0), b"", "ModelFilled is not for a worker to say."),
    "a shard's whole": (PushDone(0, 1, 3), b"", "PushDone is not for a worker to say."),
    "another's values": (InitBlock(0, 0), bytes(64), "Rank 0 was not asked for the values of block 0."),
    "values without a body": (InitBlock(0, 0), b"", "Rank 0 sends values of block 0 without a body."),
    "values of nothing": (InitBlock(3, 0), bytes(64), "Model 3 has not been opened."),
    "a gradient unasked": (PushBlock(0, 0, 0, DensePayload()), bytes(64), "Rank 0 does not take part in model 0."),
    "an order of a stranger": (PullOrder(0, (0,)), b"", "Rank 0 does not take part in model 0."),
    "a contribution of a stranger": (
        Announce(0, 3, ContributionInfo(1.0, ())),
        b"",
        "Announce from rank 0: it trains no",
    ),
    "a question of a stranger": (
        AskAllWorkers(0, "the mean", False, (1.0,)),
        b"",
        "it trains no model yet. Call run.prepare",
    ),
}


@pytest.mark.parametrize("name", STRAY)
def test_what_no_worker_says_when_it_has_just_come(job: Job, name: str) -> None:
    message, body, says = STRAY[name]
    said, address = told(job, (message, body))
    assert says in said
    assert len(said.splitlines()) == 1
    in_log(job, address, says)
    job.goes_on()


ENROL = RegisterLoader(loader=0, plan="", world=2, samples=100, seed=0, shuffle=True, drop_last=False, batch=10)
SPEAKS: list[Any] = [
    ENROL,
    RequestLease(0),
    ReturnLease(0, (0,)),
    MemoryExhausted(0, 5),
    GetDataState(0),
    Announce(0, 3, ContributionInfo(1.0, ())),
    PullDone(0, 3),
    AskAllWorkers(0, "a"),
]


@pytest.mark.parametrize("message", SPEAKS, ids=lambda message: type(message).__name__)
def test_nobody_speaks_for_a_worker_that_is_here(job: Job, message: Any) -> None:
    said, address = told(job, (message, b""), rank=GOOD[0])
    assert f"Cannot take {type(message).__name__} from rank 1: it trains no model yet." in said
    in_log(job, address, "it trains no model yet")
    job.goes_on()


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("onlooker", OpenModel(0)),
        ("onlooker", Announce(0, 3, ContributionInfo(1.0, ()))),
        ("onlooker", AskAllWorkers(0, "the mean")),
        ("onlooker", PushDone(0, 1, 3)),
        ("onlooker", PushBlock(0, 3, 0, DensePayload())),
        ("shard", OpenModel(0)),
        ("shard", GetStatus(0)),
        ("shard", PullDone(0, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("body", [b"", b"body"], ids=["bare", "body"])
def test_nobody_speaks_out_of_its_role(job: Job, role: Role, message: Any, body: bytes) -> None:
    """Also under the number of a worker that is here."""
    said, address = told(job, (message, body), rank=1, role=role)
    assert (
        f"{type(message).__name__} is not for {'an onlooker' if role == 'onlooker' else 'another shard'} to s" in said
    )
    in_log(job, address, f"Lost the link of the {role}")
    job.goes_on()


SAID = [OpenModel(0), Announce(0, 3, ContributionInfo(1.0, ())), PushDone(0, 1, 3), GetStatus(0), PullDone(0, 3)]


@settings(max_examples=40, derandomize=True)
@given(
    role=strategies.sampled_from(get_args(Role)),
    rank=strategies.integers(max(GOOD) + 1, MAX_WORLD - 1),
    message=strategies.sampled_from(SAID),
)
def test_each_role_is_admitted_for_what_it_says_or_refused_in_a_sentence(
    job: Job, role: Role, rank: int, message: Any
) -> None:
    if role not in SAYS or role == "validator":
        with pytest.raises(PeerError, match=f"a {role} has nothing to say to a server|it is no validator"):
            job.dial(lambda link: Heard(), rank, role=role)
    elif type(message) not in SAYS[role]:
        said, _ = told(job, (message, b""), rank=rank, role=role)
        assert f"{type(message).__name__} is not for" in said
    job.goes_on()


def test_a_role_is_part_of_the_claim(job: Job) -> None:
    """A session that began as an onlooker's cannot go on as a worker's."""

    async def story() -> Any:
        peer = ByHand(HandshakeClaim(rank=1, role="onlooker", job=JOB, session=b"s" * 16), SECRET.encode())
        assert isinstance(await peer.enter(job.address), Welcome)
        peer.hang_up()
        peer.claim = msgspec.structs.replace(peer.claim, role="worker", resumes=True)
        answer = await peer.enter(job.address)
        peer.hang_up()
        return answer

    assert job.loop.run(story()).reason == "it says it is worker 1, and was onlooker 1"
    job.goes_on()
