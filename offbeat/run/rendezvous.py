"""The rendezvous: the workers of a job find each other.

Each writes its name into the store that `offbeat run` (a file) or `torchrun` (a TCPStore) names in the environment, and
waits until all are there; who is not there yet can so be told. Then torch's process group is made.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from offbeat.diagnosis.startup_barrier import StartupBarrier
from offbeat.diagnosis.wait import WaitContext
from offbeat.errors import NetworkError, PlanError
from offbeat.fabric.gloo_listener import stop_listening
from offbeat.safe_write import write_whole
from offbeat.wire.interfaces import address_towards, interface_addresses, is_loopback, resolve_hostname

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.plan import Plan
    from offbeat.run.environment import Environment

_log = logging.getLogger("offbeat")
_NEVER = timedelta(days=365)
_REACH = timedelta(seconds=10)  # the store of a job that is to be joined
_held: dict[Path, int] = {}  # locks
_met = 0  # how often the workers met: one process may join several times, one after the other


def join(waiter: BlockingWait, environment: Environment) -> Store | None:
    """Make sure that torch's default process group exists if there is more than one worker.

    Returns:
        Where the workers met, if we made it.

    Raises:
        PlanError: if the environment names no rank of this worker.
    """
    if dist.is_initialized():
        return None
    world = environment.number("WORLD_SIZE", 1)
    if world == 1:
        return None
    rank, local_rank = environment.number("RANK", -1), environment.number("LOCAL_RANK", 0)
    if not 0 <= rank < world:
        raise PlanError(
            f"Cannot join {world} workers as rank {rank}: RANK must be from 0 to {world - 1}. "
            "Start the script with `offbeat run` or torchrun."
        )
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if cuda:
        torch.cuda.set_device(local_rank)
    meeting = WaitContext(f"the meeting of all workers at {environment.meeting_place}")
    store = waiter.call(lambda: _open_store(rank, world, environment.store_file), meeting)
    barrier = StartupBarrier(store, rank, world, environment.worker_pids)
    waiter.witness = barrier  # until there is a watch
    waiter.wait(barrier, WaitContext("the others to call offbeat.init()"))
    _choose_interface(world, environment)
    try:
        waiter.call(
            lambda: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=_NEVER
            ),
            WaitContext("the connection to the others"),
        )
    except RuntimeError as error:
        if "Gloo connect" not in str(error):
            raise
        raise NetworkError(
            f"Cannot connect rank {rank} on {socket.gethostname()} with the others: {str(error).splitlines()[0]}. Set "
            "GLOO_SOCKET_IFNAME, on each machine, to the interface by which the others reach it; `offbeat doctor` "
            "lists them."
        ) from error
    stop_listening(dist.distributed_c10d._get_default_group())
    return store


def _choose_interface(world: int, environment: Environment) -> None:
    """Have Gloo listen where other machines reach this one, if its own name resolves to loopback, as on Debian.

    Args:
        world: number of workers; 0 if that is not known, and some are elsewhere.
    """
    here = environment.number("LOCAL_WORLD_SIZE", 0)
    if "GLOO_SOCKET_IFNAME" in os.environ or environment.store_file is not None or here == world:
        return
    own = resolve_hostname()
    if own and not is_loopback(own):
        return
    outward = {name: one for name, one in interface_addresses().items() if one and not is_loopback(one)}
    towards_first = address_towards(environment.first_address)
    names = [name for name, one in outward.items() if one == towards_first]
    if not names and here and len(outward) == 1:  # the first machine was named, and its name resolves to loopback there
        names = list(outward)
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def store_of_job(plan: Plan, environment: Environment) -> Store | None:
    """Find the store where the workers of the job met that this worker joins, if it is one without a server.

    Args:
        plan: of this worker.

    Raises:
        PlanError: if that is not for such a job.
        NetworkError: if it cannot be reached.
    """
    prefix = environment.store_prefix
    if not prefix or (environment.store_file is None and environment.store_address is None):
        return None
    plan.check_newcomers()
    if environment.store_address is None:
        return PrefixStore(prefix, FileStore(str(environment.store_file)))
    host, port = environment.store_address
    _choose_interface(0, environment)
    try:
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_REACH))
    except RuntimeError as error:
        raise NetworkError(
            f"Cannot join: the store in which the workers met, at {host}:{port}, cannot be reached. The job has ended, "
            "or this machine cannot reach the one of its first worker."
        ) from error


def stay(path: Path | None) -> None:
    """Have others know, as long as this process lives, that the job does: it holds a lock beside the store's file."""
    if path is None:
        return
    if path not in _held:
        _held[path] = os.open(path.with_name(f"{path.name}.held"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(_held[path], fcntl.LOCK_SH)


def ended(path: Path | None) -> bool:
    """Whether no worker of the job lives whose store is that file, as far as that is known."""
    if path is None:
        return False
    try:
        lock = os.open(path.with_name(f"{path.name}.held"), os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def leave_store(folder: Path, store: Store, plan: Plan, world: int, environment: Environment) -> None:
    """Write down in the run folder where the workers met, so that others can join them.

    Args:
        store: where they met.
        plan: that they begin with; written down as well, unless it is there.
        world: with how many workers the job begins.
    """
    prefix = f"offbeat-{_met - 1}"
    if isinstance(getattr(store, "underlying_store", None), PrefixStore):  # by torch up to 2.12, under torchrun
        prefix = f"{environment.agent_prefix}{prefix}"
    about = {"place": environment.store_for_others, "prefix": prefix, "world": world}
    try:
        if not (folder / "plan.toml").exists():
            (folder / "plan.toml").write_text(plan.to_toml())
        write_whole(folder / "store.json", json.dumps(about).encode())
    except OSError as error:  # a full disk is no reason to end the run
        _log.warning("Cannot write %s: %s. No worker can join.", folder / "store.json", error.strerror)


def _open_store(rank: int, world: int, file: Path | None) -> Store:
    global _met
    prefix = f"offbeat-{_met}"
    _met += 1
    if file is not None:
        # Told how many workers there are, the last to leave a job would remove the file, perhaps when another one has
        # written its name there for the next job.
        return PrefixStore(prefix, FileStore(str(file)))
    store, _, _ = next(rendezvous("env://", rank=rank, world_size=world, timeout=_NEVER))
    return PrefixStore(prefix, store)
