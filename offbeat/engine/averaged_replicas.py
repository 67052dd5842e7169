"""The values that all replicas have in common, shown for a while in a model whose own come back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from offbeat.engine.prepared_model import tensors_of
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.engine.communicator import Communicator
    from offbeat.engine.prepared_model import PreparedModel


def mean_of_replicas(model: PreparedModel, communicator: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Average a model's parameters and buffers over all workers, for `shown`: each tensor, and its mean. Collective.

    What is no floating-point number, such as a count of batches, is not among them.
    """
    differ = {*model.parameters, *(name for name, _ in model.model.named_buffers())}
    tensors = [(name, own) for name, own in tensors_of(model.model) if own.is_floating_point() and name in differ]
    with torch.no_grad():
        begun = [
            communicator.start(Sum((own / communicator.world).reshape(-1).contiguous(), exact=True))
            for _, own in tensors
        ]
        means = []
        for (name, own), pending in zip(tensors, begun, strict=True):
            reply = communicator.wait(pending, "averaging of the replicas", name)
            assert isinstance(reply, Total)
            means.append((own, (reply.tensor / reply.weight).view_as(own)))
    return means


@contextlib.contextmanager
def shown(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Have each first tensor hold what the second one does; then its own again."""
    kept = [own.detach().clone() for own, _ in pairs]
    with torch.no_grad():
        for own, value in pairs:
            own.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for (own, _), before in zip(pairs, kept, strict=True):
                own.copy_(before)
