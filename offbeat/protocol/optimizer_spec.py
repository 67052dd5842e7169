"""An optimizer without its state, and the hyper-parameters that travel with each contribution."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from offbeat.errors import PeerError, PlanError
from offbeat.sync import OuterSGD

if TYPE_CHECKING:
    from collections.abc import Sequence

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Number = float | int | bool | None
Value = Number | Annotated[tuple[Number, ...], msgspec.Meta(max_length=8)]
Hyper = Annotated[dict[Annotated[str, msgspec.Meta(max_length=64)], Value], msgspec.Meta(max_length=32)]


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer without its state.

    Args:
        kind: a class of `torch.optim`.
        groups: hyper-parameters of each group.
        members: names of the parameters in each group.
    """

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    groups: Annotated[tuple[Hyper, ...], msgspec.Meta(max_length=10_000)]
    members: Annotated[tuple[tuple[Name, ...], ...], msgspec.Meta(max_length=10_000)]


def outer_hyper(outer: OuterSGD | None) -> tuple[Hyper, ...]:
    """Write how mean changes are applied as hyper-parameters of one group; empty for a plain average."""
    return ({} if outer is None else dict(dataclasses.asdict(outer)),)


def outer_of(groups: Sequence[Hyper]) -> OuterSGD | None:
    """Read what `outer_hyper` wrote.

    Raises:
        PeerError: if it is not that.
    """
    if len(groups) != 1:
        raise PeerError(f"Cannot apply a change with hyper-parameters of {len(groups)} groups: it has one.")
    values: Any = groups[0]
    try:
        return OuterSGD(**values) if values else None
    except (TypeError, PlanError) as error:
        raise PeerError(f"Cannot apply a change with {values!r}: {error}") from error
