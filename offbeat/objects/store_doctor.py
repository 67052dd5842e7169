"""Does the store of this machine work, and its directory? `offbeat objects doctor` asks here.

It puts and sums objects of its own, under names that nobody else uses, and deletes them.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.finding import Finding
from offbeat.errors import ObjectError, OffbeatError
from offbeat.objects.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat.objects.client import ObjectClient
    from offbeat.wire.credentials import Credentials

_NUMEL, _PATIENCE_S = 8 << 20, 10.0
_ALMOST_FULL = 0.9


def examine_store(
    store: str | None, job: str, credentials: Credentials | None, busy_with: Callable[[str], None]
) -> Iterator[Finding]:
    """Test a store from this process.

    Args:
        store, job, credentials: as of `connect`.
        busy_with: called with what is being tested.
    """
    busy_with("reaching the store")
    try:
        client = connect(store, job=job, credentials=credentials)
    except OffbeatError as error:
        remedy = "start one with `offbeat objects serve`, give its address and token"
        yield Finding("store", "cannot be reached", "bad", str(error).removesuffix("."), remedy)
        return
    with client:
        status = client.status()
        yield Finding("store", f"{status.address}, {len(status.objects)} objects")
        yield _memory(status.used_bytes, status.most_bytes)
        busy_with("putting and getting an object")
        yield from _objects(client)


def _memory(used_bytes: int, most_bytes: int) -> Finding:
    value = f"{used_bytes >> 20} of {most_bytes >> 20} MiB are used"
    if used_bytes < _ALMOST_FULL * most_bytes:
        return Finding("memory", value)
    remedy = "delete objects, or start it with more (--memory-mib)"
    return Finding("memory", value, "note", "what is read least will be dropped, and what only it has refused", remedy)


def _objects(client: ObjectClient) -> Iterator[Finding]:
    name = f"doctor {secrets.token_hex(8)}"
    names = [f"{name}/{part}" for part in ("one", "two", "sum")]
    tensor = torch.arange(_NUMEL, dtype=torch.float32)
    try:
        began_s = time.monotonic()
        client.put(names[0], tensor, timeout=_PATIENCE_S)
        put_s = time.monotonic() - began_s
        yield Finding("directory", f"answers; a put of {tensor.nbytes >> 20} MiB takes {1e3 * put_s:.0f} ms")
        if not torch.equal(client.get(names[0], timeout=_PATIENCE_S), tensor):
            yield Finding("objects", "come with other bytes", "bad", "memory is damaged", "test this machine's memory")
            return
        yield Finding("objects", "are mapped from the store's memory")
        client.put(names[1], tensor, timeout=_PATIENCE_S)
        client.reduce(names[2], names[:2])
        is_right = torch.equal(client.get(names[2], timeout=_PATIENCE_S), 2 * tensor)
        yield Finding("sums", "are made") if is_right else Finding("sums", "are wrong", "bad")
    except ObjectError as error:
        remedy = "see that the directory is up at its address, and that the store has room"
        yield Finding("objects", "cannot be put or got", "bad", str(error).removesuffix("."), remedy)
    finally:
        for one in names:
            client.delete(one)
