"""Writes docs/compatibility.md by trying plans: `python -m tests.docs.compatibility`."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.codec import GRBS, ErrorFeedback, ErrorReset, RandomK
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer, ProcessGroup
from offbeat.plan import _KINDS, Plan
from offbeat.privacy import GaussianMechanism
from offbeat.robust import FLTrust, Rule, ZenoPS
from offbeat.short_name import short_name
from offbeat.sync import BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, RoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE = Path(__file__).parent.parent.parent / "docs" / "compatibility.md"
_HEAD = """# What goes with what

Written by `make docs` from the parts themselves: what each promises, and what becomes of a `Plan` in which two of them
meet. A number is that of a note below the table: why such a plan is refused when it is made, and what to do. What takes
more than two parts, or the number of workers, is told then, too; `offbeat plan show` makes a plan and starts nothing.
"""
_MOST_NAMES = 3
# Of parts that have to be told something, or say nothing of interest by their defaults.
_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "DSSP": (DSSP(1, 3),),
    "ErrorFeedback": (ErrorFeedback(GRBS(32)),),
    "ErrorReset": (ErrorReset(every=8),),
    "Hybrid": (Hybrid(BSP(), RoundRobin(), groups=2),),
    "KSync": (KSync(2),),
    "LocalSGD": (LocalSGD(8), LocalSGD(8, delay=1)),
    "RandomK": (RandomK(), RandomK(support="private")),
    "SSP": (SSP(4),),
}


def parts(room: str) -> list[Any]:
    """An example of each part of a room, by name."""
    return [part for name, kind in sorted(_KINDS[room].items()) for part in _EXAMPLES.get(name) or (made(kind),)]


def made(kind: Any) -> Any:
    """A part with its defaults, and 1 for what has none, such as the number of liars."""
    return kind(**{f.name: 1 for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING})


def refusal(**chosen: Any) -> str:
    """Why a plan of these parts cannot be, and what to do; "" if it can."""
    try:
        Plan(**chosen)
    except PlanError as error:
        return re.sub(r" - at `plan\..*`\.$", ".", str(error))
    return ""


def table(
    rows: Sequence[Any], columns: Sequence[Any], plan_of: Callable[[Any, Any], dict[str, Any]], corner: str
) -> str:
    """A table of pairs, and its notes: the refusals, without the parts that they begin with."""
    notes: dict[str, int] = {}
    lines = [[corner, *(f"`{short_name(column)}`" for column in columns)], ["---"] * (len(columns) + 1)]
    for row in rows:
        cells = [refusal(**plan_of(row, column)) for column in columns]
        reasons = [_reason(cell, column) for cell, column in zip(cells, columns, strict=True)]
        lines.append(
            [f"`{_name(row)}`", *("ok" if not one else f"[{notes.setdefault(one, len(notes) + 1)}]" for one in reasons)]
        )
    told = "".join(f"{number}. {_sentence(note)}\n" for note, number in notes.items())
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (f"\n{told}" if told else "")


def _name(part: Any) -> str:
    """A part as it is written, with what is not its default."""
    name = short_name(part)
    return name if name != f"{type(part).__name__}()" or part == made(type(part)) else repr(part)


def _reason(text: str, column: Any) -> str:
    """A refusal without the parts that it begins with, and that of the column: the same for all that it holds of."""
    reason = (text.partition(": ")[2] or text).replace(short_name(column), "it")
    for part in (ParameterServer(), *_EXAMPLES["ErrorReset"]):
        reason = reason.replace(repr(part), short_name(part))
    return reason


def _sentence(note: str) -> str:
    return note[0].upper() + note[1:]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _listed(lines: Sequence[Sequence[object]]) -> str:
    head, *rest = lines
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in [head, ["---"] * len(head), *rest])


def codecs() -> str:
    """The codecs' promises."""
    head = "codec", "is linear", "elements", "contraction", "unbiased", "rounds", "keeps the norm", "state in common"
    lines: list[Sequence[object]] = [head]
    for codec in parts("codec"):
        one = codec.promises
        share = "none" if one.contraction is None else f"{one.contraction:.3g}"
        lines.append(
            (
                f"`{_name(codec)}`", _yes(one.linear), one.support, share, _yes(one.variance is not None), one.rounds,
                _yes(one.keeps_norm), _yes(one.keeps_shared_state),
            )
        )  # fmt: skip
    return _listed(lines)


def rules() -> str:
    """What the rules need, and bear."""
    lines: list[Sequence[object]] = [("rule", "compares whole contributions", "needs a reference", "counts samples",
                                      "contributions at least", "bears, of 10")]  # fmt: skip
    lines += [
        (f"`{_name(rule)}`", _yes(rule.needs_gram), _yes(rule.needs_reference), _yes(rule.is_weighted), rule.least(),
         rule.most_faulty(10))
        for rule in parts("rule")
    ]  # fmt: skip
    return _listed(lines)


def fabrics() -> str:
    """What the fabrics offer."""
    lines: list[Sequence[object]] = [
        ("fabric", "carries", "holds what all share", "goes on without a lost worker", "sums of some workers")
    ]
    for fabric in parts("fabric"):
        offers = fabric.offers
        carries = " and ".join(sorted(f"`{kind.__name__}`" for kind in offers.carries))
        is_elastic = offers.elastic or offers.holds != "workers"
        lines.append((f"`{_name(fabric)}`", carries, offers.holds, _yes(is_elastic), _yes(offers.partial)))
    return _listed(lines)


def policies() -> str:
    """What the policies say of themselves."""
    lines: list[Sequence[object]] = [("policy", "all in each update", "steps ahead at most", "may drop", "sends")]
    for policy in parts("sync"):
        bound = "any" if policy.bound is None else policy.bound
        sends = {policy.contributes(step) for step in range(100)} - {None}
        kinds = " or ".join(sorted(map(str, sends)))
        lines.append((f"`{_name(policy)}`", _yes(policy.replicated), bound, _yes(policy.drops), kinds))
    return _listed(lines)


def page() -> str:
    """The page as Markdown."""
    fabric, server, group = parts("fabric"), ParameterServer(), ProcessGroup()
    codec, sync, rule, scheduling = (parts(room) for room in ("codec", "sync", "rule", "scheduling"))
    alike = [policy for policy in sync if policy.replicated]
    sections = [
        ("What codecs promise", codecs()),
        ("What rules need and bear", rules()),
        ("What fabrics offer", fabrics()),
        ("What policies say", policies()),
        ("Codec and fabric, in step", table(codec, fabric, lambda c, f: {"codec": c, "fabric": f}, "`BSP()`")),
        ("Policy and fabric", table(sync, fabric, lambda p, f: {"sync": p, "fabric": f}, "`Dense()`")),
        (
            "Codec and policy, without a server",
            table(codec, alike, lambda c, p: {"codec": c, "sync": p, "fabric": group}, "`ProcessGroup()`"),
        ),
        (
            "Codec and policy, over a server",
            table(codec, sync, lambda c, p: {"codec": c, "sync": p, "fabric": server}, "`ParameterServer()`"),
        ),
        ("Rule and fabric, in step", table(rule, fabric, lambda r, f: {"rule": r, "fabric": f}, "`BSP()`")),
        (
            "Rule and policy, over a server",
            table(rule, sync, lambda r, p: {"rule": r, "sync": p, "fabric": server}, "`ParameterServer()`"),
        ),
        (
            "Rule and codec, over a server, in step",
            table(rule, codec, lambda r, c: {"rule": r, "codec": c, "fabric": server}, "`ParameterServer()`"),
        ),
        (
            "Codec and privacy, over a server, with and without a validator",
            table(
                codec,
                [GaussianMechanism(), ZenoPS(), FLTrust()],
                lambda c, v: {
                    "codec": c,
                    "sync": LocalSGD(8) if c.promises.offset and c != ErrorReset(every=8) else BSP(),
                    "fabric": server,
                    "privacy": GaussianMechanism(),
                    "validator": v if isinstance(v, Rule) else None,
                },
                "`ParameterServer()`",
            ),
        ),
        (
            "Scheduler and codec, without a server",
            table(scheduling, codec, lambda s, c: {"scheduling": s, "codec": c}, "`ProcessGroup()`"),
        ),
        (
            "Scheduler and policy, over a server",
            table(scheduling, sync, lambda s, p: {"scheduling": s, "sync": p, "fabric": server}, "`ParameterServer()`"),
        ),
    ]
    return _HEAD + "".join(f"\n## {title}\n\n{text}" for title, text in sections)


if __name__ == "__main__":
    PAGE.write_text(page())
