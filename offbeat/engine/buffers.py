"""Buffers (BatchNorm statistics and the like), kept equal on all workers.

DistributedDataParallel broadcasts rank 0's buffers before a forward pass, so ranks differ after the last step, and a
forward pass on one rank alone hangs. Here they travel at the end of backward, next to the last buckets: after each step
every rank holds the same, and a forward pass never communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.engine.ignored_parameters import ignored_names
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from offbeat.fabric import Fabric
    from offbeat.pending import Pending


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view in which no element stands for several, as those of an expanded tensor do: what can be written to."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _BufferPlace:
    """The place of a buffer in its module; `forward` may put another tensor there."""

    def __init__(self, name: str, module: torch.nn.Module, key: str) -> None:
        self._name, self._module, self._key = name, module, key
        self._like = self._kind(self.tensor)

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self._module._buffers[self._key]
        assert tensor is not None
        return tensor

    @property
    def name(self) -> str:
        return self._name

    def mark(self) -> tuple[torch.Tensor | None, int]:
        """Return what changes where the buffer is written to, or replaced; inference mode keeps no count."""
        tensor = self._module._buffers.get(self._key)
        return tensor, -1 if tensor is None or tensor.is_inference() else tensor._version

    def look(self) -> torch.Tensor:
        """The writable part of the buffer that is there now."""
        tensor = self._module._buffers.get(self._key)
        if tensor is None or self._kind(tensor) != self._like:
            now = "nothing" if tensor is None else self._kind(tensor)
            raise ModelError(
                f"Cannot keep the buffer {self._name} equal: it was {self._like} when the model was prepared and is "
                f"{now} now. Keep its shape and dtype, or name it in _ddp_params_and_buffers_to_ignore."
            )
        return distinct(tensor)

    def _kind(self, tensor: torch.Tensor) -> str:
        return f"{list(tensor.shape)} {tensor.dtype}"


def _places(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[_BufferPlace]:
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for key, tensor in child._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is not None and name not in ignored and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _BufferPlace(name, child, key)


def _differs(now: tuple[torch.Tensor | None, int], tensor: torch.Tensor | None, version: int) -> bool:
    return now[0] is not tensor or now[1] != version


class Buffers:
    """The buffers of one model.

    Args:
        module: the user's model; its `_ddp_params_and_buffers_to_ignore` is honoured as DDP does.
        fabric: what carries them.
    """

    def __init__(self, module: torch.nn.Module, fabric: Fabric) -> None:
        ignored = ignored_names(module)
        self._places = [place for place in _places(module, ignored) if place.tensor.numel()]
        self._fabric = fabric
        self._under_way: list[tuple[list[_BufferPlace], torch.Tensor, Pending]] = []
        self._packed: list[tuple[list[_BufferPlace], torch.Tensor]] | None = None
        self._marks: list[tuple[torch.Tensor | None, int]] = []

    def mark(self) -> None:
        """Have `changed` count from here."""
        self._marks = [place.mark() for place in self._places]

    def changed(self) -> list[str]:
        """The names of those that were written to, or replaced, since `mark` or `pack`."""
        before = zip(self._places, self._marks, strict=False)
        return [place.name for place, (tensor, version) in before if _differs(place.mark(), tensor, version)]

    def pack(self) -> None:
        """Take them as they are now, for the next `start`, which may be on another thread.

        Raises:
            ModelError: if a buffer has been replaced by one of another shape or dtype.
        """
        self.mark()
        by_kind: dict[tuple[torch.dtype, torch.device], list[_BufferPlace]] = {}
        for place in self._places:
            tensor = place.look()
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(place)
        self._packed = [
            (places, torch.cat([place.look().detach().reshape(-1) for place in places])) for places in by_kind.values()
        ]

    def start(self, source: int) -> list[Pending]:
        """Begin to overwrite every rank's buffers with those of `source`, one broadcast per dtype. Collective.

        Raises:
            ModelError: if a buffer has been replaced by one of another shape or dtype.
        """
        if self._packed is None:
            self.pack()
        assert self._packed is not None
        packed, self._packed = self._packed, None
        self._under_way += [(places, whole, self._fabric.broadcast(whole, source)) for places, whole in packed]
        return [pending for _, _, pending in self._under_way]

    def finish(self, source: int) -> None:
        """Take over what arrived; only after every pending of `start` is done."""
        self.set_(self.take(source))

    def take(self, source: int, *, own: bool = False) -> dict[str, torch.Tensor]:
        """Hand out what arrived, by name, to be `set_` later. When all pendings are done.

        Args:
            source: where nothing is handed out.
            own: but what was sent.
        """
        under_way, self._under_way = self._under_way, []
        arrived: dict[str, torch.Tensor] = {}
        for places, whole, _ in under_way if own or self._fabric.rank != source else ():
            parts = whole.split([place.look().numel() for place in places])
            arrived |= {place.name: part.view(place.look().shape) for place, part in zip(places, parts, strict=True)}
        return arrived

    def set_(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Overwrite these buffers.

        Raises:
            ModelError: if a buffer has been replaced by one of another shape or dtype.
        """
        with torch.no_grad():
            for place in self._places if arrived else ():
                if place.name in arrived:
                    place.look().copy_(arrived[place.name])

    def like(self, name: str) -> torch.Tensor | None:
        """Memory for what arrives for this buffer; None if there is none of this name."""
        return next((torch.empty_like(place.look()) for place in self._places if place.name == name), None)
