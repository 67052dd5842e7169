"""Clean up after a lab that was killed: `python -m offbeat.lab.reaper RECORD`, with a pipe from the lab as input.

The pipe ends when the lab ends, whatever ended it. A lab that closed properly has deleted its record by then, and there
is nothing to do. The reaper leads a session of its own, so a Ctrl-C meant for the lab does not end it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offbeat.lab import lab_registry


def main(record: Path) -> None:
    """Wait for the end of the input, then remove what the record still claims."""
    while sys.stdin.buffer.read(4096):
        pass
    claim = lab_registry.read(record)
    if claim is not None:
        lab_registry.remove(claim, record.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
