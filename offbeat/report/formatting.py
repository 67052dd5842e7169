"""Numbers and ranks in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_MOST_RANKS = 8
_LONG = 20  # characters


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and".

    >>> listed(["loss", "lr", "gn"])
    'loss, lr and gn'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def ranks(which: Sequence[int], *, capital: bool = False) -> str:
    """Some workers, by rank; many are only counted.

    >>> ranks([0, 2]), ranks(range(64), capital=True)
    ('ranks 0 and 2', '64 workers (ranks 0 to 63)')
    """
    if len(which) > _MOST_RANKS:
        return f"{len(which)} workers (ranks {span(which)})"
    text = f"rank{'' if len(which) == 1 else 's'} {listed([str(rank) for rank in which])}"
    return text.capitalize() if capital else text


def span(values: Collection[float], spec: str = "", unit: str = "") -> str:
    """Format the least and the greatest value, or the one value if they look alike.

    >>> span([0.321, 0.41], ".0%"), span([19.0, 19.01], ".1f", " ms")
    ('32 to 41%', '19.0 ms')
    """
    low, high = format(min(values), spec), format(max(values), spec)
    if low == high:
        return high + unit
    return f"{low.removesuffix('%')} to {high}{unit}"


def brief(policy: str) -> str:
    """A policy's name, with what was chosen of it if that is short."""
    return policy if len(policy) <= _LONG else policy.partition("(")[0]
