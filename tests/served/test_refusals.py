"""What a wrong peer gets, what is logged about it, and that the job of the others goes on: one test per thing that can
be wrong, against a server in a process of its own."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import offbeat
from offbeat.cli.certs import make
from offbeat.errors import OffbeatError, PeerError
from offbeat.fabric.server import Client, cut, describe
from offbeat.fabric.server.messages import (
    About,
    Admit,
    Announce,
    Ask,
    BlockOf,
    Details,
    Enlist,
    Fill,
    Filled,
    Go,
    Gone,
    Look,
    Open,
    Opened,
    Part,
    PieceOf,
    Pulled,
    Refused,
    Values,
    Whole,
    pack,
    to_worker,
)
from offbeat.fabric.server.table import _memory_bytes
from offbeat.layout import arrange
from offbeat.serve import Settings, start_shard
from offbeat.wire.credentials import Certificates, Token
from offbeat.wire.frame import HEADER_BYTES, VERSION, Frame, Kind, encode
from offbeat.wire.loop import Loop
from offbeat.wire.messages import Claim, Welcome
from offbeat.wire.messages import Refused as TurnedAway
from offbeat.wire.tcp import connect
from tests.cli.commands import offbeat as command
from tests.fabric.test_shard import Worker
from tests.wire.peers import ByHand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import Link
    from offbeat.wire.messages import Role

JOB, SECRET = "digits", "a secret of more than sixteen bytes"
TOKEN = Token(SECRET.encode())
PLAN = offbeat.Plan(sync=offbeat.BSP(), fabric=offbeat.ParameterServer()).to_toml()
OTHER_PLAN = offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()).to_toml()
WORLD = 2
GOOD, BAD = (1, 2), 0  # ranks; of several contributions the lowest rank's hyper-parameters are taken


class Job:
    """A server, and workers that train through it in step.

    Args:
        folder: where its log goes.
        credentials: of the workers.
        settings: of the server, if not the usual ones.
    """

    def __init__(self, folder: Path, credentials: Credentials = TOKEN, **settings: str) -> None:
        self._log, self._credentials = folder / "server.log", credentials
        known: Any = {"job": JOB, "token": SECRET, "patience_s": 20.0, **settings}
        with self._log.open("wb") as log:
            self.process, self.address = start_shard(Settings(**known), output=log)
        self.loop = Loop()
        self.clients: list[Client] = []
        self.workers: list[Worker] = []
        self._velocity, self._seen = 0.0, 0

    def begin(self, world: int = WORLD) -> None:
        """Have the workers make three steps."""
        self.clients = [Client(self.loop, rank=rank, world=world) for rank in GOOD]
        for client in self.clients:
            self.dial(accept=client.accept, rank=client.rank)
        with ThreadPoolExecutor(len(GOOD)) as pool:
            self.workers = list(pool.map(lambda client: Worker(client, plan=PLAN), self.clients))
        self.step(3)

    def step(self, steps: int) -> float:
        """All step together; with gradients of 1, what they have moved by tells what was applied."""
        moved = 0.0
        with ThreadPoolExecutor(len(self.workers)) as pool:
            for _ in range(steps):
                list(pool.map(Worker.step, self.workers, [torch.ones(100)] * len(self.workers)))
                self._velocity = 0.5 * self._velocity + 1
                moved += 0.5 * self._velocity
        return moved

    def dial(self, accept: Callable[[Link], Any], rank: int, **options: Any) -> Link:
        known = {"job": JOB, "credentials": self._credentials, **options}
        link: Link = self.loop.run(connect(self.address, accept=accept, rank=rank, **known))
        return link

    def goes_on(self) -> None:
        """The workers step on, and nothing that somebody else said is in their parameters."""
        before = self.workers[0].values.clone()
        moved = self.step(2)
        for worker in self.workers:
            torch.testing.assert_close(before - worker.values, torch.full((100,), moved), rtol=1e-4, atol=1e-4)
        assert self.process.poll() is None

    def log(self) -> str:
        text, seen = self._log.read_text(), self._seen
        self._seen = len(text)
        assert "Traceback" not in text[seen:], text[seen:]
        return text

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if not self.clients:
            self.process.terminate()
        assert self.process.wait(10) == 0
        self.loop.close()
        self.log()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    one.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One for all tests that do it no harm, which is what they test."""
    one = Job(tmp_path_factory.mktemp("job"))
    one.begin()
    yield one
    one.close()


class Heard:
    """What a peer by itself hears, until it is lost."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.error: OffbeatError | None = None
        self.over = threading.Event()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def received(self, metadata: bytes, body: memoryview) -> None:
        self.messages.append(to_worker(metadata))

    def lost(self, error: OffbeatError | None) -> None:
        self.error = error
        self.over.set()


def told(job: Job, *frames: tuple[Any, bytes], rank: int = BAD, role: Role = "worker") -> tuple[str, str]:
    """Say `frames` over a link, and be closed: what is told, and the address that it came from."""
    heard = Heard()
    link = job.dial(lambda link: heard, rank, role=role)
    address = own_address(link)
    for message, body in frames:
        job.loop.call(link.send, message if isinstance(message, bytes) else pack(message), body)
    assert heard.over.wait(10), "it is not closed"
    assert isinstance(heard.error, PeerError)
    return str(heard.error), address


def own_address(link: Link) -> str:
    assert link._stream is not None
    host, port = link._stream.sock.getsockname()
    return f"{host}:{port}"


def wait_for(condition: Callable[[], object], otherwise: str) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.01)


def in_log(job: Job, address: str, says: str) -> None:
    """It stands there in one line, with the peer's address."""

    def lines() -> list[str]:
        return [line for line in job.log().splitlines() if address in line]

    wait_for(lambda: any(says in line for line in lines()), f"{says!r} is not logged of {address}")


# -- frames ------------------------------------------------------------------------------------------------------------


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
        peer = ByHand(Claim(rank=BAD, job=JOB, session=b"s" * 16), SECRET.encode())
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
    stream = frame(pack(Open(1)), pack(details()))
    stream[-1] ^= 1

    async def story() -> Any:
        peer = ByHand(Claim(rank=BAD, job=JOB, session=b"s" * 16), SECRET.encode())
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


# -- messages ----------------------------------------------------------------------------------------------------------


def details(**changes: Any) -> Details:
    """What a `Worker` says when it opens its model."""
    parameters = {"a": torch.nn.Parameter(torch.zeros(30)), "b": torch.nn.Parameter(torch.zeros(70))}
    layout = arrange(parameters, bucket_bytes=1 << 20)
    blocks = cut(layout, 64)
    names = tuple(dict.fromkeys(piece.name for block in blocks for piece in block.pieces))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.5)
    known: dict[str, Any] = {
        "world": WORLD,
        "shards": 1,
        "holders": 1,
        "plan": PLAN,
        "layout": layout.digest,
        "names": names,
        "blocks": tuple(
            BlockOf(b.index, b.dtype, tuple(PieceOf(names.index(p.name), p.start, p.numel) for p in b.pieces))
            for b in blocks
        ),
        "optimizer": describe(optimizer, {id(p): name for name, p in parameters.items()}),
    }
    return Details(**{**known, **changes})


HYPER = details().optimizer.groups


STRAY: dict[str, tuple[Any, bytes, str]] = {
    "no message": (b"\xc1", b"", "Cannot understand this peer"),
    "nothing": (b"", b"", "Cannot understand this peer"),
    "a decision": (Admit(0, BAD, 0), b"", "Cannot understand this peer: Invalid value 'Admit'"),
    "an eviction of another": (Gone(0, 1), b"", "Cannot understand this peer: Invalid value 'Gone'"),
    "too large a number": (b"\x82\xa4type\xa4Look\xa6number\xcf" + b"\xff" * 8, b"", "Expected `int` <"),
    "no text": (b"\x81\xa4type\xa2\xff\xfe", b"", "Cannot understand this peer"),
    "a body where none belongs": (Pulled(0, 1), b"body", "Pulled has no body"),
    "a shard's enlisting": (Enlist(), b"", "Enlist is not for a worker to say."),
    "a shard's filled": (Filled(0), b"", "Filled is not for a worker to say."),
    "a shard's whole": (Whole(0, 1, 3), b"", "Whole is not for a worker to say."),
    "another's values": (Fill(0, 0), bytes(64), "Rank 0 was not asked for the values of block 0."),
    "values without a body": (Fill(0, 0), b"", "Rank 0 sends values of block 0 without a body."),
    "values of nothing": (Fill(3, 0), bytes(64), "Model 3 has not been opened."),
    "a gradient unasked": (Part(0, 0, 0, "float32"), bytes(64), "Rank 0 does not take part in model 0."),
    "a contribution of a stranger": (Announce(0, 3, About(1.0, ())), b"", "Rank 0 does not take part in model 0."),
    "a question of a stranger": (Ask(0, "the mean", False, (1.0,)), b"", "it trains no model yet. Call run.prepare"),
}


@pytest.mark.parametrize("name", STRAY)
def test_what_no_worker_says_when_it_has_just_come(job: Job, name: str) -> None:
    message, body, says = STRAY[name]
    said, address = told(job, (message, body))
    assert says in said
    assert len(said.splitlines()) == 1
    in_log(job, address, says)
    job.goes_on()


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("onlooker", Open(0)),
        ("onlooker", Announce(0, 3, About(1.0, ()))),
        ("onlooker", Ask(0, "the mean")),
        ("onlooker", Whole(0, 1, 3)),
        ("onlooker", Part(0, 3, 0, "float32")),
        ("shard", Open(0)),
        ("shard", Look(0)),
        ("shard", Pulled(0, 3)),
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


def test_a_role_is_part_of_the_claim(job: Job) -> None:
    """A session that began as an onlooker's cannot go on as a worker's."""

    async def story() -> Any:
        peer = ByHand(Claim(rank=1, role="onlooker", job=JOB, session=b"s" * 16), SECRET.encode())
        assert isinstance(await peer.enter(job.address), Welcome)
        peer.hang_up()
        peer.claim = msgspec.structs.replace(peer.claim, role="worker", resumes=True)
        answer = await peer.enter(job.address)
        peer.hang_up()
        return answer

    assert job.loop.run(story()).reason == "it says it is worker 1, and was onlooker 1"
    job.goes_on()


# -- models that differ ------------------------------------------------------------------------------------------------


def opened(job: Job, rank: int = BAD, **changes: Any) -> tuple[Any, str, str]:
    """What a worker with other details is told: the message, what ends the link, and its address."""
    heard = Heard()
    link = job.dial(lambda link: heard, rank)
    address = own_address(link)
    job.loop.call(link.send, pack(Open(0)), pack(details(**changes)))
    assert heard.over.wait(10)
    return heard.messages, str(heard.error), address


def test_another_layout(job: Job) -> None:
    other = "0123456789abcdef"
    messages, said, address = opened(job, layout=other)
    says = (
        f"Cannot take in rank 0: its layout is {other!r}, that of the job here is {details().layout!r}. Start every "
        "worker with the same plan and the same model."
    )
    assert messages == [Refused(says, disagrees=True)]
    assert says.removesuffix(".") in said
    in_log(job, address, says.removesuffix("."))
    job.goes_on()


def test_another_plan(job: Job) -> None:
    """Both are named by their digests, which `offbeat plan show` prints."""
    messages, _, address = opened(job, plan=OTHER_PLAN)
    theirs, ours = (offbeat.Plan.from_toml(text).digest for text in (OTHER_PLAN, PLAN))
    (refused,) = messages
    assert refused.disagrees
    assert f"its plan is {theirs!r}, that of the job here is {ours!r}" in refused.reason
    in_log(job, address, theirs)
    job.goes_on()


DETAILS: dict[str, tuple[dict[str, Any], str]] = {
    "another world": ({"world": 5}, "its number of workers is '5', that of the job here is '2'"),
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
    assert "Cannot take in rank 1: one is here already, from 127.0.0.1:" in said
    in_log(job, address, "Cannot take in rank 1")
    job.goes_on()


def block(index: int = 0, dtype: str = "float32", *pieces: PieceOf) -> BlockOf:
    return BlockOf(index, dtype, pieces or (PieceOf(0, 0, 4),))


SGD = {"kind": "SGD", "groups": ({"lr": 0.1},), "members": (("b",),)}
FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({"plan": "p"}, "Cannot coordinate by this worker's plan"),
    "no policy": ({"plan": "[sync]\nkind = 'SPS'\n"}, "Unknown sync 'SPS' (did you mean 'SSP'?)"),
    "a type of parameters": ({"blocks": (block(0, "int8"),)}, "Cannot hold parameters of type 'int8' at a server"),
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
        said, address = told(server, (Open(0), msgspec.msgpack.encode({**known, **changes})))
        assert says in said, name
        assert len(said.splitlines()) == 1
        in_log(server, address, says[:40])
    server.begin()
    server.goes_on()


def test_the_first_that_comes_may_leave_before_it_has_sent_its_parameters(server: Job) -> None:
    """One of those that wait for them sends its own instead, and nothing is left of the first one's."""
    heard = Heard()
    link = server.dial(lambda link: heard, BAD)
    server.loop.call(link.send, pack(Open(0)), pack(details(world=3)))
    server.loop.call(link.send, pack(Fill(0, 0)), bytes(56))
    wait_for(lambda: any(isinstance(m, Opened) and m.wants_values for m in heard.messages), "no values are wanted")
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(server.begin, 3)
        wait_for(lambda: len(server.clients) == 2 and all(c._places for c in server.clients), "the others do not come")
        server.loop.call(link.abort)
        beginning.result(20)
    server.goes_on()
    assert "Rank 0 is gone: Lost the link of rank 0 with 127.0.0.1:" in server.log()


# -- a worker that goes mad in the middle ------------------------------------------------------------------------------


def announce(clock: int, **changes: Any) -> Announce:
    return Announce(0, clock, About(**{"weight": 1.0, "hyper": HYPER, **changes}))


def part(clock: int, block: int = 0, dtype: str = "float32") -> Part:
    return Part(0, clock, block, dtype)


# What it says when its contribution n is next, and what is said to that; block 0 has 14 elements of 4 bytes.
MAD: dict[str, tuple[Callable[[int], list[tuple[Any, bytes]]], str]] = {
    "a future push": (
        lambda n: [(announce(n), b""), (part(n + 2), bytes(56))],
        "contribution {n+2} of rank 0: what is left of number {n} is next",
    ),
    "an ancient push": (
        lambda n: [(part(n - 2), bytes(56))],
        "contribution {n-2} of rank 0: what is left of number {n} is",
    ),
    "a push not granted": (lambda n: [(part(n), bytes(56))], "contribution {n} of rank 0: it has not been granted"),
    "a future contribution": (lambda n: [(announce(n + 9), b"")], "contribution {n+9} of rank 0: it is computing, and"),
    "an ancient contribution": (
        lambda n: [(announce(0), b"")],
        "contribution 0 of rank 0: it is computing, and number {n}",
    ),
    "a contribution twice": (
        lambda n: [(announce(n), b""), (announce(n), b"")],
        "Cannot take contribution {n} of rank 0: it is pushing, and number {n} is next",
    ),
    "a wrong dtype": (
        lambda n: [(announce(n), b""), (part(n, dtype="int64"), bytes(56))],
        "Cannot take a gradient of type 'int64' from rank 0",
    ),
    "another dtype than it has": (
        lambda n: [(announce(n), b""), (part(n, dtype="float64"), bytes(56))],
        "Cannot take 56 bytes as block 0: it has 112",
    ),
    "a wrong shape": (
        lambda n: [(announce(n), b""), (part(n), bytes(52))],
        "Cannot take 52 bytes as block 0: it has 56",
    ),
    "a wrong block": (
        lambda n: [(announce(n), b""), (part(n, 99), bytes(56))],
        "Block 99 of model 0 is not held here",
    ),
    "a block twice": (
        lambda n: [(announce(n), b""), *2 * [(part(n), bytes(56))]],
        "block 0 of contribution {n} of rank 0: what is left of number {n} is next",
    ),
    "a block without a body": (
        lambda n: [(announce(n), b""), (part(n), b"")],
        "Rank 0 sends block 0 without a body",
    ),
    "too few groups": (
        lambda n: [(announce(n, hyper=()), b"")],
        "Cannot take hyper-parameters of 0 groups: the optimizer has 1",
    ),
    "another flag": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "nesterov": None},)), b"")],
        "Cannot go on with nesterov=None in group 0 of SGD: it was False",
    ),
    "no number": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "lr": (1.0, 2.0)},)), b"")],
        "Cannot go on with lr=(1.0, 2.0) in group 0 of SGD: it was 0.5",
    ),
    "a number out of range": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "momentum": -1.0},)), b"")],
        "Cannot make SGD from these hyper-parameters: Invalid momentum value: -1.0",
    ),
    "a weight that is none": (lambda n: [(announce(n, weight=float("nan")), b"")], "Expected `float` >= 0.0"),
    "a step it was not let go for": (
        lambda n: [(Pulled(0, n + 9), b"")],
        "it has pulled step {n+9}, but is at step {n}",
    ),
    "a model twice": (lambda n: [(Open(0), pack(details()))], "Rank 0 opens model 0 for a second time"),
    "values again": (lambda n: [(Fill(0, 0), bytes(56))], "Rank 0 was not asked for the values of block 0"),
    "two questions at once": (
        lambda n: [(Ask(5, "one"), b""), (Ask(6, "two"), b"")],
        "Rank 0 asks 'two' before its last question is answered",
    ),
}


def join(job: Job) -> tuple[Link, Heard, int]:
    """A worker that comes later, and has got the parameters; the number of its next contribution."""
    heard = Heard()
    link = job.dial(lambda link: heard, BAD)
    job.loop.call(link.send, pack(Open(0)), pack(details()))
    wait_for(
        lambda: sum(isinstance(message, Values) for message in heard.messages) == len(details().blocks), "no values"
    )
    (go,) = [message for message in heard.messages if isinstance(message, Go)]
    job.loop.call(link.send, pack(Pulled(0, go.step)))
    return link, heard, go.step


@pytest.mark.parametrize("name", MAD)
def test_a_worker_that_goes_mad(job: Job, name: str) -> None:
    story, says = MAD[name]
    link, heard, number = join(job)
    says = re.sub(r"\{n([+-]\d+)?\}", lambda found: str(number + int(found[1] or 0)), says)
    address = own_address(link)
    for message, body in story(number):
        job.loop.call(link.send, pack(message), body)
    assert heard.over.wait(10), "it is not closed"
    assert says in str(heard.error)
    in_log(job, address, f"Rank 0 is gone: Lost the link of rank 0 with {address}: ")
    in_log(job, address, "The others go on.")
    job.goes_on()


def test_hyper_parameters_that_no_optimizer_reads_do_no_harm(job: Job) -> None:
    """Schedulers keep numbers of their own there; "params" would replace what is trained."""
    link, heard, number = join(job)
    strange = {**HYPER[0], "params": 3, "max_lr": 1.0, "foreach": True, "fused": True, "differentiable": True}
    job.loop.call(link.send, pack(announce(number, hyper=(strange,))))
    for index, one in enumerate(details().blocks):
        ones = torch.ones(sum(piece.numel for piece in one.pieces)).numpy().tobytes()
        job.loop.call(link.send, pack(part(number, index)), ones)
    job.step(1)
    wait_for(lambda: any(isinstance(m, Go) and m.step == number + 1 for m in heard.messages), "it is not let go")
    job.loop.call(link.abort)
    job.goes_on()


def test_who_asks_and_does_not_listen(job: Job) -> None:
    """Answers that nobody takes in would fill the server's memory."""
    heard = Heard()
    link = job.dial(lambda link: heard, BAD, role="onlooker")
    address = own_address(link)

    def ask_and_ask() -> None:
        link.pause_reading()
        for number in range(1000):
            link.send(pack(Look(number)))

    job.loop.call(ask_and_ask)
    in_log(job, address, "it asks for looks that it does not take in")
    job.loop.call(link.abort)
    job.goes_on()


# -- who may not come in -----------------------------------------------------------------------------------------------

NO_DETAIL = "it hung up when it saw who we are (another token, certificate or job?)."


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"credentials": Token(b"another secret of some length")}, "its token is wrong"),
        ({"credentials": None}, "its token is wrong"),
        ({"job": "letters"}, "it belongs to job 'letters', this is 'digits'"),
    ],
    ids=["token", "none", "job"],
)
def test_who_does_not_belong_here(job: Job, options: dict[str, Any], logged: str) -> None:
    """Who cannot prove that it belongs here is not told what is wrong; the log is."""
    with pytest.raises(PeerError) as caught:
        job.dial(lambda link: Heard(), BAD, **options)
    assert str(caught.value) == f"Cannot join {job.address}: {NO_DETAIL}"
    assert re.search(r"Refused 127\.0\.0\.1:\d+: " + re.escape(logged), job.log())
    assert SECRET not in job.log()
    job.goes_on()


def test_a_foreign_certificate(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make(tmp_path / name)
    ours = pair(tmp_path / "ours", tmp_path / "ours", "worker")
    files = {"certificate": "server.pem", "key": "server.key", "authority": "authority.pem"}
    job = Job(tmp_path, ours, token="", **{kind: str(tmp_path / "ours" / name) for kind, name in files.items()})
    try:
        job.begin()
        with pytest.raises(PeerError) as caught:
            job.dial(lambda link: Heard(), BAD, credentials=pair(tmp_path / "theirs", tmp_path / "ours", "worker"))
        assert str(caught.value).startswith(f"Cannot join {job.address}: it ")
        assert len(str(caught.value).splitlines()) == 1
        assert re.search(r"Refused 127\.0\.0\.1:\d+: its certificate is not accepted", job.log())
        job.goes_on()
    finally:
        job.close()


def pair(folder: Path, authority: Path, name: str) -> Certificates:
    return Certificates(folder / f"{name}.pem", folder / f"{name}.key", authority / "authority.pem")


def test_an_open_door_is_not_opened(tmp_path: Path) -> None:
    code, output = command("serve", "--bind", "0.0.0.0", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "Cannot open a server on 0.0.0.0 without a token or certificates: anybody could join." in output
