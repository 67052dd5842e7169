"""What can be prepared: which parameters are trained, and which models and optimizers are refused, and why."""

from __future__ import annotations

import torch

from offbeat.errors import ModelError
from offbeat.replica import Replica


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
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


def check_modules(model: torch.nn.Module) -> None:
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
    own = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"Cannot prepare this optimizer: parameter {i} of group {g} (shape {list(parameter.shape)}) is not "
                    f"one of the model's. Make the optimizer from model.parameters(), after the model is complete."
                )
