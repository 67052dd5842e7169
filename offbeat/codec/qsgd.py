"""Few bits for each element, rounded at random: unbiased, with the error bounded by the norm.

QSGD: Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding" (NeurIPS 2017),
sections 3.1 and 4: buckets of few elements, each with a scale of its own. Here a bucket is called a group, and the
levels are sent with equally many bits each; there is no entropy coding.

    scale = max |z_i| of the group              (the "infinity norm" of section 4)
    q_i   = round_at_random(s z_i / scale)      in -s ... s, with E q_i = s z_i / scale
    C(z)  = scale q / s                         s = 2^(bits - 1) - 1

Random numbers have steps of 2^-32. So beyond the rounding of float32 the expectation of an element is off by at most
2^-32 scale / s, and an element below 2^-33 scale / s is never sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.errors import PeerError, PlanError
from offbeat.number_range import WholeNumbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

_LEAST_SCALE = 2.0**-118  # below which levels / scale would be more than float32 holds


@dataclass(frozen=True)
class QSGD(OneRoundCodec):
    """A codec that sends each element in a few bits, and one scale for each group of elements.

    Args:
        bits: of each element: 8, 4 or 2.
        group: how many elements have a scale in common; even.
        is_random: whether it rounds at random, which makes it unbiased; else to the nearest, which errs less.

    Raises:
        PlanError: if a value is none of these.

    >>> QSGD(4)
    QSGD(bits=4, group=512, is_random=True)
    """

    bits: Literal[8, 4, 2] = 8
    group: int = 512
    is_random: bool = True

    def __post_init__(self) -> None:
        if self.bits not in WholeNumbers(2) or self.bits not in (8, 4, 2):
            raise PlanError(f"Cannot send {self.bits!r} bits an element: choose 8, 4 or 2 - at `plan.codec.bits`.")
        if self.group not in WholeNumbers(8) or self.group % 4:
            raise PlanError(
                f"Cannot scale groups of {self.group!r} elements: a group has at least 8, and a multiple of 4 "
                "- at `plan.codec.group`."
            )

    @property
    def levels(self) -> int:
        """The largest level s."""
        return (1 << (self.bits - 1)) - 1

    @property
    def promises(self) -> Promises:
        # Of an element between two levels the variance is at most scale^2 / (4 s^2), and scale^2 is at most |z|^2. To
        # the nearest no error is above that, nor above the element, and the largest of a group has none.
        omega = self.group / (4 * self.levels**2)
        return Promises(
            linear=False,
            contraction=1 - omega if omega < 1 else None if self.is_random else 0.0,
            variance=omega if self.is_random else None,
            passes=12.0 if self.is_random else 8.0,
        )

    def payload_bytes(self, bucket: Bucket) -> float:
        """The bytes of the levels, and four for each scale."""
        groups = math.ceil(bucket.numel / self.group)
        return groups * (self.group * self.bits / 8 + 4)

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as levels, packed [G, group * bits / 8] uint8, and scales [G] float32, of G groups."""
        groups = math.ceil(len(grad) / self.group)
        values = torch.zeros(groups, self.group, device=grad.device)
        values.view(-1)[: len(grad)] = grad
        # A group of zeros stays one; what is not finite stays so, for whoever looks.
        scales = values.abs().amax(1).clamp_(min=_LEAST_SCALE)
        values *= (self.levels / scales)[:, None]
        if self.is_random:
            # Magnitudes are compared with the noise near 0, where float32 is fine enough for any probability.
            sizes = values.abs().sub_(turn.noise(values.numel(), grad.device).view_as(values)).ceil_().clamp_(min=0)
            values = sizes.copysign_(values)
        else:
            values.round_()
        values.nan_to_num_(0.0, self.levels, -self.levels).clamp_(-self.levels, self.levels)
        return self._pack(values.to(torch.int8)), scales

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shapes of the packed levels, and the scales."""
        groups = math.ceil(numel / self.group)
        return (torch.uint8, (groups, self.group * self.bits // 8)), (torch.float32, (groups,))

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Multiply each level by its group's scale."""
        return out.copy_(self._values(tensors, len(out)))

    def accumulate_(self, total: torch.Tensor, tensors: Sequence[torch.Tensor], turn: Turn) -> None:
        """Add what a worker sent."""
        total += self._values(tensors, len(total))

    def _values(self, tensors: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
        groups = math.ceil(numel / self.group)
        shapes = [(list(one.shape), one.dtype) for one in tensors]
        if shapes != [([groups, self.group * self.bits // 8], torch.uint8), ([groups], torch.float32)]:
            raise PeerError(f"Cannot decode {shapes} as {groups} groups of {self.group} elements of {self.bits} bits.")
        levels = self._unpack(tensors[0]).to(torch.float32)
        return levels.mul_((tensors[1] / self.levels)[:, None]).view(-1)[:numel]

    def _pack(self, levels: torch.Tensor) -> torch.Tensor:
        """Pack levels [G, group] int8 into bytes; those beside each other in a byte come from different parts."""
        if self.bits == 8:
            return levels.view(torch.uint8)
        mask, parts = (1 << self.bits) - 1, levels.chunk(8 // self.bits, 1)
        packed = torch.zeros_like(parts[0], dtype=torch.uint8)
        for place, part in enumerate(parts):
            packed |= (part.view(torch.uint8) & mask) << (place * self.bits)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpack what `_pack` made; a level that no worker sends, -s - 1, is left as it is."""
        if self.bits == 8:
            return packed.view(torch.int8)
        free = 8 - self.bits
        parts = [(packed << (free - place * self.bits)).view(torch.int8) >> free for place in range(8 // self.bits)]
        return torch.cat(parts, 1)
