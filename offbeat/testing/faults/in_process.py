"""Faults of a training script: each strikes in this process, where the user's own code would."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data._utils import fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fault_spec import Fault

_JUMP_S = 3600.0
_HUGE = 1e30


class Injected(Exception):
    """An injected fault raises this where the user's code would raise its own."""


def hold_gil(seconds: float) -> None:
    """Compute in C without letting another thread of Python run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def jump() -> None:
    """Have the wall clock of this process be an hour ahead from now on."""
    here, here_ns = time.time, time.time_ns
    time.time = lambda: here() + _JUMP_S
    time.time_ns = lambda: here_ns() + int(_JUMP_S * 1e9)


def raise_in_forward(note: Callable[[], None]) -> None:
    """Raise in the next forward pass of any module."""

    def strike(module: torch.nn.Module, arguments: Any) -> None:
        handle.remove()
        _raise(note, "forward")

    handle = register_module_forward_pre_hook(strike)


def raise_in_backward(note: Callable[[], None]) -> None:
    """Raise in a hook that autograd calls, in the backward pass of the next forward pass."""

    def attach(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            handle.remove()
            output.register_hook(lambda gradient: _raise(note, "a hook of backward"))

    handle = register_module_forward_hook(attach)


def raise_in_loader(note: Callable[[], None]) -> None:
    """Raise when this process next fetches a batch."""
    whole = fetch._MapDatasetFetcher.fetch

    def strike(fetcher: Any, indices: Any) -> NoReturn:
        fetch._MapDatasetFetcher.fetch = whole  # type: ignore[method-assign]
        _raise(note, "the data")

    fetch._MapDatasetFetcher.fetch = strike  # type: ignore[method-assign]


def _raise(note: Callable[[], None], where: str) -> NoReturn:
    note()
    raise Injected(f"a fault in {where}, as was asked for")


class Gradients:
    """The gradients of an optimizer's first parameter, and how they were."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._past: list[torch.Tensor] = []

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the present one."""
        gradient = _first(optimizer).grad
        if gradient is not None:
            self._past = [*self._past[-self._depth :], gradient.detach().clone()]

    def spoil(self, optimizer: torch.optim.Optimizer, fault: Fault) -> None:
        """Put something else in its place."""
        gradient = _first(optimizer).grad
        assert gradient is not None
        with torch.no_grad():
            if fault.kind == "stale":
                gradient.copy_(self._past[0])
            else:
                gradient.fill_({"nan": float("nan"), "inf": float("inf"), "huge": _HUGE}[fault.kind])


def _first(optimizer: torch.optim.Optimizer) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = optimizer.param_groups[0]["params"][0]
    return parameter
