"""The measurements of `offbeat bench switch`: workers in network namespaces sum at a switch as fast as they can.

Each worker is a process in a host of its own; links are veth pairs to a bridge, not shaped, and the switch is a process
in the bridge's namespace, or a program at the bridge's ports. What is measured is how fast all of it is together, on
processors that workers and switch share. Targets take turns, repetition by repetition, so that all see the same
machine.

Results, clocks and packets are what `LEGEND` says of them. Every sum is checked, value by value (`offbeat.lab.
switch_load`).
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.lab.launch import SwitchProcess
from offbeat.lab.load_workers import LoadWorkers
from offbeat.lab.network import Network
from offbeat.switch.job_shape import JobShape
from offbeat.switch.sending_rate import sending_rate
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TARGETS = ("udp", "ebpf", "xdp")
SLACKS = (0, 8)
LEGEND = {
    "results": "chunks whose sums came, per second and worker; GB/s of gradient; loss at the hosts, each way",
    "clocks": "steps that are over, with nothing in them, per second and worker: what a barrier costs",
    "packets": "that one worker makes and sends by itself, to a socket that nobody reads; no switch is in it",
}
_MTU, _JUMBO_MTU = 1500, 9000
_MOST_VALUES = 352  # of a frame of 1,500 bytes
_ALONE_S = 0.5  # at most, for what needs no network


@dataclass(frozen=True)
class SwitchCell:
    """One row of the measurements.

    Args:
        what: "results", "clocks" or "packets"; see the module's text.
        target: of the switch; "" for none.
        values: int32 in a packet; 0 for clocks.
        slack: steps that a worker may be ahead, for clocks.
        loss_percent: datagrams that are lost in each direction.
    """

    what: str
    target: str
    workers: int
    values: int = 0
    slack: int = 0
    loss_percent: float = 0.0

    @property
    def words(self) -> str:
        """The cell in words."""
        what = f"results of {self.values} values" if self.values else f"clocks, {self.slack} steps ahead at most"
        return f"{what}, {self.workers} workers, by {self.target}, {self.loss_percent:g} % lost"

    @property
    def mtu(self) -> int:
        """Bytes that a frame has to carry."""
        return _MTU if self.values <= _MOST_VALUES else _JUMBO_MTU


@dataclass
class SwitchFigure:
    """The measurement of one cell.

    Args:
        per_second: per repetition, the mean of the workers.
        checked, wrong: sums that were compared, over all repetitions and workers, and those that were not right.
        sent, resent: packets of all workers, and those of them that were sent again.
        passed, lost: datagrams that came by where some are lost, and those that were.
        errors: what ended a repetition early; its rate is 0.
    """

    cell: SwitchCell
    per_second: list[float] = field(default_factory=list)
    checked: int = 0
    wrong: int = 0
    sent: int = 0
    resent: int = 0
    passed: int = 0
    lost: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.per_second)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most."""
        return min(self.per_second), max(self.per_second)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of gradient per second and worker, by the median."""
        return self.median * self.cell.values * 4 / 1e9


def cells_of(
    targets: Sequence[str], workers: Sequence[int], values: Sequence[int], loss_percents: Sequence[float]
) -> list[SwitchCell]:
    """List what is to be measured; packets that take jumbo frames are for the kernel's switch alone.

    Raises:
        PlanError: if a number is out of range.
    """
    if not (targets and workers and values and loss_percents):
        raise PlanError("Cannot measure nothing: name at least one target, number of workers, size and loss.")
    for count in workers:
        for size in values:
            JobShape(0, count, size)
    for loss in loss_percents:
        if not 0 <= loss <= 50:
            raise PlanError(f"Cannot lose {loss:g} % of the packets: choose from 0 to 50 - at `--loss`.")
    cells = [SwitchCell("packets", "", 1, size) for size in values]
    for target in targets:
        for count in workers:
            for loss in loss_percents:
                cells += [
                    SwitchCell("results", target, count, size, loss_percent=loss)
                    for size in values
                    if target != "udp" or size <= _MOST_VALUES
                ]
                cells += [SwitchCell("clocks", target, count, slack=slack, loss_percent=loss) for slack in SLACKS]
    return cells


def measure_switch(
    cells: Sequence[SwitchCell], *, seconds: float, repeats: int, tell: Callable[[str], None]
) -> list[SwitchFigure]:
    """Measure all cells, by turns.

    Args:
        seconds: how long each turn takes.
        tell: called with what is measured next.

    Raises:
        NetworkError: if this machine cannot build the network, or lose packets.
        WorkerLostError: if a process of it ends.
    """
    figures = {cell: SwitchFigure(cell) for cell in cells}
    names = [f"w{rank}" for rank in range(max(cell.workers for cell in cells))]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places: dict[int, tuple[Network, LoadWorkers, Path]] = {}
        for mtu in sorted({cell.mtu for cell in cells if cell.target}):
            own = folder / str(mtu)
            own.mkdir()
            network = stack.enter_context(Network(Topology.star(names), mtu=mtu))
            places[mtu] = network, stack.enter_context(LoadWorkers(network, own)), own
        groups = sorted({(cell.mtu, cell.target) for cell in cells if cell.target}, key=lambda one: (one[0], one[1]))
        for repeat in range(repeats):
            note = f"repetition {repeat + 1} of {repeats}: "
            # There and back, so that no target always comes after the other.
            for mtu, target in groups if repeat % 2 == 0 else groups[::-1]:
                here = [figures[cell] for cell in cells if (cell.mtu, cell.target) == (mtu, target)]
                _measure_target(*places[mtu], target, here, seconds, lambda what, note=note: tell(note + what))  # type: ignore[misc]
            # At the end, when all processes have started and wait.
            for cell in cells:
                if not cell.target:
                    tell(f"{note}a worker by itself, {cell.values} values")
                    rate = sending_rate(cell.values, seconds=min(_ALONE_S, seconds))
                    figures[cell].per_second.append(rate.per_second)
    return list(figures.values())


def _measure_target(
    network: Network,
    workers: LoadWorkers,
    folder: Path,
    target: str,
    figures: Sequence[SwitchFigure],
    seconds: float,
    tell: Callable[[str], None],
) -> None:
    """Have one switch measured in all its cells, once."""
    namespace, address = network.switch
    ports = [network.port(host.name)[1] for host in network.topology.hosts] if target != "udp" else []
    with SwitchProcess(namespace, address, folder=folder, lab=network.lab, ports=ports, target=target) as switch:
        for figure in figures:
            cell = figure.cell
            tell(f"{cell.words}")
            results, losses = workers.run(
                switch.environment, cell.workers, values=cell.values, slack=cell.slack, seconds=seconds,
                loss=cell.loss_percent / 100,
            )  # fmt: skip
            figure.errors += [one.error for one in results if one.error]
            is_whole = not any(one.error for one in results)
            figure.per_second.append(statistics.mean(one.rate for one in results) if is_whole else 0.0)
            figure.checked += sum(one.checked for one in results)
            figure.wrong += sum(one.wrong for one in results)
            figure.sent += sum(one.sent for one in results)
            figure.resent += sum(one.resent for one in results)
            figure.passed += sum(one.out + one.come_in for one in losses)
            figure.lost += sum(one.lost_out + one.lost_in for one in losses)


def versions() -> dict[str, str]:
    """The versions of what the kernel's programs are made and loaded with."""
    found = {"clang": "not installed", "libbpf": "not installed"}
    if (clang := shutil.which("clang")) is not None:
        said = subprocess.run([clang, "--version"], capture_output=True, text=True).stdout
        found["clang"] = said.partition("\n")[0].strip()
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libbpf.so.1")
        library.libbpf_version_string.restype = ctypes.c_char_p
        found["libbpf"] = library.libbpf_version_string().decode()
    return found
