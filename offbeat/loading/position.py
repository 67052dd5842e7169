"""The place in leased data: as a server's coordinator keeps it, as workers without one do, and from one to the other.

    at the coordinator      of all loaders, as JSON: what `Client.data_state` gives and `Client.set_data_state` takes
    among the workers       of one loader: what `ReplicatedSource.state_dict` gives and `load_state_dict` takes

Either way each sample of each epoch is used, leased, or still to be leased; going over changes nothing about that.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.batching import Lease, LeasePool
from offbeat.errors import ModelError
from offbeat.safe_read import UnreadableError, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.batching import Leases
    from offbeat.protocol.data_leases import RegisterLoader


def for_workers(
    lease_state: str | bytes, loader: int, leases: Leases, *, is_held: bool = True, epoch: int | None = None
) -> dict[str, Any]:
    """Convert the coordinator's position to that of one loader's `ReplicatedSource`.

    There all are in the same epoch: a worker that was ahead of the others would leave them without data for good.

    Args:
        lease_state: the coordinator's, when all workers have given back what they have not drawn. What they hold then
            is in gradients that they have, and counts as used.
        leases: how the dataset is dealt out.
        is_held: False if nobody has those gradients any more: then it is dealt out again.
        epoch: in which all draw next; None for that in which the last of them is.

    Raises:
        ModelError: if that is damaged, or of other data.
    """
    pool = leases.from_plain(_of_loader(lease_state, loader))
    if is_held:
        pool, _ = leases.acknowledge(pool, tuple(pool.held))
    for worker in pool.at:
        pool = leases.give_back(pool, worker, pool.leased_to(worker))
    last = min(pool.at.values(), default=pool.epoch) if epoch is None else epoch
    return _kept(leases, dataclasses.replace(pool, at=dict.fromkeys(pool.at, last)))


def beginning(leases: Leases, epoch: int, ranks: Iterable[int]) -> dict[str, Any]:
    """Make the position of one loader's `ReplicatedSource` where an epoch begins."""
    return _kept(leases, leases.beginning(epoch, ranks))


def epoch_of(state: Mapping[str, Any], loader: int) -> int:
    """The epoch in which all workers are, or the last of them, going by what was kept of one loader.

    Raises:
        ModelError: if that is damaged.
    """
    pool = _pool_of(state, loader)
    return min(pool.at.values(), default=pool.epoch)


def workers_of(state: Mapping[str, Any], loader: int) -> tuple[int, ...]:
    """The workers that had leases of one loader.

    Raises:
        ModelError: if what was kept is damaged.
    """
    return tuple(sorted(_pool_of(state, loader).at))


def describe(state: Mapping[str, Any]) -> str:
    """The place in the data of one loader in a line, to compare it; a worker's own if it was dealt out by a server."""
    if "epoch" in state:
        return f"epoch {state['epoch']}, batch {state['batch']}"
    if "leases" in state:
        return f"round {state['round']}, {json.dumps(state['leases'], sort_keys=True)}"
    return "a server's place"


def for_coordinator(places: Mapping[int, tuple[RegisterLoader, Leases, Mapping[str, Any]]]) -> bytes:
    """Convert the workers' positions to the coordinator's.

    Args:
        places: of each loader what is said of it, how it is dealt out, and what its `ReplicatedSource` has kept at the
            beginning of a loop.
    """
    return msgspec.json.encode(
        {
            str(loader): {
                "about": msgspec.to_builtins(about),
                "leases": _begun(leases, state["leases"]),
                "tuning": None,
                "rounds": {},
            }
            for loader, (about, leases, state) in places.items()
        }
    )


def progress_of(plain: Any, samples: int) -> float:
    """Epochs that were dealt, going by a pool in dicts, lists and numbers."""
    return msgspec.convert(plain["pool"], LeasePool, str_keys=True).reached(samples)


def _pool_of(state: Mapping[str, Any], loader: int) -> LeasePool:
    try:
        plain = state["leases"] if "leases" in state else _of_loader(state["place"], loader)
        return msgspec.convert(plain["pool"], LeasePool, str_keys=True)
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise ModelError(f"Cannot resume the data: the checkpoint is damaged ({error}).") from error


def _of_loader(lease_state: str | bytes, loader: int) -> Any:
    try:
        return decode(msgspec.json.decode, lease_state)[str(loader)]["leases"]
    except (UnreadableError, KeyError, TypeError) as error:
        raise ModelError(f"Cannot resume the data: the checkpoint is damaged ({error}).") from error


def _kept(leases: Leases, pool: LeasePool) -> dict[str, Any]:
    return {"leases": leases.to_plain(pool), "tuning": None, "round": 0, "over": []}


def _begun(leases: Leases, plain: Any) -> dict[str, Any]:
    """The same place, with the epoch begun in which the workers draw next.

    A coordinator puts whoever enrols into the newest epoch that has begun: where nobody has drawn from the next one
    yet, that would be the one before.
    """
    pool = leases.from_plain(plain)
    for worker, epoch in pool.at.items():
        if epoch > pool.epoch:
            pool, lease = leases.take(pool, worker, 1, now_s=0.0)
            assert isinstance(lease, Lease)
            return leases.to_plain(leases.give_back(pool, worker, [lease.number]))
    return leases.to_plain(pool)
