"""Tensors as the bytes that travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
