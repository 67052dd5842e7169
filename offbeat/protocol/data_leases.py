"""Messages about data between workers and the coordinator: who computes which samples next.

worker                                              coordinator
  | -- RegisterLoader(loader, samples, batch, ...) --> |   once per loader
  | <----- LeaseGrants(loader, deals) ---------------- |   the first leases, and one with each release; to a worker that
  |                                                    |   comes back also which of those it has are void
  | -- RequestLease(loader) -------------------------> |   one more: it used several for one contribution
  | -- ReturnLease(loader, numbers) -----------------> |   leases it will not use
  | -- MemoryExhausted(loader, count) ---------------> |   it had no memory for so many
  | -- GetDataState(number) -------------------------> |   where the data is, for a checkpoint
  | <----- DataState(number) + place ----------------- |
  | -- SetDataState(number) + place -----------------> |   the same back; everybody is dealt to afresh. Then DataState
  |                                                    |   without it

Which leases a contribution was computed from stands in its `ContributionInfo`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.batching import EndOfEpoch, Lease, PositionRange
from offbeat.errors import PeerError

_Loader = Annotated[int, msgspec.Meta(ge=0, lt=256)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]

MOST_USED = 1 << 12  # leases, for one contribution
Used = Annotated[tuple[tuple[_Loader, _Number], ...], msgspec.Meta(max_length=MOST_USED)]
"""Leases, by loader and number."""


class RegisterLoader(msgspec.Struct, tag="Enrol", frozen=True, kw_only=True):
    """A worker takes part in a loader's data. It stands in checkpoints and snapshots, so its tag stays.

    Args:
        plan: as TOML; the tuning of batches stands in it.
        world: how many workers the job begins with.
        samples, seed, shuffle, drop_last: as of `offbeat.batching.Leases`.
        batch: samples of a batch, if batches are not tuned.
        least: samples of any batch, as of `offbeat.batching.Leases.take`.
        ahead: leases that it is to hold, so that it can load ahead.
        epoch: it is in; as `holds` of a worker that comes back.
        holds: numbers of leases that it has from before.
    """

    loader: _Loader
    plan: _Text
    world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    seed: _Number
    shuffle: bool
    drop_last: bool
    batch: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    least: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    ahead: Annotated[int, msgspec.Meta(ge=1, le=1 << 12)] = 1
    epoch: _Place = 0
    holds: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=1 << 12)] = ()


class RequestLease(msgspec.Struct, tag=True, frozen=True):
    loader: _Loader


class ReturnLease(msgspec.Struct, tag=True, frozen=True):
    loader: _Loader
    numbers: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=1 << 12)]


class MemoryExhausted(msgspec.Struct, tag=True, frozen=True):
    """The worker had no memory for a batch of `count` samples."""

    loader: _Loader
    count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class GetDataState(msgspec.Struct, tag=True, frozen=True):
    number: _Number


class DataState(msgspec.Struct, tag=True, frozen=True):
    """The body is the place in the data of all loaders, as JSON; in answer to `SetDataState` nothing.

    Args:
        refused: why a `SetDataState` cannot be.
    """

    number: _Number
    refused: _Text = ""


class SetDataState(msgspec.Struct, tag=True, frozen=True):
    """The body is what `DataState` had."""

    number: _Number


class Deal(msgspec.Struct, frozen=True, array_like=True):
    """A lease; the end of `epoch` if it has no pieces."""

    number: _Number
    epoch: _Place
    pieces: tuple[tuple[_Place, _Place, _Place], ...] = ()


class LeaseGrants(msgspec.Struct, tag=True, frozen=True):
    """The leases that a worker computes next, in this order.

    Args:
        afresh: whatever it has from before is void.
        void: numbers of leases that it had from before, and others have been given.
    """

    loader: _Loader
    deals: tuple[Deal, ...]
    afresh: bool = False
    void: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=1 << 12)] = ()


FromData = RegisterLoader | RequestLease | ReturnLease | MemoryExhausted | GetDataState | SetDataState
ToData = LeaseGrants | DataState


def lease_grants(loader: int, deal: Lease | EndOfEpoch) -> LeaseGrants:
    """Make the message of one deal: a lease may have many pieces, and a frame's metadata has a bound."""
    number, pieces = (deal.number, deal.pieces) if isinstance(deal, Lease) else (0, ())
    return LeaseGrants(loader, (Deal(number, deal.epoch, pieces),))


def leases_of(message: LeaseGrants, samples: int) -> list[Lease | EndOfEpoch]:
    """Read the leases of a message.

    Args:
        samples: of the dataset.

    Raises:
        PeerError: if there are no such samples.
    """
    if any(not start < stop <= samples for deal in message.deals for _, start, stop in deal.pieces):
        raise PeerError(f"The server leases samples that are not among the {samples} of the dataset.")
    return [
        Lease(deal.number, deal.epoch, tuple(PositionRange(*piece) for piece in deal.pieces))
        if deal.pieces
        else EndOfEpoch(deal.epoch)
        for deal in message.deals
    ]
