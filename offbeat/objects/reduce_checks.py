"""The reasons for which a directory refuses a reduce, as far as the request and its sources show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.objects.edge_dtypes import why_no_wire

if TYPE_CHECKING:
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects


def why_not_so(request: ReduceObjects) -> str:
    """Say why nothing can be reduced as a request asks; "" if it can."""
    name, sources = request.name, request.sources
    if len(set(sources)) < len(sources):
        return f"Cannot reduce into {name}: a source is named twice."
    if not request.least <= request.count <= len(sources):
        return (
            f"Cannot reduce {request.count} (at least {request.least}) of {len(sources)} sources into {name}: "
            "at least, number and sources have to be in this order."
        )
    if request.in_order and request.count < len(sources):
        return f"Cannot reduce {request.count} of {len(sources)} sources into {name} in a fixed order: it takes all."
    if request.in_order and request.splices:
        return f"Cannot splice sources into {name} in a fixed order: no other one may take the place of a lost one."
    return ""


def why_not_of(request: ReduceObjects, source: ObjectName, meta: ObjectMeta, other: ObjectMeta | None) -> str:
    """Say why a source cannot be in a reduce; "" if it can.

    Args:
        request: that asks for the reduce.
        source, meta: the source.
        other: what the target is like; None as long as this is the first source.
    """
    if request.op == "mean" and not meta.dtype.startswith(("float", "bfloat", "complex")):
        return f"Cannot take the mean of {source}: it is {meta}. Take the sum, and divide it."
    if request.op in ("min", "max") and meta.dtype.startswith("complex"):
        return f"Cannot take the {request.op} of {source}: it is {meta}, and complex numbers have no order."
    if request.wire and (why := why_no_wire(meta.dtype, request.wire)):
        return f"Cannot reduce {source}, {meta}, with wire={request.wire}: {why}. Leave wire= out."
    if other is not None and (meta.dtype, meta.shape) != (other.dtype, other.shape):
        return f"Cannot reduce into {request.name}: {source} is {meta}, another source {other}."
    return ""
