"""An exchange under way, whoever carries it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.payload import Reply


class Pending(Protocol):
    """An exchange under way."""

    @property
    def sent_bytes(self) -> int:
        """Bytes this worker puts on the network for it, by the algorithm's count."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done (True) or `timeout` has passed (False); the exchange goes on either way.

        Raises:
            NetworkError: if the connection to another worker broke.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def result(self) -> Reply:
        """The reply; only after `wait` returned True."""
