"""Fuzzes what readers of versions decode: `python fuzz/objects.py -runs=200000` (pip install 'offbeat[fuzz]').

The first byte of an input says what the rest is put into: nothing, several tensors, a delta, a description. Whatever it
is, it is read and lies within its object and its tensors, or an `ObjectError` comes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["offbeat.objects", "offbeat.protocol"]):
    from tests.objects.test_delta import GOOD, try_anything

_GOOD = [b"", *GOOD]


def test_one_input(data: bytes) -> None:
    """Try one input of the fuzzer."""
    if len(data) < 3:
        return
    whole, at, rest = _GOOD[data[0] % len(_GOOD)], int.from_bytes(data[1:3], "little"), data[3:]
    at %= len(whole) + 1
    try_anything(whole[:at] + rest + whole[at + len(rest) :])


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
