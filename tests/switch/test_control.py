"""The control of a switch over real links: who may join, evict and look; and packets over real sockets."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from offbeat.errors import NetworkError, PeerError, PlanError
from offbeat.fabric.switch_session import OtherWorkers, SwitchSession
from offbeat.protocol.group_progress import GroupProgress
from offbeat.protocol.switch_control import (
    EvictFromSwitchJob,
    GetSwitchPlan,
    GetSwitchStatus,
    JoinSwitchJob,
    MeetAtSwitch,
    MetAtSwitch,
    SetSwitchStrategy,
    Strategy,
    SwitchPlan,
    SwitchReturn,
    SwitchStatus,
    pack,
    to_switch_of,
)
from offbeat.protocol.switch_control import SwitchJobJoined as Joined
from offbeat.switch import control_server
from offbeat.switch.client_thread import ClientThread
from offbeat.switch.control_client import ControlClient
from offbeat.switch.control_server import ControlServer
from offbeat.switch.job_shape import JobShape
from offbeat.switch.members import refusal
from offbeat.switch.packet import Packet, PacketKind, Reason, decode, encode
from offbeat.switch.serve import check_memory, check_trust
from offbeat.switch.software_plane import SoftwarePlane
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.udp_socket import UdpSocket
from offbeat.wire.credentials import Token
from tests.switch.local_switch import served_switch
from tests.switch.sums import integers, right_sums, sums_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from offbeat.switch.data_plane import JobClocks
    from offbeat.switch.packet_batch import PacketBatch
    from offbeat.switch.stream_exchange import StreamExchange
    from offbeat.wire.link import PeerLink
    from offbeat.wire.messages import Role

SHORT = timedelta(seconds=2)
VALUES = 64


@pytest.fixture
def address() -> Iterator[str]:
    with served_switch() as where:
        yield where


def secret_of(rank: int) -> bytes:
    return bytes([rank]) * 16


def client(address: str, rank: int = 0, role: Role = "worker", secret: bytes | None = None) -> ControlClient:
    """A link; by default always that of the same process of its rank."""
    own = secret_of(rank) if secret is None else secret
    return ControlClient(address, rank=rank, role=role, secret=own, timeout=SHORT, patience=5 * SHORT)


def join(
    control: ControlClient,
    worker: int,
    *,
    job: str = "a",
    workers: int = 2,
    values: int = VALUES,
    secret: bytes | None = None,
) -> Joined:
    told = control.ask(
        lambda number: JoinSwitchJob(
            request=number,
            job=job,
            worker=worker,
            workers=workers,
            values=values,
            slots=64,
            ring=8,
            secret=secret_of(worker) if secret is None else secret,
        )
    )
    assert isinstance(told, Joined)
    return told


def test_workers_join_a_job_and_are_seen(address: str) -> None:
    first, second = client(address, 0), client(address, 1)
    joined = join(first, 0), join(second, 1)
    assert joined[0].number == joined[1].number
    assert joined[0].cookie != joined[1].cookie
    (job,) = client(address, role="operator").status().jobs
    assert (job.job, job.workers, [one.worker for one in job.members]) == ("a", 2, [0, 1])
    assert [one.silent_s for one in job.members] == [None, None]


def until(holds: object, *, within_s: float = 5.0) -> None:
    assert callable(holds)
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.02)


def test_a_job_ends_with_its_last_worker(address: str) -> None:
    looks, first, second = client(address, role="onlooker"), client(address, 0), client(address, 1)
    join(first, 0), join(second, 1)
    first.close()
    until(lambda: [one.worker for job in looks.status().jobs for one in job.members] == [1])
    second.close()
    until(lambda: not looks.status().jobs)


def test_another_shape_is_refused(address: str) -> None:
    first, second = client(address, 0), client(address, 1)
    join(first, 0)
    with pytest.raises(PlanError, match="same plan"):
        join(second, 1, values=128)


@pytest.mark.parametrize(("workers", "says"), [(1, "room for 1 workers")])
def test_a_rank_beyond_the_job_is_refused(address: str, workers: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        join(client(address, 3), 3, workers=workers)


def test_who_is_refused_leaves_no_job_behind(address: str) -> None:
    with pytest.raises(PlanError, match="room for 1 workers"):
        join(client(address, 3), 3, workers=1)
    join(client(address, 0), 0, workers=2)


def test_a_table_is_shown_with_the_exponent_of_its_values(address: str) -> None:
    client(address, 0).join("a", JobShape(0, 1, VALUES, 64, 8, 1), Strategy("table"), exponent=-5)
    (job,) = client(address, role="operator").status().jobs
    assert job.exponent == -5


def test_nobody_joins_as_another(address: str) -> None:
    with pytest.raises(PeerError, match="ends the link: rank 0 joins as rank 1"):
        join(client(address, 0), 1)


def test_an_operator_evicts_and_changes_the_policy(address: str) -> None:
    first, second, operator = client(address, 0), client(address, 1), client(address, role="operator")
    join(first, 0), join(second, 1)
    operator.evict("a", 1, "it is slow")
    until(lambda: [one.worker for one in operator.status().jobs[0].members] == [0])
    told = operator.ask(lambda number: SetSwitchStrategy(number, "a", Strategy(quorum=1)))
    assert msgspec.to_builtins(told)["is_set"]
    with pytest.raises(PlanError, match="offbeat swap"):
        operator.ask(lambda number: SetSwitchStrategy(number, "a", Strategy("table", window=2)))
    with pytest.raises(PlanError, match="no such job"):
        operator.ask(lambda number: SetSwitchStrategy(number, "b", Strategy()))


def test_an_onlooker_changes_nothing(address: str) -> None:
    onlooker = client(address, role="onlooker")
    with pytest.raises(PeerError, match="SetSwitchStrategy, which is not for a onlooker to send"):
        onlooker.ask(lambda number: SetSwitchStrategy(number, "a", Strategy()))


def test_a_wrong_token_is_refused() -> None:
    with (
        served_switch(Token(b"a" * 32)) as address,
        pytest.raises((PeerError, NetworkError), match="token"),
    ):
        ControlClient(address, credentials=Token(b"b" * 32), timeout=SHORT, patience=SHORT)


def test_nobody_there_is_told_with_the_address() -> None:
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9 .*within 0\.3 s"):
        ControlClient("127.0.0.1:9", timeout=SHORT, patience=timedelta(seconds=0.3))


@pytest.mark.parametrize("message", [b"", b"\x81", msgspec.msgpack.encode({"type": "Shutdown"}), b"\xff" * 64])
def test_garbage_is_no_message(message: bytes) -> None:
    with pytest.raises(PeerError, match="Cannot understand"):
        to_switch_of(message)


def test_messages_have_bounds() -> None:
    with pytest.raises(PeerError, match="Cannot understand"):
        to_switch_of(pack(EvictFromSwitchJob("a" * 300, 1)))


@pytest.mark.parametrize(("bind", "says"), [("0.0.0.0", "--trusted-network"), ("here", "IPv4 address")])
def test_a_network_has_to_be_trusted(bind: str, says: str) -> None:
    with pytest.raises(NetworkError, match=says):
        check_trust(bind, trusted_network=False)
    check_trust("127.0.0.1", trusted_network=False)


class Worker:
    """One worker's stream over a real socket, and what it was told when it joined."""

    def __init__(self, address: str, rank: int, workers: int) -> None:
        self.control = client(address, rank)
        self.joined = join(self.control, rank, workers=workers)
        shape = JobShape(self.joined.number, workers, VALUES, 64, 8)
        stream = StreamClient(shape, rank, self.joined.cookie, window=16, rto_s=0.02)
        self.sock = UdpSocket()
        self.client = stream
        self.stream = ClientThread(stream, self.sock, self.sock.connect("127.0.0.1", self.joined.port))

    def begin(self, values: NDArray[np.float32]) -> StreamExchange:
        return self.stream.do(lambda: self.client.begin(values))

    def wait(self, exchange: StreamExchange, seconds: float) -> bool:
        return self.stream.wait(lambda: exchange.is_done, timedelta(seconds=seconds))


@pytest.fixture
def workers(address: str) -> Iterator[list[Worker]]:
    made = [Worker(address, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.stream.close()
        one.control.close()


def summed(workers: list[Worker], size: int) -> None:
    """Sum vectors of ones over these workers, and see that all get the sum."""
    exchanges = [one.begin(np.full(size, 1.0, np.float32)) for one in workers]
    for one, exchange in zip(workers, exchanges, strict=True):
        assert one.wait(exchange, 10), one.stream.trouble
        assert (exchange.total == len(workers)).all()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        yield sock


def test_sums_over_sockets_while_strangers_shout(address: str, workers: list[Worker], stranger: socket.socket) -> None:
    summed(workers, 1000)
    number, to = workers[0].joined.number, ("127.0.0.1", workers[0].joined.port)
    for index in range(3000):
        kind = [PacketKind.DATA, PacketKind.CLOCK, PacketKind.JOIN, PacketKind.LEAVE][index % 4]
        forged = encode(Packet(kind, number, index % 5, cookie=index, chunk=index, slot=index % 64))
        stranger.sendto([forged, os.urandom(40), forged[:20], b""][index // 4 % 4], to)
    summed(workers, 5000)
    status = client(address, role="operator").status()
    assert sum(status.jobs[0].refused.values()) > 0
    assert sum(status.dropped.values()) > 1000


def test_a_stranger_is_told_why(workers: list[Worker], stranger: socket.socket) -> None:
    summed(workers, 100)
    joined = workers[0].joined
    for packet, reason in (
        (Packet(PacketKind.DATA, joined.number ^ 1, 0), Reason.UNKNOWN_JOB),
        (Packet(PacketKind.DATA, joined.number, 9), Reason.NOT_A_MEMBER),
        (Packet(PacketKind.DATA, joined.number, 0, cookie=joined.cookie ^ 1), Reason.STALE_COOKIE),
        (Packet(PacketKind.DATA, joined.number, 0, cookie=joined.cookie), Reason.WRONG_PORT),
    ):
        stranger.sendto(encode(packet), ("127.0.0.1", joined.port))
        assert decode(stranger.recv(2000)).reason is reason


def test_a_worker_that_was_evicted_is_told_so(address: str, workers: list[Worker]) -> None:
    summed(workers, 100)
    operator = client(address, role="operator")
    operator.evict("a", 1, "it is slow")
    until(lambda: [one.worker for one in operator.status().jobs[0].members] == [0, 2])
    exchange = workers[1].begin(np.ones(100, np.float32))
    with pytest.raises(NetworkError, match="no member of the job"):
        workers[1].wait(exchange, 5)
    summed([workers[0], workers[2]], 100)


def test_who_comes_back_with_the_cookie_of_before_changes_no_sum(address: str, workers: list[Worker]) -> None:
    summed(workers, 1000)
    again = client(address, 1)  # rank 1 has been started again; the process of before hangs, and comes back
    cookie = join(again, 1, workers=3).cookie
    assert cookie != workers[1].joined.cookie
    before = workers[1].begin(np.full(1000, 1e6, np.float32))
    with pytest.raises(NetworkError, match="cookie is that of an earlier incarnation"):
        workers[1].wait(before, 5)
    exchanges = [one.begin(np.full(1000, 1.0, np.float32)) for one in (workers[0], workers[2])]
    assert not workers[0].wait(exchanges[0], 0.2), "the next incarnation was not waited for"
    operator = client(address, role="operator")
    operator.evict("a", 1, "it does not come")
    for one, exchange in zip((workers[0], workers[2]), exchanges, strict=True):
        assert one.wait(exchange, 10), one.stream.trouble
        assert (exchange.total == 2).all()
    assert operator.status().jobs[0].refused["STALE_COOKIE"] > 0


def returned(control: ControlClient, members: tuple[int, ...], **known: Any) -> tuple[JobShape, Joined]:
    """Join a job that the switch does not know any more."""
    shape = JobShape(0, 3, VALUES, 64, 8)
    again = SwitchReturn(members=members, **known)
    return control.join("lost", shape, again=again, while_waiting=lambda: None)


def test_who_is_not_lost_is_waited_for_at_a_switch_that_knows_nothing(address: str) -> None:
    controls = [client(address, rank) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(returned, controls[0], (0, 1, 2), progress=GroupProgress(4), clock=9)
        second = pool.submit(returned, controls[1], (0, 1, 2), progress=GroupProgress(5), clock=7)
        assert not wait([first, second], 0.3).done, "rank 2 was not waited for"
        controls[0].evict("lost", 2, "it is dead")
        (_, one), (_, other) = first.result(5), second.result(5)
    assert one.progress == other.progress == {0: GroupProgress(4), 1: GroupProgress(5)}
    assert one.clock == other.clock == 6
    with pytest.raises(PlanError, match="gone on without rank 2"):
        returned(controls[2], (0, 1, 2))


def test_whose_link_ends_meanwhile_is_not_waited_for(address: str) -> None:
    controls = [client(address, rank) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(returned, controls[0], (0, 1, 2))
        second = pool.submit(returned, controls[1], (0, 1))
        assert first.result(5)[1].progress.keys() == second.result(5)[1].progress.keys() == {0, 1}
        met = pool.submit(controls[0].ask, lambda number: MeetAtSwitch(number, "lost"), lambda: None)
        assert not wait([met], 0.3).done, "rank 1 was not waited for"
        controls[1].close()
        assert isinstance(met.result(5), MetAtSwitch)


def test_what_a_switch_cannot_read_is_not_said_again(address: str) -> None:
    dialled: list[ControlClient] = []

    def dial(on_lost: Callable[[], None]) -> ControlClient:
        dialled.append(ControlClient(address, timeout=SHORT, patience=SHORT, on_lost=on_lost))
        return dialled[-1]

    session = SwitchSession(dial, OtherWorkers(0, None), SHORT)
    with pytest.raises(PeerError, match=r"ends the link: Cannot understand .*`\$\.strategy\.window`"):
        session.ask(lambda number: SetSwitchStrategy(number, "a", Strategy("table", window=200)))
    until(lambda: len(dialled) == 2)
    told = session.ask(lambda number: GetSwitchStatus(number))
    assert isinstance(told, SwitchStatus), "the next request is as good as any"
    session.close()


def give_up(control: ControlClient) -> None:
    """End a link as one does that takes the switch for lost, while its process goes on."""
    control._loop.run(_end(control._link))


async def _end(link: PeerLink) -> None:
    link.fail(NetworkError("it has been silent for 2 s"))


def back(address: str, rank: int, cookie: int, members: tuple[int, ...] = (0, 1)) -> tuple[JobShape, Joined]:
    """Come back to the job "a" over another link."""
    again = SwitchReturn(members=members, cookie=cookie)
    return client(address, rank).join("a", JobShape(0, 2, VALUES, 64, 8), again=again, while_waiting=lambda: None)


def members_of(looks: ControlClient) -> list[list[int]]:
    return [[one.worker for one in job.members] for job in looks.status().jobs]


def test_who_stood_still_comes_back_as_the_member_that_it_is(address: str) -> None:
    looks, first, second = client(address, role="onlooker"), client(address, 0), client(address, 1)
    joined = join(first, 0), join(second, 1)
    give_up(second)
    with pytest.raises(PlanError, match="without rank 1"):
        back(address, 1, joined[1].cookie ^ 1)
    shape, told = back(address, 1, joined[1].cookie)
    assert (shape.number, told.cookie) == (joined[1].number, joined[1].cookie)
    assert members_of(looks) == [[0, 1]]
    give_up(first)
    back(address, 0, joined[0].cookie, members=(0,))
    assert members_of(looks) == [[0]], "of whom the others have gone on without the switch did not hear"


INTRUDERS = [b"", b"another secret, 16"[:16], bytes(15)]  # rank 0's own is 16 zeros


@pytest.mark.parametrize("secret", INTRUDERS)
@pytest.mark.parametrize("is_away", [False, True], ids=["connected", "away"])
def test_nobody_takes_the_rank_of_a_worker(address: str, secret: bytes, is_away: bool) -> None:
    """Not by a new place, nor by its own, of which packets show the cookie."""
    looks, first, second = client(address, role="onlooker"), client(address, 0), client(address, 1)
    cookie = join(first, 0).cookie
    join(second, 1)
    if is_away:
        give_up(first)
    intruder = client(address, 0, secret=secret)
    with pytest.raises(PlanError, match=r"as rank 0: one is here already, from 127\.0\.0\.1"):
        join(intruder, 0, secret=secret)
    with pytest.raises(PlanError, match="without rank 0"):
        intruder.join("a", JobShape(0, 2, VALUES, 64, 8), again=SwitchReturn(members=(0, 1), cookie=cookie))
    assert members_of(looks) == [[0, 1]]
    assert back(address, 0, cookie)[1].cookie == cookie, "the worker itself comes back all the same"


def test_nobody_takes_the_rank_of_a_worker_that_is_gone(address: str) -> None:
    """The others would wait for it."""
    first, second = client(address, 0), client(address, 1)
    join(first, 0), join(second, 1)
    first.evict("a", 1, "it is dead")
    until(lambda: members_of(first) == [[0]])
    for secret in (secret_of(1), b"another secret.."):
        with pytest.raises(PlanError, match="gone on without rank 1"):
            join(client(address, 1, secret=secret), 1, secret=secret)
    assert members_of(first) == [[0]]


def test_nobody_takes_the_rank_of_a_worker_that_waits_at_a_switch_that_knows_nothing(address: str) -> None:
    first, second, intruder = client(address, 0), client(address, 1), client(address, 0, secret=b"another secret..")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(returned, first, (0, 1))
        assert not wait([waiting], 0.3).done
        with pytest.raises(PlanError, match=r"again as rank 0: one is here already, from 127\.0\.0\.1"):
            returned(intruder, (0, 1))
        second_back = pool.submit(returned, second, (0, 1))
        assert waiting.result(5)[1].cookie != second_back.result(5)[1].cookie


def test_who_stood_still_and_is_lost_by_what_the_others_say_does_not_come_back(address: str) -> None:
    looks, first, second = client(address, role="onlooker"), client(address, 0), client(address, 1)
    joined = join(first, 0), join(second, 1)
    give_up(second)
    first.evict("a", 1, "it is dead")
    until(lambda: members_of(looks) == [[0]])
    with pytest.raises(PlanError, match="without rank 1"):
        back(address, 1, joined[1].cookie)


def test_a_job_to_which_nobody_comes_back_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, first, second = client(address, role="onlooker"), client(address, 0), client(address, 1)
    join(first, 0), join(second, 1)
    give_up(first)
    give_up(second)
    time.sleep(0.2)
    assert members_of(looks) == [[0, 1]]
    monkeypatch.setattr(control_server, "_DESERTED_S", 0.3)
    until(lambda: members_of(looks) == [])


def test_who_did_not_hear_that_all_have_met_hears_it_when_it_asks_again(address: str) -> None:
    first, second = client(address, 0), client(address, 1)
    join(first, 0)
    cookie = join(second, 1).cookie
    with ThreadPoolExecutor() as pool:
        met = pool.submit(first.ask, lambda number: MeetAtSwitch(number, "a"), lambda: None)
        assert isinstance(second.ask(lambda number: MeetAtSwitch(number, "a")), MetAtSwitch)
        assert isinstance(met.result(5), MetAtSwitch)
    give_up(second)
    again = client(address, 1)
    again.join("a", JobShape(0, 2, VALUES, 64, 8), again=SwitchReturn(members=(0, 1), cookie=cookie))
    assert isinstance(again.ask(lambda number: MeetAtSwitch(number, "a")), MetAtSwitch)


def test_a_job_with_a_quorum_does_not_begin_again(address: str) -> None:
    with pytest.raises(PlanError, match=r"KSync\(\) nobody knows"):
        client(address).join("a", JobShape(0, 2, VALUES, 64, 8), Strategy(quorum=1), again=SwitchReturn(members=(0,)))


def test_a_worker_hears_its_switch_alone(workers: list[Worker], stranger: socket.socket) -> None:
    summed(workers, 100)
    joined = workers[0].joined
    for chunk in range(64):
        forged = Packet(PacketKind.RESULT, joined.number, 0, chunk=chunk, slot=chunk, bitmap=7, values=(1,) * VALUES)
        for packet in (forged, refusal(forged, Reason.UNKNOWN_JOB, 0)):
            stranger.sendto(encode(packet), ("127.0.0.1", workers[0].sock.port))
    summed(workers, 5000)


def test_tables_have_the_room_that_they_are_given() -> None:
    plane = SoftwarePlane(lambda *_: None, table_mib=2)
    plane.create_job(JobShape(1, 4, values=256, rows=1024), Strategy("table"))
    with pytest.raises(PlanError, match=r"of 1,500 rows: .* 3 MiB, and .* has 2\. Start it with --table-mib 3"):
        plane.create_job(JobShape(2, 4, values=256, rows=1500), Strategy("table"))
    plane.destroy_job(1)
    plane.create_job(JobShape(2, 4, values=256, rows=1500), Strategy("table"))
    with pytest.raises(PlanError, match=r"2,000,000 rows: a switch takes 1,048,576 at most"):
        JobShape(1, 1, rows=2_000_000)


def test_no_more_memory_is_promised_than_there_is() -> None:
    check_memory(1)
    with pytest.raises(PlanError, match=r"Cannot keep 999,999,999 MiB of tables: this machine has [\d,]+ MiB"):
        check_memory(999_999_999)


@pytest.mark.parametrize(("windows", "says"), [((2, 2, 0, 70_000), "<= 65535"), ((7, 2, 0, 1), "at most 6 fit")])
def test_no_job_begins_again_with_windows_that_a_switch_cannot_have(
    address: str, windows: tuple[int, int, int, int], says: str
) -> None:
    one, again = client(address, 0), SwitchReturn(members=(0,), clock=3, windows=windows)
    with pytest.raises((PlanError, PeerError), match=says):
        one.join("full", JobShape(0, 3, VALUES, 64, 8, 1), Strategy("table", 2), again=again)


class TroubledPlane(SoftwarePlane):
    """A data plane that cannot tell the clocks of its first job."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.first, self.looked_at = -1, set[int]()

    def create_job(self, shape: JobShape, *arguments: Any, **known: Any) -> None:
        """Note which was the first."""
        super().create_job(shape, *arguments, **known)
        self.first = shape.number if self.first < 0 else self.first

    def clocks(self, number: int) -> JobClocks:
        """Tell clocks, but not those."""
        if number == self.first:
            raise ValueError("no such clock")
        self.looked_at.add(number)
        return super().clocks(number)


def test_one_job_in_trouble_leaves_the_others_watched(caplog: pytest.LogCaptureFixture) -> None:
    plane = TroubledPlane()
    control = ControlServer(plane, target="memory", port=1)
    link = mock.Mock(role="worker", rank=0)
    for number, name in enumerate(("a", "b")):
        message = JoinSwitchJob(
            request=number, job=name, worker=0, workers=1, values=16, slots=4, ring=8, strategy=Strategy("table", 2)
        )
        control.join(control.accept(link), message)
    control.look()
    control.look()
    assert len(plane.looked_at - {plane.first}) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot look after the clocks and sums of job a; other jobs go on."
    ]


class MisplacingSocket(UdpSocket):
    """A socket that gives some packets the slot of another chunk, so that the switch refuses them.

    Args:
        batches: whose first packet is changed, of those that carry chunks.
    """

    def __init__(self, batches: range) -> None:
        super().__init__()
        self._batches, self._seen = batches, 0

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        """Send it, after a change to its first packet."""
        if batch.header["kind"][0] == PacketKind.DATA:
            if self._seen in self._batches:
                batch.header["slot"][0] ^= 1
                batch.first(1).seal()
            self._seen += 1
        super().send(batch, to, rows)


def test_one_refused_packet_is_sent_again() -> None:
    vectors = integers(2, 2, 50_000)
    with served_switch() as address:
        assert sums_of(address, vectors, open_socket=lambda: MisplacingSocket(range(1, 2))) == right_sums(vectors)


def test_who_is_refused_again_and_again_gives_up() -> None:
    with served_switch() as address, pytest.raises(NetworkError, match="refuses this worker: the packet does not fit"):
        sums_of(address, integers(2, 1, 1000), open_socket=lambda: MisplacingSocket(range(1000)))


def test_all_begin_with_an_empty_table_also_if_the_switch_forgot_that_they_were_to(address: str) -> None:
    full = Strategy("table", window=0, renews=True)
    again = SwitchReturn(members=(0,), clock=3, windows=(2, 0, 5, 1), plan='[sync]\nkind = "SSP"\nbound = 2')
    one = client(address, 0)
    one.join("full", JobShape(0, 3, VALUES, 64, 8, 1), full, again=again, while_waiting=lambda: None)
    told = one.ask(lambda number: GetSwitchPlan(number, "full"))
    assert isinstance(told, SwitchPlan)
    assert (told.strategy, told.effective, told.epoch) == (full, 5, 1)
