"""A wish that somebody leaves in a job's folder, and the answer to it; for jobs without a server to be dialled.

    wish.json      written by who wishes: another part of the plan, and a number
    answer.json    written by the job, with that number

Whoever may write to the folder may wish: it is the job's own. Both are put in place whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from offbeat.errors import NetworkError, PeerError

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


def leave(folder: Path, part: str) -> SwapRequest:
    """Leave a wish.

    Raises:
        NetworkError: if that cannot be written, or another one waits for its answer.
    """
    wish = SwapRequest(secrets.randbits(61), part)
    new = folder / f"wish.{wish.number}.new"
    try:
        new.write_bytes(msgspec.json.encode(wish))
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
    return wish


def is_left(folder: Path, wish: SwapRequest) -> bool:
    """Whether the job has not taken it up."""
    return _read(folder / "wish.json", SwapRequest) == wish


def take_back(folder: Path, wish: SwapRequest) -> None:
    """Wish it no more; what somebody else wishes stays."""
    if is_left(folder, wish):
        (folder / "wish.json").unlink(missing_ok=True)


def answered(folder: Path, wish: SwapRequest) -> SwapReply | None:
    """The reply to a request; None if there is none yet."""
    granted = _read(folder / "answer.json", SwapReply)
    return granted if granted is not None and granted.number == wish.number else None


def take(folder: Path) -> SwapRequest | None:
    """The wish that was left, which is gone then; None if there is none.

    Raises:
        PeerError: if it cannot be understood; it is gone, too.
    """
    path = folder / "wish.json"
    if not path.exists():
        return None
    try:
        wish = _read(path, SwapRequest)
    finally:
        path.unlink(missing_ok=True)
    if wish is None:
        raise PeerError(f"Cannot understand the request in {path}: make requests with `offbeat swap`.")
    return wish


def answer(folder: Path, granted: SwapReply) -> None:
    """Say what became of a wish; nothing if that cannot be written: the job goes on."""
    with contextlib.suppress(OSError):
        _put(folder / "answer.json", granted)


def _put(path: Path, what: SwapRequest | SwapReply) -> None:
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_bytes(msgspec.json.encode(what))
    new.replace(path)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
