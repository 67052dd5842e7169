"""Parameters that the user asked to leave alone, in the words that DistributedDataParallel understands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that are neither broadcast nor averaged."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
