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
    parameters after each step. The exit code is 1 if a law is broken, and 2 if something cannot be read.
    """
    from offbeat.audit import compare, verify
    from offbeat.errors import HistoryError

    verdict = verify(*paths)
    if against is not None:
        if len(paths) > 1:
            raise HistoryError(f"Cannot compare {len(paths)} runs with {against} at once: name one.")
        compare(paths[0], against, verdict)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_plain(verdict)), indent=1).decode())
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in _lines(verdict):
            console.print(line, markup=False)
    raise typer.Exit(0 if verdict.holds else 1)


def _plain(verdict: AuditResult) -> dict[str, object]:
    table = dataclasses.asdict(verdict)
    return {"holds": verdict.holds, **table, "checked": sorted(verdict.checked)}


def _lines(verdict: AuditResult) -> list[str]:
    """One screen."""
    from offbeat.audit import LAWS

    lines = [_looked_at(verdict), ""]
    for law, name in LAWS.items():
        count = sum(one.law == law for one in verdict.violations)
        state = f"BROKEN ({count} times)" if count else "holds" if law in verdict.checked else "not checked"
        lines.append(f"law {law}  {name:24} {state:12}  {_counts(law, verdict)}".rstrip())
    for law in LAWS:
        if (broken := verdict.first(law)) is not None:
            lines += ["", f"law {law}: {broken.what}", *(f"    {line}" for line in broken.story)]
    if verdict.notes:
        lines += ["", *dict.fromkeys(verdict.notes)]
    return lines


def _looked_at(verdict: AuditResult) -> str:
    parts = [
        _some(verdict.files, "file"),
        _some(verdict.jobs, "stretch", "stretches") if verdict.borders else _some(verdict.jobs, "job"),
    ]
    if verdict.lives:
        parts += [_some(verdict.lives, "life", "lives") + " of a server", _some(verdict.events, "event")]
        parts += [_some(verdict.updates, "update"), _some(verdict.swaps, "swap") + _by(verdict.swapped_by)]
    return ", ".join(parts)


def _counts(law: int, verdict: AuditResult) -> str:
    if law == 1:
        told = [f"{verdict.compared} of {verdict.hashes} hashes have others to be equal to"] if verdict.hashes else []
        if verdict.borders:
            told.append(f"equal on both sides of {_some(verdict.borders, 'border')} between stretches")
        return "; ".join(told)
    if law == 5:
        return f"{_some(verdict.steps_against, 'step')} equal" if verdict.steps_against else ""
    if law not in verdict.checked:
        return ""
    if law == 2:
        lost = f"{verdict.lost} lost ({verdict.lost_samples:g} samples)"
        if verdict.in_part:
            lost += f", of them {verdict.in_part} in part"
        text = f"{verdict.applied} applied, {verdict.dropped} dropped, {lost}, {verdict.pending} pending"
        if verdict.unrecorded:
            text += f"; {verdict.unrecorded} known from workers alone"
        return f"{text}; replaced {_some(verdict.replaced, 'time')} by a checkpoint" if verdict.replaced else text
    mean = verdict.staleness / verdict.applied if verdict.applied else 0.0
    ahead = "no bound" if verdict.bound is None else f"at most {verdict.lead} ahead of {verdict.bound} allowed"
    return (
        f"{_some(verdict.releases, 'release')}, {ahead}; {verdict.replayed} decisions replayed; staleness "
        f"{mean:.2f}, at most {verdict.stalest}"
    )


def _by(swapped: list[str]) -> str:
    """Say who requested the swaps."""
    times = Counter(swapped)
    return f" (requested by {', '.join(f'{who}: {count}' for who, count in times.items())})" if times else ""


def _some(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or what + 's'}"
