"""`ray.util.collective` on offbeat's stores: backend "OFFBEAT".

    start_stores()
    ray_collective.register()                    # in the driver and in each actor, before a group is made
    collective.init_collective_group(world, rank, backend="OFFBEAT", group_name="default")
    collective.allreduce(tensor)

Members need not arrive together: early tensors are summed while late ones are awaited. What a member gives is an object
with a numbered name, which its stores let go of once every member has gone further. A group is static, as in Ray, and
does not outlive the loss of a member: calls of the others end after `ObjectGroup.timeout` with the missing ranks.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import DisagreementError, NetworkError, ObjectError, ObjectTimeoutError
from offbeat.integrations import ray_objects
from offbeat.objects.progress import NOBODY

try:
    import ray
    from ray.util.collective import types
    from ray.util.collective.backend_registry import register_collective_backend
    from ray.util.collective.collective_group.base_collective_group import BaseGroup
except ImportError as error:
    raise ImportError(
        f"Cannot use stores of objects for ray.util.collective: {error}. Run pip install 'offbeat[rdt]', which "
        "installs a Ray that takes other backends."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from offbeat.protocol.objects import ReduceOp

NAME = "OFFBEAT"
_METHODS = {
    "check_backend_availability", "allreduce", "barrier", "reduce", "allgather", "broadcast", "reducescatter", "send",
    "recv",
}  # fmt: skip
_OPS: dict[Any, ReduceOp] = {
    types.ReduceOp.SUM: "sum",
    types.ReduceOp.PRODUCT: "prod",
    types.ReduceOp.MIN: "min",
    types.ReduceOp.MAX: "max",
}
_MOST_BYTES = 64 << 20  # of a member's tensors since all were known to have gone further
_LOOK_S = 1.0


def register() -> None:
    """Have Ray know the backend "OFFBEAT" in this process; a second call does nothing.

    Raises:
        NetworkError: if groups of this Ray have other methods; says which.
    """
    if differing := sorted(BaseGroup.__abstractmethods__ ^ _METHODS):
        raise NetworkError(
            f"Cannot register the backend {NAME}: groups of this Ray differ in {', '.join(differing)}. Run pip install "
            "'offbeat[rdt]'."
        )
    try:
        register_collective_backend(NAME, ObjectGroup)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


class ObjectGroup(BaseGroup):  # type: ignore[misc]
    """One member of a group; Ray makes it in each actor. Waits for all members to be there.

    Args:
        world_size: how many members there are.
        rank: of this one.
        group_name: of the group.

    Raises:
        NetworkError: if there is no store.
        ObjectTimeoutError: if members are missing.
    """

    timeout = timedelta(minutes=5)
    """For how long a call waits for the others."""
    deterministic = True
    """Whether sums are made in the order of ranks, so that they have the same bits each time."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        registry = ray_objects.registry_of("default")
        self._client = ray_objects.connect()
        number = ray.get(registry.join_group.remote(group_name, world_size, rank))
        self._prefix = f"collective/{group_name}/{number}"
        self._calls = 0
        self._between: dict[tuple[int, int], int] = {}  # tensors sent from one rank to another
        self._given: list[str] = []  # names of objects that may still be needed
        self._given_bytes = 0
        self.barrier()

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        """Let go of this member's objects."""
        for name in self._given:
            self._client.delete(name)
        self._client.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        (mine,) = _tensors(tensor)
        self._allreduce(mine, _OPS[allreduce_options.reduceOp], "allreduce")

    def barrier(self, barrier_options: Any = None) -> None:
        self._allreduce(torch.zeros(1, dtype=torch.int64), "sum", "pass a barrier")

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        options = reduce_options or types.ReduceOptions()
        (mine,) = _tensors(tensor)
        call = self._begin()
        self._give(f"{call}/{self.rank}", mine)
        if self.rank == options.root_rank:
            self._sum_into(mine, f"{call}/sum", [f"{call}/{one}" for one in range(self.world_size)],
                           _OPS[options.reduceOp], "reduce")  # fmt: skip
        self._end(mine)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        options = broadcast_options or types.BroadcastOptions()
        (mine,) = _tensors(tensor)
        call = self._begin()
        if self.rank == options.root_rank:
            self._give(f"{call}/{self.rank}", mine)
        else:
            self._take(mine, f"{call}/{options.root_rank}", "broadcast", [options.root_rank])
        self._end(mine)

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        (mine,) = _tensors(tensor)
        call = self._begin()
        before = list(self._given)
        self._give(f"{call}/{self.rank}", mine)
        for rank, into in enumerate(_tensors(tensor_list[0])):
            self._take(into, f"{call}/{rank}", "allgather", [rank])
        self._let_go(before, mine)

    def reducescatter(
        self, output_tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        options = reducescatter_options or types.ReduceScatterOptions()
        (out,) = _tensors(output_tensor)
        call = self._begin()
        before = list(self._given)
        for part, mine in enumerate(_tensors(tensor_list[0])):
            self._give(f"{call}/{part}/{self.rank}", mine)
        sources = [f"{call}/{self.rank}/{one}" for one in range(self.world_size)]
        self._sum_into(out, f"{call}/{self.rank}/sum", sources, _OPS[options.reduceOp], "reducescatter")
        self._let_go(before, *_tensors(tensor_list[0]))

    def send(self, tensor: list[Any], send_options: Any) -> None:
        (mine,) = _tensors(tensor)
        name = self._next(self.rank, send_options.dst_rank)
        self._client.put(self._whole(name), mine, timeout=self.timeout.total_seconds())

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        (mine,) = _tensors(tensor)
        name = self._next(recv_options.src_rank, self.rank)
        self._take(mine, name, "recv", [recv_options.src_rank])
        self._client.delete(self._whole(name))

    # -- objects -------------------------------------------------------------------------------------------------

    def _allreduce(self, mine: Tensor, op: ReduceOp, what: str) -> None:
        call = self._begin()
        before = list(self._given)
        self._give(f"{call}/{self.rank}", mine)
        sources = [f"{call}/{one}" for one in range(self.world_size)]
        target = f"{call}/sum"
        with self._naming(what, sources):
            total = self._client.allreduce(
                self._whole(target),
                [self._whole(source) for source in sources],
                op=op,
                deterministic=self.deterministic,
                timeout=self.timeout.total_seconds(),
            )
        mine.copy_(total)
        if self.rank == 0:
            self._given.append(self._whole(target))
        self._let_go(before, mine)

    def _sum_into(self, out: Tensor, target: str, sources: list[str], op: ReduceOp, what: str) -> None:
        self._client.reduce(
            self._whole(target), [self._whole(one) for one in sources], op=op, deterministic=self.deterministic
        )
        self._take(out, target, what, range(self.world_size), sources)
        self._client.delete(self._whole(target))

    def _take(self, into: Tensor, name: str, what: str, ranks: Sequence[int], sources: Sequence[str] = ()) -> None:
        with self._naming(what, sources or [name], ranks):
            found = self._client.get(self._whole(name), timeout=self.timeout.total_seconds())
        if found.shape != into.shape or found.dtype != into.dtype:
            raise DisagreementError(
                f"Cannot {what} in group {self.group_name!r}: rank {self.rank} has a tensor of {tuple(into.shape)} "
                f"{into.dtype}, and what it gets is of {tuple(found.shape)} {found.dtype}."
            )
        into.copy_(found)

    def _give(self, name: str, tensor: Tensor) -> None:
        whole = self._whole(name)
        self._client.put(whole, tensor, timeout=self.timeout.total_seconds())
        self._given.append(whole)

    @contextlib.contextmanager
    def _naming(self, what: str, sources: Sequence[str], ranks: Sequence[int] | None = None) -> Any:
        try:
            yield
        except ObjectTimeoutError as error:
            missing = [
                str(rank)
                for rank, source in zip(ranks or range(self.world_size), sources, strict=True)
                if self._is_missing(source)
            ]
            who = f"rank {', '.join(missing)} has not given a tensor" if missing else str(error)
            raise ObjectTimeoutError(
                f"Cannot {what} in group {self.group_name!r} within {self.timeout.total_seconds():g} s, as rank "
                f"{self.rank} of {self.world_size}: {who}."
            ) from error
        except ObjectError as error:
            raise ObjectError(f"Cannot {what} in group {self.group_name!r} as rank {self.rank}: {error}") from error

    def _is_missing(self, name: str) -> bool:
        future = self._client.start_get(self._whole(name))
        until_s = time.monotonic() + _LOOK_S
        while time.monotonic() < until_s and not future.wait(timedelta(seconds=0.05)):
            if future.progress and future.progress != NOBODY:
                break
        is_missing = not future.done() and future.progress in ("", NOBODY)
        future.stop()
        return is_missing

    # -- numbers -------------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        self._calls += 1
        return self._calls

    def _end(self, *tensors: Tensor) -> None:
        """End a call that says nothing of the others; now and then, wait for all of them."""
        self._given_bytes += sum(tensor.nbytes for tensor in tensors) + 4096
        if self._given_bytes > _MOST_BYTES:
            self.barrier()

    def _let_go(self, before: list[str], *tensors: Tensor) -> None:
        """End a call to which all have given something: nobody needs what was given `before` it."""
        for name in before:
            self._given.remove(name)
            self._client.delete(name)
        self._given_bytes = sum(tensor.nbytes for tensor in tensors)

    def _next(self, source: int, destination: int) -> str:
        number = self._between[source, destination] = self._between.get((source, destination), 0) + 1
        return f"{source}-{destination}/{number}"

    def _whole(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _tensors(given: Sequence[Any]) -> list[Tensor]:
    return [one if isinstance(one, torch.Tensor) else torch.from_numpy(one) for one in given]
