"""Stores on the nodes of a Ray cluster: they start, are found from everywhere, and leave nothing running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from offbeat.errors import NetworkError
from offbeat.integrations import ray_objects
from tests.integrations.ray_nodes import NODE, ray_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2) as one:
        yield one


@pytest.fixture
def stores(cluster: Any) -> dict[str, str]:
    return ray_objects.start_stores(memory_mib=64)


def serving() -> list[psutil.Process]:
    """The stores below Ray's actors that run on this machine."""
    return [one for one in psutil.process_iter(["cmdline"]) if ray_objects._CHILD in (one.info["cmdline"] or [])]


def on(node: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def put(name: str, value: float) -> str:
    with ray_objects.connect() as client:
        client.put(name, torch.full((100_000,), value))
    return str(ray.get_runtime_context().get_node_id())


def got(name: str) -> tuple[str, float]:
    with ray_objects.connect() as client:
        return ray.get_runtime_context().get_node_id(), client.get(name, timeout=20).sum().item()


def test_tasks_on_all_nodes_find_their_store(stores: dict[str, str]) -> None:
    assert len(set(stores.values())) == 2
    first, second = stores
    assert ray.get(ray.remote(put).options(**on(second)).remote("a", 2.0)) == second
    assert ray.get(ray.remote(got).options(**on(first)).remote("a")) == (first, 200_000.0)
    assert got("a") == (first, 200_000.0), "the driver, too"


def test_a_second_call_finds_the_stores_that_run(stores: dict[str, str]) -> None:
    processes = {one.pid for one in serving()}
    assert ray_objects.start_stores(memory_mib=64) == stores
    assert {one.pid for one in serving()} == processes
    with pytest.raises(NetworkError, match=r"those of job 'default' have 64 MiB, with directories=1. Call stop_stores"):
        ray_objects.start_stores(memory_mib=32)


def test_a_node_that_joins_later_gets_a_store_at_the_first_connect(cluster: Any, stores: dict[str, str]) -> None:
    put("early", 3.0)
    joined = cluster.add_node(**NODE)
    node = ray.get(ray.remote(got).options(**on(joined.node_id)).remote("early"))
    assert node == (joined.node_id, 300_000.0)
    assert len(serving()) == 3
    cluster.remove_node(joined)
    until_s = time.monotonic() + 10
    while len(serving()) > 2 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(serving()) == 2, "a store ends with its node"


def test_a_store_that_was_killed_starts_again_at_the_next_connect(stores: dict[str, str]) -> None:
    other = list(stores)[1]
    ray.get(ray.remote(put).options(**on(other)).remote("before", 1.0))
    (killed,) = (one for one in serving() if "--directory" not in one.cmdline())
    os.kill(killed.pid, signal.SIGKILL)
    while killed.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    ray.get(ray.remote(put).options(**on(other)).remote("after", 1.0))
    assert got("after")[1] == 100_000.0


def test_stop_stores_leaves_no_process(stores: dict[str, str]) -> None:
    assert len(serving()) == 2
    ray_objects.stop_stores()
    assert not serving()
    with pytest.raises(NetworkError, match=r"call start_stores\(\) in the driver first"):
        ray_objects.connect()
    ray_objects.stop_stores()


def test_two_nodes_can_keep_a_directory(cluster: Any) -> None:
    ray_objects.stop_stores()
    stores = ray_objects.start_stores(memory_mib=64, directories=2)
    try:
        assert sum("--directory" in one.cmdline() for one in serving()) == 2
        names = [f"object {number}" for number in range(8)]
        for name in names:
            put(name, 1.0)
        task = ray.remote(got).options(**on(list(stores)[1]))
        assert all(total == 100_000.0 for _, total in ray.get([task.remote(name) for name in names]))
    finally:
        ray_objects.stop_stores()
    with pytest.raises(NetworkError, match=r"Cannot keep 3 directories: one to 2 can be kept"):
        ray_objects.start_stores(directories=3)


def test_a_store_that_cannot_start_is_named_with_its_last_line(cluster: Any) -> None:
    with pytest.raises(NetworkError) as refused:
        ray_objects.start_stores(memory_mib=0, job="none")
    told = str(refused.value)
    assert re.match(r"Cannot start the store of objects on Ray node \w+: its last line was: Invalid value for", told)
    ray_objects.stop_stores(job="none")


def test_stores_end_with_the_cluster() -> None:
    script = (
        "import ray, logging; ray.init(address='local', include_dashboard=False, num_cpus=1, log_to_driver=False, "
        "logging_level=logging.ERROR, object_store_memory=100 << 20)\n"
        "from offbeat.integrations.ray_objects import start_stores\n"
        "print(start_stores(memory_mib=64)); ray.shutdown()"
    )
    before = {one.pid for one in serving()}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    until_s = time.monotonic() + 10
    while {one.pid for one in serving()} - before and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not {one.pid for one in serving()} - before


def test_without_ray_or_its_init_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from offbeat.integrations.ray_objects import connect, start_stores\n"
        "from offbeat.errors import NetworkError\n"
        "try: start_stores()\n"
        "except NetworkError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == (
        "Cannot use stores of objects on Ray: it is not installed. Run pip install 'offbeat[rdt]'.\n"
    )
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NetworkError, match=r"it is not initialised in this process. Call ray.init\(\) first"):
        ray_objects.connect()
