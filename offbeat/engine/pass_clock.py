"""The clock of a forward and a backward pass: the host's, or on CUDA the device's.

On CUDA the host only says what is to be done, and is ahead of it: when a hook runs says little of when a gradient is
complete. An event between the kernels does, once the device has come to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class PassClock:
    """Marks points in time, between which there are seconds.

    Args:
        device: on which the passes run.
        now_s: the host's clock.
    """

    def __init__(self, device: torch.device, now_s: Callable[[], float]) -> None:
        self._device, self._now_s = device, now_s
        self.is_of_host = device.type != "cuda"

    def mark(self) -> Any:
        """Mark this point in time."""
        if self.is_of_host:
            return self._now_s()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all that was marked has been."""
        if not self.is_of_host:
            torch.cuda.synchronize(self._device)

    def between_s(self, earlier: Any, later: Any) -> float:
        """The seconds from one mark to another, which have been (`settle`)."""
        if self.is_of_host:
            return float(later - earlier)
        return float(earlier.elapsed_time(later)) / 1e3
