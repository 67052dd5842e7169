"""Writing a version into tensors that are in use: everything is prepared first, and then written at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import ObjectError
from offbeat.objects.delta import word_bytes
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from offbeat.objects.delta import TensorChange

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorWrites:
    """New contents of tensors; `write_` is the only moment at which the tensors change.

    Args:
        tensors: to be written, which may be in use until then.

    Raises:
        ObjectError: if one of them cannot be written.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = list(tensors.values())
        for name, tensor in tensors.items():
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ObjectError(f"Cannot write into {name!r}: some of its elements are the same memory. Clone it.")
        self._words: dict[int, Tensor] = {}
        self._writes: list[tuple[Tensor, Tensor | None, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def replace(self, contents: Sequence[Tensor]) -> None:
        """Have all tensors replaced."""
        for number, content in enumerate(contents):
            device = self._tensors[number].device
            self._writes.append((self._words_of(number), None, words_of(content).to(device)))

    def change(self, changes: Sequence[TensorChange]) -> None:
        """Have words of some tensors replaced, after what was asked for before."""
        for change in changes:
            device = self._tensors[change.number].device
            integers = _INTEGERS[change.words.itemsize]
            new = torch.from_numpy(change.words).view(integers).to(device)
            positions = None if change.positions is None else torch.from_numpy(change.positions).to(device)
            self._writes.append((self._words_of(change.number), positions, new))

    def write_(self) -> None:
        """Write all of it."""
        with torch.no_grad():
            for words, positions, new in self._writes:
                if positions is None:
                    words.copy_(new)
                else:
                    words.index_copy_(0, positions, new)
            for tensor, content in self._copies:
                tensor.copy_(content)

    def _words_of(self, number: int) -> Tensor:
        """The words of a tensor, in its own memory; where it is not contiguous, in a copy that is written back."""
        if number not in self._words:
            tensor = self._tensors[number].detach()
            content = _resolved(tensor).contiguous()
            self._words[number] = words_of(content)
            if content.data_ptr() != tensor.data_ptr():
                self._copies.append((tensor, content))
        return self._words[number]


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as integers, in its memory.

    >>> words_of(torch.tensor([0.0, -0.0]))
    tensor([          0, -2147483648], dtype=torch.int32)
    """
    flat = tensor.detach().reshape(-1)
    return flat.view(_INTEGERS[word_bytes(dtype_name(tensor.dtype))])


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()
