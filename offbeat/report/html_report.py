"""report.html: one self-contained page about a run. It loads nothing and asks nobody."""

from __future__ import annotations

import html
import statistics
from datetime import datetime
from typing import TYPE_CHECKING

from offbeat.report.formatting import ranks, span
from offbeat.report.job_events import UNMARKED, began_s, job_events, trained_s
from offbeat.report.nonfinite import nonfinite
from offbeat.report.outcome import ending
from offbeat.report.per_worker import pace, steps_heading, tally, told_pace
from offbeat.report.records import EventRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.report.outcome import RunOutcome, Stall
    from offbeat.report.per_worker import WorkerTotals
    from offbeat.report.records import Record

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6b7280; --line: #d8dce2; --paper: #ffffff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3ae; --line: #343a43; --paper: #14171b; --card: #1c2026; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       max-width: 76rem; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p.about { color: var(--soft); margin: .2rem 0 1.4rem; }
.cards { margin-top: 1.4rem; display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem 1rem; }
.card b { display: block; font-size: 1.5rem; font-weight: 600; } .card span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; }
figcaption { font-weight: 600; font-size: .9rem; } figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; font-size: .85rem; } th:first-child, td:first-child { text-align: left; }
table.events td, table.events th { text-align: left; vertical-align: top; }
table.events td:nth-child(-n+4) { white-space: nowrap; } table.events td:last-child { white-space: pre-wrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto; }
.bad { color: #d55e00; } .ending { margin: 0 0 .6rem; }
"""

HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>{title}</title><style>" + _STYLE.replace("{", "{{").replace("}", "}}") + "</style></head>\n<body>\n"
)
"""How a page begins, to be formatted with its title."""


def page(
    records: Sequence[Record],
    *,
    title: str,
    plan: str = "",
    damaged: int = 0,
    stalls: Sequence[Stall] = (),
    notes: Sequence[str] = (),
    exit_codes: Mapping[int, int] | None = None,
    judged: Mapping[int, tuple[int, int]] | None = None,
) -> str:
    """The report as HTML.

    Args:
        records: all of the run's.
        title: the run's name.
        plan: its plan as TOML.
        damaged: lines of the metrics that could not be read.
        stalls: what the workers reported about each other.
        notes: what else is to be said about the records.
        exit_codes: of workers, by rank, as far as they are known.
        judged: of workers, by rank, how many contributions a robust rule has judged, and how many of these rejected.
    """
    workers = tally(records)
    parts = [_head(records, title, notes), _ending(ending(records, stalls, exit_codes)), _cards(records, workers)]
    if sentence := nonfinite(records):
        parts.append(f'<p class="bad">{html.escape(sentence)}</p>')
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in (pace(records), told_pace(records)) if sentence]
    parts += [_timeline(records), _events(records, damaged), _table(records, workers)]
    parts += [_judged(judged or {}), _plots(records, workers), _buckets(records), _plan(records, plan)]
    body = "\n".join(parts)
    return f"{HEAD.format(title=html.escape(title))}{body}\n</body></html>\n"


def _head(records: Sequence[Record], title: str, notes: Sequence[str]) -> str:
    start = next((record for record in records if isinstance(record, StartRecord)), None)
    about = ""
    if start is not None:
        when = datetime.fromtimestamp(start.time_s).strftime("%Y-%m-%d %H:%M")
        about = (
            f"{start.model} on {start.world} worker{'s' if start.world > 1 else ''}, begun {when}; "
            f"offbeat {start.offbeat}, torch {start.torch}"
        )
    lines = "<br>".join(html.escape(line) for line in (about, *notes))
    return f'<h1>{html.escape(title)}</h1><p class="about">{lines}</p>'


def _ending(how: RunOutcome) -> str:
    text = f'<h2>How it ended</h2><p class="ending{"" if how.well else " bad"}">{html.escape(how.text)}</p>'
    if not how.suspects:
        return text
    told = "".join(f"<tr><td>{html.escape(str(suspect))}</td></tr>" for suspect in how.suspects)
    return f'{text}<div class="wide"><table class="events">{told}</table></div>'


def _cards(records: Sequence[Record], workers: Sequence[WorkerTotals]) -> str:
    """Figures of the whole job; what differs between workers is given from the least to the greatest."""
    cards: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for worker in workers for name in worker.values):
        first = next(worker for worker in workers if name in worker.values)
        value = first.values[name]
        shown = "NaN" if value is None else f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4g}"
        cards.append((shown, f"{name}, last of rank {first.rank}"))
    there = [worker for worker in workers if worker.steps]
    if there:
        cards += [
            (span([worker.steps for worker in there], ","), "steps per worker"),
            (span([worker.steps_per_s for worker in there], ".3g"), "steps per second and worker"),
            (f"{sum(worker.samples for worker in there):,}", "samples, all workers"),
            (span([worker.waiting_share for worker in there], ".0%"), "of its time each worker waited"),
            (amount_of_bytes(sum(worker.bytes_sent for worker in there)), "sent by all workers"),
            (_seconds(trained_s(records)), "from the prepared model to the last step"),
        ]
    inner = "".join(f'<div class="card"><b>{html.escape(v)}</b><span>{html.escape(n)}</span></div>' for v, n in cards)
    return f'<div class="cards">{inner}</div>'


def _timeline(records: Sequence[Record]) -> str:
    try:
        from offbeat.report.timeline import draw_timeline

        drawn = draw_timeline(records)
    except ImportError:
        return "<h2>The run over time</h2><p>Not drawn: matplotlib is not installed (pip install 'offbeat[plot]').</p>"
    if not drawn:
        return ""
    label = "What each worker did, throughput, values, and use of machines over time; numbers are those of the events."
    return f'<h2>The run over time</h2><figure role="img" aria-label="{label}">{drawn}</figure>'


def _table(records: Sequence[Record], workers: Sequence[WorkerTotals]) -> str:
    headings = [
        *(
            "worker",
            steps_heading(workers),
            "steps/s",
            "samples/s",
            "compute, ms/step",
            "waiting",
            "waited, s",
            "staleness",
            "sent",
        ),
        *("processor, cores", "memory, most"),
    ]
    staleness = _staleness(records)
    rows = []
    for worker in workers:
        mean, most = staleness.get(worker.rank, (0.0, 0))
        cells = (
            f"rank {worker.rank} on {worker.host}" if worker.host else f"rank {worker.rank}",
            f"{worker.steps:,}",
            f"{worker.steps_per_s:.3g}",
            f"{worker.samples_per_s:,.0f}",
            f"{worker.compute_per_step_s * 1e3:.2f}",
            f"{worker.waiting_share:.0%}",
            f"{worker.waited_s:.2f}",
            f"{mean:.2g} (at most {most})" if most else "none",
            amount_of_bytes(worker.bytes_sent),
            f"{worker.cpu_cores / worker.used:.2g}" if worker.used else "",
            amount_of_bytes(worker.memory_bytes) if worker.used else "",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f'<h2>Workers</h2><div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _judged(judged: Mapping[int, tuple[int, int]]) -> str:
    """The table of who was rejected; "" if nobody was judged."""
    if not judged:
        return ""
    rows = "".join(
        f"<tr><td>rank {rank}</td><td>{count:,}</td><td>{rejected:,}</td></tr>"
        for rank, (count, rejected) in judged.items()
    )
    head = "<tr><th>worker</th><th>contributions judged</th><th>rejected</th></tr>"
    return f'<h2>What the rule rejected</h2><div class="wide"><table>{head}{rows}</table></div>'


def _staleness(records: Sequence[Record]) -> dict[int, tuple[float, int]]:
    """Mean and maximum by rank, in updates."""
    found: dict[int, list[int]] = {}
    for record in records:
        if isinstance(record, StepRecord):
            found.setdefault(record.rank, []).append(record.staleness)
    return {rank: (statistics.fmean(values), max(values)) for rank, values in found.items()}


def _plots(records: Sequence[Record], workers: Sequence[WorkerTotals]) -> str:
    try:
        from offbeat.report import plots

        drawn = plots.draw(records, workers)
    except ImportError:
        return ""  # which is said above
    inner = "".join(f"<figure><figcaption>{html.escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn)
    return f'<h2>Over steps, and where the time goes</h2><div class="plots">{inner}</div>' if drawn else ""


def _buckets(records: Sequence[Record]) -> str:
    try:
        from offbeat.report.buckets import bucket_times, draw_buckets

        times = bucket_times(records)
        drawn = draw_buckets(times) if times else ""
    except ImportError:
        return ""
    if not times:
        return ""
    headings = "bucket", "size", "issued, ms", "arrived, ms", "on its way, ms", "held up the step, ms"
    rows = "".join(
        "<tr>"
        f"<td>{html.escape(one.name)}</td><td>{amount_of_bytes(one.size_bytes) if one.size_bytes else ''}</td>"
        f"<td>{one.issued_s * 1e3:.2f}</td><td>{one.arrived_s * 1e3:.2f}</td>"
        f"<td>{(one.arrived_s - one.issued_s) * 1e3:.2f}</td><td>{one.held_up_s * 1e3:.2f}</td></tr>"
        for one in times
    )
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        f'<h2>Buckets, in the median step</h2><figure>{drawn}</figure><div class="wide">'
        f"<table><tr>{head}</tr>{rows}</table></div>"
    )


def _events(records: Sequence[Record], damaged: int) -> str:
    origin_s = began_s(records)
    rows, number = [], 0
    for event in job_events(records):
        marked = event.what not in UNMARKED
        number += marked
        who = f"reported by {ranks(sorted(event.ranks))}" if event.ranks else "reported by the launcher"
        when = datetime.fromtimestamp(event.time_s).strftime("%Y-%m-%d %H:%M:%S")
        rows.append(
            f"<tr><td>{number if marked else ''}</td>"
            f'<td title="{when}, {who}">{event.time_s - origin_s:.1f} s</td>'
            f"<td>{f'step {event.step:,}' if event.step >= 0 else ''}</td>"
            f"<td{' class=bad' if event.bad else ''}>{html.escape(event.what)}</td>"
            f"<td>{html.escape(event.text)}</td></tr>"
        )
    if damaged:
        text = f"{damaged} lines of metrics.jsonl could not be read"
        rows.append(f"<tr><td></td><td></td><td></td><td>damaged</td><td>{text}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th></th><th>when</th><th>step</th><th>what</th><th></th></tr>"
    return f'<h2>Events</h2><div class="wide"><table class="events">{head}{"".join(rows)}</table></div>'


def _plan(records: Sequence[Record], first: str) -> str:
    """The plan that held at the end, and the one of the beginning if that was another."""
    plans = [record.plan for record in records if isinstance(record, EventRecord) and record.plan]
    plans = [plan for plan, before in zip(plans, ["", *plans], strict=False) if plan != before]
    last = plans[-1] if plans else first
    if not last:
        return ""
    if last == first or not first:
        return f"<h2>Plan</h2><pre>{html.escape(last)}</pre>"
    return (
        f"<h2>Plan at the end</h2><pre>{html.escape(last)}</pre>"
        f"<details><summary>Plan at the beginning</summary><pre>{html.escape(first)}</pre></details>"
    )


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{seconds:.1f} s" if seconds < 120 else f"{minutes:.0f} min {rest:.0f} s"


def amount_of_bytes(count: float) -> str:
    """Format an amount of bytes with the unit that reads well.

    >>> amount_of_bytes(1536000)
    '1.54 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which is shown as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
