"""Weights from a trainer to readers that come and go, on Ray: each version is a tensor in offbeat's stores.

python examples/ray_weights.py --versions 5
"""

import argparse

import ray
import torch

from offbeat.integrations import ray_objects

SIZE = 1_000_000


@ray.remote(num_cpus=0)
class Trainer:
    """Publish a new version of the weights at each step."""

    def __init__(self) -> None:
        self.client = ray_objects.connect()
        self.weights = torch.zeros(SIZE)

    def step(self, version: int) -> None:
        self.weights += 1
        self.client.put("weights", self.weights, version=version)
        if version > 2:
            self.client.delete("weights", version=version - 2)  # readers that have mapped it keep it


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def read(version: int) -> float:
    """Use one version, in a task that knows nobody."""
    with ray_objects.connect() as client:
        return client.get("weights", version=version, timeout=60).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--readers", type=int, default=3)
    asked = parser.parse_args()
    ray.init(include_dashboard=False)
    ray_objects.start_stores(memory_mib=256)
    trainer = Trainer.remote()  # type: ignore[attr-defined]
    for version in range(1, asked.versions + 1):
        readers = [read.remote(version) for _ in range(asked.readers)]  # they may come before the weights do
        ray.get(trainer.step.remote(version))
        print(f"version {version}: {asked.readers} readers have a mean of {ray.get(readers)}")
    ray_objects.stop_stores()


if __name__ == "__main__":
    main()
