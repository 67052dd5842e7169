"""The order in which gradients arrive: noted in the first backward, and made the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.engine.communicator import Communicator


class GradientOrder:
    """The order in which a backward completes gradients.

    Args:
        parameters: by name, in order of registration.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._registered = list(parameters)
        self._device = next(iter(parameters.values())).device
        self._last: dict[str, int] = {}  # the last arrival counts: only then is the gradient complete
        self._count = 0

    def note(self, name: str) -> None:
        """A gradient, or a part of one, arrived."""
        self._last[name] = self._count
        self._count += 1

    @property
    def mine(self) -> list[str]:
        """All names in order of arrival; then, in reverse order of registration, those that got no gradient."""
        rest = [name for name in reversed(self._registered) if name not in self._last]
        return sorted(self._last, key=self._last.__getitem__) + rest

    def agreed(self, communicator: Communicator) -> list[str]:
        """Rank 0's order. Collective."""
        index = {name: i for i, name in enumerate(self._registered)}
        order = torch.tensor([index[name] for name in self.mine], dtype=torch.int64, device=self._device)
        communicator.wait(communicator.broadcast(order, 0), "broadcast of the bucket order")
        return [self._registered[i] for i in order.tolist()]
