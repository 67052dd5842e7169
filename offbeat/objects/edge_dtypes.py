"""The dtype of each edge of a reduce: what a store sends to the one that adds it.

    source --leaf--> stage --inner--> stage --inner--> root        the root rounds the sum to the sources' dtype, once

A stage adds in float32 what has 16 bits or fewer, and sends its partial sum on as it is, so an inner edge of such a sum
carries twice the bytes of a leaf edge (four times, of float8). The least and the greatest need no more bits than the
sources have. With a `wire` dtype all edges carry that, and each of them rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.protocol.objects import ITEM_BYTES

if TYPE_CHECKING:
    from offbeat.protocol.objects import ReduceOp

_SHORT = {"float16", "bfloat16"}
_SHORTEST = {"float8_e4m3fn", "float8_e5m2"}  # torch neither adds nor compares them


@dataclass(frozen=True)
class EdgeDtypes:
    """The dtypes of one reduce, as torch calls them.

    Args:
        source: of the sources, and of the result.
        total: in which a stage adds.
        leaf, inner: in which a source travels to its stage, and a partial sum to the next.

    >>> EdgeDtypes.of("bfloat16", "sum")
    EdgeDtypes(source='bfloat16', total='float32', leaf='bfloat16', inner='float32')
    >>> EdgeDtypes.of("float32", "sum", wire="bfloat16")
    EdgeDtypes(source='float32', total='float32', leaf='bfloat16', inner='bfloat16')
    """

    source: str
    total: str
    leaf: str
    inner: str

    @classmethod
    def of(cls, source: str, op: ReduceOp, wire: str = "") -> EdgeDtypes:
        """Choose them for the sources' dtype and an op; `wire` is "" for no other dtype on the way."""
        is_exact = op in ("min", "max")
        total = "float32" if source in _SHORTEST or (source in _SHORT and not is_exact) else source
        return cls(source, total, wire or source, wire or (source if is_exact else total))

    @property
    def inner_factor(self) -> float:
        """Return how many times the bytes of a leaf edge an inner one carries."""
        return ITEM_BYTES[self.inner] / ITEM_BYTES[self.leaf]


def why_no_wire(source: str, wire: str) -> str:
    """Say why elements of a dtype cannot travel in another one; "" if they can.

    >>> why_no_wire("float32", "bfloat16"), why_no_wire("float16", "float16")
    ('', '')
    >>> why_no_wire("int64", "bfloat16")
    'only float32 and float64 can be rounded to bfloat16 on their way'
    """
    if source in ("float32", "float64", wire):
        return ""
    return f"only float32 and float64 can be rounded to {wire} on their way"
