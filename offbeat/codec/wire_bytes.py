"""The bytes on each link, of whatever a codec sends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from offbeat.layout import Bucket, Slot
from offbeat.payload import Gather

if TYPE_CHECKING:
    from offbeat.codec.codec import Codec


def allreduce_bytes(codec: Codec, bucket: Bucket, world: int) -> float:
    """The size of the all-reduce that keeps each link as busy as an exchange of this bucket does.

    Of a sum of S bytes a link carries 2 (N - 1) / N S. Of what is gathered it carries N - 1 contributions.

    >>> from offbeat.codec import Cast, Dense
    >>> allreduce_bytes(Cast(), flat_bucket(100), world=4) / allreduce_bytes(Dense(), flat_bucket(100), world=4)
    0.5
    """
    brought = codec.payload_bytes(bucket)
    opaque = Gather in codec.needs and codec.promises.rounds == 1
    return brought * max(1, world) / 2 if opaque else brought


def flat_bucket(numel: int) -> Bucket:
    """A bucket of so many float32 elements, of whose shapes nothing is known: one about square matrix."""
    rows = side = max(1, math.isqrt(numel))
    while numel % rows:
        rows -= 1
    if rows < side / 2:  # it has no divisor near: a few elements are left out
        rows, numel = side, side * (numel // side)
    slot = Slot("", (rows, numel // rows), 0, numel)
    return Bucket(0, torch.float32, torch.device("cpu"), (slot,))
