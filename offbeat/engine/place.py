"""The place in leased data: as a server's coordinator keeps it, as workers without one do, and from one to the other.

    at the coordinator      of all loaders, as JSON: what `Client.books` gives and `Client.restock` takes
    among the workers       of one loader: what `AgreedSource.state_dict` gives and `load_state_dict` takes

Either way each sample of each epoch is used, leased, or still to be leased; going over changes nothing about that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.pacing import Lease

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.fabric.server import Enrol
    from offbeat.pacing import Leases


def for_workers(books: str, loader: int, leases: Leases) -> dict[str, Any]:
    """What one loader's `AgreedSource` goes on from.

    Args:
        books: the coordinator's, when all workers have given back what they have not drawn. What they hold then is in
            gradients that they have, and counts as used.
        leases: how the dataset is dealt out.

    Raises:
        ModelError: if that is damaged, or of other data.
    """
    pool = leases.from_plain(msgspec.json.decode(books)[str(loader)]["leases"])
    pool, _ = leases.acknowledge(pool, tuple(pool.held))
    return {"leases": leases.to_plain(pool), "tuning": None, "round": 0, "over": []}


def for_coordinator(places: Mapping[int, tuple[Enrol, Leases, Mapping[str, Any]]]) -> bytes:
    """What the coordinator goes on from.

    Args:
        places: of each loader what is said of it, how it is dealt out, and what its `AgreedSource` has kept at the
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


def _begun(leases: Leases, plain: Any) -> dict[str, Any]:
    """The same place, with the epoch begun that workers are in: who enrols is put into the newest one."""
    pool = leases.from_plain(plain)
    for worker, epoch in pool.at.items():
        if epoch > pool.epoch:
            pool, lease = leases.take(pool, worker, 1, now_s=0.0)
            assert isinstance(lease, Lease)
            return leases.to_plain(leases.give_back(pool, worker, [lease.number]))
    return leases.to_plain(pool)
