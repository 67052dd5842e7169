"""Counts this worker's steps, and has its faults strike when their step comes.

The user's loop does not change: torch calls every optimizer's step through hooks that hold for the whole process. Steps
count from when the worker takes part in a job, and of one optimizer, the first that steps there; so what a script does
with a copy of its model before, or beside, does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offbeat.errors import ScenarioError
from offbeat.fault_spec import AGE, ASKED, FAULTS, LOG, PASSING, Fault, Fired, Link, Process, Stranger, read_fired
from offbeat.testing.faults import in_process, processes, unauthorized_peers
from offbeat.testing.faults.links import PeerProxies, Proxies

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_ARMED = ("forward", "backward", "loader")  # in the step before
_WORK = ("OFFBEAT_LAB_WORK", "OFFBEAT_HISTORY")  # what it is to do, and where to record it
_OURS = ("OFFBEAT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_")


class FaultInjector:
    """One worker's faults.

    Args:
        faults: of all workers.
        log: where each is written down before it strikes. One that stands there does not strike again, such as when
            the worker was started anew.
        rank: this worker's.
        asked: where to ask for what is to happen to links for a while, and is written to the log by whoever does it;
            None to do it here, to the links with the server.

    Raises:
        ScenarioError: if a fault cannot be.
    """

    def __init__(self, faults: Sequence[Fault], log: Path, rank: int, asked: Path | None = None) -> None:
        for fault in faults:
            fault.check()
            if fault.stays and asked is None:
                raise ScenarioError(
                    f"Cannot have {fault.words}: links are the lab's. Use `offbeat lab run` (fault.kind)."
                )
        fired = {one.number for one in read_fired(log)}
        self._mine = [
            (number, fault) for number, fault in enumerate(faults) if fault.worker == rank and number not in fired
        ]
        self._log, self._rank, self._asked = log, rank, asked
        self._step = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._gradients = in_process.Gradients(AGE)
        self._servers = os.environ.get("OFFBEAT_SERVERS", "").split(",")
        self._proxies = None
        if any(fault.kind in (PASSING if asked else get_args(Link)) for fault in faults):
            kind = Proxies if self._servers[0] else PeerProxies
            self._proxies = kind(log.with_suffix(".links"), rank)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self._optimizer is None and takes_part():
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        if any(fault.kind == "stale" for _, fault in self._mine):
            self._gradients.remember(optimizer)
        for number, fault in self._mine:
            if fault.step == self._step and fault.kind not in _ARMED:
                self._strike(number, fault, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._step += 1
        for number, fault in self._mine:
            if fault.step == self._step and fault.kind in _ARMED:
                arm = {
                    "forward": in_process.raise_in_forward,
                    "backward": in_process.raise_in_backward,
                    "loader": in_process.raise_in_loader,
                }[fault.kind]
                arm(partial(self._note, number, fault, os.getpid()))

    def _strike(self, number: int, fault: Fault, optimizer: torch.optim.Optimizer) -> None:
        note = partial(self._note, number, fault)
        if fault.target == "switch" or fault.stays:
            assert self._asked is not None, "it is the lab's"
            _append(self._asked, Fired(number=number, fault=fault, time_s=time.time()))
        elif fault.kind in get_args(Process):
            processes.strike(fault, self._process_of(fault), note)
        elif fault.kind in get_args(Link) and fault.kind not in PASSING and self._asked is not None:
            _append(self._asked, Fired(number=number, fault=fault, time_s=time.time()))
        elif fault.kind in get_args(Link):
            assert self._proxies is not None, "made for it"
            self._proxies.strike(fault, note)
        elif fault.kind in get_args(Stranger):
            unauthorized_peers.dial(fault.kind, self._server_of(fault), self._rank, note)
        else:
            note(os.getpid())
            self._strike_here(fault, optimizer)

    def _strike_here(self, fault: Fault, optimizer: torch.optim.Optimizer) -> None:
        if fault.kind == "gil":
            in_process.hold_gil(fault.seconds)
        elif fault.kind == "clock":
            in_process.jump()
        elif fault.kind == "leave":
            for session in _open_sessions():
                session.close(None)
            sys.exit(0)
        elif fault.kind == "join":
            self._have_one_join()
        else:
            self._gradients.spoil(optimizer, fault)

    def _process_of(self, fault: Fault) -> int:
        return os.getpid() if fault.target == "worker" else processes.serves_at(self._server_of(fault))

    def _server_of(self, fault: Fault) -> str:
        return self._servers[-1 if fault.target == "server" else 0]

    def _have_one_join(self) -> None:
        """Start this very script as another worker of the job; what it says goes beside the log."""
        folder = os.environ.get("OFFBEAT_RUN_DIR")
        if folder is not None:
            command = ["offbeat", "run", "--join", folder, "--workers", "1"]
            command += ["--run-dir", str(self._log.with_suffix(".joined"))]
            own = {name: value for name, value in os.environ.items() if not name.startswith(_OURS) or name in _WORK}
        else:  # a peer of the lab's, into which a worker comes that knows its addresses
            command = ["offbeat.testing.run_with_faults"]
            result = str(self._log.with_suffix(".joined.jsonl"))
            own = {**os.environ, "RANK": os.environ["WORLD_SIZE"], "OFFBEAT_LAB_RESULT": result}
        with self._log.with_suffix(".joiner").open("wb") as output:
            joiner = subprocess.Popen(
                [sys.executable, "-m", *command, *sys.argv],
                env={**own, FAULTS: "[]", LOG: str(self._log)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=folder is not None,  # a peer's ends with this worker
            )
        joiner.returncode = 0  # nobody waits for it

    def _note(self, number: int, fault: Fault, pid: int = 0) -> None:
        _append(self._log, Fired(number=number, fault=fault, time_s=time.time(), pid=pid))


def from_environment() -> FaultInjector | None:
    """The faults that the environment asks for, if it does."""
    if FAULTS not in os.environ:
        return None
    faults = msgspec.json.decode(os.environ[FAULTS], type=list[Fault])
    asked = Path(os.environ[ASKED]) if ASKED in os.environ else None
    return FaultInjector(faults, Path(os.environ[LOG]), int(os.environ.get("RANK", "0")), asked)


def _append(path: Path, fired: Fired) -> None:
    """A line that outlives whatever comes now."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(fired) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def takes_part() -> bool:
    """Whether this process is a worker of a job by now."""
    # A worker of torchft's has no group of torch's own; it loads torchft when it begins.
    return dist.is_initialized() or bool(_open_sessions()) or "torchft" in sys.modules


def _open_sessions() -> list[Any]:
    sessions = sys.modules.get("offbeat.run.open_sessions")  # the script may be no job of offbeat's
    return [] if sessions is None else sessions.of_this_process()
