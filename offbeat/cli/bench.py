"""`offbeat bench`: how fast parts of offbeat are on this machine, against the bare thing."""

from __future__ import annotations

import enum
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from offbeat.cli.help_group import HelpGroup
from offbeat.errors import NetworkError, PlanError

if TYPE_CHECKING:
    import torch

    from offbeat.cli.codec_benchmark import CodecFigure
    from offbeat.cli.object_benchmark import ObjectFigure
    from offbeat.cli.rule_benchmark import RuleFigure
    from offbeat.cli.switch_benchmark import SwitchFigure
    from offbeat.cli.wire_benchmark import WireFigure
    from offbeat.robust import Rule


class BenchTargetName(enum.Enum):
    """The targets of a switch that can be measured."""

    udp = "udp"
    ebpf = "ebpf"
    xdp = "xdp"
    memory = "memory"
    all = "all"


class BenchModelName(enum.Enum):
    """The models whose shapes are known."""

    resnet50 = "resnet50"
    vgg16 = "vgg16"
    transformer = "transformer-small"


app = typer.Typer(cls=HelpGroup, help="Measure how fast parts of offbeat are on this machine.", no_args_is_help=True)


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

    _check_folder(json)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        certificates = _make_certificates(Path(folder)) if tls else ""
        rows = measure(seconds, repeats, certificates, lambda name: status.update(f"measuring {name}"))
    if json is not None:
        _write(json, rows, seconds, repeats)
    _show(rows)


@app.command()
def switch(
    target: Annotated[BenchTargetName, typer.Option(help="Which switch.")] = BenchTargetName.all,
    workers: Annotated[str, typer.Option(metavar="N,N", help="How many workers.")] = "2,4",
    values: Annotated[
        str, typer.Option(metavar="N,N", help="int32 in a packet; above 352 with jumbo frames, at the kernel's switch.")
    ] = "64,256,352,2048",
    loss: Annotated[str, typer.Option(metavar="P,P", help="Percent of the packets lost, each way.")] = "0,1,5",
    what: Annotated[
        str, typer.Option(metavar="WHAT,WHAT", help="What to measure.")
    ] = "results,clocks,packets,garbage,swaps",
    clocks: Annotated[int, typer.Option(min=1, help="Clocks of each worker while policies are swapped.")] = 30_000,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds that each turn takes.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each row, interleaved.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the raw records.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="Folder for the histories of policies that were swapped, for verify-run.")
    ] = None,
) -> None:
    """Measure switches with workers in network namespaces: sums, of which each is checked, and barriers. Needs root.

    Some of it is measured beside packets that no honest worker sends, and while the policy is swapped again and again.
    """
    from offbeat.cli.switch_benchmark import TARGETS, cells_of, measure_switch

    _check_folder(json)
    targets = TARGETS if target is BenchTargetName.all else (target.value,)
    counts, sizes = ([int(one) for one in _numbers(text)] for text in (workers, values))
    cells = cells_of(targets, counts, sizes, _numbers(loss), what=what.split(","), clocks=clocks)
    with Console(stderr=True).status("") as status:
        figures = measure_switch(cells, seconds=seconds, repeats=repeats, tell=status.update, histories=history)
    if json is not None:
        _write_switch(json, figures, seconds, repeats)
    _show_switch(figures)


@app.command()
def objects(
    size_mb: Annotated[str, typer.Option(metavar="N,N", help="MiB of the tensors.")] = "0.001,1,32",
    hosts: Annotated[int, typer.Option(min=2, max=64, help="Hosts with a store each.")] = 4,
    mbps: Annotated[
        float | None,
        typer.Option(min=1.0, help="Rate of each host's link: hosts are network namespaces then. Needs root."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the raw records.")] = None,
) -> None:
    """Measure stores of objects: one tensor to all hosts, a sum at one, a sum at all, beside the tensor on one link."""
    from offbeat.cli.object_benchmark import measure_objects

    _check_folder(json)
    sizes = [4 * round(one * 2**18) for one in _numbers(size_mb)]
    if min(sizes) <= 0:
        raise PlanError(f"Cannot measure sizes of {size_mb!r} MiB: each has to be 4 bytes at least, as in 0.001,1,32.")
    with Console(stderr=True).status("") as status:
        figures = measure_objects(sizes, hosts=hosts, rate_mbps=mbps, repeats=repeats, tell=status.update)
    if json is not None:
        _write_parts(json, "objects", figures, hosts=hosts, mbps=mbps)
    _show_objects(figures)


def _show_objects(figures: list[ObjectFigure]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("bytes", "median, ms", "least", "most", "x the bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        times = (f"{1e3 * each:.2f}" for each in (one.median, min(one.values), max(one.values)))
        bound = "-" if one.bound_s is None else f"{one.median / one.bound_s:.2f}"
        table.add_row(one.op + ", striped" * one.is_striped, f"{one.size_bytes:,}", *times, bound)
    console = Console(width=max(80, Console().width))
    console.print(table, crop=False)
    console.print(
        "Times are of the slowest host. The bound is what the tensor alone takes on one link, S/B.", soft_wrap=True
    )


@app.command()
def codec(
    codecs: Annotated[
        list[str] | None, typer.Argument(metavar="[CODEC]...", help="Such as 'TopK(0.01)'; all that there are if none.")
    ] = None,
    model: Annotated[BenchModelName, typer.Option(help="Whose shapes the gradients have.")] = BenchModelName.resnet50,
    workers: Annotated[int, typer.Option(min=2, help="Contributions that are decoded.")] = 4,
    bucket_mb: Annotated[float, typer.Option(min=0.01, help="MiB of each bucket.")] = 25.0,
    device: Annotated[str, typer.Option(help="Where gradients are: cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds that each turn takes.")] = 0.5,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each row, interleaved.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the raw records.")] = None,
) -> None:
    """Measure what encoding and decoding takes, and below which speed of the links it pays."""
    from offbeat.cli.codec_benchmark import CODECS, measure_codecs
    from offbeat.cli.part_syntax import read_part

    _check_folder(json)
    chosen = [read_part("codec", text) for text in codecs or ()] or CODECS
    with Console(stderr=True).status("") as status:
        figures = measure_codecs(
            chosen,
            model=model.value,
            workers=workers,
            bucket_bytes=int(bucket_mb * 2**20),
            device=_device(device),
            seconds=seconds,
            repeats=repeats,
            tell=status.update,
        )
    if json is not None:
        settings = {"model": model.value, "workers": workers, "bucket_mb": bucket_mb, "device": device}
        _write_parts(json, "codec", figures, **settings)
    _show_codec(figures, workers)


@app.command()
def rule(
    rules: Annotated[
        list[str] | None, typer.Argument(metavar="[RULE]...", help="Such as 'Krum(2)'; all that there are if none.")
    ] = None,
    workers: Annotated[int, typer.Option(min=3, help="Contributions of each update.")] = 16,
    size_mb: Annotated[float, typer.Option(min=1.0, help="MiB of each contribution.")] = 25.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds that each turn takes.")] = 0.5,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each row, interleaved.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the raw records.")] = None,
) -> None:
    """Measure what a robust rule takes at a parameter server, beside the mean."""
    from offbeat.cli.rule_benchmark import measure_rules
    from offbeat.cli.rule_benchmark import rules as all_rules

    _check_folder(json)
    chosen = [None, *map(_read_rule, rules)] if rules else all_rules(workers)
    for one in chosen:
        if one is not None and (why := one.check(workers)):
            raise PlanError(f"Cannot measure: {why}.")
    with Console(stderr=True).status("") as status:
        figures = measure_rules(
            chosen,
            workers=workers,
            size_bytes=int(size_mb * 2**20),
            seconds=seconds,
            repeats=repeats,
            tell=status.update,
        )
    if json is not None:
        _write_parts(json, "rule", figures, workers=workers, size_mb=size_mb)
    _show_rule(figures)


def _read_rule(text: str) -> Rule:
    """Read a rule, be it one that a plan has as `rule` or as `validator`."""
    from offbeat.cli.part_syntax import read_part

    found: Rule
    try:
        found = read_part("rule", text)
    except PlanError as error:
        try:
            found = read_part("validator", text)
        except PlanError:
            raise error from None
    return found


def _show_rule(figures: list[RuleFigure]) -> None:
    mean, wide = figures[0].median, max(len(one.rule) for one in figures)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for heading in ("GB/s", "least", "most", "time, x the mean's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        rates = map(_rate, (one.median, min(one.values), max(one.values)))
        table.add_row(one.rule or "the mean", *rates, f"{mean / one.median:.1f}")
    Console(width=max(wide + _FIGURES_WIDTH, Console().width)).print(table, crop=False)


def _device(name: str) -> torch.device:
    import torch

    if name == "cpu" or (name == "cuda" and torch.cuda.is_available()):
        return torch.device(name)
    why = "there is no GPU here" if name == "cuda" else "it is neither 'cpu' nor 'cuda'"
    raise PlanError(f"Cannot measure on {name!r}: {why}. Use --device cpu.")


def _write_parts(
    path: Path, name: str, figures: list[CodecFigure] | list[ObjectFigure] | list[RuleFigure], **settings: Any
) -> None:
    """Write what was measured, and with what."""
    import msgspec

    from offbeat.lab import hardware

    report = {
        "format": 1,
        "name": name,
        "command": hardware.command_line(),
        "date": hardware.date(),
        "versions": hardware.versions(),
        "hardware": hardware.hardware(),
        "settings": settings,
        "rows": [msgspec.to_builtins(one) | {"median": one.median} for one in figures],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _show_codec(figures: list[CodecFigure], workers: int) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("codec", no_wrap=True)
    for heading in ("GB/s", "least", "most", "bytes sent", "bytes on a link", "pays below"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        pays = "-" if one.pays_below_gbit_s is None else f"{one.pays_below_gbit_s:.3g} Gbit/s"
        rates = (one.median, min(one.values), max(one.values))
        table.add_row(one.codec, *map(_rate, rates), f"{one.sent:.2%}", f"{one.on_wire:.2%}", pays)
    wide = max(len(one.codec) for one in figures) + _FIGURES_WIDTH
    console = Console(width=max(wide, Console().width))
    console.print(table, crop=False)
    console.print(
        "GB/s: gradients that are encoded and decoded on this machine. Of what cannot be added each of "
        f"{workers} workers receives what all others send: so many bytes are on a link as in an all-reduce of that "
        "size.",
        soft_wrap=True,
    )


_FIGURES_WIDTH = 80  # of the columns beside the codec's


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _check_folder(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise NetworkError(f"Cannot write {file}: there is no folder {file.parent}. Make it, or choose another.")


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise PlanError(f"Cannot read {text!r}: name numbers with commas between them, as in 2,4.") from error


def _write_switch(path: Path, figures: list[SwitchFigure], seconds: float, repeats: int) -> None:
    """Write what was measured, and with what."""
    import msgspec

    from offbeat.cli import switch_benchmark
    from offbeat.lab import hardware, switch_load

    rows = []
    for one in figures:
        figure = msgspec.to_builtins(one)
        rows.append(figure.pop("cell") | figure | {"median": one.median, "gb_per_s": one.gb_per_s})
    report: dict[str, Any] = {
        "format": 1,
        "name": "switch",
        "command": hardware.command_line(),
        "date": hardware.date(),
        "versions": {**hardware.versions(), **switch_benchmark.versions()},
        "hardware": hardware.hardware(),
        "settings": {
            "seconds": seconds,
            "repeats": repeats,
            "window": switch_load.WINDOW,
            "slots": switch_load.SLOTS,
            "chunks_of_an_exchange": switch_load.CHUNKS,
            "exchanges_under_way": switch_load.UNDER_WAY,
            "garbage_per_s": switch_benchmark.GARBAGE_PER_S,
        },
        "legend": switch_benchmark.LEGEND,
        "rows": rows,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _show_switch(figures: list[SwitchFigure]) -> None:
    from offbeat.cli.switch_benchmark import LEGEND

    console = Console(width=max(124, Console().width))
    for what, legend in LEGEND.items():
        rows = [_cells_of(one) for one in figures if one.cell.what == what]
        if not rows:
            continue
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        headings = [name for name in rows[0] if any(row[name] for row in rows)]
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "target" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[heading] for heading in headings))
        console.print(f"{what}: {legend}", soft_wrap=True)
        console.print(table, crop=False)
    for one in figures:
        for error in one.errors:
            console.print(f"{one.cell.words}: {error}", markup=False)


def _cells_of(one: SwitchFigure) -> dict[str, str]:
    """A row of the table, by heading; "" for what says nothing."""
    cell, (least, most), proof = one.cell, one.range, one.proof
    return {
        "target": cell.target,
        "workers": str(cell.workers),
        "values": str(cell.values) if cell.values else "",
        "ahead": "" if cell.values or proof else str(cell.slack),
        "% lost": f"{cell.loss_percent:g}" if cell.target else "",
        "median/s": f"{one.median:,.0f}",
        "least": "" if proof else f"{least:,.0f}",
        "most": "" if proof else f"{most:,.0f}",
        "GB/s": f"{one.gb_per_s:.3f}" if cell.values else "",
        "wrong": f"{one.wrong:,} of {one.checked:,}" if one.checked else "",
        "sent again": f"{one.resent / one.sent:.1%}" if one.sent else "",
        "garbage": f"{one.garbage.total():,}" if one.garbage else "",
        "swaps": f"{proof.swaps:,}" if proof else "",
        "us each": f"{proof.us_per_swap:,.0f}" if proof else "",
        "grants": f"{proof.grants:,}" if proof else "",
        "of them ahead": f"{proof.grants_ahead:,}" if proof else "",
        "mixed": f"{proof.mixed + proof.other_windows:,}" if proof else "",
        "violations": f"{proof.violations + proof.too_late:,}" if proof else "",
    }


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
