"""Snapshots: the state that a shard keeps to go on after it was killed, and its file format.

    file = frames as on the wire (`offbeat.wire.frame`), each with its checksums:
           `SnapshotHeader` | `SnapshotTensor` + elements, once per tensor | `Last`

A file without its `Last` was cut off; a frame that does not agree with its checksum is damaged: such a file is not
read. Nothing in it is code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import torch

from offbeat.coordinator.progress import TrainingProgress
from offbeat.errors import PeerError
from offbeat.protocol.training import ModelInfo
from offbeat.safe_read import UnreadableError, decode
from offbeat.tensors import bytes_of, dtype_name
from offbeat.wire.frame import Frame, Reader, head

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
_FRAMES = 4  # version of the frames in files: it stays when the wire's is raised
_READS = range(2, 6)  # once a file had the wire's of its day; since 2 frames are laid out like this
_MOST_BODY_BYTES = (1 << 32) - 1  # of one frame
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
STATE_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}


class SnapshotId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The identity of a snapshot: the same on all shards of a server.

    Args:
        number: later ones have greater numbers.
        life: of the server that made it (see `offbeat.coordinator.reconnect`).
    """

    number: _Count
    life: _Count


class SnapshotModel(msgspec.Struct, frozen=True):
    """One model. `progress` is None on shards that do not coordinate."""

    model: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    version: _Count
    details: ModelInfo
    progress: TrainingProgress | None = None


class SnapshotHeader(msgspec.Struct, frozen=True):
    """The header before the tensors.

    Args:
        shards: of the server.
    """

    format: int
    job: str
    identity: SnapshotId
    shards: _Count
    models: tuple[SnapshotModel, ...]


class SnapshotTensor(msgspec.Struct, frozen=True, array_like=True):
    """The description of one tensor of a block: its values if `name` is "", else a part of the optimizer's state of
    that parameter.
    """

    model: _Count
    block: _Count
    name: str
    key: str
    dtype: str
    shape: tuple[_Count, ...]


class Last(msgspec.Struct, frozen=True, tag="Last"):
    tensors: _Count


@dataclass(frozen=True)
class Snapshot:
    """A shard at one version of each model.

    Args:
        tensors: which do not change any more.
    """

    header: SnapshotHeader
    tensors: list[tuple[SnapshotTensor, torch.Tensor]]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)


_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(SnapshotHeader).decode
_tensor_of = msgspec.msgpack.Decoder(SnapshotTensor).decode


def describe_tensor(model: int, block: int, name: str, key: str, tensor: torch.Tensor) -> SnapshotTensor:
    """Describe a tensor."""
    return SnapshotTensor(model, block, name, key, dtype_name(tensor.dtype), tuple(tensor.shape))


def write(file: BinaryIO, snapshot: Snapshot) -> None:
    """Write it.

    Raises:
        OSError: as the file does.
    """
    body = _encode(snapshot.header)
    file.write(head(b"", body, version=_FRAMES) + body)
    for what, tensor in snapshot.tensors:
        view = bytes_of(tensor)
        file.write(head(_encode(what), view, version=_FRAMES))
        file.write(view)
    file.write(head(_encode(Last(len(snapshot.tensors))), version=_FRAMES))


def read(file: BinaryIO) -> Snapshot:
    """Read all of a snapshot, checked.

    Raises:
        PeerError: if it is damaged, cut off, or no snapshot.
        OSError: as the file does.
    """
    frames = _frames(file)
    header = _header_of(next(frames, None))
    tensors: list[tuple[SnapshotTensor, torch.Tensor]] = []
    for frame in frames:
        try:
            if not frame.body and frame.metadata == _encode(Last(len(tensors))):
                return Snapshot(header, tensors)
            what = decode(_tensor_of, frame.metadata)
        except UnreadableError as error:
            raise PeerError(f"it holds what does not belong there: {error}") from error
        tensors.append((what, _tensor(what, frame)))
    raise PeerError("its end is missing")


def _header_of(frame: Frame | None) -> SnapshotHeader:
    if frame is None:
        raise PeerError("it is empty, or cut off")
    try:
        header = decode(_header, frame.body)
    except UnreadableError as error:
        raise PeerError(f"it does not begin as a snapshot: {error}") from error
    if header.format != FORMAT:
        raise PeerError(f"it is of format {header.format}, this is format {FORMAT}")
    return header


def _frames(file: BinaryIO) -> Iterator[Frame]:
    reader = Reader(max_metadata_bytes=1 << 20, max_body_bytes=_MOST_BODY_BYTES, versions=_READS)
    while size := file.readinto(reader.get_buffer()):  # type: ignore[attr-defined]
        if reader.buffer_updated(size):
            while (frame := reader.next_frame()) is not None:
                yield frame


def _tensor(what: SnapshotTensor, frame: Frame) -> torch.Tensor:
    dtype = STATE_DTYPES.get(what.dtype)
    numel = 1
    for size in what.shape:
        numel *= size
    if dtype is None or numel * dtype.itemsize != len(frame.body):
        raise PeerError(f"a tensor of {len(frame.body)} bytes says it is {what.dtype} of shape {list(what.shape)}")
    if numel == 0:
        try:
            return torch.empty(what.shape, dtype=dtype)
        except RuntimeError as error:  # of a shape that torch cannot count through
            raise PeerError(f"an empty tensor says it is of shape {list(what.shape)[:8]}: {error}") from error
    return torch.frombuffer(frame.body, dtype=dtype).reshape(what.shape)
