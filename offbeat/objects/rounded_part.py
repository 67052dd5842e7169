"""A part of an object, rounded to another dtype for its way to a stage of a reduce."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from offbeat.protocol.objects import ITEM_BYTES
from offbeat.wire.lane import GrowingBuffer

if TYPE_CHECKING:
    from offbeat.objects.stage import Arithmetic

_PIECE = 1 << 20  # elements, which take some ms


def rounded_part(memory: memoryview, dtype: str, wire: str, arithmetic: Arithmetic, generation: int) -> GrowingBuffer:
    """Return a rounded copy that grows piece by piece, so that the links of the store's loop keep beating."""
    of_part, of_copy = ITEM_BYTES[dtype], ITEM_BYTES[wire]
    numel = len(memory) // of_part
    copy = GrowingBuffer(memoryview(bytearray(numel * of_copy)), 0, generation)
    loop = asyncio.get_running_loop()

    def advance(begin: int) -> None:
        end = min(numel, begin + _PIECE)
        arithmetic.convert(
            copy.memory[begin * of_copy : end * of_copy], memory[begin * of_part : end * of_part], dtype, wire
        )
        copy.grow(end * of_copy)
        if end < numel:
            loop.call_soon(advance, end)

    if numel:
        advance(0)
    return copy
