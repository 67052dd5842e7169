"""One bucket's memory.

    memory  = [ gradients of all its parameters | trailer ]
    trailer = [ weight | stamp | stamp squared | nonfinite | vote | used, one per parameter | times, if any are told ]

The trailer is summed along with the gradients in one operation, so bookkeeping costs no message: how many workers took
part, whether they are all at the same batch, whether one requests a vote, which parameters anyone used, and how long
each has computed (`step_times`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from offbeat.engine.bucket_exchange import EXACT_UP_TO
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.step_times import StepTimes
    from offbeat.layout import Bucket, Slot

_HEAD = 5


class GradEntry:
    """One parameter: its gradient's place, and what happened to it since the last exchange."""

    __slots__ = ("buffers", "expected", "fired", "name", "parameter", "stale", "used", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.used = False  # a gradient arrived since the last exchange
        self.fired = 0  # times a gradient arrived in this backward
        self.expected = 1  # times it arrives in a backward, as far as seen (checkpointing can make it several)
        self.stale: torch.Tensor | None = None  # of an earlier exchange, if none arrived since: kept if nobody has one
        self.buffers: tuple[BucketBuffer, ...] = ()  # it lies in several if it is cut
        self.view: torch.Tensor | None = None


class BucketTrailer(NamedTuple):
    """A bucket's summed trailer, read.

    Args:
        weight: sum of the workers' weights, as a share of "everyone once".
        in_step: whether all workers drew the same number of batches.
        nonfinite: whether a worker's contribution held NaN or Inf (only if it was asked to check).
        vote_requested: whether a worker wants all to vote.
        used_elsewhere: positions of entries that this worker did not use and another did.
        step_times: how long each worker computes, by rank, if it is told along with this bucket.
    """

    weight: float
    in_step: bool
    nonfinite: bool
    vote_requested: bool
    used_elsewhere: set[int]
    step_times: Mapping[int, Sequence[float]]


class BucketBuffer:
    """A bucket's memory and the entries whose gradients are views into it.

    Args:
        times: that are told along with this bucket; None for none.
    """

    def __init__(
        self, bucket: Bucket, entries: Sequence[GradEntry], world: int, times: StepTimes | None = None
    ) -> None:
        self.bucket = bucket
        self.entries = list(entries)
        self._times = times if times is not None and times.room() else None
        self._end = _HEAD + len(entries)
        room = 0 if self._times is None else self._times.room()
        self.memory = torch.zeros(bucket.numel + self._end + room, dtype=bucket.dtype, device=bucket.device)
        self.grad = self.memory[: bucket.numel]
        self.trailer = self.memory[bucket.numel :]
        self.missing = 0
        self.took_part = True  # whether this worker's weight in the exchange under way is above 0, and in the sum
        self._came_late = False  # it brought something that is not in the sum
        self.nonfinite: list[str] = []  # parameters whose own gradient held NaN or Inf, if it was asked to check
        self._world = world
        self._all_used = torch.ones_like(self.trailer)
        self._all_used[1:_HEAD] = 0
        self._all_used[self._end :] = 0
        self._stamps = 1
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # of cut gradients: where they are whole, and here
        for entry, slot in zip(self.entries, bucket.slots, strict=True):
            if slot.is_part:
                self._place_part(entry, slot)
            else:
                entry.view = view_in(self.grad, slot.offset, entry.parameter)
            entry.buffers = (*entry.buffers, self)

    def _place_part(self, entry: GradEntry, slot: Slot) -> None:
        """Have a part of a gradient here, which is whole in a memory of its own."""
        if not entry.buffers:
            parameter = entry.parameter
            numel = parameter.numel() * (2 if parameter.is_complex() else 1)
            whole = torch.zeros(numel, dtype=self.grad.dtype, device=self.grad.device)
            entry.view = view_in(whole, 0, parameter)
        assert entry.view is not None
        whole = flat(entry.view)[slot.start : slot.start + slot.numel]
        self._parts.append((whole, self.grad[slot.offset : slot.offset + slot.numel]))

    def pack(self, *, scale: float, check_finite: bool) -> None:
        """Bring every gradient into the bucket, multiplied by `scale` / world, and make `.grad` a view of it.

        A parameter without a gradient contributes zeros. With `scale` 0 the whole bucket is zeros, whatever the
        gradients hold.
        """
        self.took_part, self._came_late = scale > 0, False
        with torch.no_grad():
            for entry in self.entries:
                if entry.buffers[0] is not self:
                    continue  # it is packed already
                if not entry.used and entry.parameter.grad is not None:
                    entry.stale = entry.parameter.grad.detach().clone()
                if scale:
                    self._pack_one(entry, scale / self._world)
            for whole, part in self._parts:
                part.copy_(whole)
            if not scale:
                self.grad.zero_()
        self.nonfinite = self._find_nonfinite() if check_finite else []

    def _pack_one(self, entry: GradEntry, scale: float) -> None:
        view, grad = entry.view, entry.parameter.grad
        assert view is not None
        if grad is view:
            if scale != 1.0:
                view.mul_(scale)
        elif grad is None:
            view.zero_()
        elif grad.is_sparse:
            raise ModelError(
                f"Cannot exchange the gradient of {entry.name}: it is sparse, which was not known when the model was "
                "prepared. Use nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True), or a dense gradient."
            )
        else:
            # Same arithmetic as DistributedDataParallel: multiply by 1/N on the way into the bucket.
            torch.mul(grad, scale, out=view)
            entry.parameter.grad = view

    def write_trailer(self, accounting: BatchAccount, dtype: torch.dtype) -> None:
        """Write what this worker has to say along with its gradients.

        Args:
            accounting: its part in the exchange.
            dtype: in which the trailers are added; what is counted must be exact in it.
        """
        # So many different stamps that the sum of their squares over all workers is exact.
        self._stamps = math.isqrt(EXACT_UP_TO[dtype] // self._world) or 1
        trailer, weight, stamp = self.trailer, accounting.weight, accounting.stamp % self._stamps
        if weight == 0:
            trailer.zero_()
        else:
            trailer.copy_(self._all_used)
            if weight != 1:
                trailer[0] = weight
            for i, entry in enumerate(self.entries):
                if not entry.used:
                    trailer[_HEAD + i] = 0
        trailer[1] = stamp
        trailer[2] = stamp**2
        if self.nonfinite:
            trailer[3] = 1
        if accounting.requests_vote:
            trailer[4] = 1
        if self._times is not None:
            self._times.write(trailer[self._end :])

    def _find_nonfinite(self) -> list[str]:
        if bool(torch.isfinite(self.grad).all()):
            return []
        return [e.name for e in self.entries if e.view is not None and not bool(torch.isfinite(e.view).all())]

    def read_trailer(self, trailer: torch.Tensor, part: float = 1.0) -> BucketTrailer:
        """Read what the workers said together.

        Args:
            trailer: [T] the sum of all.
            part: of the workers that took part; below 1 if some are lost.
        """
        weight, stamps, squares, nonfinite, votes = trailer[:_HEAD].tolist()
        unused = [i for i, entry in enumerate(self.entries) if not (entry.used and self.took_part)]
        used = set()
        if unused:
            counts = trailer[_HEAD:].tolist()
            used = {i for i in unused if counts[i] > 0}
        times = {} if self._times is None else self._times.read(trailer[self._end :])
        # All stamps are equal if and only if their variance is zero; every rank comes to the same verdict.
        same = int(squares) * round(part * self._world) == int(stamps) ** 2
        return BucketTrailer(weight / self._world, same, nonfinite > 0, votes > 0, used, times)

    def leave_out(self) -> None:
        """Note that the sum was made without this worker, which came too late."""
        self.took_part, self._came_late = False, self.took_part

    def unpack(self) -> None:
        """Bring the parts of gradients to where they are whole."""
        for whole, part in self._parts:
            whole.copy_(part)

    def hand_out(self, used_elsewhere: set[int]) -> None:
        """Give the parameters that only others used their gradient, too."""
        for i in used_elsewhere:
            self.entries[i].parameter.grad = self.entries[i].view
        for i, entry in enumerate(self.entries):
            if entry.stale is not None:
                if i not in used_elsewhere and entry.parameter.grad is not None:
                    entry.parameter.grad.copy_(entry.stale)
                entry.stale = None
        if not self.took_part:
            for i, entry in enumerate(self.entries):
                if i in used_elsewhere:
                    continue
                if (self._came_late and entry.used) or entry.parameter.grad is not entry.view:
                    entry.parameter.grad = None  # a gradient of padding, or one that came late, which nobody shares


def view_in(grad: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's stretch of the bucket, in the parameter's own memory order if that is dense (channels_last)."""
    if parameter.is_complex():
        grad, offset = torch.view_as_complex(grad.view(-1, 2)), offset // 2
    if _is_dense(parameter):
        return grad.as_strided(parameter.shape, parameter.stride(), grad.storage_offset() + offset)
    return grad[offset : offset + parameter.numel()].view(parameter.shape)


def flat(view: torch.Tensor) -> torch.Tensor:
    """The stretch of memory of a view that `view_in` has made, as real numbers."""
    real = torch.view_as_real(view) if view.is_complex() else view
    return real.as_strided((real.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one stretch of memory without gaps or overlap, in any order of dims."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
