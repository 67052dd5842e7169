"""A gradient whose mean may not be here yet: whoever uses it waits for it.

It lies in `.grad` between backward and the optimizer's step, over the memory in which the mean will be. Clipping,
logging, unscaling and other optimizers come to it by torch's functions, and so does `zero_grad(set_to_none=False)`;
each of them finds the mean there. Who merely asks whether there is a gradient waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable

_GRAD: Any = torch.Tensor.grad
_PASSES = {_GRAD.__get__, _GRAD.__set__}


class PendingGradient(torch.Tensor):
    """A gradient that is waited for when it is used. Made by `pending`.

    Attributes:
        plain: the same memory, as a tensor that nobody waits for.
        on_use: called before each use.
    """

    plain: torch.Tensor
    on_use: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PASSES:
                return func(*args, **(kwargs or {}))
            args, kwargs = _pytree.tree_map_only(PendingGradient, _used, (args, kwargs or {}))
        return func(*args, **kwargs)  # a parameter beside it may be pending, too


def pending(plain: torch.Tensor, on_use: Callable[[], None]) -> PendingGradient:
    """A gradient over the memory of `plain`, for whose use `on_use` waits."""
    gradient = torch.Tensor._make_subclass(PendingGradient, plain)
    gradient.plain, gradient.on_use = plain, on_use
    return gradient


def _used(gradient: PendingGradient) -> torch.Tensor:
    gradient.on_use()
    return gradient.plain
