"""What can be prepared: which parameters are trained, and which models and optimizers are refused, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.engine import ignored_names
from offbeat.errors import ModelError
from offbeat.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Collection

_ORDER = "the order is prepare(model, optimizer, loader), with a torch.nn.Module and a torch.optim.Optimizer."


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    ignored = ignored_names(model)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in ignored}
    if not parameters:
        raise ModelError(
            f"Cannot prepare {type(model).__name__}: it has no parameter with requires_grad. "
            "Unfreeze one, or train without offbeat."
        )
    lazy = [n for n, p in parameters.items() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        raise ModelError(f"Cannot prepare {lazy[0]}: its shape is not known yet. Run one forward pass first.")
    devices: dict[str, str] = {}
    for name, parameter in parameters.items():
        devices.setdefault(str(parameter.device), name)
    if len(devices) > 1:
        (first, one), (second, other), *_ = devices.items()
        raise ModelError(
            f"Cannot prepare a model on several devices: {one} is on {first}, {other} on {second}. "
            "Move the whole model to one device; one worker drives one device."
        )
    return parameters


def inventory(model: torch.nn.Module, sparse: Collection[str]) -> str:
    """One line per parameter and buffer, in order of registration: what all workers must have in common.

    Not only what is trained: frozen parameters and buffers are broadcast, and a difference there would put numbers into
    the wrong place, or end the process inside Gloo.
    """
    ignored = ignored_names(model)
    parameters = [
        (name, p, "sparse" if name in sparse else "trained" if p.requires_grad else "frozen")
        for name, p in model.named_parameters()
    ]
    buffers = [(name, b, "buffer") for name, b in model.named_buffers()]
    return "\n".join(_line(name, t, role) for name, t, role in parameters + buffers if name not in ignored)


def _line(name: str, tensor: torch.Tensor, role: str) -> str:
    # A gradient lies in its bucket in the memory order of its parameter.
    order = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{order} {role}"


def check_modules(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"Cannot prepare {type(model).__name__} as a model: {_ORDER}")
    if isinstance(model, Replica):
        raise ModelError("Cannot prepare a model twice: this one was returned by prepare. Prepare the original.")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ModelError(
            "Cannot prepare a DistributedDataParallel model: it averages gradients by itself. Prepare its .module."
        )
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    for name, child in model.named_modules():
        if isinstance(child, torch.nn.SyncBatchNorm) and on_cpu:
            raise ModelError(
                f"Cannot train {name or 'the model'} (SyncBatchNorm) on the CPU: torch has it for GPUs only. "
                "Use BatchNorm, GroupNorm or LayerNorm."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"Cannot prepare {type(optimizer).__name__} as an optimizer: {_ORDER}")
    own = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"Cannot prepare this optimizer: parameter {i} of group {g} (shape {list(parameter.shape)}) is not "
                    f"one of the model's. Make the optimizer from model.parameters(), after the model is complete."
                )
