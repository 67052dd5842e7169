"""Collectives of Ray's actors on stores of objects: the same values as by Gloo's rules, whoever arrives late."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from offbeat.errors import ObjectTimeoutError
from offbeat.integrations import ray_objects
from tests.integrations.ray_nodes import ray_nodes

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
backend: Any = pytest.importorskip("offbeat.integrations.ray_collective", reason="this Ray takes no other backends")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
WORLD = 3


class Member:
    """One actor of a group."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def join(self, name: str, world: int = WORLD, timeout_s: float = 60.0) -> None:
        from ray.util import collective

        backend.register()
        backend.register()  # again: does nothing
        backend.ObjectGroup.timeout = timedelta(seconds=timeout_s)
        collective.init_collective_group(world, self.rank, backend="OFFBEAT", group_name=name)

    def leave(self, name: str) -> None:
        from ray.util import collective

        collective.destroy_collective_group(name)

    def all_of_them(self, name: str, size: int, late_s: float = 0.0) -> dict[str, list[float]]:
        from ray.util import collective as c
        from ray.util.collective.types import ReduceOp

        time.sleep(late_s * self.rank)
        told = {}
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            tensor = torch.full((size,), self.rank + 1.0)
            c.allreduce(tensor, name, op)
            told[f"allreduce {op.name}"] = tensor[[0, -1]].tolist()
        array = np.full(size, self.rank + 1.0, dtype=np.float32)
        c.allreduce(array, name)
        told["numpy"] = array[[0, -1]].tolist()
        tensor = torch.full((size,), self.rank + 1.0)
        c.reduce(tensor, 1, name)
        told["reduce"] = tensor[[0, -1]].tolist()
        tensor = torch.full((size,), self.rank + 1.0)
        c.broadcast(tensor, 2, name)
        told["broadcast"] = tensor[[0, -1]].tolist()
        gathered = [torch.zeros(size) for _ in range(WORLD)]
        c.allgather(gathered, torch.full((size,), self.rank + 1.0), name)
        told["allgather"] = [one[-1].item() for one in gathered]
        out = torch.zeros(size)
        c.reducescatter(out, [torch.full((size,), float(part + self.rank)) for part in range(WORLD)], name)
        told["reducescatter"] = out[[0, -1]].tolist()
        tensor = torch.full((size,), float(self.rank))
        if self.rank == 0:
            c.send(tensor, 1, name)
        elif self.rank == 1:
            c.recv(tensor, 0, name)
        told["recv"] = tensor[[0, -1]].tolist()
        c.barrier(name)
        return told

    def objects(self) -> list[str]:
        with ray_objects.connect() as client:
            return [str(one.name) for one in client._access.status().objects]

    def broadcasts(self, name: str, count: int) -> None:
        from ray.util import collective as c

        for _ in range(count):
            c.broadcast(torch.ones(2 << 20), 0, name)


@pytest.fixture(scope="module")
def members() -> Iterator[list[Any]]:
    with ray_nodes(2):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        stores = list(ray_objects.start_stores(memory_mib=256))
        where = [NodeAffinitySchedulingStrategy(stores[rank % 2], soft=False) for rank in range(WORLD)]
        kind = ray.remote(Member)
        yield [kind.options(num_cpus=0, scheduling_strategy=where[rank]).remote(rank) for rank in range(WORLD)]
        ray_objects.stop_stores()


def of_all(members: list[Any], method: str, *arguments: Any) -> list[Any]:
    return ray.get([getattr(one, method).remote(*arguments) for one in members])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "late_s"), [(4, 0.0), (300_000, 0.0), (100_000, 0.2)])
def test_each_collective_has_its_values(members: list[Any], size: int, late_s: float) -> None:
    name = f"values {size}"
    of_all(members, "join", name)
    for rank, told in enumerate(of_all(members, "all_of_them", name, size, late_s)):
        assert told.pop("reduce") == [6.0 if rank == 1 else rank + 1.0] * 2
        assert told.pop("reducescatter") == [3.0 * rank + 3.0] * 2
        assert told.pop("recv") == [2.0 if rank == 2 else 0.0] * 2
        assert told.pop("allgather") == [1.0, 2.0, 3.0]
        assert told == {
            "allreduce SUM": [6.0] * 2, "allreduce PRODUCT": [6.0] * 2, "allreduce MIN": [1.0] * 2,
            "allreduce MAX": [3.0] * 2, "numpy": [6.0] * 2, "broadcast": [3.0] * 2,
        }  # fmt: skip
    of_all(members, "leave", name)


def test_a_group_can_be_made_again_and_leaves_no_objects(members: list[Any]) -> None:
    for _ in range(2):
        of_all(members, "join", "again")
        of_all(members, "all_of_them", "again", 100_000)
        of_all(members, "leave", "again")
    until_s = time.monotonic() + 10
    while (left := ray.get(members[0].objects.remote())) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not left


def test_many_broadcasts_fit_in_a_small_store(members: list[Any]) -> None:
    of_all(members, "join", "many")
    of_all(members, "broadcasts", "many", 60)  # 480 MB by way of stores of 256 MiB
    of_all(members, "leave", "many")


def test_a_missing_member_is_named(members: list[Any]) -> None:
    with pytest.raises(ObjectTimeoutError, match=r"in group 'short' within 2 s, as rank 0 of 3: rank 1, 2 has not"):
        ray.get(members[0].join.remote("short", 3, 2.0))
