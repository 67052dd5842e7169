"""The calls of a task: put, get, reduce.

    client = objects.connect()                      # the store of this machine, as OFFBEAT_OBJECTS says
    client.put("w", tensor)                         # on one machine
    tensor = client.get("w")                        # on any other
    client.reduce("sum", ["g0", "g1", "g2"], num_objects=2)
    client.get("sum"), client.reduced_set("sum")

Each call that waits has a `start_...` beside it, whose `ObjectFuture` can be waited for later, or awaited.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from offbeat.errors import NetworkError, ObjectError, ObjectTimeoutError
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.node_store import LIMITS, NodeStore
from offbeat.objects.store_access import EmbeddedStore, FoundObject, ObjectFuture, RemoteStore
from offbeat.protocol.objects import ITEM_BYTES, ObjectMeta, ObjectName, ReduceObjects
from offbeat.tensors import bytes_of, dtype_name
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from offbeat.objects.store_access import StoreAccess
    from offbeat.protocol.objects import ReduceOp
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.session import Limits

T = TypeVar("T")
STORE_VARIABLE = "OFFBEAT_OBJECTS"
"""The environment variable that names the store of this machine: "host:port"."""
_PATIENCE = timedelta(seconds=20)
_LOOK_S = 0.5


def connect(store: str | None = None, *, job: str = "default", credentials: Credentials | None = None) -> ObjectClient:
    """Use the store of this machine, which `offbeat objects serve` has started.

    Args:
        store: its address, "host:port"; None for what the environment variable OFFBEAT_OBJECTS says.
        job: of the stores.
        credentials: what store and client prove to each other; None for the token in OFFBEAT_TOKEN, if there is one.

    Raises:
        NetworkError: if no store is named, or it cannot be reached.
        PeerError: if it refuses.
    """
    address = store or os.environ.get(STORE_VARIABLE, "")
    if not address:
        raise NetworkError(
            "Cannot connect to a store of objects: none is named. Start one with `offbeat objects serve`, and give its "
            f"address to connect(), or in the environment variable {STORE_VARIABLE}."
        )
    if credentials is None and (secret := os.environ.get("OFFBEAT_TOKEN")):
        credentials = Token(secret.encode())
    return ObjectClient(RemoteStore(address, job=job_name(job), credentials=credentials, patience=_PATIENCE))


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
        self._used: dict[ObjectName, tuple[ObjectName, ...]] = {}

    def put(self, name: str, tensor: Tensor, *, version: int = 0, timeout: float | None = None) -> None:
        """Give others a tensor under a name, whose bytes never change: the tensor is copied.

        Args:
            name: 1 to 256 characters.
            tensor: on a CPU, dense.
            version: of several under this name.
            timeout: in seconds, for the directory to take it; None for as long as it takes.

        Raises:
            DisagreementError: if the name stands for other bytes already.
            ObjectError: if there is no room for it.
            ObjectTimeoutError: if it has taken too long.
        """
        self._wait(self.start_put(name, tensor, version=version), f"put {name!r}", timeout)

    def start_put(self, name: str, tensor: Tensor, *, version: int = 0) -> ObjectFuture[None]:
        """Begin a `put`; the tensor may change once this returns."""
        dtype = dtype_name(tensor.dtype)
        if dtype not in ITEM_BYTES:
            raise ObjectError(f"Cannot put {name!r}: its dtype is {dtype}, and {', '.join(ITEM_BYTES)} can be put.")
        data = bytes_of(tensor)
        meta = ObjectMeta(dtype, tuple(tensor.shape), len(data))
        return self._access.put(ObjectName(name, version), meta, data)

    def get(self, name: str, *, version: int = 0, timeout: float | None = None) -> Tensor:
        """Wait for an object, and return it.

        The tensor lies in the store's memory, mapped here: what is written into it nobody else sees.

        Args:
            name, version: of it.
            timeout: in seconds; None for as long as it takes.

        Raises:
            ObjectTimeoutError: if it has not come in time; says how much of it has.
            ObjectError: if it is lost, or was deleted.
        """
        future = self.start_get(name, version=version)
        try:
            self._wait(future, f"get {ObjectName(name, version)}", timeout)
        except ObjectTimeoutError:
            self._access.stop(future)
            raise
        found = future.value
        self._used[ObjectName(name, version)] = found.used
        return tensor_of(found)

    def start_get(self, name: str, *, version: int = 0) -> ObjectFuture[FoundObject]:
        """Begin to wait for an object; `tensor_of` makes a tensor of the outcome."""
        return self._access.get(ObjectName(name, version))

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
    ) -> None:
        """Have the sum of the sources that are there first made on this machine; does not wait: `get` it.

        Args:
            target: its name.
            sources: of which it may be made, all of one shape and dtype.
            op: "sum", "mean", "min", "max" or "prod".
            num_objects: of how many it is made; all if None.
            min_objects: with so many it is made at the deadline, if there are not more.
            deadline: in seconds from now.
            deterministic: add in the order of `sources`, so that the sum has the same bits each time.

        Raises:
            ObjectError: if the numbers do not fit each other.
        """
        self._reduce(target, sources, op, num_objects, min_objects, deadline, in_order=deterministic, striped=False)

    def allreduce(
        self,
        target: str,
        sources: Sequence[str],
        *,
        op: ReduceOp = "sum",
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Tensor:
        """Have the sum of all sources made, a stripe of it by each of their stores, and get it here.

        Any number of tasks may call this, all with the same arguments.

        Raises:
            DisagreementError: if another task calls it with other arguments.
            ObjectTimeoutError: if it has not come in time.
            ObjectError: if it is lost, or was deleted.
        """
        self._reduce(target, sources, op, None, None, None, in_order=deterministic, striped=True)
        return self.get(target, timeout=timeout)

    def reduced_set(self, target: str) -> list[str]:
        """The names of the sources of which a sum was made; after `get`.

        Raises:
            ObjectError: if it was not got here, or is no sum.
        """
        used = self._used.get(ObjectName(target), ())
        if not used:
            raise ObjectError(f"Cannot say what {target!r} was made of: get it first, and see that it is a sum.")
        return [source.id for source in used]

    def delete(self, name: str, *, version: int = 0) -> None:
        """Have all stores let go of an object; who has mapped it keeps it. Does not wait."""
        self._access.delete(ObjectName(name, version))

    def close(self) -> None:
        """Say good-bye."""
        self._access.close()

    def __enter__(self) -> ObjectClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reduce(
        self,
        target: str,
        sources: Sequence[str],
        op: ReduceOp,
        count: int | None,
        least: int | None,
        deadline: float | None,
        *,
        in_order: bool,
        striped: bool,
    ) -> None:
        count = len(sources) if count is None else count
        least = count if least is None else least
        if not 1 <= least <= count <= len(sources):
            raise ObjectError(
                f"Cannot reduce into {target!r}: num_objects={count} and min_objects={least} have to be 1 to "
                f"{len(sources)}, the number of sources, and min_objects no more than num_objects."
            )
        if least < count and deadline is None:
            raise ObjectError(f"Cannot reduce into {target!r} with min_objects={least}: say deadline=, in seconds.")
        request = ReduceObjects(
            name=ObjectName(target),
            sources=tuple(ObjectName(source) for source in sources),
            op=op,
            count=count,
            least=least,
            patience_s=deadline,
            in_order=in_order,
            striped=striped,
        )
        self._access.reduce(request)

    @staticmethod
    def _wait(future: ObjectFuture[T], what: str, timeout: float | None) -> None:
        until_s = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _LOOK_S if until_s is None else min(_LOOK_S, until_s - time.monotonic())
            if left_s < 0:
                raise ObjectTimeoutError(
                    f"Cannot {what} within {timeout:g} s: {future.progress or 'nothing is known'}."
                )
            if future.wait(timedelta(seconds=left_s)):
                future.outcome()
                return


def tensor_of(found: FoundObject) -> Tensor:
    """A tensor of an object that was found, in its memory."""
    dtype = getattr(torch, found.meta.dtype)
    if not found.meta.size_bytes:
        return torch.empty(found.meta.shape, dtype=dtype)
    return torch.frombuffer(found.memory, dtype=dtype, count=found.meta.numel).reshape(found.meta.shape)
