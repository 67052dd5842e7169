"""Checks of what is prepared: which parameters are trained, and which models and optimizers are refused, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset, IterableDataset

from offbeat.engine import ignored_names
from offbeat.errors import ModelError
from offbeat.run.replica import Replica
from offbeat.run.wrapper_check import is_sharded, wrapper_in
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
    return f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)}{order} {role}"


def check_modules(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"Cannot prepare {type(model).__name__} as a model: {_ORDER}")
    if isinstance(model, Replica):
        if model.is_copy:
            raise ModelError(
                "Cannot prepare a copy of a replica, or one that was saved whole: it is a wrapper without a run. "
                "Prepare its .module."
            )
        raise ModelError("Cannot prepare a model twice: this one was returned by prepare. Prepare the original.")
    # Before wrappers: `fully_shard` makes a class of the model's own, and leaves no model within to prepare.
    if sharded := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ModelError(
            f"Cannot prepare a model whose parameters are sharded ({sharded[0]}): each worker holds a part, and "
            "offbeat keeps whole replicas equal. Prepare the model without fully_shard or parallelize_module; or keep "
            'those, leave out offbeat.init() and run.prepare, and call init_process_group("offbeat"), which carries '
            "their collectives with Gloo's bits."
        )
    if (found := wrapper_in(model)) is not None:
        where, kind = found[0], type(found[1]).__name__
        raise ModelError(
            f"Cannot prepare {f'a model with a {kind} in it, {where}' if where else f'a {kind} model'}: it keeps "
            "workers equal by itself. Prepare the model that was wrapped (of DistributedDataParallel its .module), or "
            "leave out offbeat."
        )
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    for name, child in model.named_modules():
        if isinstance(child, torch.nn.SyncBatchNorm) and on_cpu:
            raise ModelError(
                f"Cannot train {name or 'the model'} (SyncBatchNorm) on the CPU: torch has it for GPUs only. "
                "Use BatchNorm, GroupNorm or LayerNorm."
            )


def check_given(loader: object, others: Collection[object]) -> None:
    """Refuse what is no loader, and what `prepare` does not take."""
    if others:
        kinds = ", ".join(type(one).__name__ for one in others)
        raise ModelError(
            f"Cannot prepare {kinds} behind a model, its optimizer and its loader: prepare takes no more. A scheduler "
            "or a scaler stays as it is, a loader for evaluation is not prepared, a second model has its own prepare."
        )
    name = type(loader).__name__
    if isinstance(loader, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ModelError(
            f"Cannot prepare {name} as a loader: it is a scheduler, which stays as it is, and works on the optimizer "
            f"as before; {_ORDER}"
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ModelError(
            f"Cannot prepare {name} as a loader: it is a dataset, which has no batches. Give DataLoader({name}(...), "
            "batch_size=...)."
        )
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if loader is not None and (not is_iterable or isinstance(loader, torch.nn.Module | str | bytes)):
        raise ModelError(f"Cannot prepare {name} as a loader: it is no iterable of batches; {_ORDER}")


class Kinds:
    """The kinds of a model's parameters when it was prepared; gradients have their place in memory of that kind.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._were = [(name, p, p.dtype, p.device) for name, p in parameters.items()]

    def check(self) -> None:
        """See that they still are.

        Raises:
            ModelError: if one has another dtype, or is on another device.
        """
        for name, parameter, dtype, device in self._were:
            if parameter.dtype is not dtype or parameter.device != device:
                raise ModelError(
                    f"Cannot train {name}: it was {dtype} on {device} when the model was prepared, and is "
                    f"{parameter.dtype} on {parameter.device} now. Convert and move the model before prepare; to "
                    "compute in another dtype, use torch.autocast."
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
