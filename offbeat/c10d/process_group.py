"""A process group of torch whose sums go along planned paths; what is no sum is Gloo's.

    torch.distributed.init_process_group("offbeat")

and DistributedDataParallel, or whatever stands on torch.distributed, sums over links between the workers. Those are
opened with the group; what they carry is measured before the first sum of `LEAST_BYTES` or more, in which all workers
of a group take part. Small sums, other reductions, and all other collectives go over a group of Gloo's. So all that
Gloo carries is carried, with its semantics; tensors on a GPU go as Gloo has them, by way of the host.

The links notice who is lost, also while Gloo waits, and each call that is under way ends with an error that names who
and where. A worker that is silent while its machine answers (stopped, holding the GIL, without a processor) is named in
the log, and ends nothing before the group's timeout.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.c10d.calls import CallBoard, CallWork
from offbeat.c10d.members import meet_members
from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PlanError
from offbeat.fabric.fabric import BindContext
from offbeat.fabric.generation import StoreMeeting
from offbeat.fabric.gloo_listener import stop_listening_at
from offbeat.fabric.linked_group import LinkedGroup
from offbeat.fabric.process_group import GlooCollectives, never_destroy
from offbeat.fabric.routed import Routed
from offbeat.run.environment import Environment
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.c10d.calls import Call
    from offbeat.fabric.path_collectives import PathCollectives, PathPending

T = TypeVar("T")
LEAST_BYTES = 64 << 10
"""Sums of less go over Gloo, where a message costs less."""
_MOMENT = timedelta(seconds=1.4)
_SETTLE = timedelta(seconds=3)  # for what Gloo does when a group is let go: it ends once the others let go as well
_POLL_S = 0.02
_DTYPES = (  # of Gloo's sums
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip
_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# What is delegated as it is: the name on `dist.ProcessGroup`, and what it is called in errors.
_OTHERS = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
}
_ALIKE = ("all_reduce_coalesced", "broadcast", "reduce")
_PASSED_ON = ("send", "recv", "recv_anysource", "monitored_barrier")


def make_group(options: Any, spec: Any = None) -> OffbeatGroup:
    """Make the group that torch asks for. Collective among its members.

    Args:
        options: `_DistributedBackendOptions` of torch.
        spec: a `Routed(...)`, as `pg_options` of `init_process_group`; None for `Routed()`.

    Raises:
        PlanError: if it is something else.
        DisagreementError: if not all run the same offbeat.
        NetworkError, PeerError: if one of the members does not come, or there is no link with it.
    """
    if spec is not None and not isinstance(spec, Routed):
        raise PlanError(
            f"Cannot make a group with pg_options={spec!r}: give offbeat.Routed(...), which says along which paths "
            "sums go, or nothing."
        )
    if spec is not None and spec.grouped:
        raise PlanError(
            "Cannot make a group with Routed(grouped=True): it would need another group of torch's to carry out its "
            "paths. Give Routed(...) without `grouped`, or the plan fabric=Routed(grouped=True) to offbeat.init."
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # The store of a group that was destroyed may still be there, with all that was said in it.
    times = options.store.add(f"begun/{options.group_rank}", 1)
    store = PrefixStore(str(times), options.store)
    group = OffbeatGroup(store, options.group_rank, ranks, options.timeout, options.group_id, spec or Routed())
    atexit.register(_let_go, weakref.ref(group))
    return group


def _let_go(reference: weakref.ReferenceType[OffbeatGroup]) -> None:
    """Let go of a group at the end of the process, while its threads can still be heard of."""
    group = reference()
    if group is not None and not group.is_forked:
        group.let_go()


class OffbeatGroup(dist.ProcessGroup):
    """One worker's end of the group.

    Args:
        store: of the group.
        place: of this worker in it.
        ranks: the members' in the job, by place.
        timeout: of calls.
        name: of the group, which no other has.
        spec: along which paths sums go.
    """

    def __init__(
        self, store: Any, place: int, ranks: Sequence[int], timeout: timedelta, name: str, spec: Routed
    ) -> None:
        super().__init__(place, len(ranks))  # type: ignore[call-arg]
        self._place, self._ranks, self._group_name, self._spec = place, tuple(ranks), name, spec
        self._hosts = meet_members(PrefixStore("members", store), place, self._ranks, timeout)
        try:
            self._gloo = _gloo(PrefixStore("gloo", store), place, len(ranks), timeout)
        except (RuntimeError, dist.DistError) as error:
            raise NetworkError(
                f"Cannot make a group of {', '.join(f'rank {rank} ({who})' for rank, who in self._hosts.items())}: "
                f"{str(error).partition(chr(10))[0]}. One of them may have ended meanwhile; see what each said."
            ) from error
        # Some of torch asks a group for its backends: of what devices they are, and for how long they wait.
        for device in ("cpu", "cuda"):
            backend = self._gloo._get_backend(torch.device(device))
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
        self._timeout = timeout
        self._board = CallBoard(PrefixStore("calls", store), self._ranks, place, timeout, self._lost, self._stalled)
        self._opening, self._ends = threading.Lock(), _DaemonThreads()
        self._held = _HeldByGloo()
        self._planning: Call | None = None
        self._meet = StoreMeeting(PrefixStore("paths", store), place, len(ranks), self._is_over)
        self._collectives: PathCollectives | None = None
        self._is_closed = False
        self._links = None if len(ranks) == 1 else self._open(PrefixStore("links", store), timeout)

    def _open(self, store: Any, patience: timedelta) -> LinkedGroup:
        """Open links with the others."""
        launcher = Environment().launcher(patience)
        context = BindContext(
            self._ranks[self._place], dist.get_world_size() if dist.is_initialized() else len(self._ranks),
            settings=launcher.settings, timeout=patience, topology=launcher.topology,
        )  # fmt: skip
        deadline = _Deadline(patience)
        meet = StoreMeeting(store, self._place, len(self._ranks), deadline.has_passed)
        name, group_sum = f"c10d/{self._group_name}", GlooCollectives(self._gloo).all_reduce
        return LinkedGroup(self._spec.method, context, self._ranks, name, meet, group_sum)

    def _lost(self) -> dict[int, str]:
        """The reasons why those are lost that are, by rank."""
        lost = {} if self._links is None else self._links.lost
        return {rank: f"rank {rank} ({self._hosts[rank]}) is lost: {error}" for rank, error in lost.items()}

    def _stalled(self) -> list[str]:
        """Say who stands still, and why, as far as it is known."""
        stalled = {} if self._links is None else self._links.stalled
        return [
            f"rank {rank} ({self._hosts[rank]}) has been silent for {silent_s:.1f} s while its machine answers: "
            f"{self._hosts[rank].standstill()}"
            for rank, silent_s in stalled.items()
        ]

    def _is_over(self) -> bool:
        """Whether planning need not be waited for any more."""
        has_failed = self._planning is not None and self._planning.ended.is_set()
        return self._is_closed or has_failed or bool(self._lost())

    # -- sums ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Sum tensors up, in place, or reduce them by another operation."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not isinstance(opts, dist.AllreduceOptions):  # torch calls it in two ways
            operation, opts = opts, dist.AllreduceOptions()
            if operation is not None:
                opts.reduceOp = operation
            if timeout is not None:
                opts.timeout = timeout
        call = self._board.begin(_words("all_reduce", tensors, _operation(opts.reduceOp)))
        try:
            packed = [_packed(tensor) for tensor in tensors]  # Gloo takes any tensor to be so
        except ValueError as error:
            call.fail(error)
            raise

        def end() -> None:
            for tensor, copy in zip(tensors, packed, strict=True):
                if copy is not tensor:
                    tensor.detach().copy_(copy)

        def by_gloo() -> Any:
            return self._gloo.allreduce(self._held.aliases(packed), opts)

        if not self._goes_along_paths(tensors, opts):
            return self._delegated(call, by_gloo, tensors, end)
        whole = packed[0].detach().view(-1)
        try:
            collectives = self._planned(call)
            if collectives.goes_by_group(whole.numel() * whole.element_size()):
                return self._delegated(call, by_gloo, tensors, end)
            pending = collectives.sum_along_paths(whole)
        except (OffbeatError, RuntimeError) as error:
            call.fail(self._named(error))
            return CallWork(call)
        return self._watched(call, pending, end, tensors)

    def _planned(self, call: Call) -> PathCollectives:
        """The paths; planned the first time, by all, for a call of theirs."""
        assert self._links is not None, "there are others"
        with self._opening:
            if self._collectives is None:
                self._planning = call
                said = self._meet(call.what)  # some may come much later than others
                if unlike := {rank: what for rank, what in zip(self._ranks, said, strict=True) if what != call.what}:
                    told = "; ".join(f"rank {rank} has called {what}" for rank, what in unlike.items())
                    raise DisagreementError(f"Cannot begin {call.what}: {told}. All workers have to call the same.")
                self._collectives = self._links.plan(self._meet, patience=self._timeout)
            return self._collectives

    def _goes_along_paths(self, tensors: Sequence[torch.Tensor], opts: Any) -> bool:
        if self._links is None or len(tensors) != 1 or opts.reduceOp != dist.ReduceOp.SUM:
            return False
        (tensor,) = tensors
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        return is_dense and tensor.dtype in _DTYPES and tensor.numel() * tensor.element_size() >= LEAST_BYTES

    def _watched(self, call: Call, pending: PathPending, end: Callable[[], None], tensors: list[torch.Tensor]) -> Any:
        """A work of torch's for an exchange."""

        def over() -> None:
            try:
                while not pending.wait(timedelta(seconds=1)):
                    pass
                end()
            except (OffbeatError, RuntimeError) as error:
                call.fail(self._named(error))
                return
            call.succeed(tensors)

        # Not on the event loop: what hangs on the work may begin another exchange, and wait for it.
        pending.add_done_callback(lambda: self._ends.submit(over))
        return CallWork(call)

    def _named(self, error: Exception) -> Exception:
        """The error, with who is lost, or stands still; the links know that a moment later than Gloo does."""
        deadline = _Deadline(_MOMENT)
        while isinstance(error, NetworkError) and not deadline.has_passed() and not self._is_closed:
            if lost := self._lost():
                return NetworkError("; ".join(lost.values()))
            time.sleep(_POLL_S)
        if isinstance(error, NetworkError) and (stalled := self._stalled()):
            return NetworkError(f"{str(error).removesuffix('.')}; {'; '.join(stalled)}.")
        return error

    # -- what Gloo does ------------------------------------------------------------------------------------------

    def _delegated(
        self,
        call: Call,
        begin: Callable[[], Any],
        value: Any = None,
        end: Callable[[], None] | None = None,
        given: Mapping[int, torch.Tensor] | None = None,
    ) -> Any:
        """Have Gloo do it, then do `end`; returns a work that ends with it, or when somebody is lost.

        Args:
            value: the work's result; None for Gloo's.
            given: by `id`, the tensors that Gloo has aliases of, for its result.
        """
        if lost := self._lost():
            call.fail(NetworkError(f"Cannot begin {call.what}: {'; '.join(lost.values())}"))
            return CallWork(call)
        try:
            work = begin()
        except Exception as error:
            call.fail(error if isinstance(error, RuntimeError) else RuntimeError(str(error)))
            raise

        def over(ended: Callable[[], Any]) -> None:
            try:
                found = ended()
                if end is not None:
                    end()
            except Exception as error:
                why = NetworkError(f"Cannot end {call.what}: {str(error).splitlines()[0]}")
                self._ends.submit(lambda: call.fail(self._named(why)))
                return
            call.succeed(_originals(found, given or {}) if value is None else value)

        try:
            work.get_future().add_done_callback(self._held.noted(lambda done: over(done.value)))
        except RuntimeError:  # some of Gloo's works have none
            self._ends.submit(lambda: over(work.wait))
        return CallWork(call)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the group."""
        return self._board.is_forked

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._ranks)

    def getBackendName(self) -> str:
        return "offbeat"

    def get_group_store(self) -> Any:
        return self._gloo.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._board.set_timeout(timeout)
        self._gloo.set_timeout(timeout)

    def let_go(self) -> None:
        """Let go at the end of the process, also of a group that was destroyed; then no thread of it is in Python.

        One that came back to Python from C++ while the interpreter ends would abort the process. Gloo's group stays:
        its destructor, in the last garbage collection, would wait for threads that may wait for the GIL.
        """
        never_destroy(self._gloo)
        if not self._is_closed:
            if self._board.is_busy or self._lost():
                self.abort()
            else:
                self.shutdown()
        deadline = _Deadline(_SETTLE)
        self._held.wait(deadline)
        self._ends.join(deadline)
        self._board.join(deadline.left_s)

    def shutdown(self) -> None:
        """Let go, once what Gloo does has ended; what has not by then fails."""
        if not self._held.wait(_Deadline(_SETTLE)) or self._lost():
            self.abort()
            return
        self._end("the group was destroyed")
        if self._links is not None:
            self._links.close()

    def abort(self) -> None:
        """Let go at once; what is under way fails."""
        self._end("the group was aborted")
        if self._links is not None:
            self._links.abandon()
        never_destroy(self._gloo)

    def _end(self, why: str) -> None:
        self._is_closed = True
        self._ends.shutdown()
        self._board.close(why)


def _delegates(name: str, what: str) -> Callable[..., Any]:
    @functools.wraps(getattr(dist.ProcessGroup, name))
    def call(self: OffbeatGroup, *arguments: Any, **options: Any) -> Any:
        given: dict[int, torch.Tensor] = {}

        def begin() -> Any:
            named = {option: self._held.aliases(one, given) for option, one in options.items()}
            return getattr(self._gloo, name)(*(self._held.aliases(one, given) for one in arguments), **named)

        # Of what is given to one and taken from another workers do not bring the same.
        tensors = _tensors(arguments) if what in _ALIKE else []
        return self._delegated(self._board.begin(_words(what, tensors)), begin, given=given)

    return call


def _passes_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(dist.ProcessGroup, name))
    def call(self: OffbeatGroup, *arguments: Any, **options: Any) -> Any:
        self._board.check_process(name)
        return getattr(self._gloo, name)(*arguments, **options)

    return call


for _name, _what in _OTHERS.items():
    if hasattr(dist.ProcessGroup, _name):  # torch renames some of them
        setattr(OffbeatGroup, _name, _delegates(_name, _what))
for _name in _PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(OffbeatGroup, _name, _passes_on(_name))


def _gloo(store: Any, place: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of Gloo's, for tensors of all devices that it takes."""
    group = dist.ProcessGroup(store, place, size)
    backend = dist.ProcessGroupGloo(store, place, size, timeout)
    stop_listening_at(store, place, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return group


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of the first argument that has some."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            return [one]
        if isinstance(one, (list, tuple)) and one:
            found = _tensors(one)
            if found:
                return found
    return []


def _originals(found: Any, given: Mapping[int, torch.Tensor]) -> Any:
    """Gloo's result with the caller's tensors in place of their aliases."""
    if isinstance(found, (list, tuple)):
        return [_originals(one, given) for one in found]
    return given.get(id(found), found)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy.

    Raises:
        ValueError: if several of its elements are one place in memory.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            "Cannot sum a tensor of which several elements are one place in memory, as of an expanded one. Give its "
            ".contiguous()."
        )
    return tensor.contiguous()


def _operation(operation: Any) -> str:
    return next((name for name in _OPERATIONS if operation == getattr(dist.ReduceOp, name)), "")


def _words(what: str, tensors: Sequence[torch.Tensor], operation: str = "") -> str:
    """A call in words that are the same on all workers."""
    # By device: a sum on CPUs may go along paths, and one on GPUs does not.
    sizes = ", ".join(
        f"{tensor.numel()} {dtype_name(tensor.dtype)}"
        + ("" if tensor.device.type == "cpu" else f" on {tensor.device.type}")
        for tensor in tensors
    )
    return what + (f" ({operation})" if operation else "") + (f" of {sizes}" if sizes else "")


class _HeldByGloo:
    """The Python objects that threads of Gloo's have yet to let go of: callbacks, and aliases of tensors.

    To free one, a thread needs the GIL. If the interpreter ends meanwhile, Python ends the thread within a destructor,
    and that aborts the process; if the group is destroyed, its destructor waits for the thread while it has the GIL.
    """

    def __init__(self) -> None:
        self._left, self._numbers = dict[int, weakref.ref[Any]](), itertools.count()

    def noted(self, held: T) -> T:
        """Return the object, to be given to Gloo alone; it is held until it is freed."""
        number = next(self._numbers)
        # No Python code runs when it is freed: who sees that it is gone has the GIL, which the thread has released.
        self._left[number] = weakref.ref(held, functools.partial(self._left.pop, number))
        return held

    def aliases(self, given: Any, of: dict[int, torch.Tensor] | None = None) -> Any:
        """Return the argument of a call with an alias in place of each tensor.

        Args:
            given: a tensor, a list of tensors, and so on, or anything else.
            of: takes the tensor of each alias, by the alias's `id`.
        """
        if isinstance(given, torch.Tensor):
            alias = self.noted(given.detach())
            if of is not None:
                of[id(alias)] = given
            return alias
        return [self.aliases(one, of) for one in given] if isinstance(given, (list, tuple)) else given

    def wait(self, deadline: _Deadline) -> bool:
        """Wait until Gloo holds nothing; whether that is so by the deadline."""
        while self._left and deadline.left_s:
            time.sleep(0.001)
        return not self._left


class _DaemonThreads:
    """Threads that end with the process, whatever they wait for; those of Python's executors are joined at its end.

    There are as many as are busy at a time: what hangs on a work may wait for another one, which ends on another.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._free = threading.Lock(), 0
        self._threads: list[threading.Thread] = []

    def submit(self, task: Callable[[], None]) -> None:
        """Have something done."""
        with self._lock:
            if self._free:
                self._free -= 1
            else:
                self._threads.append(threading.Thread(target=self._run, name="offbeat-c10d-ends", daemon=True))
                self._threads[-1].start()
            self._tasks.put(task)

    def shutdown(self) -> None:
        """End the threads, after what they have to do."""
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, deadline: _Deadline) -> None:
        """Wait for them until the deadline."""
        for thread in self._threads:
            thread.join(deadline.left_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            with self._lock:
                self._free += 1


class _Deadline:
    def __init__(self, patience: timedelta) -> None:
        self._end_s = time.monotonic() + patience.total_seconds()

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def has_passed(self) -> bool:
        return time.monotonic() > self._end_s
