"""The layout of a model: which parameters lie where in which flat bucket.

A `Layout` is immutable and versioned. Gradients are views into the buckets it describes. All state is keyed by
parameter name, never by bucket index, so a new layout loses nothing.

Buckets are filled in the order in which gradients are expected, which is the reverse of the order of registration
until a backward pass has been seen. The first bucket is small, so that communication starts early (Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Slot:
    """The place of one parameter, or of a part of it, in a bucket.

    Args:
        shape: of the whole parameter.
        offset: where it begins in the bucket, in the bucket's elements, of which a complex one takes two.
        numel: how many of those it takes.
        start: which of the parameter's elements, in their order in memory, is the first, counted likewise.
        is_part: whether the rest of the parameter lies elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    start: int = 0
    is_part: bool = False


@dataclass(frozen=True)
class Bucket:
    """A flat stretch of gradients of one dtype on one device."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def label(self) -> str:
        """The layers it covers, for people: ``fc.bias … conv1.weight``."""
        names = [slot.name for slot in self.slots]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"

    @property
    def record(self) -> dict[str, Any]:
        """The bucket in a run's records."""
        return {"index": self.index, "size_bytes": self.size_bytes, "parameters": [slot.name for slot in self.slots]}


@dataclass(frozen=True)
class Layout:
    """The place of each dense parameter's gradient.

    Args:
        buckets: in order of issue.
        sparse: names of the parameters with sparse gradients, which travel outside the buckets, in order of issue.
        version: 0 at first; grows by one with each new arrangement of the same parameters.
    """

    buckets: tuple[Bucket, ...]
    sparse: tuple[str, ...] = ()
    version: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def names(self) -> tuple[str, ...]:
        """Dense parameter names in order of issue."""
        return tuple(slot.name for bucket in self.buckets for slot in bucket.slots)

    def describe(self) -> str:
        """One line per parameter, in order of issue: what two workers must have in common."""
        lines = [
            f"{slot.name} {list(slot.shape)} {dtype_name(bucket.dtype)} bucket {bucket.index}"
            for bucket in self.buckets
            for slot in bucket.slots
        ]
        return "\n".join(lines + [f"{name} sparse" for name in self.sparse])

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of `describe()`."""
        return hashlib.sha256(self.describe().encode()).hexdigest()


def arrange(
    parameters: Mapping[str, torch.Tensor],
    *,
    bucket_bytes: int,
    sparse: Iterable[str] = (),
    order: Sequence[str] | None = None,
    version: int = 0,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> Layout:
    """Pack `parameters` into buckets of about `bucket_bytes`.

    Args:
        parameters: trainable parameters by name, in order of registration.
        bucket_bytes: a bucket is closed when it holds at least this much; the first at `first_bytes` if that is less.
        sparse: names that are kept out of the buckets.
        order: names in the order in which gradients arrive; reverse of registration if None.
        first_bytes: 1 MiB unless given.

    Parameters of different dtype or device never share a bucket; within one kind the order is kept. Buckets are
    numbered by the position of their last parameter, the moment they can be sent. Complex gradients lie in buckets of
    real numbers, because not everything that adds can add complex ones.

    >>> import torch
    >>> layout = arrange({"a": torch.zeros(3), "b": torch.zeros(2)}, bucket_bytes=1 << 20)
    >>> [slot.name for slot in layout.buckets[0].slots]
    ['b', 'a']
    """
    outside = set(sparse)
    arrival = list(order) if order is not None else list(parameters)[::-1]
    open_: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    closed: list[list[str]] = []
    for name in arrival:
        if name in outside:
            continue
        kind = (parameters[name].dtype, parameters[name].device)
        names = open_.setdefault(kind, [])
        names.append(name)
        limit = bucket_bytes if closed else min(bucket_bytes, first_bytes)
        if sum(_size_bytes(parameters[n]) for n in names) >= limit:
            closed.append(open_.pop(kind))
    position = {name: i for i, name in enumerate(arrival)}
    closed += sorted(open_.values(), key=lambda names: position[names[-1]])
    return Layout(
        buckets=tuple(_bucket(i, names, parameters) for i, names in enumerate(closed)),
        sparse=tuple(name for name in arrival if name in outside),
        version=version,
    )


def arrange_fragments(
    parameters: Mapping[str, torch.Tensor], count: int, *, bucket_bytes: int
) -> list[tuple[Bucket, ...]]:
    """Pack each of `count` fragments of a model into buckets of its own.

    Args:
        parameters: trainable parameters by name, in order of registration; a fragment has successive ones, and is about
            as large as the others.
        bucket_bytes: as of `arrange`.

    >>> import torch
    >>> fragments = arrange_fragments({"a": torch.zeros(3), "b": torch.zeros(2)}, 2, bucket_bytes=1 << 20)
    >>> [[slot.name for bucket in buckets for slot in bucket.slots] for buckets in fragments]
    [['a'], ['b']]
    """
    names = list(parameters)
    fragments, index = list[tuple[Bucket, ...]](), 0
    for part in partition([_size_bytes(parameters[name]) for name in names], count):
        layout = arrange({names[i]: parameters[names[i]] for i in part}, bucket_bytes=bucket_bytes)
        fragments.append(tuple(dataclasses.replace(one, index=index + one.index) for one in layout.buckets))
        index += len(layout.buckets)
    return fragments


def partition(sizes: Sequence[int], count: int) -> list[range]:
    """Cut a list into `count` stretches, the largest of which is as small as can be.

    Args:
        sizes: of its elements.
        count: of stretches; if there are fewer elements, the last of these are empty.

    >>> partition([4, 1, 1, 2, 3], 3)
    [range(0, 1), range(1, 4), range(4, 5)]
    """
    least, most = max(sizes, default=0), sum(sizes)
    while least < most:
        room = (least + most) // 2
        if len(_filled(sizes, room)) <= count:
            most = room
        else:
            least = room + 1
    # With so much room in each; but no stretch is to be empty while another has several.
    ends = _filled(sizes, least)
    while len(ends) < min(count, len(sizes)):
        begins = [0, *ends[:-1]]
        cut = max(range(len(ends)), key=lambda i: (ends[i] - begins[i] > 1, sum(sizes[begins[i] : ends[i]])))
        ends.insert(cut, begins[cut] + _half(sizes[begins[cut] : ends[cut]]))
    ends += [len(sizes)] * (count - len(ends))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _filled(sizes: Sequence[int], room: int) -> list[int]:
    """The ends of stretches that are each filled until no more fits into `room`."""
    ends, filled = list[int](), 0
    for index, size in enumerate(sizes):
        if index and filled + size > room:
            ends.append(index)
            filled = 0
        filled += size
    return [*ends, len(sizes)]


def _half(sizes: Sequence[int]) -> int:
    """Count the first ones that have about half of the whole: at least one, and not all."""
    return min(range(1, len(sizes)), key=lambda count: abs(sum(sizes) - 2 * sum(sizes[:count])))


def _bucket(index: int, names: list[str], parameters: Mapping[str, torch.Tensor]) -> Bucket:
    slots, offset = [], 0
    for name in names:
        shape = tuple(parameters[name].shape)
        numel = math.prod(shape) * (2 if parameters[name].is_complex() else 1)
        slots.append(Slot(name, shape, offset, numel))
        offset += numel
    first = parameters[names[0]]
    return Bucket(index, first.dtype.to_real(), first.device, tuple(slots))


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
