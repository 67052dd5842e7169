"""Object operations on Ray: as its users write them, with a driver that doubles the holders, by references to tensors
(RDT) over Gloo, and by ray.util.collective on Gloo. An actor on each host, and a driver on the first.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import ray
import torch

from offbeat.lab.object_load import OPS, digest_of, numbers
from offbeat.lab.ray_cluster import resource

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


class RayMember:
    """The part of one host. It reads numpy arrays, which Ray maps without a copy."""

    def __init__(self, rank: int) -> None:
        warnings.simplefilter("ignore")  # arrays that Ray maps are read-only
        torch.set_num_threads(1)
        self._rank = rank
        self._mine = self._result = torch.empty(0)
        self._read_s = 0.0

    def make(self, size_bytes: int) -> None:
        """Have what this host gives, outside of the store."""
        if self._mine.nbytes != size_bytes:
            self._mine = numbers(size_bytes, self._rank)

    def put(self) -> list[Any]:
        """Put it; a reference in a list, which Ray does not follow."""
        return [ray.put(self._mine.numpy())]

    def read(self, refs: list[Any]) -> None:
        """Read an object."""
        self._keep(torch.from_numpy(ray.get(refs[0])))

    def add(self, refs: list[Any], gives: bool) -> np.ndarray[Any, Any] | None:
        """Add objects as they arrive; the sum is given back to Ray's store if others need it."""
        total, waiting = None, list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            array = ray.get(ready[0])
            total = array.copy() if total is None else total.__iadd__(array)
        assert total is not None
        self._keep(torch.from_numpy(total))
        return total if gives else None

    def _keep(self, result: torch.Tensor) -> None:
        result[-1].item()
        self._read_s, self._result = time.monotonic(), result

    def read_s(self) -> float:
        """The moment at which the last element of a result was read here."""
        return self._read_s

    def digest(self) -> str:
        """The digest of the result."""
        return digest_of(self._result)

    def clean(self) -> None:
        """Let go of it."""
        self._result = torch.empty(0)

    def join(self, world: int) -> None:
        """Join a static group on Gloo."""
        from ray.util import collective

        collective.init_collective_group(world, self._rank, backend="gloo", group_name="members")

    def prepare(self, op: str) -> None:
        """Have a tensor that may be changed, as a collective does."""
        self._result = self._mine.clone() if op != "broadcast" or self._rank == 0 else torch.zeros_like(self._mine)

    def collective(self, op: str) -> None:
        """Carry an operation out with the others."""
        from ray.util import collective

        if op == "broadcast":
            collective.broadcast(self._result, src_rank=0, group_name="members")
        elif op == "reduce":
            collective.reduce(self._result, dst_rank=0, group_name="members")
        else:
            collective.allreduce(self._result, group_name="members")
        self._keep(self._result)


class RayTensorMember(RayMember):
    """The part of one host where Ray moves tensors by reference."""

    @ray.method(tensor_transport="gloo")  # type: ignore[untyped-decorator]
    def give(self) -> torch.Tensor:
        """Return the tensor that this host gives, by reference."""
        return self._mine

    def take(self, tensor: torch.Tensor) -> None:
        """Use a tensor that has come by reference."""
        self._keep(tensor)

    def total(self, *tensors: torch.Tensor) -> None:
        """Add tensors that have come by reference."""
        self._keep(_total(tensors))

    @ray.method(tensor_transport="gloo")  # type: ignore[untyped-decorator]
    def give_total(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Add tensors that have come by reference, and give the sum on."""
        self._keep(_total(tensors))
        return self._result


def _total(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


class RayObjects:
    """Plain Ray: a driver hands references to the actors."""

    ops: tuple[str, ...] = OPS

    def __init__(self, world: int, member: type[RayMember] = RayMember) -> None:
        actor = ray.remote(num_cpus=0, enable_tensor_transport=member is not RayMember)(member)
        self._members = [actor.options(resources={resource(rank): 1}).remote(rank) for rank in range(world)]
        self._refs: list[Any] = []
        self._all("read_s")

    def prepare(self, op: str, size_bytes: int) -> None:
        self._all("make", size_bytes)
        self._refs = [ray.get(one.put.remote())[0] for one in self._members[: 1 if op == "broadcast" else None]]

    def run(self, op: str) -> float:
        if op == "broadcast":
            self._spread(self._refs[0])
        else:
            total = self._sum(gives=op == "allreduce")
            if op == "allreduce":
                self._spread(total)
            else:
                ray.get(total)
        return self._ended_s(op)

    def _sum(self, *, gives: bool) -> Any:
        return self._members[0].add.remote(self._refs, gives)

    def _spread(self, ref: Any) -> None:
        ray.get([one.read.remote([ref]) for one in self._members[1:]])

    def _ended_s(self, op: str) -> float:
        return max(map(float, ray.get([one.read_s.remote() for one in self._readers(op)])))

    def _readers(self, op: str) -> list[Any]:
        return {"broadcast": self._members[1:], "reduce": self._members[:1], "allreduce": self._members}[op]

    def digests(self, op: str) -> list[str]:
        return list(ray.get([one.digest.remote() for one in self._readers(op)]))

    def clean(self) -> None:
        self._refs = []
        self._all("clean")

    def close(self) -> None:
        for one in self._members:
            ray.kill(one)

    def _all(self, method: str, *arguments: Any) -> None:
        ray.get([getattr(one, method).remote(*arguments) for one in self._members])


class RayWaves(RayObjects):
    """Plain Ray with a driver that doubles the holders, and has partial sums made by pairs of hosts."""

    def _sum(self, *, gives: bool) -> Any:
        partial = list(zip(self._members, self._refs, strict=True))
        while len(partial) > 1:
            pairs = [partial[at : at + 2] for at in range(0, len(partial), 2)]
            is_last = len(pairs) == 1
            partial = [
                (pair[0][0], pair[0][0].add.remote([ref for _, ref in pair], gives or not is_last))
                if len(pair) == 2
                else pair[0]
                for pair in pairs
            ]
        return partial[0][1]

    def _spread(self, ref: Any) -> None:
        holders, waiting = 1, self._members[1:]
        while waiting:
            ray.get([one.read.remote([ref]) for one in waiting[:holders]])
            holders, waiting = 2 * holders, waiting[holders:]


class RayTransport(RayObjects):
    """References to tensors that Ray moves by Gloo (RDT)."""

    def __init__(self, world: int) -> None:
        from ray.experimental.collective import create_collective_group

        super().__init__(world, RayTensorMember)
        create_collective_group(self._members, backend="gloo")

    def prepare(self, op: str, size_bytes: int) -> None:
        self._all("make", size_bytes)
        self._refs = [one.give.remote() for one in self._members[: 1 if op == "broadcast" else None]]
        self._all("read_s")  # once they have given it

    def run(self, op: str) -> float:
        first, *others = self._members
        if op == "broadcast":
            ray.get([one.take.remote(self._refs[0]) for one in others])
        elif op == "reduce":
            ray.get(first.total.remote(*self._refs))
        else:
            total = first.give_total.remote(*self._refs)
            ray.get([one.take.remote(total) for one in others])
            del total
        return self._ended_s(op)


class RayCollective(RayObjects):
    """ray.util.collective on Gloo: a static group of actors."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self._all("join", world)

    def prepare(self, op: str, size_bytes: int) -> None:
        self._all("make", size_bytes)
        self._all("prepare", op)

    def run(self, op: str) -> float:
        self._all("collective", op)
        return self._ended_s(op)


DRIVERS: dict[str, Callable[[int], RayObjects]] = {
    "ray": RayObjects,
    "ray, waves": RayWaves,
    "ray, RDT": RayTransport,
    "ray collective": RayCollective,
}
