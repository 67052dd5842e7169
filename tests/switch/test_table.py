"""The table and its clocks, on networks that lose packets, with workers that are lost and come back, and swaps."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from offbeat.errors import NumericsError, PlanError
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.clocks import Windows
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState
from offbeat.switch.members import ALL
from offbeat.switch.packet import Packet, PacketKind, Reason, decode, distance, encode, is_newer, wrapped
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.strategy import compile_policy
from offbeat.switch.table_client import TableClient
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, Member, Policy, RoundRobin, State, settle
from offbeat.sync.actions import Release
from tests.switch.network import VALUES, Network

WINDOWS = (0, 1, 2, 4, 16)


class TablePlay:
    """One job of a few workers that make steps, each of which adds 1 to the worker's own element of every row."""

    def __init__(self, seed: int, model: type[JobState] = JobState) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.workers, rows = chance.randint(1, 4), chance.randint(1, 3)
        self.steps = chance.randint(3, 25)
        self.start = chance.choice([0, (1 << 32) - 4])
        shape = JobShape(7, self.workers, values=VALUES, ring=32, rows=rows)
        self.state = model(shape, self.any_strategy(), clock=self.start, exponent=20)
        self.network = Network(chance, chance.choice([0, 0.05, 0.3]), chance.choice([0, 0.1]))
        self.swaps = chance.choice([0, 0.02, 0.1])
        self.allows = chance.choice([0, 0.02, 0.1])
        self.read_ahead = 0  # steps for which a worker began to read by less than it knew in the end
        self.by_name = 0  # steps that a worker went on behind because it was allowed to
        self.loses = chance.choice([None, None, chance.randint(20, 200)]) if self.workers > 1 else None
        self.returns = chance.choice([None, chance.randint(20, 200)])
        self.clients: dict[int, TableClient] = {}
        self.pushed = dict.fromkeys(range(self.workers), 0)
        self.promised: dict[int, int] = {}  # steps of all workers that each worker knew to be in when it went on
        self.windows_by_clock: dict[int, set[int]] = defaultdict(set)
        for worker in range(self.workers):
            self.join(worker, cookie=100 + worker)
        self.now_s = 0.0

    def any_strategy(self) -> Strategy:
        window = self.chance.choice([*WINDOWS, None])
        most = None if window is None else self.chance.choice([None, window + 1, window + 6])
        return Strategy("table", window=window, most=most)

    def join(self, worker: int, cookie: int) -> None:
        state = self.state
        state.admit(worker, cookie)
        self.clients[worker] = TableClient(
            state.shape, worker, cookie, exponent=20, clock=state.clocks.low, window=4, rto_s=0.01
        )
        ((_, answer),) = state.handle(Packet(PacketKind.JOIN, 7, worker, cookie=cookie), worker)
        self.clients[worker].receive(PacketBatch.of([answer], VALUES), 0.0)

    def run(self) -> None:
        lost: int | None = None
        for turn in range(60_000):
            if all(self.made(worker) >= self.steps for worker in self.clients):
                break
            if turn == self.loses:
                lost = self.workers - 1
                del self.clients[lost]
                self.send(self.state.evict(lost))
            if lost is not None and self.returns is not None and turn == (self.loses or 0) + self.returns:
                self.join(lost, cookie=999)
                lost = None
            if self.chance.random() < self.swaps:
                sends = self.state.set_strategy(self.any_strategy())
                self.send(sends or [])
            if self.chance.random() < self.allows:
                worker = self.chance.randrange(self.workers)
                self.send(self.state.allow(worker, wrapped(self.state.clocks.low + self.chance.randint(0, 20))))
            self.turn()
        else:
            raise AssertionError(f"seed {self.seed}: no end")
        self.check_table()

    def made(self, worker: int) -> int:
        client = self.clients[worker]
        return distance(client.clock, self.start) if client.phase == "computing" else -1

    def turn(self) -> None:
        for worker, client in self.clients.items():
            if client.phase == "computing" and self.made(worker) < self.steps and self.chance.random() < 0.3:
                update = np.zeros((self.state.shape.rows, VALUES), np.float32)
                update[:, worker] = 1
                client.push(update.reshape(-1))
                self.pushed[worker] += 1
            for data in client.packets(self.now_s).datagrams():
                self.network.put("switch", worker, data)
        if not self.network.under_way or self.chance.random() < 0.03:
            self.now_s += 0.006
            return
        to, worker, data = self.network.take()
        if to == "switch":
            before = self.state.clocks.low
            packet = decode(data)
            self.send(self.state.handle(packet, worker, self.now_s), packet.clock)
            assert distance(self.state.clocks.low, before) >= 0
            self.check_grants()
        elif worker in self.clients:
            self.receive(worker, data)

    def send(self, sends: list, clock: int = 0) -> None:  # type: ignore[type-arg]
        """Put on the way what the switch sends; `clock` is that of the packet which it answers.

        A clock that comes late is of an earlier step than the last that its worker has finished, and so is the grant.
        """
        for port, packet in sends:
            if packet.kind == PacketKind.GRANT and packet.worker < self.workers:
                self.note_grant(clock, self.state.clocks.low, self.state.clocks.windows)
            self.network.put("worker", port, encode(packet))

    def receive(self, worker: int, data: bytes) -> None:
        client = self.clients[worker]
        before = client.phase
        client.receive(PacketBatch.of([data], VALUES), self.now_s)
        if before in ("push", "clock") and client.phase == "pull":
            assert client.grant is not None
            promised = client.grant.low  # which may be older than what it knows now, if it has begun to read before
            self.note_grant(client.clock, promised, client.windows)
            self.promised[worker] = distance(promised, self.start)
            self.read_ahead += promised != client.low
            low, windows = self.state.clocks.low, self.state.clocks.windows
            most = max(client.windows.of(client.clock), windows.of(client.clock))
            if not client.windows.grants(client.clock, promised):
                self.by_name += 1
                assert is_newer(client.until, client.clock)
                # No step that a change decides about is begun by name before the change is in effect.
                assert self.state.clocks.is_in_effect or is_newer(windows.effective, client.clock), f"seed {self.seed}"
                most = 22
            assert distance(client.clock, low) <= most, f"seed {self.seed}: {client.clock} at {low} with {most}"
        elif before == "pull" and client.phase == "computing":
            self.check_read(client)

    def note_grant(self, clock: int, low: int, windows: Windows) -> None:
        """Note by which window a step was granted that not all have finished."""
        if distance(clock, low) > 0 and windows.grants(clock, low):
            self.windows_by_clock[clock].add(windows.of(clock))

    def check_grants(self) -> None:
        two = {clock: windows for clock, windows in self.windows_by_clock.items() if len(windows) > 1}
        assert not two, f"seed {self.seed}: granted by two windows: {two}"

    def check_read(self, client: TableClient) -> None:
        """A worker sees all its own updates, and those of others up to its window."""
        rows = client.values(self.state.shape.rows * VALUES).reshape(-1, VALUES)
        own, least = distance(client.clock, self.start), self.promised[client.worker]
        for other in self.clients:
            if other == client.worker and self.returns is None:
                assert (rows[:, other] == own).all(), f"seed {self.seed}: lacks its own"
            elif self.loses is None:
                assert (rows[:, other] >= least).all(), f"seed {self.seed}: {rows[:, other]} of {other}, least {least}"

    def check_table(self) -> None:
        """Each update is in the table exactly once."""
        for worker in range(self.workers):
            for row in self.state.table.values:
                added = int(row[worker]) // (1 << 11)
                if self.loses is None or worker < self.workers - 1:
                    assert added == self.steps, f"seed {self.seed}: {added} of {self.steps} of worker {worker}"
                else:  # its last push may have been cut short
                    assert self.pushed[worker] - 1 <= added <= self.pushed[worker], f"seed {self.seed}: {added}"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_no_update_is_lost_or_counted_twice_and_no_window_is_passed(block: int) -> None:
    plays = [TablePlay(seed) for seed in range(50 * block, 50 * (block + 1))]
    for play in plays:
        play.run()
    assert sum(play.by_name for play in plays) > 10, "hardly anybody was allowed more than all"
    assert sum(play.read_ahead for play in plays) > 10, "hardly anybody has read while it pushed"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_the_same_in_many_more_schedules(block: int) -> None:
    for seed in range(1000 + 1000 * block, 1000 + 1000 * (block + 1)):
        TablePlay(seed).run()


@pytest.mark.parametrize("bound", [0, 1, 3, 8])
def test_a_window_lets_go_on_whom_the_policy_lets_go_on(bound: int) -> None:
    chance = random.Random(bound)
    for _ in range(500):
        clocks = [chance.randint(1, 12) for _ in range(chance.randint(1, 5))]
        worker = chance.randrange(len(clocks))
        members = {
            # One that has pushed the contribution of its step, and waits; the others compute the next one.
            one: Member(step=clock - 1, clock=clock, ready_s=0.0, granted_s=0.0, arrived=True, weight=1.0)
            if one == worker
            else Member(step=clock, clock=clock)
            for one, clock in enumerate(clocks)
        }
        _, actions = settle(SSP(bound), State(members))
        window = compile_policy(SSP(bound)).window_in(64)
        grants = Windows(window, window).grants(clocks[worker], min(clocks))
        assert (Release(worker) in actions) == grants, (clocks, worker)


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        (BSP(), Strategy("stream")),
        (LocalSGD(8), Strategy("stream")),
        (KSync(3), Strategy("stream", quorum=3)),
        (KSync(3, late="carry"), Strategy("stream", quorum=3, keeps_late=True)),
        (SSP(4), Strategy("table", window=4)),
        (DSSP(2, 8), Strategy("table", window=2, most=8)),
        (ASP(), Strategy("table", window=None)),
    ],
)
def test_policies_are_compiled_to_numbers(policy: Policy, strategy: Strategy) -> None:
    assert compile_policy(policy) == strategy


@pytest.mark.parametrize("policy", [RoundRobin(), Hybrid(BSP(), SSP(2), groups=((0, 1), (2, 3)))])
def test_what_a_switch_cannot_do_is_refused_with_a_way_out(policy: Policy) -> None:
    with pytest.raises(PlanError, match=r"on a switch: .* Use BSP\(\), SSP\(4\), or fabric=ParameterServer"):
        compile_policy(policy)


def test_a_window_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(PlanError, match="at most 6 fit"):
        JobState(JobShape(7, 2, values=VALUES, ring=8), Strategy("table", window=7))


def clocked(window: int, finished: int) -> JobState:
    """Two workers, of which the first has finished some steps."""
    state = JobState(JobShape(7, 2, values=VALUES, ring=16), Strategy("table", window=window))
    for worker in (0, 1):
        state.admit(worker, worker)
        state.members[worker].port = worker
    for clock in range(1, finished + 1):
        state.handle(Packet(PacketKind.CLOCK, 7, 0, clock=clock), 0)
    return state


def test_a_clock_says_the_same_of_all_before_it() -> None:
    state = clocked(2, 2)
    state.handle(Packet(PacketKind.CLOCK, 7, 1, cookie=1, clock=2), 1)
    assert state.clocks.low == 2


def test_a_clock_that_is_over_is_granted_again() -> None:
    state = clocked(2, 2)
    state.handle(Packet(PacketKind.CLOCK, 7, 1, cookie=1, clock=2), 1)
    assert [send.packet.kind for send in state.handle(Packet(PacketKind.CLOCK, 7, 0, clock=1), 0)] == [PacketKind.GRANT]


def test_a_clock_beyond_the_ring_is_refused() -> None:
    ((_, answer),) = clocked(2, 2).handle(Packet(PacketKind.CLOCK, 7, 0, clock=15), 0)
    assert answer.reason is Reason.AHEAD_OF_RING


def test_a_larger_window_releases_who_waits_at_once() -> None:
    state = clocked(0, 1)
    assert state.handle(Packet(PacketKind.CLOCK, 7, 0, clock=1), 0) == []
    sends = state.set_strategy(Strategy("table", window=4))
    assert sends is not None
    assert {send.port for send in sends} == {0, 1}
    assert state.clocks.windows.grants(1, 0)


def test_a_change_has_let_a_worker_go_on_before_it_is_in_effect_for_all() -> None:
    """So it cannot be withdrawn: the step would be granted by two windows."""
    state = clocked(1, 2)
    waits = Packet(PacketKind.CLOCK, 7, 0, clock=2)
    assert state.handle(waits, 0) == []
    sends = state.set_strategy(Strategy("table", window=4))
    assert sends is not None
    clocks = state.clocks
    assert not clocks.is_in_effect
    assert {send.port for send in sends} == {0, 1}, "all have been told"
    assert clocks.windows.grants(2, clocks.low), "by the new window alone"
    assert [send.packet.kind for send in state.handle(waits, 0)] == [PacketKind.GRANT]


def test_a_second_change_waits_for_the_first() -> None:
    state = clocked(4, 0)
    assert state.set_strategy(Strategy("table", window=0)) is not None
    assert state.set_strategy(Strategy("table", window=1)) is None
    for clock in range(1, 6):
        for worker in (0, 1):
            state.handle(Packet(PacketKind.CLOCK, 7, worker, cookie=worker, clock=clock), worker)
    assert state.set_strategy(Strategy("table", window=1)) is not None


def test_one_worker_may_be_allowed_more() -> None:
    state = JobState(JobShape(7, 2, values=VALUES, ring=16), Strategy("table", window=1, most=4))
    for worker in (0, 1):
        state.admit(worker, worker)
        state.members[worker].port = worker
    clock = Packet(PacketKind.CLOCK, 7, 0, clock=2)
    assert state.handle(clock, 0) == []
    ((port, grant),) = state.allow(0, 99)
    assert (port, grant.cookie) == (0, 5)  # no further than the strategy says
    assert [send.packet.kind for send in state.handle(clock, 0)] == [PacketKind.GRANT]


def test_what_one_worker_was_allowed_is_not_taken_back_by_less() -> None:
    """It knows of it: so a change of the windows must not come into effect before."""
    state = JobState(JobShape(7, 2, values=VALUES, ring=16), Strategy("table", window=1, most=8))
    for worker in (0, 1):
        state.admit(worker, worker)
        state.members[worker].port = worker
    state.allow(0, 7)
    ((_, grant),) = state.allow(0, 3)
    assert grant.cookie == 7
    state.set_strategy(Strategy("table", window=0))
    assert state.clocks.windows.effective == 7


def test_a_table_without_rows_is_a_barrier() -> None:
    shape = JobShape(7, 2, values=VALUES, ring=32)
    state = JobState(shape, Strategy("table", window=0))
    clients = [TableClient(shape, worker, 100 + worker) for worker in range(2)]
    for worker in range(2):
        state.admit(worker, 100 + worker)
        state.members[worker].port = worker
    for step in range(1, 4):
        for worker, client in enumerate(clients):
            assert client.phase == "computing"
            client.push(np.zeros(0, np.float32))
            for data in client.packets(float(step)).datagrams():
                assert decode(data).kind == PacketKind.CLOCK
                for port, packet in state.handle(decode(data), worker):
                    assert isinstance(port, int)
                    clients[port].receive(PacketBatch.of([packet], VALUES), float(step))
            if worker == 0:
                assert not client.may_go_on, "it waits for the other"
        assert [client.low for client in clients] == [step, step]


def test_who_is_lost_holds_nobody_up() -> None:
    state = clocked(0, 1)
    assert state.handle(Packet(PacketKind.CLOCK, 7, 0, clock=1), 0) == []
    assert [send.port for send in state.evict(1)] == [0]
    assert state.clocks.low == 1


def test_who_leaves_is_told() -> None:
    state = clocked(0, 0)
    sends = state.handle(Packet(PacketKind.LEAVE, 7, 1, cookie=1), 1)
    assert sends[-1].packet.kind == PacketKind.LEAVE_OK
    assert state.handle(Packet(PacketKind.LEAVE, 7, 1, cookie=1), 1)[0].packet.reason is Reason.NOT_A_MEMBER


def test_a_value_that_does_not_fit_is_flagged() -> None:
    state = JobState(JobShape(7, 1, values=VALUES, rows=1), Strategy("table"))
    state.admit(0, 0)
    state.members[0].port = 0
    most = ((1 << 31) - 1,) * VALUES
    flags = []
    for clock in (1, 2):
        (answer,) = [
            send.packet
            for send in state.handle(Packet(PacketKind.INC, 7, 0, clock=clock, values=most), 0)
            if send.packet.kind == PacketKind.INC_OK
        ]
        flags.append(bool(answer.flags))
    assert flags == [False, True]


def test_who_has_more_rows_than_may_be_under_way_waits_for_answers() -> None:
    shape = JobShape(7, 1, values=VALUES, ring=8, rows=10)
    client = TableClient(shape, 0, 100, exponent=4, window=4, rto_s=0.01)
    client.push(np.ones(10 * VALUES, np.float32))
    assert client.wake_s() <= 5.0, "something is to be sent at once"
    assert len(client.packets(5.0)) == 4
    assert client.wake_s() == pytest.approx(5.01), "not before an answer, or the time to send again"
    assert len(client.packets(5.005)) == 0


def reading_ahead(window: int) -> tuple[JobState, TableClient]:
    """A worker that is one step ahead of another, with five rows to push."""
    shape = JobShape(7, 2, values=VALUES, ring=16, rows=5)
    state = JobState(shape, Strategy("table", window=window), exponent=4)
    client = TableClient(shape, 0, 0, exponent=4)
    for worker in (0, 1):
        state.admit(worker, worker)
        ((_, answer),) = state.handle(Packet(PacketKind.JOIN, 7, worker, cookie=worker), worker)
        if worker == 0:
            client.receive(PacketBatch.of([answer], VALUES), 0.0)
    client.push(np.ones(5 * VALUES, np.float32))
    return state, client


def answered(state: JobState, client: TableClient, packets: list[bytes]) -> None:
    """Have the switch answer some packets, and the client take that in."""
    for data in packets:
        for port, packet in state.handle(decode(data), 0):
            if port in (0, ALL):
                client.receive(PacketBatch.of([packet], VALUES), 1.0)


def test_who_may_go_on_reads_rows_while_others_are_pushed() -> None:
    state, client = reading_ahead(window=2)
    first, *rest = client.packets(1.0).datagrams()
    answered(state, client, [first])
    (read,) = client.packets(1.0).datagrams()
    assert (decode(read).kind, decode(read).chunk) == (PacketKind.READ, 0)
    answered(state, client, [read])
    assert state.members[0].finished == 0, "its step is not over, whatever it reads"
    answered(state, client, rest)
    assert client.doing == "pull"
    reads = [decode(data) for data in client.packets(1.0).datagrams()]
    assert [(one.kind, one.chunk, one.clock) for one in reads] == [(PacketKind.READ, row, 1) for row in range(1, 5)]
    answered(state, client, [encode(one) for one in reads])
    assert client.phase == "computing"
    assert state.members[0].finished == 1
    assert (client.values(5 * VALUES) == 1).all()


def test_who_has_to_wait_reads_nothing_before() -> None:
    state, client = reading_ahead(window=0)
    first, *_ = client.packets(1.0).datagrams()
    answered(state, client, [first])
    assert len(client.packets(1.0)) == 0


def test_what_was_read_by_a_window_that_no_longer_holds_is_read_again() -> None:
    state, client = reading_ahead(window=2)
    first, *rest = client.packets(1.0).datagrams()
    answered(state, client, [first])
    answered(state, client, client.packets(1.0).datagrams())
    client.windows = Windows(0, 0, 0, client.windows.epoch)
    answered(state, client, rest)
    assert client.phase == "clock"
    client.low = 1
    client.receive(PacketBatch.of([], VALUES), 1.0)
    assert client.doing == "pull"
    assert len(client.packets(2.0)) == 5


@pytest.mark.parametrize(
    ("value", "says"), [(float("nan"), "NaN or Inf"), (float("-inf"), "NaN or Inf"), (-9.0, r"\(2\^4\)")]
)
def test_what_a_table_cannot_hold_is_never_sent(value: float, says: str) -> None:
    client = TableClient(JobShape(7, 1, values=VALUES, ring=8, rows=1), 0, 100, exponent=4)
    with pytest.raises(NumericsError, match=says):
        client.push(np.array([1, value], np.float32))
    assert len(client.packets(0.0)) == 0
    client.push(np.array([1, 2], np.float32))
    assert client.packets(1.0).values[0, :3].tolist() == [1 << 27, 1 << 28, 0]
