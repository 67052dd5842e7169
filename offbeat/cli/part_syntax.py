"""Parts of a plan as they are written on the command line: as Python, as they print themselves, but never evaluated.

>>> read_part("sync", "SSP(4)")
SSP(bound=4)
>>> read_part("sync", "LocalSGD(8, outer=OuterSGD(lr=0.7))")
LocalSGD(every=8, after=0, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True), delay=0, fragments=1, policy=None)
"""

from __future__ import annotations

import ast
import re
from typing import Any

from offbeat.errors import PlanError, brief
from offbeat.plan import names_of_fields, part_of


def read_part(room: str, text: str) -> Any:
    """The part that `text` describes.

    Args:
        room: a field of the plan that holds a part, such as "sync", or "collective".
        text: such as "SSP(4)", or just "ASP".

    Raises:
        PlanError: if it is no such expression, or names or holds what there is not; the nearest name is shown.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return part_of(room, _part(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"Cannot read {brief(repr(text))}: it is no part of a plan written as Python, such as {_EXAMPLES[room]}. "
            f"{_way_out(text)}"
        ) from error


def _way_out(text: str) -> str:
    """The advice to quote text, with what was given quoted right if all that is wrong with it are missing quotes."""
    quoted = _BARE.sub(lambda bare: f'{bare[1]}"{bare[2]}"', text.strip())
    try:
        if quoted != text.strip() and "'" not in quoted and len(quoted) <= _MOST_SHOWN:
            _part(ast.parse(quoted, mode="eval").body)
            return f"Put text in quotes: '{quoted}'."
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return "Put text in quotes, and the whole in others for the shell."


# A value, behind a bracket, a comma or "=", that holds what only text does: the "." or ":" of an address, "/" or "-".
_BARE = re.compile(r"([(\[,=]\s*)((?![\d.]+\s*[,)\]])[\w.][\w.-]*[.:/-][\w.:/-]*)(?=\s*[,)\]])")
_MOST_SHOWN = 200  # characters
_EXAMPLES = {
    "sync": "'SSP(4)'",
    "codec": "'Cast(\"bf16\")'",
    "collective": "'MultiTree(split=4)'",
    "fabric": "'ParameterServer()'",
    "controller": "'WaitThreshold(above=0.4)'",
    "scheduling": "'Prophet()'",
    "privacy": "'GaussianMechanism(noise=1.0)'",
    "rule": "'TrimmedMean(2)'",
    "tuning": "'BatchTuning()'",
    "validator": "'ZenoPS()'",
}


def _part(node: ast.expr) -> dict[str, Any]:
    """Convert a part to a table as TOML would have it.

    Raises:
        ValueError: if it is no call of a name with plain values.
    """
    if isinstance(node, ast.Name):
        return {"kind": node.id}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("no call")
    kind = node.func.id
    names = names_of_fields(kind)
    if names is None:  # of what there is not, and of what is only in another part, values have to be named
        names = ("a value without a name",) * len(node.args)
    if len(node.args) > len(names):
        raise PlanError(f"Cannot make {kind} of {len(node.args)} values: it takes {', '.join(names) or 'none'}.")
    table: dict[str, Any] = {"kind": kind, **dict(zip(names, map(_value, node.args), strict=False))}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in table:
            raise ValueError("no name, or one twice")
        table[keyword.arg] = _value(keyword.value)
    return {key: value for key, value in table.items() if value is not None}


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Tuple, ast.List)):
        return [_value(one) for one in node.elts]
    return _part(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
