"""A fabric carries payloads and adds them up.

`FabricSpec` is the frozen description in a plan; `bind(context)` makes the `Fabric`, which has handles. What a fabric
can do is asked of what it `Offers`, never of its type. Call order on a fabric:

1. (all ranks) `start` and `broadcast` in the same order on every rank, if `offers.ordered`
2. (each rank) `Pending.wait` until it says True, then `Pending.result`
3. (each rank) `close`

A fabric never decides how long to wait and never prints: the engine's one waiting primitive polls `Pending.wait`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from offbeat.errors import PlanError
from offbeat.payload import Gather, Payload, Reply, Sum

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from offbeat.fabric.elastic_group import ElasticGroup
    from offbeat.fabric.generation import Reconnector
    from offbeat.fabric.switch_table import SwitchTable
    from offbeat.pending import Pending
    from offbeat.protocol.switch_control import Strategy
    from offbeat.server.launch import ShardSettings
    from offbeat.sync import Policy

_ASKED_OF_A_SERVER = ("addresses", "block_bytes", "patience_s", "collocated")


@dataclass(frozen=True)
class Offers:
    """The capabilities of a fabric.

    Args:
        carries: kinds of payload.
        ordered: exchanges match by order of issue, so every rank must issue the same ones in the same order.
        exact: a sum of two workers has the bits of a float addition; if not, only one that says so (`Sum.exact`).
        holds: who holds what all have in common. "workers" hold the parameters themselves, and each applies the same
            update. A "server" holds parameters and optimizer: workers push contributions and pull parameters, so that
            any policy runs. A "switch" holds sums, and the workers hold the rest: of gradients, made on the way, so
            that each worker sends its part once and receives the sum once; or of changes, for workers that go on by
            themselves.
        partial: a reply may be of some workers' contributions only; `Total.weight` says of how many.
        elastic: training goes on without a worker that is lost, and takes newcomers in.
        reduce_scatter: a sum can be made in two rounds, with other exchanges between them; see `ReduceScatters`.
    """

    carries: frozenset[type] = frozenset({Sum, Gather})
    ordered: bool = True
    exact: bool = True
    holds: Literal["workers", "server", "switch"] = "workers"
    partial: bool = False
    elastic: bool = False
    reduce_scatter: bool = False


@dataclass(frozen=True)
class BindContext:
    """The context of a worker's process for a fabric that is bound; the default is that of a worker that is alone.

    Args:
        rank, world: worker `rank` of the `world` that the job begins with; a newcomer's rank is beyond those.
        backend: "gloo" or "nccl": where the tensors are.
        group: the workers that take part, if the fabric is `elastic`: one for all fabrics of a worker.
        settings: how to prove who this worker is, to whatever the fabric connects with.
        switch: "host:port" of the switch that the launcher names; "" for none.
        timeout: how long the others, and what the fabric connects with, are waited for.
        sync: the policy that the job begins with, for a fabric that carries it out; None for one that waits for all.
        topology: a file that says which links connect the workers; None if they are to find that out.
    """

    rank: int = 0
    world: int = 1
    backend: str = "gloo"
    group: ElasticGroup | None = None
    settings: ShardSettings | None = None
    switch: str = ""
    timeout: timedelta = timedelta(seconds=20)
    sync: Policy | None = None
    topology: Path | None = None


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
        """Let go instead of `close`, when an exchange may never end: do not wait for it, not even at exit."""


class Scattered(Protocol):
    """The first round of a sum in two, under way. A `Pending` whose result says nothing."""

    @property
    def sent_bytes(self) -> int: ...

    def wait(self, timeout: timedelta) -> bool: ...

    def done(self) -> bool: ...

    def result(self) -> Reply: ...

    def all_gather(self) -> Pending:
        """Begin the second round, once the first was waited for; the reply is that to the `Sum`."""


@runtime_checkable
class ReduceScatters(Protocol):
    """A bound fabric that makes sums in two rounds too: a reduce-scatter, after which each worker has the sum of a part
    of the tensor, and an all-gather of these parts, each of which sends half of what an all-reduce does.
    """

    def reduce_scatter(self, payload: Sum) -> Scattered:
        """Begin a sum's first round; as `Fabric.start`, but the tensors stay as they are until the second is done."""


@runtime_checkable
class HoldsTables(Protocol):
    """A bound fabric on which workers can go on at their own pace: a switch keeps the sum of their changes."""

    def open_table(self, number: int, size: int, strategy: Strategy, exponent: int) -> SwitchTable:
        """Join one model's table; nobody may push before all have.

        Args:
            number: of the model.
            size: values of the table.
            strategy: who may go on when.
            exponent: the sum of changes has to stay below 2**exponent.

        Raises:
            PlanError: if the switch has no room.
            NetworkError: if it is gone.
        """


@runtime_checkable
class SumsSome(Protocol):
    """A bound fabric whose sums may be of the first `Strategy.quorum` workers; sums without a tail are of all."""

    def set_strategy(self, strategy: Strategy) -> None:
        """Have sums be made by another policy. All call it between two exchanges, and confer before the next one.

        Raises:
            PlanError: if it cannot carry that out.
            NetworkError: if it is gone.
        """


@runtime_checkable
class Reroutes(Protocol):
    """A bound fabric whose exchanges can go by other paths when links change."""

    def wants_reroute(self) -> bool:
        """Whether that seems to be so; asked behind each step."""

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        """Find out, and go by other paths if it is. Collective, with no exchange under way.

        Args:
            meet: tells the others a text, and returns what all say, in the order of ranks.

        Returns:
            What has changed, for people; "" if nothing has.

        Raises:
            DisagreementError: if others would go by other paths.
        """


@runtime_checkable
class Reconnects(Protocol):
    """The Protocol of a fabric in a plan that an elastic one may stand on."""

    def reconnector(self, context: BindContext) -> Reconnector:
        """Make what connects this worker in each generation.

        Raises:
            PlanError: if it cannot carry what this process has.
        """


class FabricSpec(Protocol):
    """The Protocol of a fabric in a plan; with a server it is also `Served`, else it `Binds`."""

    @property
    def offers(self) -> Offers: ...


@runtime_checkable
class Binds(Protocol):
    """A fabric that this worker's process can be bound to."""

    def bind(self, context: BindContext) -> Fabric:
        """Make this worker's end. Collective: every rank calls it.

        Raises:
            PlanError: if it cannot carry what this process has.
        """


@runtime_checkable
class Served(Protocol):
    """A fabric whose shards hold parameters and optimizer; `ParameterServer` says what the values may be."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The "host:port" of each shard that is there already."""

    @property
    def block_bytes(self) -> int:
        """The size of the largest block of parameters."""

    @property
    def patience_s(self) -> float:
        """The time for which a worker dials a server that is gone."""

    @property
    def collocated(self) -> bool:
        """Whether a shard is started beside every worker."""


def check_spec(spec: FabricSpec) -> None:
    """Check that a fabric can be bound, or its server reached.

    Raises:
        PlanError: with what is missing, or has to be changed.
    """
    if spec.offers.holds == "server":
        if not isinstance(spec, Served):
            lacking = ", ".join(name for name in _ASKED_OF_A_SERVER if not hasattr(spec, name))
            raise PlanError(
                f'Cannot reach the server of {spec!r}: it offers holds="server", but has no {lacking}; give it what '
                'ParameterServer() has, or have it offer holds="workers" and a bind(context) - at `plan.fabric`.'
            )
        return
    if not isinstance(spec, Binds):
        raise PlanError(
            f"Cannot run over {spec!r}: it has no bind(context), which returns this worker's end - at `plan.fabric`."
        )
    if "backend" in inspect.signature(spec.bind).parameters:
        raise PlanError(
            f"Cannot run over {spec!r}: its bind takes backend, but a fabric is given one BindContext now; write "
            "bind(self, context), and read context.backend - at `plan.fabric`."
        )
