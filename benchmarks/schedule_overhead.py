"""What do schedules cost beside what they gain? `python -m benchmarks.schedule_overhead`, some minutes.

Two workers on loopback train 300 small parameters (`workloads/many_parameters.py`): alone, with
DistributedDataParallel, and with offbeat, where gradients are waited for behind backward, and where they are hidden
behind the next step, in few blocks and in many. What counts is the processor time of the thread that trains: it stands
in the way of the model, however much of it is hidden from the link. All run by turns. What it takes beyond training
alone is what synchronizing costs, ddp's too; beyond the same without a schedule, what a schedule does.

The result is benchmarks/results/schedule_overhead.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.workloads.many_parameters import PARAMETERS, Cost
from offbeat.lab import hardware

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/schedule_overhead.json"
COMMAND = "python -m benchmarks.schedule_overhead"
WORKERS, STEPS, REPEATS = 2, 200, 5
STEP_S = 0.05
"""A step that is common where schedules pay; the share of it is what is claimed."""
BARRIER = "offbeat"
"""The system without a schedule."""
FEW, MANY = "FIFO(bucket_bytes=1 << 30)", "FIFO(bucket_bytes=1 << 14)"
SYSTEMS: dict[str, str] = {
    "alone": "",
    "ddp": "",
    "offbeat": "",
    FEW: 'scheduling = { kind = "FIFO", bucket_bytes = 1073741824 }\n',
    MANY: 'scheduling = { kind = "FIFO", bucket_bytes = 16384 }\n',
    "Prophet()": 'scheduling = { kind = "Prophet" }\n',
}
"""By name, the plan."""
TARGET = 0.02


class Overhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        costs: of each system, those of the first worker, one for each repeat.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    workers: int
    parameters: int
    steps: int
    costs: dict[str, list[Cost]]

    def thread_us(self, system: str, beyond: str = "alone") -> float:
        """Processor time of a step on the thread that trains, beyond that of another system: the median."""
        pairs = zip(self.costs[system], self.costs[beyond], strict=True)
        return statistics.median(one.thread_us - other.thread_us for one, other in pairs)

    def blocks(self, system: str) -> int:
        """The blocks, or buckets, in which gradients are sent; 0 where it is not known."""
        return round(statistics.median(one.blocks for one in self.costs[system]))

    @property
    def block_us(self) -> float:
        """What one more block costs that thread: by the two schedules that differ in nothing else."""
        return (self.thread_us(MANY) - self.thread_us(FEW)) / (self.blocks(MANY) - self.blocks(FEW))

    def parameter_us(self, beyond: str = "alone") -> float:
        """What a parameter costs it with a schedule, beside its blocks."""
        return (self.thread_us(FEW, beyond) - self.blocks(FEW) * self.block_us) / self.parameters

    def share(self, system: str) -> float:
        """The part of a step of `STEP_S` that a schedule costs."""
        return self.thread_us(system, BARRIER) / 1e6 / STEP_S


def cost(system: str, steps: int = STEPS) -> Cost:
    """Train once; what it costs the first worker."""
    with tempfile.TemporaryDirectory() as folder:
        world = 1 if system == "alone" else WORKERS
        ours = {
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "OFFBEAT_STORE": f"{folder}/store",
            "OFFBEAT_PLAN": SYSTEMS[system],
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")}
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.workloads.many_parameters", system, str(steps)],
                cwd=ROOT,
                env=kept | ours | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"{system}: a worker failed")
    return msgspec.json.decode(said[0].splitlines()[-1], type=Cost)


def run(repeats: int = REPEATS, steps: int = STEPS) -> Overhead:
    """All systems by turns, in an order that turns around."""
    costs: dict[str, list[Cost]] = {system: [] for system in SYSTEMS}
    for number in range(repeats):
        for system in list(SYSTEMS)[:: -1 if number % 2 else 1]:
            costs[system].append(cost(system, steps))
    return Overhead(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        workers=WORKERS,
        parameters=PARAMETERS,
        steps=steps,
        costs=costs,
    )


def read(path: Path = RESULT) -> Overhead:
    """What was measured."""
    return msgspec.json.decode(path.read_bytes(), type=Overhead)


def rows(found: Overhead) -> list[list[str]]:
    """A line of the page for each system."""
    lines = []
    for system in found.costs:
        middle = {
            name: statistics.median(getattr(one, name) for one in found.costs[system])
            for name in ("forward_us", "backward_us", "step_us", "process_us")
        }
        beyond = f"{found.thread_us(system):.0f}" if system != "alone" else ""
        has_schedule = bool(SYSTEMS[system])
        schedule = f"{found.thread_us(system, BARRIER):.0f}" if has_schedule else ""
        part = f"{found.share(system):.1%}" if has_schedule else ""
        figures = (f"{one:.0f}" for one in middle.values())
        lines.append([system, str(found.blocks(system) or ""), *figures, beyond, schedule, part])
    return lines


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
