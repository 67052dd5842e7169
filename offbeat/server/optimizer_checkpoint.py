"""The optimizer's state at a server as part of a checkpoint: by parameter name, however the parameters were cut.

at the shards    by block and piece: {"fc.weight": {"exp_avg": [D of the piece], "step": ()}}
in between       `Portion`, one tensor of one piece
in a checkpoint  by parameter, as bytes: frames as of a snapshot, with checksums, and without code
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import ModelError, PeerError
from offbeat.server.snapshot import FORMAT, Snapshot, SnapshotHeader, SnapshotId, describe_tensor, read, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from offbeat.server.blocks import Block

States = dict[str, dict[str, torch.Tensor]]  # by parameter and key: [D] of the parameter, or a scalar


@dataclass(frozen=True)
class Portion:
    """One tensor of the optimizer's state in one block.

    Args:
        tensor: [D] of the piece of parameter `name` in that block, or a scalar.
    """

    block: int
    name: str
    key: str
    tensor: torch.Tensor


def gather(portions: Iterable[Portion], blocks: Sequence[Block]) -> States:
    """Whole parameters' state from that of their pieces; where pieces differ in a scalar, the greatest counts."""
    starts = {(block.index, piece.name): piece.start for block in blocks for piece in block.pieces}
    found: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    for it in portions:
        found.setdefault(it.name, {}).setdefault(it.key, []).append((starts[(it.block, it.name)], it.tensor))
    return {name: {key: _whole(parts) for key, parts in keys.items()} for name, keys in found.items()}


def scatter(states: Mapping[str, Mapping[str, torch.Tensor]], blocks: Sequence[Block]) -> Iterator[Portion]:
    """The state of each piece, from that of whole parameters."""
    for block in blocks:
        for piece in block.pieces:
            for key, tensor in states.get(piece.name, {}).items():
                part = tensor if tensor.ndim == 0 else tensor.reshape(-1)[piece.start : piece.start + piece.numel]
                if part.ndim and part.numel() != piece.numel:
                    raise ModelError(
                        f"Cannot load {key} of {piece.name}: it has {tensor.numel()} elements, the parameter more. "
                        "Load the checkpoint of this model."
                    )
                yield Portion(block.index, piece.name, key, part)


def to_bytes(states: States) -> bytes:
    """Encode states for a checkpoint; one object, so that whatever keeps it need not know what is in it."""
    file = io.BytesIO()
    tensors = [
        (describe_tensor(0, 0, name, key, tensor), tensor)
        for name, keys in states.items()
        for key, tensor in keys.items()
    ]
    write(file, Snapshot(SnapshotHeader(FORMAT, "", SnapshotId(0, 0), 0, ()), tensors))
    return file.getvalue()


def from_bytes(data: bytes) -> States:
    """Decode what `to_bytes` encoded.

    Raises:
        ModelError: if it is damaged.
    """
    try:
        snapshot = read(io.BytesIO(data))
    except PeerError as error:
        raise ModelError(f"Cannot load the optimizer's state from this checkpoint: {error}.") from error
    states: States = {}
    for what, tensor in snapshot.tensors:
        states.setdefault(what.name, {})[what.key] = tensor
    return states


def _whole(parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    tensors = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    if tensors[0].ndim == 0:
        return torch.stack(tensors).max()
    return torch.cat(tensors)
