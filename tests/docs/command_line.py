"""Writes docs/command-line.md from the commands themselves: `python -m tests.docs.command_line`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer.main

from offbeat.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"
_HEAD = """# The command line

Written by `make docs` from the commands' own help. `offbeat COMMAND --help` shows the same.

Exit codes: 0 all is well; 2 offbeat refused something, or the workers disagreed, with one sentence that says why and
the way out; 76 a worker left while the others still needed it; 78 several workers trained to the end, and no model was
prepared; else that of the worker that was lost first (128 plus the signal's number if one killed it). With
`offbeat --debug COMMAND` refusals show their traceback; `offbeat --version` prints the version.

What is marked **required** has no default, and the command refuses to begin without it.
"""


def commands() -> dict[str, Any]:
    """Every command by its full name, such as "lab run"."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child, one in children.items():
        yield from _walk(one, f"{name} {child}".strip())


def options(command: Any) -> list[str]:
    """Its options' long names, and its arguments in capitals."""
    names = []
    for parameter in command.params:
        longest = max(parameter.opts, key=len)
        names.append(longest if longest.startswith("-") else longest.upper())
    return names


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for name, command in commands().items():
        parts.append(f"\n## offbeat {name}\n\n{command.help.strip()}\n")
        rows = [_row(parameter) for parameter in command.params]
        if rows:
            parts.append("\n| | |\n| --- | --- |\n" + "".join(rows))
    return "".join(parts)


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name if name.startswith('-') else name.upper()}`" for name in parameter.opts)
    default = parameter.default
    shown = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
    note = f" Default: {default}." if shown else ""
    required = " **Required.**" if parameter.required else ""
    return f"| {names} | {(parameter.help or '').strip()}{note}{required} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
