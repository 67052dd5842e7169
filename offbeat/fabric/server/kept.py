"""What the server's optimizer keeps of the parameters, such as momentum, on its way to a worker's own optimizer.

An optimizer keeps, under a key, of each parameter either as many elements as that has, or one number, such as how often
it has stepped. Here it keeps them of pieces of parameters; put together, they are what a worker's optimizer would keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from offbeat.fabric.server.blocks import Block

# Of one block: a key, of each piece the entry if it is a number (0 if it is in the next, None if it has none), and the
# pieces' entries [D] if they are no numbers.
Entry = tuple[str, tuple[float | None, ...], torch.Tensor | None]
MOST_KEYS = 16


def entries(optimizer: torch.optim.Optimizer, pieces: Sequence[torch.Tensor]) -> Iterator[Entry]:
    """What `optimizer` keeps of a block with these pieces; copies."""
    states = [optimizer.state.get(piece, {}) for piece in pieces]
    for key in sorted({key for state in states for key, value in state.items() if isinstance(value, torch.Tensor)}):
        found = [state.get(key) for state in states]
        if not any(isinstance(value, torch.Tensor) and value.dim() for value in found):
            yield key, tuple(None if value is None else float(value) for value in found), None
            continue
        whole = [torch.zeros_like(piece) if v is None else v for v, piece in zip(found, pieces, strict=True)]
        yield key, tuple(None if value is None else 0.0 for value in found), torch.cat(whole)


def gather(blocks: Sequence[Block], kept: Iterable[tuple[int, Entry]]) -> dict[str, dict[str, torch.Tensor]]:
    """Put entries together: by parameter name and key, one number, or [D] the parameter's elements as they lie.

    Args:
        kept: of each block, by index.

    Raises:
        PeerError: if they do not fit the blocks.
    """
    lengths: dict[str, int] = {}
    for block in blocks:
        for piece in block.pieces:
            lengths[piece.name] = max(lengths.get(piece.name, 0), piece.start + piece.numel)
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in lengths}
    for index, (key, numbers, values) in kept:
        pieces = blocks[index].pieces if 0 <= index < len(blocks) else ()
        if len(numbers) != len(pieces):
            raise PeerError(f"Cannot take {key!r} of block {index}: it is of {len(numbers)} pieces, not {len(pieces)}.")
        offset = 0
        for piece, number in zip(pieces, numbers, strict=True):
            if number is not None and values is None:
                states[piece.name][key] = torch.tensor(number)
            elif number is not None and values is not None:
                whole = states[piece.name].setdefault(key, torch.zeros(lengths[piece.name], dtype=values.dtype))
                whole[piece.start : piece.start + piece.numel] = values[offset : offset + piece.numel]
            offset += piece.numel
    return states
