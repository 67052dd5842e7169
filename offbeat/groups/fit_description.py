"""The description of a fit, as lines of text: by it fits are compared, also those of other processes."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

if TYPE_CHECKING:
    from offbeat.groups.group_job import GroupJob

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def description_of(job: GroupJob) -> str:
    """Return what is fitted to which columns, and how: a line for each point, with its name before a colon."""
    classes = [] if job.classes is None else job.classes.to_pylist()
    lines = {
        "model": _text(job.model),
        "columns": ", ".join(f"{field.name} {field.type}" for field in job.schema),
        "target": f"{job.target} {classes}",
        "features": ", ".join(job.features),
        "validation": repr(job.validation),
        "small groups": repr(job.small),
        "search": repr(job.search),
        "overrides": repr(job.overrides),
    }
    return "\n".join(f"{name}: {' '.join(value.split())}" for name, value in lines.items())


def difference(one: str, other: str) -> str:
    """Return the names of the lines in which two descriptions differ.

    >>> difference("model: Linear\\nfeatures: a", "model: Linear\\nfeatures: b")
    'features'
    """
    pairs = zip(one.splitlines(), other.splitlines(), strict=False)
    return ", ".join(mine.partition(":")[0] for mine, its in pairs if mine != its)


def _text(value: Any) -> str:
    """The text of a spec, the same in each process: of a function its name and what it does."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_text(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if (code := getattr(value, "__code__", None)) is not None:
        constants = [one for one in code.co_consts if isinstance(one, int | float | str)]
        said = xxh3_128(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()
        return f"{value.__module__}.{value.__qualname__} {said}"
    return _ADDRESS.sub("", repr(value))
