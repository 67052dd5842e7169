"""One request to the coordinator of a job, and its reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from offbeat.cli.job_address import dial
from offbeat.errors import NetworkError, OffbeatError

if TYPE_CHECKING:
    from offbeat.cli.job_address import JobAddress
    from offbeat.protocol.plan_swap import SwapPlan
    from offbeat.protocol.rank_reservation import ReserveRanks

_GOOD_BYE_S = 0.5
T = TypeVar("T")


async def ask_coordinator(
    target: JobAddress, request: SwapPlan | ReserveRanks, reply: type[T], *, patience_s: float, ended: str, silent: str
) -> T:
    """Ask the coordinator, and return its reply.

    Args:
        target: where the job is.
        reply: the message that answers the request.
        patience_s: for how long to wait for it.
        ended: an error, if the job ends before that.
        silent: an error, if there is no reply in time.

    Raises:
        NetworkError: if nobody can be reached there, or there is no reply.
        PeerError: if it is another job, or there are other credentials.
    """
    from offbeat.protocol.messages import pack

    receiver = _ReplyReceiver(reply, ended)
    link = await dial(target, lambda link: receiver, "operator")
    try:
        link.send(pack(request))
        async with asyncio.timeout(patience_s):
            return await receiver.reply
    except TimeoutError as error:
        raise NetworkError(silent) from error
    finally:
        try:
            await asyncio.wait_for(link.close(), _GOOD_BYE_S)
        except (TimeoutError, OffbeatError):
            link.abort()


class _ReplyReceiver(Generic[T]):
    """The receiver of the reply."""

    def __init__(self, kind: type[T], ended: str) -> None:
        self._kind, self._ended = kind, ended
        self.reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse: a reply has no body."""
        raise NetworkError("The server sends a body where none is expected.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """The reply is here."""
        from offbeat.protocol.messages import to_worker

        message: Any = to_worker(metadata)
        if isinstance(message, self._kind) and not self.reply.done():
            self.reply.set_result(message)

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        if not self.reply.done():
            self.reply.set_exception(error or NetworkError(self._ended))
