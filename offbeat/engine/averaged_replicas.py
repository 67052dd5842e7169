"""The values that all replicas have in common, shown for a while in a model whose own come back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from offbeat.engine.prepared_model import tensors_of
from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from offbeat.engine.communicator import Communicator
    from offbeat.engine.prepared_model import PreparedModel


@contextlib.contextmanager
def averaged_replicas(model: PreparedModel, communicator: Communicator) -> Iterator[None]:
    """Have a model's parameters and buffers be the mean of those of all workers; then this worker's own again.

    What is no floating-point number, such as a count of batches, stays as it is here. Collective, where it begins.
    """
    differ = {*model.parameters, *(name for name, _ in model.model.named_buffers())}
    kept = [
        (name, tensor, tensor.clone())
        for name, tensor in tensors_of(model.model)
        if tensor.is_floating_point() and name in differ
    ]
    with torch.no_grad():
        begun = [
            communicator.start(Sum((own / communicator.world).reshape(-1).contiguous(), exact=True))
            for _, _, own in kept
        ]
        for (name, tensor, _), pending in zip(kept, begun, strict=True):
            reply = communicator.wait(pending, "averaging of the replicas", name)
            assert isinstance(reply, Total)
            tensor.copy_((reply.tensor / reply.weight).view_as(tensor))
    try:
        yield
    finally:
        with torch.no_grad():
            for _, tensor, own in kept:
                tensor.copy_(own)


@contextlib.contextmanager
def shown_values(parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have parameters be `values`, by name, which a server has; then this worker's own again."""
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own[name])
