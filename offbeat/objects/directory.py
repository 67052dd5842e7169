"""The directory: which stores have an object, who reads it from whom, and which reduces are under way.

`Directory.handle(store, message)` takes what a store says (`offbeat.protocol.objects`), and returns what stores are to
be told. It does no arithmetic and loads no torch: small objects and the parts of small sums pass through it as bytes,
all others pass from store to store. What it knows it has from stores, so another one learns it by asking them.

Each name stands for the same bytes for ever. A second put of it is compared with the first by shape, dtype and digest;
until both digests are known, only the first one is read. Where the one that made an object is lost before anybody has
all of it, who makes it again begins a new generation, since nobody knows that the bytes are the same.

Without I/O and without time. After Hoplite (Zhuang et al., SIGCOMM 2021, section 4).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from offbeat.objects.chains import Chains, StripeOrder
from offbeat.objects.directory_entry import Entry, Tombstones
from offbeat.objects.goodput import Goodput
from offbeat.objects.reduce_checks import why_not_of, why_not_so
from offbeat.objects.reduction import Reduction
from offbeat.objects.running_stages import collect
from offbeat.objects.small_reduction import SMALL_SUM_BYTES, SmallReduction
from offbeat.objects.stripes import stripes_for
from offbeat.objects.version_index import VersionIndex
from offbeat.protocol.objects import (
    INLINE_BYTES,
    MAX_VERSIONS,
    MOST_NAMED,
    ChangeFeeder,
    ChildArrived,
    ChildFailed,
    DeleteObject,
    DropObject,
    EndStage,
    FeederFailed,
    ForgetObject,
    ObjectDeleted,
    ObjectDropped,
    ObjectFound,
    ObjectInline,
    ObjectMeta,
    ObjectName,
    ObjectRefused,
    ObjectWhole,
    PutObject,
    PutTaken,
    ReaderRate,
    ReduceObjects,
    ReduceSettled,
    RefuseSum,
    RestartObject,
    StageFed,
    StageRuns,
    StopWanting,
    StopWantingVersions,
    StripeArrived,
    StripeFeeder,
    SumWaits,
    UsedSource,
    VersionsKnown,
    WantObject,
    WantVersions,
    WithdrawPut,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.objects.reduce_plan import LinkEstimate
    from offbeat.objects.running_stages import RunningStage
    from offbeat.objects.stripe_sum import Instructions
    from offbeat.protocol.objects import FromStore

MAX_PARKED = 1024
"""Objects that nobody has put yet and that one store may wait for."""
_TRIED_S = 1.0  # for which a stripe takes at least, where the order of its readers is tried
_INLINE_CACHE_BYTES = 64 << 20
_MOST_LOST = 4096


class Directory:
    """The state of all objects, or of those of one shard.

    Args:
        link: what is supposed of the links between stores, for the plans of reduces, until some have been measured.
        first_attempt: larger than all attempts of an earlier directory with the same names.
    """

    def __init__(self, link: LinkEstimate, first_attempt: int = 1) -> None:
        self.link = link
        self.goodput = Goodput()
        self._entries: dict[ObjectName, Entry] = {}
        self._index = VersionIndex()
        self._parked: dict[str, int] = {}  # by store, objects and versions that it waits for and nobody has put
        self._attempts = itertools.count(first_attempt)
        self._inline_bytes = 0
        self._inlined: dict[ObjectName, None] = {}  # the oldest first
        self._tombstones = Tombstones()
        self._lost: dict[ObjectName, None] = {}  # those that no store has any more, the oldest first

    @property
    def measured_link(self) -> LinkEstimate:
        """Return what half of the links can carry, as far as that is known."""
        return dataclasses.replace(self.link, bytes_per_s=self.goodput.usual(()) or self.link.bytes_per_s)

    def handle(self, store: str, message: FromStore) -> Instructions:
        """Take in a message of a store, and return the messages that stores are to get for it."""
        told = self._handle(message, store)
        if (entry := self._entries.get(message.name)) is not None:
            told += self._forget_if_read(entry)
            self._forget_if_unknown(entry)
        return told

    def rebuild(self, reports: list[tuple[str, FromStore]]) -> Instructions:
        """Take in what stores have and do: all that is known at the beginning of a life.

        Whole copies come first, so that the bytes that a name stands for win over later ones, and readers that have
        more come before those that have less, so that they are in this order in the chains.
        """
        told: Instructions = []
        running, present = collect(reports), {store for store, _ in reports}
        for store, message in sorted(reports, key=lambda report: _rebuild_order(report[1])):
            match message:
                case StageRuns() | StageFed():
                    continue
                case ReduceObjects() if stages := running.pop(message.name, []):
                    told += self._resume(message, store, stages, present)
                case _:
                    told += self.handle(store, message)
        for stage in (stage for stages in running.values() for stage in stages):  # their caller is gone
            told.append((stage.store, stage.end()))
        return told

    def lost(self, store: str) -> Instructions:
        """A store is gone."""
        told: Instructions = []
        entries = list(self._entries.values())
        for entry in entries:
            entry.twins.pop(store, None)
            entry.waiting.pop(store, None)
            entry.inline_at.discard(store)
            entry.put_by.pop(store, None)
            told += self._leave_chains(entry, store) + self._compare_twins(entry)
        self._index.lost(store)
        self._parked.pop(store, None)
        self.goodput.forget(store)
        for entry in entries:
            if entry.reduction is None:
                continue
            if entry.reduction.caller == store:
                told += self._end_reduction(entry)
            else:
                told += entry.reduction.lost(store) + self._sync_target(entry)
        for entry in entries:
            told += self._forget_if_read(entry)
            self._forget_if_unknown(entry)
            if entry.is_lost:
                self._lost[entry.name] = None
        self._forget_lost()
        return told

    def expire(self, target: ObjectName) -> Instructions:
        """The patience of a reduce is over."""
        entry = self._entries.get(target)
        if entry is None or entry.reduction is None:
            return []
        return entry.reduction.expire() + self._sync_target(entry)

    def entries(self) -> Iterator[Entry]:
        """Iterate over the entries, which must not be changed."""
        return iter(self._entries.values())

    def _handle(self, message: FromStore, store: str) -> Instructions:
        match message:
            case PutObject():
                return self._put(message, store)
            case ObjectWhole():
                return self._object_whole(message, store)
            case WithdrawPut():
                return self._withdraw(message, store)
            case WantObject():
                return self._want(message, store)
            case StopWanting():
                return self._stop_wanting(message, store)
            case StripeArrived():
                return self._stripe_arrived(message, store)
            case FeederFailed():
                return self._feeder_failed(message, store)
            case ReaderRate():
                return self._reader_rate(message, store)
            case DropObject():
                return self._drop(message, store)
            case DeleteObject():
                return self._delete(message, store)
            case WantVersions():
                return self._want_versions(message, store)
            case StopWantingVersions():
                self._unpark_versions(message.name.id, store)
                return []
            case ReduceObjects():
                return self._reduce(message, store)
            case ChildArrived():
                return self._child_arrived(message)
            case ChildFailed():
                return self._child_failed(message)
            case RefuseSum():
                return self._cannot_make(message, store)
            case StageRuns():
                return self._stage_runs(message, store)
            case StageFed():
                return self._stage_fed(message, store)

    # -- puts ----------------------------------------------------------------------------------------------------

    def _put(self, message: PutObject, store: str) -> Instructions:
        if message in self._tombstones:  # it was deleted while this store was away, or has not heard of it yet
            reason = f"{message.name} was deleted."
            return [(store, ForgetObject(name=message.name, reason=reason, generations=message.generations))]
        entry = self._entry(message.name)
        if why := self._why_not_put(entry, message, store):
            return self._refuse_put(entry, message, store, why)
        entry.put_by[store] = entry.note_made(message.generations)
        is_same = entry.meta is not None and list(message.generations) == entry.generations
        if is_same and message.whole:  # a copy of the same bytes, which its store reports
            entry.digest = message.digest
            return self._taken(entry, store)
        if entry.meta is not None and not is_same and (entry.digest or not entry.is_orphaned):
            entry.twins[store] = message
            return self._compare_twins(entry)
        told = self._published(entry, message, store)
        if message.inline is not None:
            self._keep_inline(entry, message.inline)
        if entry.reduction is not None:  # of small parts, which this store has added
            told += self._settled(entry, entry.reduction.used_sources)
        elif message.used:
            entry.used = message.used
        if message.whole:
            told += self._made(entry, store, message.digest)
        return told + self._answer_waiting(entry)

    def _published(self, entry: Entry, message: PutObject, store: str) -> Instructions:
        """A store makes an object, or has it: those who have a part of the same making continue, others begin anew."""
        again = entry.meta is not None
        self._describe(entry, message.meta, message.generations)
        told: Instructions = []
        for stripe, chains in enumerate(entry.chains):
            if again and entry.generations[stripe] != message.generations[stripe]:
                told += self._restart(entry, stripe, store, message.generations[stripe])
            else:
                told += self._tell_feeders(entry, stripe, chains.put(store, is_whole=False))
        return told

    def _object_whole(self, message: ObjectWhole, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is None:
            return []
        if store in entry.twins:
            entry.twins[store] = msgspec.structs.replace(entry.twins[store], whole=True, digest=message.digest)
            return self._compare_twins(entry)
        return self._made(entry, store, message.digest) if store in entry.makers else []

    def _made(self, entry: Entry, store: str, digest: str) -> Instructions:
        entry.digest = digest
        return self._taken(entry, store) + self._compare_twins(entry)

    def _taken(self, entry: Entry, store: str) -> Instructions:
        told: Instructions = [(store, PutTaken(name=entry.name))]
        for stripe in range(len(entry.chains)):
            told += self._arrived(entry, store, stripe)
        return told

    def _why_not_put(self, entry: Entry, message: PutObject, store: str) -> str:
        name, meta = message.name, message.meta
        if isinstance(entry.reduction, Reduction) or (entry.reduction is not None and entry.reduction.caller != store):
            return f"Cannot put {name}: a reduce makes it. Give one of the two another name."
        if entry.meta is not None and msgspec.structs.replace(entry.meta, stripes=meta.stripes) == meta != entry.meta:
            return f"Cannot put {name} with stripes={meta.stripes}: it is there in {entry.meta.stripes}. Say as many."
        if entry.meta is not None and entry.meta != meta:
            return f"Cannot put {name} as {meta}: it is {entry.meta} already, and the bytes of a name never change."
        if message.whole and entry.digest and message.digest != entry.digest:
            return f"Cannot put {name} again: its bytes differ from those that it stands for. Use a new version."
        return ""

    def _refuse_put(self, entry: Entry, message: PutObject, store: str, why: str) -> Instructions:
        """Refuse a put; its store lets go of the object, and of the wish to read it."""
        entry.put_by.pop(store, None)
        refused = ObjectRefused(name=entry.name, reason=why, differs=True, generations=message.generations)
        return [(store, refused), *self._stop_reading(entry, store)]

    def _compare_twins(self, entry: Entry) -> Instructions:
        """Take in the second puts that are like the first, and refuse the others, as soon as both are whole."""
        told: Instructions = []
        whole = [store for store, twin in entry.twins.items() if twin.whole]
        if whole and not entry.digest and entry.is_orphaned:  # the first one was lost before it was whole
            twin = entry.twins.pop(whole[0])
            return self._published(entry, twin, whole[0]) + self._made(entry, whole[0], twin.digest)
        for store, twin in list(entry.twins.items()) if entry.digest else ():
            if not twin.whole:
                continue
            del entry.twins[store]
            if twin.digest != entry.digest:
                told += self._refuse_put(entry, twin, store, self._why_not_put(entry, twin, store))
                continue
            told += self._taken(entry, store)
        return told

    def _stripe_arrived(self, message: StripeArrived, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is None or entry.meta is None or message.stripe >= len(entry.chains):
            return []
        chains = entry.chains[message.stripe]
        if message.generation != entry.generations[message.stripe] or store not in chains:
            return []
        told = self._arrived(entry, store, message.stripe)
        if isinstance(entry.reduction, Reduction) and store == self._root(entry, message.stripe):
            told += entry.reduction.whole(message.stripe, message.generation)
            if entry.reduction.is_whole:
                told += self._settled(entry, entry.reduction.used_sources)
        return told

    def _arrived(self, entry: Entry, store: str, stripe: int) -> Instructions:
        told = self._tell_feeders(entry, stripe, entry.chains[stripe].arrived(store))
        if store in entry.whole_at:
            for waiting in self._index.waiting_for(entry.name):
                self._unpark_versions(entry.name.id, waiting)
                told.append((waiting, self._versions(entry.name)))
            for target in list(entry.watched_by):
                told += self._source_ready(self._entries[target], entry, store)
        return told

    # -- reading -------------------------------------------------------------------------------------------------

    def _want(self, message: WantObject, store: str) -> Instructions:
        entry = self._entry(message.name)
        if entry.meta is not None:
            told = self._answer(entry, store)
            if isinstance(entry.reduction, Reduction):
                told += entry.reduction.retry() + self._sync_target(entry)
            return told + self._sum_waits(entry, store)
        if store not in entry.waiting:
            parked = self._parked.get(store, 0)
            if parked >= MAX_PARKED:
                reason = f"Cannot wait for {message.name}: this store waits for {parked} objects that nobody has put."
                return [(store, ObjectRefused(name=message.name, reason=reason))]
            self._parked[store] = parked + 1
            entry.waiting[store] = None
        return self._sum_waits(entry, store)

    def _sum_waits(self, entry: Entry, store: str) -> Instructions:
        """Tell a store that wants a sum which of its sources are missing."""
        reduction = entry.reduction
        if reduction is None:
            return []
        lacking = reduction.lacking
        there = reduction.there
        missing = [source for source in reduction.request.sources if source not in there] if lacking else []
        more = max(0, len(missing) - MOST_NAMED)
        return [(store, SumWaits(name=entry.name, lacking=lacking, missing=tuple(missing[:MOST_NAMED]), more=more))]

    def _stop_wanting(self, message: StopWanting, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is None:
            return []
        return self._stop_reading(entry, store)

    def _stop_reading(self, entry: Entry, store: str) -> Instructions:
        if store in entry.waiting:
            del entry.waiting[store]
            self._parked[store] -= 1
        told: Instructions = []
        for stripe, chains in enumerate(entry.chains):
            if store in chains.feeders:  # it has not all of it, and does not make it
                told += self._tell_feeders(entry, stripe, chains.lose(store))
        return told

    def _leave_chains(self, entry: Entry, store: str) -> Instructions:
        """A store has nothing of an object any more."""
        told: Instructions = []
        for stripe, chains in enumerate(entry.chains):
            told += self._tell_feeders(entry, stripe, chains.lose(store))
        return told

    def _feeder_failed(self, message: FeederFailed, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        if (
            entry is None
            or message.stripe >= len(entry.chains)
            or message.generation != entry.generations[message.stripe]
            or entry.chains[message.stripe].feeders.get(store) != message.feeder
        ):
            return []
        chains = entry.chains[message.stripe]
        return self._tell_feeders(entry, message.stripe, chains.feeder_failed(store, message.feeder))

    def _reader_rate(self, message: ReaderRate, feeder: str) -> Instructions:
        """Move a slow store to the end of its chain, so that nobody waits for it; each one once for an object.

        As long as nobody knows what others can do, the first one that reads is tried there, at its second report: where
        all are equal, their order makes no difference.
        """
        store, rate = message.reader, message.bytes_per_s
        usual = self.goodput.usual({store, feeder})
        self.goodput.saw(feeder, store, rate)
        entry = self._entries.get(message.name)
        if (
            entry is None
            or message.stripe >= len(entry.chains)
            or message.generation != entry.generations[message.stripe]
            or entry.chains[message.stripe].feeders.get(store) != feeder
        ):
            return []
        assert entry.meta is not None
        entry.begun.add(store)
        takes_long = entry.meta.size_bytes / entry.meta.stripes > _TRIED_S * rate
        slow = self.goodput.slow_of(feeder, store, rate)
        if not (rate < usual / 2 if usual else takes_long) or slow in entry.moved:
            return []
        if not usual and slow not in entry.suspected:
            entry.suspected.add(slow)
            return []
        entry.moved.add(slow)
        changed = entry.chains[message.stripe].avoid(slow, self.goodput.slow)
        return self._tell_feeders(entry, message.stripe, changed)

    def _answer(self, entry: Entry, store: str) -> Instructions:
        assert entry.meta is not None
        told: Instructions = [(store, ReduceSettled(name=entry.name, used=entry.used))] if entry.used else []
        if entry.inline is not None:
            entry.inline_at.add(store)
            generations = tuple(entry.generations)
            found = ObjectInline(name=entry.name, meta=entry.meta, generations=generations, data=entry.inline)
            told.append((store, found))
        else:
            others: Instructions = []
            for stripe, chains in enumerate(entry.chains):
                later = entry.reduction.later(stripe, store) if isinstance(entry.reduction, Reduction) else ()
                changed = chains.read(store, self.goodput.slow, later, self._stripe_order(entry, stripe))
                others += self._tell_feeders(entry, stripe, changed - {store})
            feeders = tuple(
                StripeFeeder(generation, chains.feeders.get(store) or "")
                for generation, chains in zip(entry.generations, entry.chains, strict=True)
            )
            settled = entry.reduction is None
            told += [
                (store, ObjectFound(name=entry.name, meta=entry.meta, stripes=feeders, settled=settled)),
                *others,
            ]
        return told

    def _stripe_order(self, entry: Entry, stripe: int) -> StripeOrder | None:
        """Return the order of readers in a stripe of an object that was put; stripes of a sum have a ring."""
        if len(entry.chains) == 1 or entry.made_by is not None:
            return None
        return StripeOrder(stripe, len(entry.chains), entry.begun.union(*(chains.whole for chains in entry.chains)))

    def _answer_waiting(self, entry: Entry) -> Instructions:
        waiting, entry.waiting = entry.waiting, {}
        told: Instructions = []
        for store in waiting:
            self._parked[store] -= 1
            told += self._answer(entry, store)
        return told

    def _tell_feeders(self, entry: Entry, stripe: int, changed: set[str]) -> Instructions:
        feeders, generation = entry.chains[stripe].feeders, entry.generations[stripe]
        return [
            (
                store,
                ChangeFeeder(name=entry.name, stripe=stripe, generation=generation, feeder=feeders[store] or ""),
            )
            for store in sorted(changed)
        ]

    # -- versions ------------------------------------------------------------------------------------------------

    def _want_versions(self, message: WantVersions, store: str) -> Instructions:
        known = self._versions(message.name)
        if not message.waits or (known.versions and known.versions[-1] > message.after):
            return [(store, known)]
        parked = self._parked.get(store, 0)
        if self._index.park(message.name.id, store, message.after):
            if parked >= MAX_PARKED:
                self._index.unpark(message.name.id, store)
                reason = f"Cannot wait for versions of {message.name.id!r}: this store waits for {parked} other things."
                return [(store, msgspec.structs.replace(known, refusal=reason))]
            self._parked[store] = parked + 1
        return []

    def _versions(self, name: ObjectName) -> VersionsKnown:
        put = [self._entries[ObjectName(name.id, version)] for version in self._index.versions(name.id)]
        put = [entry for entry in put if entry.meta is not None]
        there = [entry.name.version for entry in put if entry.inline is not None or entry.whole_at]
        highest = put[-1].name.version if put else -1
        return VersionsKnown(name=ObjectName(name.id), versions=tuple(there[-MAX_VERSIONS:]), highest=highest)

    def _unpark_versions(self, id_: str, store: str) -> None:
        if self._index.unpark(id_, store):
            self._parked[store] -= 1

    # -- the end of objects --------------------------------------------------------------------------------------

    def _drop(self, message: DropObject, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        told: Instructions = []
        granted = entry is None or (bool(entry.whole_at - {store}) and not (entry.reduction or entry.watched_by))
        if entry is not None and granted:
            entry.inline_at.discard(store)
            entry.put_by.pop(store, None)
            told += self._leave_chains(entry, store)
        return [(store, ObjectDropped(name=message.name, granted=granted)), *told]

    def _withdraw(self, message: WithdrawPut, store: str) -> Instructions:
        """A store does not have what it has put: an object that no other one has, or puts, ends."""
        entry = self._entries.get(message.name)
        if entry is None:
            return []
        entry.put_by.pop(store, None)
        if entry.twins.pop(store, None) is not None or store not in entry.makers:
            return self._stop_reading(entry, store)
        told = self._leave_chains(entry, store)
        if entry.whole_at or entry.twins:
            return told + self._compare_twins(entry)
        return self._forget(entry, f"{message.name} is lost: the client that put it at {store} has ended meanwhile.")

    def _delete(self, message: DeleteObject, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        told: Instructions = []
        if entry is not None and (not message.generations or message.generations in entry.known_generations):
            entry.done_at.add(store)
            if len(entry.done_at) >= message.after:
                entry.deleted_because = f"{message.name} was deleted by the store at {store}."
                told = [] if message.when_read else self._forget(entry, entry.deleted_because)
        return [*told, (store, ObjectDeleted(name=message.name))] if message.is_done_at_once else told

    def _forget_lost(self) -> None:
        """Forget the oldest of many that no store has, whose names might be put again with the same bytes."""
        for name in list(self._lost)[: max(0, len(self._lost) - _MOST_LOST)]:
            del self._lost[name]
            if (entry := self._entries.get(name)) is not None and entry.is_lost:
                self._remove(entry)

    def _forget_if_read(self, entry: Entry) -> Instructions:
        """End an object that is to be deleted once no store reads it any more, if that is so."""
        is_read = any(chains.feeders for chains in entry.chains)
        if not entry.deleted_because or is_read or self._entries.get(entry.name) is not entry:
            return []
        return self._forget(entry, entry.deleted_because)

    def _forget(self, entry: Entry, reason: str) -> Instructions:
        callers = [] if entry.reduction is None else [entry.reduction.caller]
        told = self._end_reduction(entry) if entry.reduction is not None else []
        if entry.deleted_because:
            self._tombstones.add(entry)
        for one in sorted({*entry.stores, *entry.put_by, *callers}):
            put = entry.put_by.get(one, ())
            told.append((one, ForgetObject(name=entry.name, reason=reason, generations=put)))
        for one in entry.waiting:
            self._parked[one] -= 1
        self._inline_bytes -= len(entry.inline or b"")
        self._inlined.pop(entry.name, None)
        if entry.watched_by:  # whoever puts it again makes it for them
            self._entries[entry.name] = Entry(entry.name, watched_by=entry.watched_by)
        else:
            self._remove(entry)
        return told

    # -- reduces -------------------------------------------------------------------------------------------------

    def _reduce(self, message: ReduceObjects, store: str) -> Instructions:
        entry = self._entry(message.name)
        is_made = entry.reduction is not None or not entry.is_orphaned
        if entry.made_by is not None and _is_same_sum(entry.made_by, message) and is_made:
            if entry.reduction is not None or not entry.used:
                return []  # another member of the same all-reduce asks, or its caller again
            return [(store, ReduceSettled(name=message.name, used=entry.used))]
        used = {source.name for source in entry.used}
        if entry.made_by is None and used and not entry.is_orphaned and used <= set(message.sources):
            entry.made_by = message  # for an earlier directory, which had no time to tell
            return [(store, ReduceSettled(name=message.name, used=entry.used))]
        if why := self._why_not_reduce(entry, message):
            is_made = entry.reduction is not None
            is_there = is_made or entry.meta is not None
            return [(store, ObjectRefused(name=message.name, reason=why, differs=is_made, is_there=is_there))]
        generation = next(self._attempts)
        entry.put_by.setdefault(store, entry.note_made((generation,)))
        return self._begin_reduction(entry, SmallReduction(message, store, generation))

    def _resume(
        self, message: ReduceObjects, store: str, stages: list[RunningStage], present: set[str]
    ) -> Instructions:
        """Continue with a reduce that an earlier directory planned; begin it anew where too little of it is left."""
        entry = self._entry(message.name)
        reduction = None
        if not (message.splices or self._why_not_reduce(entry, message)):  # nobody else knows where a stage has spliced
            reduction = Reduction.resumed(
                message, store, stages, self.measured_link, lambda: next(self._attempts), self._holders, self._slow
            )
        if reduction is None:
            return [(stage.store, stage.end()) for stage in stages] + self._reduce(message, store)
        self._describe(entry, reduction.meta)
        reduction.forget_absent(present)
        told = reduction.repeat_orders(stages) + self._begin_reduction(entry, reduction)
        entry.made_by = message
        return told + self._sync_target(entry) + self._answer_waiting(entry)

    def _begin_reduction(self, entry: Entry, reduction: Reduction | SmallReduction) -> Instructions:
        message, store = reduction.request, reduction.caller
        entry.reduction, entry.made_by = reduction, message
        for source in message.sources:
            self._entry(source).watched_by.append(message.name)
        told: Instructions = []
        for source in message.sources:
            if entry.reduction is None:
                break  # two of them are unlike each other
            known = self._entries[source]
            holders = known.whole_at
            if holders:
                told += self._source_ready(entry, known, store if store in holders else min(holders))
        return told + [one for waiting in entry.waiting for one in self._sum_waits(entry, waiting)]

    def _why_not_reduce(self, entry: Entry, message: ReduceObjects) -> str:
        name, sources = message.name, message.sources
        if entry.reduction is not None:
            return f"Cannot reduce into {name}: another reduce makes it, of other sources or in another way."
        if entry.meta is not None and not (entry.is_orphaned and entry.meta.stripes <= message.count):
            return f"Cannot reduce into {name}: it is there already, and the bytes of a name never change."
        if why := why_not_so(message):
            return why
        if name in self._ingredients(sources):
            return f"Cannot reduce into {name}: it would be a source of itself."
        return ""

    def _ingredients(self, sources: tuple[ObjectName, ...]) -> set[ObjectName]:
        """The sources, and all that they are being made of."""
        found: set[ObjectName] = set()
        todo = list(sources)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                entry = self._entries.get(name)
                todo += entry.reduction.request.sources if entry is not None and entry.reduction is not None else ()
        return found

    def _source_ready(self, entry: Entry, source: Entry, store: str) -> Instructions:
        """A source of a reduce is whole, at a store."""
        reduction = entry.reduction
        assert reduction is not None
        assert source.meta is not None
        if reason := why_not_of(reduction.request, source.name, source.meta, reduction.meta):
            return self._refuse_reduction(entry, reason)
        told = self._plan(entry, reduction, source.meta) if reduction.meta is None else []
        reduction = entry.reduction
        assert reduction is not None
        if isinstance(reduction, SmallReduction):
            if source.inline is not None:
                told += reduction.ready(source.name, source.inline)
            return told
        return told + reduction.ready(source.name, store) + self._sync_target(entry)

    def _cannot_make(self, message: RefuseSum, store: str) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is None or entry.reduction is None:
            return []
        roots = {entry.reduction.caller, *(self._root(entry, stripe) for stripe in range(len(entry.chains)))}
        return self._refuse_reduction(entry, message.reason, differs=False) if store in roots else []

    def _refuse_reduction(self, entry: Entry, reason: str, *, differs: bool = True) -> Instructions:
        refused = [(at, ObjectRefused(name=entry.name, reason=reason, differs=differs)) for at in self._involved(entry)]
        told = self._end_reduction(entry)
        self._remove(entry)
        return [*told, *refused]

    def _involved(self, entry: Entry) -> list[str]:
        caller = [] if entry.reduction is None else [entry.reduction.caller]
        return sorted({*caller, *entry.stores})

    def _plan(self, entry: Entry, reduction: Reduction | SmallReduction, meta: ObjectMeta) -> Instructions:
        """The first source is there, so it is known how large the sum is, and so who adds it."""
        request = reduction.request
        if meta.size_bytes <= INLINE_BYTES and meta.size_bytes * request.count <= SMALL_SUM_BYTES:
            reduction.meta = ObjectMeta(meta.dtype, meta.shape, meta.size_bytes)
            return []
        most = min(request.count, request.most_stripes)
        stripes = stripes_for(meta.size_bytes, most) if request.striped and request.count > 1 else 1
        if stripes == 1 and request.striped:
            request = msgspec.structs.replace(request, striped=False)
        target = entry.meta or ObjectMeta(meta.dtype, meta.shape, meta.size_bytes, stripes)  # the same again, if lost
        self._describe(entry, target)
        entry.used = ()
        entry.reduction = Reduction(
            request,
            reduction.caller,
            target,
            self.measured_link,
            lambda: next(self._attempts),
            self._holders,
            self._slow,
        )
        entry.reduction.is_late = reduction.is_late
        return self._answer_waiting(entry)

    def _holders(self, source: ObjectName) -> set[str]:
        entry = self._entries.get(source)
        return set() if entry is None else entry.whole_at

    def _slow(self) -> set[str]:
        return self.goodput.slow

    def _sync_target(self, entry: Entry) -> Instructions:
        """Publish what the roots of a reduce make, and have its readers begin anew where a root does."""
        told: Instructions = []
        if isinstance(entry.reduction, Reduction):
            for stripe, part in enumerate(entry.reduction.sums):
                if part is not None and part.generation not in (0, entry.generations[stripe]):
                    told += self._restart(entry, stripe, part.root, part.generation)
        return told

    def _root(self, entry: Entry, stripe: int) -> str | None:
        part = entry.reduction.sums[stripe] if isinstance(entry.reduction, Reduction) else None
        return None if part is None else part.root

    def _restart(self, entry: Entry, stripe: int, root: str, generation: int) -> Instructions:
        """A store makes a stripe from the start: what others have of an earlier attempt is of no use."""
        chains = entry.chains[stripe]
        readers = chains.stores - {root}
        chains.restart(root)
        entry.generations[stripe] = generation
        entry.note_made(entry.generations)
        restart = RestartObject(name=entry.name, stripe=stripe, generation=generation, settled=entry.reduction is None)
        restarts = [(store, restart) for store in sorted(readers)]
        return [*restarts, *self._tell_feeders(entry, stripe, readers)]

    def _child_arrived(self, message: ChildArrived) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is not None and isinstance(entry.reduction, Reduction):
            entry.reduction.child_arrived(message.stripe, message.slot, message.attempt, message.child)
        return []

    def _child_failed(self, message: ChildFailed) -> Instructions:
        entry = self._entries.get(message.name)
        if entry is None or not isinstance(entry.reduction, Reduction):
            return []
        if message.again:
            return entry.reduction.retry() + self._sync_target(entry)
        told = entry.reduction.child_failed(message.stripe, message.slot, message.attempt, message.child, message.store)
        return told + self._sync_target(entry)

    def _stage_fed(self, message: StageFed, store: str) -> Instructions:
        """A stage says where it changes to a source that takes another's place."""
        entry = self._entries.get(message.name)
        if entry is None or not isinstance(entry.reduction, Reduction):
            return []
        return entry.reduction.spliced(message.feed, message.start, store)

    def _stage_runs(self, message: StageRuns, store: str) -> Instructions:
        """A store that was away runs a stage: it may end, unless it belongs to a reduce that continues."""
        entry, order = self._entries.get(message.name), message.order
        reduction = None if entry is None else entry.reduction
        if isinstance(reduction, Reduction) and reduction.has_stage(order.stripe, order.slot, order.attempt, store):
            return []
        return [
            (store, EndStage(name=message.name, stripe=order.stripe, slot=order.slot, attempt=order.attempt)),
        ]

    def _settled(self, entry: Entry, used: tuple[UsedSource, ...]) -> Instructions:
        told: Instructions = [(store, ReduceSettled(name=entry.name, used=used)) for store in self._involved(entry)]
        entry.used = used
        self._stop_watching(entry)
        entry.reduction = None
        return told

    def _end_reduction(self, entry: Entry) -> Instructions:
        assert entry.reduction is not None
        told = entry.reduction.end()
        self._stop_watching(entry)
        entry.reduction = None
        return told

    def _stop_watching(self, entry: Entry) -> None:
        assert entry.reduction is not None
        for source in entry.reduction.request.sources:
            known = self._entries.get(source)
            if known is not None and entry.name in known.watched_by:
                known.watched_by.remove(entry.name)
                self._forget_if_unknown(known)

    # -- entries -------------------------------------------------------------------------------------------------

    def _entry(self, name: ObjectName) -> Entry:
        self._index.add(name)
        return self._entries.setdefault(name, Entry(name))

    def _remove(self, entry: Entry) -> None:
        if self._entries.pop(entry.name, None) is not None:
            self._index.remove(entry.name)

    def _forget_if_unknown(self, entry: Entry) -> None:
        """Remove an entry if no store has the object, makes it or waits for it."""
        if entry.meta is None and not (entry.stores or entry.reduction or entry.watched_by):
            self._remove(entry)

    def _describe(self, entry: Entry, meta: ObjectMeta, generations: tuple[int, ...] = ()) -> None:
        if entry.meta is None:
            entry.meta = meta
            entry.chains = [Chains() for _ in range(meta.stripes)]
            entry.generations = list(generations) or [next(self._attempts)] * meta.stripes
            entry.note_made(entry.generations)

    def _keep_inline(self, entry: Entry, data: bytes) -> None:
        """Keep the bytes of a small object, which its store has as well; of all of them the oldest go first."""
        entry.inline = data
        self._inline_bytes += len(data)
        self._inlined[entry.name] = None
        gone = []
        for name in self._inlined:
            if self._inline_bytes <= _INLINE_CACHE_BYTES:
                break
            known = self._entries.get(name)
            if known is None or known.inline is None:
                gone.append(name)
            elif known is not entry and not known.watched_by:
                self._inline_bytes -= len(known.inline)
                known.inline = None
                gone.append(name)
        for name in gone:
            del self._inlined[name]


def _is_same_sum(one: ReduceObjects, other: ReduceObjects) -> bool:
    """Whether two ask for the same sum, each with its own patience."""
    return msgspec.structs.replace(one, patience_s=other.patience_s) == other


def _rebuild_order(message: FromStore) -> tuple[int, int]:
    match message:
        case PutObject():
            return (0 if message.whole else 1), 0
        case ReduceObjects():
            return 2, 0
        case WantObject():
            return 3, -message.have_bytes
        case _:
            return 4, 0
