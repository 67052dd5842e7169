"""Loss of datagrams at a host's interface, both ways, at random: by a program at its tc hooks.

It is where links are, and not in the worker or the switch: both see it as they would see a bad network, whatever the
switch is. TCP, by which control is reached, loses nothing. The kernel draws by a generator of its own, without a seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from offbeat.lab.namespace import inside
from offbeat.switch.kernel.compiler import compile_program
from offbeat.switch.kernel.libbpf import KernelObject

_SOURCE = Path(__file__).with_name("packet_loss.bpf.c")
_ALL = 1 << 32


class LossCounts(NamedTuple):
    """Datagrams that a host has sent and was sent, and of these the ones that were dropped."""

    out: int
    lost_out: int
    come_in: int
    lost_in: int


class PacketLoss:
    """The loss at one host, until `close`.

    Args:
        namespace: of the host.
        interface: at which it is.
        rate: the part of the datagrams that is lost in each direction.

    Raises:
        NetworkError: if this machine cannot compile, load or attach the program.
    """

    def __init__(self, namespace: str, interface: str, rate: float) -> None:
        assert 0 <= rate < 1, rate
        self._namespace = namespace
        self._program = KernelObject(compile_program({}, source=_SOURCE))
        self._program.map("chance", np.dtype("<u4"))[0] = np.array(int(rate * _ALL), np.uint32)
        try:
            inside(namespace, lambda: self._attach(interface))
        except BaseException:
            self.close()
            raise

    def _attach(self, interface: str) -> None:
        self._program.attach("drop_in", [interface])
        self._program.attach("drop_out", [interface], is_egress=True)

    @property
    def counts(self) -> LossCounts:
        """The datagrams that have come by so far, and those of them that were dropped."""
        return LossCounts(*self._program.counts("counters", len(LossCounts._fields)))

    def close(self) -> None:
        """End the loss; again does nothing."""
        inside(self._namespace, self._program.close)
