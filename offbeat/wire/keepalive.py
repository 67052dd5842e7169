"""The kernel of a silent peer's machine answers also while the process is stopped, holds the GIL, or has no processor.

Two connections tell whether it does. One is the link's own, by the age of the last acknowledgement. That grows old
while the peer's window is full, when the kernel asks ever more rarely. So there is a second one, to the address at
which the peer listens (`KeepaliveProbe`): nothing is ever sent on it, and TCP's keepalive has the two kernels talk
about once a second. When the peer's process ends, its kernel resets both.

A probe is open only while the peer is silent. When the peer wakes up, it sees a stranger who hangs up without a word.
"""

from __future__ import annotations

import errno
import math
import socket
import struct

from offbeat.wire.stream import close, prepare

_ESTABLISHED = 1
_INFO_BYTES = 60
_STATE_AT, _ACKNOWLEDGED_AT = 0, 56  # in struct tcp_info
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EALREADY)
_INTERVAL_S = 1  # the least that TCP takes


def acknowledged_s(sock: socket.socket) -> float:
    """Seconds since the other kernel last acknowledged something; infinite without a connection."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return math.inf
    if len(info) < _INFO_BYTES or info[_STATE_AT] != _ESTABLISHED:
        return math.inf
    (age_ms,) = struct.unpack_from("=I", info, _ACKNOWLEDGED_AT)
    return float(age_ms) / 1000


class KeepaliveProbe:
    """An idle connection with a peer's listening socket. Call order: `look`, as often as one likes; `close`.

    Args:
        address: "host:port" at which the peer listens, the host as an IP address.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host.removeprefix("[").removesuffix("]"), int(port)
        self._sock: socket.socket | None = None
        self._was_connected = False
        self.has_ended = False  # the connection stood, and the peer's kernel ended it: the process is gone

    def look(self) -> float:
        """Seconds since the peer's kernel last answered; infinite while there is no connection."""
        if self._sock is None:
            self._open()
            return math.inf
        age_s = acknowledged_s(self._sock)
        if math.isfinite(age_s):
            self._was_connected = True
        elif self._is_over():
            self.close()
        return age_s

    def close(self) -> None:
        """Hang up; `look` opens another one. Again does nothing."""
        if self._sock is not None:
            close(self._sock)
            self._sock = None
        self._was_connected = False

    def _open(self) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET)
        prepare(sock)
        for option, value in ((socket.TCP_KEEPIDLE, _INTERVAL_S), (socket.TCP_KEEPINTVL, _INTERVAL_S)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.has_ended = False
        if sock.connect_ex(self._target) in _UNDER_WAY:
            self._sock = sock
        else:
            sock.close()

    def _is_over(self) -> bool:
        """Whether this attempt has failed, or the connection has ended."""
        if not self._was_connected:
            return self._error() != 0
        # Only a reset: a peer that has woken up closes the connection of a stranger who says nothing.
        self.has_ended = self._error() == errno.ECONNRESET
        return True

    def _error(self) -> int:
        assert self._sock is not None, "it was opened"
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
