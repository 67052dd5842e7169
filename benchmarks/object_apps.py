"""Applications of tasks with tensors, by offbeat's stores and by plain Ray.

python -m benchmarks.object_apps [APP ...]

Root; nine hosts at 200 Mbit/s each way (`benchmarks/workloads/object_apps.py`): asynchronous SGD with the first four of
eight gradients, an ensemble of eight models, weights of which little changes, and readers that come and go. Each system
is started once and does all of it; shardcast sends weights only. After each start the result is written to
benchmarks/results/object_apps.json. `pip install -e '.[lab,peers]'`; about ten minutes. With names of applications,
only these are measured again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.objects import peer_versions
from offbeat.lab import command_lines, goodput, hardware, launch
from offbeat.lab.network import Network
from offbeat.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/object_apps.json"
COMMAND = "python -m benchmarks.object_apps"
SYSTEMS = ("offbeat", "ray", "shardcast")
APPS = {
    "sgd": "Asynchronous SGD: a server adds the first four gradients of eight workers that are there, and gives these "
    "workers new weights; 5.7 million parameters, handwritten digits. Seconds of an update, the first two left out.",
    "ensemble": "An ensemble of eight models: a query of 8 MiB goes to all, and the mean of their answers, 1.25 MiB "
    "each, comes back. Seconds of a query.",
    "deltas": "16 MiB of bfloat16 weights, of which each version changes 2 %, to eight readers: seconds from the "
    "beginning of its publication until the last reader has loaded it. Ray and shardcast send all of it.",
    "readers": "The same where all of it changes and readers come and go: during one version a reader is killed, in "
    "offbeat with its store, and another one joins on its host.",
}
HOSTS, RATE_MBPS, _TIMEOUT_S = 9, 200, 560.0
_SAMPLES = 4 * 32  # of an update
_UNTIMED = {"sgd": 2}  # until workers are out of step


class AppRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One application on one system.

    Args:
        seconds: of each update, query or version.
        sent_bytes: by the first host, in each version.
        figures: "loss" on what is held out, or "accuracy" of the ensemble.
    """

    app: str
    system: str
    seconds: list[float]
    sent_bytes: list[int]
    figures: dict[str, float]


class AppRuns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Args:
        goodput_mbps: of each host's link, as TCP has it.
    """

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    hosts: int
    rate_mbps: float
    goodput_mbps: dict[str, float]
    runs: list[AppRun]


def measure(network: Network, system: str, apps: Sequence[str]) -> list[AppRun]:
    """Start a system, and have it do some of the applications."""
    places = launch.places(network)
    with tempfile.TemporaryDirectory() as folder:
        workers = launch.Workers(
            command_lines.script(ROOT / "benchmarks/workloads/object_apps.py", system, ",".join(apps)),
            places=places,
            folder=Path(folder),
            environment={"OFFBEAT_TOKEN": "0123456789abcdef" * 2},
            each=[{"GLOO_ADDRESS": place.address} for place in places],
            lab=network.lab,
        )
        with workers:
            workers.wait(_TIMEOUT_S)
        logs = [workers.log(rank).read_text(errors="replace") for rank in range(HOSTS)]
    lines = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"app')]
    return [_run_of(app, system, [line for line in lines if line["app"] == app]) for app in apps]


def _run_of(app: str, system: str, lines: Sequence[dict[str, Any]]) -> AppRun:
    """Put together what the members have said of one application."""
    took: dict[int, float] = {}
    for number in sorted({line["number"] for line in lines if "number" in line}):
        said = [line for line in lines if line.get("number") == number]
        began = [line["began_s"] for line in said if "began_s" in line]
        ended = [line["ended_s"] for line in said if "ended_s" in line]
        if began:
            took[number] = max(ended) - began[0]
        for line in said:
            took[number] = line.get("took_s", took.get(number, 0.0))
    return AppRun(
        app=app,
        system=system,
        seconds=[round(one, 4) for number, one in took.items() if number > _UNTIMED.get(app, 0)],
        sent_bytes=[line["sent_bytes"] for line in lines if "sent_bytes" in line],
        figures={name: line[name] for line in lines for name in ("loss", "accuracy") if name in line},
    )


def read() -> AppRuns:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=AppRuns)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results; nothing before it was measured.

    Args:
        lines: makes a table of headings and rows.
    """
    if not RESULT.exists():
        return ""
    found = read()
    parts = [f"\n### Applications of objects\n\n{found.hosts} hosts at {found.rate_mbps:g} Mbit/s.\n"]
    for app, text in APPS.items():
        runs = [one for system in SYSTEMS for one in found.runs if (one.app, one.system) == (app, system)]
        if not runs:
            continue
        base = next((_mean(one) for one in runs if one.system == "ray"), None)
        rows = [[one.system, *_cells(one), "-" if base is None else f"{base / _mean(one):.2f}"] for one in runs]
        parts.append(f"\n{text}\n\n{lines(['', 'mean', 'least to most', _HEADS[app], 'times as fast as Ray'], rows)}")
    parts.append(
        f"\n`{found.command}`, {found.date}, {found.hardware['processor']}, torch {found.versions['torch']}, "
        f"ray {found.versions.get('ray', 'not installed')}. [Raw records](object_apps.json).\n"
    )
    return "".join(parts)


_HEADS = {
    "sgd": "samples/s; loss",
    "ensemble": "queries/s; accuracy",
    "deltas": "MB sent by the first host",
    "readers": "MB sent by the first host",
}


def _mean(one: AppRun) -> float:
    return statistics.fmean(one.seconds)


def _cells(one: AppRun) -> list[str]:
    if one.app == "sgd":
        last = f"{_SAMPLES / _mean(one):.1f}; {one.figures['loss']:.3f}"
    elif one.app == "ensemble":
        last = f"{1 / _mean(one):.2f}; {one.figures['accuracy']:.1%}"
    else:
        last = f"{statistics.fmean(one.sent_bytes) / 1e6:.1f}"
    return [f"{_mean(one):.2f} s", f"{min(one.seconds):.2f} to {max(one.seconds):.2f} s", last]


def main() -> None:
    chosen = sys.argv[1:] or list(APPS)
    if unknown := [name for name in chosen if name not in APPS]:
        sys.exit(f"Cannot measure {unknown[0]!r}: name some of {', '.join(map(repr, APPS))}.")
    runs = [one for one in read().runs if one.app not in chosen] if RESULT.exists() else []
    print("3 starts, about 10 minutes in all", file=sys.stderr, flush=True)  # noqa: T201
    with Network(Topology.star([f"h{number}" for number in range(HOSTS)], rate_mbps=RATE_MBPS)) as network:
        carried = goodput.ensure(network)
        for system in SYSTEMS:
            apps = [app for app in APPS if app in chosen and (system != "shardcast" or app == "deltas")]
            if not apps:
                continue
            began_s = time.monotonic()
            runs += measure(network, system, apps)
            print(f"{system}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
            measured = AppRuns(
                command=COMMAND,
                date=hardware.date(),
                versions=hardware.versions() | peer_versions(),
                hardware=hardware.hardware(),
                hosts=HOSTS,
                rate_mbps=RATE_MBPS,
                goodput_mbps=carried,
                runs=runs,
            )
            RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
