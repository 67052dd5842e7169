"""Wrappers that keep a model's workers equal by themselves: none may stand around a prepared model, or inside it.

`DistributedDataParallel` averages gradients a second time, with hooks that run in the same backward, and `FSDP` takes
parameters apart that offbeat keeps whole. Neither fails: the gradients are just wrong. So a wrapper is refused

    in it                 when the model is prepared (`wrapper_in`, `is_sharded`)
    put around it later   at the wrap: torch tells of each module that is registered in another
    there before          at the first forward pass of the replica, if that runs within the wrapper's, or its modules
                          were sharded in place; else at the first step, if the replica was never called
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle


def wrapper_in(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """The first module in `module`, itself included, that is such a wrapper, and its name there."""
    kinds = _kinds()
    return next(((name, one) for name, one in module.named_modules() if isinstance(one, kinds)), None)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this worker holds a part of the tensor only."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


class WrapperCheck:
    """A check that refuses wrappers around one prepared model.

    Call order: `forward` before each forward pass of the replica that trains, `step` before each step; `close`.

    Args:
        model: the user's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = {id(p) for p in model.parameters()}
        self._modules = {id(m) for m in model.modules()}  # FSDP has taken the parameters out before it tells
        self._has_looked = self._was_called = False
        self._hook: RemovableHandle = register_module_module_registration_hook(self._on_registration)

    def forward(self, replica: torch.nn.Module) -> None:
        """Look once.

        Raises:
            ModelError: if `replica` is called within a wrapper, or was sharded in place.
        """
        if self._was_called:
            return
        if (found := wrapper_in(replica)) is not None:
            _refuse(type(found[1]))
        for wrapper in _callers():
            if any(one is replica for one in wrapper.modules()):
                _refuse(type(wrapper))
        self._was_called = True

    def step(self) -> None:
        """Look once.

        Raises:
            ModelError: if the replica was not called, and there is a wrapper that holds the same parameters.
        """
        if self._has_looked:
            return
        self._has_looked = True
        if not self._was_called:
            kinds = _kinds()
            for wrapper in [one for one in gc.get_objects() if issubclass(type(one), kinds)]:
                if self._is_of(wrapper):
                    _refuse(type(wrapper))

    def close(self) -> None:
        """Allow wrappers again."""
        self._hook.remove()

    def _on_registration(self, owner: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if isinstance(module, torch.nn.Module) and isinstance(owner, _kinds()) and self._is_of(module):
            _refuse(type(owner))

    def _is_of(self, module: torch.nn.Module) -> bool:
        """Whether it holds anything of the prepared model."""
        if any(id(one) in self._modules for one in module.modules()):
            return True
        return any(id(p) in self._parameters for p in module.parameters())


def _kinds() -> tuple[type[torch.nn.Module], ...]:
    # Importing FSDP takes a second, and there is none where nobody has.
    kinds: list[Any] = [torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds += [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    return tuple(kinds)


def _callers() -> Iterable[torch.nn.Module]:
    """The wrappers whose methods are under way in this thread."""
    kinds, frame = _kinds(), sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(one := frame.f_locals.get("self"), kinds):
            yield one


def _refuse(kind: type) -> NoReturn:
    name = kind.__name__
    if name.startswith(("Fully", "FSDP")):
        name = "fully_shard" if name.startswith("FSDP") else name  # which makes a class of each module's own
        why = "it splits parameters that offbeat keeps whole and equal on all workers"
    elif issubclass(kind, torch.nn.DataParallel):
        why = "it drives several devices, and each worker of offbeat drives one"
    else:
        why = "its gradients are averaged over all workers already, and would be averaged again, wrongly"
    raise ModelError(
        f"Cannot train a prepared model in {name}: {why}. Train with what run.prepare returned. Where a framework "
        "wraps models (Accelerate's prepare, Trainer, Lightning), give it everything but the model, or leave "
        "out offbeat."
    )
