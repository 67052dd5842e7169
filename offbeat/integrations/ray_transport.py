"""Ray's references to tensors (RDT), with the tensors in offbeat's stores: transport "OFFBEAT".

    start_stores()
    ray_transport.register()                             # before the classes, in the process that makes the actors

    @ray.remote(enable_tensor_transport=True)            # the readers, too
    class Trainer:
        @ray.method(tensor_transport="OFFBEAT")
        def weights(self): return self.model.state_dict()

    reference = trainer.weights.remote()
    ray.get([reader.load.remote(reference) for reader in readers])      # a broadcast: readers feed each other

The transport is one-sided: what a method returns is copied to the store of its node, all tensors of one reference as
one object of bytes, and each receiver gets it from its own store, whichever store feeds that. A later change of a
returned tensor reaches nobody on another actor. Metadata are names of objects; tokens do not travel with references.
"""

from __future__ import annotations

import inspect
import math
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import NetworkError, ObjectError, ObjectTimeoutError
from offbeat.integrations import ray_objects
from offbeat.objects.progress import NOBODY
from offbeat.tensors import flat_bytes

try:
    from ray.experimental import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
        register_tensor_transport,
    )
except ImportError as error:
    raise ImportError(
        f"Cannot use stores of objects for Ray's tensor transports: {error}. Run pip install 'offbeat[rdt]', which "
        "installs a Ray that has them."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from offbeat.objects.client import ObjectClient
    from offbeat.objects.object_future import ObjectFuture

NAME = "OFFBEAT"
_PARAMETERS = ("transport_name", "devices", "transport_manager_class", "data_type")
_METHODS = {
    "tensor_transport_backend", "is_one_sided", "can_abort_transport", "actor_has_tensor_transport",
    "extract_tensor_transport_metadata", "get_communicator_metadata", "recv_multiple_tensors",
    "send_multiple_tensors", "garbage_collect", "abort_transport",
}  # fmt: skip
_ALIGNED = 64
_LOOK_S = 0.5
_LOST_S = 5.0  # without a holder: an object is put before anybody knows its name, so it is lost


def register() -> None:
    """Have Ray know the transport "OFFBEAT", in this process and in the actors that it makes from now on.

    A second call does nothing. Call it above classes with `ray.method(tensor_transport="OFFBEAT")`, which ask for it.
    Actors that were made before, or by another process, do not know it, and neither does one that Ray has restarted.
    Actors that only receive need `enable_tensor_transport=True`, too: without it Ray receives on the thread on which
    the method waits for its argument, for a minute, in vain.

    Raises:
        NetworkError: if this Ray has other interfaces for transports; says which.
    """
    found = tuple(inspect.signature(register_tensor_transport).parameters)
    if found != _PARAMETERS:
        raise NetworkError(
            f"Cannot register the transport {NAME}: register_tensor_transport of this Ray takes {', '.join(found)}, "
            f"and what it should take is {', '.join(_PARAMETERS)}. Run pip install 'offbeat[rdt]'."
        )
    if missing := sorted(TensorTransportManager.__abstractmethods__ ^ _METHODS):
        raise NetworkError(
            f"Cannot register the transport {NAME}: transports of this Ray differ in {', '.join(missing)}. Run pip "
            "install 'offbeat[rdt]'."
        )
    try:
        register_tensor_transport(NAME, ["cpu"], ObjectTransport, torch.Tensor)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


@dataclass
class ObjectTensorMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """The metadata of one reference.

    Args:
        name: of the object that has the bytes of all its tensors, each at a multiple of 64; "" if there is no byte.
    """

    name: str = ""


@dataclass
class ObjectFetch:
    """A transfer that has begun; a FetchRequest of Ray.

    Args:
        obj_id: Ray's name for the reference.
        future: of the object; None if there is nothing to fetch.
        metadata: of the reference.
        buffers: to copy the tensors to; None for views of the store's memory.
    """

    obj_id: str
    future: ObjectFuture[Tensor] | None
    metadata: ObjectTensorMetadata
    buffers: Sequence[Tensor] | None


class ObjectTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport in one process; Ray makes it, without arguments, when the process first needs it.

    Ray calls `extract_tensor_transport_metadata` in the actor that returns tensors, `recv_multiple_tensors` (an
    argument) or `fetch_multiple_tensors` and `wait_fetch_complete` (`ray.get`) where they are needed,
    `garbage_collect` in the creator when the last reference has gone, and `abort_transport` where a transfer failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: ObjectClient | None = None
        self._published: dict[str, str] = {}  # by Ray's name, ours
        self._fetches: dict[str, list[ObjectFuture[Tensor]]] = {}

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True  # nobody can know without asking the actor, and Ray wants this at once

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> ObjectTensorMetadata:
        """Publish the tensors of one reference."""
        devices = {tensor.device.type for tensor in rdt_object}
        if devices - {"cpu"}:
            raise ObjectError(
                f"Cannot publish tensors by the transport {NAME}: they are on {', '.join(sorted(devices))}, and it "
                "carries those in a CPU's memory. Return tensor.cpu(), or use NIXL or NCCL."
            )
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        with self._lock:
            name = self._published.get(obj_id, "")  # the answer of the first try was lost
        if not name and any(tensor.numel() for tensor in rdt_object):
            # Ray gives a method that it tries again the same name, and an object has the same bytes for ever.
            name = f"rdt/{obj_id}/{secrets.token_hex(4)}"
            self._connected().put(name, _packed(rdt_object))
            with self._lock:
                self._published[obj_id] = name
        return ObjectTensorMetadata(tensor_meta=meta, tensor_device="cpu", name=name)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: ObjectTensorMetadata,
        communicator_metadata: Any,
        target_buffers: list[Tensor] | None = None,
    ) -> list[Tensor]:
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: ObjectTensorMetadata,
        communicator_metadata: Any,
        target_buffers: list[Tensor] | None = None,
    ) -> ObjectFetch:
        """Begin to get the tensors of one reference."""
        future = None
        if tensor_transport_metadata.name:
            future = self._connected().start_get(tensor_transport_metadata.name)
            with self._lock:
                self._fetches.setdefault(obj_id, []).append(future)
        return ObjectFetch(obj_id, future, tensor_transport_metadata, target_buffers)

    def wait_fetch_complete(self, fetch_request: ObjectFetch, timeout: float = -1) -> list[Tensor]:
        """Wait for what `fetch_multiple_tensors` began."""
        future, metadata = fetch_request.future, fetch_request.metadata
        if future is not None:
            until_s = math.inf if timeout < 0 else time.monotonic() + timeout
            held_s = time.monotonic()
            while not future.wait(timedelta(seconds=max(0.0, min(_LOOK_S, until_s - time.monotonic())))):
                if time.monotonic() >= until_s:
                    told = future.progress or "nothing is known"
                    raise ObjectTimeoutError(f"Cannot get {metadata.name!r} within {timeout:g} s: {told}.")
                if future.progress != NOBODY:
                    held_s = time.monotonic()
                elif time.monotonic() - held_s > _LOST_S:
                    self.abort_transport(fetch_request.obj_id, None)
                    raise ObjectError(
                        f"Cannot get {metadata.name!r}: no store has it any more. It was deleted, or the stores that "
                        "had it are lost."
                    )
            self._forget(fetch_request.obj_id, future)
            packed = future.outcome()
        else:
            packed = torch.empty(0, dtype=torch.uint8)
        tensors = _unpacked(packed, metadata.tensor_meta)
        if fetch_request.buffers is None:
            return tensors
        for buffer, tensor in zip(fetch_request.buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return list(fetch_request.buffers)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise AssertionError("Ray asks nobody to send where the transport is one-sided")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: ObjectTensorMetadata, tensors: list[Tensor]) -> None:
        """Have all stores let go of the tensors of one reference."""
        with self._lock:
            self._published.pop(obj_id, None)
        if tensor_transport_meta.name:
            self._connected().delete(tensor_transport_meta.name)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """End the transfers of one reference to this process."""
        with self._lock:
            futures = self._fetches.pop(obj_id, [])
        for future in futures:
            future.what = f"get the tensors of {obj_id}, as Ray has given the transfer up"
            future.stop()

    def _connected(self) -> ObjectClient:
        with self._lock:
            if self._client is None:
                self._client = ray_objects.connect()
            return self._client

    def _forget(self, obj_id: str, future: ObjectFuture[Tensor]) -> None:
        with self._lock:
            waiting = self._fetches.get(obj_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._fetches.pop(obj_id, None)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, each at a multiple of 64."""
    pieces = [flat_bytes(tensor) for tensor in tensors]
    if len(pieces) == 1:
        return pieces[0]
    packed = torch.zeros(sum(_room(len(piece)) for piece in pieces), dtype=torch.uint8)
    at = 0
    for piece in pieces:
        packed[at : at + len(piece)] = piece
        at += _room(len(piece))
    return packed


def _unpacked(packed: Tensor, meta: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """The tensors of `_packed`, in its memory."""
    tensors, at = [], 0
    for shape, dtype in meta:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(packed[at : at + size].view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype))
        at += _room(size)
    return tensors


def _room(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED
