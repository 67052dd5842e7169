"""`offbeat verify-run`: does what a run recorded keep what offbeat promises?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from offbeat.audit import AuditResult

Places = Annotated[
    list[Path], typer.Argument(help="Folders of runs, or of histories, or single files.", show_default=False)
]
Another = Annotated[
    Path | None, typer.Option(help="Another run of the same plan: after which step do the parameters differ first?")
]


def verify_run(
    paths: Places,
    against: Another = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove from its history that a run kept its promises.

    All workers had equal parameters, each contribution was used once, and nobody was further ahead than allowed.
    `offbeat run --history` records one. What was decided is decided again by the same policies, so that a server that
    went wrong shows, and a history that was changed. With --against another run of the same plan has to have the same
    parameters after each step. The exit code is 1 if a law is broken or no worker has made a step, and 2 if something
    cannot be read.
    """
    from offbeat.audit import compare, verify
    from offbeat.errors import HistoryError

    result = verify(*paths)
    if against is not None:
        if len(paths) > 1:
            raise HistoryError(f"Cannot compare {len(paths)} runs with {against} at once: name one.")
        compare(paths[0], against, result)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_plain(result)), indent=1).decode())
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in _lines(result):
            console.print(line, markup=False)
    raise typer.Exit(0 if result.holds and not _is_empty(result) else 1)


def _is_empty(result: AuditResult) -> bool:
    """Whether there is nothing to check: no worker has made a step."""
    return not (result.checked or result.hashes or result.violations)


def _plain(result: AuditResult) -> dict[str, object]:
    table = dataclasses.asdict(result)
    return {"holds": result.holds, **table, "checked": sorted(result.checked)}


def _lines(result: AuditResult) -> list[str]:
    """One screen."""
    from offbeat.audit import LAWS

    lines = [_looked_at(result), ""]
    for law, name in LAWS.items():
        count = sum(one.law == law for one in result.violations)
        state = f"BROKEN ({count} times)" if count else "holds" if law in result.checked else "not checked"
        lines.append(f"law {law}  {name:24} {state:12}  {_counts(law, result)}".rstrip())
    for law in LAWS:
        if (broken := result.first(law)) is not None:
            lines += ["", f"law {law}: {broken.what}", *(f"    {line}" for line in broken.story)]
    if result.by_rank:
        rows = [(str(rank), str(one.judged), str(one.rejected)) for rank, one in result.by_rank.items()]
        headings = ("rank", "judged", "rejected")
        lines += ["", *("  ".join(map(str.rjust, row, map(len, headings))) for row in (headings, *rows))]
    if _is_empty(result):
        lines += ["", "Nothing was checked: no worker has made a step."]
    if result.notes:
        lines += ["", *dict.fromkeys(result.notes)]
    return lines


def _looked_at(result: AuditResult) -> str:
    parts = [
        _some(result.files, "file"),
        _some(result.jobs, "stretch", "stretches") if result.borders else _some(result.jobs, "job"),
    ]
    if result.lives:
        parts += [_some(result.lives, "life", "lives") + " of a server", _some(result.events, "event")]
        parts += [_some(result.updates, "update"), _some(result.swaps, "swap") + _by(result.swapped_by)]
    return ", ".join(parts)


def _counts(law: int, result: AuditResult) -> str:
    if law == 1:
        told = [f"{result.compared} of {result.hashes} hashes have others to be equal to"] if result.hashes else []
        if result.borders:
            told.append(f"equal on both sides of {_some(result.borders, 'border')} between stretches")
        return "; ".join(told)
    if law == 5:
        return f"{_some(result.steps_against, 'step')} equal" if result.steps_against else ""
    if law not in result.checked:
        return ""
    if law == 2:
        lost = f"{result.lost} lost ({result.lost_samples:g} samples)"
        if result.in_part:
            lost += f", of them {result.in_part} in part"
        text = f"{result.applied} applied, {result.dropped} dropped, {lost}, {result.pending} pending"
        if result.references:
            text += f", {_some(result.references, 'reference')} of validators"
        if result.unrecorded:
            text += f"; {result.unrecorded} known from workers alone"
        if result.judged:
            text += f"; {_some(result.judged, 'update')} judged, {_some(result.rejected, 'contribution')} rejected"
        return f"{text}; replaced {_some(result.replaced, 'time')} by a checkpoint" if result.replaced else text
    mean = result.staleness / result.applied if result.applied else 0.0
    ahead = "no bound" if result.bound is None else f"at most {result.lead} ahead of {result.bound} allowed"
    return (
        f"{_some(result.releases, 'release')}, {ahead}; {result.replayed} decisions replayed; staleness "
        f"{mean:.2f}, at most {result.stalest}"
    )


def _by(swapped: list[str]) -> str:
    """Say who requested the swaps."""
    times = Counter(swapped)
    return f" (requested by {', '.join(f'{who}: {count}' for who, count in times.items())})" if times else ""


def _some(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or what + 's'}"
