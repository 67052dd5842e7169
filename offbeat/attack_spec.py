"""Descriptions of attacks: which workers lie, how, and how often. `offbeat.testing.attacker` makes it happen.

A liar is a worker of the job like any other: it trains, announces, and sends a lie in place of what it has computed.
What lies there are is said in `offbeat.testing.attacks`. Each is written down when it is told, so that whoever asked
for it can see that it was: an attack that never fires proves nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

AttackKind = Literal[
    "sign", "gaussian", "direction", "bit-flip", "label-flip", "ipm", "alie", "min-max", "min-sum", "mimic", "nan",
    "inf", "zero", "replay", "repeat", "inflate", "drop",
]  # fmt: skip
When = Literal["before", "after"]
ATTACKS, ATTACKS_LOG = "OFFBEAT_ATTACKS", "OFFBEAT_ATTACKS_LOG"
"""Variables: the attacks of all workers as JSON; and the file where each lie is written down."""
_DEFAULTS: dict[str, dict[str, float]] = {
    "sign": {"scale": 6.0},
    "gaussian": {"std": 1.0},
    "direction": {"scale": 8.0},
    "ipm": {"epsilon": 0.5},
    "replay": {"age": 5},
    "inflate": {"scale": 1000.0},
}
_AMOUNTS = ("scale", "std", "epsilon", "z", "age")
OF_SENDING = ("label-flip", "drop")
"""Kinds that change no vector: the labels that it is computed from, or nothing that is sent."""
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class AttackSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attack.

    Args:
        workers: ranks of those that lie.
        kind: what they send, see `offbeat.testing.attacks`; with "drop" they announce, and never send.
        scale: of "sign", "direction" and "inflate": how many times as large.
        std: of "gaussian": its standard deviation.
        epsilon: of "ipm": how many times the mean, turned round.
        z: of "alie": how many standard deviations; as many as hide among the job's workers if None.
        age: of "replay": so many contributions ago.
        rate: the part of each liar's steps in which it lies, drawn for each worker and step; None for all.
        when: whether the lie is encoded like any contribution, or is told in what is encoded; "before" if None.
        from_step: the first step in which they lie, of the worker's script.
        seed: of what is drawn.

    >>> AttackSpec(workers=[8, 9], kind="sign").words
    'sign (scale 6) of workers 8 and 9'
    """

    workers: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=4096)]], msgspec.Meta(min_length=1)]
    kind: AttackKind
    scale: Amount | None = None
    std: Amount | None = None
    epsilon: Amount | None = None
    z: Amount | None = None
    age: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    rate: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    when: When | None = None
    from_step: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int = 0

    @property
    def amounts(self) -> dict[str, float]:
        """The numbers that say how strong it is, with their defaults."""
        given = {name: getattr(self, name) for name in _AMOUNTS if getattr(self, name) is not None}
        return {**_DEFAULTS.get(self.kind, {}), **given}

    @property
    def words(self) -> str:
        """The attack in words: its kind, its strength and who it is of."""
        strength = ", ".join(f"{name} {value:g}" for name, value in self.amounts.items())
        first, last = self.workers[:-1], self.workers[-1]
        who = f"workers {', '.join(map(str, first))} and {last}" if first else f"worker {last}"
        often = "" if self.rate is None else f" in {100 * self.rate:g} % of the steps"
        encoded = ", encoded" if self.when == "after" else ""
        return f"{self.kind}{f' ({strength})' if strength else ''}{encoded} of {who}{often}"

    def check(self, path: str = "attack") -> None:
        """Refuse what cannot be.

        Args:
            path: of this attack, where it was written.

        Raises:
            ScenarioError: if this kind has no such strength, or cannot be told at that moment.
        """
        takes = _takes(self.kind)
        for name in _AMOUNTS:
            if getattr(self, name) is not None and name not in takes:
                has = f"{' and '.join(takes)} alone" if takes else "no strength"
                raise ScenarioError(
                    f"Cannot give {self.kind!r} the {name} {getattr(self, name):g}: it has {has}. Leave {name} out "
                    f"({path}.{name})."
                )
        if self.when is not None and self.kind in OF_SENDING:
            why = "labels are flipped" if self.kind == "label-flip" else "nothing is sent"
            raise ScenarioError(
                f"Cannot have {self.kind!r} {self.when} encoding: {why}, whatever is encoded. Leave when out "
                f"({path}.when)."
            )
        if len(set(self.workers)) < len(self.workers):
            twice = next(worker for worker, count in Counter(self.workers).items() if count > 1)
            raise ScenarioError(f"Cannot have worker {twice} lie twice: name each once ({path}.workers).")


def _takes(kind: str) -> tuple[str, ...]:
    return ("z",) if kind == "alie" else tuple(_DEFAULTS.get(kind, ()))


class Forged(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log: a lie that was told.

    Args:
        number: which of the attacks that were asked for.
        worker: who told it.
        step: in which of its steps.
    """

    number: int
    worker: int
    step: int


def read_forged(log: Path) -> list[Forged]:
    """Read which lies have been told so far; none if there is no file."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    return [msgspec.json.decode(line, type=Forged) for line in lines if line.endswith(b"\n")]


def untold(attacks: Sequence[AttackSpec], log: Path) -> list[tuple[AttackSpec, int]]:
    """List the attacks, and their workers, that have not lied."""
    told = {(one.number, one.worker) for one in read_forged(log)}
    return [(spec, worker) for i, spec in enumerate(attacks) for worker in spec.workers if (i, worker) not in told]
