"""One bit for each element: its sign, and one scale.

C(z) = mean|z| sign(z)                          with error feedback: Karimireddy et al. (ICML 2019), algorithm 2
majority vote: sign(sum over workers of sign(z)) times the mean of their scales
                                                Bernstein et al., "signSGD with majority vote" (ICLR 2019)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket
    from offbeat.payload import GatheredPart


@dataclass(frozen=True)
class Sign(OneRoundCodec):
    """A codec that sends the sign of each element, and the mean of their sizes.

    Args:
        vote: whether each element of the update has the sign that most workers sent, and all the same size. What a
            worker sent counts as an equal part of the update then. Of an even number that disagrees nothing is left.

    >>> Sign()
    Sign(vote=False)
    """

    vote: bool = False

    @property
    def promises(self) -> Promises:
        # |C(z) - z|^2 = |z|^2 - |z|_1^2 / D, and |z|_1 may be as small as |z|: a contraction of 1 / D, which is above 0
        # for every z and far from it for those that are met. The norm of what is sent is the scale times sqrt(D).
        return Promises(
            linear=False,
            contraction=0.0,
            variance=None,
            keeps_norm=False,
            is_additive=not self.vote,
            passes=6.0,
        )

    def payload_bytes(self, bucket: Bucket) -> float:
        """A bit for each element, and four bytes for the scale."""
        return math.ceil(bucket.numel / 8) + 4.0

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as bits [D / 8] uint8, 1 for what is not below 0, and the scale [1] float32."""
        return _pack(grad >= 0), grad.abs().mean(dtype=torch.float32).reshape(1)

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shapes of the bits, and the scale."""
        return (torch.uint8, (math.ceil(numel / 8),)), (torch.float32, (1,))

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Give each sign the size."""
        bits, scale = _checked(tensors, len(out))
        size = scale.to(out.dtype)
        return torch.where(_unpack(bits, len(out)), size, -size, out=out)

    def combine(self, parts: Sequence[GatheredPart], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Add up what all sent, or take the sign that most of them sent."""
        if not self.vote:
            return super().combine(parts, turn, out)
        votes = torch.zeros(len(out), dtype=torch.int32, device=out.device)
        size = torch.zeros(1, device=out.device)
        for part in parts:
            bits, scale = _checked(part.tensors, len(out))
            size += scale  # a part in N of the mean each: together the size of the mean
            if bool(scale != 0):  # one without data has no vote
                votes += torch.where(_unpack(bits, len(out)), 1, -1)
        return out.copy_(votes.sign_()).mul_(size.to(out.dtype))

    def own_share(self, parts: Sequence[GatheredPart], total: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Decode what this worker sent, or take an equal part of what was voted for."""
        return total / len(parts) if self.vote else super().own_share(parts, total, turn)


def _checked(tensors: Sequence[torch.Tensor], numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(list(one.shape), one.dtype) for one in tensors]
    if shapes != [([math.ceil(numel / 8)], torch.uint8), ([1], torch.float32)]:
        raise PeerError(f"Cannot decode {shapes} as the signs of {numel} elements and their scale.")
    bits, scale = tensors
    return bits, scale


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits [D] into bytes, the first one highest."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Unpack what `_pack` made into bits [D]."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel)).view(torch.bool)
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).view(-1)[:numel].to(torch.bool)
