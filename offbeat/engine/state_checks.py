"""Checks of what a checkpoint holds: a file may be damaged, or another program's, or another job's.

What is no number of the kind that was written is refused by name before anything is counted, skipped or divided by it;
a tensor is copied only over one of its own shape and type, never spread over a larger one.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 1 << 61  # of what is counted, so that it can be told of
_MOST_DEPTH = 100  # of lists in lists
_MOST_BITS = 1024  # of an integer
_MOST_TIMES = 64  # that what is in there comes again, on average
_MOST_TEXT = 80  # characters of a value that is told of
_WAY_OUT = "It is damaged, or no run.state_dict(): use another checkpoint."


def whole(value: Any, what: str, *, least: int = 0, most: int = MOST) -> int:
    """`value`, which counts something.

    Args:
        what: it is, for people.

    Raises:
        ModelError: if it is no whole number, or not from `least` to `most`.
    """
    if type(value) is not int or not least <= value <= most:
        raise ModelError(
            f"Cannot load this state: its {what} is {shown(value)}, no whole number from {least} to {most}. {_WAY_OUT}"
        )
    return value


def number(value: Any, what: str, *, least: float = 0.0) -> float:
    """`value`, which measures something.

    Raises:
        ModelError: if it is no number, not finite, or below `least`.
    """
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= MOST:
        raise ModelError(
            f"Cannot load this state: its {what} is {shown(value)}, no number from {least:g} to {MOST}. {_WAY_OUT}"
        )
    return float(value)


def counts(values: Any, what: str, number_of: int) -> list[int]:
    """Check and return so many whole numbers.

    Raises:
        ModelError: if there are others, or more, or fewer.
    """
    if not isinstance(values, (list, tuple)) or len(values) != number_of:
        raise ModelError(f"Cannot load this state: its {what} are {shown(values)}, not {number_of} numbers. {_WAY_OUT}")
    return [whole(value, what) for value in values]


def texts(values: Any, what: str) -> list[str]:
    """Any number of texts.

    Raises:
        ModelError: if it is no list, or something else is in it.
    """
    if not isinstance(values, (list, tuple)) or not all(type(value) is str for value in values):
        raise ModelError(f"Cannot load this state: its {what} is {shown(values)}, not a list of texts. {_WAY_OUT}")
    return list(values)


def copy_(tensor: torch.Tensor, saved: Mapping[str, Any], name: str, key: str) -> None:
    """Give `tensor` the values of `saved[key]`, which belongs to parameter `name`.

    Raises:
        KeyError: if there is none.
        ModelError: if it is no tensor of this shape and type.
    """
    value = saved[key]
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        there = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else shown(value)
        raise ModelError(
            f"Cannot load this state: its {key} of {name} is {there}, here it is {list(tensor.shape)} {tensor.dtype}. "
            "Resume with the model that it was written with."
        )
    tensor.copy_(value)


def damaged(error: Exception) -> ModelError:
    """Make the error for a state that is built otherwise than `run.state_dict()` builds it, as `error` says."""
    return ModelError(f"Cannot load this state: {type(error).__name__}: {str(error)[:200]}. {_WAY_OUT}")


def shown(value: Any) -> str:
    """A value of a checkpoint in a few words; it may be too large, or too deeply nested, to be printed."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[: _MOST_TEXT + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def why_not(state: Any) -> str:
    """Say why this state cannot be loaded, whatever is in it: it is nested without end, or too large; else "".

    What passes can be walked through, compared and told of in a time that its size bounds.
    """
    known: dict[int, tuple[int, int] | None] = {}  # by container: how deep it is, and what is in it; None within it
    once = _MOST_TIMES  # values, each counted once

    def measure(value: Any, depth: int) -> tuple[int, int]:
        nonlocal once
        measured = known.get(id(value), ())
        if measured is None:
            raise ValueError("something in it holds itself")
        if not measured:
            if depth == _MOST_DEPTH:
                raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
            known[id(value)], once = None, once + len(value)
            height, count = 0, 1 + len(value)
            for part in chain(value, value.values()) if isinstance(value, dict) else value:
                if isinstance(part, (dict, list, tuple, set, frozenset)):
                    inner = measure(part, depth + 1)
                    height, count = max(height, inner[0] + 1), count + inner[1]
                elif isinstance(part, int) and part.bit_length() > _MOST_BITS:
                    raise ValueError(f"it holds {shown(part)}, and {_MOST_BITS} is the most")
            known[id(value)] = measured = height, count
        if depth + measured[0] > _MOST_DEPTH:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
        return measured

    try:
        _, count = measure([state], 0)
    except ValueError as error:
        return str(error)
    return "what is in it comes in it again and again" if count > _MOST_TIMES * once else ""
