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
import secrets
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from offbeat.errors import PlanError
from offbeat.lab.garbage import GarbageTask
from offbeat.lab.launch import SwitchProcess
from offbeat.lab.load_workers import LoadOutcome, LoadWorkers
from offbeat.lab.memory_load import sum_beside_garbage
from offbeat.lab.network import Network
from offbeat.lab.random_swaps import RandomSwaps, SwapProof, prove
from offbeat.lab.switch_load import LoadTask
from offbeat.switch.job_shape import JobShape
from offbeat.switch.sending_rate import sending_rate
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MEMORY = "memory"  # garbage alone: without a network there is nothing to be fast over
TARGETS = ("udp", "ebpf", "xdp", MEMORY)
SLACKS = (0, 8)
LEGEND = {
    "results": "chunks whose sums came, per second and worker; GB/s of gradient; loss at the hosts, each way",
    "clocks": "steps that are over, with nothing in them, per second and worker: what a barrier costs",
    "packets": "that one worker makes and sends by itself, to a socket that nobody reads; no switch is in it",
    "garbage": "results, while somebody sends packets that no honest worker sends (`offbeat.lab.garbage`)",
    "swaps": "clocks, while the window is changed every few milliseconds to 0, 1, 4 or 16; from workers' histories",
}
SWAP_LOSS_PERCENTS = (0.0, 1.0, 3.0)
CLOCKS = 30_000
GARBAGE_PER_S = 10_000.0
MEMORY_GARBAGE_PER_S = 1_000.0  # where one interpreter makes it, sums, and is the switch
_MTU, _JUMBO_MTU = 1500, 9000
_MOST_VALUES = 352  # of a frame of 1,500 bytes
_ALONE_S = 0.5  # at most, for what needs no network


@dataclass(frozen=True)
class SwitchCell:
    """One row of the measurements.

    Args:
        what: one of `LEGEND`.
        target: of the switch; "" for none.
        values: int32 in a packet; 0 for clocks.
        slack: steps that a worker may be ahead, for clocks.
        loss_percent: datagrams that are lost in each direction.
        clocks: how many are counted, for swaps; 0 for as many as there are in the time.
    """

    what: str
    target: str
    workers: int
    values: int = 0
    slack: int = 0
    loss_percent: float = 0.0
    clocks: int = 0

    @property
    def words(self) -> str:
        """The cell in words."""
        what = f"results of {self.values} values" if self.values else f"clocks, {self.slack} steps ahead at most"
        what = {"garbage": f"{what} beside garbage", "swaps": f"{self.clocks} clocks and swaps"}.get(self.what, what)
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
        garbage: datagrams that were sent beside those of the workers, by kind.
        refused: what the switch has dropped and refused meanwhile, by reason.
        proof: what the histories say, for swaps.
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
    garbage: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    proof: SwapProof | None = None

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
    targets: Sequence[str],
    workers: Sequence[int],
    values: Sequence[int],
    loss_percents: Sequence[float],
    *,
    what: Sequence[str] = tuple(LEGEND),
    clocks: int = CLOCKS,
) -> list[SwitchCell]:
    """List what is to be measured; packets that take jumbo frames are for the kernel's switch alone.

    Args:
        what: of `LEGEND`.
        clocks: of each worker, while policies are swapped.

    Raises:
        PlanError: if there is nothing to measure, a name is none of `LEGEND`, or a number is out of range.
    """
    _check_choice(targets, workers, values, loss_percents, what)
    cells = [SwitchCell("packets", "", 1, size) for size in values]
    for target in targets:
        sizes = [size for size in values if target not in ("udp", MEMORY) or size <= _MOST_VALUES]
        for count in workers:
            for loss in loss_percents if target != MEMORY else ():
                cells += [SwitchCell("results", target, count, size, loss_percent=loss) for size in sizes]
                cells += [SwitchCell("clocks", target, count, slack=slack, loss_percent=loss) for slack in SLACKS]
            cells += [SwitchCell("garbage", target, count, size) for size in sizes if size <= _MOST_VALUES]
        cells += [
            SwitchCell("swaps", target, max(workers), loss_percent=loss, clocks=clocks)
            for loss in (SWAP_LOSS_PERCENTS if target != MEMORY else ())
        ]
    return [cell for cell in cells if cell.what in what]


def _check_choice(
    targets: Sequence[str], workers: Sequence[int], values: Sequence[int], loss_percents: Sequence[float],
    what: Sequence[str],
) -> None:  # fmt: skip
    if not (targets and workers and values and loss_percents and what):
        raise PlanError("Cannot measure nothing: name at least one target, number of workers, size and loss.")
    for one in what:
        if one not in LEGEND:
            raise PlanError(f"Cannot measure {one!r}: choose from {', '.join(LEGEND)} - at `--what`.")
    for count in workers:
        for size in values:
            JobShape(0, count, size)
    for loss in loss_percents:
        if not 0 <= loss <= 50:
            raise PlanError(f"Cannot lose {loss:g} % of the packets: choose from 0 to 50 - at `--loss`.")


def measure_switch(
    cells: Sequence[SwitchCell],
    *,
    seconds: float,
    repeats: int,
    tell: Callable[[str], None],
    histories: Path | None = None,
) -> list[SwitchFigure]:
    """Measure all cells, by turns; those with swaps once.

    Args:
        seconds: how long each turn takes.
        tell: called with what is measured next.
        histories: folder for those of the workers whose policies were swapped; None to keep none.

    Raises:
        NetworkError: if this machine cannot build the network, or lose packets.
        WorkerLostError: if a process of it ends.
    """
    figures = {cell: SwitchFigure(cell) for cell in cells}
    # One more than there are workers: who sends garbage, or changes policies, has a host of its own.
    names = [f"w{rank}" for rank in range(max(cell.workers for cell in cells) + 1)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places: dict[int, _Place] = {}
        for mtu in sorted({cell.mtu for cell in cells if cell.target not in ("", MEMORY)}):
            own = folder / str(mtu)
            own.mkdir()
            network = stack.enter_context(Network(Topology.star(names), mtu=mtu))
            workers = stack.enter_context(LoadWorkers(network, own))
            places[mtu] = _Place(network, workers, own, histories or own)
        groups = sorted({(cell.mtu, cell.target) for cell in cells if cell.target not in ("", MEMORY)})
        for repeat in range(repeats):
            note = f"repetition {repeat + 1} of {repeats}: "
            # There and back, so that no target always comes after the other.
            for mtu, target in groups if repeat % 2 == 0 else groups[::-1]:
                here = [figures[cell] for cell in cells if (cell.mtu, cell.target) == (mtu, target)]
                here = [figure for figure in here if not (repeat and figure.cell.clocks)]
                _measure_target(places[mtu], target, here, seconds, lambda what, note=note: tell(note + what))  # type: ignore[misc]
            # At the end, when all processes have started and wait.
            for cell in cells:
                if cell.target == MEMORY:
                    tell(note + cell.words)
                    rate = MEMORY_GARBAGE_PER_S
                    found = sum_beside_garbage(cell.workers, cell.values, seconds=seconds, per_second=rate)
                    _take(figures[cell], found)
                elif not cell.target:
                    tell(f"{note}a worker by itself, {cell.values} values")
                    alone = sending_rate(cell.values, seconds=min(_ALONE_S, seconds))
                    figures[cell].per_second.append(alone.per_second)
    return list(figures.values())


class _Place(NamedTuple):
    """A network, its workers, a folder for what processes say, and one for histories."""

    network: Network
    workers: LoadWorkers
    folder: Path
    histories: Path


def _measure_target(
    place: _Place, target: str, figures: Sequence[SwitchFigure], seconds: float, tell: Callable[[str], None]
) -> None:
    """Have one switch measured in all its cells, once."""
    network = place.network
    namespace, address = network.switch
    ports = [network.port(host.name)[1] for host in network.topology.hosts] if target != "udp" else []
    with SwitchProcess(namespace, address, folder=place.folder, lab=network.lab, ports=ports, target=target) as switch:
        for figure in figures:
            tell(figure.cell.words)
            _take(figure, _measured(place, switch.environment, figure, seconds))


def _measured(place: _Place, switch: Mapping[str, str], figure: SwitchFigure, seconds: float) -> LoadOutcome:
    cell, job = figure.cell, f"load-{secrets.token_hex(4)}"
    address, token = switch["OFFBEAT_SWITCH"], switch["OFFBEAT_TOKEN"]
    loss, network, hosts = cell.loss_percent / 100, place.network, place.network.topology.hosts
    task = LoadTask(address, token, job, 0, cell.workers, cell.values, cell.slack, seconds)
    if cell.what == "swaps":
        folder = place.histories / f"{cell.target}-{cell.loss_percent:g}"
        swaps = RandomSwaps(network.namespace(hosts[-1].name), switch, job, window=cell.slack)
        task = msgspec.structs.replace(task, clocks=cell.clocks, history=str(folder))
        outcome = place.workers.run(task, loss=loss, beside=swaps)
        figure.proof = prove(folder, swaps.made, window=cell.slack, asked_again=swaps.asked_again)
        return outcome
    if cell.what == "garbage":
        victim = network.namespace(hosts[0].name)
        return place.workers.run(task, loss=loss, garbage=GarbageTask(address, token, victim, seconds, GARBAGE_PER_S))
    return place.workers.run(task, loss=loss)


def _take(figure: SwitchFigure, outcome: LoadOutcome) -> None:
    """Add the outcome of one repetition."""
    results, losses = outcome.results, outcome.losses
    figure.errors += [one.error for one in results if one.error]
    is_whole = not any(one.error for one in results)
    figure.per_second.append(statistics.mean(one.rate for one in results) if is_whole else 0.0)
    figure.checked += sum(one.checked for one in results)
    figure.wrong += sum(one.wrong for one in results)
    figure.sent += sum(one.sent for one in results)
    figure.resent += sum(one.resent for one in results)
    figure.passed += sum(one.out + one.come_in for one in losses)
    figure.lost += sum(one.lost_out + one.lost_in for one in losses)
    if outcome.garbage is not None:
        figure.garbage.update(outcome.garbage.sent)
        figure.refused.update(outcome.garbage.refused)


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
