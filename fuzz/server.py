"""Fuzzes a parameter server: `python fuzz/server.py -runs=20000` (pip install 'offbeat[fuzz]').

An input whose first byte is even is what one worker says to a shard, from its first word to its last, while two others
train (see `tests.server.garbage_peer`); else it is one message, for each of the decoders. Nothing but a `PeerError`
comes of it, and the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["offbeat.server", "offbeat.sync"]):
    from offbeat.errors import PeerError
    from offbeat.protocol import messages
    from tests.server.garbage_peer import torment

DECODERS = (
    messages.from_peer,
    messages.details_of,
    messages.from_coordinator,
    messages.to_worker,
    messages.statuses_of,
)


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    if data and data[0] % 2:
        for decode in DECODERS:
            with contextlib.suppress(PeerError):
                decode(data[1:])
    else:
        torment(data[1:])


if __name__ == "__main__":
    logging.disable()  # each refusal is logged
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
