"""A worker's requests for the status of a job and for swaps of its plan; on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.protocol.plan_swap import SwapPlan
from offbeat.protocol.status import GetStatus

if TYPE_CHECKING:
    from offbeat.errors import OffbeatError
    from offbeat.protocol.plan_swap import SwapResult
    from offbeat.protocol.status import ModelStatus
    from offbeat.server.client.connections import ShardConnections
    from offbeat.server.client.requests import EndOfTraining, ServerRequest


class CoordinatorRequests:
    """The requests of one worker that its coordinator has not answered.

    Args:
        connections: to all shards.
    """

    def __init__(self, connections: ShardConnections) -> None:
        self._connections = connections
        self._looks: dict[int, ServerRequest[tuple[ModelStatus, ...]]] = {}
        self._swaps: dict[int, ServerRequest[str]] = {}
        self._look_count = self._swap_count = 0

    def look(self, request: ServerRequest[tuple[ModelStatus, ...]]) -> None:
        """Ask for the status of all models."""
        number, self._look_count = self._look_count, self._look_count + 1
        self._looks[number] = request
        if self._connections.is_up:
            self._connections.say(GetStatus(number))

    def swap(self, request: ServerRequest[str], part: str, whole: bool) -> None:
        """Have another plan hold for all.

        Args:
            part: of the plan, as TOML.
            whole: it is all of it.
        """
        if not self._connections.is_up:
            request.finish("Cannot swap anything now: the connection to the server is lost. Try again later.")
            return
        number, self._swap_count = self._swap_count, self._swap_count + 1
        self._swaps[number] = request
        self._connections.say(SwapPlan(number, part, whole))

    def seen(self, number: int, model_statuses: tuple[ModelStatus, ...]) -> None:
        """Handle the answer to a look."""
        if (look := self._looks.pop(number, None)) is not None:
            look.finish(model_statuses)

    def swapped(self, result: SwapResult) -> None:
        """Handle the result of a swap."""
        if (swap := self._swaps.pop(result.number, None)) is not None:
            swap.finish(result.refusal)

    def stranded(self) -> None:
        """Handle the loss of all links: whether plans were swapped will not be heard."""
        for swap in self._swaps.values():
            swap.finish("It is not known whether the plan was swapped: the connection to the server was lost.")
        self._swaps.clear()

    def arrived(self) -> None:
        """Ask again: there are links to all shards again."""
        for number in self._looks:
            self._connections.say(GetStatus(number))

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail all requests: they will not be answered."""
        for look in self._looks.values():
            look.fail(error)
        for swap in self._swaps.values():
            swap.fail(error)
