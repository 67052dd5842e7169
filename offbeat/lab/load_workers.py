"""The workers of a benchmark of switches: a process in each host of a network, which carry out tasks together."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import subprocess
import time
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import WorkerLostError
from offbeat.lab import command_lines
from offbeat.lab.network import INTERFACE
from offbeat.lab.packet_loss import LossCounts, PacketLoss
from offbeat.lab.switch_load import LoadResult, LoadTask

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from offbeat.lab.network import Network

_PATIENCE_S = 60.0  # beside the seconds that are measured


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
        self, switch: Mapping[str, str], workers: int, *, values: int, slack: int, seconds: float, loss: float
    ) -> tuple[list[LoadResult], list[LossCounts]]:
        """Have some of them sum, or count clocks, in a job of their own.

        Args:
            switch: OFFBEAT_SWITCH and OFFBEAT_TOKEN, as `SwitchProcess.environment`.
            workers: how many; the first ones.
            values: int32 in a packet; 0 to count clocks.
            slack: steps that a worker may be ahead, for clocks.
            seconds: for how long to measure.
            loss: the part of the datagrams that is lost, in each direction, at each host.

        Returns:
            What each has done, and what was lost at each; nothing of the latter without loss.

        Raises:
            WorkerLostError: if one ends, or says nothing.
            NetworkError: if nothing can be made to be lost here.
        """
        job = f"load-{secrets.token_hex(4)}"
        ranks = range(workers)
        with contextlib.ExitStack() as stack:
            losses = [PacketLoss(self._hosts[rank][0], INTERFACE, loss) for rank in ranks] if loss else []
            for one in losses:
                stack.callback(one.close)
            for rank in ranks:
                task = LoadTask(
                    switch["OFFBEAT_SWITCH"], switch["OFFBEAT_TOKEN"], job, rank, workers, values, slack, seconds
                )
                self._say(rank, msgspec.json.encode(task).decode())
            for rank in ranks:
                self._hear(rank, _PATIENCE_S)
            for rank in ranks:
                self._say(rank, "go")
            said = [self._hear(rank, seconds + _PATIENCE_S) for rank in ranks]
            for rank in ranks:
                self._say(rank, "end")
            for rank in ranks:
                self._hear(rank, _PATIENCE_S)
            return [msgspec.json.decode(line, type=LoadResult) for line in said], [one.counts for one in losses]

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
