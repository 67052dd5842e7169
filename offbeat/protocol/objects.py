"""The conversation between stores of objects and their directory.

store                                           directory
  | -- StoreHello(address, directories) ---------> |   is known by this address from now on
  | <----- StoreWelcome -------------------------- |
  | -- PutObject(name, meta, ...) ---------------> |   has it, or makes it from now on
  | -- ObjectWhole(name, digest) ----------------> |   has made all of it
  | <----- PutTaken(name) ------------------------ |
  | -- WithdrawPut(name) ------------------------> |   instead of ObjectWhole: its maker is gone
  | -- WantObject(name) -------------------------> |   once for all readers on the store's machine; again to try again
  | <----- ObjectFound(name, meta, feeders) ------ |   or ObjectInline(name, meta, data), as soon as it is put
  | <----- ChangeFeeder(name, stripe, feeder) ---- |   whenever a reader is to read from another store
  | <----- RestartObject(name, generation) ------- |   what came of it may be wrong: from the start
  | -- StripeArrived(name, stripe) --------------> |   the store has all of it
  | -- FeederFailed(name, stripe, feeder) -------> |   cannot read from it
  | -- ReaderRate(name, stripe, reader, rate) ---> |   how fast it can send to a reader that it has more for
  | -- DropObject(name) -------------------------> |   may this copy go?
  | <----- ObjectDropped(name, granted) ---------- |
  | -- DeleteObject(name) -----------------------> |   anybody
  | <----- ForgetObject(name, reason) ------------ |   all that have it, or wait for it
  | <----- ObjectDeleted(name) ------------------- |   it is gone: the store may put the name again
  | -- WantVersions(name, after, waits) ---------> |   which versions of the name's id are there?
  | <----- VersionsKnown(name, versions, ...) ---- |   at once, or as soon as one after that is whole
  | -- ReduceObjects(target, sources, ...) ------> |   the caller's store: it keeps the sum
  | <----- RunStage(target, ..., slot, source) --- |   the store of a source adds
  | <----- FeedStage(target, ..., slot, child) --- |   what this child sends
  | -- ChildArrived(target, ..., slot, child) ---> |   all of it is in the sum
  | -- ChildFailed(target, ..., slot, child) ----> |   cannot read from its store
  | -- RefuseSum(target, reason) ----------------> |   has no room for the sum that it is to make
  | <----- ReduceSmall(target, sources, parts) --- |   instead of stages: the caller's store adds
  | <----- ReduceSettled(target, used) ----------- |   which sources are in the sum
  | <----- SumWaits(target, missing) ------------- |   whoever wants the sum, for people
  | <----- ObjectRefused(name, reason) ----------- |   instead of any of these
  | -- StageFed(feed, start) --------------------> |   where a spare is to continue a sum, if it `splices`
  | -- StageRuns(order), StageFed(feed) ---------> |   reports to a directory that begins anew, after StoreHello

A directory that begins anew learns what there is from the stores: each puts again what it has or makes, reports the
stages that it runs, asks again for its sums, and wants again what it waits for.

A store is named by the address at which it serves others. A name stands for bytes that never change; a *generation* of
it is one attempt at making them, and everything that belongs to an earlier one is thrown away.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from offbeat.protocol.bounds import Count, Dtype, Seconds, Text
from offbeat.protocol.decoding import read_message

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE_BYTES = 64 << 10
"""Objects of at most so many bytes travel in messages, and the directory keeps a copy of them."""
MAX_SOURCES = 4096
MAX_STRIPES = 256
MAX_VERSIONS = 1024
MAX_DIRECTORIES = 1024
MOST_NAMED = 8
"""The sources of a sum that are named to those who wait for it."""

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
ObjectId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Stripe = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STRIPES)]
Slot = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SOURCES)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Generations = Annotated[tuple[Generation, ...], msgspec.Meta(max_length=MAX_STRIPES)]
"""The generation of each stripe of an object."""
_Sources = Annotated[int, msgspec.Meta(ge=1, le=MAX_SOURCES)]
_Inline = Annotated[bytes, msgspec.Meta(max_length=INLINE_BYTES)]
_ContentDigest = Annotated[str, msgspec.Meta(max_length=32)]
Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
ReduceOp = Literal["sum", "mean", "min", "max", "prod"]
WireDtype = Literal["", "bfloat16", "float16"]
"""The dtype in which sources and partial sums of a reduce travel; "" for their own."""


class ObjectName(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """The name of bytes that never change.

    Args:
        id: as its user calls it.
        version: of several under one id.
    """

    id: ObjectId
    version: Count = 0

    def __str__(self) -> str:
        return f"{self.id!r}" if not self.version else f"{self.id!r} version {self.version}"


ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes of objects, as torch calls them without "torch.", with the bytes of an element."""


ElementRange = tuple[Count, Count]
"""The first element of a range, and the one after its last."""


class UsedSource(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source that is in a sum.

    Args:
        name: of it.
        ranges: of the sum's elements that it is in, ascending; () for all of them.
    """

    name: ObjectName
    ranges: Annotated[tuple[ElementRange, ...], msgspec.Meta(max_length=MAX_STRIPES * 16)] = ()


_Used = Annotated[tuple[UsedSource, ...], msgspec.Meta(max_length=MAX_SOURCES)]


class ObjectMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A description of an object.

    Args:
        dtype: of its elements, one of `ITEM_BYTES`.
        shape: of the tensor.
        size_bytes: of all of it.
        stripes: into which it is cut.
    """

    dtype: Dtype
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=16)]
    size_bytes: Count
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)] = 1

    def __post_init__(self) -> None:
        if self.size_bytes != self.numel * ITEM_BYTES.get(self.dtype, -1):
            raise ValueError(f"{self.size_bytes} bytes are no {self}")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an element."""
        return ITEM_BYTES[self.dtype]


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    name: ObjectName


class StoreHello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A store's first word to a directory: the address at which it serves others.

    Args:
        directories: the addresses of all, as the store was told them; this one is `number` of them, from 0.
        again: whether it has lost a link with this directory before, and reports all that it has and waits for.
    """

    address: Address
    directories: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=MAX_DIRECTORIES)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DIRECTORIES)]
    again: bool = False


class StoreWelcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The directory's answer: the store is one of those that it knows."""


class PutObject(_Message, frozen=True, tag=True, kw_only=True):
    """A store has an object, or makes it from now on.

    Args:
        meta: what it is.
        generations: of each stripe: a number that the maker chose and nobody else uses.
        whole: whether the store has all of it.
        digest: of all of its bytes; "" as long as they are not all there.
        inline: the bytes of a small one.
        used: the sources that it was made of, if it is a sum.
    """

    meta: ObjectMeta
    generations: Generations
    whole: bool = False
    digest: _ContentDigest = ""
    inline: _Inline | None = None
    used: _Used = ()

    def __post_init__(self) -> None:
        if len(self.generations) != self.meta.stripes:
            raise ValueError(f"{len(self.generations)} generations are said for {self.meta.stripes} stripes")
        if self.whole and not self.digest:
            raise ValueError(f"the digest of {self.name} is missing")
        if self.inline is not None and len(self.inline) != self.meta.size_bytes:
            raise ValueError(f"{len(self.inline)} bytes are no {self.meta}")


class PutTaken(_Message, frozen=True, tag=True):
    """The store's put holds: it is the first of its name, or like the first."""


class ObjectWhole(_Message, frozen=True, tag=True, kw_only=True):
    """The store that makes an object has all of it; with the digest of its bytes."""

    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]


class WithdrawPut(_Message, frozen=True, tag=True):
    """Word that the store does not have what it has put: its client has ended, or it was deleted meanwhile."""


class WantObject(_Message, frozen=True, tag=True, kw_only=True):
    """A store wants an object, or asks again for what nobody feeds it.

    Args:
        have_bytes: of it that the store has.
    """

    have_bytes: Count = 0


class StopWanting(_Message, frozen=True, tag=True):
    """Word that no client of the store waits for the object any more."""


class StripeFeeder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The feeder of a stripe.

    Args:
        generation: of the stripe.
        store: that has it; "" if there is none just now.
    """

    generation: Generation
    store: Annotated[str, msgspec.Meta(max_length=256)]


class ObjectFound(_Message, frozen=True, tag=True, kw_only=True):
    """An object is there, or is being made.

    Args:
        stripes: where to read each from.
        settled: whether its bytes will not change; a sum may still begin anew.
    """

    meta: ObjectMeta
    stripes: Annotated[tuple[StripeFeeder, ...], msgspec.Meta(min_length=1, max_length=MAX_STRIPES)]
    settled: bool = True

    def __post_init__(self) -> None:
        if len(self.stripes) != self.meta.stripes:
            raise ValueError(f"{len(self.stripes)} feeders are said for {self.meta.stripes} stripes")


class ObjectInline(_Message, frozen=True, tag=True, kw_only=True):
    """An object is there, and these are its bytes."""

    meta: ObjectMeta
    generations: Generations
    data: _Inline

    def __post_init__(self) -> None:
        if len(self.generations) != self.meta.stripes:
            raise ValueError(f"{len(self.generations)} generations are said for {self.meta.stripes} stripes")
        if len(self.data) != self.meta.size_bytes:
            raise ValueError(f"{len(self.data)} bytes are no {self.meta}")


class ChangeFeeder(_Message, frozen=True, tag=True, kw_only=True):
    """Read a stripe from another store, from where this one is; "" if there is none just now."""

    generation: Generation
    stripe: Stripe
    feeder: Annotated[str, msgspec.Meta(max_length=256)]


class RestartObject(_Message, frozen=True, tag=True, kw_only=True):
    """An order to read a stripe from the start, since the bytes that have come may be wrong.

    Args:
        stripe: of which that is true.
        settled: as of `ObjectFound`.
    """

    generation: Generation
    stripe: Stripe
    settled: bool = True


class StripeArrived(_Message, frozen=True, tag=True, kw_only=True):
    """The store has all of a stripe."""

    generation: Generation
    stripe: Stripe


class FeederFailed(_Message, frozen=True, tag=True, kw_only=True):
    """The store cannot read a stripe from its feeder."""

    generation: Generation
    stripe: Stripe
    feeder: Address


class ReaderRate(_Message, frozen=True, tag=True, kw_only=True):
    """The rate at which the store can send to one that reads from it, as seen while it had more to send.

    Args:
        stripe, generation: of the object that it sends; the generation of a sum's part is 0.
        reader: the store that reads.
    """

    generation: Generation
    stripe: Stripe
    reader: Address
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0, lt=1e15)]


class DropObject(_Message, frozen=True, tag=True):
    """The store needs the memory: may it let go of its copy?"""


class ObjectDropped(_Message, frozen=True, tag=True, kw_only=True):
    """The answer; no if it is the only copy, or a sum is made of it."""

    granted: bool


class DeleteObject(_Message, frozen=True, tag=True, kw_only=True):
    """All copies of an object are to go.

    Args:
        when_read: only once no store reads it any more.
        after: once so many stores have said so, this one among them.
        generations: of what the store had, where this is repeated: others may have put the name since then; () for
            whatever is there.
    """

    when_read: bool = False
    after: _Sources = 1
    generations: Generations = ()

    @property
    def is_done_at_once(self) -> bool:
        """Whether the directory waits for nobody, and answers it."""
        return not self.when_read and self.after == 1


class ForgetObject(_Message, frozen=True, tag=True, kw_only=True):
    """An object is gone, for this reason: let go of it, and tell those who wait for it.

    Args:
        generations: of what the store itself has put, or was to make; () if the directory knows of nothing. What it
            has put since then stays.
    """

    reason: Text
    generations: Generations = ()


class ObjectDeleted(_Message, frozen=True, tag=True):
    """The answer to a `DeleteObject` that waits for nobody: what the store puts from now on is not what was deleted."""


class WantVersions(_Message, frozen=True, tag=True, kw_only=True):
    """A store asks which versions of the name's id are there; another such question takes the place of one that waits.

    Args:
        after: of interest is a version after this one.
        waits: whether the answer may wait until there is one.
    """

    after: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)] = -1
    waits: bool = False


class StopWantingVersions(_Message, frozen=True, tag=True):
    """Word that no client of the store waits for a newer version of the name's id any more."""


class VersionsKnown(_Message, frozen=True, tag=True, kw_only=True):
    """The versions of the name's id.

    Args:
        versions: that some store has all of, ascending; the last of them if they are many.
        highest: version that was put, whether or not it is still there; -1 if none was.
        refusal: why the directory does not let the store wait for them; "" if it does.
    """

    versions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_VERSIONS)] = ()
    highest: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)] = -1
    refusal: Text = ""


class ReduceObjects(_Message, frozen=True, tag=True, kw_only=True):
    """Make a target, which is `name`, of the sources that are there first. The sum is made at the store that asks.

    Args:
        sources: of which it may be made.
        op: how.
        count: of how many it is made.
        least: with so many it is made after `patience_s`, if there are not `count` then.
        patience_s: for `count` sources; None for as long as it takes.
        in_order: add in the order of `sources`, so that the sum has the same bits each time; needs all of them.
        striped: whether each of the first `count` sources' stores makes the sum of one stripe, for all to read; else
            the store that asks makes all of it.
        most_stripes: with stripes, so many at most.
        wire: the dtype in which sources and partial sums travel, if it is another one than they have.
        splices: whether a source that takes a lost one's place is added from where that one ended.
    """

    sources: Annotated[tuple[ObjectName, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]
    op: ReduceOp
    count: _Sources
    least: _Sources
    patience_s: Seconds | None = None
    in_order: bool = False
    striped: bool = False
    most_stripes: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)] = MAX_STRIPES
    wire: WireDtype = ""
    splices: bool = False


class RunStage(_Message, frozen=True, tag=True, kw_only=True):
    """Be a position of a reduce: add what children send to an own source.

    Args:
        slot: the position; -1 is the root, which keeps the sum.
        attempt: at this stage; of the root it is the target's generation.
        source: the object to begin with, which this store has; None at the caller of others' sources.
        children: that there will be; for an attempt that is under way, fewer than before.
        positions, degree: of the tree that it is a part of.
        taken: positions that are not passed over; all of them if None.
        divisor: of the sum, at the root of a mean.
        wire: as of `ReduceObjects`.
    """

    meta: ObjectMeta
    stripe: Stripe
    slot: Slot
    attempt: Generation
    op: ReduceOp
    source: ObjectName | None
    children: Annotated[int, msgspec.Meta(ge=0, le=MAX_SOURCES)]
    positions: _Sources
    degree: _Sources
    taken: Annotated[int, msgspec.Meta(ge=0, le=MAX_SOURCES)] | None = None
    divisor: _Sources = 1
    wire: WireDtype = ""

    def __post_init__(self) -> None:
        if self.degree > self.positions:
            raise ValueError(f"{self.positions} positions cannot have {self.degree} children each")
        if self.stripe >= self.meta.stripes:
            raise ValueError(f"stripe {self.stripe} of {self.meta.stripes} is none")


class FeedStage(_Message, frozen=True, tag=True, kw_only=True):
    """A child of a stage is there, or another one in its place.

    Args:
        child: its number among the stage's children, in whose order they are added.
        store: that has what it sends.
        source: the object itself, if the child has no children; None for the sum of stage `child_slot`.
        child_attempt: of that stage.
        splices: whether the stage is to say first from which element on it will add the child (`StageFed`), and to wait
            until it is told again.
    """

    stripe: Stripe
    slot: Slot
    attempt: Generation
    child: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SOURCES)]
    store: Address
    source: ObjectName | None
    child_slot: Slot
    child_attempt: Generation
    splices: bool = False


class EndStage(_Message, frozen=True, tag=True, kw_only=True):
    """A stage, of any attempt before this one, is not needed any more."""

    stripe: Stripe
    slot: Slot
    attempt: Generation


class StageRuns(_Message, frozen=True, tag=True, kw_only=True):
    """A report to a directory that knows nothing yet: this store runs a stage, as ordered by an earlier one."""

    order: RunStage


class StageFed(_Message, frozen=True, tag=True, kw_only=True):
    """A report, after `StageRuns`: this child feeds the stage. Or the answer to a feed that `splices`.

    Args:
        arrived: whether all of its bytes are in the stage's sum.
        start: the element of the stripe from which on it will be added.
    """

    feed: FeedStage
    arrived: bool = False
    start: Count = 0


class ChildArrived(_Message, frozen=True, tag=True, kw_only=True):
    """Word that all bytes of a child are in the stage's sum."""

    stripe: Stripe
    slot: Slot
    attempt: Generation
    child: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SOURCES)]


class ChildFailed(_Message, frozen=True, tag=True, kw_only=True):
    """A stage cannot read what its child at this store sends.

    Args:
        again: whether it has said so before and nothing came of it: perhaps the child can be read now.
    """

    stripe: Stripe
    slot: Slot
    attempt: Generation
    child: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SOURCES)]
    store: Address
    again: bool = False


class ReduceSmall(_Message, frozen=True, tag=True, kw_only=True):
    """The parts of a small sum, in the order in which they are added; the store puts it as this generation."""

    meta: ObjectMeta
    generation: Generation
    op: ReduceOp
    used: Annotated[tuple[ObjectName, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]
    parts: Annotated[tuple[_Inline, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]

    def __post_init__(self) -> None:
        if len(self.used) != len(self.parts) or any(len(part) != self.meta.size_bytes for part in self.parts):
            raise ValueError(f"the parts of a sum are no {self.meta}, or are not as many as their names")


class ReduceSettled(_Message, frozen=True, tag=True, kw_only=True):
    """The sources that are in the sum."""

    used: Annotated[tuple[UsedSource, ...], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]


class SumWaits(_Message, frozen=True, tag=True, kw_only=True):
    """The answer to a `WantObject` of a sum that is not made: the sources that it waits for.

    Args:
        lacking: so many more are needed.
        missing: sources that nobody has all of, the first ones of them; `more` is the number of the others.
    """

    lacking: Annotated[int, msgspec.Meta(ge=0, le=MAX_SOURCES)]
    missing: Annotated[tuple[ObjectName, ...], msgspec.Meta(max_length=MOST_NAMED)] = ()
    more: Annotated[int, msgspec.Meta(ge=0, le=MAX_SOURCES)] = 0


class RefuseSum(_Message, frozen=True, tag=True, kw_only=True):
    """Word that a store cannot make a sum, or a stripe of it, that was to be made there."""

    reason: Text


class ObjectRefused(_Message, frozen=True, tag=True, kw_only=True):
    """The refusal of something that a store has said of this object.

    Args:
        differs: whether it is because others said something else of it.
        is_there: whether the name stands for an object nevertheless, or a sum that is being made.
        generations: of the put that is refused; () if it is something else.
    """

    reason: Text
    differs: bool = False
    is_there: bool = False
    generations: Generations = ()


FromStore = (
    PutObject
    | ObjectWhole
    | WithdrawPut
    | WantObject
    | StopWanting
    | StripeArrived
    | FeederFailed
    | ReaderRate
    | DropObject
    | DeleteObject
    | WantVersions
    | StopWantingVersions
    | ReduceObjects
    | ChildArrived
    | ChildFailed
    | RefuseSum
    | StageRuns
    | StageFed
)
FromDirectory = (
    PutTaken
    | ObjectFound
    | ObjectInline
    | ChangeFeeder
    | RestartObject
    | ObjectDropped
    | ForgetObject
    | ObjectDeleted
    | VersionsKnown
    | RunStage
    | FeedStage
    | EndStage
    | ReduceSmall
    | ReduceSettled
    | SumWaits
    | ObjectRefused
)

_encode = msgspec.msgpack.Encoder().encode
_from_store = msgspec.msgpack.Decoder(StoreHello | FromStore).decode
_from_directory = msgspec.msgpack.Decoder(StoreWelcome | FromDirectory).decode


def pack(message: StoreHello | StoreWelcome | FromStore | FromDirectory) -> bytes:
    """The message as a frame's metadata."""
    return _encode(message)


def from_store_of(metadata: Buffer) -> StoreHello | FromStore:
    """Read what a store says to its directory.

    Raises:
        PeerError: if it is none of that.
    """
    message: StoreHello | FromStore = read_message(_from_store, metadata, "this store of objects")
    return message


def from_directory_of(metadata: Buffer) -> StoreWelcome | FromDirectory:
    """Read what a directory says.

    Raises:
        PeerError: if it is none of that.
    """
    message: StoreWelcome | FromDirectory = read_message(_from_directory, metadata, "this directory of objects")
    return message
