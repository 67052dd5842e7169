"""Anchors: one bucket's parameters after the last average (see `local_sgd`), and the change since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.engine.bucket_buffer import view_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.layout import Bucket


class Anchor:
    """The parameters of one bucket after the last average.

    Args:
        bucket: what lies in it.
        parameters: by name.

    Attributes:
        values: [D] the parameters after the last average.
        slots: of each parameter its name, itself, and its place in `values`.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._bucket = bucket
        self.values = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self.slots = [
            (slot.name, parameters[slot.name], view_in(self.values, slot.offset, parameters[slot.name]))
            for slot in bucket.slots
        ]

    def set_to_parameters_(self) -> None:
        """Anchor at the parameters, which are the same on all workers now."""
        for _, parameter, anchor in self.slots:
            anchor.copy_(parameter.detach())

    def delta(self, out: torch.Tensor) -> None:
        """Write how far this worker came, with the sign of a gradient, into `out`.

        Args:
            out: [D].
        """
        for slot, (_, parameter, anchor) in zip(self._bucket.slots, self.slots, strict=True):
            place = view_in(out, slot.offset, parameter)
            if place.device == parameter.device:
                torch.sub(anchor, parameter.detach(), out=place)
            else:  # what goes to a server is on the CPU
                place.copy_(anchor - parameter.detach())

    def offset_parameters_(self, left: torch.Tensor) -> None:
        """Move the parameters, and not the anchor, by what was not sent of a delta [D]."""
        for slot, (_, parameter, _) in zip(self._bucket.slots, self.slots, strict=True):
            parameter.data.sub_(view_in(left, slot.offset, parameter).to(parameter.device))

    def restore_parameters_(self) -> None:
        """Set the parameters back to where the anchor is."""
        for _, parameter, anchor in self.slots:
            parameter.data.copy_(anchor)

    def read_parameters(self, out: torch.Tensor) -> None:
        """Write the parameters into `out` [D]."""
        for slot, (_, parameter, _) in zip(self._bucket.slots, self.slots, strict=True):
            view_in(out, slot.offset, parameter).copy_(parameter.detach())

    def lead_parameters_(self, sent: torch.Tensor) -> None:
        """Move the parameters by as far as the anchor is from where they were: what they have moved since is kept.

        Args:
            sent: [D] where they were.
        """
        for slot, (_, parameter, anchor) in zip(self._bucket.slots, self.slots, strict=True):
            parameter.data.add_(anchor - view_in(sent, slot.offset, parameter))

    def rebase_(self, values: torch.Tensor) -> None:
        """Anchor at `values` [D]; what this worker's own steps have added up to since is kept."""
        for slot, (_, parameter, anchor) in zip(self._bucket.slots, self.slots, strict=True):
            moved = view_in(values, slot.offset, parameter).to(parameter.device)
            if not torch.equal(moved, anchor):
                parameter.data.add_(moved - anchor)
                anchor.copy_(moved)

    def shift_(self, before: torch.Tensor, values: torch.Tensor) -> None:
        """Move anchor and parameters by as far as `values` [D] are from what they were `before` [D]."""
        for slot, (_, parameter, anchor) in zip(self._bucket.slots, self.slots, strict=True):
            old, new = view_in(before, slot.offset, parameter), view_in(values, slot.offset, parameter)
            if not torch.equal(old, new):
                moved = (new - old).to(parameter.device)
                parameter.data.add_(moved)
                anchor.add_(moved)

    def views_in(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's stretch of another memory [D] of this bucket, by name."""
        return {
            slot.name: view_in(values, slot.offset, parameter)
            for slot, (_, parameter, _) in zip(self._bucket.slots, self.slots, strict=True)
        }
