"""Requests to swap the plan, in a job's folder, and the replies; for jobs without a server to be dialled.

    wish.json      written by `offbeat swap`: another part of the plan, and a number
    answer.json    written by the job, with that number

Whoever may write to the folder may do so: it is the job's own. Both are put in place whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from offbeat.errors import NetworkError, PeerError
from offbeat.safe_write import write_whole

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES = 1 << 20
T = TypeVar("T")
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class SwapRequest(msgspec.Struct, frozen=True):
    """A request to swap the plan.

    Args:
        number: by which the answer is told from others.
        part: of a plan, as TOML.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    part: _Text


class SwapReply(msgspec.Struct, frozen=True):
    """The result of a request: what has changed, or why nothing has."""

    number: int
    text: _Text = ""
    refusal: _Text = ""


def post(folder: Path, part: str) -> SwapRequest:
    """Post a request.

    Raises:
        NetworkError: if that cannot be written, or another one waits for its answer.
    """
    request = SwapRequest(secrets.randbits(61), part)
    new = folder / f"wish.{request.number}.new"
    try:
        new.write_bytes(msgspec.json.encode(request))
        os.link(new, folder / "wish.json")  # of two at once, one is told
    except FileExistsError as error:
        raise NetworkError(
            f"Cannot ask the job in {folder}: it has not answered the request before. Wait until it does; if it "
            f"has ended, remove {folder / 'wish.json'}."
        ) from error
    except OSError as error:
        raise NetworkError(f"Cannot ask the job in {folder}: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return request


def is_posted(folder: Path, request: SwapRequest) -> bool:
    """Whether the job has not taken it yet."""
    return _read(folder / "wish.json", SwapRequest) == request


def withdraw(folder: Path, request: SwapRequest) -> None:
    """Remove this request; another one stays."""
    if is_posted(folder, request):
        (folder / "wish.json").unlink(missing_ok=True)


def answered(folder: Path, request: SwapRequest) -> SwapReply | None:
    """The reply to a request; None if there is none yet."""
    reply = _read(folder / "answer.json", SwapReply)
    return reply if reply is not None and reply.number == request.number else None


def claim(folder: Path) -> SwapRequest | None:
    """Take the posted request; None if there is none.

    Raises:
        PeerError: if it cannot be understood; it is gone, too.
    """
    path = folder / "wish.json"
    if not path.exists():
        return None
    try:
        request = _read(path, SwapRequest)
    finally:
        path.unlink(missing_ok=True)
    if request is None:
        raise PeerError(f"Cannot understand the request in {path}: make requests with `offbeat swap`.")
    return request


def answer(folder: Path, reply: SwapReply) -> None:
    """Write the reply to a request; nothing if that cannot be written: the job continues."""
    with contextlib.suppress(OSError):
        write_whole(folder / "answer.json", msgspec.json.encode(reply))


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
