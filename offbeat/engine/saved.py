"""What a checkpoint holds, read with care: a file may be damaged, or another program's, or another job's.

What is no number of the kind that was written is refused by name before anything is counted, skipped or divided by it;
a tensor is copied only over one of its own shape and type, never spread over a larger one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 1 << 61  # of what is counted, so that it can be told of
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
            f"Cannot load this state: its {what} is {_shown(value)}, no whole number from {least} to {most}. {_WAY_OUT}"
        )
    return value


def number(value: Any, what: str, *, least: float = 0.0) -> float:
    """`value`, which measures something.

    Raises:
        ModelError: if it is no number, not finite, or below `least`.
    """
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= MOST:
        raise ModelError(
            f"Cannot load this state: its {what} is {_shown(value)}, no number from {least:g} to {MOST}. {_WAY_OUT}"
        )
    return float(value)


def counts(values: Any, what: str, number_of: int) -> list[int]:
    """So many whole numbers.

    Raises:
        ModelError: if there are others, or more, or fewer.
    """
    if not isinstance(values, (list, tuple)) or len(values) != number_of:
        raise ModelError(
            f"Cannot load this state: its {what} are {_shown(values)}, not {number_of} numbers. {_WAY_OUT}"
        )
    return [whole(value, what) for value in values]


def texts(values: Any, what: str) -> list[str]:
    """Any number of texts.

    Raises:
        ModelError: if it is no list, or something else is in it.
    """
    if not isinstance(values, (list, tuple)) or not all(type(value) is str for value in values):
        raise ModelError(f"Cannot load this state: its {what} is {_shown(values)}, not a list of texts. {_WAY_OUT}")
    return list(values)


def copy_(tensor: torch.Tensor, saved: Mapping[str, Any], name: str, key: str) -> None:
    """Give `tensor` the values of `saved[key]`, which belongs to parameter `name`.

    Raises:
        KeyError: if there is none.
        ModelError: if it is no tensor of this shape and type.
    """
    value = saved[key]
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        there = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else _shown(value)
        raise ModelError(
            f"Cannot load this state: its {key} of {name} is {there}, here it is {list(tensor.shape)} {tensor.dtype}. "
            "Resume with the model that it was written with."
        )
    tensor.copy_(value)


def damaged(error: Exception) -> ModelError:
    """What to raise where a state is built otherwise than `run.state_dict()` builds it, as `error` says."""
    return ModelError(f"Cannot load this state: {type(error).__name__}: {error}. {_WAY_OUT}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
