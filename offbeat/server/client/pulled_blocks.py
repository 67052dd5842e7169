"""Some blocks of the parameters that come back: whoever needs them waits for no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import timedelta

    from offbeat.payload import Reply
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import PulledParameters, ServerRequest


class PulledBlocks:
    """Some blocks of the parameters that a request brings; waited for as any `Pending`.

    Args:
        request: for all of them.
        state: of the model.
        blocks: that are waited for.
    """

    sent_bytes = 0

    def __init__(self, request: ServerRequest[PulledParameters], state: ModelState, blocks: Collection[int]) -> None:
        self._request, self._state, self._blocks = request, state, blocks

    def wait(self, timeout: timedelta) -> bool:
        """Block until they are here (True) or `timeout` has passed (False).

        Raises:
            OffbeatError: what ended the request.
        """
        with self._state.block_came:
            are_here = self._state.block_came.wait_for(self._are_here, timeout.total_seconds())
        if self._request.is_over:
            self._request.wait(timeout)
        return are_here

    def done(self) -> bool:
        return self._request.done() or (not self._request.is_over and self._are_here())

    def result(self) -> Reply:
        return []

    def _are_here(self) -> bool:
        return self._request.is_over or self._state.missing.isdisjoint(self._blocks)
