"""The model as `run.prepare` returns it: one of N replicas, used as a DistributedDataParallel model is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.engine import Exchanger


class Replica(torch.nn.Module):
    """The model as `run.prepare` returns it: backward averages its gradients over all workers.

    As with DistributedDataParallel the user's model is `.module`, keys of `state_dict()` begin with ``module.``, and
    `no_sync()` accumulates. In addition attributes of the user's model can be read directly.

    A copy (`copy.deepcopy`, such as for weight averaging) is a plain wrapper that does not communicate.
    """

    def __init__(
        self, module: torch.nn.Module, reducer: Exchanger | None, begins: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.module = module
        self._reducer, self._begins = reducer, begins
        self._trains_in = True  # the mode of the last forward pass that led to an exchange
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's model, and return what it returns, unchanged."""
        watched = self._before_forward(args, kwargs)
        output = self.module(*args, **kwargs)
        if watched:
            self._after_forward(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        reducer = self._reducer
        if reducer is None:
            return False
        if not torch.is_grad_enabled():
            reducer.share.seen()
            return False
        if self.training == self._trains_in:  # else an evaluation that has gradients in vain
            self._begins()
        reducer.on_forward((args, kwargs))
        return reducer.sync

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> None:
        reducer = self._reducer
        assert reducer is not None
        mode = self.training

        def on_grad(grad: torch.Tensor) -> None:
            self._trains_in = mode
            reducer.on_output_grad()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_grad)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes inside do not communicate; the next one outside sends the sum."""
        reducer = self._reducer
        if reducer is None:
            yield
            return
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            reducer.sync = before

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Do nothing: a prepared loader already lets workers with less data take part with weight 0."""
        yield

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refuse the hook, since the plan's codec decides what is sent.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            f"Cannot register {hook!r}: what is sent is decided by the plan. Use Plan(codec=...), such as Cast('bf16')."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reducer": None, "_begins": None}


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))
