"""The messages of a step: their buckets and sizes, and when in the backward pass each is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.codec.wire_bytes import allreduce_bytes, flat_bucket
from offbeat.float_sum import add_up
from offbeat.layout import FIRST_BUCKET_BYTES, arrange
from offbeat.scenario import Replay

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.scenario import Row, Scenario

_DDP_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class BucketSize:
    """One bucket of gradients.

    Args:
        size_bytes: on the wire.
        ready: which part of a step's computation is over when it is full.
    """

    size_bytes: float
    ready: float


def narrowing(plan: Plan | None, gradient_bytes: float, world: int) -> float:
    """Bytes on the wire for each byte of a float32 gradient, of whose shapes nothing is known."""
    if plan is None or not gradient_bytes:
        return 1.0
    whole = flat_bucket(max(1, round(gradient_bytes / 4)))
    return allreduce_bytes(plan.codec, whole, 2 if plan.is_served else world) / whole.size_bytes


def buckets(
    scenario: Scenario, row: Row, plan: Plan | None, gradient_bytes: float, narrow: float = 1.0
) -> list[BucketSize]:
    """The buckets of a step, in the order in which they are sent: by the layout that the workers make.

    Args:
        row: whose bucket size counts, if it has one.
        plan: None for DistributedDataParallel, whose buckets are as large.
        gradient_bytes: of a script's gradients, in float32, which are known to be there only at the end.
        narrow: bytes on the wire for each of these, of a peer.
    """
    workload, world = scenario.workload, len(scenario.workers.hosts)
    if not isinstance(workload, Replay):
        return [BucketSize(narrow * narrowing(plan, gradient_bytes, world) * gradient_bytes, 1.0)]
    layers = workload.layers()
    whole_s = add_up(layer.forward_s + layer.backward_s for layer in layers) or 1.0
    passed_s = add_up(layer.forward_s for layer in layers)
    ready_s: dict[str, float] = {}
    for layer in reversed(layers):
        passed_s += layer.backward_s
        ready_s |= {f"{layer.name}.{index}": passed_s for index in range(len(layer.shapes))}
    like = {
        f"{layer.name}.{index}": torch.empty(shape, device="meta")
        for layer in layers
        for index, shape in enumerate(layer.shapes)
    }
    given = row.bucket_bytes or workload.bucket_bytes
    largest = given or (_DDP_BUCKET_BYTES if plan is None else plan.bucket_bytes)
    # DistributedDataParallel has its first bucket as large as it is told to have all.
    layout = arrange(like, bucket_bytes=largest, first_bytes=given if given and plan is None else FIRST_BUCKET_BYTES)
    return [
        BucketSize(
            narrow * (bucket.size_bytes if plan is None else allreduce_bytes(plan.codec, bucket, world)),
            max(ready_s[slot.name] for slot in bucket.slots) / whole_s,
        )
        for bucket in layout.buckets
    ]
