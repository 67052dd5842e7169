"""The section of benchmarks/results/README.md on switches by themselves, from switch.json: what `offbeat bench switch`
measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.cli.switch_benchmark import LEGEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Row = dict[str, Any]

RESULT = Path(__file__).parent / "results/switch.json"
FASTER = 2.0
"""So many times as fast as the process the kernel's switch is to be."""


def read(path: Path = RESULT) -> dict[str, Any]:
    """What was measured.

    Raises:
        msgspec.DecodeError: if it is no JSON.
    """
    report: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return report


def section(report: dict[str, Any], lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The section as Markdown.

    Args:
        lines: makes a table of headings and rows.
    """
    rows: list[Row] = report["rows"]
    settings = report["settings"]
    parts = [
        "\n## switch\n\nSwitches and workers of one machine, each worker in a network namespace of its own: what all "
        "of them cost together on the cores that they share. Every sum was compared with what it has to be.\n\n",
        *_claims(rows),
    ]
    for what in LEGEND:
        mine = [row for row in rows if row["what"] == what]
        title = _TITLES[what].format(garbage=settings["garbage_per_s"], clocks=mine[0]["clocks"]) if mine else ""
        parts += [f"\n{title}\n\n{lines(*_TABLES[what](mine, rows))}"] if mine else []
    parts.append(_refusals(rows))
    parts.append(
        f"\n`{report['command']}`, {report['date']}, {report['hardware']['cores']} cores, "
        f"{report['hardware']['processor']}, {settings['seconds']:g} s each, medians of {settings['repeats']}. "
        "[Raw records](switch.json).\n"
    )
    return "".join(parts)


_TITLES = {
    "results": "Sums per second and worker, by what is lost of the packets in each direction:",
    "clocks": "Steps of a barrier per second and worker, with nothing in them:",
    "packets": "Packets per second that one worker makes and sends by itself, to a socket that nobody reads:",
    "garbage": "Sums per second and worker while somebody sends {garbage:,.0f} packets a second that no honest worker "
    "sends, beside the same without:",
    "swaps": "{clocks:,} steps of each worker, while the window changes to 0, 1, 4 or 16 every few milliseconds. "
    "Counted from workers' histories: steps granted by two windows to workers ahead of the slowest, grants by another "
    "window than was set, and what `offbeat verify-run` finds:",
}


def _claims(rows: list[Row]) -> list[str]:
    """What was promised, and what came of it."""
    told = []
    checked = [row for row in rows if row["checked"]]
    if checked:
        wrong = sum(row["wrong"] for row in checked)
        told.append(_claim("wrong sums", f"{wrong:,} of {sum(row['checked'] for row in checked):,}", wrong == 0))
    ratios = _kernel_ratios(rows)
    if ratios:
        what = f"sums per second without loss by the kernel's switch: at least {FASTER:g} x the process's"
        least, most = min(ratios), max(ratios)
        told.append(_claim(what, f"{least:.2f} to {most:.2f} x", least >= FASTER))
    proofs = [row["proof"] for row in rows if row["proof"]]
    if proofs:
        broken = {name: sum(one[name] for one in proofs) for name in ("mixed", "other_windows", "violations")}
        grants, swaps = sum(one["grants"] for one in proofs), sum(one["swaps"] for one in proofs)
        value = f"{sum(broken.values()):,} of {grants:,} steps, over {swaps:,} changes"
        told.append(_claim("steps granted by two windows, or by one that was not set", value, not sum(broken.values())))
        late = sum(one["too_late"] for one in proofs)
        told.append(_claim("changes in effect later than the window before and one clock", f"{late:,}", not late))
    errors = [error for row in rows for error in row["errors"]]
    told += [f"* A turn ended early: {error}\n" for error in dict.fromkeys(errors)]
    return told


def _claim(what: str, value: str, is_met: bool) -> str:
    return f"* {what}. Measured: **{value}** ({'met' if is_met else 'missed'}).\n"


def _kernel_ratios(rows: Iterable[Row]) -> list[float]:
    """The kernel's rate as a multiple of the process's, for each size and number of workers that both have."""
    of = {
        (row["target"], row["workers"], row["values"]): row["median"]
        for row in rows
        if row["what"] == "results" and not row["loss_percent"]
    }
    return [
        of["ebpf", workers, values] / rate
        for (target, workers, values), rate in of.items()
        if target == "udp" and rate and ("ebpf", workers, values) in of
    ]


def _by_loss(rows: list[Row], key: str, heading: str) -> tuple[list[str], list[list[str]]]:
    losses = list(dict.fromkeys(row["loss_percent"] for row in rows))
    cells = {(row["target"], row["workers"], row[key], row["loss_percent"]): row for row in rows}
    lines = []
    for target, workers, value in dict.fromkeys((row["target"], row["workers"], row[key]) for row in rows):
        found = [cells.get((target, workers, value, loss)) for loss in losses]
        line = [target, str(workers), str(value), *("" if one is None else f"{one['median']:,.0f}" for one in found)]
        if key == "values":
            line.append(f"{found[0]['gb_per_s']:.3f}" if found[0] else "")
        lines.append(line)
    headings = ["target", "workers", heading, *(f"{loss:g} % lost" for loss in losses)]
    return headings + ([f"GB/s of gradient, {losses[0]:g} % lost"] if key == "values" else []), lines


def _packets(rows: list[Row], every: list[Row]) -> tuple[list[str], list[list[str]]]:
    return ["int32 in a packet", "packets/s"], [[str(row["values"]), f"{row['median']:,.0f}"] for row in rows]


def _garbage(rows: list[Row], every: list[Row]) -> tuple[list[str], list[list[str]]]:
    alone = {
        (row["target"], row["workers"], row["values"]): row["median"]
        for row in every
        if row["what"] == "results" and not row["loss_percent"]
    }
    headings = ["target", "workers", "int32 in a packet", "beside garbage", "without", "garbage sent", "wrong sums"]
    return headings, [
        [
            row["target"],
            str(row["workers"]),
            str(row["values"]),
            f"{row['median']:,.0f}",
            "" if not (rate := alone.get((row["target"], row["workers"], row["values"]))) else f"{rate:,.0f}",
            f"{sum(row['garbage'].values()):,}",
            f"{row['wrong']:,} of {row['checked']:,}",
        ]
        for row in rows
    ]


def _swaps(rows: list[Row], every: list[Row]) -> tuple[list[str], list[list[str]]]:
    headings = [
        "target", "% lost", "changes", "microseconds each", "steps/s", "grants", "of them ahead", "by two windows",
        "by one not set", "verify-run finds", "clocks until in effect, most",
    ]  # fmt: skip
    return headings, [
        [
            row["target"],
            f"{row['loss_percent']:g}",
            f"{proof['swaps']:,}",
            f"{proof['us_per_swap']:,.0f}",
            f"{row['median']:,.0f}",
            f"{proof['grants']:,}",
            f"{proof['grants'] - proof['by_lead'].get('0', 0):,}",
            *(f"{proof[name]:,}" for name in ("mixed", "other_windows", "violations", "clocks_to_effect")),
        ]
        for row in rows
        if (proof := row["proof"])
    ]


def _refusals(rows: list[Row]) -> str:
    """What garbage was sent, and what the switches say they refused, all turns together."""
    told = ""
    for target in dict.fromkeys(row["target"] for row in rows if row["garbage"]):
        mine = [row for row in rows if row["target"] == target]
        sent, refused = (_total(row[name] for row in mine) for name in ("garbage", "refused"))
        told += f"* {target}: sent {_listed(sent)}. Dropped or refused: {_listed(refused)}.\n"
    return f"\nWhat garbage it was, by kind, and what the switch counted:\n\n{told}" if told else ""


def _total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.lower().replace('_', ' ')}" for name, count in counts.items())


_TABLES: dict[str, Callable[[list[Row], list[Row]], tuple[list[str], list[list[str]]]]] = {
    "results": lambda rows, every: _by_loss(rows, "values", "int32 in a packet"),
    "clocks": lambda rows, every: _by_loss(rows, "slack", "steps ahead at most"),
    "packets": _packets,
    "garbage": _garbage,
    "swaps": _swaps,
}
