"""The model as `run.prepare` returns it: one of N replicas, used as a DistributedDataParallel model is."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.engine import Synchronizer

_log = logging.getLogger("offbeat")
_shared: set[int] = set()  # open runs of several workers, by id


def opened(run: object) -> None:
    """A run of several workers is open: from now on a replica of no run trains apart from theirs."""
    _shared.add(id(run))


def closed(run: object) -> None:
    """The run is over."""
    _shared.discard(id(run))


class Replica(torch.nn.Module):
    """The model as `run.prepare` returns it: backward averages its gradients over all workers.

    As with DistributedDataParallel the user's model is `.module`, keys of `state_dict()` begin with ``module.``, and
    `no_sync()` accumulates. In addition attributes of the user's model can be read directly.

    A copy (`copy.deepcopy`, such as for weight averaging, or one that was saved whole and loaded) is a plain wrapper
    that does not communicate; it says so when it trains beside other workers.

    Args:
        module: the user's model.
        synchronizer: keeps it equal with the other workers' replicas.
        before_forward: called with this before each forward pass that trains.
        join: what `join` does, with its arguments.
    """

    _told_alone = False

    def __init__(
        self,
        module: torch.nn.Module,
        synchronizer: Synchronizer,
        before_forward: Callable[[Replica], None],
        join: Callable[..., AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.module = module
        self._synchronizer: Synchronizer | None = synchronizer
        self._before_forward, self._join = before_forward, join
        self._trains_in = True  # the mode of the last forward pass that led to an exchange
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's model, and return what it returns, unchanged."""
        watched = self._begin_forward(args, kwargs)
        output = self.module(*args, **kwargs)
        if watched:
            self._end_forward(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        synchronizer = self._synchronizer
        if synchronizer is None:
            self._tell_alone()
            return False
        if not torch.is_grad_enabled():
            synchronizer.accounting.seen()
            return False
        if self.training == self._trains_in:  # else an evaluation that has gradients in vain
            self._before_forward(self)
        synchronizer.on_forward((args, kwargs))
        return synchronizer.sync

    def _tell_alone(self) -> None:
        """Say once that this copy trains by itself, if it does and there are other workers."""
        if self._told_alone or not _shared or not self.training or not torch.is_grad_enabled():
            return
        if any(p.requires_grad for p in self.parameters()):
            self._told_alone = True
            _log.warning(
                "A copy of a replica of %s trains alone: it was copied, or saved whole and loaded, and belongs to no "
                "run, so that nothing of it is averaged with other workers. Prepare its .module, and save and load "
                "state_dict(); if it is to train alone, use its .module.",
                type(self.module).__name__,
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_forward(self, output: Any) -> None:
        synchronizer = self._synchronizer
        assert synchronizer is not None
        mode = self.training

        def on_grad(grad: torch.Tensor) -> None:
            self._trains_in = mode
            synchronizer.on_backward()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_grad)

    @property
    def require_backward_grad_sync(self) -> bool:
        """The flag by which DistributedDataParallel accumulates: while False, backward passes do not communicate."""
        return self._synchronizer is None or self._synchronizer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        if self._synchronizer is not None:
            self._synchronizer.sync = sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes inside do not communicate; the next one outside sends the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = False,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let workers make different numbers of steps in the block: who is done takes part with weight 0. Collective.

        With a prepared loader there is nothing to do: it sees to that by itself. A worker that is done waits at the end
        of the block, and goes on with the parameters, buffers and optimizer state of those that were there last.

        Args:
            divide_by_initial_world_size: whether sums of gradients go on to be divided by the number of all workers, as
                DistributedDataParallel does by default; else by that of those that still have a gradient.
            enable: False does nothing.
            throw_on_early_termination: whether all end with an error as soon as one is done before the others.

        Raises:
            PlanError: if the plan does not allow it.
            ModelError: on all, if one is done before the others and that is to be raised.
        """
        if self._synchronizer is None or not enable:
            yield
            return
        with self._join(divides_by_all=divide_by_initial_world_size, raises=throw_on_early_termination):
            yield

    @property
    def is_copy(self) -> bool:
        """Whether it belongs to no run: a copy of the one that was prepared."""
        return self._synchronizer is None

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
        return {**self.__dict__, "_synchronizer": None, "_before_forward": None, "_join": None, "_told_alone": False}


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
