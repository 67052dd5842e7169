"""A hook on a module that stays with it: a copy of the module, or one that is saved whole and loaded, is nobody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class ModuleHook:
    """A hook that a copy of its module calls in vain.

    Args:
        function: what it does; None for nothing.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Do what it does."""
        if self._function is not None:
            self._function(*args)

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
