"""One model's blocks at one shard: the scheduler says what is due, the store does it, the links carry it."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import TYPE_CHECKING

import msgspec
import torch

from offbeat.errors import PeerError
from offbeat.protocol.optimizer_spec import outer_of
from offbeat.protocol.shards import (
    AdmitWorker,
    ApplyContributions,
    CommitUpdates,
    DropContribution,
    ReleaseFromShard,
    ScaleContributions,
    WithdrawContribution,
    WorkerRemoved,
)
from offbeat.protocol.training import PullBlock
from offbeat.server.aggregator import WeightedMean
from offbeat.server.blocks import Block, ParameterSlice
from offbeat.server.encoded_block import BlockCodec
from offbeat.server.optimizer_checkpoint import Portion
from offbeat.server.optimizers import check_spec
from offbeat.server.pushed_block import DTYPES, EncodedReader
from offbeat.server.robust_aggregator import RobustAggregator, agreed_hyper
from offbeat.server.shard.parameter_store import BlockImage, ParameterStore
from offbeat.server.shard.shard_parts import ShardParts
from offbeat.server.shard.update_measurement import contribution_of, measure
from offbeat.server.shard.update_recorder import UpdateRecorder
from offbeat.server.shard.update_scheduler import (
    ApplyUpdate,
    CaptureBlock,
    MeasureUpdate,
    SendBlock,
    UndoUpdate,
    UpdateScheduler,
)
from offbeat.server.snapshot import describe_tensor
from offbeat.sync import Apply

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from offbeat.history import Record
    from offbeat.protocol.messages import Decision
    from offbeat.protocol.shards import MeasuredContribution, UpdateMeasured
    from offbeat.protocol.training import ModelInfo
    from offbeat.server.pushed_block import PushedBlock
    from offbeat.server.shard.snapshot_builder import SnapshotBuilder
    from offbeat.server.snapshot import SnapshotTensor
    from offbeat.sync import Push

_log = logging.getLogger("offbeat")
_MOST_FORMER = 1024  # plans that a job had
_MOST_BLOCK_BYTES = 16 << 20  # as in `ParameterServer`; more fits no frame


class ModelShard:
    """One shard's part of a model; carries out what the coordinator decides about it.

    Args:
        model: which of several.
        details: what the first worker said about it.
        give: called with a worker, a message and the values that go with it, which do not change any more.
        snapshot_builder: takes in the blocks of snapshots; None if none are made.
        version: updates before this one began.
        held_bytes: size of the parameters of the models that are held beside it.
        record: writes the history.
        parts: of the plan, which shards carry out.
        report: called with what is to be judged; the answer is a decision, which comes later.
        former: the same part of the model in the life before, whose memory this one takes over; None if it is read
            from a snapshot, or begins.

    Attributes:
        needs_validator: contributions are judged beside a validator's.

    Raises:
        PeerError: if the model or its optimizer cannot be held.
    """

    def __init__(
        self,
        model: int,
        details: ModelInfo,
        give: Callable[[int, PullBlock, torch.Tensor], None],
        *,
        snapshot_builder: SnapshotBuilder | None = None,
        version: int = 0,
        held_bytes: int = 0,
        record: Callable[[Record], None] = lambda record: None,
        parts: ShardParts = ShardParts(),  # noqa: B008 - it is frozen
        report: Callable[[UpdateMeasured], None] = lambda message: None,
        former: ModelShard | None = None,
    ) -> None:
        check_spec(details.optimizer)
        blocks = _blocks(details, held_bytes)
        self.details = details
        self.unfilled = set(blocks) if former is None else set()
        self.model, self._give = model, give
        self.sizes = {index: block.size_bytes for index, block in blocks.items()}
        rule, codec = parts.rule, parts.codec
        self.needs_validator = rule is not None and rule.needs_validator
        self._needs_losses = rule is not None and rule.needs_losses
        self._codec = None if codec is None else BlockCodec(codec, list(blocks.values()), details.seed or 0)
        self._robust = None if rule is None else RobustAggregator(rule, _log.warning, parts.privacy)
        if former is None:
            self._store = ParameterStore(list(blocks.values()), details.optimizer, self._robust or WeightedMean())
        else:
            self._store, self._robust, self._codec = former._store, former._robust, former._codec
        self._judges, self._report = rule is not None and rule.judges_model, report
        self._scheduler = UpdateScheduler(blocks, version, judges=self._judges)
        self._store.versions.update(dict.fromkeys(blocks, version))
        self._snapshot_builder = snapshot_builder
        self._recorder = UpdateRecorder(model, len(blocks), record)
        self._frozen: dict[int, tuple[int, torch.Tensor]] = {}  # by block: version and values, as last given

    @property
    def version(self) -> int:
        """Updates decided so far."""
        return self._scheduler.version

    @property
    def size_bytes(self) -> int:
        """The bytes of the parameters that are held here."""
        return sum(self.sizes.values())

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of those that are held here."""
        return tuple(self.sizes)

    def adopt(self, plan: str, number: int) -> None:
        """Another plan holds, as TOML; the job's `number`-th."""
        former = (*self.details.former, digest_of(self.details.plan))[-_MOST_FORMER:]
        self.details = msgspec.structs.replace(self.details, plan=plan, former=former, swaps=number)

    @property
    def can_outlive(self) -> bool:
        """Whether the next life can continue from this memory: all is here, and no judgement is needed to settle it."""
        return not self.unfilled and not self._judges

    def finish(self) -> bool:
        """Make what is due when a life has ended, and record it; whether every update is made in all blocks then."""
        self._perform(None)
        return self._scheduler.is_settled and all(one == self.version for one in self._store.versions.values())

    def whole(self) -> set[Push]:
        """The contributions of which all blocks have arrived here; none where no blocks are held."""
        return self._scheduler.whole()

    def settle(self, whole: Collection[Push]) -> tuple[list[Push], dict[Push, float]]:
        """Decide what becomes of updates with something open (see `UpdateScheduler.settle`); the weights of those to
        withdraw.
        """
        kept, withdrawn = self._scheduler.settle(whole)
        return kept, {push: about.weight for push, (_, about, _) in withdrawn.items()}

    def give_up_mark(self) -> None:
        """Keep no block for a snapshot any more."""
        self._scheduler.give_up_mark()

    def mark(self) -> None:
        """Have each block kept as it is after the updates decided so far."""
        self._scheduler.mark()
        self._perform(None)

    def restore(self, what: SnapshotTensor, tensor: torch.Tensor) -> None:
        """Take over a tensor of a snapshot.

        Raises:
            PeerError: if it is not of this model.
        """
        if what.name:
            self._store.set_state(what.block, what.name, what.key, tensor)
            return
        values = self.values(what.block)
        if values.shape != tensor.shape or values.dtype != tensor.dtype:
            raise PeerError(f"Cannot take over block {what.block}: it has {values.numel()} elements of {values.dtype}.")
        values.copy_(tensor)
        self.unfilled.discard(what.block)

    def state(self) -> Iterator[Portion]:
        """The optimizer's state, as it is now in each block."""
        for block in self.sizes:
            for name, key, tensor in self._store.state_of(block):
                yield Portion(block, name, key, tensor)

    def put(self, portion: Portion) -> None:
        """Take over a part of the optimizer's state; or, without a key, a block's values.

        Raises:
            PeerError: if it is not of this model.
        """
        if not portion.key:  # the values come first; what state is not put after them is not there any more
            self.values(portion.block)
            self._store.forget_state(portion.block)
        what = describe_tensor(self.model, portion.block, portion.name, portion.key, portion.tensor)
        self.restore(what, portion.tensor)
        self._frozen.pop(portion.block, None)
        self._scheduler.forget(portion.block)

    def values(self, block: int) -> torch.Tensor:
        """The block's parameters [D].

        Raises:
            PeerError: if it is not held here.
        """
        if block not in self.sizes:
            raise PeerError(f"Block {block} of model {self.model} is not held here.")
        return self._store.values[block]

    def next(self, worker: int) -> int | None:
        """Number of the worker's contribution that is next or on its way; None if it does not take part."""
        return self._scheduler.next(worker)

    def awaited(self) -> list[Push]:
        """List the contributions in updates that have not come whole, of workers that take part."""
        return self._scheduler.awaited()

    def expects(self, push: Push, block: int, *, again: bool = False) -> bool:
        """Whether this block of a contribution is still to come, or may come `again`."""
        return self._scheduler.expects(push, block, again=again)

    def is_past(self, push: Push) -> bool:
        """Whether nobody waits for this contribution any more, so that what still comes of it is discarded."""
        return self._scheduler.is_past(push)

    def reader(self, block: int, worker: int) -> EncodedReader | None:
        """The reader of what a worker has encoded of a block; None if the plan has none encode."""
        return None if self._codec is None else EncodedReader(self._codec, block, worker)

    def arrive(self, push: Push, block: int, part: PushedBlock, *, again: bool = False) -> int:
        """A block of a contribution is here; returns how many are still to come."""
        missing = self._scheduler.arrive(push, block, part, again=again)
        self._perform(block)
        return missing

    def gone(self, worker: int) -> None:
        """The connection of a worker is gone; the coordinator may have said so before."""
        self._scheduler.gone(worker)

    def decide(self, decision: Decision, *, stays: bool = False) -> Push | None:
        """Carry out a decision; returns what was lost by it.

        Args:
            stays: the worker that is gone, or admitted, only stepped out: it is the same as before.
        """
        lost, is_due = None, True
        match decision:
            case AdmitWorker(worker=worker, clock=clock):
                self._scheduler.admit(worker, clock, stayed=stays)
            case ApplyContributions(pushes=pushes, hyper=hyper, rate=rate, in_order=in_order):
                about = [
                    one if one.hyper and self._robust is not None else msgspec.structs.replace(one, hyper=hyper)
                    for one in decision.about
                ]
                are_references = [worker in decision.references for worker, _ in pushes]
                told = dict(zip(pushes, zip(pushes, about, are_references, strict=True), strict=True))
                again = {push: frozenset(one.again) for push, one in zip(pushes, about, strict=True) if one.again}
                self._scheduler.apply(Apply(pushes, rate, in_order), told, again)
                if decision.is_short and self._robust is not None:
                    given = zip(about, are_references, strict=True)
                    self._robust.judge.know(sum(one.weight > 0 and not is_reference for one, is_reference in given))
            case ScaleContributions(version=version):
                if not self._scheduler.judge(version, decision):
                    raise PeerError(f"Cannot make update {version} of model {self.model}: it does not wait for that.")
            case DropContribution(worker=worker, clock=clock, coming=coming):
                self._scheduler.drop((worker, clock), coming=coming)
            case ReleaseFromShard(worker=worker, step=step, as_is=as_is):
                self._scheduler.release(worker, step, as_is=as_is)
            case WorkerRemoved(worker=worker):
                lost = self._scheduler.lose(worker, stays=stays)
            case CommitUpdates(worker=worker, clock=clock):
                is_due = self._scheduler.commit((worker, clock))
            case WithdrawContribution(worker=worker, clock=clock):
                if self._scheduler.withdraw((worker, clock)) and self._snapshot_builder is not None:
                    self._snapshot_builder.give_up()
        if is_due:
            self._perform(None)
        return lost

    def _perform(self, block: int | None) -> None:
        for action in self._scheduler.due(block):
            match action:
                case ApplyUpdate(entry=entry):
                    if entry is not None:
                        entry.before = self._image(action.block)
                    self._update(action)
                case MeasureUpdate():
                    assert self._robust is not None
                    self._report(measure(self.model, action, self._store, self._robust))
                case UndoUpdate(before=before):
                    self._store.restore(action.block, before)
                    self._frozen[action.block] = (before.version, before.values)
                case CaptureBlock(before=before):
                    assert self._snapshot_builder is not None
                    image = before or self._image(action.block)
                    self._snapshot_builder.take(self.model, action.block, image.values, image.state)
                case SendBlock(step=step, number=number):
                    version, values = self._freeze(action.block)
                    self._give(action.worker, PullBlock(self.model, step, action.block, version, number), values)
        self._recorder.close(self._scheduler.is_final)

    def _image(self, block: int) -> BlockImage:
        """The image of the block as it is now; its values are those that were given, if they were."""
        return self._store.image(block, self._freeze(block)[1])

    def fetch(self, version: int, push: Push | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each block [D] of a contribution to an update that waits to be judged, decoded; none if none does, or
        the rule goes by something else than losses: then nobody is to see what others contribute.

        Args:
            push: the contribution; None for the parameters as they are before the update.
        """
        update = self._scheduler.measured(version) if self._needs_losses else None
        for block, brought in () if update is None else update.blocks.items():
            if push is None:
                yield block, self._freeze(block)[1]
                continue
            for (one, *_), part in brought:
                if one == push:
                    yield block, part.decode(self._store.values[block].dtype)

    def judge(
        self, rows: Sequence[MeasuredContribution], gram: Sequence[float], losses: Sequence[float] = ()
    ) -> Sequence[float]:
        """Judge an update by the whole Gram matrix, for the coordinator.

        Args:
            gram: row by row, with the reference last, if there is one.
            losses: on trusted samples, as of `Judge.scales`.

        Returns:
            The scales, as many as the matrix has rows.

        Raises:
            PeerError: if nothing is to be judged.
        """
        if self._robust is None or not self._judges:
            raise PeerError(f"Cannot judge an update of model {self.model}: its plan has no rule that does.")
        count = math.isqrt(len(gram))
        matrix = torch.tensor(gram, dtype=torch.float64).view(count, count)
        scales: list[float] = self._robust.judge.scales(
            matrix, [it.worker for it in rows], [it.weight for it in rows], losses
        ).tolist()
        return scales

    def _update(self, make: ApplyUpdate) -> None:
        judgement: ScaleContributions | None = make.judgement
        scales = None if judgement is None else {(w, clock): scale for w, clock, scale in judgement.scales}
        parts = [contribution_of(*one, scales) for one in make.parts]
        pushes = [push for (push, *_), _ in make.parts]
        self._recorder.made(make.version, make.block, make.rate, zip(pushes, parts, strict=True))
        about = [about for (_, about, is_reference), _ in make.parts if about.weight > 0 and not is_reference]
        hyper = () if not about else about[0].hyper
        if about and self._robust is not None:
            hyper = agreed_hyper([one.hyper for one in about])
        if about and about[0].change:
            self._store.move(make.block, parts, outer=outer_of(hyper), rate=make.rate, judgement=judgement)
            return
        names = self.details.names
        unused = frozenset.intersection(*(frozenset(one.unused) for one in about)) if about else frozenset()
        self._store.update(
            make.block,
            parts,
            hyper=hyper,
            rate=make.rate,
            unused={names[i] for i in unused if 0 <= i < len(names)},
            judgement=judgement,
        )

    def _freeze(self, block: int) -> tuple[int, torch.Tensor]:
        """Freeze the block's values: what is on its way must not change with the next update; all who get the same
        version share it.
        """
        version, values = self._frozen.get(block, (-1, None))
        if values is None or version != self._store.versions[block]:
            version, values = self._store.versions[block], self._store.values[block].clone()
            self._frozen[block] = (version, values)
        return version, values


def _blocks(details: ModelInfo, held_bytes: int) -> dict[int, Block]:
    blocks = {}
    for one in details.blocks:
        if one.dtype not in DTYPES:
            raise PeerError(f"Cannot hold parameters of type {one.dtype!r} at a server.")
        pieces = tuple(ParameterSlice(details.names[p.name], p.start, p.numel) for p in one.pieces)
        if len({piece.name for piece in pieces}) < len(pieces):
            raise PeerError(f"Cannot hold block {one.index}: a parameter has two pieces in it.")
        blocks[one.index] = Block(one.index, 0, 0, one.dtype, DTYPES[one.dtype].itemsize, pieces)
    if not blocks and details.shards == 1:  # others would be held to it, as to the first one's
        raise PeerError("Cannot hold a model without blocks: no other shard has any.")
    if len(blocks) < len(details.blocks):
        raise PeerError(f"Cannot hold {len(details.blocks)} blocks: {len(details.blocks) - len(blocks)} come twice.")
    largest = max((block.size_bytes for block in blocks.values()), default=0)
    if largest > _MOST_BLOCK_BYTES:
        raise PeerError(f"Cannot hold a block of {largest} bytes: one has at most {_MOST_BLOCK_BYTES}.")
    # Compared before anything is allocated, so that nobody can bring the machine down by a number.
    size_bytes, memory_bytes = sum(block.size_bytes for block in blocks.values()), _memory_bytes()
    if held_bytes + size_bytes > memory_bytes:
        beside = f", and {held_bytes:,} of other models" if held_bytes else ""
        raise PeerError(
            f"Cannot hold parameters of {size_bytes:,} bytes{beside}: this server's machine has {memory_bytes:,} bytes "
            "of memory. Use more shards, on other machines."
        )
    return blocks


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def digest_of(text: str) -> str:
    """The hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
