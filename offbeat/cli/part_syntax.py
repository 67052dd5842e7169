"""Parts of a plan as they are written on the command line: as Python, as they print themselves, but never evaluated.

>>> read_part("sync", "SSP(4)")
SSP(bound=4)
>>> read_part("sync", "LocalSGD(8, outer=OuterSGD(lr=0.7))")
LocalSGD(every=8, after=0, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))
"""

from __future__ import annotations

import ast
from typing import Any

from offbeat.errors import PlanError, brief
from offbeat.plan import names_of_fields, part_of


def read_part(room: str, text: str) -> Any:
    """The part that `text` describes.

    Args:
        room: "sync", "codec", "fabric" or "controller".
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
            f"Cannot read {brief(repr(text))}: it is no part of a plan written as Python, such as {_EXAMPLES[room]}."
        ) from error


_EXAMPLES = {
    "sync": "'SSP(4)'",
    "codec": "'Cast(\"bf16\")'",
    "fabric": "'ParameterServer()'",
    "controller": "'WaitThreshold(above=0.4)'",
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
