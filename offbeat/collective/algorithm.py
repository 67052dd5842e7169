"""The noun: a collective as data. Which rank sends which chunk of a vector to whom, and what becomes of it there.

A vector is cut into chunks at exact places. At the start each chunk is at its `source`, or every rank has a
contribution of its own to it; in the end it is at its `target`, or at every rank. That says which collective it is:

    source  target
    all     all      all-reduce                 one     all      broadcast, all-gather
    all     one      reduce, reduce-scatter     one     one      scatter, gather, all-to-all

An operation sends what its source has of a chunk, and at the destination that is added to what is there, or takes its
place. What a rank has of a chunk is its own, and all that has come so far; operations come in the order of the list, so
that sums are made in the same order each time, and give the same bits. An operation may go once those in `after` have
come: what they brought is in what it sends, and nothing that comes later is.

`step` orders the operations that leave a rank by the same link, and by others if `most_ahead` says so. Where
`uses_slots` it is a time slot as well: no link carries two operations of a step. Otherwise everything goes as early as
it can.

The data plane follows chunks as they grow (`offbeat.wire.lane`), so that an operation begins with the first bytes of
those before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import msgspec

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.topology import Topology

OpKind = Literal["reduce", "copy"]
FORMAT = 1
MAX_NODES = 4096
_MAX_BYTES = 1 << 30
_KINDS: tuple[OpKind, ...] = get_args(OpKind)


class Chunk(NamedTuple):
    """A part of the vector.

    Args:
        begin, end: as parts of its length; an element belongs to the chunk in which it begins.
        source: the rank that has it; None if each has a contribution.
        target: the rank that is to have it; None for all.
    """

    begin: Fraction
    end: Fraction
    source: int | None = None
    target: int | None = None

    def place(self, numel: int) -> slice:
        """The elements of a vector of so many; maybe none.

        >>> [Chunk(Fraction(i, 3), Fraction(i + 1, 3)).place(4) for i in range(3)]
        [slice(0, 1, None), slice(1, 2, None), slice(2, 4, None)]
        """
        return slice(
            self.begin.numerator * numel // self.begin.denominator, self.end.numerator * numel // self.end.denominator
        )


class Op(NamedTuple):
    """One transfer.

    Args:
        kind: whether the chunk is added to what the destination has ("reduce"), or takes its place ("copy").
        chunk: its number.
        source, destination: ranks.
        step: see above.
        after: numbers of the operations that bring the source what it sends, all that came before to it.
    """

    kind: OpKind
    chunk: int
    source: int
    destination: int
    step: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Algorithm:
    """A collective among ranks 0 to `nodes` - 1.

    Args:
        name: of the method that made it, for people.
        nodes: how many ranks take part.
        chunks: of the vector, one after the other.
        ops: in an order in which all of them can be carried out one by one.
        uses_slots: whether `step` is a time slot.
        most_ahead: a rank sends nothing of a step before all of this many steps earlier has arrived, so that no link
            is far ahead of its others; None for as far as it can.
    """

    name: str
    nodes: int
    chunks: tuple[Chunk, ...]
    ops: tuple[Op, ...] = field(repr=False)
    uses_slots: bool = False
    most_ahead: int | None = None

    @cached_property
    def digest(self) -> str:
        """A hash of all that it does; equal digests do the same."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    @property
    def steps(self) -> int:
        """The number of steps."""
        return max((op.step for op in self.ops), default=-1) + 1

    @property
    def collective(self) -> str:
        """The name of the collective, such as "all-reduce" or "broadcast"; "none" if chunks differ in kind."""
        kinds = {(chunk.source is None, chunk.target is None) for chunk in self.chunks}
        sources, targets = {chunk.source for chunk in self.chunks}, {chunk.target for chunk in self.chunks}
        if len(kinds) != 1:
            return "none"
        ((from_all, to_all),) = kinds
        if from_all and to_all:
            return "all-reduce"
        if from_all:
            return "reduce" if len(targets) == 1 else "reduce-scatter"
        if to_all:
            return "broadcast" if len(sources) == 1 else "all-gather"
        if len(sources) == 1 or len(targets) == 1:
            return "scatter" if len(sources) == 1 else "gather"
        return "all-to-all"

    def sent_parts(self) -> list[Fraction]:
        """The length of all that each rank sends, where that of the vector is 1.

        >>> from offbeat.collective import Ring
        >>> from offbeat.topology import Topology
        >>> Ring().plan(Topology.star("abcd")).sent_parts()
        [Fraction(3, 2), Fraction(3, 2), Fraction(3, 2), Fraction(3, 2)]
        """
        sent = [Fraction(0)] * self.nodes
        for op in self.ops:
            sent[op.source] += self.chunks[op.chunk].end - self.chunks[op.chunk].begin
        return sent

    def verify(self) -> None:
        """Prove that it is the collective that its chunks say: each contribution is in each result, exactly once.

        Raises:
            PlanError: with the first rank, chunk and operation that is wrong.
        """
        self._check_chunks()
        everyone = (1 << self.nodes) - 1
        come: dict[tuple[int, int], list[int]] = {}  # by rank and chunk, operations that came there
        sent: list[int] = [0] * len(self.ops)  # as a set of ranks: whose contributions an operation carries
        # Of the last one that left there: its `after`, what that brought, and which of it was in the latest step.
        known: dict[tuple[int, int], tuple[tuple[int, ...], int, int | None]] = {}
        held = {
            (rank, number): 1 << rank
            for number, chunk in enumerate(self.chunks)
            for rank in (range(self.nodes) if chunk.source is None else (chunk.source,))
        }
        is_timed = self.uses_slots or self.most_ahead is not None
        for number, op in enumerate(self.ops):
            self._check_op(number, op)
            there = (op.source, op.chunk)
            # Methods give the same object to operations after the same ones.
            if there not in known or known[there][0] is not op.after:
                self._check_after(number, op)
                before = come.get(there, [])
                if list(op.after) != before[: len(op.after)]:
                    raise self._wrong(number, _why_after(self.ops, op, before))
                latest = max(op.after, key=lambda other: self.ops[other].step, default=None)
                known[there] = op.after, _held_then(self, op, sent), latest
            _, sent[number], latest = known[there]
            if is_timed and latest is not None and self.ops[latest].step >= op.step:
                raise self._wrong(number, f"it is in step {op.step}, and after operation {latest} of no earlier one")
            if not sent[number]:
                raise self._wrong(number, f"rank {op.source} has nothing of the chunk by then")
            here = (op.destination, op.chunk)
            has = held.get(here, 0)
            if op.kind == "reduce" and has & sent[number]:
                raise self._wrong(number, f"the contribution of rank {_first(has & sent[number])} is added twice")
            if op.kind == "copy" and has & ~sent[number]:
                raise self._wrong(number, f"the contribution of rank {_first(has & ~sent[number])} is lost")
            held[here] = has | sent[number]
            come.setdefault(here, []).append(number)
        for number, chunk in enumerate(self.chunks):
            whole = everyone if chunk.source is None else 1 << chunk.source
            for rank in range(self.nodes) if chunk.target is None else (chunk.target,):
                if lacks := whole & ~held.get((rank, number), 0):
                    raise PlanError(
                        f"Cannot use {self.name}: in the end rank {rank} lacks the contribution of rank "
                        f"{_first(lacks)} to chunk {number}. It is no {self.collective}."
                    )

    def to_bytes(self) -> bytes:
        """Write it as bytes (msgpack), the same on every machine.

        Of `after` the length is written, as it is a prefix of what came before; in full where it is none.
        """
        chunks = [
            (c.begin.numerator, c.begin.denominator, c.end.numerator, c.end.denominator, c.source, c.target)
            for c in self.chunks
        ]
        come: dict[tuple[int, int], list[int]] = {}
        ops: list[tuple[int, int, int, int, int, int | tuple[int, ...]]] = []
        for number, op in enumerate(self.ops):
            is_prefix = list(op.after) == come.get((op.source, op.chunk), [])[: len(op.after)]
            after = len(op.after) if is_prefix else op.after
            ops.append((_KINDS.index(op.kind), op.chunk, op.source, op.destination, op.step, after))
            come.setdefault((op.destination, op.chunk), []).append(number)
        written = _Written(FORMAT, self.name, self.nodes, self.uses_slots, chunks, ops, self.most_ahead)
        return msgspec.msgpack.encode(written)

    @classmethod
    def from_bytes(cls, data: bytes) -> Algorithm:
        """Read it, and verify it.

        Raises:
            PlanError: if it is none, or does not do what its chunks say.
        """
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"it has {len(data)} bytes")
            read = msgspec.msgpack.decode(data, type=_Written)
            chunks = tuple(Chunk(Fraction(a, b), Fraction(c, d), *ends) for a, b, c, d, *ends in read.chunks)
            ops = _read_ops(read.ops)
        except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError, IndexError) as error:
            raise PlanError(f"Cannot read an algorithm: {error}. Write one with `to_bytes`.") from error
        if read.format != FORMAT:
            raise PlanError(f"Cannot read an algorithm of format {read.format}: this is {FORMAT}.")
        made = cls(read.name, read.nodes, chunks, ops, read.uses_slots, read.most_ahead)
        made.verify()
        return made

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_chunks(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise PlanError(f"Cannot use {self.name}: it is for {self.nodes} ranks; 1 to {MAX_NODES} can take part.")
        if self.most_ahead is not None and self.most_ahead < 1:
            raise PlanError(f"Cannot use {self.name}: nobody could send if at most {self.most_ahead} steps ahead.")
        at = Fraction(0)
        for number, chunk in enumerate(self.chunks):
            if chunk.begin != at or chunk.end < at:
                raise PlanError(
                    f"Cannot use {self.name}: chunk {number} is from {chunk.begin} to {chunk.end} of the vector, and "
                    f"the one before ends at {at}."
                )
            at = chunk.end
            for rank in (chunk.source, chunk.target):
                if rank is not None and not 0 <= rank < self.nodes:
                    raise PlanError(
                        f"Cannot use {self.name}: chunk {number} is at rank {rank}, and there are {self.nodes} ranks."
                    )
        if at != 1:
            raise PlanError(f"Cannot use {self.name}: its chunks end at {at} of the vector, and not at its end.")

    def _check_op(self, number: int, op: Op) -> None:
        if op.kind not in _KINDS:
            raise self._wrong(number, f"there is no kind {op.kind!r}")
        if not 0 <= op.chunk < len(self.chunks):
            raise self._wrong(number, f"there are {len(self.chunks)} chunks")
        for rank in (op.source, op.destination):
            if not 0 <= rank < self.nodes:
                raise self._wrong(number, f"rank {rank} is none of {self.nodes}")
        if op.source == op.destination:
            raise self._wrong(number, "a rank sends nothing to itself")
        if op.step < 0:
            raise self._wrong(number, f"there is no step {op.step}")

    def _check_after(self, number: int, op: Op) -> None:
        for other in op.after:
            if not 0 <= other < len(self.ops):
                raise self._wrong(number, f"it is after operation {other}, which does not exist")
            if other >= number:
                raise self._wrong(number, f"it is after operation {other}, listed later: {self._cycle(number)}")

    def _cycle(self, number: int) -> str:
        """Say whether what stands in the wrong order is a cycle, or no more than that."""
        path, seen = [number], {number}
        todo = [(number, iter(self.ops[number].after))]
        while todo:
            _, left = todo[-1]
            for other in left:
                if other == number:
                    return "a cycle of operations " + ", ".join(map(str, path))
                if 0 <= other < len(self.ops) and other not in seen:
                    seen.add(other)
                    path.append(other)
                    todo.append((other, iter(self.ops[other].after)))
                    break
            else:
                todo.pop()
                path.pop()
        return "list it first"

    def _wrong(self, number: int, why: str) -> PlanError:
        op = self.ops[number]
        verb = "adds to" if op.kind == "reduce" else "gives"
        what = f"operation {number}, by which rank {op.source} {verb} rank {op.destination} chunk {op.chunk}"
        return PlanError(f"Cannot use {self.name}: {what} in step {op.step}, is wrong: {why}.")


@runtime_checkable
class CollectiveMethod(Protocol):
    """A frozen description of how an algorithm is made for a network."""

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order.

        Raises:
            PlanError: if it cannot be made for that network.
        """


class _Written(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    name: str
    nodes: int
    uses_slots: bool
    chunks: list[tuple[int, int, int, int, int | None, int | None]]
    ops: list[tuple[int, int, int, int, int, int | tuple[int, ...]]]
    most_ahead: int | None = None


def _read_ops(written: Sequence[tuple[int, int, int, int, int, int | tuple[int, ...]]]) -> tuple[Op, ...]:
    come: dict[tuple[int, int], list[int]] = {}
    prefixes: dict[tuple[int, int], tuple[int, ...]] = {}  # the last one, as many operations are after the same
    ops = []
    for number, (kind, chunk, source, destination, step, after) in enumerate(written):
        if isinstance(after, int):
            before = come.get((source, chunk), [])
            if not 0 <= after <= len(before):
                raise ValueError(f"operation {number} is after {after} that came, and {len(before)} did")
            if len(prefixes.get((source, chunk), ())) != after:
                prefixes[source, chunk] = tuple(before[:after])
            after = prefixes[source, chunk] if after else ()
        ops.append(Op(_KINDS[kind], chunk, source, destination, step, after))
        come.setdefault((destination, chunk), []).append(number)
    return tuple(ops)


def _held_then(algorithm: Algorithm, op: Op, sent: Sequence[int]) -> int:
    """The set of ranks whose contributions an operation carries, of what its source had and what came before it."""
    own = algorithm.chunks[op.chunk].source
    held = 1 << op.source if own in (None, op.source) else 0
    for number in op.after:
        held |= sent[number]
    return held


def _why_after(ops: Sequence[Op], op: Op, before: Sequence[int]) -> str:
    for number in op.after:
        if (ops[number].destination, ops[number].chunk) != (op.source, op.chunk):
            return f"it is after operation {number}, which brings rank {op.source} nothing of the chunk"
    came = ", ".join(map(str, before)) or "none"
    return f"it is after operations {', '.join(map(str, op.after))}; at rank {op.source} there come, in order, {came}"


def _first(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1
