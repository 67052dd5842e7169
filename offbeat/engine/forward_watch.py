"""The modules whose forward passes need each parameter, and when: learnt by watching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine.module_hook import ModuleHook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ForwardWatch:
    """Notes when the forward pass of each module begins.

    Args:
        model: whose modules.
        mark: notes a point in time.
    """

    def __init__(self, model: torch.nn.Module, mark: Callable[[], Any]) -> None:
        self._model, self._mark = model, mark
        self.began: dict[torch.nn.Module, Any] = {}  # in this pass, the first time: the mark
        # Compiled code has the hooks that were there when it was compiled, whatever is hung on a module later.
        self.is_compiled = any(_is_compiled(module) for module in model.modules())
        note, watched = ModuleHook(self._note), [] if self.is_compiled else model.modules()
        self._hooks = [module.register_forward_pre_hook(note, prepend=True) for module in watched]

    def begin(self) -> None:
        """A forward pass begins."""
        self.began = {}

    def readers(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, tuple[torch.nn.Module, ...]]:
        """The modules that read each parameter: its owner, or the nearest around that which was called."""
        called = {name: module for name, module in self._model.named_modules() if module in self.began}
        owners: dict[int, list[str]] = {}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(prefix)
        found = {}
        for name, parameter in parameters.items():
            paths = [_nearest(prefix, called) for prefix in owners.get(id(parameter), [""])]
            found[name] = tuple(dict.fromkeys(called.get(path, self._model) for path in paths))
        return found

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # by somebody around the model
            self.is_compiled = True
            return
        if module not in self.began:
            self.began[module] = self._mark()


def _is_compiled(module: torch.nn.Module) -> bool:
    # What is scripted or traced takes no hooks that come later, either.
    is_script = isinstance(module, torch.jit.ScriptModule)
    return is_script or hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def hook_readers(
    readers: Mapping[str, tuple[torch.nn.Module, ...]], before: Callable[[tuple[str, ...]], None]
) -> list[Any]:
    """Have `before` called with the names of the parameters that a module reads, before each forward pass of it."""
    read: dict[torch.nn.Module, list[str]] = {}
    for name, modules in readers.items():
        for module in modules:
            read.setdefault(module, []).append(name)

    def hook(names: tuple[str, ...]) -> ModuleHook:
        return ModuleHook(lambda module, inputs: before(names))

    return [module.register_forward_pre_hook(hook(tuple(names)), prepend=True) for module, names in read.items()]


def _nearest(path: str, called: Mapping[str, torch.nn.Module]) -> str:
    """The path of the nearest module, from this one on outwards, that was called; "" if none was."""
    while path and path not in called:
        path = path.rpartition(".")[0]
    return path
