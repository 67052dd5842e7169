"""Read TOML that somebody else wrote: a file that was named, a message, a part of a checkpoint.

Whatever it holds, reading it takes bounded time and memory, and ends in a table or in one sentence of bounded length.
The parser of the standard library is recursive, takes time in the square of the parts of a dotted key, and makes whole
numbers of thousands of digits; so size and dotted keys are looked at before, and depth, keys and values behind it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.errors import brief
from offbeat.safe_read import open_file

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.errors import OffbeatError

MOST_BYTES = 256 * 1024  # what is written by people has a hundredth of it
_DEEPEST, _LONGEST_KEY, _LONGEST_TEXT, _LONGEST_PATH = 32, 64, 2000, 200
_LARGEST = (1 << 63) - 1
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_DEEPEST},}}")


def read_text(path: Path, what: str, way_out: str, error: type[OffbeatError]) -> str:
    """The text of a file that should hold TOML.

    Args:
        what: it should be, such as "plan".
        way_out: what to do if it is none, as a sentence.
        error: raised as `read_bytes` does, or if it is not UTF-8.
    """
    found = read_bytes(path, what, way_out, error)
    try:
        return found.decode()
    except UnicodeDecodeError as reason:
        why = f"it is not UTF-8 (byte {reason.start} is {found[reason.start]:#04x})"
    raise error(f"Cannot read the {what} {_end_of(path)}: {why}. {way_out}")


def read_bytes(path: Path, what: str, way_out: str, error: type[OffbeatError], most: int = MOST_BYTES) -> bytes:
    """Read a file that a user named.

    Args:
        what: it should be, such as "result".
        way_out: what to do if it is none, as a sentence.
        error: raised if it cannot be read, is a folder, a pipe or a device, or larger than `most`.
    """
    try:
        with open_file(path) as file:
            found = file.read(most + 1)
        if len(found) <= most:
            return found
        why = f"it has more than {most // 1024:,} KiB, which is the most"
    except OSError as reason:
        why = str(reason.strerror or reason)
    except ValueError as reason:  # a NUL within its name
        why = str(reason)
    raise error(f"Cannot read the {what} {_end_of(path)}: {why}. {way_out}")


def _hint(text: str, why: str) -> str:
    """The way out where a word stands without quotes, which is the usual mistake; else ""."""
    at = re.search(r"Invalid value \(at line (\d+)", why)
    line = text.split("\n")[int(at[1]) - 1] if at is not None else ""
    found = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*=\s*([A-Za-z][A-Za-z0-9_.-]*)\s*(?:#.*)?", line)
    if found is None or max(map(len, found.groups())) > _LONGEST_KEY:
        return ""
    key, word = found.groups()
    if word.lower() in ("true", "false", "inf", "nan"):
        return f" Write {key} = {word.lower()}, in lower case."
    return f' A word stands in quotes: {key} = "{word}".'


def decode(text: str, what: str, error: type[OffbeatError]) -> dict[str, Any]:
    """The table that a text describes.

    Args:
        what: the text should be, such as "plan".
        error: raised if it is not TOML, is longer than `MOST_BYTES`, nested more than 32 deep, or holds a key, a text
            or a number that can only be a mistake.

    >>> from offbeat.errors import PlanError
    >>> decode("a = {b = 1}", "plan", PlanError)
    {'a': {'b': 1}}
    >>> decode("a = " + "9" * 30, "plan", PlanError)
    Traceback (most recent call last):
    offbeat.errors.PlanError: Cannot read the plan: a number has about 30 digits; the largest is 2^63 - 1 - at `plan.a`.
    """
    if len(text) > MOST_BYTES:
        raise error(f"Cannot read the {what}: it has {len(text):,} characters, and {MOST_BYTES:,} are the most.")
    if _LONG_KEY.search(text):
        raise error(f"Cannot read the {what}: a key has more than {_DEEPEST} parts. Write it flatter.")
    try:
        table = msgspec.toml.decode(text)
    except RecursionError:
        raise error(f"Cannot read the {what}: it is nested more than {_DEEPEST} deep. Write it flatter.") from None
    except msgspec.DecodeError as reason:
        why = brief(str(reason), 200)
        raise error(f"Cannot read the {what}: it is not valid TOML ({why}).{_hint(text, why)}") from None
    except ValueError:  # Python's own; it says how many digits it reads, and not where
        raise error(f"Cannot read the {what}: a number has thousands of digits; the largest is 2^63 - 1.") from None
    assert isinstance(table, dict)
    check_values(table, what, what, error)
    return table


def check_values(value: Any, what: str, path: str, error: type[OffbeatError]) -> None:
    """Refuse keys, texts, numbers and depths that can only be mistakes, before anybody is told of them in full.

    Args:
        value: tables, lists and plain values, as `decode` has them.
        path: of `value`, for the error.
    """
    todo: list[tuple[Any, str, int]] = [(value, path, 0)]
    while todo:
        one, at, depth = todo.pop()
        why = ""
        if depth > _DEEPEST:
            why = f"it is nested more than {_DEEPEST} deep"
        elif isinstance(one, dict):
            if (longest := max(map(len, one), default=0)) > _LONGEST_KEY:
                why = f"a key has {longest:,} characters, and {_LONGEST_KEY} are the most"
            todo += [(item, f"{at}.{key}", depth + 1) for key, item in one.items()]
        elif isinstance(one, (list, tuple)):
            todo += [(item, f"{at}[{index}]", depth + 1) for index, item in enumerate(one)]
        elif isinstance(one, str) and len(one) > _LONGEST_TEXT:
            why = f"a text has {len(one):,} characters, and {_LONGEST_TEXT:,} are the most"
        elif isinstance(one, int) and abs(one) > _LARGEST:
            why = f"a number has about {one.bit_length() * math.log10(2):,.0f} digits; the largest is 2^63 - 1"
        if why:
            raise error(f"Cannot read the {what}: {why} - at `{brief(at)}`.")


def _end_of(path: Path) -> str:
    text = str(path)
    return text if len(text) <= _LONGEST_PATH else f"...{text[-_LONGEST_PATH:]}"
