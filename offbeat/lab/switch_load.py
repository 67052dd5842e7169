"""Load for a switch: one worker of a benchmark, which sums or counts clocks as fast as it can (a program by itself).

It reads a `LoadTask` per line, joins, says so, waits for "go", and says what came of it; so does who is none of them,
and sends `garbage`:

    benchmark                     worker
      | -- LoadTask, GarbageTask ---> |   joins the job
      | <----------------- "ready" -- |   when all are, all go
      | -- "go" --------------------> |
      | <-------------- LoadResult -- |
      | -- "end" -------------------> |   when all have answered: leaves the job
      | <----------------- "ended" -- |

Every sum is checked, each value of it. What is summed are integers of 20 bits, which floats and fixed point hold
exactly, and other ones for each exchange, so that a sum that belongs to an earlier one is seen to be wrong. The first
value of each vector is 1 if its worker wants no further exchange: all end after the first that one of them wants to be
the last.
"""

from __future__ import annotations

import functools
import select
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from offbeat.errors import NetworkError, OffbeatError
from offbeat.history import HistoryWriter, StepGranted
from offbeat.lab.garbage import GarbageSender, GarbageTask
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.client_thread import ClientThread, socket_to
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.packet import PacketKind
from offbeat.switch.packet_batch import PacketBatch, join_packet
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.table_client import TableClient
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.client_thread import PacketSocket
    from offbeat.switch.stream_exchange import StreamExchange
    from offbeat.switch.udp_socket import UdpSocket

SLOTS, WINDOW, CHUNKS = 512, 64, 512  # of a job; packets under way; chunks of an exchange
UNDER_WAY = 2  # exchanges
_RING = 64
_LEAST_VALUES = 16
_RTO_S = 0.01
_EXACT = 1 << 20
_OFFSETS = 251  # vectors that differ
_WARM = 2  # exchanges that do not count
_WARM_S = 0.1  # for clocks
_STALLED = timedelta(seconds=20)


class LoadTask(msgspec.Struct, frozen=True, tag=True):
    """The task of one worker.

    Args:
        address, token, job: of the switch's control, and of the job.
        rank, workers: who this is, of how many.
        values: int32 in a packet; 0 to count clocks instead.
        slack: steps that a worker may be ahead, for clocks.
        seconds: for how long to measure.
        clocks: how many to count instead, of all workers; 0 for as many as there are in that time.
        history: folder for a history of by what each of them was granted; "" for none.
    """

    address: str
    token: str
    job: str
    rank: int
    workers: int
    values: int
    slack: int = 0
    seconds: float = 0.0
    clocks: int = 0
    history: str = ""


class LoadResult(msgspec.Struct, frozen=True):
    """The result of one worker.

    Args:
        done: chunks with values whose sums came, or clocks, in `seconds`.
        checked, wrong: chunks that were compared with the sum of all workers' values, and those that were not that.
        sent, resent: packets that were sent, and of them those that were sent again.
        error: what ended it early; "" if nothing did.
    """

    done: int = 0
    seconds: float = 0.0
    checked: int = 0
    wrong: int = 0
    sent: int = 0
    resent: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """Chunks or clocks per second; 0 for what ended early."""
        return 0.0 if self.error or not self.seconds else self.done / self.seconds


class KnownVectors:
    """The vectors of all workers, so that each knows every sum.

    Args:
        rank, workers: who this is, of how many.
        values: int32 in a packet.
    """

    def __init__(self, rank: int, workers: int, values: int) -> None:
        self.values, self._workers = values, workers
        size = CHUNKS * values + _OFFSETS
        mine = np.zeros(0, np.float32)
        self._totals = np.zeros(size, np.float32)
        for worker in range(workers):
            numbers = np.random.default_rng(worker).integers(1 - _EXACT, _EXACT, size).astype(np.float32)
            self._totals += numbers
            mine = numbers if worker == rank else mine
        self._mine = mine

    def vector(self, exchange: int, *, is_last: bool) -> NDArray[np.float32]:
        """[D] of this worker's, for an exchange; copy it before the next one is asked for.

        Args:
            is_last: whether this worker wants no further exchange.
        """
        vector = self._slice(self._mine, exchange).copy()
        vector[0] = is_last
        return vector

    def wrong_chunks(self, exchange: int, total: NDArray[np.float32], contributors: int) -> int:
        """The chunks of a sum that are not what they have to be; all if a worker is missing."""
        if contributors != (1 << self._workers) - 1:
            return CHUNKS
        differs = total != self._slice(self._totals, exchange)
        differs[0] = not 0 <= total[0] <= self._workers
        return int(differs.reshape(CHUNKS, self.values).any(axis=1).sum())

    def _slice(self, numbers: NDArray[np.float32], exchange: int) -> NDArray[np.float32]:
        offset = exchange % _OFFSETS
        return numbers[offset : offset + CHUNKS * self.values]


def sum_all_the_time(thread: ClientThread, client: StreamClient, known: KnownVectors, seconds: float) -> LoadResult:
    """Sum one exchange after the other; all workers end after the same one."""
    under_way: deque[tuple[int, StreamExchange]] = deque()
    end_s, begun = float("inf"), 0

    def begin() -> None:
        nonlocal begun
        vector = known.vector(begun, is_last=time.monotonic() >= end_s)
        under_way.append((begun, thread.do(lambda: client.begin(vector))))
        begun += 1

    for _ in range(UNDER_WAY):
        begin()
    wrong, began_s, is_ending, sent, resent = 0, 0.0, False, 0, 0
    while under_way:
        number, exchange = under_way.popleft()
        if not thread.wait(functools.partial(getattr, exchange, "is_done"), _STALLED):
            return LoadResult(error=f"an exchange was not done after {_STALLED.total_seconds():g} s. {thread.trouble}")
        wrong += known.wrong_chunks(number, exchange.total, exchange.contributors)
        if number == _WARM - 1:
            began_s = time.monotonic()
            end_s, sent, resent = began_s + seconds, client.sent, client.resent
        is_ending = is_ending or exchange.total[0] > 0
        if not is_ending:
            begin()
    return LoadResult(
        done=(begun - _WARM) * CHUNKS,
        seconds=time.monotonic() - began_s,
        checked=begun * CHUNKS,
        wrong=wrong,
        sent=client.sent - sent,
        resent=client.resent - resent,
    )


class ClockCount:
    """One worker's count of clocks.

    Args:
        client: its packets.
        task: how many, or for how long.
        now_s: the time.
    """

    def __init__(self, client: TableClient, task: LoadTask, now_s: float) -> None:
        self._client, self._task = client, task
        self.steps = self.sent = 0
        self._stepped_s = self._ended_s = now_s
        self._warm_s = now_s if task.clocks else now_s + _WARM_S
        self._before: tuple[float, int, int, int] | None = None  # when it began to count: steps, sent and resent

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to count."""
        if self._task.clocks:  # who has finished the last step goes on until all have: its word may be lost
            return self._client.low >= self._task.clocks
        return self._ended_s >= self._warm_s + self._task.seconds

    def look(self, now_s: float) -> None:
        """Begin to count when it is warm, and begin the next step if the last one is over."""
        if self._before is None and now_s >= self._warm_s:
            self._before = now_s, self.steps, self.sent, self._client.resent
        if not self._task.clocks:
            self._ended_s = now_s
        if self._client.phase != "computing":
            return
        self._stepped_s = now_s
        if self._task.clocks and self.steps == self._task.clocks:
            self._client.rest()
        else:
            self.steps += 1
            self._client.push(np.zeros(0, np.float32))

    def note_granted(self, now_s: float) -> None:
        """Note that a step is over."""
        if self._task.clocks:
            self._ended_s = now_s

    def error(self, now_s: float) -> str:
        """The reason why it cannot go on; "" if it can."""
        if self._client.refusal is not None:
            return f"the switch refuses this worker: {self._client.refusal.text}"
        if now_s - self._stepped_s > _STALLED.total_seconds():
            return f"step {self.steps} was not over after {_STALLED.total_seconds():g} s. {self._client.trouble}"
        return ""

    @property
    def result(self) -> LoadResult:
        """The counts since it was warm."""
        began_s, steps, sent, resent = self._before or (self._ended_s, self.steps, self.sent, self._client.resent)
        return LoadResult(
            done=self.steps - steps,
            seconds=self._ended_s - began_s,
            sent=self.sent - sent,
            resent=self._client.resent - resent,
        )


def count_clocks(client: TableClient, sock: PacketSocket, switch: int, task: LoadTask) -> LoadResult:
    """Finish one step after the other, with nothing to compute, to push or to pull."""
    batch, to = PacketBatch(64, client.shape.values), np.full(1, switch, np.uint64)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    count, error = ClockCount(client, task, time.monotonic()), ""
    look = join_packet(client.shape.number, client.worker, client.cookie)  # always answered, with the last grant
    history = _history_of(task)
    try:
        while not error and not count.is_over:
            now_s = time.monotonic()
            count.look(now_s)
            due = client.packets(now_s)
            if len(due):
                sock.send(due, to)
                count.sent += len(due)
            was_waiting = client.phase == "clock"
            if poll.poll(_RTO_S * 1000):
                client.receive(sock.recv(batch)[0], time.monotonic())
            elif client.phase == "rest":  # a clock so far ahead gets no answer, and the last grant may have been lost
                sock.send(look, to)
            if was_waiting and client.phase == "computing":
                count.note_granted(time.monotonic())
                if history is not None and client.grant is not None:
                    history.append(StepGranted(0, *client.grant))
            error = count.error(now_s)
    finally:
        if history is not None:
            history.close(error)
    return LoadResult(error=error) if error else count.result


def _history_of(task: LoadTask) -> HistoryWriter | None:
    if not task.history:
        return None
    return HistoryWriter(Path(task.history), f"worker-{task.rank}", kind="worker", job=task.job, rank=task.rank)


def run(task: LoadTask) -> None:
    """Carry a task out, and talk about it on stdin and stdout."""
    control = ControlClient(task.address, rank=task.rank, credentials=Token(task.token.encode()))
    try:
        if task.values:
            _run_sums(task, control)
        else:
            _run_clocks(task, control)
    finally:
        control.close()


def _run_sums(task: LoadTask, control: ControlClient) -> None:
    shape, joined = control.join(task.job, JobShape(0, task.workers, task.values, SLOTS, _RING))
    client = StreamClient(shape, task.rank, joined.cookie, window=WINDOW, rto_s=_RTO_S)
    known = KnownVectors(task.rank, task.workers, task.values)
    thread = ClientThread(client, *socket_to(control, joined))
    try:
        _say_and_hear("ready", "go")
        result = sum_all_the_time(thread, client, known, task.seconds)
        _say_and_hear(msgspec.json.encode(result).decode(), "end")
    finally:
        thread.close()


def _run_clocks(task: LoadTask, control: ControlClient) -> None:
    shape = JobShape(0, task.workers, _LEAST_VALUES, SLOTS, _RING)
    shape, joined = control.join(task.job, shape, Strategy("table", window=task.slack))
    sock, switch = socket_to(control, joined)
    try:
        _join(join_packet(shape.number, task.rank, joined.cookie), sock, switch)
        table = TableClient(shape, task.rank, joined.cookie, rto_s=_RTO_S)
        _say_and_hear("ready", "go")
        result = count_clocks(table, sock, switch, task)
        _say_and_hear(msgspec.json.encode(result).decode(), "end")
    finally:
        sock.close()


def send_garbage(task: GarbageTask) -> None:
    """Send garbage, and talk about it on stdin and stdout as all workers do."""
    sender = GarbageSender(task)
    try:
        _say_and_hear("ready", "go")
        _say_and_hear(msgspec.json.encode(sender.run()).decode(), "end")
    finally:
        sender.close()


def _join(packet: PacketBatch, sock: UdpSocket, switch: int) -> None:
    """Have the switch learn where packets come from.

    Raises:
        NetworkError: if it does not answer.
    """
    batch = PacketBatch(64, 16)
    end_s = time.monotonic() + _STALLED.total_seconds()
    while time.monotonic() < end_s:
        sock.send(packet, np.full(1, switch, np.uint64))
        if select.select([sock], [], [], _RTO_S)[0]:
            received, _ = sock.recv(batch)
            if (received.header["kind"] == PacketKind.JOIN_OK).any():
                return
    raise NetworkError("Cannot join the switch: it does not answer.")


def _say_and_hear(word: str, answer: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()
    if sys.stdin.readline().strip() != answer:
        sys.exit(1)  # the benchmark is gone


def main() -> None:
    """Carry out tasks until there are no more."""
    for line in iter(sys.stdin.readline, ""):
        try:
            task = msgspec.json.decode(line, type=LoadTask | GarbageTask)
            if isinstance(task, LoadTask):
                run(task)
            else:
                send_garbage(task)
        except OffbeatError as error:
            sys.exit(str(error))  # on stderr; the benchmark hears nothing more, and looks there
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
