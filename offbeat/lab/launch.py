"""One worker per host, with the environment that torchrun would give it.

Workers run in sessions of their own, so a Ctrl-C reaches the lab alone and the lab ends them; the kernel ends them if
the lab is killed. When one dies the others are ended at once, and the one that died first is named with its last words.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from offbeat.errors import WorkerLostError
from offbeat.exit_codes import how_it_ended
from offbeat.lab import command_lines, lab_registry, memory_cgroup, recorder, validator_process
from offbeat.lab.worker_placement import WorkerPlacement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from offbeat.lab.network import Network

MASTER_PORT = 29500
"""Every host of a lab has all ports to itself."""
_SUMMING = re.compile(r"^summing at (\S+):", re.MULTILINE)
_SWITCH_START_S, _SWITCH_LOOK_S, _SWITCH_END_S = 30.0, 0.05, 5.0


def places(network: Network) -> list[WorkerPlacement]:
    """One place per host of a network."""
    is_star = network.topology.is_star
    return [
        WorkerPlacement(
            host.name,
            network.namespace(host.name),
            network.address(host.name),
            network.interface,
            host.compute_factor,
            port=network.port(host.name) if is_star else None,
            interfaces=() if is_star else tuple(network.interfaces(host.name)),
        )
        for host in network.topology.hosts
    ]


def loopback_places(names: Sequence[str]) -> list[WorkerPlacement]:
    """Plain processes of this machine on its loopback interface."""
    return [WorkerPlacement(name, None, "127.0.0.1", "lo") for name in names]


class Shards:
    """The shards of one run's parameter server: started on construction, gone when the `with` block ends.

    Args:
        places: where they run; the first one coordinates.
        folder: for their output (`shard0.log`).
        timeout_s: a worker that is silent for longer is gone.
        lab: the lab's identity; None outside of namespaces.
        is_struck: they keep snapshots there, and are started again when they are killed.
        validator_token: the secret of validators, which is in no worker's environment; "" for none.
    """

    def __init__(
        self,
        places: Sequence[WorkerPlacement],
        *,
        folder: Path,
        timeout_s: float,
        lab: str | None = None,
        is_struck: bool = False,
        validator_token: str = "",
    ) -> None:
        from offbeat.server.launch import RESTARTS, ShardSettings, start_shard

        job, token = secrets.token_hex(8), secrets.token_hex(32)
        addresses: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        mark = {lab_registry.MARK: lab} if lab is not None else {}
        try:
            for index, place in enumerate(places):
                settings = ShardSettings(
                    job=job,
                    bind=place.address,
                    coordinator=addresses[0] if addresses else "",
                    token=token,
                    validator_token=validator_token,
                    timeout_s=timeout_s,
                    snapshots=str(folder / "server" / f"shard-{index}") if is_struck else "",
                    is_fresh=is_struck,
                    restarts=RESTARTS if is_struck else 0,
                )
                with (folder / f"shard{index}.log").open("wb") as log:
                    process, address = start_shard(
                        settings,
                        wrap=lambda command, place=place: command_lines.entered(place.namespace, command),  # type: ignore[misc]
                        environment={**command_lines.environment(), **mark},
                        output=log,
                    )
                self._processes.append(process)
                addresses.append(address)
        except BaseException:
            self.end()
            raise
        self.environment = {"OFFBEAT_SERVERS": ",".join(addresses), "OFFBEAT_JOB": job, "OFFBEAT_TOKEN": token}

    def end(self) -> None:
        """End them at once; ending twice is allowed."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class SwitchProcess:
    """The switch of one run, which sums gradients where links meet: started on construction, gone when the `with` block
    ends.

    Args:
        namespace: of the switch; None for this machine itself.
        address: to listen on.
        folder: for its output (`switch.log`).
        lab: the lab's identity; None outside of namespaces.
        ports: at which the kernel sums; none for a switch that is a process.
        target: what sums there, if there are any.

    Raises:
        WorkerLostError: if it does not start.
    """

    def __init__(
        self,
        namespace: str | None,
        address: str,
        *,
        folder: Path,
        lab: str | None = None,
        ports: Sequence[str] = (),
        target: str = "ebpf",
    ) -> None:
        token, self._log = secrets.token_hex(32), folder / "switch.log"
        command = command_lines.module("offbeat", "switch", "serve", "--bind", address, "--trusted-network")
        if ports:
            command += ["--target", target, "--interfaces", ",".join(ports)]
        mark = {lab_registry.MARK: lab} if lab is not None else {}
        self._command = command_lines.entered(namespace, command)
        self._own = {**command_lines.environment(), **mark, "OFFBEAT_TOKEN": token, "PYTHONUNBUFFERED": "1"}
        self.environment = {"OFFBEAT_SWITCH": self._start(), "OFFBEAT_TOKEN": token}

    def _start(self, *arguments: str) -> str:
        """Start it; the address of its control."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                env=self._own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _SWITCH_START_S
        while (found := _SUMMING.search(self._log.read_text())) is None:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.end()
                said = self._log.read_text().strip() or "nothing"
                raise WorkerLostError(f"the switch does not start; it said: {said}")
            time.sleep(_SWITCH_LOOK_S)
        return found[1]

    def restart(self) -> None:
        """Kill it, and start it again at the same address, as a supervisor would."""
        self._process.kill()
        self._process.wait()
        self._start("--port", self.environment["OFFBEAT_SWITCH"].rpartition(":")[2])

    def end(self) -> None:
        """End it, with what it has attached to ports; ending twice is allowed."""
        self._process.terminate()
        try:
            self._process.wait(_SWITCH_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> SwitchProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class Workers:
    """The workers of one run: started on construction, gone when the `with` block ends.

    Args:
        command: the program and its arguments, the same for all.
        places: where rank 0, 1, ... run.
        folder: an empty folder for their output (`rank0.log`) and results (`rank0.jsonl`).
        environment: variables for all of them, beside those of torchrun.
        each: variables for one rank each, in order of rank.
        lab: the lab's identity, which marks its processes; None outside of namespaces.
        are_restarted: by torchrun, all of them, when one ends otherwise than well.

    Start them from the main thread: the kernel ties a worker to the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        places: Sequence[WorkerPlacement],
        folder: Path,
        environment: Mapping[str, str],
        each: Sequence[Mapping[str, str]],
        lab: str | None = None,
        are_restarted: bool = False,
    ) -> None:
        self.places = list(places)
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port = MASTER_PORT if lab is not None else _free_port()
        together = {
            **command_lines.environment(),
            "WORLD_SIZE": str(len(self.places)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.places[0].address,
            "MASTER_PORT": str(port),
            "PYTHONUNBUFFERED": "1",
            **({lab_registry.MARK: lab} if lab is not None else {}),
            **(command_lines.TORCHRUN if are_restarted else {}),
            **environment,
        }
        try:
            for rank, (place, own) in enumerate(zip(self.places, each, strict=True)):
                program = command
                if are_restarted:
                    store = f"{self.places[0].address}:{port}"
                    program = command_lines.under_torchrun(
                        command, nodes=len(self.places), address=place.address, store=store, is_first=rank == 0
                    )
                self._processes.append(
                    self._start(
                        command_lines.entered(place.namespace, program),
                        self.log(rank),
                        {
                            **together,
                            "RANK": str(rank),
                            "GROUP_RANK": str(rank),
                            "GLOO_SOCKET_IFNAME": place.interface,
                            recorder.INTERFACES: ",".join(place.interfaces or [place.interface]),
                            recorder.RESULT: str(self.result(rank)),
                            **own,
                        },
                    )
                )
        except BaseException:
            self.end()
            raise

    def log(self, rank: int) -> Path:
        """The file of a worker's output."""
        return self.folder / f"rank{rank}.log"

    def result(self, rank: int) -> Path:
        """The file that a worker's recorder writes."""
        return self.folder / f"rank{rank}.jsonl"

    def wait(
        self,
        timeout_s: float,
        struck: Collection[int] = (),
        *,
        validator: validator_process.ValidatorProcess | None = None,
    ) -> None:
        """Return when all workers have ended well.

        Args:
            struck: ranks that may end otherwise.
            validator: that they are judged by; it ends no sooner than they do.

        Raises:
            WorkerLostError: if one ends otherwise, or not all have ended after `timeout_s`.
        """
        deadline_s, is_left = time.monotonic() + timeout_s, False
        pids, beside = [process.pid for process in self._processes], len(self._processes)
        if validator is not None:
            pids.append(validator.pid)
        with selectors.DefaultSelector() as selector, ExitStack() as handles:
            for rank, pid in enumerate(pids):
                handle = os.pidfd_open(pid)
                handles.callback(os.close, handle)
                selector.register(handle, selectors.EVENT_READ, rank)
            while running := [key.data for key in selector.get_map().values() if key.data != beside]:
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready and validator is not None and is_left:
                    raise WorkerLostError(validator.obituary(0))
                if not ready:
                    raise WorkerLostError(self._overdue(running, timeout_s))
                codes = {key.data: _exit_code(key.fd) for key, _ in ready}
                its_code = codes.pop(beside, None)
                if any(code for rank, code in codes.items() if rank not in struck):
                    raise WorkerLostError(self._obituary(codes))
                if validator is not None and its_code is not None:
                    if its_code:
                        raise WorkerLostError(validator.obituary(its_code))
                    # It hears of the last good-bye before that worker's process has ended.
                    deadline_s, is_left = min(deadline_s, time.monotonic() + validator_process.LINGERS_S), True
                for key, _ in ready:
                    selector.unregister(key.fd)

    def end(self) -> None:
        """End every worker and what it started, at once; ending twice is allowed."""
        for process in self._processes:
            # Not yet waited for, so the group's name cannot have passed to strangers, even if its leader is dead.
            os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _start(self, command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _obituary(self, codes: dict[int, int]) -> str:
        # Of several that ended together, one that a signal killed did not die of the others' death.
        rank = min((rank for rank, code in codes.items() if code), key=lambda rank: (codes[rank] > 0, rank))
        code = codes[rank]
        how, last = how_it_ended(code), command_lines.last_lines(self.log(rank))
        place = self.places[rank]
        is_short = code == -signal.SIGKILL and memory_cgroup.has_killed(place.namespace)
        why = " for want of memory (host.memory_mb)" if is_short else ""
        return f"rank {rank} on host {place.host} {how}{why}, its last output was\n{last}"

    def _overdue(self, running: list[int], timeout_s: float) -> str:
        names = ", ".join(f"{rank} on {self.places[rank].host}" for rank in running)
        last = command_lines.last_lines(self.log(running[0]))
        return (
            f"after {timeout_s:g} s rank {names} still run. Raise the limit (run.timeout_s) or "
            f"shorten the run (run.steps). The last output of rank {running[0]} was\n{last}"
        )


def _exit_code(handle: int) -> int:
    """Read how the process behind a pidfd ended, without reaping it: negative is a signal."""
    status = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
