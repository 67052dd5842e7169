"""A question about losses, which a validator waits for beside the parameters of its next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.payload import Reply
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import PulledParameters, ServerRequest


class ParametersOrQuestion:
    """The end of a request, or a question that comes before it; waited for as any `Pending`.

    Args:
        request: for the parameters.
        state: of the model.
    """

    sent_bytes = 0

    def __init__(self, request: ServerRequest[PulledParameters], state: ModelState) -> None:
        self._request, self._state = request, state

    def wait(self, timeout: timedelta) -> bool:
        """Block until one of them is here (True) or `timeout` has passed (False).

        Raises:
            OffbeatError: what ended the request.
            EndOfTraining: if the workers are done.
        """
        with self._state.block_came:
            is_here = self._state.block_came.wait_for(self._is_here, timeout.total_seconds())
        if self._request.is_over:
            self._request.wait(timeout)
        return is_here

    def done(self) -> bool:
        return self._request.done() or (not self._request.is_over and bool(self._state.to_score))

    def result(self) -> Reply:
        return []

    def _is_here(self) -> bool:
        return self._request.is_over or bool(self._state.to_score)
