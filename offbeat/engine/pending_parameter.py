"""A parameter that may lack its last step: a script that uses it waits for that step.

Between `optimizer.step()` and the forward pass of a module that reads it, such a parameter is of a class of its own, so
that torch's functions ask before they touch it. `p.data`, `p.norm()`, `p.tolist()`, a list of parameters in a
`_foreach_` function, a copy and a pickle all wait first, and find an ordinary parameter. Questions about its gradient,
shape, type or place wait for nothing. No other tensor pays for it.

A tensor that was made before and shares the memory, such as a view, does not wait: `freshness_mode` looks for its use.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    OnUse = Callable[[str, FrameType], None]

_PROPERTIES = """
    grad requires_grad shape dtype device layout is_leaf grad_fn ndim names itemsize nbytes output_nr retains_grad
    is_cpu is_cuda is_meta is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu
"""
_METHODS = """
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed get_device requires_grad_ register_hook register_post_accumulate_grad_hook __len__
"""
_T: Any = torch.Tensor
_PASSES = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES.split() if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS.split()),
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.result_type),
    _T.grad.__set__,
    _T.requires_grad.__set__,
}


def takes_shapes(name: str) -> bool:
    """Whether the function of this name takes a tensor's shape and kind, and none of its elements."""
    return name.endswith("_like") or name.startswith("new_")


class PendingParameter:
    """The part that the class of a pending parameter has beside its own. Made by `pend`.

    Attributes:
        plain: its own class.
        on_use: called before each use, with the name of the function that uses it and the frame of its caller; settles
            the parameter. The name is "" for a copy of the whole, as a pickle is.
    """

    __slots__ = ()
    plain: type[torch.nn.Parameter]
    on_use: OnUse

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PASSES or takes_shapes(getattr(func, "__name__", "")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        for one in _pytree.tree_leaves((args, kwargs)):
            if isinstance(one, PendingParameter):
                _use(one, _name_of(func), caller)
        answer = func(*args, **(kwargs or {}))
        # It compares the class of what it was given with that of this answer.
        is_wrapped = caller.f_code is torch.nn.Parameter.__new__.__code__
        return torch.Tensor._make_subclass(type(args[0]), answer) if is_wrapped else answer

    # Optimizers and scripts ask for it in each step: this takes a third of the time that torch's question takes.
    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, which waits by itself."""
        parameter: Any = self
        kind, parameter.__class__ = parameter.__class__, self.plain
        gradient: torch.Tensor | None = parameter.grad
        parameter.__class__ = kind
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        parameter: Any = self
        kind, parameter.__class__ = parameter.__class__, self.plain
        try:
            parameter.grad = gradient
        finally:
            parameter.__class__ = kind

    def __deepcopy__(self, memo: Any) -> Any:
        _use(self, "", sys._getframe(1))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _use(self, "", sys._getframe(1))
        return self.__reduce_ex__(protocol)


def pend(parameter: torch.nn.Parameter, on_use: OnUse) -> None:
    """Have whoever uses a parameter call `on_use` first, until it is settled."""
    parameter.on_use = on_use  # type: ignore[attr-defined]
    parameter.__class__ = _pending_kind(type(parameter))


def settle(parameter: torch.nn.Parameter) -> None:
    """Let a parameter be used as it is."""
    if isinstance(parameter, PendingParameter):
        parameter.__class__ = parameter.plain  # type: ignore[assignment]
        del parameter.on_use


def can_pend(parameter: torch.nn.Parameter) -> bool:
    """Whether the class of a parameter allows that its uses wait."""
    try:
        pend(parameter, lambda *_: None)
    except TypeError:  # its instances are laid out differently
        return False
    settle(parameter)
    return True


def _use(parameter: Any, what: str, caller: FrameType) -> None:
    parameter.on_use(what, caller)
    settle(parameter)


@functools.cache
def _pending_kind(plain: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    body = {"plain": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    kind: Any = types.new_class(plain.__name__, (PendingParameter, plain), exec_body=lambda made: made.update(body))
    ForkingPickler.register(kind, _reduce_shared)
    return cast("type[torch.nn.Parameter]", kind)


def _reduce_shared(parameter: torch.nn.Parameter) -> Any:
    """A parameter for another process, which shares its memory with this one."""
    _use(parameter, "", sys._getframe(1))
    return reduce_tensor(parameter)


def _name_of(func: Any) -> str:
    """The name of a function of torch, or of the property that it gets or sets."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner if hasattr(owner, "__objclass__") else func, "__name__", func))
