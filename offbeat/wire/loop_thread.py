"""An event loop on a thread of its own, for a training process, which has none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import NetworkError
from offbeat.wire.busy_poll import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and calls for other threads; ends with the process, or by `close`.

    A child that is forked has no such thread, so there every call is refused.

    >>> with LoopThread() as loop:
    ...     loop.run(asyncio.sleep(0, "done"))
    'done'
    """

    def __init__(self, name: str = "offbeat-wire") -> None:
        self._pid = os.getpid()
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, wait for it, and return what it returns, or raise what it raises.

        Raises:
            NetworkError: if the loop is closed, also meanwhile; in a forked child; on the loop's own thread.
        """
        try:
            self._check()
            if threading.current_thread() is self._thread:
                raise NetworkError("Cannot wait for the event loop on its own thread: await the coroutine.")
        except NetworkError:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise NetworkError("Cannot wait any longer: the event loop was closed.") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have `function(*arguments)` called there soon; calls of one thread stay in order.

        Raises:
            NetworkError: if the loop is closed, or this is a forked child.
        """
        self._check()
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what runs there and end the thread; again, or in a forked child, does nothing."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise NetworkError(
                "Cannot use the links of the process that forked this one: its event loop is not inherited. "
                "Open links of its own here."
            )
        if self._loop.is_closed():
            raise NetworkError("Cannot use what was closed: connect again.")


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
