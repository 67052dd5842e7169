"""The structured parts of a version: the header of several tensors in one object, that of a delta, and the description.

They travel as bytes of ordinary objects; docs/objects.md has the format. Whoever reads them knows nothing of who wrote
them, so everything is bounded, and checked when it is read.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from offbeat.errors import ObjectError, PeerError
from offbeat.protocol.bounds import Count, Dtype
from offbeat.protocol.decoding import read_message
from offbeat.protocol.objects import ITEM_BYTES, Dimension, ObjectMeta, ObjectName

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_TENSORS = 1 << 16
MAX_RECORDS = 256
"""Versions that a description may list."""
DELTA, DESCRIPTION = "@delta", "@description"
"""The endings of an id that name the deltas and the descriptions of its versions."""
_ContentDigest = Annotated[str, msgspec.Meta(max_length=32)]


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor in an object.

    Args:
        name: of it, as in a state dict.
        dtype: of its elements, one of `ITEM_BYTES`.
        shape: of it.
    """

    name: Annotated[str, msgspec.Meta(max_length=1024)]
    dtype: Dtype
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=16)]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name!r} has the dtype {self.dtype}, which no object has")

    @property
    def meta(self) -> ObjectMeta:
        """Return what an object of this tensor alone would be."""
        return ObjectMeta(self.dtype, self.shape, math.prod(self.shape) * ITEM_BYTES[self.dtype])

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorsHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tensors of an object, in the order in which they lie in it."""

    tensors: Annotated[tuple[PackedTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    def __post_init__(self) -> None:
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("two tensors have the same name")


class ChangedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that changed.

    Args:
        number: of it, in the order of the whole.
        width: of a gap, in bytes; 0 if all of its words follow.
        gaps: their number, with those that stand for no word.
        words: the number of changed words.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSORS)]
    width: Literal[0, 1, 2]
    gaps: Count
    words: Count


class DeltaHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The tensors that changed, in the order in which they are in the whole."""

    changed: Annotated[tuple[ChangedTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    def __post_init__(self) -> None:
        numbers = [one.number for one in self.changed]
        if any(before >= after for before, after in itertools.pairwise(numbers)):
            raise ValueError("tensors that changed are not in their order")


class VersionRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One version, as its publisher describes it.

    Args:
        version: of it.
        digest: of its whole.
        size_bytes: of its whole.
        is_kept: whether the whole is kept.
        base: the version that the delta begins with; None if there is no delta.
        delta_bytes, delta_digest: of the delta.
    """

    version: Count
    digest: _ContentDigest
    size_bytes: Count
    is_kept: bool = True
    base: Count | None = None
    delta_bytes: Count = 0
    delta_digest: _ContentDigest = ""

    def __post_init__(self) -> None:
        if self.base is not None and self.base >= self.version:
            raise ValueError(f"version {self.version} is based on version {self.base}")


class VersionDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version, which is the last one, and those before it that are still there."""

    records: Annotated[tuple[VersionRecord, ...], msgspec.Meta(min_length=1, max_length=MAX_RECORDS)]

    def __post_init__(self) -> None:
        versions = [record.version for record in self.records]
        if any(before >= after for before, after in itertools.pairwise(versions)):
            raise ValueError("versions are not in their order")


_encode = msgspec.msgpack.Encoder().encode
_tensors = msgspec.msgpack.Decoder(TensorsHeader).decode
_delta = msgspec.msgpack.Decoder(DeltaHeader).decode
_description = msgspec.msgpack.Decoder(VersionDescription).decode


def pack_part(part: TensorsHeader | DeltaHeader | VersionDescription) -> bytes:
    """The bytes of a header or a description."""
    return _encode(part)


def tensors_of(data: Buffer) -> TensorsHeader:
    """Read the header of several tensors.

    Raises:
        ObjectError: if it is none.
    """
    header: TensorsHeader = _read(_tensors, data, "the header of these tensors")
    return header


def delta_of(data: Buffer) -> DeltaHeader:
    """Read the header of a delta.

    Raises:
        ObjectError: if it is none.
    """
    header: DeltaHeader = _read(_delta, data, "the header of this delta")
    return header


def description_of(data: Buffer) -> VersionDescription:
    """Read a description.

    Raises:
        ObjectError: if it is none.
    """
    description: VersionDescription = _read(_description, data, "the description of this version")
    return description


def _read(decode: Any, data: Buffer, what: str) -> Any:
    """Objects are the fault of whoever has put them, not of the peer that hands them on."""
    try:
        return read_message(decode, data, what)
    except PeerError as error:
        raise ObjectError(str(error)) from error


def delta_name(id_: str, version: int) -> ObjectName:
    """The name of a version's delta."""
    return ObjectName(id_ + DELTA, version)


def description_name(id_: str, version: int) -> ObjectName:
    """The name of a version's description."""
    return ObjectName(id_ + DESCRIPTION, version)
