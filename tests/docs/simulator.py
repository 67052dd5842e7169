"""Writes into docs/simulator.md what its command prints today: `python -m tests.docs.simulator`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.commands import offbeat

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "simulator.md"
_SHOWN = re.compile(r"^    \$ offbeat (.*)\n((?:    .*\n|\n)+)", re.MULTILINE)


def page(text: str) -> str:
    """The page with what its command prints now, unless only the time that this took is another."""
    (shown,) = _SHOWN.finditer(text)
    code, output = offbeat(*shown[1].split(), folder=ROOT, variables={"COLUMNS": "80"})
    assert code == 0, output
    lines = [f"    {line.rstrip()}".rstrip() for line in output.rstrip().splitlines()]
    block = f"    $ offbeat {shown[1]}\n" + "\n".join(lines) + "\n\n"
    return text if timeless(block) == timeless(shown[0]) else text.replace(shown[0], block)


def timeless(block: str) -> str:
    """It without the time that the command took on this machine."""
    return re.sub(r" in \d+\.\d\d s$", "", block, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
