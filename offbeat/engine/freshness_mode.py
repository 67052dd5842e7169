"""A mode that finds a script's use of a parameter's memory before the last step is in it.

Between `optimizer.step()` and the forward pass of a module that reads it, a parameter may lack its last step: when the
step is made depends on the link. A script that uses the parameter itself waits (`pending_parameter`). A script that
uses an earlier view, or another tensor that shares the memory, does not wait, and reads one value today and another one
tomorrow. `FreshnessMode` sees every operation of torch on the training thread, and finds such a use, whether or not the
step happened to be there in time:

    expect      the script called the optimizer's step; nobody may use the memory of these parameters
    allow       the script used a parameter, a module that reads it begins its forward pass, or all was waited for

The mode has two users. A scheduler watches one step in a hundred (`cross_iteration`). The debugging mode
(`--check-freshness`) looks at all steps, and also refuses the uses that would wait: it finds each line that costs time.

Making a view or taking a tensor's shape is no use, nor is what offbeat does itself. The mode does not see what goes
past torch's operations: a NumPy array that shares the memory, or a kernel of compiled code. The debugging mode has
compiled models run uncompiled; the watch leaves them as they are.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from offbeat.engine.pending_parameter import takes_shapes
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType

_OURS = Path(__file__).resolve().parents[1]
_SCRIPTS = tuple(f"{_OURS / room}/" for room in ("lab", "testing"))  # which run what is the user's elsewhere
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"


class _Stretch(NamedTuple):
    """The memory of one parameter that nobody may use: bytes from `begin` to `end` of a storage."""

    name: str
    storage: int
    begin: int
    end: int


class FreshnessMode(TorchDispatchMode):
    """A mode that finds early uses of a parameter's memory. Call order: `open`, `expect`, `allow` ..., `close`.

    Args:
        found: called with the name of the parameter, the operation and the line of the script, before the operation is
            done; None for a debugging mode, which raises.
    """

    def __init__(self, found: Callable[[str, str, str], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._is_open = False
        self._early: dict[int, _Stretch] = {}  # by the parameter's id
        self._memory: dict[int, list[_Stretch]] = {}  # of these, by storage

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether compiled code runs below it as it does elsewhere: torch asks."""
        return self._found is not None

    @property
    def is_open(self) -> bool:
        """Whether it looks."""
        return self._is_open

    @property
    def has_early(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._early)

    def open(self, *, alone: bool = False) -> bool:
        """Look at every operation of this thread from here on.

        Args:
            alone: whether it does so only where no other mode looks, which might have to be left first.

        Returns:
            Whether it looks.
        """
        if not self._is_open and not (alone and _get_current_dispatch_mode() is not None):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_open = True
        return self._is_open

    def close(self) -> None:
        """Look no longer; a mode that cannot be left at this place is left at the next call."""
        self._early, self._memory = {}, {}
        # After a hook of backward torch restores its modes; and a mode that was entered later has to be left first.
        is_in_backward = torch._C._current_graph_task_id() != -1
        if self._is_open and not is_in_backward and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_open = False

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

    def refuse(self, name: str, what: str, line: str) -> None:
        """Refuse to use a parameter, if this is the debugging mode.

        Args:
            what: uses it.
            line: of the script.

        Raises:
            ModelError: if it is.
        """
        if self._found is None and line:
            raise ModelError(
                f"Cannot use {name} in {what} at {line} under --check-freshness: the optimizer's last step may not be "
                "in it yet, since no module that reads it has begun its forward pass. Without the check offbeat waits "
                "there, and hides less. Call run.synchronize() before, or leave out the check."
            )

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
            if used is None or used.begin >= early.end or early.begin >= used.end:
                continue
            if line := line_of(sys._getframe(1)):
                if self._found is not None:
                    self._found(early.name, str(func), line)
                    return
                raise ModelError(
                    f"Cannot use the memory of {early.name} in {func} at {line}: the optimizer's last step may not be "
                    "in it yet, and a view or another tensor that shares the memory does not wait for it. Use the "
                    "parameter itself, or call run.synchronize() before."
                )


def _takes_shapes(func: Any) -> bool:
    """Whether an operation uses no element: it makes a view, or a tensor of the same shape."""
    if getattr(func, "is_view", False):
        return True
    return takes_shapes(func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else "")


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


def line_of(frame: FrameType | None) -> str:
    """File and number of the line, from this frame on outwards, that has an operation done, outside of torch and of
    Python's own library; "" if it is offbeat's.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        is_library = path.startswith((_TORCH, _STDLIB)) and "site-packages" not in path.removeprefix(_TORCH)
        if path != __file__ and not is_library and not path.startswith("<frozen "):
            is_ours = path.startswith(f"{_OURS}/") and not path.startswith(_SCRIPTS)
            return "" if is_ours else f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
