"""The conversation between stores of objects: a reader dials a feeder, and blocks come back on lanes.

reader                                          feeder
  | -- ReadObject(lane, name, begin, end) -----> |   bytes of an object, as they come there
  | -- ReadStage(lane, name, stripe, slot) ----> |   or of what a stage of a reduce has summed
  | -- AllowBytes(lane, until) ----------------> |   there is room for more
  | -- StopReading(lane) ----------------------> |
  | <----- blocks (`offbeat.wire.lane`) -------- |
  | <----- CannotRead(lane, reason) ------------ |   it is not there, and will not be

The reader numbers its lanes; a number is used once on a link. A feeder that does not have what is asked for yet waits
for it: the directory tells both of them at once, and either may hear of it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.protocol.bounds import Count, Text
from offbeat.protocol.decoding import read_message
from offbeat.protocol.objects import Address, Generation, ObjectName, Slot, Stripe, WireDtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALL_BYTES = (1 << 40) - 1
"""More than any object has."""
_Lane = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _LaneMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    lane: _Lane


class ReadObject(_LaneMessage, frozen=True, tag=True, kw_only=True):
    """Send the bytes from `begin` to `end` of an object, from the `start`-th of them on.

    Args:
        stripe, generation: of which these are the bytes; the generation is 0 where they are a part of a whole object.
        until: of them, how many may be sent.
        wire: a dtype to which a part of a whole object is rounded on its way; `start` and `until` count those bytes.
    """

    name: ObjectName
    stripe: Stripe
    generation: Generation
    begin: Count
    end: Count
    start: Count
    until: Count
    wire: WireDtype = ""


class ReadStage(_LaneMessage, frozen=True, tag=True, kw_only=True):
    """Send what a stage of a reduce has summed, from byte `start` on."""

    name: ObjectName
    stripe: Stripe
    slot: Slot
    attempt: Generation
    start: Count
    until: Count


class AllowBytes(_LaneMessage, frozen=True, tag=True, kw_only=True):
    """Word of how many bytes of a lane, from its first, may be sent."""

    until: Count


class StopReading(_LaneMessage, frozen=True, tag=True, kw_only=True):
    """No more is wanted on a lane."""


class CannotRead(_LaneMessage, frozen=True, tag=True, kw_only=True):
    """Word that the bytes of a lane are not there."""

    reason: Text


class ReaderHello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A reader's first word: the address by which directories know its store."""

    address: Address


FromReader = ReaderHello | ReadObject | ReadStage | AllowBytes | StopReading

_encode = msgspec.msgpack.Encoder().encode
_from_reader = msgspec.msgpack.Decoder(FromReader).decode
_from_feeder = msgspec.msgpack.Decoder(CannotRead).decode


def pack_lane_message(message: FromReader | CannotRead) -> bytes:
    """The message as a frame's metadata."""
    return _encode(message)


def from_reader_of(metadata: Buffer) -> FromReader:
    """Read what a reader says.

    Raises:
        PeerError: if it is none of that.
    """
    message: FromReader = read_message(_from_reader, metadata, "this reader of objects")
    return message


def from_feeder_of(metadata: Buffer) -> CannotRead:
    """Read what a feeder says.

    Raises:
        PeerError: if it is none of that.
    """
    message: CannotRead = read_message(_from_feeder, metadata, "this feeder of objects")
    return message
