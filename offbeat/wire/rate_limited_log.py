"""A log of refusals that names the first ones of a crowd, so that strangers do not fill a disk."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("offbeat.wire")

_WITHIN_S = 60.0
_MOST = 10  # in that time


class RateLimitedLog:
    """A log of at most ten lines in a minute; the next line after them says how many were left out.

    Args:
        now_s: monotonic seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began_s, self._logged, self._left_out = now_s(), 0, 0

    def log(self, text: str) -> None:
        """Log one line.

        Args:
            text: who, and why; a full stop at its end is left out where more follows.
        """
        if self._now_s() - self._began_s >= _WITHIN_S:
            if self._left_out:
                _log.warning("Refused %d others since the last one that was logged", self._left_out)
            self._began_s, self._logged, self._left_out = self._now_s(), 0, 0
        if self._logged < _MOST:
            self._logged += 1
            if self._logged == _MOST:
                text = f"{text.removesuffix('.')}; others within {_WITHIN_S:g} s are only counted"
            _log.warning("Refused %s", text)
        else:
            self._left_out += 1
