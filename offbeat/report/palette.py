"""One colour per worker, the same in every table and plot, readable on white and on black."""

from __future__ import annotations

import colorsys

# The first eight are told apart by people with any colour vision (after Okabe and Ito, without black and yellow).
_FIRST = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#A6761D")
_GOLDEN = 0.61803398875  # steps around the circle of hues that never come close to an earlier one

COMPUTING = "#0072B2"
OVERLAPPED = "#56B4E9"
WAITING = "#D55E00"
OTHER = "#9AA0A6"
"""What a step is made of."""


def colour(rank: int) -> str:
    """The colour of a worker, as ``#rrggbb``.

    >>> colour(0), colour(8) != colour(9)
    ('#0072B2', True)
    """
    if rank < len(_FIRST):
        return _FIRST[rank]
    red, green, blue = colorsys.hls_to_rgb(rank * _GOLDEN % 1.0, 0.47, 0.6)
    return f"#{round(red * 255):02X}{round(green * 255):02X}{round(blue * 255):02X}"
