"""Gradients that are no dense tensors (`nn.Embedding(sparse=True)`).

Adding two sparse gradients needs both whole, so they travel as `Gather` payloads, outside the buckets, and are added in
rank order: the same bits on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.float_sum import add_up
from offbeat.payload import Gather, GatheredPart

if TYPE_CHECKING:
    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.bucket_buffer import GradEntry


def sparse_names(module: torch.nn.Module) -> set[str]:
    """Names of the parameters whose gradients will be sparse."""
    names = set()
    for prefix, child in module.named_modules():
        if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse:
            names.add(f"{prefix}.weight" if prefix else "weight")
    return names


def payload_of(entry: GradEntry, *, accounting: BatchAccount, world: int) -> Gather:
    """Make this rank's contribution: indices [1, n] int64, values [n, ...], and one flag [1] of its weight."""
    parameter = entry.parameter
    grad = parameter.grad
    weight = accounting.weight
    flags = torch.tensor([weight, float(entry.used)], dtype=torch.float64, device=parameter.device)
    if grad is None or weight == 0:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        return Gather((indices, parameter.detach().new_zeros((0, *parameter.shape[1:])), flags))
    if not grad.is_sparse:
        grad = grad.detach().to_sparse(1)
    grad = grad.detach().coalesce()
    return Gather((grad.indices(), grad.values() * accounting.scale / world, flags))


def combine(entry: GradEntry, reply: list[GatheredPart]) -> torch.Tensor | None:
    """Make `.grad` the weighted mean of all contributions, or leave it alone if nobody used the parameter.

    Returns:
        [n, ...] the values of the mean, or None.
    """
    weight = add_up(float(c.tensors[2][0]) for c in reply) / len(reply)
    if not any(float(c.tensors[2][1]) for c in reply) or weight == 0:
        return None
    indices = torch.cat([c.tensors[0] for c in reply], dim=1)
    values = torch.cat([c.tensors[1] for c in reply])
    if weight != 1:
        values = values / weight
    shape = entry.parameter.shape
    total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    entry.parameter.grad = total
    return total.values()
