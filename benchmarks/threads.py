"""What does it bring that several workers share a machine's cores? `python -m benchmarks.threads`, some minutes.

Trains `examples/digits.py` on two local workers, by turns with as many threads in each as torch takes by itself, and
with what `offbeat run` gives it. A pair ran back to back, its order changing from pair to pair: compare within a pair.
The result is benchmarks/results/threads.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from offbeat.cli.threads import SAID, share_of_cores
from offbeat.lab import hardware
from offbeat.report import Records
from offbeat.report.records import StepRecord

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/threads.json"
COMMAND = "python -m benchmarks.threads"
SCRIPT = "examples/digits.py"
WORKERS, STEPS, WARMUP_STEPS, PAIRS = 2, 180, 20, 5


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two runs, back to back.

    Args:
        before, after: steps per second, with torch's own number of threads and with that of `offbeat run`.
        load: processes that wanted to run when the pair began, over the last minute; those of the pair before, too.
    """

    before: float
    after: float
    load: float


class Threads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        threads_before, threads_after: in each worker.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    script: str
    workers: int
    steps: int
    threads_before: int
    threads_after: int
    pairs: list[Pair]

    @property
    def ratio(self) -> float:
        """Of the speeds, after to before: the median over the pairs."""
        return statistics.median(pair.after / pair.before for pair in self.pairs)


def steps_per_s(threads: int | None) -> float:
    """Train once; steps per second of the first worker, without the first few.

    Args:
        threads: in each worker; None for what `offbeat run` gives it.
    """
    environment = _nothing_said() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "offbeat", "run", "--workers", str(WORKERS), "--run-dir", folder, SCRIPT]
        steps = ["--steps", str(WARMUP_STEPS + STEPS)]
        subprocess.run([*command, *steps], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        records = Records(Path(folder) / "metrics.jsonl").all()
    ends_s = sorted(one.time_s for one in records if isinstance(one, StepRecord) and one.rank == 0)[WARMUP_STEPS:]
    return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def run() -> Threads:
    """All pairs."""
    asks = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    own = int(subprocess.run(asks, env=_nothing_said(), check=True, capture_output=True).stdout)
    for name in SAID:
        os.environ.pop(name, None)
    given, _ = share_of_cores(WORKERS)
    pairs = []
    for number in range(PAIRS):
        load = os.getloadavg()[0]
        found = {threads: steps_per_s(threads) for threads in ((own, None) if number % 2 == 0 else (None, own))}
        pairs.append(Pair(before=round(found[own], 2), after=round(found[None], 2), load=load))
    return Threads(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        script=SCRIPT,
        workers=WORKERS,
        steps=STEPS,
        threads_before=own,
        threads_after=int(given["OMP_NUM_THREADS"]),
        pairs=pairs,
    )


def read(path: Path = RESULT) -> Threads:
    """What was measured."""
    return msgspec.json.decode(path.read_bytes(), type=Threads)


def _nothing_said() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SAID}


if __name__ == "__main__":
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
