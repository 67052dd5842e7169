"""The checksum of a packet: 32 bits over all words of its header but this one, and over its payload.

    checksum = SEED
    for each word w:    checksum = (checksum + (w ^ w >> 16)) * FACTOR      modulo 2^32

A packet is damaged if this is not what its header says. That finds

* any damage within one aligned word of 32 bits: w ^ w >> 16 differs for different words, and the factor is odd;
* any two flipped bits, wherever they are, in the checksum too. The shift has each of the upper 16 bits of a word count
  as a lower one as well, for 2^31 times any odd number is 2^31; and of two powers of the factor, which is 5 modulo 8,
  the sum is twice an odd number, and the difference divisible by no more than 2^13 in packets of this size;
* all but one in 2^32 of other damages, if these are random.

Whole batches take a few passes of NumPy. A switch's pipeline does it word by word.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED, FACTOR = 0x0FFBEA75, 0x9E3779B5
AT = 8  # which word of a packet it is
_TILE_BYTES = 1 << 17  # that are mixed at a time, so that they stay in a processor's cache


@functools.lru_cache(maxsize=256)
def _weights(words: int) -> tuple[NDArray[np.uint32], np.uint32]:
    """The factor of each of so many words, 0 for the checksum's own, and the seed times its factor."""
    weights, power = [], 1
    for at in range(words - 1, -1, -1):
        power = power if at == AT else power * FACTOR % (1 << 32)
        weights.append(0 if at == AT else power)
    return np.array(weights[::-1], np.uint32), np.uint32(SEED * power % (1 << 32))


def checksums(packets: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """[B] the checksums of packets [B, W] of the same number of words, whatever the packets say."""
    weights, seed = _weights(packets.shape[1])
    rows = max(1, _TILE_BYTES // (4 * len(weights)))
    found = np.empty(len(packets), np.uint32)
    for start in range(0, len(packets), rows):
        words = packets[start : start + rows]
        mixed = words >> 16
        mixed ^= words
        mixed *= weights
        np.add.reduce(mixed, axis=1, dtype=np.uint32, out=found[start : start + rows])
    found += seed
    return found
