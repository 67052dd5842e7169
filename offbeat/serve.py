"""A shard of a parameter server as a process of its own.

    python -m offbeat.serve FD      (settings as JSON on standard input; its address, or why not, goes to FD)

It outlives the worker that started it: it ends when the last worker has gone, or when none has come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import NetworkError, OffbeatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.wire.credentials import Credentials

_START_S = 60.0
# Another shard's number on its link to the first: no worker has it.
_SHARD_RANK = 4095
# For the last words to those that are still connected: an onlooker that was stopped or killed never hears them.
_GOOD_BYE_S = 0.5


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one shard.

    Args:
        job: name of the job; workers of another are refused.
        bind: address to listen on.
        port: 0 for one of the kernel's choice.
        coordinator: "host:port" of the first shard; "" if this is it.
        token: secret that the workers know; "" for none.
        certificate, key, authority: PEM files for mutual TLS; "" for none.
        timeout_s: a worker that has been silent for longer is gone.
        patience_s: for how long to wait for the first worker; 0 for ever.
    """

    job: Annotated[str, msgspec.Meta(max_length=256)]
    bind: str = "127.0.0.1"
    port: int = 0
    coordinator: str = ""
    token: str = ""
    certificate: str = ""
    key: str = ""
    authority: str = ""
    timeout_s: float = 5.0
    patience_s: float = 120.0

    def credentials(self) -> Credentials | None:
        """What both sides have to prove.

        Raises:
            NetworkError: if they cannot be used.
        """
        from offbeat.wire.credentials import Certificates, Token

        token = Token(self.token.encode()) if self.token else None
        files = (self.certificate, self.key, self.authority)
        if not any(files):
            return token
        if not all(files):
            raise NetworkError("Cannot use TLS with a part of its files: name certificate, key and authority.")
        return Certificates(Path(self.certificate), Path(self.key), Path(self.authority), token)


def from_environment(job: str, timeout: timedelta) -> Settings:
    """What a worker, or a shard started by hand, finds in the environment about how to connect."""
    name = os.environ.get
    return Settings(
        job=name("OFFBEAT_JOB", job),
        token=name("OFFBEAT_TOKEN", ""),
        certificate=name("OFFBEAT_CERTIFICATE", ""),
        key=name("OFFBEAT_KEY", ""),
        authority=name("OFFBEAT_AUTHORITY", ""),
        timeout_s=timeout.total_seconds(),
    )


def start_shard(
    settings: Settings,
    *,
    wrap: Callable[[list[str]], list[str]] = lambda command: command,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a shard on this machine; the process, and "host:port".

    Args:
        wrap: makes of the command one that runs it elsewhere, such as in a network namespace.
        environment: variables; ours if None.
        output: where its output goes; to ours if None.

    Raises:
        NetworkError: if it cannot be started.
    """
    mine, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            wrap([sys.executable, "-P", "-m", "offbeat.serve", str(theirs)]),
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            stdout=output,
            stderr=output,
            env={**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"},
        )
    finally:
        os.close(theirs)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
    with open(mine, "rb") as pipe:
        said = _read_line(pipe.fileno())
    if said.startswith("!") or not said:
        process.kill()
        process.wait()
        raise NetworkError(f"Cannot start a parameter server: {said[1:].strip() or 'it ended at once.'}")
    return process, said


async def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve one job: until its last worker has gone, or SIGTERM or SIGINT comes.

    Args:
        say: called with "host:port" when workers may come.

    Raises:
        NetworkError: if the address or the credentials cannot be used, or the coordinator cannot be reached.
    """
    from offbeat.fabric.server import Shard
    from offbeat.plan import Plan
    from offbeat.wire.session import Limits
    from offbeat.wire.tcp import connect, listen

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    shard = Shard(None if settings.coordinator else lambda plan: Plan.from_toml(plan).sync, ended.set)
    limits = Limits(timeout=timedelta(seconds=settings.timeout_s))
    credentials = settings.credentials()
    if settings.coordinator:
        await connect(
            settings.coordinator,
            accept=shard.follow,
            job=settings.job,
            rank=_SHARD_RANK,
            credentials=credentials,
            limits=limits,
        )
    listener = await listen(
        settings.bind, settings.port, accept=shard.accept, job=settings.job, credentials=credentials, limits=limits
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if settings.patience_s:
        loop.call_later(settings.patience_s, lambda: None if shard.was_visited else ended.set())
    say(listener.address)
    await ended.wait()
    listener.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GOOD_BYE_S):
            await asyncio.gather(*(link.close() for link in listener.links))


def prepare_process() -> None:
    """What a process needs before it serves."""
    import torch

    torch.set_num_threads(1)
    # The first optimizer of a process makes torch import for seconds, in which no worker would get an answer.
    torch.optim.SGD([torch.zeros(1)], lr=0.0).step()


def main() -> None:
    """Take the settings from standard input, and serve."""
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    fd = int(sys.argv[1])
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    prepare_process()

    def say(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, f"{text}\n".encode())
        os.close(fd)

    try:
        asyncio.run(serve(settings, say))
    except OffbeatError as error:
        say(f"! {error}")


def _read_line(fd: int) -> str:
    """What comes before a line's end, or before the other side or our patience ends."""
    data, deadline_s = b"", time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not data.endswith(b"\n") and time.monotonic() < deadline_s:
            if selector.select(0.5):
                more = os.read(fd, 4096)
                if not more:
                    break
                data += more
    return data.decode(errors="replace").strip()


if __name__ == "__main__":
    main()
