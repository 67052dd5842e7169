"""Worker processes for tests: cheap to start (forked from a server that has torch loaded), fresh for each test."""

from __future__ import annotations

import io
import logging
import multiprocessing as mp
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests import warm
from tests.patience import stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "tests.preload"])


class WorkerFailed(AssertionError):
    """A worker raised; the text holds its traceback."""


def listen() -> list[str]:
    """What offbeat tells people in this process from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    return told


def run_workers(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 50,
    faulty: int | Collection[int] | None = None,
    newcomers: int = 0,
) -> list[Any]:
    """Call `function(*arguments)` in `world` worker processes and return what they return, in rank order.

    Args:
        timeout_s: how long no process may end; longer on a busy machine.
        faulty: a rank that a test makes fail, or several; what it does or returns is not looked at.
        newcomers: so many more processes, of the ranks behind, whose `offbeat.init` joins the job of the others.

    Raises:
        WorkerFailed: with the tracebacks, if any of them raises or dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world + newcomers):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main, args=(theirs, rank, world, str(Path(folder) / "store"), function, arguments)
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, timeout_s, {faulty} if isinstance(faulty, int) else set(faulty or ()))
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for end in ends:
                end.close()


def _collect(ends: list[Connection], timeout_s: float, faulty: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {rank: end for rank, end in enumerate(ends) if rank not in faulty}
    while waiting:
        limit_s = stretched(timeout_s if not failures else 5)
        ready = wait(list(waiting.values()), limit_s)
        if not ready:
            failures.setdefault(-1, f"ranks {sorted(waiting)} did not finish within {limit_s:.0f} s")
            break
        for rank, end in list(waiting.items()):
            if end not in ready:
                continue
            del waiting[rank]
            try:
                ok, data = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
            except EOFError:
                failures[rank] = "died"
                continue
            if ok:
                results[rank] = data
            else:
                failures[rank] = data
    if failures:
        raise WorkerFailed("\n".join(f"--- rank {rank}: {text}" for rank, text in failures.items()))
    return [results.get(rank) for rank in range(len(ends))]


def _main(
    end: Connection, rank: int, world: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        OFFBEAT_STORE=store,
        GLOO_SOCKET_IFNAME="lo",
    )
    if rank >= world:
        os.environ.update(WORLD_SIZE="1", OFFBEAT_JOINS=str(world), OFFBEAT_STORE_PREFIX="offbeat-0")
    torch.set_num_threads(1)
    warm.stand_by()
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    data = io.BytesIO()
    torch.save(answer, data)
    end.send_bytes(data.getvalue())
    end.close()
    if not answer[0]:
        os._exit(1)
