"""Reading a message: it is one of those that are declared, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer


def read_message(decode: Callable[[Any], Any], data: Buffer, whose: str) -> Any:
    """Read a message.

    Args:
        decode: of a msgspec decoder.
        data: the message as bytes.
        whose: what sent it, for the refusal, such as "this client".

    Raises:
        PeerError: if it is none of those that the decoder knows.
    """
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: text that is not UTF-8
        raise PeerError(f"Cannot understand {whose}: {error}.") from error
