"""The transfer of a worker's whole state to new workers, as text and tensors. Never pickle.

The first of them says what there is, as JSON in which each tensor is a number; the tensors follow by broadcast, several
in one. All take part, so that another can go on where the first is lost: what it has is the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import NetworkError, PeerError
from offbeat.tensors import dtype_name, flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from offbeat.engine.control_group import ControlGroup

_MOST_BYTES = 32 << 20  # of one broadcast, but for a tensor that is larger
_TENSOR = "tensor of this number"
_PLAIN = (bool, int, float, str, type(None))


def hand_over(control: ControlGroup, first: Callable[[], int], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state of those that train, on all workers. Collective.

    Args:
        first: the first of those that have it and are still there.
        state: what this worker has: dicts with names, lists, numbers, text, tensors; None on a newcomer.

    Returns:
        On a newcomer tensors that are nobody else's; elsewhere `state`.

    Raises:
        NetworkError: if nobody is left that has it.
        PeerError: if it cannot be understood.
    """
    tensors: list[torch.Tensor] = []
    mine = "" if state is None else json.dumps(_plain_of(state, tensors))
    shapes = [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    source, head, told = _tell(control, first, "" if state is None else f"{json.dumps(shapes)}\n{mine}")
    try:
        kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in json.loads(head)]
        plain = json.loads(told)
    except (ValueError, TypeError, AttributeError) as error:
        raise PeerError(f"Cannot take over from rank {source}: {error}.") from error
    fits = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == kinds
    if not fits:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
    for part in _parts(tensors):
        whole = torch.cat([flat_bytes(tensor) for tensor in part])
        control.broadcast("what new workers begin with", whole, source)
        if state is None:
            for tensor, data in zip(part, whole.split([t.numel() * t.element_size() for t in part]), strict=True):
                tensor.reshape(-1).view(torch.uint8).copy_(data)
    return dict(state) if state is not None else _filled(plain, tensors)


def _tell(control: ControlGroup, first: Callable[[], int], mine: str) -> tuple[int, str, str]:
    """Agree on who sends; which tensors; what there is beside them."""
    while True:
        is_first = control.rank == first()
        told = control.texts("what new workers receive", mine if is_first else mine[:1])
        if not any(told.values()):
            raise NetworkError("Cannot join: all workers of the job are lost. Start the job again.")
        for rank, text in told.items():
            if "\n" in text:
                head, _, rest = text.partition("\n")
                return rank, head, rest


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part, size = list[torch.Tensor](), 0
    for tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if part and size + size_bytes > _MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += size_bytes
    if size:
        yield part


def _plain_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same with a number for each tensor, which is added to `tensors`; what is neither is left out."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, dict):
        return {name: _plain_of(one, tensors) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_of(one, tensors) for one in value]
    return value if isinstance(value, _PLAIN) else None


def _filled(plain: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(plain, dict):
        if set(plain) == {_TENSOR}:
            return tensors[int(plain[_TENSOR])]
        return {name: _filled(one, tensors) for name, one in plain.items()}
    if isinstance(plain, list):
        return [_filled(one, tensors) for one in plain]
    return plain
