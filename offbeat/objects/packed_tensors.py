"""Several tensors in one object, or one tensor that is an object by itself: where each of them lies.

docs/objects.md has the format. Nothing is unpickled; what a header says is bounded, and has to fit the object.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash

from offbeat.errors import ObjectError
from offbeat.protocol.object_versions import MAX_TENSORS, PackedTensor, TensorsHeader, pack_part, tensors_of
from offbeat.protocol.objects import ITEM_BYTES, ObjectMeta
from offbeat.tensors import bytes_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

_MAGIC = b"offbeat tensors\x01"
_LENGTH = struct.Struct("<I")
_ALIGNED_BYTES = 64
MAX_HEADER_BYTES = 64 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class TensorLayout:
    """The places of tensors in an object.

    Args:
        tensors: in their order.
        head: what is before the first of them; empty for a tensor that is an object by itself.
        offsets: where each begins.
        meta: of the object.
    """

    tensors: tuple[PackedTensor, ...]
    head: bytes
    offsets: tuple[int, ...]
    meta: ObjectMeta

    @classmethod
    def of(cls, tensors: Tensor | Mapping[str, Tensor]) -> TensorLayout:
        """Lay out several tensors, or the one of an object of its own.

        Raises:
            ObjectError: if they cannot be in an object.

        >>> TensorLayout.of({"w": torch.zeros(2), "b": torch.zeros(3)}).offsets
        (64, 128)
        """
        if isinstance(tensors, torch.Tensor):
            return cls._alone(_described("", tensors).meta)
        if len(tensors) > MAX_TENSORS:
            raise ObjectError(f"Cannot put {len(tensors)} tensors in one object: it takes {MAX_TENSORS:,} at most.")
        return cls._several(tuple(_described(name, tensor) for name, tensor in tensors.items()))

    @classmethod
    def read(cls, meta: ObjectMeta, memory: memoryview) -> TensorLayout:
        """Find out where the tensors of an object lie.

        Raises:
            ObjectError: if its header is wrong.
        """
        is_packed = meta.dtype == "uint8" and len(meta.shape) == 1 and memory[: len(_MAGIC)] == _MAGIC
        if not is_packed:
            return cls._alone(meta)
        layout = cls._several(tensors_of(headed(memory, _MAGIC)).tensors)
        if layout.meta.shape != meta.shape or memory[: len(layout.head)] != layout.head:
            raise ObjectError(
                f"Cannot read these tensors: their header describes {layout.meta.size_bytes:,} bytes, and the object "
                f"has {meta.size_bytes:,}, or is written in another way."
            )
        return layout

    @classmethod
    def _alone(cls, meta: ObjectMeta) -> TensorLayout:
        plain = ObjectMeta(meta.dtype, meta.shape, meta.size_bytes)
        return cls((PackedTensor("", meta.dtype, meta.shape),), b"", (0,), plain)

    @classmethod
    def _several(cls, tensors: tuple[PackedTensor, ...]) -> TensorLayout:
        head = with_header(_MAGIC, pack_part(TensorsHeader(tensors)), _ALIGNED_BYTES)
        offsets, end = [], len(head)
        for tensor in tensors:
            offsets.append(end)
            end += aligned(tensor.meta.size_bytes, _ALIGNED_BYTES)
        if end >= 1 << 40:
            raise ObjectError(f"Cannot have {end:,} bytes in one object: it takes less than {1 << 40:,}.")
        return cls(tensors, head, tuple(offsets), ObjectMeta("uint8", (end,), end))

    def slices(self, memory: memoryview) -> list[memoryview]:
        """The bytes of each tensor in an object."""
        return [
            memory[offset : offset + tensor.meta.size_bytes]
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    def parts(self, tensors: Tensor | Mapping[str, Tensor]) -> Iterator[memoryview]:
        """The bytes of the object of these tensors, which are laid out so, one part after the other."""
        if self.head:
            yield memoryview(self.head)
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors.values():
            data = bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu())
            yield data
            if self.head:
                yield memoryview(bytes(aligned(len(data), _ALIGNED_BYTES) - len(data)))

    def tensors_in(self, memory: memoryview) -> dict[str, Tensor]:
        """The tensors of an object, in its memory."""
        return {
            tensor.name: tensor_in(tensor, part) for tensor, part in zip(self.tensors, self.slices(memory), strict=True)
        }

    def why_not(self, other: TensorLayout) -> str:
        """Say how another layout differs from this one, for people; "" if it does not."""
        mine, theirs = ({tensor.name: tensor for tensor in one.tensors} for one in (self, other))
        if missing := sorted(mine.keys() - theirs.keys()):
            return f"it has no {', '.join(map(repr, missing[:3]))} ({len(missing)} in all)"
        if more := sorted(theirs.keys() - mine.keys()):
            return f"it has {', '.join(map(repr, more[:3]))} ({len(more)} in all), which you do not"
        for name, tensor in mine.items():
            if theirs[name] != tensor:
                return f"its {name!r} is {theirs[name]}, and yours {tensor}"
        return "" if self.tensors == other.tensors else "its tensors are in another order"


def tensor_in(tensor: PackedTensor, memory: memoryview) -> Tensor:
    """A tensor in memory.

    Raises:
        ObjectError: if the bytes are none of its dtype.
    """
    dtype = getattr(torch, tensor.dtype)
    if not len(memory):
        return torch.empty(tensor.shape, dtype=dtype)
    if tensor.dtype == "bool" and torch.frombuffer(memory, dtype=torch.uint8).max() > 1:
        raise ObjectError(f"Cannot read {tensor.name!r}: it is bool, and some element is neither.")
    return torch.frombuffer(memory, dtype=dtype).reshape(tensor.shape)


def digest_of_parts(parts: Iterable[memoryview]) -> str:
    """The digest of an object's bytes, which are here in parts."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def aligned(size_bytes: int, to_bytes: int) -> int:
    """The next multiple."""
    return -(-size_bytes // to_bytes) * to_bytes


def with_header(magic: bytes, header: bytes, to_bytes: int) -> bytes:
    """The beginning of an object that has a header."""
    head = magic + _LENGTH.pack(len(header)) + header
    return head.ljust(aligned(len(head), to_bytes), b"\0")


def headed(memory: memoryview, magic: bytes) -> memoryview:
    """The header of an object.

    Raises:
        ObjectError: if it has none.
    """
    at = len(magic) + _LENGTH.size
    if len(memory) < at or memory[: len(magic)] != magic:
        raise ObjectError(f"Cannot read an object of {len(memory):,} bytes: it does not begin with {magic!r}.")
    length = _LENGTH.unpack(memory[len(magic) : at])[0]
    if length > min(MAX_HEADER_BYTES, len(memory) - at):
        raise ObjectError(f"Cannot read an object of {len(memory):,} bytes: its header would have {length:,}.")
    return memory[at : at + length]


def _described(name: str, tensor: Tensor) -> PackedTensor:
    dtype = dtype_name(tensor.dtype)
    if dtype not in ITEM_BYTES:
        raise ObjectError(f"Cannot put {name!r}: its dtype is {dtype}, and {', '.join(ITEM_BYTES)} can be put.")
    if tensor.layout != torch.strided or tensor.device.type == "meta" or type(tensor) not in _PLAIN:
        raise ObjectError(
            f"Cannot put {name!r}: it is a {type(tensor).__name__} ({tensor.layout}, on {tensor.device}), and has to "
            "be a dense tensor. Give its full tensor."
        )
    if len(name) > 1024 or tensor.dim() > 16:
        raise ObjectError(f"Cannot put {name[:40]!r}: a name has at most 1,024 characters, and a tensor 16 dimensions.")
    return PackedTensor(name, dtype, tuple(tensor.shape))
