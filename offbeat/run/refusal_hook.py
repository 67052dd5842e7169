"""The hook by which workers that end with the same refusal say it once, where no launcher of offbeat does.

Under torchrun, or started by hand, each worker prints what its script ends with. A plan or a model that offbeat refuses
is refused on all of them alike: the first one prints it, the others one line. They wait until it is printed, since
torchrun kills all workers when the first of them is gone.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from offbeat.errors import NetworkError, OffbeatError, WorkerLostError

if TYPE_CHECKING:
    from types import TracebackType

    from torch._C._distributed_c10d import Store

_PRINTS = timedelta(seconds=2)


def say_refusals_once(store: Store, rank: int) -> None:
    """Have this process print an equal refusal only if it is the first worker to end with it.

    Args:
        store: where the workers met.
        rank: of this one.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_refusal = isinstance(error, OffbeatError) and not isinstance(error, (WorkerLostError, NetworkError))
        if not is_refusal:
            previous(kind, error, trace)
            return
        text = str(error).encode(errors="backslashreplace")  # a path in it may not be UTF-8
        key = f"refusal/{hashlib.sha256(text).hexdigest()}"
        if _is_printed(store, key):
            sys.stderr.write(f"offbeat: rank {rank} was refused the same.\n")
            return
        previous(kind, error, trace)
        sys.stderr.flush()
        _note(store, key)

    sys.excepthook = hook


def _is_printed(store: Store, key: str) -> bool:
    """Whether another worker has printed it; if it does so now, wait for that."""
    try:
        if store.add(f"{key}/count", 1) == 1:
            return False
        store.wait([f"{key}/printed"], _PRINTS)
    except dist.DistError:  # it was killed meanwhile, or the store is gone
        return False
    return True


def _note(store: Store, key: str) -> None:
    try:
        store.set(f"{key}/printed", "")
    except dist.DistError:  # the store is gone, and with it those who would ask
        return
