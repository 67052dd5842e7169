"""Logged values that became NaN or Inf, and from which step on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.report.formatting import listed, ranks
from offbeat.report.records import LogRecord, StartRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.report.records import Record

_ADVICE = 'Plan(nonfinite="raise") or "skip" would have noticed it in the gradients.'


@dataclass
class _Bad:
    """The times when a value was NaN or Inf.

    Args:
        first: the first step at which it was.
        times: how often it was.
        ranks: on which workers.
        recovered: whether it was finite again on one of them.
    """

    first: int
    times: int = 0
    ranks: set[int] = field(default_factory=set)
    recovered: bool = False

    def __str__(self) -> str:
        if self.recovered:
            often = "once" if self.times == 1 else f"{self.times} times, first"
            return f"NaN or Inf {often} at step {self.first} on {ranks(sorted(self.ranks))}"
        return f"NaN or Inf from step {self.first} on, on {ranks(sorted(self.ranks))}"


def nonfinite(records: Sequence[Record]) -> str:
    """Say which values were NaN or Inf, in a few sentences; "" if none was."""
    found = _search(record for record in records if isinstance(record, LogRecord))
    if not found:
        return ""
    alike: dict[str, list[str]] = {}
    for name, bad in sorted(found.items(), key=lambda item: item[1].recovered):
        alike.setdefault(str(bad), []).append(name)
    sentences = [f"{listed(names)} {'was' if len(names) == 1 else 'were'} {when}." for when, names in alike.items()]
    return " ".join([*sentences, _ADVICE] if _unchecked(records) else sentences)


def _search(logs: Iterable[LogRecord]) -> dict[str, _Bad]:
    found: dict[str, _Bad] = {}
    for log in logs:
        for name, value in log.values.items():
            if value is None:
                bad = found.setdefault(name, _Bad(log.step))
                bad.first = min(bad.first, log.step)
                bad.times += 1
                bad.ranks.add(log.rank)
            elif name in found and log.rank in found[name].ranks:
                found[name].recovered = True
    return found


def _unchecked(records: Sequence[Record]) -> bool:
    """Whether the plan lets NaN and Inf pass."""
    return not any(
        isinstance(r, StartRecord) and ("nonfinite='raise'" in r.plan or "nonfinite='skip'" in r.plan) for r in records
    )
