"""A Ray cluster of a few nodes on this machine, kept up for the tests of one file."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIES = 3  # it starts badly on a busy machine
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
NODE = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}


@contextmanager
def ray_nodes(count: int = 2) -> Iterator[Any]:
    """Start a cluster, with this process as its driver on the first node; its `Cluster`."""
    import ray
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**VARIABLES, "RAY_TMPDIR": folder}.items():  # nobody else finds it by its address file
            patch.setenv(name, value)
        cluster = _started(Cluster, count)
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _started(kind: Any, count: int) -> Any:
    for tries in range(TRIES):
        cluster = kind(shutdown_at_exit=False)
        try:
            for _ in range(count):
                cluster.add_node(**NODE)
        except Exception:
            cluster.shutdown()
            if tries == TRIES - 1:
                raise
            time.sleep(1.0)
        else:
            return cluster
    raise AssertionError
