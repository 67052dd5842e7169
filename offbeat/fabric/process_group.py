"""All-reduce by a torch process group: Gloo between CPUs, NCCL between GPUs.

Facts this file is built on (torch 2.13):

* `Work.wait(timeout)` that runs out leaves a Gloo operation under way, so it can be polled. Only the timeout of the
  *group* breaks the group, and with it every later operation; ours is therefore set so long that it never fires.
* Operations of one group match by order of issue. Every bound fabric has a group of its own, so that two models, or the
  user's own collectives, can never be mixed up with ours.
* A tensor of another size on another rank ends the process through C++ terminate; sizes are agreed on beforehand.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from offbeat.errors import NetworkError, PlanError
from offbeat.fabric.fabric import BindContext, Offers
from offbeat.fabric.gloo_listener import stop_listening
from offbeat.fabric.reduce_scatter import PartSums, sent_bytes_of_round
from offbeat.fabric.spare_memory import SpareMemory
from offbeat.payload import GatheredPart, Payload, Reply, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.fabric.generation import Generation, GroupCollectives
    from offbeat.pending import Pending

_NEVER = timedelta(days=365)
_OFFERS = Offers(reduce_scatter=True)


@dataclass(frozen=True)
class ProcessGroup:
    """All-reduce over torch's process group (Gloo, NCCL); the default.

    >>> ProcessGroup()
    ProcessGroup()
    """

    @property
    def offers(self) -> Offers:
        return _OFFERS

    def bind(self, context: BindContext) -> BoundProcessGroup:
        """Make a group of our own over all ranks of the default one. Collective: every rank calls it."""
        return BoundProcessGroup(new_group(context.backend))

    def reconnector(self, context: BindContext) -> GlooReconnector:
        """Make what connects this worker in each generation of an elastic group.

        Raises:
            PlanError: if the tensors are not on CPUs.
        """
        if context.backend != "gloo":
            raise PlanError(
                "Cannot run Elastic() with a model on a GPU: NCCL's groups cannot be left by a worker. Use "
                "ProcessGroup(), Elastic(over=Routed()) or ParameterServer() - at `plan.fabric`."
            )
        return GlooReconnector()


def new_group(backend: str) -> dist.ProcessGroup:
    """Make a group over all ranks of the default one, whose timeout never comes. Collective: every rank calls it."""
    group = dist.new_group(timeout=_NEVER, backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    if backend == "gloo":
        stop_listening(group)
    return group


class GlooReconnector:
    """Connects nothing but torch's groups. A `Reconnector`."""

    def connect(self, generation: Generation, before: GroupCollectives | None) -> GlooCollectives:
        return GlooCollectives(generation.group)


class GlooCollectives:
    """A generation's exchanges over torch's group. A `GroupCollectives`."""

    is_suspicious = False  # whoever is killed breaks the exchanges of its neighbours at once

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, tensor: torch.Tensor) -> Works:
        return Works([self.group.allreduce([tensor])], lambda: Total(tensor), sent_bytes(tensor, self.group.size()))

    def broadcast(self, tensor: torch.Tensor, place: int) -> Works:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = place, 0
        return Works([self.group.broadcast([tensor], options)], lambda: Total(tensor), 0)

    def wants_reroute(self) -> bool:
        return False

    def reroute(self, meet: Callable[[str], list[str]]) -> str:
        return ""

    def close(self) -> None:
        """Let go: torch ends a group with its last user."""

    def abandon(self) -> None:
        never_destroy(self.group)


class BoundProcessGroup:
    """One worker's end of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.rank = group.rank()
        self.world = group.size()
        self.offers = _OFFERS
        self._spare, self._begun, self._under_way, self._most = SpareMemory(), 0, 0, 0

    def start(self, payload: Payload) -> Pending:
        if isinstance(payload, Sum):
            return self._start_sum(payload)
        group = self._handle

        def all_gather(into: list[torch.Tensor], tensor: torch.Tensor) -> Any:
            return dist.all_gather(into, tensor, group=group, async_op=True)

        return GatherWorks(all_gather, self.rank, self.world, payload.tensors)

    def reduce_scatter(self, payload: Sum) -> ScatteredWorks:
        parts = PartSums(self._handle, joined(payload), self._spare)
        self._begun += 1
        self._under_way += 1
        self._most = max(self._most, self._under_way)
        return ScatteredWorks(payload, parts, self.world, functools.partial(self._forget, parts, self._begun))

    def _forget(self, parts: PartSums, number: int) -> None:
        self._under_way -= 1
        self._spare.give(parts.memory, number, self._most)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Works:
        # As bytes: Gloo has no broadcast for some dtypes, such as int16.
        data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        work = dist.broadcast(data, group=self._handle, group_src=source, async_op=True)
        sent = tensor.numel() * tensor.element_size() if self.rank == source else 0
        return Works([work], lambda: Total(tensor), sent)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            never_destroy(group)

    @property
    def _handle(self) -> dist.ProcessGroup:
        assert self._group is not None, "fabric used after close"
        return self._group

    def _start_sum(self, payload: Sum) -> Works:
        whole = joined(payload)
        work = dist.all_reduce(whole, group=self._handle, async_op=True)
        return Works([work], functools.partial(total_of, payload, whole), sent_bytes(whole, self.world))


def sent_bytes(whole: torch.Tensor, world: int) -> int:
    """Count the bytes that a worker sends for a sum: around a ring each element twice but for its own share."""
    return 2 * (world - 1) * whole.numel() * whole.element_size() // world


def never_destroy(group: dist.ProcessGroup) -> None:
    """Leave `group` as it is, even at exit.

    Its destructor joins Gloo's threads, and one of them may wait for a worker that will never come; Gloo's own `abort`
    does not end that wait (torch 2.13).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Works:
    """Some `dist.Work`, waited for as one."""

    def __init__(self, works: Sequence[Any], result: Callable[[], Reply], sent_bytes: int) -> None:
        self._works = list(works)
        self._result = result
        self.sent_bytes = sent_bytes

    def wait(self, timeout: timedelta) -> bool:
        while self._works:
            if not _wait_for(self._works[0], timeout):
                return False
            self._works.pop(0)
        return True

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> Reply:
        return self._result()


class ScatteredWorks:
    """The first round of a sum in two. A `Scattered`.

    Args:
        parts: of the sum.
        release: is called when the sum is where it belongs.
    """

    def __init__(self, payload: Sum, parts: PartSums, world: int, release: Callable[[], None]) -> None:
        self._payload, self._parts, self._release = payload, parts, release
        self._works = Works([parts.scatter()], list, 0)
        self.sent_bytes = sent_bytes_of_round(payload.size_bytes, world)

    def wait(self, timeout: timedelta) -> bool:
        return self._works.wait(timeout)

    def done(self) -> bool:
        return self._works.done()

    def result(self) -> Reply:
        return self._works.result()

    def all_gather(self) -> Works:
        return Works([self._parts.gather()], self._total, self.sent_bytes)

    def _total(self) -> Total:
        tensor, tail, memory = self._payload.tensor, self._payload.tail, self._parts.memory
        tensor.copy_(memory[: tensor.numel()])
        if tail is not None:
            tail.copy_(memory[tensor.numel() : tensor.numel() + tail.numel()])
        self._release()
        return Total(tensor, tail=tail)


class GatherWorks:
    """An all-gather of tensors whose shapes differ between ranks: first the shapes, then the padded contents.

    The second round is issued when the first is waited for; the engine waits in order of issue on every rank, so the
    order of issue stays the same everywhere.
    """

    _MAX_DIMS = 8

    def __init__(
        self,
        all_gather: Callable[[list[torch.Tensor], torch.Tensor], Any],
        rank: int,
        world: int,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        self._all_gather, self._rank, self._world = all_gather, rank, world
        self._tensors = [t.contiguous() for t in tensors]
        device = tensors[0].device if tensors else torch.device("cpu")
        shapes = torch.full((len(tensors), self._MAX_DIMS + 1), 0, dtype=torch.int64, device=device)
        for row, tensor in zip(shapes, tensors, strict=True):
            row[0] = tensor.dim()
            row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape)
        self._shapes = [torch.empty_like(shapes) for _ in range(world)]
        self._works = [all_gather(self._shapes, shapes)]
        self._contents: list[list[torch.Tensor]] | None = None
        self.sent_bytes = (world - 1) * sum(t.numel() * t.element_size() for t in tensors)

    def wait(self, timeout: timedelta) -> bool:
        while True:
            while self._works:
                if not _wait_for(self._works[0], timeout):
                    return False
                self._works.pop(0)
            if self._contents is not None:
                return True
            self._start_contents()

    def done(self) -> bool:
        return self._contents is not None and all(work.is_completed() for work in self._works)

    def result(self) -> list[GatheredPart]:
        assert self._contents is not None
        by_rank = []
        for worker in range(self._world):
            tensors = []
            for i in range(len(self._tensors)):
                shape = self._shape(worker, i)
                numel = int(torch.Size(shape).numel())
                tensors.append(self._contents[i][worker][:numel].view(shape))
            by_rank.append(GatheredPart(worker, tuple(tensors)))
        return by_rank

    def _shape(self, worker: int, i: int) -> list[int]:
        row = self._shapes[worker][i].tolist()
        return [int(n) for n in row[1 : 1 + int(row[0])]]

    def _start_contents(self) -> None:
        self._contents = []
        for i, tensor in enumerate(self._tensors):
            most = max(int(torch.Size(self._shape(worker, i)).numel()) for worker in range(self._world))
            padded = tensor.new_zeros(most)
            padded[: tensor.numel()] = tensor.reshape(-1)
            into = [torch.empty_like(padded) for _ in range(self._world)]
            self._contents.append(into)
            if most:
                self._works.append(self._all_gather(into, padded))


def _wait_for(work: Any, timeout: timedelta) -> bool:
    try:
        work.wait(timeout)
    except RuntimeError:
        if not work.is_completed():
            return False
    else:
        return True
    # It failed, or came to its end, well, just when the time was up: asked again it says which.
    try:
        work.wait()
    except RuntimeError as error:
        raise NetworkError(f"The connection to another worker broke: {_first_line(error)}") from error
    return True


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def joined(payload: Sum) -> torch.Tensor:
    """The tensor of a sum with its tail behind it: in place if they lie like that, else a copy."""
    tensor, tail = payload.tensor, payload.tail
    if tail is None:
        return tensor
    if _adjacent(tensor, tail):
        return tensor.as_strided((tensor.numel() + tail.numel(),), (1,))
    return torch.cat([tensor, tail.to(tensor.dtype)])


def total_of(payload: Sum, whole: torch.Tensor) -> Total:
    """The reply to a sum that was made in what `joined` returned."""
    if payload.tail is None or whole.data_ptr() == payload.tensor.data_ptr():
        return Total(payload.tensor, tail=payload.tail)
    return Total(whole[: payload.tensor.numel()], tail=whole[payload.tensor.numel() :])


def _adjacent(tensor: torch.Tensor, tail: torch.Tensor) -> bool:
    return (
        tensor.dtype == tail.dtype
        and tensor.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr()
        and tail.storage_offset() == tensor.storage_offset() + tensor.numel()
    )
