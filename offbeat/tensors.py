"""Tensors as the bytes that travel, and the names of their dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """The elements as a flat uint8 tensor, in the tensor's own memory if that is contiguous.

    >>> flat_bytes(torch.tensor([[1], [256]], dtype=torch.int16))
    tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    if not tensor.numel():  # its strides may be anything
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a CPU tensor as bytes, in the tensor's own memory if that is contiguous.

    >>> bytes(bytes_of(torch.tensor([[1], [256]], dtype=torch.int16))), len(bytes_of(torch.empty(0)))
    (b'\\x01\\x00\\x00\\x01', 0)
    """
    array: Any = flat_bytes(tensor).numpy()
    return memoryview(array) if array.size else memoryview(bytearray())


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as torch has it.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")
