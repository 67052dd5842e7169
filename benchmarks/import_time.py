"""What does `import torch` cost where offbeat is installed? `python -m benchmarks.import_time`, a minute and a half.

torch calls the entry points of its backends when it is imported, that of offbeat among them. So it is imported in new
interpreters, by turns from a folder that has all packages of this environment and from one that has all but offbeat.
The result is benchmarks/results/import_time.json.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import msgspec

from offbeat.lab import hardware

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/import_time.json"
COMMAND = "python -m benchmarks.import_time"
RUNS = 30
_IMPORT = """
import sys, time
sys.path[:0] = [sys.argv[1]]
import importlib.metadata
found = [one for one in importlib.metadata.entry_points(group="torch.backends") if one.name == "offbeat"]
assert bool(found) == (sys.argv[2] == "with")
began_s = time.perf_counter()
import torch
print(time.perf_counter() - began_s, "OFFBEAT" in torch.distributed.Backend._plugins)
"""


class ImportTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. Times are in seconds, in the order in which they were taken."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    with_offbeat_s: list[float]
    without_s: list[float]

    @property
    def difference_s(self) -> float:
        """The median of the differences between neighbours."""
        return statistics.median(a - b for a, b in zip(self.with_offbeat_s, self.without_s, strict=True))


def packages(folder: Path, *, has_offbeat: bool) -> Path:
    """A folder with links to all packages of this environment."""
    folder.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if has_offbeat or "offbeat" not in path.name:
            (folder / path.name).symlink_to(path)
    if has_offbeat:  # installed in place: a finder, which only the site module would start, says where it is
        for path in (ROOT / "offbeat", ROOT / "offbeat_torch.py"):
            (folder / path.name).symlink_to(path)
    return folder


def import_s(folder: Path, *, has_offbeat: bool) -> float:
    """Import torch in a new interpreter."""
    word = "with" if has_offbeat else "without"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", _IMPORT, str(folder), word], capture_output=True, text=True, check=True
    )
    took_s, is_known = done.stdout.split()
    assert is_known == str(has_offbeat), "torch has called the entry point"
    return float(took_s)


def read() -> ImportTime:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=ImportTime)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        both = [(True, packages(Path(name) / "with", has_offbeat=True))]
        both.append((False, packages(Path(name) / "without", has_offbeat=False)))
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-1, RUNS):
            for has_offbeat, folder in both if number % 2 else reversed(both):
                seconds = import_s(folder, has_offbeat=has_offbeat)
                if number >= 0:  # the first reads files from the disk
                    took[has_offbeat].append(round(seconds, 6))
    measured = ImportTime(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        with_offbeat_s=took[True],
        without_s=took[False],
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    print(f"{measured.difference_s * 1000:+.2f} ms, of {statistics.median(took[False]) * 1000:.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
