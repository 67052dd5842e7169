"""The workers of a benchmark of switches: a process in each host of a network, which carry out tasks together."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from offbeat.errors import WorkerLostError
from offbeat.lab import command_lines
from offbeat.lab.bridged_links import INTERFACE
from offbeat.lab.garbage import GarbageResult, GarbageTask
from offbeat.lab.packet_loss import LossCounts, PacketLoss
from offbeat.lab.switch_load import LoadResult, LoadTask

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from offbeat.lab.network import Network

_PATIENCE_S = 60.0  # beside the seconds that are measured
_MOST_S_PER_CLOCK = 0.02


class LoadOutcome(NamedTuple):
    """The outcome of one task.

    Args:
        results: of each worker.
        losses: what was lost at each one's host; nothing without loss.
        garbage: what was sent meanwhile that was none of theirs; None if nothing was.
    """

    results: list[LoadResult]
    losses: list[LossCounts]
    garbage: GarbageResult | None


class LoadWorkers:
    """A process in each host, from construction to `close`.

    Args:
        network: whose hosts they run in.
        folder: for what they say on stderr (`load0.log`).

    Start them from the main thread: the kernel ties them to the thread that started them.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._hosts = [(network.namespace(host.name), host.name) for host in network.topology.hosts]
        self._logs = [folder / f"load{rank}.log" for rank in range(len(self._hosts))]
        self._processes: list[subprocess.Popen[str]] = []
        for (namespace, _), log in zip(self._hosts, self._logs, strict=True):
            with log.open("w") as output:
                self._processes.append(
                    subprocess.Popen(
                        command_lines.entered(namespace, command_lines.module("offbeat.lab.switch_load")),
                        env=network.mark(),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        text=True,
                        bufsize=1,
                        start_new_session=True,
                    )
                )

    def run(
        self,
        task: LoadTask,
        *,
        loss: float,
        beside: AbstractContextManager[object] | None = None,
        garbage: GarbageTask | None = None,
    ) -> LoadOutcome:
        """Have some of them sum, or count clocks, in a job of their own.

        Args:
            task: of the first of them, which is the same for the others but for the rank.
            loss: the part of the datagrams that is lost, in each direction, at each host.
            beside: goes on while they do.
            garbage: what the one behind them sends meanwhile.

        Raises:
            WorkerLostError: if one ends, or says nothing.
            NetworkError: if nothing can be made to be lost here.
        """
        ranks = range(task.workers)
        tasks: list[LoadTask | GarbageTask] = [msgspec.structs.replace(task, rank=rank) for rank in ranks]
        tasks += [] if garbage is None else [garbage]
        patience_s = _PATIENCE_S + task.seconds + task.clocks * _MOST_S_PER_CLOCK
        with contextlib.ExitStack() as stack:
            losses = [PacketLoss(self._hosts[rank][0], INTERFACE, loss) for rank in ranks] if loss else []
            for one in losses:
                stack.callback(one.close)
            for who, each in enumerate(tasks):
                self._say(who, msgspec.json.encode(each).decode())
            for who in range(len(tasks)):
                self._hear(who, _PATIENCE_S)
            with beside or contextlib.nullcontext():
                for who in range(len(tasks)):
                    self._say(who, "go")
                said = [self._hear(who, patience_s) for who in range(len(tasks))]
            for who in range(len(tasks)):
                self._say(who, "end")
            for who in range(len(tasks)):
                self._hear(who, _PATIENCE_S)
            return LoadOutcome(
                [msgspec.json.decode(line, type=LoadResult) for line in said[: task.workers]],
                [one.counts for one in losses],
                None if garbage is None else msgspec.json.decode(said[-1], type=GarbageResult),
            )

    def close(self) -> None:
        """End them; again does nothing."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def __enter__(self) -> LoadWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _say(self, rank: int, line: str) -> None:
        stdin = self._processes[rank].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is found when nothing is heard of it
            stdin.write(line + "\n")
            stdin.flush()

    def _hear(self, rank: int, patience_s: float) -> str:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            end_s = time.monotonic() + patience_s
            heard = selector.select(end_s - time.monotonic())
        line = stdout.readline().strip() if heard else ""
        if not line:
            said = self._logs[rank].read_text().strip() or "nothing"
            raise WorkerLostError(f"worker {rank} of the benchmark is gone, or hangs; it said: {said}")
        return line
