"""The conversation of a client and the store of its machine. Objects are in memory that both map.

client                                          store
  | -- CreateCall(call, name, meta) -----------> |   memory for an object that the client makes
  | <----- MemoryAnswer(call, process, ...) ---- |   whose descriptor is to be mapped
  | -- FilledNote(name, have) -----------------> |   so much of it is there
  | -- FinishCall(call, name) -----------------> |   all of it
  | -- AbandonNote(name) ------------------------> |   it will never be finished
  | -- PutSmallCall(call, name, meta, data) ---> |   a small one, at once
  | <----- DoneAnswer(call) -------------------- |
  | -- GetCall(call, name) --------------------> |
  | <----- ProgressNote(call, ...) ------------- |   again and again, as long as it waits
  | <----- ObjectAnswer(call, meta, ...) ------- |
  | -- VersionsCall(call, id, after, waits) ---> |   which versions of an id are there?
  | <----- VersionsAnswer(call, versions, ...) - |   at once, or as soon as there is one after that
  | -- StopCall(call) -------------------------> |   it does not wait any more
  | -- ReleaseNote(name) ----------------------> |   it does not look at the object any more
  | -- ReduceCall(call, request) --------------> |
  | <----- DoneAnswer(call) -------------------- |   once it is made
  | -- DeleteNote(name) -----------------------> |
  | -- StatusCall(call) -----------------------> |   also an onlooker
  | <----- StatusAnswer(call, ...) ------------- |
  | <----- CallFailed(call, kind, reason) ------ |   instead of any of these answers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from offbeat.protocol.bounds import Count, Seconds, Text
from offbeat.protocol.decoding import read_message
from offbeat.protocol.objects import (
    INLINE_BYTES,
    MAX_SOURCES,
    MAX_VERSIONS,
    MOST_NAMED,
    ObjectId,
    ObjectMeta,
    ObjectName,
    ReduceObjects,
    UsedSource,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Call = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Process = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Descriptor = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Data = Annotated[bytes, msgspec.Meta(max_length=INLINE_BYTES)]


class _Numbered(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    call: _Call


class _Named(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    name: ObjectName


class CreateCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A request for memory for an object."""

    name: ObjectName
    meta: ObjectMeta


class FilledNote(_Named, frozen=True, tag=True, kw_only=True):
    """Word of how many bytes of an object that this client makes are there."""

    have_bytes: Count


class FinishCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """All bytes of an object that this client makes are there."""

    name: ObjectName


class AbandonNote(_Named, frozen=True, tag=True, kw_only=True):
    """An object that this client makes will not be finished."""


class PutSmallCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A small object."""

    name: ObjectName
    meta: ObjectMeta
    data: _Data


class GetCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A request for an object, which is answered when it is there."""

    name: ObjectName


class VersionsCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A request for the versions of an id.

    Args:
        after: of interest is a version after this one.
        waits: whether the answer may wait until there is one.
    """

    id: ObjectId
    after: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)]
    waits: bool


class StopCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """The client does not wait for the answer of this call any more."""


class ReleaseNote(_Named, frozen=True, tag=True, kw_only=True):
    """The client has let go of an object's memory."""


class ReduceCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A request for a sum; answered once it is made, or refused."""

    request: ReduceObjects


class DeleteNote(_Named, frozen=True, tag=True, kw_only=True):
    """All stores are to let go of an object.

    Args:
        when_read: only once no store reads it any more.
    """

    when_read: bool = False


class StatusCall(_Numbered, frozen=True, tag=True, kw_only=True):
    """A request for what is in the store."""


class DoneAnswer(_Numbered, frozen=True, tag=True, kw_only=True):
    """Word that a call is done.

    Args:
        is_new: whether what was put was not there before.
    """

    is_new: bool = True


class MemoryAnswer(_Numbered, frozen=True, tag=True, kw_only=True):
    """Memory to be filled, by the process and the descriptor that it has in there."""

    process: _Process
    descriptor: _Descriptor


class ObjectAnswer(_Numbered, frozen=True, tag=True, kw_only=True):
    """An object that is there.

    Args:
        process, descriptor: where its memory is; 0 for a small one.
        data: the bytes of a small one.
        used: the sources that it was made of, if it is a sum.
    """

    meta: ObjectMeta
    process: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    descriptor: _Descriptor = 0
    data: _Data = b""
    used: Annotated[tuple[UsedSource, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()


class VersionsAnswer(_Numbered, frozen=True, tag=True, kw_only=True):
    """The versions of an id.

    Args:
        versions: that some store has all of, ascending.
        highest: version that was put, whether or not it is still there; -1 if none was.
    """

    versions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_VERSIONS)]
    highest: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)]


class ProgressNote(_Numbered, frozen=True, tag=True, kw_only=True):
    """Word of how far an object is that the client waits for.

    Args:
        size_bytes: 0 as long as nobody has put it.
        feeder: the store that it comes from; "" if none just now.
        silent_s: since anything of it has come.
        away_s: since its directory was lost; 0 if it is there.
        lacking, missing, more: of a sum, as in `SumWaits`.
    """

    have_bytes: Count
    size_bytes: Count
    feeder: Annotated[str, msgspec.Meta(max_length=256)]
    silent_s: Seconds
    away_s: Seconds = 0.0
    lacking: Count = 0
    missing: Annotated[tuple[ObjectName, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()
    more: Count = 0


class StoredStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object of a store."""

    name: ObjectName
    meta: ObjectMeta
    have_bytes: Count
    is_own: bool
    readers: Count


_Total = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class StatusAnswer(_Numbered, frozen=True, tag=True, kw_only=True):
    """The objects of the store, and the bytes of objects that it has sent to other stores and received from them.

    Args:
        peak_bytes: the most that it has used.
    """

    address: Annotated[str, msgspec.Meta(max_length=256)]
    used_bytes: Count
    peak_bytes: Count
    most_bytes: Count
    sent_bytes: _Total
    received_bytes: _Total
    objects: Annotated[tuple[StoredStatus, ...], msgspec.Meta(max_length=4096)]


class CallFailed(_Numbered, frozen=True, tag=True, kw_only=True):
    """A call cannot be granted.

    Args:
        kind: the object's fault ("object"), or others said something else of it ("differs"), or what is to be put is
            here already ("here").
    """

    reason: Text
    kind: Literal["object", "differs", "here"] = "object"


FromClient = (
    CreateCall
    | FilledNote
    | FinishCall
    | AbandonNote
    | PutSmallCall
    | GetCall
    | VersionsCall
    | StopCall
    | ReleaseNote
    | ReduceCall
    | DeleteNote
    | StatusCall
)
ToClient = DoneAnswer | MemoryAnswer | ObjectAnswer | VersionsAnswer | ProgressNote | StatusAnswer | CallFailed

_encode = msgspec.msgpack.Encoder().encode
_from_client = msgspec.msgpack.Decoder(FromClient).decode
_to_client = msgspec.msgpack.Decoder(ToClient).decode


def pack_call(message: FromClient | ToClient) -> bytes:
    """The message as a frame's metadata."""
    return _encode(message)


def from_client_of(metadata: Buffer) -> FromClient:
    """Read what a client says to its store.

    Raises:
        PeerError: if it is none of that.
    """
    message: FromClient = read_message(_from_client, metadata, "this client")
    return message


def to_client_of(metadata: Buffer) -> ToClient:
    """Read what a store says to its client.

    Raises:
        PeerError: if it is none of that.
    """
    message: ToClient = read_message(_to_client, metadata, "this store of objects")
    return message
