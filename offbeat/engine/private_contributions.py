"""Contributions that are clipped and noised before anything else is made of them, and the count of them.

    contribution   min(1, S / |u|) u + N(0, (noise S)^2)      |u| over all blocks of the model
    reference      min(1, S / |v|) v                          as long as the others; it stays where it is trusted

Noise is this worker's alone. It comes neither from the run's seed, which all know, nor from torch's generator of the
CPU: that goes by the lowest 32 bits of its seed, all of which a server could try out, and it is linear, so that some
noise which is seen as it is, where a gradient is zero, gives away the rest. Each contribution has a key of 128 bits of
its own, from the operating system, for Philox4x64-10.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offbeat.engine import state_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.privacy import GaussianMechanism

_KEY_BYTES = 16
_CHUNK = 1 << 20  # elements that are noised at once


class PrivateContributions:
    """The contributions of one model on this worker, as they may be seen by others.

    It belongs to the model, whatever the plan's policy: a swap does not begin to count anew.

    Args:
        draw_key: draws so many bytes that nobody else can know.

    Attributes:
        count: those that were made so far, each of which has spent the same.
    """

    def __init__(self, draw_key: Callable[[int], bytes] = os.urandom) -> None:
        self.count = 0
        self._draw_key = draw_key

    def protect_(self, vectors: Sequence[torch.Tensor], mechanism: GaussianMechanism) -> None:
        """Clip a contribution and add noise, in place; one with NaN or Inf is NaN all over, which is no valid one.

        Args:
            vectors: [D] of the buckets of the whole model.
        """
        self.count += 1  # before anybody can have seen it
        if not _clip_(vectors, mechanism.max_norm):
            for vector in vectors:
                vector.fill_(math.nan)  # what is finite in it would be seen without noise
            return
        key = int.from_bytes(self._draw_key(_KEY_BYTES), "little")
        generator = np.random.Generator(np.random.Philox(key=key))
        for chunk in (chunk for vector in vectors for chunk in vector.split(_CHUNK)):
            noise = torch.from_numpy(generator.standard_normal(len(chunk), dtype=np.float32))
            # In float32 whatever the model's: of wider types the last bits would be those of the contribution.
            chunk.copy_(noise.mul_(mechanism.deviation).add_(chunk.float()))

    def state_dict(self) -> dict[str, Any]:
        """The count, for this worker's own part of a checkpoint; empty if there is nothing to count."""
        return {"contributions": self.count} if self.count else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` returned; what this process has spent stays spent.

        Raises:
            ModelError: if it is damaged.
        """
        self.count = max(self.count, state_checks.whole(state.get("contributions", 0), "private contributions"))


def clip_reference_(vectors: Sequence[torch.Tensor], mechanism: GaussianMechanism) -> None:
    """Clip what a validator computes as contributions are, in place; it is not noised."""
    _clip_(vectors, mechanism.max_norm)


def _clip_(vectors: Sequence[torch.Tensor], most: float) -> bool:
    """Clip to a norm of all together; False, and nothing is changed, if that is not finite."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(vector, dtype=torch.float64)) for vector in vectors))
    if not math.isfinite(norm):
        return False
    if norm > most:
        for vector in vectors:
            vector.mul_(most / norm)
    return True
