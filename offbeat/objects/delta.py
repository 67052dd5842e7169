"""The difference of two versions of tensors, bit by bit: the changed words, and the gaps before them.

`encode` compares the bytes of two wholes of one layout. `decode` returns the positions and the words of each tensor
that changed, and has checked all of them: positions ascend, and lie in the tensor. docs/objects.md has the format. A
random change of 2 % of a bfloat16 tensor takes 3 bytes an element, with a gap in one byte; one of 0.2 % takes 4.

Pure, on numpy; it writes nothing. Digests say whether the base and the delta are those that were published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from offbeat.errors import ObjectError
from offbeat.objects.packed_tensors import aligned, headed, with_header
from offbeat.protocol.object_versions import ChangedTensor, DeltaHeader, delta_of, pack_part
from offbeat.protocol.objects import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.objects.packed_tensors import TensorLayout

    Words = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"offbeat delta\0\0\x01"
_ALIGNED_BYTES = 8
_COMPARED_WORDS = 1 << 18  # at once: they stay in the processor's cache
_WIDTHS: tuple[Literal[1, 2], ...] = (1, 2)


@dataclass(frozen=True)
class TensorChange:
    """The words of a tensor that changed.

    Args:
        number: of the tensor.
        positions: of the words, ascending, as int64; None for all of them.
        words: their new bits, as integers.
    """

    number: int
    positions: Words | None
    words: Words


def encode(layout: TensorLayout, before: memoryview, after: memoryview) -> list[memoryview] | None:
    """Compare two wholes of one layout.

    Returns:
        The parts of the delta; None if they are no fewer bytes than the whole.
    """
    changed: list[ChangedTensor] = []
    parts: list[Words] = []
    for number, (old, new) in enumerate(zip(layout.slices(before), layout.slices(after), strict=True)):
        item = word_bytes(layout.tensors[number].dtype)
        new_words = _words(new, item)
        positions = _changed(_words(old, item), new_words)
        if not len(positions):
            continue
        gaps = np.diff(positions, prepend=-1) - 1
        sizes = {width: width * (len(gaps) + int((gaps // _escape(width)).sum())) for width in _WIDTHS}
        width = min(_WIDTHS, key=lambda one: sizes[one])
        if sizes[width] + len(positions) * item >= len(new):
            changed.append(ChangedTensor(number, 0, 0, len(new_words)))
            parts.append(new_words)
        else:
            codes = _codes_of(gaps, width)
            changed.append(ChangedTensor(number, width, len(codes), len(positions)))
            parts += [codes, new_words[positions]]
    head = with_header(_MAGIC, pack_part(DeltaHeader(tuple(changed))), _ALIGNED_BYTES)
    made = [memoryview(head)]
    for part in parts:
        data = memoryview(part.view(np.uint8))  # type: ignore[arg-type]
        made += [data, memoryview(bytes(aligned(len(data), _ALIGNED_BYTES) - len(data)))]
    return made if sum(map(len, made)) < layout.meta.size_bytes else None


def decode(layout: TensorLayout, delta: memoryview) -> list[TensorChange]:
    """Read a delta to a whole of this layout.

    Raises:
        ObjectError: if it is none.
    """
    changed = delta_of(header := headed(delta, _MAGIC)).changed
    at = aligned(len(_MAGIC) + 4 + len(header), _ALIGNED_BYTES)
    found = []
    for one in changed:
        if one.number >= len(layout.tensors):
            raise ObjectError(f"Cannot read a delta: it changes tensor {one.number} of {len(layout.tensors)}.")
        tensor = layout.tensors[one.number]
        item = word_bytes(tensor.dtype)
        most = tensor.meta.size_bytes // item
        if one.words > most or one.gaps > most or (not one.width and (one.gaps or one.words < most)):
            raise ObjectError(
                f"Cannot read a delta: it changes {one.words:,} of the {most:,} words of {tensor.name!r} by "
                f"{one.gaps:,} gaps of {one.width} bytes."
            )
        codes, at = _taken(delta, at, one.gaps, one.width or 1)
        words, at = _taken(delta, at, one.words, item)
        positions = _positions_of(codes.view(f"<u{one.width}"), one.words, most, tensor.name) if one.width else None
        if tensor.dtype == "bool" and len(words) and words.view(np.uint8).max() > 1:
            raise ObjectError(f"Cannot read a delta: {tensor.name!r} is bool, and some element would be neither.")
        found.append(TensorChange(one.number, positions, words))
    if at != len(delta):
        raise ObjectError(f"Cannot read a delta: it has {len(delta):,} bytes, and its header describes {at:,}.")
    return found


def size_of(parts: Sequence[memoryview]) -> int:
    """The bytes of a delta."""
    return sum(map(len, parts))


def word_bytes(dtype: str) -> int:
    """The bytes of a word: an element, or half of a complex128."""
    return min(ITEM_BYTES[dtype], 8)


def _words(memory: memoryview, item_bytes: int) -> Words:
    return np.frombuffer(memory, dtype=f"<i{item_bytes}")


def _changed(before: Words, after: Words) -> Words:
    found = [
        np.flatnonzero(before[at : at + _COMPARED_WORDS] != after[at : at + _COMPARED_WORDS]) + at
        for at in range(0, len(before), _COMPARED_WORDS)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _escape(width: int) -> int:
    """The code that stands for so many unchanged words, and no changed one."""
    return int((1 << 8 * width) - 1)


def _codes_of(gaps: Words, width: int) -> Words:
    escapes, rest = np.divmod(gaps, _escape(width))
    ends = np.cumsum(escapes + 1)
    codes = np.full(int(ends[-1]), _escape(width), f"<u{width}")
    codes[ends - 1] = rest
    return codes


def _positions_of(codes: Words, count: int, most: int, name: str) -> Words:
    is_word = codes != _escape(codes.itemsize)
    if np.count_nonzero(is_word) != count or not count or not is_word[-1]:
        raise ObjectError(f"Cannot read a delta: its {len(codes):,} gaps are not those of {count:,} words of {name!r}.")
    positions: Words = np.cumsum(codes, dtype=np.int64)[is_word] + np.arange(count)
    if positions[-1] >= most:
        raise ObjectError(f"Cannot read a delta: it changes word {positions[-1]:,} of {name!r}, which has {most:,}.")
    return positions


def _taken(delta: memoryview, at: int, count: int, item_bytes: int) -> tuple[Words, int]:
    end = at + count * item_bytes
    if aligned(end, _ALIGNED_BYTES) > len(delta):
        raise ObjectError(
            f"Cannot read a delta: it has {len(delta):,} bytes, and its header describes {end:,} or more."
        )
    return _words(delta[at:end], item_bytes), aligned(end, _ALIGNED_BYTES)
