"""The losses on trusted samples by which a server judges contributions (`offbeat.robust.Zeno`), at a validator.

The script says what the loss is, by `run.score_by`. While the validator waits for its next parameters it is asked what
each contribution to the update does to it:

    x             the parameters before the update, as the server has them
    loss(x), loss(x - rate lr g), ...     for gradients, with the learning rate of each parameter's group
    loss(x), loss(x - rate c), ...        for changes, which have the sign of a gradient

No parameter is written to: for as long as the loss is computed each has other memory. Buffers, such as statistics of
batches, and the random generators are where they were before each of the losses, so that all of them see the same, and
afterwards.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine.bucket_buffer import view_in
from offbeat.rng import RngState
from offbeat.server.client.loss_question import ParametersOrQuestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.layout import Layout
    from offbeat.protocol.loss_scores import ScoreContributions
    from offbeat.server.blocks import Block
    from offbeat.server.client.client import Client
    from offbeat.server.client.requests import PulledParameters, ServerRequest
    from offbeat.sync import Push

_log = logging.getLogger("offbeat")


class LossScorer:
    """The scorer of one model's updates.

    Args:
        model: its parameters, and the user's optimizer.
        layout, blocks: as the server has it.
        client: this validator's end of the server.
        context: of this validator.
    """

    def __init__(
        self, model: PreparedModel, layout: Layout, blocks: Sequence[Block], client: Client, context: WorkerContext
    ) -> None:
        self._model, self._layout, self._blocks = model, layout, blocks
        self._client, self._context = client, context

    def wait(self, request: ServerRequest[PulledParameters], where: WaitContext) -> None:
        """Wait for the next parameters, and answer meanwhile.

        Raises:
            OffbeatError: what ended the request.
        """
        state = self._client.state(self._model.number)
        awaited = ParametersOrQuestion(request, state)
        while True:
            self._context.waiter.wait(awaited, where)
            if request.is_over:  # what is asked now is for the next wait
                return
            if (asked := state.take_question()) is not None:
                self._answer(asked)

    def _answer(self, asked: ScoreContributions) -> None:
        """Find out the losses; nothing if the update is judged meanwhile."""
        before, contribution = self._memory(), self._memory()
        if not self._fetch(asked, None, before):
            return
        losses = []
        with self._elsewhere(before) as places:
            losses.append(self._loss())
            for push in asked.contributions:
                if not self._fetch(asked, push, contribution):
                    return
                self._move(places, before, contribution, asked)
                losses.append(self._loss_at(places, push))
        self._client.tell_losses(asked, losses)

    def _memory(self) -> list[torch.Tensor]:
        return [torch.zeros(bucket.numel, dtype=bucket.dtype) for bucket in self._layout.buckets]

    def _fetch(self, asked: ScoreContributions, push: Push | None, landing: Sequence[torch.Tensor]) -> bool:
        places = [landing[block.bucket][block.offset : block.offset + block.numel] for block in self._blocks]
        request = self._client.fetch_contribution(asked.model, asked.version, push, places)
        self._context.waiter.wait(request, WaitContext("a contribution to be judged", through_server=True))
        return request.value

    def _views(self, buckets: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter's place in buckets, by name."""
        return {
            slot.name: view_in(memory, slot.offset, self._model.parameters[slot.name])
            for bucket, memory in zip(self._layout.buckets, buckets, strict=True)
            for slot in bucket.slots
        }

    @contextmanager
    def _elsewhere(self, values: Sequence[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Give each parameter other memory, with these values, for as long as this lasts; that memory, by name.

        What the server sends meanwhile may land where the parameters were, and is theirs afterwards.
        """
        parameters, views = self._model.parameters, self._views(values)
        own = {name: parameters[name].data for name in views}
        places = {name: torch.empty_like(data).copy_(views[name]) for name, data in own.items()}
        try:
            for name, place in places.items():
                parameters[name].data = place
            yield places
        finally:
            for name, data in own.items():
                parameters[name].data = data

    def _move(
        self,
        places: dict[str, torch.Tensor],
        before: Sequence[torch.Tensor],
        contribution: Sequence[torch.Tensor],
        asked: ScoreContributions,
    ) -> None:
        """Have the parameters be where a contribution leads."""
        rates = self._rates()
        values, moves = self._views(before), self._views(contribution)
        for name, place in places.items():
            rate = asked.rate * (1.0 if asked.change else rates[name])
            place.copy_(torch.sub(values[name], moves[name], alpha=rate))

    def _rates(self) -> dict[str, float]:
        """The learning rate of each parameter."""
        groups = self._model.optimizer.param_groups
        by_id = {id(p): float(group.get("lr", 1.0)) for group in groups for p in group["params"]}
        return {name: by_id.get(id(parameter), 0.0) for name, parameter in self._model.parameters.items()}

    def _loss_at(self, places: dict[str, torch.Tensor], push: Push) -> float:
        """Compute the loss where a contribution leads; no finite number if it cannot be computed there.

        A contribution may be anything, and so may be what the script's own code does with it: nobody but its worker
        is to blame for that, and least of all the validator is to end with it.
        """
        if not all(bool(place.isfinite().all()) for place in places.values()):
            return math.inf
        try:
            return self._loss()
        except Exception as error:
            _log.warning("Where contribution %d of rank %d leads there is no loss: %s", push[1], push[0], error)
            return math.inf

    def _loss(self) -> float:
        """Compute the loss, and have everything else be what it was."""
        model, device = self._model.model, next(iter(self._model.parameters.values())).device
        gpu = device if device.type == "cuda" else None
        buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        rng = RngState.capture(device=gpu)
        try:
            return self._context.trusted_loss.compute()
        finally:
            rng.restore(device=gpu)
            for module, name, buffer, saved in buffers:
                if buffer is not None and saved is not None:
                    buffer.copy_(saved)
                module._buffers[name] = buffer
