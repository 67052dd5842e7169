"""The help of every command: as wide as the terminal, in one column for options and one for what they do.

typer's own pages have four columns, which leaves 24 characters for the text on a terminal of 80.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST, _MOST = 40, 120  # columns of a page
_NARROW = 72  # up to here an option's text stands below it
_MARGIN = 2
_Formatter: Any = typer.Context.formatter_class
_Context: Any = TyperGroup.context_class


class _HelpFormatter(_Formatter):  # type: ignore[misc]
    """Writes a page; `write_dl` writes its lists of options and of commands."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = min(max(shutil.get_terminal_size().columns, _LEAST), max_width or _MOST)
        super().__init__(indent_increment, width or columns - _MARGIN, max_width)

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width > _NARROW else 2, col_spacing)


class _HelpContext(_Context):  # type: ignore[misc]
    formatter_class = _HelpFormatter


class HelpGroup(TyperGroup):
    """A group of commands, as the `cls` of a typer.Typer: its help and theirs have these pages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.context_class = _HelpContext
        for command in self.commands.values():
            command.context_class = _HelpContext

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands, each with the first paragraph of its help."""
        rows = [(name, " ".join((one.help or "").split("\n\n")[0].split())) for name, one in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
