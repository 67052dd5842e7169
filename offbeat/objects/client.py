"""The calls of a task: put, get, reduce.

    client = connect()                              # the store of this machine
    client.put("w", tensor)                         # on one machine
    tensor = client.get("w")                        # on any other
    client.reduce("sum", ["g0", "g1", "g2"], num_objects=2)
    client.get("sum"), client.reduced_set("sum")
    client.publisher("policy").publish(model)       # versions: what changed travels
    client.follow("policy", model).update()         # on any other

`start_put`, `start_get`, `start_get_tensors` and `start_allreduce` do not wait: what they return is an `ObjectFuture`,
which can be waited for later (`.get(timeout)`), awaited (`await client.start_get("w")`), or withdrawn (`.stop()`).
"""

from __future__ import annotations

import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args, overload

import msgspec
import torch

from offbeat.codec import Cast
from offbeat.errors import NetworkError, ObjectError
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.embedded_store import EmbeddedStore
from offbeat.objects.local_store import STORE_VARIABLE, TOKEN_VARIABLE, find_or_start
from offbeat.objects.node_store import LIMITS, NodeStore
from offbeat.objects.object_future import CallDeadline, ObjectFuture
from offbeat.objects.packed_tensors import TensorLayout
from offbeat.objects.publishing import Follower, Publisher
from offbeat.objects.remote_store import RemoteStore
from offbeat.objects.store_access import FoundObject
from offbeat.objects.stripes import stripes_for
from offbeat.objects.versions import VersionedObjects, check_id
from offbeat.protocol.object_versions import DELTA, DESCRIPTION, delta_name, description_name
from offbeat.protocol.objects import (
    INLINE_BYTES,
    ITEM_BYTES,
    MAX_STRIPES,
    ObjectMeta,
    ObjectName,
    ReduceObjects,
    ReduceOp,
)
from offbeat.tensors import dtype_name
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from offbeat.objects.memory import MakerMap
    from offbeat.objects.store_access import StoreAccess
    from offbeat.protocol.object_calls import StatusAnswer
    from offbeat.protocol.objects import UsedSource, WireDtype
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.session import Limits

_PATIENCE = timedelta(seconds=20)
_MOST_KEPT = 1024  # sums that were asked for, and sets of which sums were made
T = TypeVar("T")
OnFailure = Literal["restart", "splice"]


def connect(
    store: str | None = None,
    *,
    job: str = "default",
    credentials: Credentials | None = None,
    memory_mib: int = 1024,
    timeout: float | None = None,
) -> ObjectClient:
    """Use the store of this machine: the one named, or the one that tasks share here, which the first of them starts.

    A store that is started uses the directories in the environment variable OFFBEAT_DIRECTORIES ("host:port,...");
    without it, it is for the tasks of this machine alone. It ends ten minutes after the last task that uses it.

    Args:
        store: its address, "host:port"; None for what the environment variable OFFBEAT_OBJECTS says.
        job: of the stores.
        credentials: that store and client prove to each other; None for the token in OFFBEAT_TOKEN, if there is one.
        memory_mib: for the objects of a store that is started.
        timeout: in seconds, for the store to answer, which may still be starting; None for 20 s if it runs already:
            then a refused connection is an error at once.

    Raises:
        NetworkError: if it cannot be reached, or not be started.
        PeerError: if it refuses.
    """
    address = store or os.environ.get(STORE_VARIABLE, "")
    secret = "" if credentials is not None else os.environ.get(TOKEN_VARIABLE, "")
    if secret:
        credentials = Token(secret.encode())
    if not address:
        if credentials is not None and not secret:
            raise NetworkError(
                "Cannot start a store of objects with these credentials: give a token in the environment variable "
                f"{TOKEN_VARIABLE}, or start one by `offbeat objects serve`, and give its address to connect()."
            )
        found = find_or_start(job, secret, memory_mib)
        address, credentials = found.address, found.credentials(credentials)
    access = RemoteStore(
        address,
        job=job_name(job),
        credentials=credentials,
        patience=_PATIENCE if timeout is None else timedelta(seconds=timeout),
        may_start=timeout is not None,
    )
    return ObjectClient(access)


def embedded(
    directories: Sequence[str],
    *,
    bind: str = "127.0.0.1",
    job: str = "default",
    credentials: Credentials | None = None,
    memory_mib: int = 1024,
    limits: Limits = LIMITS,
) -> ObjectClient:
    """Have a store in this process, which ends with it.

    Args:
        directories: "host:port" of each, in the same order everywhere.
        bind: the address of this machine at which other stores read.
        job, credentials: as of `connect`, and of the directories.
        memory_mib: for objects.
        limits: of the links between stores; after `limits.timeout` a silent store is lost, so a process that may hold
            the GIL for long needs more.

    Raises:
        NetworkError: if the address cannot be used, or a directory cannot be reached.
    """
    store = NodeStore(
        job=job_name(job),
        credentials=credentials,
        most_bytes=memory_mib << 20,
        arithmetic=TorchArithmetic,
        limits=limits,
    )
    return ObjectClient(EmbeddedStore(store, bind, list(directories), _PATIENCE))


def job_name(job: str) -> str:
    """The name by which the links of a job's stores know each other."""
    return f"{job}/objects"


class ObjectClient:
    """A task's way to objects; made by `connect` or `embedded`. It may be used on any thread.

    Args:
        access: to the store.
    """

    def __init__(self, access: StoreAccess) -> None:
        self._access = access
        self._versions = VersionedObjects(access)
        self._used: OrderedDict[ObjectName, tuple[int, tuple[UsedSource, ...]]] = OrderedDict()
        self._asked: OrderedDict[ObjectName, ObjectFuture[bool]] = OrderedDict()  # sums
        self._empty: dict[ObjectName, tuple[ObjectMeta, MakerMap]] = {}

    def put(
        self,
        name: str,
        tensor: Tensor | Mapping[str, Tensor],
        *,
        version: int = 0,
        base: int | None = None,
        stripes: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Give others a tensor, or several in one object, under a name, whose bytes never change: they are copied.

        Args:
            name: 1 to 256 characters.
            tensor: dense; or several by name.
            version: of several under this name.
            base: the version since which to publish what changed, too, for those who have that.
            stripes: into which a large tensor is cut, each of which has its own way to the readers: those that ask
                together have several feeders, and the loss of one stops them in its stripes alone.
            timeout: in seconds, for the directory to take it; None for as long as it takes.

        Raises:
            DisagreementError: if the name stands for other bytes already.
            ObjectError: if there is no room for it, or nobody has the base.
            ObjectTimeoutError: if it has taken too long.
        """
        if isinstance(tensor, torch.Tensor) and base is None:
            self.start_put(name, tensor, version=version, stripes=stripes).get(timeout)
            return
        if stripes != 1:
            raise ObjectError(f"Cannot put {name!r} with stripes={stripes}: only one tensor, without base=, is cut.")
        check_id(name, version)
        if not _are_tensors(tensor):
            raise ObjectError(
                f"Cannot put {name!r}: it is no tensor or dict of tensors by name ({type(tensor).__name__})."
            )
        if base is not None and not (isinstance(base, int) and base < version):
            raise ObjectError(f"Cannot put {name!r} version {version} with base={base}: a base is an earlier version.")
        deadline = CallDeadline(timeout)
        whole, records = (None, ()) if base is None else self._versions.base(name, base, deadline)
        self._versions.put(
            name,
            version,
            tensor,
            base=whole,
            describe=lambda record: (*records, record),
            deadline=deadline,
        )

    def start_put(
        self, name: str, tensor: Tensor | Mapping[str, Tensor], *, version: int = 0, stripes: int = 1
    ) -> ObjectFuture[bool]:
        """Begin a `put`; what was given may change once this returns. The outcome is whether it was not there before.

        Several tensors in one object, put like this, are no base of a later version.
        """
        named = _named(name, version)
        if name.endswith((DELTA, DESCRIPTION)):
            check_id(name, version)
        if not 1 <= stripes <= MAX_STRIPES:
            raise ObjectError(f"Cannot put {name!r} with stripes={stripes}: 1 to {MAX_STRIPES} are possible.")
        layout = TensorLayout.of(tensor)
        if named in self._empty and isinstance(tensor, torch.Tensor):
            if stripes != 1:
                raise ObjectError(f"Cannot put {name!r} with stripes={stripes}: what empty() has made is not cut.")
            return self._finish(named, tensor)
        meta = msgspec.structs.replace(layout.meta, stripes=stripes_for(layout.meta.size_bytes, stripes))
        return self._access.put(named, meta, layout.parts(tensor))

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, version: int = 0) -> Tensor:
        """Return a tensor in the store's memory, to be filled and `put` under this name: that copies nothing.

        After `put` nobody else sees what is written into it. A tensor that is dropped before ends its name.

        Raises:
            ObjectError: if the name is taken, or there is no room for it.
        """
        named, size = _named(name, version), math.prod(shape) * dtype.itemsize
        if len(shape) > 16 or min(shape, default=0) < 0 or size >= 1 << 40 or dtype_name(dtype) not in ITEM_BYTES:
            raise ObjectError(f"Cannot have {name!r} as {dtype} of shape {list(shape)}: no object can be like that.")
        meta = ObjectMeta(dtype_name(dtype), tuple(shape), size)
        if meta.size_bytes <= INLINE_BYTES:  # a small one travels in a message
            return torch.empty(tuple(shape), dtype=dtype)
        memory, maker = self._access.create(named, meta).get()
        self._empty[named] = meta, maker
        weakref.finalize(memory, self._abandon, named)
        return tensor_of(FoundObject(meta, memory, ()))

    @overload
    def get(self, name: str, *, version: int = 0, timeout: float | None = None) -> Tensor: ...

    @overload
    def get(
        self, name: str, *, version: int = 0, into: Tensor | Mapping[str, Tensor], timeout: float | None = None
    ) -> None: ...

    def get(
        self,
        name: str,
        *,
        version: int = 0,
        into: Tensor | Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> Tensor | None:
        """Wait for an object, and return it; or write it into tensors.

        The tensor lies in the store's memory, mapped here: what is written into it nobody else sees.

        Args:
            name, version: of it.
            into: tensors that may have an earlier version, of which only what changed travels then. All are written,
                or none.
            timeout: in seconds; None for as long as it takes.

        Raises:
            ObjectTimeoutError: if it has not come in time; says how much of it has.
            ObjectError: if it is lost, or was deleted, or is not like the tensors.
        """
        if into is not None:
            _named(name, version)
            if not _are_tensors(into):
                raise ObjectError(f"Cannot get {name!r} into a {type(into).__name__}: give a tensor, or a dict.")
            if why := self._versions.load(name, version, into, CallDeadline(timeout)):
                raise ObjectError(why)
            return None
        return _once(self.start_get(name, version=version), timeout)

    def start_get(self, name: str, *, version: int = 0) -> ObjectFuture[Tensor]:
        """Begin a `get`."""
        return self._start_get(_named(name, version), tensor_of)

    def get_tensors(self, name: str, *, version: int = 0, timeout: float | None = None) -> dict[str, Tensor]:
        """Wait for several tensors that were put in one object, and return them, as `get` does."""
        return _once(self.start_get_tensors(name, version=version), timeout)

    def start_get_tensors(self, name: str, *, version: int = 0) -> ObjectFuture[dict[str, Tensor]]:
        """Begin a `get_tensors`."""
        return self._start_get(
            _named(name, version), lambda found: TensorLayout.read(found.meta, found.view).tensors_in(found.view)
        )

    def reduce(
        self,
        target: str,
        sources: Sequence[str],
        *,
        op: ReduceOp = "sum",
        num_objects: int | None = None,
        min_objects: int | None = None,
        deadline: float | None = None,
        deterministic: bool = False,
        wire: Cast | None = None,
        on_failure: OnFailure = "restart",
    ) -> None:
        """Have the sum of the sources that are there first made on this machine; does not wait: `get` it.

        With `wire=Cast("bf16")` float32 sources and partial sums travel in 16 bits, and are added in float32. Each is
        rounded to the nearest on its way from one store to the next, by at most 1/256 of itself; with `Cast("fp16")` by
        1/2048, and what is beyond 65,504 becomes infinite. Along a chain that are as many roundings as sources. Objects
        that travel in messages (64 KiB) are not rounded.

        Args:
            target: its name.
            sources: of which it may be made, all of one shape and dtype.
            op: "sum", "mean", "min", "max" or "prod".
            num_objects: of how many it is made; all if None.
            min_objects: with so many it is made at the deadline, if there are not more.
            deadline: in seconds from now.
            deterministic: add in the order of `sources`, so that the sum has the same bits each time.
            wire: in which sources and partial sums travel over slow links; None for all bits.
            on_failure: what becomes of the sums that a source is in when it is lost in the middle of its way and
                another one takes its place: "restart" makes them anew, so that all elements are of the same sources;
                "splice" keeps them and adds the other one from there on. Each element is then a sum of `num_objects`
                sources, and `reduced_ranges` says of which.

        Raises:
            ObjectError: if the numbers do not fit each other, `wire` is another codec, or `on_failure` neither.
        """
        how = _How(op, num_objects, min_objects, deadline, deterministic, False, wire, on_failure)
        self._reduce(target, sources, how)

    def allreduce(
        self,
        target: str,
        sources: Sequence[str],
        *,
        op: ReduceOp = "sum",
        deterministic: bool = False,
        wire: Cast | None = None,
        on_failure: OnFailure = "restart",
        timeout: float | None = None,
    ) -> Tensor:
        """Have the sum of all sources made, a stripe of it by each of their stores, and get it here.

        Any number of tasks may call this, all with the same arguments, which are those of `reduce`. With `wire` the
        parts of the sum travel in 16 bits, and the result does in its own.

        Raises:
            DisagreementError: if another task calls it with other arguments.
            ObjectTimeoutError: if it has not come in time.
            ObjectError: if it is lost, or was deleted.
        """
        begun = self.start_allreduce(
            target, sources, op=op, deterministic=deterministic, wire=wire, on_failure=on_failure
        )
        return _once(begun, timeout)

    def start_allreduce(
        self,
        target: str,
        sources: Sequence[str],
        *,
        op: ReduceOp = "sum",
        deterministic: bool = False,
        wire: Cast | None = None,
        on_failure: OnFailure = "restart",
    ) -> ObjectFuture[Tensor]:
        """Begin an `allreduce`."""
        self._reduce(target, sources, _How(op, None, None, None, deterministic, True, wire, on_failure))
        return self.start_get(target)

    def reduced_set(self, target: str) -> list[str]:
        """The names of the sources of which a sum was made; after `get`.

        Raises:
            ObjectError: if it was not got here, or is no sum.
        """
        return list(self.reduced_ranges(target))

    def reduced_ranges(self, target: str) -> dict[str, list[tuple[int, int]]]:
        """The elements of a sum, as it lies in memory, that each of its sources is in: (first, after the last), ...

        They are all elements, [(0, numel)], unless the sum was made with `on_failure="splice"` and a source was lost.

        Raises:
            ObjectError: as `reduced_set`.
        """
        numel, used = self._used.get(ObjectName(target), (0, ()))
        if not used:
            raise ObjectError(f"Cannot say what {target!r} was made of: get it first, and see that it is a sum.")
        return {source.name.id: list(source.ranges) or [(0, numel)] for source in used}

    def versions(self, name: str, *, timeout: float | None = None) -> list[int]:
        """The versions of a name that some store has all of, ascending."""
        _named(name, 0)
        return list(self._access.versions(name).get(timeout).versions)

    def publisher(self, name: str, *, keep: int = 2) -> Publisher:
        """Publish versions of a model under a name; see `Publisher.publish`.

        Args:
            name: of it.
            keep: the number of versions whose whole is kept.
        """
        return Publisher(self._versions, name, keep)

    def follow(self, name: str, target: torch.nn.Module | Mapping[str, Tensor]) -> Follower:
        """Load versions that are published under a name, as they come; see `Follower.update`.

        Args:
            name: of what is followed.
            target: a module, or tensors by name, into which they are written.
        """
        return Follower(self._versions, name, target)

    def delete(self, name: str, *, version: int = 0) -> None:
        """Have all stores let go of an object; who has mapped it keeps it. Does not wait."""
        whole = _named(name, version)
        for one in (description_name(name, version), delta_name(name, version), whole):
            if len(one.id) <= 256:  # no longer one has versions
                self._access.delete(one)

    def status(self) -> StatusAnswer:
        """Return the objects of this machine's store, and the bytes that it has sent to others.

        Raises:
            ObjectError: if it is lost.
        """
        return self._access.status()

    def close(self) -> None:
        """Say good-bye."""
        self._access.close()

    def __enter__(self) -> ObjectClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_get(self, name: ObjectName, make: Callable[[FoundObject], T]) -> ObjectFuture[T]:
        def made(found: FoundObject) -> T:
            if found.used:
                _keep(self._used, name, (found.meta.numel, found.used))
            return make(found)

        asked = self._asked.get(name)
        future = self._access.get(name, made, asked)

        def over() -> None:
            if asked is not None and asked.done():
                self._asked.pop(name, None)

        future.add_done_callback(over)
        return future

    def _finish(self, name: ObjectName, tensor: Tensor) -> ObjectFuture[bool]:
        """Put a tensor that `empty` has made."""
        meta, maker = self._empty[name]
        is_it = tensor.data_ptr() == maker.address and tensor.is_contiguous() and tensor.numel() == meta.numel
        if not is_it or tensor.dtype != getattr(torch, meta.dtype):
            raise ObjectError(f"Cannot put {name}: empty() has made a tensor for it. Put that one, or drop it.")
        maker.make_private()
        del self._empty[name]
        return self._access.finish(name)

    def _abandon(self, name: ObjectName) -> None:
        if (empty := self._empty.pop(name, None)) is not None:
            empty[1].close()
            self._access.abandon(name)

    def _reduce(self, target: str, sources: Sequence[str], how: _How) -> None:
        if isinstance(sources, str) or not sources:
            raise ObjectError(f"Cannot reduce into {target!r}: its sources are a list of names, and not {sources!r}.")
        count = len(sources) if how.num_objects is None else how.num_objects
        least = count if how.min_objects is None else how.min_objects
        if not 1 <= least <= count <= len(sources):
            raise ObjectError(
                f"Cannot reduce into {target!r}: num_objects={count} and min_objects={least} have to be 1 to "
                f"{len(sources)}, the number of sources, and min_objects no more than num_objects."
            )
        if how.on_failure not in ("restart", "splice"):
            raise ObjectError(f'Cannot reduce with on_failure={how.on_failure!r}: it is "restart" or "splice".')
        if least < count and how.deadline is None:
            raise ObjectError(f"Cannot reduce into {target!r} with min_objects={least}: say deadline=, in seconds.")
        if how.min_objects is None and how.deadline is not None:
            raise ObjectError(f"Cannot reduce into {target!r} with deadline={how.deadline}: say min_objects=, too.")
        if how.op not in (known := get_args(ReduceOp)):
            raise ObjectError(f"Cannot reduce into {target!r} with op={how.op!r}: it is one of {', '.join(known)}.")
        request = ReduceObjects(
            name=ObjectName(target),
            sources=tuple(ObjectName(source) for source in sources),
            op=how.op,
            count=count,
            least=least,
            patience_s=how.deadline,
            in_order=how.deterministic,
            striped=how.striped,
            wire=_wire_dtype(target, how.wire),
            splices=how.on_failure == "splice",
        )
        try:  # a store ends the session of a client that it cannot understand
            msgspec.convert(msgspec.to_builtins(request), ReduceObjects)
        except msgspec.ValidationError as error:
            raise ObjectError(f"Cannot reduce into {target!r}: {error}.") from error
        _keep(self._asked, request.name, self._access.reduce(request))


class _How(NamedTuple):
    """The arguments of `reduce`."""

    op: ReduceOp
    num_objects: int | None
    min_objects: int | None
    deadline: float | None
    deterministic: bool
    striped: bool
    wire: Cast | None
    on_failure: OnFailure


def _keep(book: OrderedDict[ObjectName, T], name: ObjectName, value: T) -> None:
    book[name] = value
    if len(book) > _MOST_KEPT:
        book.popitem(last=False)


def _once(future: ObjectFuture[T], timeout: float | None) -> T:
    """Wait for a call, and withdraw it if it takes too long."""
    try:
        return future.get(timeout)
    finally:
        future.stop()


def _are_tensors(given: object) -> bool:
    if isinstance(given, Mapping):
        return all(isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in given.items())
    return isinstance(given, torch.Tensor)


def _named(id_: str, version: int) -> ObjectName:
    is_text = isinstance(id_, str) and not any("\ud800" <= letter <= "\udfff" for letter in id_)
    if not is_text or not 1 <= len(id_) <= 256 or not isinstance(version, int) or not 0 <= version < 1 << 40:
        raise ObjectError(
            f"Cannot use {id_!a:.60} version {version}: an object's name is a string of 1 to 256 characters, and a "
            f"version is 0 to {(1 << 40) - 1}."
        )
    return ObjectName(id_, version)


def _wire_dtype(target: str, wire: Cast | None) -> WireDtype:
    if wire is not None and not isinstance(wire, Cast):
        raise ObjectError(
            f"Cannot reduce into {target!r} with wire={wire!r}: between stores partial sums travel as they are, or as "
            'Cast("bf16") or Cast("fp16").'
        )
    return "" if wire is None else {"bf16": "bfloat16", "fp16": "float16"}[wire.dtype]  # type: ignore[return-value]


def tensor_of(found: FoundObject) -> Tensor:
    """A tensor of an object that was found, in its memory."""
    dtype = getattr(torch, found.meta.dtype)
    if not found.meta.size_bytes:
        return torch.empty(found.meta.shape, dtype=dtype)
    return torch.frombuffer(found.memory, dtype=dtype, count=found.meta.numel).reshape(found.meta.shape)
