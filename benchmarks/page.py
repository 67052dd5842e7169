"""Writes benchmarks/results/README.md from the result files beside it: `python -m benchmarks.page`."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import (
    frameworks,
    groups,
    growth,
    object_apps,
    object_deltas,
    object_faults,
    objects,
    schedule_overhead,
    schedules,
    switch_page,
    threads,
    what_is_sent,
    windows,
)
from benchmarks.claims import CLAIMS, DIFFERENCES, EXPLAINED, FAR_OFF, SAME, Claim, ratio
from offbeat.lab import results
from offbeat.lab.predictions import errors
from offbeat.lab.result_table import table
from offbeat.lab.run_result import behind_faults, reached
from offbeat.report.formatting import brief
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.lab.results import ResultFile

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "README.md"
ROBUST = Path(__file__).parent.parent / "docs/robust.md"
_BEGIN, _END = "<!-- byzantine_jobs -->\n", "<!-- end of byzantine_jobs -->\n"
_ALIKE = 0.02
"""By less than this neither of two rows is said to be faster."""
_HEAD = """# Results

Written by `make results-page` from the files in this folder; each was written by one command, which stands in it with
the scenario, the versions, the hardware and every step of every worker. Rows of one file ran interleaved on the same
links. Compare ratios within a file, never seconds between files.

A row's time as a multiple of ddp's (or another row's) is below 1 if the row is faster. It is the median over the
repeats of the ratio to that row's run next to it, of times to target where there is one, else of seconds per sample, so
it is not the quotient of the medians beside it. More on [the other columns](../../docs/lab.md#what-is-measured), and on
the physical limit of each row, stands with the lab.
"""
_PLAIN = {
    "row": "what was run",
    "min": "least",
    "max": "most",
    "limit": "physical limit, ms per step",
    "simulated": "simulated, ms per step",
    "stale, mean/max": "staleness in steps, mean/most",
    "MB sent": "MB sent per worker",
    "link used": "server's link used",
    "idle": "link idle",
    "uneven": "variation of the link's load",
    "s to target": "seconds to target",
    "final": "metric at the end",
}


def measured() -> list[str]:
    """The scenarios that have a result file, in the order of the page."""
    return [name for name in CLAIMS if (RESULTS / f"{name}.json").exists()]


def page() -> str:
    """The page as Markdown."""
    missing = [name for name in CLAIMS if name not in measured()]
    last = f"\nNot measured yet: {', '.join(missing)}.\n" if missing else ""
    sections = [section(results.read(RESULTS / f"{name}.json")) for name in measured()]
    return "".join(
        [
            _HEAD,
            *sections,
            wire(RESULTS / "wire.json"),
            switches(),
            scheduled(),
            what_is_sent.codecs(_lines),
            what_is_sent.rules(_lines),
            what_is_sent.resets(_lines),
            what_is_sent.attacks(_lines),
            what_is_sent.jobs(_lines),
            frameworks.section(_lines),
            objects.section(_lines),
            object_faults.section(_lines),
            object_apps.section(_lines),
            object_deltas.section(_lines),
            groups.section(_lines),
            shared_cores(),
            simulator(),
            slack(),
            orders(),
            grown(),
            last,
        ]
    )


def section(report: ResultFile) -> str:
    """One scenario: what was claimed, what came of it, and the table."""
    hardware = f"{report.hardware['cores']} cores, {report.hardware['processor']}"
    parts = [f"\n## {report.name}\n\n{report.description}.\n\n", *map(_verdict(report), CLAIMS[report.name])]
    if report.name == "loopback":
        overhead_us = report.overhead_us_per_bucket["offbeat"]
        parts.append(f"\noffbeat costs {overhead_us:.0f} microseconds per bucket more than ddp.\n")
    parts.append(_beside_ring(report))
    notes = list(dict.fromkeys(event for row in report.rows for event in row.events if ": " not in event[:10]))
    parts += [f"\nData: {note}.\n" for note in notes]
    parts.append(f"\n![{report.name}]({report.name}.png)\n\n{_table(report)}\n")
    parts += [_hardly_seen(report), _recoveries(report), _handovers(report)]
    parts.append(
        f"`{report.command}`, {report.date}, {hardware}, torch {report.versions['torch']}. "
        f"[Raw records]({report.name}.json), [scenario](../scenarios/{report.name}.toml).\n"
    )
    return "".join(parts)


def _hardly_seen(report: ResultFile) -> str:
    """Which links were looked at for less than half of the time that a worker's measured steps took."""
    took_s = {raw.row: sum(raw.step_s) for raw in reversed(report.raw)}
    short = [link for link in report.links if link.seen_s < took_s[link.row] / 2]
    told = ", ".join(f"{link.row} ({link.seen_s:.1f} of {took_s[link.row]:.0f} s)" for link in short)
    return (
        f"\nOf the link little is known in {told}: measured when the lab only looked while all workers were in their "
        "measured steps. It looks at the whole time now, and the next measurement will show it.\n\n"
        if short
        else ""
    )


def _recoveries(report: ResultFile) -> str:
    """What each fault cost each row."""
    if not report.recoveries:
        changes = any(fault.stays for fault in Scenario.from_toml(report.scenario).fault)
        return f"\n{_behind_faults(report)}\n" if changes else ""
    predicted = {(one.row, number): cost for one in report.simulated for number, cost in enumerate(one.others_s)}
    struck: Counter[tuple[str, int]] = Counter()
    rows = []
    for one in report.recoveries:
        number = struck[one.row, one.repeat]
        struck[one.row, one.repeat] += 1
        rows.append(
            [
                one.row,
                one.fault,
                *map(_seconds, (one.others_s, predicted.get((one.row, number)), one.back_s)),
                "" if one.redone_steps is None else str(one.redone_steps),
                " ".join(one.said),
            ]
        )
    headings = [
        "row", "what went wrong", "the others waited, s", "simulated, s", "all were back after, s", "steps made again",
        "what the job said",
    ]  # fmt: skip
    told = f"\nWhat [each fault cost](../../docs/lab.md#what-a-fault-cost):\n\n{_lines(headings, rows)}\n"
    return told + _behind_faults(report)


def _handovers(report: ResultFile) -> str:
    """What each swap cost."""
    if not report.handovers:
        return ""
    rows = [
        [
            one.row,
            brief(one.policy),
            f"{one.time_s:.1f}",
            f"{1e3 * one.agreed_s:.0f}",
            f"{1e3 * one.longer_s:.0f}",
            *("" if loss is None else f"{loss:.3f}" for loss in (one.loss_before, one.loss_after)),
        ]
        for one in report.handovers
    ]
    headings = [
        "row",
        "new policy",
        "swapped after, s",
        "agreed upon within, ms",
        "longest step then, ms more",
        "loss before",
        "loss after",
    ]
    return f"\nWhat [each swap cost](../../docs/lab.md#what-a-swap-cost):\n\n{_lines(headings, rows)}\n"


def _behind_faults(report: ResultFile) -> str:
    """How fast each row trained from one fault to the next."""
    found = {row.row: behind_faults(report, row.row) for row in report.rows}
    steps = sorted(set().union(*found.values()))
    rows = [[row, *("" if step not in of else f"{1e3 * of[step]:.1f}" for step in steps)] for row, of in found.items()]
    headings = ["row", *(f"from step {step}" for step in steps)]
    return f"Milliseconds per step from each fault's step to the next one's:\n\n{_lines(headings, rows)}\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def wire(path: Path) -> str:
    """What `offbeat bench wire` measured, which is no scenario."""
    report = msgspec.json.decode(path.read_bytes())
    told, rows = "", []
    for row in report["rows"]:
        ratio_ = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        values = (row["median"], min(row["values"]), max(row["values"]))
        figures = [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values]
        rows.append([row["name"], row["unit"], *figures, ratio_])
        if row["met"] is not None:
            what = f"{figures[0]} {row['unit']}" + (f", {ratio_} of what it is compared with" if ratio_ else "")
            told += f"* {row['name']}: {row['target']}. Measured: **{what}** ({'met' if row['met'] else 'missed'}).\n"
    headings = ["", "unit", "median", "min", "max", "ratio"]
    return (
        "\n## wire\n\nLinks between two processes on loopback, by turns with bare blocking sockets: 16 MiB in blocks "
        f"of 1 MiB, requests of 64 bytes, and the memory of a link.\n\n{told}\n{_lines(headings, rows)}\n"
        f"`{report['command']}`, {report['date']}, {report['hardware']['cores']} cores, "
        f"{report['hardware']['processor']}. [Raw records](wire.json).\n"
    )


def switches() -> str:
    """What `offbeat bench switch` measured; nothing before that was."""
    return switch_page.section(switch_page.read(), _lines) if switch_page.RESULT.exists() else ""


def slack() -> str:
    """What windows save where a step in seven is late; nothing before that was simulated."""
    if not windows.RESULT.exists():
        return ""
    found = windows.read()
    headings = ["steps ahead at most"]
    for workers in windows.WORKERS:
        headings += [f"{workers} workers, simulated", f"{workers} workers, published"]
    return (
        "\n### Windows and stragglers\n\nTime per step on a switch's table as a multiple of BSP's, where each step of "
        f"each worker, with probability 0.15, takes U(0.5, 2) times its mean longer, over {found.steps:,} steps with "
        "nothing to send; beside it what the published runs of Nunes et al. (2025) come to, whose network is in them. "
        "With the network: [four workers](#innetwork_stragglers), [eight](#innetwork_stragglers_eight).\n\n"
        f"{_lines(headings, windows.rows(found))}\n`{found.command}`, the same on every machine. "
        "[Raw records](windows.json).\n"
    )


def orders() -> str:
    """What schedules of gradients come to on the timeline; nothing before that was simulated."""
    if not schedules.RESULT.exists():
        return ""
    found = schedules.read()
    told = "".join(
        f"* {words}. Simulated: **{value}** ({'met' if is_met else 'missed'}).\n"
        for words, value, is_met in schedules.claims(found)
    )
    table = _lines(["latency, line rate", *schedules.COLUMNS], schedules.rows(found))
    columns = "".join(f"* {column}: {what}\n" for column, what in schedules.COLUMNS.items())
    return (
        "\n### Schedules on the timeline\n\nMilliseconds from the beginning of backward to the end of the next forward "
        "pass on the timeline that schedulers plan from, of which nothing is measured: "
        f"{found.size_mb:.0f} MB of ResNet-50's gradients, complete in the bursts and pauses of the program released "
        f"with Prophet; backward takes {found.backward_ms:g} ms, forward {found.forward_ms:g} ms; gradients have half "
        "the line rate. An exchange has a latency beyond its bytes, which is hidden while others have the link. Where "
        "it has a gap, too, it keeps the link for that time at least, however small it is; without one it costs "
        "nothing to send each gradient by itself, as `Credit()` does. With the network of a real ring: "
        f"[schedule_resnet50](#schedule_resnet50).\n\n{told}\n{table}\n"
        f"{columns}\n`{found.command}`, the same on every machine. [Raw records](schedules.json).\n"
    )


def scheduled() -> str:
    """What schedules cost the thread that trains; nothing before that was measured."""
    if not schedule_overhead.RESULT.exists():
        return ""
    found = schedule_overhead.read()
    share, target = found.share("Prophet()"), schedule_overhead.TARGET
    headings = [
        "", "blocks", "forward, us", "backward, us", "step, us", "all threads, us", "beyond alone, us",
        "beyond the barrier, us", f"of {1e3 * schedule_overhead.STEP_S:.0f} ms",
    ]  # fmt: skip
    return (
        f"\n## schedule_overhead\n\n{found.workers} workers on loopback train {found.parameters} small parameters: "
        "processor time of a step, in microseconds, on the thread that trains, and of all threads of the process. A "
        f"parameter costs that thread {found.parameter_us():.1f} us with a schedule, of which "
        f"{found.parameter_us(schedule_overhead.BARRIER):.1f} are beyond the barrier's, and a block "
        f"{found.block_us:.1f}; the barrier is offbeat without a schedule.\n\n* What `Prophet()` costs it beyond the "
        f"barrier: at most {target:.0%} of a step of {1e3 * schedule_overhead.STEP_S:.0f} ms. Measured: "
        f"**{share:.1%}** "
        f"({'met' if share <= target else 'missed'})."
        f"\n\n{_lines(headings, schedule_overhead.rows(found))}\n`{found.command}`, {found.date}, "
        f"{found.hardware['cores']} cores, {found.hardware['processor']}, torch {found.versions['torch']}. "
        "[Raw records](schedule_overhead.json).\n"
    )


def shared_cores() -> str:
    """What `offbeat run` gains by giving each worker its share of the cores; nothing before that was measured."""
    if not threads.RESULT.exists():
        return ""
    found = threads.read()
    pairs = [[f"{one.before:.1f}", f"{one.after:.1f}", f"{one.after / one.before:.2f}"] for one in found.pairs]
    busy = found.pairs[0].load > 0.5 * int(found.hardware["cores"])  # before those behind it there was load of ours
    told = " The machine did much else meanwhile, which makes the ratio larger than on a quiet one." if busy else ""
    headings = [f"{found.threads_before} threads each, steps/s", f"{found.threads_after} each, steps/s", "ratio"]
    return (
        f"\n## threads\n\n`offbeat run --workers {found.workers} {found.script}` on {found.hardware['cores']} cores, "
        f"back to back with as many threads in each worker as torch takes by itself ({found.threads_before}), and with "
        f"its share of the cores ({found.threads_after}), which it gets unless OMP_NUM_THREADS is set: "
        f"**{found.ratio:.2f} x** as many steps per second, the median of {len(pairs)} pairs.{told}\n\n"
        f"{_lines(['pair', *headings], [[str(n), *pair] for n, pair in enumerate(pairs, 1)])}\n"
        f"`{found.command}`, {found.date}, {found.hardware['processor']}, torch {found.versions['torch']}; load "
        f"{', '.join(f'{one.load:.1f}' for one in found.pairs)} when the pairs began. [Raw records](threads.json).\n"
    )


def simulator() -> str:
    """How far the simulator's predictions are from what was measured."""
    rows, off, why = [], [], dict[str, list[str]]()
    for name in measured():
        found = errors(results.read(RESULTS / f"{name}.json"))
        off += [abs(error) for error in found.values()]
        rows.append([f"[{name}](#{name})", ", ".join(f"{row} {error:+.1%}" for row, error in found.items())])
        for row, sentence in EXPLAINED.get(name, {}).items():
            why.setdefault(sentence, []).append(f"{name}, {row} ({found[row]:+.1%})")
    lines = "".join(f"| {scenario} | {told} |\n" for scenario, told in [["scenario", "error"], ["---", "---"], *rows])
    reasons = "".join(f"* {'; '.join(named)}: {sentence}\n" for sentence, named in why.items())
    return (
        "\n## simulator\n\nBy how much the [simulator](../../docs/simulator.md) is off in the time per step; below 0 "
        f"it is too fast. The median of all {len(off)} rows is {statistics.median(off):.1%}, the largest "
        f"{max(off):.1%}.\n\n{lines}\nWhy these are off by more than {FAR_OFF:.0%}:\n\n{reasons}"
    )


def grown() -> str:
    """How long a simulated step takes; nothing before that was measured."""
    if not growth.RESULT.exists():
        return ""
    found = growth.read()
    headings = ["plan", *(f"{count:,} workers" for count in growth.counts(found))]
    return (
        "\n### A simulated step\n\nMilliseconds on one core for one step of all workers, which compute for a second "
        f"and, but for all-reduce, share one server's link.\n\n{_lines(headings, growth.rows(found))}\n"
        f"`{found.command}`, {found.date}, {found.hardware['cores']} cores, {found.hardware['processor']}. "
        "[Raw records](growth.json).\n"
    )


def _verdict(report: ResultFile) -> Callable[[Claim], str]:
    def words(claim: Claim) -> str:
        if claim.missing(report):
            return f"* {claim.words}. Not measured yet.\n"
        value = claim.measured(report)
        unit = " x" if claim.against and claim.measure not in (*DIFFERENCES, SAME) else ""
        digits = "+.4f" if claim.measure in DIFFERENCES else ".3f" if unit else "g"
        told = "never" if value is None else f"{value:{digits}}{unit}"
        return f"* {claim.words}. Measured: **{told}** ({'met' if claim.met(report) else 'missed'}).\n"

    return words


def _beside_ring(report: ResultFile) -> str:
    """Where a server stands beside ddp, which needs none: who wins, in plain words."""
    rows = [row.row for row in report.rows if "ParameterServer(" in row.plan]
    if not rows or all(row.row != "ddp" for row in report.rows):
        return ""
    what, ratios = _against_ddp(report, rows)
    told = [
        f"{verb} than ddp: " + ", ".join(f"{row} ({value:.2f} x)" for row, value in chosen.items())
        for verb, chosen in (
            ("faster", {row: value for row, value in ratios.items() if value < 1 - _ALIKE}),
            ("slower", {row: value for row, value in ratios.items() if value > 1 + _ALIKE}),
        )
        if chosen
    ]
    alike = [row for row, value in ratios.items() if abs(value - 1) <= _ALIKE]
    told += [f"as fast as ddp: {', '.join(alike)}"] if alike else []
    return f"\nDoes the server pay? ddp needs none. By {what}, {'; '.join(told)}.\n"


def _against_ddp(report: ResultFile, rows: list[str]) -> tuple[str, dict[str, float]]:
    """What is compared, and the ratio of each row to ddp: times to target where all have one, else times per step."""
    workload = Scenario.from_toml(report.scenario).workload
    if all(reached(report, row) is not None for row in (*rows, "ddp")):
        found = {row: ratio(report, row, "ddp", lambda one: one.time_to(workload)) for row in rows}
        what = "time to target"
    else:
        found = {row: ratio(report, row, "ddp", lambda one: one.seconds_per_step) for row in rows}
        what = "time per step"
    return what, {row: value for row, value in found.items() if value is not None}


def _table(report: ResultFile) -> str:
    return _lines(*table(report))


def _plain(heading: str) -> str:
    """The heading of a column in words that need no legend; the terminal, which is narrower, has short ones."""
    if heading.startswith("x "):
        return f"time, as a multiple of {heading.removeprefix('x ')}'s"
    return _PLAIN.get(heading, heading)


def _lines(headings: list[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[_plain(heading) for heading in headings], ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def robust_page() -> str:
    """docs/robust.md with the table of rules and lies as it was measured."""
    before, rest = ROBUST.read_text().split(_BEGIN)
    return f"{before}{_BEGIN}\n{what_is_sent.jobs_table(_lines)}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    ROBUST.write_text(robust_page())
