"""A worker's requests for leases of data; on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.server.client.lease_queue import LeaseQueues

if TYPE_CHECKING:
    from offbeat.errors import OffbeatError
    from offbeat.protocol.data_leases import FromData
    from offbeat.server.client.connections import ShardConnections
    from offbeat.server.client.lease_queue import LeaseQueue
    from offbeat.server.client.requests import EndOfTraining, ServerRequest


class LeaseRequests:
    """The requests of one worker, of all its loaders.

    It enrols for all of them once each time it comes to the job, and what is said before that is not sent: it is said
    when it enrols.

    Args:
        connections: to all shards.

    Attributes:
        queues: the leases that it has.
    """

    def __init__(self, connections: ShardConnections) -> None:
        self._connections = connections
        self.queues = LeaseQueues(self._say_if_up)
        self._entry = 0  # in which it has enrolled
        self._draws: dict[int, ServerRequest[None]] = {}  # by loader

    def enrol(self, queue: LeaseQueue) -> None:
        """Take part in one loader's data."""
        if self._entry == self._connections.entry:
            self.queues.enrol(queue)
        else:
            self.enrol_again()

    def enrol_again(self) -> None:
        """Take part in all loaders' data after coming to the job again; nothing if this worker does already."""
        if self._entry != self._connections.entry:
            self._entry = self._connections.entry
            self.queues.enrol()

    def draw(self, request: ServerRequest[None], queue: LeaseQueue) -> None:
        """Finish the request when there is something to draw."""
        self._draws[queue.about.loader] = request
        self.queues.want(queue, lambda: request.finish(None))

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail all requests: nothing more will be dealt out."""
        for request in self._draws.values():
            request.fail(error)

    def _say_if_up(self, message: FromData) -> None:
        """Send to the coordinator unless it is away: then all is said again when it is back."""
        connections = self._connections
        if connections.is_up and self._entry == connections.entry and connections.links:
            connections.say(message)
