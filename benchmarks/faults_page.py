"""Writes docs/faults.md from benchmarks/results/faults.json: `python -m benchmarks.faults_page`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cell import WORKERS
from benchmarks.faults import CASES, POLICIES, RESULT, STEP, Cell, Result, applies, read, why_not, why_not_elastic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.fault_spec import Target

PAGE = Path(__file__).resolve().parent.parent / "docs/faults.md"
_HEAD = """# What survives what

Written by `make faults` from [faults.json](../benchmarks/results/faults.json), where stands what was said and counted.
Each cell is a job of its own: {workers} workers train on real digits with a parameter server that keeps snapshots, as
under `offbeat run --servers`, or without one (elastic: `Elastic()`, with `BSP()`); a fault strikes worker 1, or its
server, at step {step} (`offbeat.testing.faults`); then training goes on until a second after it. "Long" is twice the
timeout of {timeout_s:g} s, "short" half of it; "twice" is once more 6 steps later. A fault that did not fire would be
an error. With "-early" gradients are pushed while backward computes (`scheduling=Prophet()`), which they are from step
7 on: who is killed has pushed blocks of a contribution that it has not announced.

* **survived**: every worker came to the end that could; those that are killed, raise, or leave are not to. The seconds
  are how long it took until somebody else named the culprit, and are left out where nobody did.
* **stopped**: a worker did not come to the end; below stands what the user sees.
* What became of the contributions three witnesses say (`benchmarks/books.py`). The job's history, which is audited as
  `offbeat verify-run` does: no law is broken. The parameters, in which each contribution leaves a mark: each is there
  with the share that the history gives it, and nothing else is; without a server all marks of a step add up to 1. What
  was said: of each that does not count it was said that it does not, and of no other; the server counts as many.
  Unless the cell says so.
* "Lost n" and "dropped n" are steps of workers that came to the end which do not count, and were said not to: lost with
  a killed server, or because they had arrived in part, or not at all, when their worker was lost, or left out because
  they were NaN or infinite, with `nonfinite="skip"`; dropped because they were outdated, or computed from samples that
  others were given meanwhile.
* **not run**: no such job is in the file. "-": there can be none; [why](#what-does-not-apply) stands at the end.
* At the end all replicas are equal, and no worker was further ahead than its policy allows, unless the cell says so.
"""
_TITLES: dict[Target, str] = {
    "worker": "A worker, or its links",
    "server": "A shard of the server (of two, the one that does not coordinate)",
    "coordinator": "The shard that coordinates",
}


def page(result: Result) -> str:
    """The page as Markdown."""
    hardware = f"{result.hardware['cores']} cores, {result.hardware['processor']}"
    head = _HEAD.format(workers=WORKERS, step=STEP, timeout_s=result.timeout_s)
    how = f" {result.conditions}" if result.conditions else ""
    measured = f"\nMeasured on {result.date} with torch {result.versions['torch']} on {hardware}.{how}\n"
    parts = [head, measured, *(_section(result, target) for target in _TITLES)]
    return "".join([*parts, _does_not_apply(), _seen(result.cells)])


def _section(result: Result, target: Target) -> str:
    cells = {one.key: one for one in result.cells}
    lines = [f"\n## {_TITLES[target]}\n", f"| | {' | '.join(POLICIES)} |", "| --- |" + " --- |" * len(POLICIES)]
    for case in CASES:
        if case.target == target:
            row = [_shown(cells.get((policy, target, case.name)), applies(policy, case)) for policy in POLICIES]
            lines.append(f"| {case.name} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _shown(one: Cell | None, applies: bool) -> str:
    if one is None:
        return "not run" if applies else "-"
    parts = [one.outcome if one.outcome == "survived" else f"**{one.outcome}**"]
    if one.detection_s is not None:
        parts.append(f"{one.detection_s:.1f} s")
    if one.books is not None:
        parts += [f"{words} {count}" for words, count in _known(one) if count]
    return ", ".join(parts) + "".join(f"; **{trouble}**" for trouble in one.troubles if trouble != one.outcome)


def _known(one: Cell) -> list[tuple[str, int]]:
    assert one.books is not None
    return [("lost", one.books.lost), ("dropped", one.books.dropped)]


def _does_not_apply() -> str:
    lines = ["\n## What does not apply\n", "No cell stands above for these on a server:\n"]
    lines += _reasons(lambda kind: why_not(kind, "server"))
    lines += ["\nAnd none for these without a server (elastic), nor for any fault of a server:\n"]
    lines += _reasons(why_not_elastic)
    lines += [
        "\nNor is the server killed between two phases with local-sgd: the three witnesses count as many steps in each "
        "of its contributions, and behind the swap there would be one."
    ]
    return "\n".join(lines) + "\n"


def _reasons(why: Callable[[str], str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for kind in dict.fromkeys(case.kind for case in CASES if case.target == "worker"):
        if reason := why(kind):
            reasons.setdefault(reason, []).append(f"`{kind}`")
    return [f"* {', '.join(kinds)}: {reason}." for reason, kinds in reasons.items()]


def _seen(cells: Iterable[Cell]) -> str:
    """What users see where a job did not survive, or a law is broken."""
    lines = ["\n## What the user sees\n"]
    for one in cells:
        if one.outcome != "survived" or one.troubles:
            lines.append(f"* {one.policy}, {one.target}, {one.fault} ({'; '.join([one.outcome, *one.troubles])}):\n")
            lines += [f"      {text}" for text in one.said or ["(nothing)"]]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n" if len(lines) > 1 else ""


def write_page(result: Result) -> None:
    """Write it."""
    PAGE.write_text(page(result))


if __name__ == "__main__":
    write_page(read(RESULT))
