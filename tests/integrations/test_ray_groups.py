"""Groups that are fitted by actors of a Ray cluster."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from offbeat.errors import NetworkError
from offbeat.groups import AdamW, Grid, GroupDataError, Linear, Net, ThisProcess
from offbeat.integrations.ray_groups import RayWorkers
from tests.groups.test_ranks import BUCKET, mlp, skewed, trainer_of
from tests.integrations.ray_nodes import ray_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cold,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2) as one:
        yield one


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("is_dataset", [False, True])
def test_actors_make_the_models_of_one_process(is_dataset: bool) -> None:
    import ray.data

    table, told = skewed(), list[tuple[int, int]]()
    alone = trainer_of(Linear(), executor=ThisProcess(BUCKET)).fit(table).records
    parts = [table.slice(number * 1_500, 1_500) for number in range(4)]
    trainer = trainer_of(Linear(), executor=RayWorkers(3, num_cpus=0.1, bucket_bytes=BUCKET))
    made = trainer.fit(ray.data.from_arrow(parts) if is_dataset else table, lambda *now: told.append(now)).records
    np.testing.assert_allclose(made.coefficients, alone.coefficients, rtol=1e-10)
    assert told[-1] == (60, 60)


@pytest.mark.usefixtures("cluster")
def test_nets_hop_between_actors() -> None:
    table = skewed()
    net = Net(mlp, optimizer=AdamW(lr=Grid(1e-2, 1e-3)), batch=64, epochs=3)
    alone = trainer_of(net, executor=ThisProcess(BUCKET)).fit(table).records
    made = trainer_of(net, executor=RayWorkers(3, num_cpus=0.1, bucket_bytes=BUCKET)).fit(table).records
    np.testing.assert_array_equal(made.coefficients[2:], alone.coefficients[2:])
    np.testing.assert_allclose(made.held_losses[:2], alone.held_losses[:2], rtol=0.3)


@pytest.mark.usefixtures("cluster")
def test_a_lost_actor_is_named_and_nothing_is_fitted_twice(tmp_path: Path) -> None:
    table, fuse = skewed(), tmp_path / "fuse"

    class Fatal(Linear):
        def fit(self, *given: Any) -> Any:
            with (tmp_path / "fits").open("a") as file:
                file.write(f"{len(given[0].hashes)}\n")
            if not fuse.exists() and len(given[0].hashes) > 1:
                fuse.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().fit(*given)

    trainer = trainer_of(Fatal(), executor=RayWorkers(2, num_cpus=0.1, bucket_bytes=8 << 10))
    with pytest.raises(NetworkError, match="Cannot fit without worker"):
        trainer.fit(table, folder=tmp_path / "kept")
    kept = len(list((tmp_path / "kept").glob("*.npz")))
    before = len((tmp_path / "fits").read_text().splitlines())
    made = trainer.fit(table, folder=tmp_path / "kept").records
    alone = trainer_of(Linear(), executor=ThisProcess(BUCKET)).fit(table).records
    np.testing.assert_allclose(made.coefficients, alone.coefficients, rtol=1e-10)
    after = len((tmp_path / "fits").read_text().splitlines()) - before
    left = len(list((tmp_path / "kept").glob("*.npz"))) - kept
    assert left - 2 <= after <= left, "two groups may be split, and are not fitted by `fit`"


def test_no_number_of_actors() -> None:
    with pytest.raises(GroupDataError, match="number of 1 or more"):
        RayWorkers(0)
