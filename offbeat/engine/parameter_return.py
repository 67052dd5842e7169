"""Parameters that come back from a server while the next forward pass computes: each module waits for what it reads.

What comes lands beside the parameters, block by block, and is copied into a parameter when the first module that reads
it is about to run, when somebody else uses the parameter (`pending_parameter`), or when all are waited for. What a
server gives once more, because a contribution was withdrawn (`offbeat.server.shard.update_scheduler`), changes nothing
that a forward pass has read: it is copied behind backward.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine.forward_watch import hook_readers
from offbeat.engine.module_hook import ModuleHook
from offbeat.engine.pending_parameter import pend, settle
from offbeat.server.client.pulled_blocks import PulledBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.server.blocks import Block
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import PulledParameters, ServerRequest


class ParameterReturn:
    """The way of one model's parameters from where a server's blocks land to where modules read them.

    Call order, each step: `begin` with what was asked; modules' forward passes; `finish` once all are here, before
    backward; `take_again` behind backward, or whenever all are to be the newest.

    Args:
        model: whose modules.
        parameters: each by name, with the memory in which its values land.
        blocks: at the server.
        state: of the model, where blocks land.
        readers: modules that read each parameter.
        waiter: explains what is waited for.
        come_to_rest: has all of a step done; called before somebody asks for the state of the model, or replaces it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, tuple[torch.nn.Parameter, torch.Tensor]],
        blocks: Sequence[Block],
        state: ModelState,
        readers: Mapping[str, tuple[torch.nn.Module, ...]],
        waiter: BlockingWait,
        *,
        come_to_rest: Callable[[], None],
    ) -> None:
        self._parameters, self._state, self._waiter = parameters, state, waiter
        self._blocks: dict[str, set[int]] = {name: set() for name in parameters}
        for block in blocks:
            for piece in block.pieces:
                self._blocks[piece.name].add(block.index)
        self._request: ServerRequest[PulledParameters] | None = None
        self._untaken: set[str] = set()
        self._uses = {name: functools.partial(self._used, name) for name in parameters}
        self._numbers: dict[str, int] = {}  # with which the blocks came that each parameter was taken from
        hook = ModuleHook(lambda *_: come_to_rest())
        self._hooks = [
            *hook_readers(readers, self._before_module),
            *(module.register_state_dict_pre_hook(hook) for module in model.modules()),
            model.register_load_state_dict_pre_hook(hook),
        ]

    def begin(self, request: ServerRequest[PulledParameters]) -> None:
        """The parameters of the next step were asked for."""
        self._request, self._untaken = request, set(self._parameters)
        self._numbers.clear()
        for name, (parameter, _) in self._parameters.items():
            pend(parameter, self._uses[name])

    def finish(self) -> None:
        """All are here: take those that no module has read."""
        self._take(self._untaken)

    def take_again(self) -> None:
        """Take those that were given again since they were taken."""
        if self._request is not None and not self._untaken:
            self._take({name for name, number in self._numbers.items() if number != self._number})

    def close(self) -> None:
        """Have modules wait for nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, _ in self._parameters.values():
            settle(parameter)

    @property
    def _number(self) -> int:
        """The number with which blocks come at the moment, or have come."""
        assert self._request is not None
        return self._state.last_number if self._request.is_over else self._state.number

    def _before_module(self, names: tuple[str, ...]) -> None:
        if self._untaken and (due := self._untaken.intersection(names)):
            self._take(due)

    def _used(self, name: str, *_: object) -> None:
        self._take(self._untaken.intersection((name,)))

    def _take(self, names: Collection[str]) -> None:
        if not names:
            return
        assert self._request is not None
        awaited = PulledBlocks(self._request, self._state, set().union(*(self._blocks[name] for name in names)))
        context = WaitContext("the parameters that come back", model=self._state.model, through_server=True)
        while not self._copy(names, awaited):  # else they are given again
            self._waiter.wait(awaited, context)
        self._untaken = self._untaken.difference(names)

    def _copy(self, names: Collection[str], awaited: PulledBlocks) -> bool:
        """Copy what came into these parameters, if all of it is here; meanwhile nothing that is given again lands."""
        with self._state.block_came, torch.inference_mode(mode=False):  # an evaluation may be the first to need it
            if are_here := awaited.done():
                for name in names:
                    parameter, value = self._parameters[name]
                    settle(parameter)
                    parameter.data.copy_(value)
                self._numbers.update(dict.fromkeys(names, self._number))
        return are_here
