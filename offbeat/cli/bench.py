"""`offbeat bench`: how fast parts of offbeat are on this machine, against the bare thing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from offbeat.cli.wire_benchmark import WireFigure

app = typer.Typer(help="Measure how fast parts of offbeat are on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure how fast parts of offbeat are on this machine."""


@app.command()
def wire(
    json: Annotated[Path | None, typer.Option(help="File for the raw records.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds that each turn takes.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each row, interleaved.")] = 5,
    tls: Annotated[bool, typer.Option("--tls", help="Measure with mutual TLS, too.")] = False,
) -> None:
    """Measure links between two processes on loopback: throughput against bare sockets, requests, memory."""
    from offbeat.cli.wire_benchmark import measure

    if json is not None and not json.parent.is_dir():
        raise NetworkError(f"Cannot write {json}: there is no folder {json.parent}. Make it, or choose another.")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        certificates = _make_certificates(Path(folder)) if tls else ""
        rows = measure(seconds, repeats, certificates, lambda name: status.update(f"measuring {name}"))
    if json is not None:
        _write(json, rows, seconds, repeats)
    _show(rows)


def _make_certificates(folder: Path) -> str:
    from offbeat.cli.certs import make

    make(folder)
    return str(folder)


def _write(path: Path, rows: list[WireFigure], seconds: float, repeats: int) -> None:
    """Write what was measured, and with what."""
    import importlib.metadata
    import ssl
    from dataclasses import asdict

    import msgspec

    from offbeat.cli import wire_benchmark
    from offbeat.lab import hardware

    here = Path("/proc/sys/net/ipv4")
    report: dict[str, Any] = {
        "format": 1,
        "name": "wire",
        "command": hardware.command_line(),
        "date": hardware.date(),
        "versions": {
            **hardware.versions(),
            "xxhash": importlib.metadata.version("xxhash"),
            "openssl": ssl.OPENSSL_VERSION,
        },
        "hardware": {
            **hardware.hardware(),
            "congestion_control": (here / "tcp_congestion_control").read_text().strip(),
            "slow_start_after_idle": int((here / "tcp_slow_start_after_idle").read_text()),
        },
        "settings": {
            "seconds": seconds,
            "repeats": repeats,
            "message_bytes": wire_benchmark.MESSAGE_BYTES,
            "block_bytes": wire_benchmark.BLOCK_BYTES,
            "window_bytes": wire_benchmark.LIMITS.window_bytes,
            "links_for_memory": wire_benchmark.LINKS,
        },
        "rows": [asdict(row) | {"median": row.median} for row in rows],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _show(rows: list[WireFigure]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "unit", "median", "least", "most", "ratio", "target", ""):
        figures = heading in ("median", "least", "most", "ratio")
        table.add_column(heading, justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        met = "" if row.met is None else ("met" if row.met else "missed")
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        values = [_figure(value) for value in (row.median, min(row.values), max(row.values))]
        table.add_row(row.name, row.unit, *values, ratio, row.target, met)
    Console(width=max(100, Console().width)).print(table, crop=False)


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
