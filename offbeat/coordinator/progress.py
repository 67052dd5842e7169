"""The progress of a model's workers, as a snapshot keeps it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class TrainingProgress(msgspec.Struct, frozen=True):
    """The progress of the workers, as the shard that coordinates has it.

    Args:
        next: by worker: its first contribution that was neither in an update nor dropped.
        present: who took part, or was about to come back.
        orphans: contributions that had arrived whole, whose workers had gone, and that were in no update: worker,
            number, samples.
        records: by worker: contributions applied, dropped and lost, and samples applied.
        note: what happened to the server before.
        data: where the data is; see `offbeat.coordinator.data_leases`. With the first model only.
        validators: who came as one; unset if nobody did.
        done: who was done; unset if nobody was.
    """

    next: dict[int, _Count]
    present: tuple[_Count, ...]
    orphans: tuple[tuple[_Count, _Count, float], ...] = ()
    records: dict[int, tuple[_Count, _Count, _Count, float]] = {}
    note: str = ""
    data: dict[str, Any] = {}
    validators: tuple[_Count, ...] | msgspec.UnsetType = msgspec.UNSET
    done: tuple[_Count, ...] | msgspec.UnsetType = msgspec.UNSET
