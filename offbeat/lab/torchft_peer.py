"""torchft as a peer of the lab: its DistributedDataParallel, each worker a replica group of its own.

As its documentation has it: a lighthouse says who takes part in a step, a manager beside each worker asks it, gradients
go over Gloo, and a step in which somebody was lost is skipped by all. The lighthouse is in the first worker's process
(its own threads serve it), so that worker is not to be killed. Timeouts are those of torchft's examples, but for how
long a lighthouse waits for workers that are late (a second).
"""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from offbeat.errors import ScenarioError
from offbeat.fault_spec import JOINED

if TYPE_CHECKING:
    from contextlib import ExitStack

    import torch

_JOIN_TIMEOUT_MS = 1000
_kept: list[TCPStore] = []
_GLOO_TIMEOUT, _TIMEOUT = timedelta(seconds=5), timedelta(seconds=10)


def wrap(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int | None, resources: ExitStack
) -> tuple[torch.nn.Module, Any]:
    """Hand a model and an optimizer to torchft. Collective: every worker calls it.

    Args:
        bucket_bytes: DDP's bucket size; None is its default.
        resources: where what has to be closed is left.

    Returns:
        torchft's model and optimizer.

    Raises:
        ScenarioError: if torchft is not installed.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = _own_address(first, port)
    # torchft tells others the name of this machine, which all hosts of a lab share; some of it when it is imported.
    socket.gethostname = lambda: address
    torchft = _torchft()
    if rank == 0:
        lighthouse = torchft.coordination.LighthouseServer(
            bind=f"0.0.0.0:{port}", min_replicas=1, join_timeout_ms=_JOIN_TIMEOUT_MS
        )
        resources.callback(lighthouse.shutdown)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_GLOO_TIMEOUT),
        load_state_dict=lambda state: _load(model, optimizer, state),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{port}",
        replica_id=f"lab_{rank}",
        hostname=address,
    )
    resources.callback(manager.shutdown)
    resources.callback(manager.wait_quorum)  # that of a step which does not come; who is first waits for the others
    wrapped = torchft.DistributedDataParallel(
        manager, model, bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20
    )
    if rank < world:  # all begin together: whoever is first would train alone otherwise, and end before the others
        _meet(TCPStore(first, port + 1, None, is_master=rank == 0, wait_for_workers=False), rank, world)
    manager.start_quorum()  # of the first step; later ones are asked for by `zero_grad`
    if rank >= world:
        manager.wait_quorum()
        print(f"{JOINED} {manager.num_participants()} others", flush=True)  # noqa: T201 - the lab reads it
    return wrapped, torchft.Optimizer(manager, optimizer)


def _meet(store: TCPStore, rank: int, world: int) -> None:
    """Wait for all workers of the beginning; the store ends with the first one's process."""
    _kept.append(store)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world)])


def _torchft() -> Any:
    try:
        importlib.import_module("torchft.coordination")
        return importlib.import_module("torchft")
    except ImportError as error:
        raise ScenarioError(
            f"Cannot measure torchft: it is not installed ({error}). Run pip install torchft-nightly, or leave the row "
            "out (row.system)."
        ) from error


def _own_address(first: str, port: int) -> str:
    """The address by which others find this host: that from which it would reach the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, port))
        return str(probe.getsockname()[0])


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
