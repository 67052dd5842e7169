"""A link that can be made bad at any time: starts `emulator.py` for it, and tells it what to do."""

from __future__ import annotations

import ctypes
import fcntl
import json
import socket
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError
from offbeat.lab import command_lines
from offbeat.lab.emulator import Counts, Law

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.scenario import Impair

_PROGRAM = str(Path(__file__).resolve().with_name("emulator.py"))
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO


class EmulatedLink:
    """One link.

    Args:
        namespace: of the switch.
        port: the switch's end of the cable.
        tap: what is to be plugged into the switch instead; it is there when this returns.
        environment: of the program.

    Raises:
        NetworkError: if it cannot be started.
    """

    def __init__(self, namespace: str, port: str, tap: str, *, environment: Mapping[str, str]) -> None:
        self._number = 0
        self._process = subprocess.Popen(
            command_lines.entered(namespace, [sys.executable, "-S", "-I", _PROGRAM, port, tap]),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._hear() != "ready":
            self.close()
            raise NetworkError(
                f"Cannot make the link of {port} bad: its emulator did not start. It needs /dev/net/tun; load the "
                "kernel's module tun."
            )

    def change(self, *, up: Law | None, down: Law | None) -> tuple[Counts, Counts]:
        """Have another law hold from now on, where one is given; what became of the frames so far, up and down.

        Raises:
            NetworkError: if the program is gone.
        """
        self._number += 1
        laws = {name: asdict(law) for name, law in (("up", up), ("down", down)) if law is not None}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"number": self._number, **laws}) + "\n")
            self._process.stdin.flush()
            said = json.loads(self._hear())
        except (OSError, ValueError) as error:
            raise NetworkError("Cannot change a link of the lab: its emulator is gone. Build the lab again.") from error
        assert said["number"] == self._number
        return Counts(**said["up"]), Counts(**said["down"])

    def close(self) -> None:
        """End the program; nothing passes any more. Closing twice is allowed."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def law_of(impair: Impair) -> Law:
    """Make the law for each direction of a link from a scenario."""
    return Law(
        delay_s=impair.delay_ms / 1e3,
        jitter_s=impair.jitter_ms / 1e3,
        loss=impair.loss,
        corrupt=impair.corrupt,
        reorder=impair.reorder,
    )


def whole_frames(interface: str) -> None:
    """Have an interface of this namespace send frames as they are on a cable: of its size, with their checksums.

    Else they are put right at the receiver's or never, which a program between cannot forward.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for command in _OFFLOADS:
            off = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(handle, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), ctypes.addressof(off)))
