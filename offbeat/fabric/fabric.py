"""A fabric carries payloads and adds them up.

`FabricSpec` is the frozen description in a plan; `bind` makes the `Fabric`, which has handles. Call order on a fabric:

1. (all ranks) `start` and `broadcast` in the same order on every rank, if `offers.ordered`
2. (each rank) `Pending.wait` until it says True, then `Pending.result`
3. (each rank) `close`

A fabric never decides how long to wait and never prints: the engine's one waiting primitive polls `Pending.wait`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat.payload import Gather, Payload, Sum

if TYPE_CHECKING:
    import torch

    from offbeat.pending import Pending


@dataclass(frozen=True)
class Offers:
    """What a fabric can do.

    Args:
        carries: kinds of payload.
        ordered: exchanges match by order of issue, so every rank must issue the same ones in the same order.
        exact: a sum of two workers has the bits of a float addition.
        served: a server holds the parameters; workers push contributions and pull parameters, so that any policy runs.
    """

    carries: frozenset[type] = frozenset({Sum, Gather})
    ordered: bool = True
    exact: bool = True
    served: bool = False


class Fabric(Protocol):
    """A bound fabric: one worker's end of it."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def offers(self) -> Offers: ...

    def start(self, payload: Payload) -> Pending:
        """Begin the exchange of `payload`; the payload's tensors belong to the fabric until it is done."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin overwriting `tensor` on every rank with that of rank `source`; the reply is a `Total` of it.

        Args:
            tensor: contiguous, of any dtype, not empty.
        """

    def close(self) -> None:
        """Release the handles; a second call does nothing. Only when nothing is under way on any rank."""

    def abandon(self) -> None:
        """Instead of `close`, when an exchange may be under way for ever: never wait for it, not even at exit."""


class FabricSpec(Protocol):
    """Describes a fabric in a plan. All but `ParameterServer` also have `bind(backend=...)`."""

    @property
    def offers(self) -> Offers: ...


@runtime_checkable
class Binds(Protocol):
    """A fabric that this worker's process can be bound to."""

    def bind(self, *, backend: str) -> Fabric:
        """This worker's end. Collective: every rank calls it.

        Args:
            backend: "gloo" or "nccl": where tensors are.
        """
