"""`--help` is as wide as the terminal, and its text is no ribbon beside the options."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from offbeat.cli.app import app
from tests.cli.commands import COMMAND, clean_environment, offbeat
from tests.warm import ColdPopen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pages() -> Iterator[str]:
    """The help of every command and of every group."""
    waiting: list[tuple[Any, Any]] = [(typer.main.get_command(app), None)]
    for command, parent in waiting:
        context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
        waiting.extend((one, context) for one in getattr(command, "commands", {}).values())
        yield command.get_help(context)


@pytest.mark.parametrize("columns", [46, 60, 80, 200])
def test_no_line_is_longer_than_the_terminal_and_no_text_a_ribbon(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    helped = list(pages())
    assert len(helped) > 25
    for page in helped:
        for line in page.splitlines():
            assert len(line) <= columns, line
        for line in page.partition("\n\n")[2].splitlines():  # what follows the usage
            assert len(line) - len(line.lstrip()) <= 0.45 * columns, line


def test_a_wide_terminal_is_used_as_far_as_lines_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    longest = max(len(line) for page in pages() for line in page.splitlines())
    assert 100 < longest <= 120


def test_a_command_is_listed_with_its_whole_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for page in pages():
        assert not any(line.endswith("...") for line in page.partition("\nCommands:\n")[2].splitlines())


def test_piped_it_has_80_columns(tmp_path: Path) -> None:
    code, output = offbeat("run", "--help", folder=tmp_path, variables={"COLUMNS": ""})
    assert code == 0
    lines = output.splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert len(lines) < 110, "four columns took 159 lines"


def test_a_terminal_says_how_wide_it_is() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    environment = clean_environment()
    del environment["COLUMNS"]
    with ColdPopen([*COMMAND, "plan", "--help"], stdout=theirs, stderr=theirs, env=environment) as one:
        os.close(theirs)
        said = b""
        while b"--help" not in said or one.poll() is None:
            try:
                said += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    lines = said.decode().splitlines()
    assert one.returncode == 0, said
    assert "Commands:" in lines
    assert 40 < max(map(len, lines)) <= 50
