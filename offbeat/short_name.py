"""The short name of a part of a plan, for logs: what was chosen, without what has its default."""

from __future__ import annotations

import dataclasses


def short_name(part: object) -> str:
    """Return the code that makes a part of a plan, its defaults left out.

    >>> from offbeat import RoundRobin, Hybrid, BSP
    >>> short_name(RoundRobin()), short_name(RoundRobin(lead=4))
    ('RoundRobin()', 'RoundRobin(lead=4)')
    >>> short_name(Hybrid(BSP(), RoundRobin(), groups=2))
    'Hybrid(inner=BSP(), outer=RoundRobin(), groups=2)'
    """
    if isinstance(part, tuple):
        return f"({', '.join(map(short_name, part))}{',' if len(part) == 1 else ''})"
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return repr(part)
    chosen = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.repr and field.init and (default is dataclasses.MISSING or value != default):
            chosen.append(f"{field.name}={short_name(value)}")
    return f"{type(part).__name__}({', '.join(chosen)})"
