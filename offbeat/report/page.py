"""report.html: one self-contained page about a run. It loads nothing and asks nobody."""

from __future__ import annotations

import html
import statistics
from datetime import datetime
from typing import TYPE_CHECKING

from offbeat.report.ending import ending
from offbeat.report.nonfinite import nonfinite
from offbeat.report.records import End, Event, Start
from offbeat.report.tally import pace, tally, told_pace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.report.ending import Ending, Stall
    from offbeat.report.records import Record
    from offbeat.report.tally import Tally

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
table.events td { text-align: left; vertical-align: top; } table.events td:last-child { white-space: pre-wrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto; }
.bad { color: #d55e00; } .ending { margin: 0 0 .6rem; }
"""


def page(
    records: Sequence[Record],
    *,
    title: str,
    plan: str = "",
    damaged: int = 0,
    stalls: Sequence[Stall] = (),
    notes: Sequence[str] = (),
) -> str:
    """The report as HTML.

    Args:
        records: all of the run's.
        title: the run's name.
        plan: its plan as TOML.
        damaged: lines of the metrics that could not be read.
        stalls: what the workers reported about each other.
        notes: what else is to be said about the records.
    """
    workers = tally(records)
    parts = [_head(records, title, notes), _ending(ending(records, stalls)), _cards(records, workers)]
    if sentence := nonfinite(records):
        parts.append(f'<p class="bad">{html.escape(sentence)}</p>')
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in (pace(records), told_pace(records)) if sentence]
    parts += [_table(workers), _plots(records, workers), _events(records, damaged)]
    if plan:
        parts.append(f"<h2>Plan</h2><pre>{html.escape(plan)}</pre>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _head(records: Sequence[Record], title: str, notes: Sequence[str]) -> str:
    start = next((record for record in records if isinstance(record, Start)), None)
    about = ""
    if start is not None:
        when = datetime.fromtimestamp(start.time_s).strftime("%Y-%m-%d %H:%M")
        about = (
            f"{start.model} on {start.world} worker{'s' if start.world > 1 else ''}, begun {when}; "
            f"offbeat {start.offbeat}, torch {start.torch}"
        )
    lines = "<br>".join(html.escape(line) for line in (about, *notes))
    return f'<h1>{html.escape(title)}</h1><p class="about">{lines}</p>'


def _ending(how: Ending) -> str:
    text = f'<h2>How it ended</h2><p class="ending{"" if how.well else " bad"}">{html.escape(how.text)}</p>'
    if not how.suspects:
        return text
    told = "".join(f"<tr><td>{html.escape(str(suspect))}</td></tr>" for suspect in how.suspects)
    return f'{text}<div class="wide"><table class="events">{told}</table></div>'


def _cards(records: Sequence[Record], workers: Sequence[Tally]) -> str:
    cards: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for worker in workers for name in worker.values):
        value = next(worker.values[name] for worker in workers if name in worker.values)
        shown = "NaN" if value is None else f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4g}"
        cards.append((shown, f"{name}, last"))
    if any(worker.steps for worker in workers):
        slowest = min(worker.steps_per_s for worker in workers if worker.steps)
        waiting = statistics.fmean(worker.waiting_share for worker in workers if worker.steps)
        last_s = max(record.time_s for record in records)
        cards += [
            (f"{max(worker.steps for worker in workers):,}", "steps"),
            (f"{slowest:.3g}", "steps per second"),
            (f"{sum(worker.samples_per_s for worker in workers):,.0f}", "samples per second, all workers"),
            (f"{waiting:.0%}", "of all time spent waiting"),
            (_bytes(sum(worker.bytes_sent for worker in workers)), "sent by all workers"),
            (f"{last_s - min(record.time_s for record in records):.1f} s", "from first to last record"),
        ]
    inner = "".join(f'<div class="card"><b>{html.escape(v)}</b><span>{html.escape(n)}</span></div>' for v, n in cards)
    return f'<div class="cards">{inner}</div>'


def _table(workers: Sequence[Tally]) -> str:
    headings = "worker", "steps", "steps/s", "samples/s", "compute, ms/step", "waiting", "waited, s", "sent"
    rows = []
    for worker in workers:
        compute_ms = worker.compute_per_step_s * 1e3
        cells = (
            f"rank {worker.rank} on {worker.host}" if worker.host else f"rank {worker.rank}",
            f"{worker.steps:,}",
            f"{worker.steps_per_s:.3g}",
            f"{worker.samples_per_s:,.0f}",
            f"{compute_ms:.2f}",
            f"{worker.waiting_share:.0%}",
            f"{worker.wait_s:.2f}",
            _bytes(worker.bytes_sent),
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f'<h2>Workers</h2><div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _plots(records: Sequence[Record], workers: Sequence[Tally]) -> str:
    try:
        from offbeat.report import plots

        drawn = plots.draw(records, workers)
    except ImportError:
        return "<h2>Plots</h2><p>There are none: matplotlib is not installed (pip install 'offbeat[plot]').</p>"
    inner = "".join(f"<figure><figcaption>{html.escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn)
    return f'<h2>Plots</h2><div class="plots">{inner}</div>'


def _events(records: Sequence[Record], damaged: int) -> str:
    rows = [
        f"<tr><td>rank {record.rank}</td><td>{html.escape(record.what)}</td><td>{html.escape(record.text)}</td></tr>"
        for record in records
        if isinstance(record, Event)
    ]
    rows += [
        f'<tr><td>rank {record.rank}</td><td class="bad">ended</td><td>{html.escape(record.error)}</td></tr>'
        for record in records
        if isinstance(record, End) and record.error
    ]
    if damaged:
        rows.append(f"<tr><td></td><td>damaged</td><td>{damaged} lines of metrics.jsonl could not be read</td></tr>")
    if not rows:
        return ""
    return f'<h2>Events</h2><div class="wide"><table class="events">{"".join(rows)}</table></div>'


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which is shown as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
