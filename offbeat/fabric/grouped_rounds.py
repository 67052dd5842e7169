"""Algorithms carried out by a process group of torch: each round is one grouped batch of sends and receives.

On GPUs that NCCL connects nothing passes through the host then. The links between the workers, over which they have
measured the network, stay: they tell who is lost, which NCCL does not.

A thread carries the rounds out, one exchange behind the other, so that operations of the group match on all workers. It
does not come back from an exchange with a worker that is lost; then the group is left as it is. A chunk that was on its
way by then may still be copied to the vector, which over lanes it may not; nothing is added to it any more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat.collective.rounds import rank_rounds
from offbeat.errors import NetworkError
from offbeat.fabric.process_group import never_destroy
from offbeat.pending import Completion
from offbeat.wire.lane import BusyTime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.collective.algorithm import Algorithm
    from offbeat.collective.rounds import RankRound
    from offbeat.fabric.lane_exchange import Owed
    from offbeat.fabric.lane_network import LaneNetwork

_MOMENT_S, _POLL_S = 1.5, 0.02


class GroupedRunner:
    """A process group by whose sends and receives algorithms are carried out. An `AlgorithmRunner`.

    Args:
        network: the links between its members, which are at the same places.
        group: it; nobody else uses it.
        device: where the vectors are.
    """

    in_rounds = True

    def __init__(self, network: LaneNetwork, group: dist.ProcessGroup, device: torch.device) -> None:
        self.network, self.device, self.busy = network, device, BusyTime()
        self._group: dist.ProcessGroup | None = group
        self._is_abandoned = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offbeat-rounds", daemon=True)
        self._thread.start()

    def prepared(self, algorithm: Algorithm) -> Callable[[torch.Tensor], GroupedExchange]:
        rounds, chunks = rank_rounds(algorithm, self.network.place), algorithm.chunks

        def start(whole: torch.Tensor) -> GroupedExchange:
            parts = [whole.detach()[chunk.place(whole.numel())] for chunk in chunks]
            sent_bytes = sum(parts[send.chunk].nbytes for one in rounds for send in one.sends)
            exchange = GroupedExchange(sent_bytes, self.busy, self._why_lost)
            made = None if self._stream is None else torch.cuda.current_stream(self.device).record_event()
            self._tasks.put(lambda: exchange.carry_out(lambda: self._carried_out(rounds, parts, made)))
            return exchange

        return start

    def close(self) -> None:
        self._tasks.put(None)
        if self._group is not None:
            self._thread.join()
            dist.destroy_process_group(self._group)
            self._group = None

    def abandon(self) -> None:
        self._is_abandoned = True
        self._tasks.put(None)
        group, self._group = self._group, None
        if group is not None:
            never_destroy(group)

    def _carried_out(self, rounds: Sequence[RankRound], parts: Sequence[torch.Tensor], made: Any) -> None:
        """Carry out all rounds.

        Args:
            made: the event behind which the GPU has the vector; None on a CPU.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(made)
            for one in rounds:
                self._round(one, parts)
            if self._stream is not None:
                self._stream.synchronize()

    def _round(self, one: RankRound, parts: Sequence[torch.Tensor]) -> None:
        group = self._group
        if self._is_abandoned or group is None:
            raise NetworkError("Cannot go on with a sum: its links were given up.")
        sends = [send for send in one.sends if parts[send.chunk].numel()]
        batch = [_op(dist.isend, parts[send.chunk], send.destination, group) for send in sends]
        came = []
        for receive in one.receives:
            part = parts[receive.chunk]
            if part.numel():
                into = torch.empty_like(part) if receive.needs_memory else part
                batch.append(_op(dist.irecv, into, receive.source, group))
                came.append((receive, part, into))
        try:
            # Of NCCL's these hold up the stream alone.
            for work in dist.batch_isend_irecv(batch) if batch else ():
                work.wait()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise NetworkError(f"The connection to another worker broke: {first_line}") from error
        if self._is_abandoned:
            return
        for receive, part, into in came:
            if receive.adds:
                part.add_(into)
            elif receive.needs_memory:
                part.copy_(into)

    def _why_lost(self) -> str:
        lost = "; ".join(self.network.lost.values())
        self._is_abandoned = self._is_abandoned or bool(lost)
        return lost

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _op(what: Callable[..., Any], tensor: torch.Tensor, place: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(what, tensor, group=group, group_peer=place)


class GroupedExchange:
    """One exchange in rounds. An `Exchange`.

    Args:
        sent_bytes: by this worker.
        busy: notes them.
        lost: says who is lost, and why; "" if nobody is.
    """

    def __init__(self, sent_bytes: int, busy: BusyTime, lost: Callable[[], str]) -> None:
        self.sent_bytes, self._busy, self._lost = sent_bytes, busy, lost
        self._completion = Completion()

    def carry_out(self, rounds: Callable[[], None]) -> None:
        """Carry the rounds out, on this thread."""
        self._busy.began(time.monotonic())
        failed: Exception | None = None
        try:
            rounds()
        except Exception as error:
            failed = error
        self._busy.sent_bytes += self.sent_bytes
        self._busy.ended(time.monotonic())
        self._completion.end(failed)

    def wait(self, timeout: timedelta) -> bool:
        is_over, error = self._completion.wait(timeout), self._completion.error
        if is_over and error is None:
            return True
        # Of a process that ends torch's group may know before the links do, and not who it was.
        deadline_s = time.monotonic() + (_MOMENT_S if isinstance(error, NetworkError) else 0.0)
        while True:
            if lost := self._lost():
                raise NetworkError(lost)
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        if error is not None:
            raise error
        return False

    def done(self) -> bool:
        return self._completion.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._completion.add_done_callback(callback)

    def owed(self) -> Sequence[Owed]:
        return ()
