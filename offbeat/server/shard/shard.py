"""One shard of a parameter server, at work: between the links, the model shards and, on the first, the coordinator.

Everything happens on one event loop, so an update of a block is atomic to whoever reads it. A `Shard` has one life (see
`offbeat.coordinator.reconnect`): it ends when the last worker has gone, or begins another one as a new `Shard`.

Call order: (the process) `accept` whoever dials, and on shards that do not coordinate `follow` the one that does;
`begin_with_who_is_here_after` when it goes on from a snapshot; `save` before it ends for another reason than by itself;
`stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from typing import TYPE_CHECKING

import msgspec

from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.events import (
    ModelBegun,
    ModelForgotten,
    ModelRestored,
    PatienceOver,
    RanksAsked,
    ShardSaid,
    SwapAsked,
    WorkerGone,
    WorkerMissed,
    WorkerOpened,
    WorkerSaid,
)
from offbeat.errors import OffbeatError, PeerError
from offbeat.history import ParametersReplaced, ShardServes
from offbeat.protocol.bounds import SECRET_BYTES
from offbeat.protocol.checkpoints import FetchState, MayPut, RequestReplacement, StatePart, TransferDone
from offbeat.protocol.data_leases import DataState, GetDataState, SetDataState
from offbeat.protocol.loss_scores import ContributionsScored, FetchedBlock
from offbeat.protocol.messages import SAYS, pack
from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement, SwapPlan
from offbeat.protocol.rank_reservation import ReserveRanks
from offbeat.protocol.shards import (
    AdmitWorker,
    AllowReplacement,
    ApplyContributions,
    BeginLife,
    ModelFilled,
    PushDone,
    PushNearlyDone,
    PushOverdue,
    RegisterShard,
    SaveLastSnapshot,
    SnapshotMark,
    SnapshotSaved,
    UpdateMeasured,
    WorkerDrained,
    WorkerRemoved,
    WorkersUnheard,
)
from offbeat.protocol.status import GetStatus, StatusReply, TellStatus
from offbeat.protocol.training import (
    Announce,
    AskAllWorkers,
    LeaveAfter,
    ModelOpened,
    PullBlock,
    PullDone,
    Refused,
    TrainingOver,
)
from offbeat.server.optimizers import check_hyper
from offbeat.server.shard.admission_check import compare
from offbeat.server.shard.coordinator_host import CoordinatorHost, now_s
from offbeat.server.shard.job_clock import JobClock
from offbeat.server.shard.live_image import LiveImage
from offbeat.server.shard.model_shard import ModelShard
from offbeat.server.shard.peer import CoordinatorPeer, Peer
from offbeat.server.shard.push_watch import PushWatch
from offbeat.server.shard.shard_parts import ShardParts
from offbeat.server.shard.snapshot_barrier import SnapshotBarrier
from offbeat.server.snapshot import SnapshotId
from offbeat.tensors import bytes_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from offbeat.coordinator.events import CoordinatorEvent
    from offbeat.coordinator.plan_proposal import DecidingParts
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.history import Record
    from offbeat.protocol.data_leases import FromData
    from offbeat.protocol.loss_scores import FetchContribution
    from offbeat.protocol.messages import Decision, FromShard, ToWorker
    from offbeat.protocol.training import ModelInfo, Reconnect
    from offbeat.server.pushed_block import PushedBlock
    from offbeat.server.shard.snapshot_store import SnapshotStore
    from offbeat.sync import Push
    from offbeat.wire.link import PeerLink

_log = logging.getLogger("offbeat")

# A contribution is nearly there when no more than one in so many of its blocks, or one block, is still to come.
_NEARLY = 10
_NOBODY_TRAINS = "Cannot continue: all workers of the job are gone, and its parameter server has ended. Start it again."


class Shard:
    """The server of one shard for the workers of one job.

    Args:
        read_plan: from TOML, if this is the first shard, which coordinates; None if another does.
        done: called when the last worker has gone.
        snapshots: where snapshots are kept; None for none.
        job: its name.
        every: updates between two snapshots.
        again: called when another shard is lost, and this one has to begin a new life with it.
        patience_s: for how long a worker that was lost, and was the last, may come back; and for how long one may push
            nothing of what it has announced (see `offbeat.server.shard.push_watch`), which it always may if 0.
        record: writes the history.
        parts_of: reads what shards carry out of a plan, which is TOML.
        process: a random number that this process drew when it started.
        image: what this process still holds of the life before; None if it has just started, or cannot use it.
    """

    def __init__(
        self,
        read_plan: Callable[[str], DecidingParts] | None,
        done: Callable[[], None] = lambda: None,
        *,
        snapshots: SnapshotStore | None = None,
        job: str = "",
        every: int = 100,
        again: Callable[[], None] = lambda: None,
        patience_s: float = 0.0,
        record: Callable[[Record], None] = lambda record: None,
        parts_of: Callable[[str], ShardParts] = lambda plan: ShardParts(),
        process: int = 0,
        image: LiveImage | None = None,
    ) -> None:
        self._process, self._image, self._heard = process, image, 0
        self._lives: frozenset[int] = frozenset()  # before this one, of which nothing was lost
        self._followers: dict[int, Peer] = {}  # all that followed in this life, by process
        self._is_torn = False  # a worker was lost while it replaced parameters
        self._record, self._parts_of = record, parts_of
        self._done, self._again, self._patience_s = done, again, patience_s
        self._snapshots = snapshots
        self._model_shards: dict[int, ModelShard] = {}
        self._peers: dict[int, Peer] = {}  # workers, and validators
        self._validators: set[int] = set()  # ranks of those, also if they are away
        self._secrets: dict[int, bytes] = {}  # that each rank was told when it was taken in; see `_make_room`
        self._admitted: dict[tuple[int, int], int] = {}  # entry, by model and worker
        self._shards: list[Peer] = []  # that follow this one
        self._held: dict[Peer, RegisterShard] = {}  # what each of them could go on from
        self._decided: dict[int, list[Decision]] = {}  # about models that nobody has opened here yet
        # What was opened before this life had begun, by worker and model, with the worker's entry.
        self._waiting: dict[tuple[int, int], tuple[Peer, ModelInfo, int]] = {}
        self._coordinator_link: PeerLink | None = None  # to the shard that coordinates, if that is another
        self.life = secrets.randbits(39) + 1 if read_plan is not None else 0
        self._coordinator = (
            None
            if read_plan is None
            else Coordinator(
                read_plan,
                self.life,
                check_hyper=check_hyper,
                judge=lambda model, rows, gram, losses: self.model_shard(model).judge(rows, gram, losses),
            )
        )
        self._clock = JobClock(patience_s, lambda: self._is_away, self._tell_unheard)
        self._unheard: set[Peer] = set()  # other shards that can hear no worker
        self._is_unheard = False  # as the coordinator was told
        self._coordinator_host = (
            None if self._coordinator is None else CoordinatorHost(self._coordinator, self, record, self._clock)
        )
        self._snapshot_barrier = SnapshotBarrier(
            snapshots,
            job,
            every,
            life=self.life,
            model_shards=self._model_shards,
            coordinator=self._coordinator,
            followers=self._shards,
            say=self.send,
            tell_coordinator=self._tell_coordinator,
        )
        self._push_watch = PushWatch(
            patience_s,
            awaited=lambda: [(model, push) for model, one in self._model_shards.items() for push in one.awaited()],
            mark=lambda worker: self._peers[worker].push_mark if worker in self._peers else None,
            overdue=lambda model, push: self._note_overdue(PushOverdue(model, *push)),
        )
        self._overdue: dict[int, str] = {}  # workers that are not taken in again, and why
        self._to_give: list[tuple[Peer, PullBlock, torch.Tensor]] = []
        self.begun = asyncio.Event()
        self.was_visited = False
        self.is_over = False
        self._beginning: asyncio.TimerHandle | None = None
        self.is_finished = False  # the last worker has said good-bye
        self.was_declined = False  # a worker that had never trained has
        self.refusal = ""  # why the shard that coordinates does not want this one
        if self._coordinator is not None:
            self._begin_if_all_are_here()

    def accept(self, link: PeerLink) -> Peer:
        """Take the link of a peer into use that has proved who it is.

        Raises:
            PeerError: if its role has nothing to do here.
        """
        if link.role not in SAYS:
            raise PeerError(f"a {link.role} has nothing to say to a server")
        return Peer(self, link)

    def follow(self, link: PeerLink) -> CoordinatorPeer:
        """The coordinator has been reached; returns what the link hands frames to."""
        self._coordinator_link = link
        held = self._snapshots.held if self._snapshots is not None else {}
        least = self._snapshots.least if self._snapshots is not None else 0
        memory = None if self._image is None else self._image.held
        link.send(pack(RegisterShard(tuple((one.number, one.life) for one in held), least, self._process, memory)))
        return CoordinatorPeer(self)

    # -- lives and snapshots -------------------------------------------------------------------------------------

    def begin_with_who_is_here_after(self, patience_s: float) -> None:
        """Wait no longer than this for the workers of a snapshot; begin with those that are here by then."""
        if self._coordinator is not None:
            loop = asyncio.get_running_loop()
            self._beginning = loop.call_later(patience_s, lambda: self._post_event(PatienceOver(loop.time())))

    def stop(self) -> None:
        """End this incarnation: what it hears now is of no interest any more, and nothing happens later.

        The process may begin another one, and a timer would hold this one's parameters until then, or decide something
        in the history of that.
        """
        self.is_over = True
        self._push_watch.stop()
        self._clock.stop()
        if self._beginning is not None:
            self._beginning.cancel()
        if self._coordinator_host is not None:
            self._coordinator_host.stop()

    @property
    def image(self) -> LiveImage | None:
        """The memory that the next life can continue from, if there is any. This life is over."""
        if not self.begun.is_set():
            return self._image
        coordinator, peers = self._coordinator, self._peers.values()
        can_outlive = self._model_shards and all(one.can_outlive for one in self._model_shards.values())
        if not can_outlive or self._is_torn or any(peer.may_put for peer in peers):
            return None
        if coordinator is not None and not coordinator.has_begun:
            return None
        return LiveImage(
            self._lives | {self.life},
            self.life,
            self._model_shards,
            heard=self._heard,
            coordinator=coordinator,
            followers=self._followers,
            is_abandoned=not any(peer.is_well for peer in peers),
        )

    async def save(self) -> None:
        """Have all shards make a last snapshot, and wait for it; nothing if there is nothing to keep.

        From then on nothing is decided, so that nobody is told of an update that is not in it.
        """
        await self._snapshot_barrier.last()

    def _begin_anew(self) -> None:
        """End this life, for another one of all shards; nothing is decided any more."""
        self.stop()
        self._again()

    async def be_quiet(self) -> None:
        """Wait until no file is being written."""
        await self._snapshot_barrier.be_quiet()

    def begin(self, begin: BeginLife) -> None:
        """The life begins, from memory, from a snapshot, or from nothing."""
        self.life = self._snapshot_barrier.life = begin.life
        try:
            if begin.from_memory:
                self._take_over({})
            elif begin.snapshot is not None:
                self._restore(SnapshotId(*begin.snapshot))
        except PeerError as error:
            what = "memory" if begin.snapshot is None else f"the snapshot {begin.snapshot[0]}"
            _log.error("Cannot resume from %s: %s", what, error)
            raise
        self._start()

    def _start(self) -> None:
        if self._image is not None:
            self._image.forget()
            self._image = None
        self.begun.set()
        waiting, self._waiting = self._waiting, {}
        for (_, model), (peer, details, entry) in waiting.items():
            if peer.link.has_hung_up:  # it dials all shards again, as it has lost another one meanwhile
                peer.link.abort()
                continue
            with contextlib.suppress(PeerError):  # it has been told
                peer.open(model, details, entry)

    def mark(self, mark: SnapshotMark) -> None:
        """The coordinator has all shards make a snapshot."""
        self._snapshot_barrier.keep(mark)

    def _restore(self, identity: SnapshotId) -> None:
        assert self._snapshots is not None
        snapshot = self._snapshots.read(identity)
        for one in snapshot.header.models:
            self._model_shards[one.model] = self._new_model_shard(one.model, one.details, one.version)
            if one.progress is not None:
                gone = self._snapshots.gone
                self._post_event(ModelRestored(now_s(), one.model, one.details, one.version, one.progress, gone))
        for what, tensor in snapshot.tensors:
            self.model_shard(what.model).restore(what, tensor)
        versions = ", ".join(str(one.version) for one in snapshot.header.models)
        _log.warning("The parameter server continues from its snapshot of version %s.", versions)

    def _take_over(self, progress: Mapping[int, TrainingProgress]) -> None:
        """Continue from memory.

        Args:
            progress: of the workers, by model, if this shard coordinates.

        Raises:
            PeerError: if this shard has something else in memory than the coordinator takes it to have.
        """
        image = self._image
        if image is None or not image.finish():
            raise PeerError("Cannot continue from memory: this shard does not have what the others have.")
        self._lives = image.lives
        for model, former in image.models.items():
            self._model_shards[model] = self._new_model_shard(model, former.details, former.version, former)
            if model in progress:
                gone = frozenset() if self._snapshots is None else self._snapshots.gone
                applied = image.counted(model)
                details, version = former.details, former.version
                self._post_event(ModelRestored(now_s(), model, details, version, progress[model], gone, applied))
        if image.is_abandoned and self._coordinator is not None:
            asyncio.get_running_loop().call_later(self._patience_s, self._end_if_nobody_trains)
        versions = ", ".join(str(one.version) for one in image.models.values())
        _log.warning("The parameter server continues from version %s, which is still in its memory.", versions)

    def _begin_from_memory(self, image: LiveImage) -> None:
        """Have all shards continue from what they still have of the life before."""
        progress = image.settle(self._held, now_s(), self._record)
        for shard in self._held:
            shard.say(BeginLife(self.life, from_memory=True))
        self._take_over(progress)
        self._start()

    def _begin_if_all_are_here(self) -> None:
        """Decide what all shards continue from, once all are here that have it: their memory, or a snapshot."""
        if self._image is not None and not self.begun.is_set():
            if len(self._held) < self._image.shards:
                return
            if self._image.fits(tuple(self._held.values())):
                self._number_snapshots()
                self._begin_from_memory(self._image)
                return
            self._image = None
        held = dict(self._snapshots.held) if self._snapshots is not None else {}
        if self.begun.is_set() or (held and len(self._held) < next(iter(held.values())).shards - 1):
            return
        common = self._number_snapshots()
        if held and common is None:
            _log.error("Cannot continue: no snapshot is on every shard.")
        chosen = None if common is None else (common.number, common.life)
        for shard in self._shards:
            shard.say(BeginLife(self.life, chosen))
        self.begin(BeginLife(self.life, chosen))

    def _number_snapshots(self) -> SnapshotId | None:
        """Give the snapshots of this life greater numbers than those before; the newest of these that all have."""
        held = dict(self._snapshots.held) if self._snapshots is not None else {}
        theirs = [{SnapshotId(*one) for one in registration.held} for registration in self._held.values()]
        common = [one for one, header in held.items() if header.shards == len(theirs) + 1 and _all_have(theirs, one)]
        least = max([0 if self._snapshots is None else self._snapshots.least, *(e.least for e in self._held.values())])
        self._snapshot_barrier.number_from(least)
        if not common:
            return None
        self._snapshot_barrier.go_on_from(common[0], sum(one.version for one in held[common[0]].models))
        return common[0]

    def _register_shard(self, peer: Peer, registration: RegisterShard) -> None:
        if peer in self._shards:
            raise PeerError("Cannot admit this shard for a second time.")
        if count := self._has_all(registration):
            refusal = (
                f"Cannot admit another shard: the workers of this job named {count}, and all are here. To use more, "
                "start the workers anew with the addresses of all."
            )
            peer.say(Refused(refusal))
            raise PeerError(refusal)
        if self.begun.is_set() and self._model_shards and self._snapshots is not None:
            self._begin_anew()  # one of the shards has come back before it was missed
            return
        self._shards.append(peer)
        self._held[peer] = registration
        self._followers[registration.process] = peer
        if self.begun.is_set():
            peer.say(BeginLife(self.life))
        self._begin_if_all_are_here()

    def _has_all(self, registration: RegisterShard) -> int:
        """Count the shards that the workers named, if all are here, and the one that comes is none of them; else 0.

        One that comes back before it was missed is a process that was here, has a broken connection here, or brings a
        snapshot of this job.
        """
        held = {} if self._snapshots is None else self._snapshots.held
        is_known = registration.process > 0 and registration.process in self._followers
        comes_back = is_known or any(SnapshotId(*one) in held for one in registration.held)
        is_broken = any(not shard.link.connected for shard in self._shards)
        named = max((model_shard.details.shards for model_shard in self._model_shards.values()), default=0)
        return 0 if comes_back or is_broken or named > len(self._shards) + 1 else named

    # -- what is said --------------------------------------------------------------------------------------------

    def open(self, peer: Peer, model: int, details: ModelInfo, entry: int = 0) -> None:
        """A worker wants to train a model, or comes back to it.

        Raises:
            DisagreementError: if it differs from the others' in plan or layout.
            PeerError: if the model cannot be held, the worker is here already, or it was here before and nothing is
                known of that.
        """
        if not self.begun.is_set():
            there, *_ = self._waiting.get((peer.rank, model), (None,))
            if there is not None and there.link.connected and (there is peer or details.back is None):
                raise PeerError(f"Rank {peer.rank} opens model {model} for a second time.")
            if there is not None and there is not peer:
                there.link.abort()  # it is to hear that it is another's place now, if it is there at all
            self._waiting[(peer.rank, model)] = (peer, details, entry)
            return
        if (why := self._overdue.get(peer.rank)) is not None:
            raise PeerError(f"Cannot admit rank {peer.rank} again: {why}.")
        if model in peer.models and details.back is None:
            raise PeerError(f"Rank {peer.rank} opens model {model} for a second time.")
        if peer.role == "worker" and peer.rank in self._validators:  # before it takes the place of one that is away
            raise PeerError(f"Cannot admit rank {peer.rank} as a worker: it is a validator's. Join with another rank.")
        if details.back is not None and details.back.life == self.life and self._was_away_from(peer):
            self._begin_anew()  # it was stopped, or cut off: this worker has come back before it was missed
            return
        is_same = self._make_room(peer, details.back)
        model_shard = self._model_shards.get(model)
        if model_shard is None and details.back is not None and self._coordinator is None:
            raise PeerError("Cannot continue: this shard of the parameter server was restarted without a snapshot.")
        is_first = model_shard is None
        if model_shard is None:
            if self._model_shards and peer.rank not in self._peers:
                raise PeerError(
                    f"Cannot open model {model}: rank {peer.rank} takes part in none of this job's models. Prepare "
                    "the models in the same order on every worker."
                )
            shards = len(self._shards) + 1
            if self._coordinator is not None and details.shards != shards:
                raise PeerError(
                    f"Cannot serve this worker with {details.shards} shards: this one coordinates {shards}. Start all "
                    "but the first with --coordinator, and name all of them to the workers, the first one first."
                )
            # What others are compared with begins with this plan, whatever plans this worker says there were before.
            details = msgspec.structs.replace(details, former=(), swaps=0)
            model_shard = self._new_model_shard(model, details)
            self._post_event(ModelBegun(now_s(), model, details))
            # Not before nothing of it can be refused: it is what others are compared with.
            self._model_shards[model] = model_shard
            for decision in self._decided.pop(model, []):
                model_shard.decide(decision)
        compare(peer.rank, details, model_shard.details)
        if not is_same:
            self._secrets[peer.rank] = secrets.token_bytes(SECRET_BYTES)
        self._peers[peer.rank] = peer
        self._clock.start()
        self._note_back(peer.rank)
        self.was_visited = True
        peer.models[model] = entry
        filler = any(model in other.filling for other in self._peers.values())
        if model_shard.unfilled and not filler and _may_fill(peer, model_shard):
            peer.filling.add(model)
        secret, kept = self._secrets[peer.rank], details.back is not None and details.back.life in self._lives
        survives = self._snapshots is not None
        peer.say(ModelOpened(model, model in peer.filling, self.life, survives, secret=secret, kept=kept))
        if not details.blocks and is_first and details.back is None:  # more shards than blocks
            self._report(ModelFilled(model))
        self._post_event(WorkerOpened(now_s(), peer.rank, model, details, entry, is_validator=peer.role == "validator"))
        if peer.role == "validator":
            self._validators.add(peer.rank)

    def _new_model_shard(
        self, model: int, details: ModelInfo, version: int = 0, former: ModelShard | None = None
    ) -> ModelShard:
        model_shard = ModelShard(
            model,
            details,
            self._give,
            snapshot_builder=self._snapshot_barrier.snapshot_builder,
            version=version,
            held_bytes=sum(other.size_bytes for other in self._model_shards.values()),
            record=self._record,
            parts=self._parts_of(details.plan),
            report=self._report_soon,
            former=former,
        )
        self._record(ShardServes(model, self.life, version, len(model_shard.blocks)))
        return model_shard

    def fill(self, peer: Peer, model: int, block: int) -> None:
        """A block of the initial parameters is here.

        Raises:
            PeerError: if this worker was not asked for it.
        """
        model_shard = self.model_shard(model)
        if model not in peer.filling or block not in model_shard.unfilled:
            raise PeerError(f"Rank {peer.rank} was not asked for the values of block {block}.")
        model_shard.unfilled.discard(block)
        if not model_shard.unfilled:
            peer.filling.discard(model)
            self._report(ModelFilled(model))

    def arrive(self, peer: Peer, model: int, push: Push, block: int, part: PushedBlock, *, again: bool = False) -> None:
        """A block of a contribution is here; perhaps `again`."""
        model_shard = self.model_shard(model)
        if self.is_early(peer, model):
            peer.early[(model, block)] = (push, part, again)
            return
        # Not if the worker was sent away in the meantime.
        if not model_shard.expects(push, block, again=again):
            return
        is_first = model_shard.expects(push, block)
        missing, count = model_shard.arrive(push, block, part, again=again), len(model_shard.sizes)
        if not is_first:
            return
        if missing == min(max(1, count // _NEARLY), count - 1):
            self._report(PushNearlyDone(model, *push))
        if missing == 0:
            self._report(PushDone(model, *push, peer.models[model]))

    def fetch(self, peer: Peer, message: FetchState) -> None:
        """A worker wants the optimizer's state, as it is now."""
        model_shard = self.model_shard(message.model)
        index = {name: i for i, name in enumerate(model_shard.details.names)}

        def pieces() -> Iterator[tuple[StatePart, memoryview]]:
            for it in model_shard.state():
                tensor = it.tensor.clone()
                dtype = dtype_name(tensor.dtype)
                piece = StatePart(
                    message.model, message.number, it.block, index[it.name], it.key, dtype, tensor.ndim == 0
                )
                yield piece, bytes_of(tensor.reshape(-1))

        peer.give_state(pieces(), TransferDone(message.number))

    def fetch_contribution(self, peer: Peer, message: FetchContribution) -> None:
        """A validator wants a contribution to an update that waits to be judged, or the parameters before it."""
        found = self.model_shard(message.model).fetch(message.version, message.push)
        pieces = ((FetchedBlock(message.model, message.number, block), bytes_of(values)) for block, values in found)
        peer.give_state(pieces, TransferDone(message.number))

    def hear(
        self,
        peer: Peer,
        message: Announce
        | PullDone
        | GetStatus
        | AskAllWorkers
        | SwapPlan
        | ReserveRanks
        | PlanAgreement
        | LeaveAfter
        | TellStatus
        | RequestReplacement
        | ContributionsScored
        | FromData
        | FromShard,
    ) -> None:
        """Handle a message for the coordinator.

        Raises:
            PeerError: if this is not the coordinator, or it cannot be.
        """
        coordinator = self._coordinator
        if coordinator is None:
            raise PeerError(f"{type(message).__name__} is for the shard that coordinates; this is another.")
        self._check_place(peer, message)
        match message:
            case GetStatus(number=number):
                peer.answer(StatusReply(number), pack(coordinator.status(self._clock.job_s(now_s()))))
            case GetDataState(number=number):
                peer.answer(DataState(number), coordinator.data_state())
            case SwapPlan():
                by = f"rank {peer.rank}" if peer.trains else f"an operator at {peer.link.peer}"
                self._post_event(SwapAsked(now_s(), peer, message, by, is_trusted=peer.link.is_trusted))
            case ReserveRanks(count=count, least=least):
                self._post_event(RanksAsked(now_s(), peer, count, least))
            case RegisterShard():
                self._register_shard(peer, message)
            case SaveLastSnapshot():
                self._snapshot_barrier.ask_for_last()
            case SnapshotSaved(number=number, well=well, cost_s=cost_s):
                self._snapshot_barrier.saved(number, well, cost_s)
            case PushOverdue():
                self._note_overdue(message)
            case WorkersUnheard(unheard=unheard):
                (self._unheard.add if unheard else self._unheard.discard)(peer)
            case ModelFilled() | PushNearlyDone() | PushDone() | UpdateMeasured() | WorkerDrained():
                self._post_event(ShardSaid(now_s(), message))
            case TellStatus() if self._peers.get(peer.rank) is not peer:
                pass  # it is not in yet, or not any more
            case _:
                body = peer.take_body() if isinstance(message, SetDataState) else b""
                self._post_event(WorkerSaid(now_s(), peer.rank, message, body, peer))

    def _check_place(self, peer: Peer, message: object) -> None:
        """Refuse a message in another's name: before it is admitted, a worker sends nothing but questions about the
        status.
        """
        kind = type(message).__name__
        if peer.role == "shard" and peer not in self._shards and not isinstance(message, RegisterShard):
            raise PeerError(f"Cannot take {kind} from this shard: it does not follow this one.")
        if not peer.trains or self._peers.get(peer.rank) is peer or isinstance(message, GetStatus | TellStatus):
            return
        raise PeerError(f"Cannot take {kind} from rank {peer.rank}: it trains no model yet. Call run.prepare first.")

    def lose(self, peer: Peer, error: OffbeatError | None) -> None:
        """A worker or shard is gone; `error` says why, None that it said good-bye."""
        if self.is_over:
            return
        self._waiting = {key: one for key, one in self._waiting.items() if one[0] is not peer}
        if peer in self._shards:
            self._shards.remove(peer)
            self._held.pop(peer, None)
            if self._snapshots is not None:
                if self.begun.is_set():
                    _log.warning("A shard of the parameter server is gone: %s", error or "it has ended.")
                    self._begin_anew()
                return
            for worker in self._peers.values():
                worker.say(Refused(f"A shard of the parameter server is gone: {error or 'it has ended'}"))
            return
        if self._peers.get(peer.rank) is not peer:  # it was never taken in
            if isinstance(error, PeerError):
                _log.warning("%s", error)
            if peer.role == "worker" and peer.rank not in self._peers:
                self.was_declined = self.was_declined or error is None
                self._post_event(WorkerMissed(now_s(), peer.rank))
            return
        if error is not None and peer.role == "worker" and self._was_away_from(peer):
            _log.warning("No worker can be heard any more: %s The parameter server waits for all of them.", error)
            self._begin_anew()
            return
        for model_shard in self._model_shards.values():
            model_shard.gone(peer.rank)
        self._remove(peer, WorkerGone(now_s(), peer.rank, error))
        asyncio.get_running_loop().call_later(0.0 if error is None else self._patience_s, self._note_gone, peer.rank)
        if peer.role == "worker" and not self._has_workers:
            self._end_unless_one_comes_back(error)

    def _was_away_from(self, peer: Peer) -> bool:
        """Whether the server was stopped or cut off, so that it is not the worker that was lost, or has come back.

        Then no other worker can be heard either. If all hang up at once, their scripts have failed, unless they missed
        the server before: it was stopped, or one of its shards is missing.
        """
        if not self.begun.is_set() or self._snapshots is None:
            return False
        others = [other for other in self._workers if other.rank != peer.rank]
        if others and (self._unheard or not all(shard.is_well for shard in self._shards)):
            return True
        has_left = peer.link.has_hung_up and not self._clock.was_just_away
        return bool(others) and not has_left and not any(other.is_well for other in others)

    @property
    def _workers(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == "worker"]

    @property
    def _is_away(self) -> bool:
        """Whether the server, or a shard of it, can hear no worker, or a shard is not heard."""
        is_unheard = bool(self._workers) and all(worker.is_silent for worker in self._workers)
        return is_unheard or bool(self._unheard) or any(shard.is_silent for shard in self._shards)

    def _tell_unheard(self, is_away: bool) -> None:
        if is_away != self._is_unheard:
            self._is_unheard = is_away
            self._tell_coordinator(WorkersUnheard(is_away))

    def _note_overdue(self, late: PushOverdue) -> None:
        """Go on without a worker that has announced a contribution and does not push it: the others wait for it."""
        peer, push = self._peers.get(late.worker), (late.worker, late.clock)
        if self._coordinator is None:
            self._tell_coordinator(late)
        elif peer is not None and late.model in self._coordinator.models and self._coordinator.awaits(late.model, push):
            why = (
                f"it announced contribution {late.clock}, and has pushed nothing more of it for {self._patience_s:g} s"
            )
            self._overdue[late.worker] = why
            peer.say(Refused(f"Cannot continue with rank {late.worker}: {why}. The others continue without it."))
            peer.link.fail(PeerError(why))

    def _end_unless_one_comes_back(self, error: OffbeatError | None) -> None:
        if error is None:
            self.is_finished = True
            for validator in self._peers.values():
                validator.say(TrainingOver())
            self._done()
            return
        asyncio.get_running_loop().call_later(self._patience_s, self._end_if_nobody_trains)

    def _end_if_nobody_trains(self) -> None:
        if not self._has_workers:
            self.tell_validators_of_end()
            self._done()

    def tell_validators_of_end(self) -> None:
        """Tell validators, before the server says good-bye, that there is nobody to come back to."""
        if any(peer.role == "worker" and peer.link.connected for peer in self._peers.values()):
            return  # they look for the server until it is started again, and so do validators
        for validator in self._peers.values():
            if validator.role == "validator":
                validator.say(TrainingOver(_NOBODY_TRAINS))

    @property
    def _has_workers(self) -> bool:
        """Whether there is anybody but validators."""
        return any(peer.role == "worker" for peer in self._peers.values())

    def _note_gone(self, worker: int) -> None:
        """Note that a worker has not come back: if the server is killed now, the others do not wait for it."""
        if (
            self._coordinator is not None
            and self._snapshots is not None
            and not self.is_over
            and worker not in self._peers
        ):
            self._snapshots.note_gone(self._snapshots.gone | {worker})

    def _note_back(self, worker: int) -> None:
        if self._coordinator is not None and self._snapshots is not None:
            self._snapshots.note_gone(self._snapshots.gone - {worker})

    def heard(self) -> None:
        """Count a message of the coordinator."""
        self._heard += 1

    def adopt(self, adopt: AdoptPlan) -> None:
        """Another plan holds; workers that come with an earlier one of this job are told of it."""
        if self._image is not None:
            self._image.carry_out(adopt)
        for model_shard in self._model_shards.values():
            model_shard.adopt(adopt.plan, adopt.number)

    def decide(self, decision: Decision) -> Push | None:
        """Carry out what the coordinator decided; before this life has begun it is about the one before."""
        if self._image is not None:
            return self._image.carry_out(decision)
        lost = self._carry_out(decision)
        if isinstance(decision, ApplyContributions):
            self._push_watch.start()
        if isinstance(decision, WorkerRemoved) and decision.number:
            self._tell_coordinator(WorkerDrained(decision.model, decision.number))
        return lost

    def _carry_out(self, decision: Decision) -> Push | None:
        if isinstance(decision, AllowReplacement):
            self._let_replace(decision)
            return None
        stays = isinstance(decision, AdmitWorker | WorkerRemoved) and self._is_same(decision)
        if isinstance(decision, AdmitWorker | WorkerRemoved) and (peer := self._peers.get(decision.worker)) is not None:
            peer.may_put.discard(decision.model)  # if it has not said that it was all, it was
        if isinstance(decision, AdmitWorker):
            self._admitted[(decision.model, decision.worker)] = decision.entry
        if decision.model not in self._model_shards:
            self._decided.setdefault(decision.model, []).append(decision)
            return None
        lost = self._model_shards[decision.model].decide(decision, stays=stays)
        if isinstance(decision, AdmitWorker):
            self._take_what_came_early(decision)
        return lost

    def _let_replace(self, decision: AllowReplacement) -> None:
        """A worker may put other parameters: from here on what the model has is not only of its contributions."""
        model_shard, peer = self._model_shards.get(decision.model), self._peers.get(decision.worker)
        if model_shard is not None and peer is not None:
            self._record(ParametersReplaced(decision.model, model_shard.version, decision.worker))
            peer.may_put.add(decision.model)
            peer.say(MayPut(decision.number))

    def is_early(self, peer: Peer, model: int) -> bool:
        """Whether what a worker brings has overtaken the coordinator's word that it takes part (again)."""
        if self._coordinator is not None:
            return False
        return not self._is_admitted(peer, model) or self.model_shard(model).next(peer.rank) is None

    def _is_admitted(self, peer: Peer, model: int) -> bool:
        """Whether the coordinator has let it in since it opened the model last."""
        return peer.models.get(model) == self._admitted.get((model, peer.rank))

    def _is_same(self, decision: AdmitWorker | WorkerRemoved) -> bool:
        """Whether the worker only stepped out, or in again; what it pushes after that may have overtaken both."""
        peer = self._peers.get(decision.worker)
        if self._coordinator is not None or peer is None or not self._is_admitted(peer, decision.model):
            return False
        return isinstance(decision, WorkerRemoved) or decision.entry == peer.models.get(decision.model)

    def _take_what_came_early(self, admit: AdmitWorker) -> None:
        peer = self._peers.get(admit.worker)
        if peer is not None:
            for model, block in [key for key in peer.early if key[0] == admit.model]:
                push, part, again = peer.early.pop((model, block))
                self.arrive(peer, model, push, block, part, again=again)

    def refuse(self, reason: str) -> None:
        """The coordinator does not want this shard."""
        self.refusal = reason
        self._done()

    def end(self, error: OffbeatError | None) -> None:
        """The coordinator is gone, and with it the job; or it is to come back."""
        if self.is_over:
            return
        if error is not None and self._snapshots is not None:
            _log.warning("The shard that coordinates is gone: %s", error)
            self._begin_anew()
        else:
            self._done()

    def model_shard(self, model: int) -> ModelShard:
        """The shard's part of a model.

        Raises:
            PeerError: if nobody has opened it.
        """
        if model not in self._model_shards:
            raise PeerError(f"Model {model} has not been opened.")
        return self._model_shards[model]

    def may_push(self, model: int, push: Push) -> bool:
        """Whether the policy has let the worker push this contribution, as far as this shard can know."""
        return self._coordinator is None or self._coordinator.has_granted(model, push)

    @property
    def coordinates(self) -> bool:
        """Whether this is the first shard."""
        return self._coordinator is not None

    def _make_room(self, peer: Peer, back: Reconnect | None) -> bool:
        """See that there is one worker of each rank; whether it is the one that was taken in, as its secret shows.

        Without, it is a new process of that rank, for which there is room once the one before is not connected.

        Raises:
            PeerError: if there is no room, or it claims to be who it is not.
        """
        there = self._peers.get(peer.rank)
        if there is peer:
            return True
        secret = self._secrets.get(peer.rank)
        is_same = secret is not None and back is not None and hmac.compare_digest(back.secret, secret)
        if there is not None and there.link.connected and not is_same:
            raise PeerError(f"Cannot admit rank {peer.rank}: one is here already, from {there.link.peer}.")
        if secret is not None and back is not None and back.life == self.life and not is_same:
            raise PeerError(
                f"Cannot admit rank {peer.rank} as the one that was here before: it does not know the secret of that "
                "one. Another process has this rank, or had it since."
            )
        if there is not None:
            # Its process is gone, and this is the one that follows it.
            self._remove(there, WorkerGone(now_s(), peer.rank, replaced=True))
            there.link.abort()
        return is_same

    def _remove(self, peer: Peer, gone: WorkerGone) -> None:
        del self._peers[peer.rank]
        self._is_torn |= bool(peer.may_put)
        self._post_event(gone)
        for model in peer.filling:
            self._ask_another_to_fill(model)

    def _ask_another_to_fill(self, model: int) -> None:
        """Ask another worker for the first values: the one that was to send them is gone."""
        model_shard = self._model_shards[model]
        model_shard.unfilled = set(model_shard.sizes)  # of what has come, nothing goes with the values of another
        for other in self._peers.values():
            if model in other.models and _may_fill(other, model_shard):
                other.filling.add(model)
                other.say(ModelOpened(model, True, self.life, self._snapshots is not None))
                return
        if any(model in other.models for other in self._peers.values()):
            return  # they wait for a validator, whose values they begin with
        del self._model_shards[model]  # whoever comes next is the first
        self._post_event(ModelForgotten(now_s(), model))

    # -- what goes out -------------------------------------------------------------------------------------------

    def send_to_all(self, adopt: AdoptPlan) -> None:
        """Tell all shards and workers which plan holds."""
        for peer in (*self._shards, *self._peers.values()):
            peer.say(adopt)
        self.adopt(adopt)

    def _post_event(self, event: CoordinatorEvent) -> None:
        """Have the coordinator hear of an event, if it is here.

        Raises:
            PeerError: if whoever the event came from is to blame for it.
        """
        if self._coordinator_host is not None:
            self._coordinator_host.hear(event)

    def send_to_shards(self, decision: Decision) -> Push | None:
        """Have all shards carry out what the coordinator decided; returns what this one lost by it."""
        for shard in self._shards:
            shard.say(decision)
        self._snapshot_barrier.look_soon()
        return self.decide(decision)

    def send(self, worker: int, message: ToWorker) -> None:
        if worker in self._peers:
            self._peers[worker].say(message)

    def _give(self, worker: int, message: PullBlock, values: torch.Tensor) -> None:
        peer = self._peers.get(worker)
        if peer is not None and self._is_admitted(peer, message.model):
            if not self._to_give:
                asyncio.get_running_loop().call_soon(self._give_all)
            self._to_give.append((peer, message, values))

    def _give_all(self) -> None:
        """Send the values that are due, after what lets others go on: that would wait behind them on the link.

        Each worker is given those first that it needs first.
        """
        to_give, self._to_give = self._to_give, []
        for peer, message, values in sorted(to_give, key=lambda one: one[0].place_of(one[1].model, one[1].block)):
            peer.say(message, bytes_of(values))

    def _report_soon(self, message: UpdateMeasured) -> None:
        """Tell the coordinator how far this shard is, once it has done all that is due."""

        def report() -> None:
            try:
                self._report(message)
            except PeerError as error:  # shards disagree, which no worker is to blame for: the update cannot be made
                _log.error("%s", error)
                self._done()

        asyncio.get_running_loop().call_soon(lambda: None if self.is_over else report())

    def _report(self, message: ModelFilled | PushNearlyDone | PushDone | UpdateMeasured) -> None:
        """Tell the coordinator how far this shard is."""
        if self._coordinator is None:
            self._tell_coordinator(message)
        else:
            self._post_event(ShardSaid(now_s(), message))

    def _tell_coordinator(self, message: FromShard) -> None:
        """Send it to the shard that coordinates; nothing if that is just being lost."""
        if self._coordinator_link is not None and self._coordinator_link.is_open:
            self._coordinator_link.send(pack(message))


def _may_fill(peer: Peer, model_shard: ModelShard) -> bool:
    """Whether the first values of a model may be a peer's: where contributions are judged, only a validator's."""
    return peer.role == "validator" or not model_shard.needs_validator


def _all_have(theirs: list[set[SnapshotId]], one: SnapshotId) -> bool:
    return all(one in held for held in theirs)
