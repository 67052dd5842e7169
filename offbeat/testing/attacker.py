"""Have this process's worker lie in a real job, as its attacks say (`offbeat.attack_spec`), whatever its script is.

    python -m offbeat.testing.run_with_faults train.py --its --own --options

runs a script with those of the environment (`environment`). A process in which a worker runs calls
`Attacker(attacks, log, rank, world)` itself. Only liars' processes know of it, and plans stay equal between workers.

    before encoding    each contribution as a whole with a server; without one each bucket as it leaves
    after encoding     what is pushed to a server: the numbers of its payload, such as the values that `TopK` chose
    label flip         the labels of `cross_entropy` and `nll_loss`, where they are numbers of classes
    drop               a contribution is announced, and nothing of it is pushed

*A liar is not omniscient.* Attacks that look at honest updates (inner product, "little is enough", min-max, min-sum,
mimic, bit flip) are of who knows those of all honest workers. In a job of processes a liar computes no other worker's
gradient and sees none, so its own last ones, as it would have sent them, are its sample of them: the non-omniscient
attacker of Baruch et al., of one worker. They are of parameters that have moved in between, so they differ a bit more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat.attack_spec import ATTACKS, ATTACKS_LOG, AttackSpec, Forged, When, untold
from offbeat.contribution_hooks import register_contribution_hook
from offbeat.server.encoded_block import EncodedBlock
from offbeat.testing.attacks import (
    BitFlip,
    Distance,
    Gaussian,
    Inflate,
    InnerProduct,
    LittleIsEnough,
    Mimic,
    NotFinite,
    RandomDirection,
    Repeat,
    SignFlip,
    StaleUpdate,
    Zero,
    flipped_labels,
    hiding_deviations,
)
from offbeat.testing.faults.injector import takes_part

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from offbeat.testing.attacks import Attack

_SAMPLE = 8  # of a liar's own updates, which stand for those of honest workers
_PAIR = 2  # of them at least, where it is asked by how much they differ
_LABELLED = ("cross_entropy", "nll_loss")
_MADE: dict[str, Callable[..., Attack]] = {
    "sign": SignFlip,
    "gaussian": Gaussian,
    "direction": RandomDirection,
    "bit-flip": BitFlip,
    "ipm": InnerProduct,
    "alie": LittleIsEnough,
    "min-max": functools.partial(Distance, "max"),
    "min-sum": functools.partial(Distance, "sum"),
    "mimic": Mimic,
    "nan": functools.partial(NotFinite, math.nan),
    "inf": functools.partial(NotFinite, math.inf),
    "zero": Zero,
    "replay": StaleUpdate,
    "repeat": Repeat,
    "inflate": Inflate,
}
_NEEDS = {"bit-flip": 1, "ipm": 1, "alie": _PAIR, "min-max": _PAIR, "min-sum": _PAIR, "mimic": _PAIR}
"""How many updates an attack has to know before it can lie; it is honest until then."""


class Attacker:
    """One worker's attacks. A `ContributionHook`.

    Args:
        attacks: of all workers.
        log: where each lie is written down.
        rank: this worker's.
        world: how many workers there are, for how far they may deviate and still hide.

    Raises:
        ScenarioError: if an attack cannot be.
    """

    def __init__(self, attacks: Sequence[AttackSpec], log: Path, rank: int, world: int) -> None:
        for spec in attacks:
            spec.check()
        self._log, self._rank = log, rank
        self._step = 0  # of the first optimizer that steps in the job
        self._optimizer: torch.optim.Optimizer | None = None
        self._mine = [(number, spec) for number, spec in enumerate(attacks) if rank in spec.workers]
        self._attacks = {number: _made(spec, world) for number, spec in self._mine if spec.kind in _MADE}
        self._known = max([_SAMPLE, *(_least(spec) for _, spec in self._mine)])
        self._samples: dict[Hashable, deque[torch.Tensor]] = {}
        self._first: dict[Hashable, torch.Tensor] = {}  # own update of all
        self._told: set[Forged] = set()
        self._undo: list[Callable[[], None]] = []
        if self._mine:
            self._undo.append(register_contribution_hook(self).remove)
            self._undo.append(register_optimizer_step_post_hook(self._after_step).remove)
        if any(spec.kind == "label-flip" for _, spec in self._mine):
            for name in _LABELLED:
                self._undo.append(functools.partial(setattr, functional, name, getattr(functional, name)))
                setattr(functional, name, self._flipping(getattr(functional, name)))

    def close(self) -> None:
        """Have this process's worker be honest from here on."""
        while self._undo:
            self._undo.pop()()

    # -- a ContributionHook --------------------------------------------------------------------------------------

    def before_encode(self, vectors: Sequence[torch.Tensor], what: Hashable, step: int, share: float) -> None:
        """Put lies in the place of a contribution."""
        for vector, lie in zip(vectors, self._lies(vectors, what, step, share, "before"), strict=True):
            vector.copy_(lie)

    def before_push(self, blocks: Mapping[int, Any], what: Hashable, step: int) -> Mapping[int, Any]:
        """Return other blocks in the place of encoded ones, or none."""
        for _ in self._striking(step, "drop"):
            blocks = {}
        floats = [part for block in blocks.values() for part in _floats(block)]
        lies = iter(self._lies(floats, what, step, 1.0, "after"))
        return {number: _replaced(block, lies) for number, block in blocks.items()}

    # -- what it does --------------------------------------------------------------------------------------------

    def _lies(
        self, vectors: Sequence[torch.Tensor], what: Hashable, step: int, share: float, when: When
    ) -> list[torch.Tensor]:
        """The vectors, or what is told in their place."""
        mine = [(n, spec) for n, spec in self._mine if n in self._attacks and (spec.when or "before") == when]
        if not mine or not vectors:
            return list(vectors)
        sizes = [vector.numel() for vector in vectors]
        own = torch.cat([vector.detach().reshape(-1).to("cpu", torch.float32) for vector in vectors]) / share
        key = (what, when, len(own))
        known = self._samples.setdefault(key, deque(maxlen=self._known))
        known.append(own)
        first_1D = self._first.setdefault(key, own)[None]
        honest_ND = torch.stack(tuple(known)) if any(_least(spec) for _, spec in mine) else own[None]
        lie = own
        for number, spec in mine:
            if len(known) >= _least(spec) and self._strikes(number, spec, step):
                seen_ND = first_1D if spec.kind == "repeat" else honest_ND
                lie = self._attacks[number].forge(lie, seen_ND, self._generator(number, spec, step))
                self._note(number, step)
        if lie is own:
            return list(vectors)
        pieces = zip(vectors, (lie * share).split(sizes), strict=True)
        return [piece.view(vector.shape).to(vector) for vector, piece in pieces]

    def _striking(self, step: int, kind: str) -> Iterator[AttackSpec]:
        """The attacks of a kind that lie in this step, which is noted."""
        for number, spec in self._mine:
            if spec.kind == kind and self._strikes(number, spec, step):
                self._note(number, step)
                yield spec

    def _strikes(self, number: int, spec: AttackSpec, step: int) -> bool:
        if step < spec.from_step:
            return False
        return spec.rate is None or self._draw(number, spec, step).random() < spec.rate

    def _generator(self, number: int, spec: AttackSpec, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._draw(number, spec, step).getrandbits(63))

    def _draw(self, number: int, spec: AttackSpec, step: int) -> random.Random:
        """The same draw whenever it is asked for: buckets of one step leave one after the other."""
        return random.Random(f"{spec.seed}/{number}/{self._rank}/{step}")

    def _flipping(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same loss, of other labels than it is given where a model learns from it."""

        @functools.wraps(loss)
        def flipping(input: torch.Tensor, target: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            learns = torch.is_grad_enabled() and not target.is_floating_point() and takes_part()
            for _ in self._striking(self._step, "label-flip") if learns else ():
                other = flipped_labels(target, input.shape[1 if input.ndim > 1 else 0])
                target = torch.where(target < 0, target, other)  # such as those that are to be ignored
            return loss(input, target, *others, **named)

        return flipping

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self._optimizer is None and takes_part():
            self._optimizer = optimizer
        self._step += optimizer is self._optimizer

    def _note(self, number: int, step: int) -> None:
        forged = Forged(number=number, worker=self._rank, step=step)
        if forged not in self._told:  # another bucket of the same contribution
            self._told.add(forged)
            with self._log.open("ab", buffering=0) as log:
                log.write(msgspec.json.encode(forged) + b"\n")


def environment(attacks: Sequence[AttackSpec], log: Path) -> dict[str, str]:
    """Variables for workers started as `offbeat.testing.run_with_faults`; those that do not lie need none."""
    return {ATTACKS: msgspec.json.encode(list(attacks)).decode(), ATTACKS_LOG: str(log)}


def from_environment() -> Attacker | None:
    """The attacks that the environment asks for, if it does."""
    if ATTACKS not in os.environ:
        return None
    attacks = msgspec.json.decode(os.environ[ATTACKS], type=list[AttackSpec])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return Attacker(attacks, Path(os.environ[ATTACKS_LOG]), rank, world)


def assert_forged(attacks: Sequence[AttackSpec], log: Path) -> None:
    """Fail if a liar has told no lie.

    Raises:
        AssertionError: that names who told none.
    """
    missing = [f"{spec.words}: worker {worker}" for spec, worker in untold(attacks, log)]
    assert not missing, f"never lied: {'; '.join(missing)}"


def _made(spec: AttackSpec, world: int) -> Attack:
    amounts: dict[str, Any] = dict(spec.amounts)
    if spec.kind == "alie":
        amounts.setdefault("z", hiding_deviations(world, len(spec.workers)))
    return _MADE[spec.kind](**amounts)


def _least(spec: AttackSpec) -> int:
    """The number of updates that it has to know; 0 if it looks at none but the own."""
    return 1 + int(spec.amounts["age"]) if spec.kind == "replay" else _NEEDS.get(spec.kind, 0)


def _floats(block: Any) -> Iterator[torch.Tensor]:
    """The vectors of floats of an encoded block: it is one, or has several tensors."""
    if isinstance(block, torch.Tensor):
        if block.is_floating_point():
            yield block
    elif isinstance(block, EncodedBlock):
        yield from (one for one in block.tensors if one.is_floating_point())


def _replaced(block: Any, lies: Iterator[torch.Tensor]) -> Any:
    """The same block with the next lies in the place of its vectors of floats."""
    if isinstance(block, EncodedBlock):
        return dataclasses.replace(block, tensors=tuple(_replaced(one, lies) for one in block.tensors))
    return next(lies) if block.is_floating_point() else block
