"""Ray's references to tensors that travel through stores: who may make them, where they go, and what ends them."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.errors import NetworkError, ObjectError
from offbeat.integrations import ray_objects
from tests.integrations.ray_nodes import ray_nodes

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
transport: Any = pytest.importorskip("offbeat.integrations.ray_transport", reason="this Ray has no tensor transports")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

transport.register()  # `ray.method` asks for it
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


class Maker:
    """An actor that returns tensors."""

    def __init__(self) -> None:
        self.kept = torch.zeros(0)

    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="OFFBEAT")  # type: ignore[untyped-decorator]
    def one(self, count: int, value: float = 1.0) -> Tensor:
        self.kept = torch.full((count,), value)
        return self.kept

    @ray.method(tensor_transport="OFFBEAT")  # type: ignore[untyped-decorator]
    def tree(self) -> dict[str, Any]:
        return {
            "half": torch.arange(5, dtype=torch.bfloat16),
            "no": torch.empty(0, 3),
            "deep": [torch.tensor(True), torch.arange(6).reshape(2, 3).t()],
            "text": "as it is",
        }

    def change(self) -> None:
        self.kept.zero_()

    def put(self) -> list[Any]:
        return [ray.put(torch.full((1000,), 5.0), _tensor_transport="OFFBEAT")]

    def objects(self) -> int:
        """How many objects this node's store has."""
        with ray_objects.connect() as client:
            return len(client._access.status().objects)


class Taker:
    """An actor that takes them."""

    def total(self, *tensors: Tensor) -> float:
        return sum(tensor.sum().item() for tensor in tensors)

    def same(self, tree: dict[str, Any]) -> bool:
        flag, turned = tree["deep"]
        return bool(
            torch.equal(tree["half"], torch.arange(5, dtype=torch.bfloat16))
            and tree["no"].shape == (0, 3)
            and flag.item() is True
            and torch.equal(turned, torch.arange(6).reshape(2, 3).t())
            and tree["text"] == "as it is"
        )

    def scribble(self, tensor: Tensor) -> float:
        tensor.add_(1)
        return float(tensor.sum())

    def nested(self, references: list[Any]) -> float:
        return float(sum(tensor.sum().item() for tensor in ray.get(references)))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with ray_nodes(2):
        stores = ray_objects.start_stores(memory_mib=256)
        transport.register()
        transport.register()  # again: does nothing
        yield list(stores)
        ray_objects.stop_stores()


def made(kind: type, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(enable_tensor_transport=True)(kind)
    return actor.options(num_cpus=0, scheduling_strategy=where).remote()


@pytest.fixture(scope="module")
def maker(nodes: list[str]) -> Any:
    return made(Maker, nodes[0])


@pytest.fixture(scope="module")
def taker(nodes: list[str]) -> Any:
    return made(Taker, nodes[1])


def test_a_returned_tensor_reaches_an_actor_on_another_node(maker: Any, taker: Any) -> None:
    assert ray.get(taker.total.remote(maker.one.remote(1_000_000, 2.0))) == 2_000_000


def test_two_arguments_of_one_call(maker: Any, taker: Any) -> None:
    assert ray.get(taker.total.remote(maker.one.remote(100_000, 2.0), maker.one.remote(10, 1.0))) == 200_010


def test_a_tree_of_tensors_keeps_shapes_and_dtypes(maker: Any, taker: Any) -> None:
    assert ray.get(taker.same.remote(maker.tree.remote()))


def test_the_driver_gets_it(maker: Any) -> None:
    reference = maker.one.remote(300_000, 3.0)
    assert ray.get(reference).sum() == 900_000
    assert ray.get([reference, maker.one.remote(3)])[1].tolist() == [1.0] * 3


def test_ray_put_of_the_driver_and_of_an_actor(maker: Any, taker: Any) -> None:
    reference = ray.put(torch.full((50_000,), 2.0), _tensor_transport="OFFBEAT")
    assert ray.get(taker.total.remote(reference)) == 100_000
    (of_actor,) = ray.get(maker.put.remote())
    assert ray.get(taker.nested.remote([of_actor])) == 5000.0


def test_what_the_creator_changes_later_nobody_else_sees(maker: Any, taker: Any) -> None:
    reference = maker.one.remote(100_000, 2.0)
    ray.get(maker.change.remote())
    assert ray.get(taker.total.remote(reference)) == 200_000


def test_what_a_receiver_changes_nobody_else_sees(maker: Any, taker: Any) -> None:
    reference = maker.one.remote(100_000, 2.0)
    assert ray.get(taker.scribble.remote(reference)) == 300_000
    assert ray.get(taker.total.remote(reference)) == 200_000


def test_stores_let_go_of_it_with_the_last_reference(maker: Any) -> None:
    gc.collect()
    before = ray.get(maker.objects.remote())
    reference = maker.one.remote(100_000)
    ray.get(reference)
    assert ray.get(maker.objects.remote()) > before
    del reference
    gc.collect()
    until_s = time.monotonic() + 20
    while (now := ray.get(maker.objects.remote())) > before and time.monotonic() < until_s:
        time.sleep(0.1)
    assert now <= before


def test_the_driver_gets_it_after_its_creator_has_died(nodes: list[str]) -> None:
    mortal = made(Maker, nodes[0])
    reference = mortal.one.remote(100_000, 2.0)
    ray.wait([reference])
    assert ray.get(reference).sum() == 200_000
    os.kill(ray.get(mortal.pid.remote()), signal.SIGKILL)
    assert ray.get(reference).sum() == 200_000, "its bytes are in the store"


def test_a_lost_object_is_an_error_where_it_is_used(maker: Any, taker: Any) -> None:
    reference = maker.one.remote(100_000)
    ray.wait([reference])
    ray.get(reference)
    manager = ray._private.worker.global_worker.rdt_manager
    name = manager.get_rdt_metadata(reference.hex()).tensor_transport_meta.name
    before = ray.get(maker.objects.remote())
    with ray_objects.connect() as client:
        client.delete(name)
    until_s = time.monotonic() + 10
    while ray.get(maker.objects.remote()) >= before and time.monotonic() < until_s:
        time.sleep(0.05)
    with pytest.raises(ObjectError, match=r"(no store has it any more|was deleted|is lost)"):
        ray.get(taker.total.remote(reference), timeout=30)
    assert ray.get(taker.total.remote(maker.one.remote(10)), timeout=30) == 10, "the actor lives on"


def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(transport_name: str, devices: list[str], transport_manager_class: type) -> None:
        raise AssertionError

    monkeypatch.setattr(transport, "register_tensor_transport", older)
    with pytest.raises(NetworkError, match=r"takes transport_name, devices, transport_manager_class, and what it sh"):
        transport.register()
