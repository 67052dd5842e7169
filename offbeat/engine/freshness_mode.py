"""A debugging mode for steps that are hidden behind the next one: who reads a parameter before its step is in it?

Between `optimizer.step()` and the forward pass of a module that was seen to read it, a parameter may be the one of the
step before: how soon it is stepped depends on the link. Whoever reads it then without having asked for it gets now one
and now the other. `FreshnessMode` sees every operation of torch on the training thread, and refuses those that use
such a parameter, whether or not its step happened to be in it by then:

    expect      the optimizer's step was called; nobody may use these
    allow       a module that reads them begins its forward pass, or all was waited for: they are as they should be

Views are followed by the memory they share, and are no use by themselves; nor is what only takes a tensor's shape. What
offbeat does is let pass. Reading past torch's operations is not seen (`.detach().numpy()`). Models that were compiled
run uncompiled meanwhile: torch compiles nothing below such a mode.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_OURS = Path(__file__).resolve().parents[1]
_SCRIPTS = tuple(f"{_OURS / room}/" for room in ("lab", "testing"))  # which run what is the user's elsewhere
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_SHAPES = ("new_",)
_LIKE = "_like"


class _Stretch(NamedTuple):
    """The memory of one parameter that nobody may use: bytes from `begin` to `end` of a storage."""

    name: str
    storage: int
    begin: int
    end: int


class FreshnessMode(TorchDispatchMode):
    """A mode that refuses to use a parameter too early. Call order: `open`, `expect`, `allow` ..., `close`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._early: dict[int, _Stretch] = {}  # by the parameter's id
        self._memory: dict[int, list[_Stretch]] = {}  # of these, by storage

    def open(self) -> None:
        """Look at every operation of this thread from here on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Look no longer."""
        self._early, self._memory = {}, {}
        if _get_current_dispatch_mode() is self:  # else one that was entered later is to be left first
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def expect(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Allow nobody to use these, which are to be stepped."""
        for name, parameter in parameters.items():
            if (stretch := _stretch(name, parameter)) is not None:
                self._early[id(parameter)] = stretch
        self._sort()

    def allow(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Let these be used: their step is in them."""
        found = [self._early.pop(id(parameter), None) for parameter in parameters] if self._early else []
        if any(found):
            self._sort()

    def _sort(self) -> None:
        self._memory = {}
        for stretch in self._early.values():
            self._memory.setdefault(stretch.storage, []).append(stretch)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._early and not _takes_shapes(func):
            for one in _pytree.tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor):
                    self._check(func, one)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        used = _stretch("", tensor)
        for early in self._memory.get(used.storage, ()) if used is not None else ():
            if used is not None and used.begin < early.end and early.begin < used.end and (line := _line()):
                raise ModelError(
                    f"Cannot use {early.name} in {func} at {line}: the optimizer's last step may not be in it yet, as "
                    "no module that was seen to read it has begun its forward pass since. Call run.synchronize() "
                    "before."
                )


def _takes_shapes(func: Any) -> bool:
    """Whether an operation uses no element: it makes a view, or a tensor of the same shape."""
    if getattr(func, "is_view", False):
        return True
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    return name.endswith(_LIKE) or name.startswith(_SHAPES)


def _stretch(name: str, tensor: torch.Tensor) -> _Stretch | None:
    """The memory that a tensor lies in; None if it lies in none."""
    try:
        storage, offset, strides = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None
    if not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    itemsize = tensor.element_size()
    return _Stretch(name, storage, int(itemsize * offset), int(itemsize * (offset + last + 1)))


def _line() -> str:
    """File and number of the line that has an operation done, outside of torch and of Python's own library; "" if it is
    offbeat's.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        is_library = path.startswith((_TORCH, _STDLIB)) and "site-packages" not in path.removeprefix(_TORCH)
        if path != __file__ and not is_library and not path.startswith("<frozen "):
            is_ours = path.startswith(f"{_OURS}/") and not path.startswith(_SCRIPTS)
            return "" if is_ours else f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
