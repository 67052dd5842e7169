"""What workers and shards of a parameter server say to each other; bodies are raw elements of blocks.

worker                                       shard (the coordinator is the first)
  | -- Open(model) + details -----------------> |   once per model, to the coordinator when all others have opened it
  | <----- Opened(wants_values) --------------- |
  | -- Fill(block) + values ------------------> |   the first worker, where the shard has none
  | -- Announce(clock, weight, hyper) --------> |   to the coordinator: it has computed a contribution
  | <----- Granted(clock) --------------------- |   it may push; not if it was told not to wait for that
  | -- Part(clock, block) + gradient ---------> |   to each block's shard
  | <----- Go(step, version, staleness) ------- |   released for the next step
  | <----- Values(step, block) + values ------- |   from each block's shard, as each is updated
  | -- Pulled(step) --------------------------> |   all blocks are here
  | -- Ask(number, question, ...) ------------> |   a collective question beside the data
  | <----- Answer(number, ...) ---------------- |
  | -- Fetch(model) --------------------------> |   to each shard: the optimizer's state, for a checkpoint
  | <----- Piece(block, name, key) + elements - |   one per tensor, then Done
  | -- Replace(model) ------------------------> |   the first worker, to the coordinator: it has other parameters
  | <----- MayPut(refused) -------------------- |   from each shard, when all others wait for that
  | -- Put(block, name, key) + elements ------> |   the state back; also the values. Then PutAll, and Done for that
  | <----- Safe(clock) ------------------------ |   its contributions before that one are in two snapshots
  | <----- Told(text) ------------------------- |   something for people
  | <----- Refused(reason) -------------------- |   what the worker asked cannot be; the session ends
  | -- TellStatus(status) --------------------> |   to the coordinator, for whoever looks
  | -- Leaves(step) --------------------------> |   to the coordinator: it was told to leave, and says good-bye

The other shards say Enlist, Filled, Nearly, Whole, Parted, Save and Saved to the coordinator, and it tells them what it
decides: Begin, Admit, Applied, Dropped, Released, Gone, Committed, Withdrawn, Replacing, Mark, Adopt. How another plan
comes to hold is said in `plan_swap`. Who comes back says so in its details (see `offbeat.coordinator.reconnect`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec

from offbeat.errors import PeerError
from offbeat.protocol.checkpoints import (
    DEALING,
    LOADING,
    REPLACED_IN,
    Done,
    Fetch,
    MayPut,
    Piece,
    Put,
    PutAll,
    Replace,
)
from offbeat.protocol.data_leases import FromData, ToData
from offbeat.protocol.plan_swap import LEAVING, Adopt, Agreed, Proposed, Swap, Swapped
from offbeat.protocol.shards import (
    Admit,
    Applied,
    Begin,
    Committed,
    Dropped,
    Enlist,
    Filled,
    Gone,
    Mark,
    Nearly,
    Parted,
    Released,
    Replacing,
    Save,
    Saved,
    Whole,
    Withdrawn,
)
from offbeat.protocol.status import Look, Scene, Seen, Sight, TellStatus
from offbeat.protocol.training import (
    MOST_REFUSAL,
    SECRET_BYTES,
    About,
    Announce,
    Answer,
    Answered,
    Ask,
    Back,
    BlockOf,
    Details,
    Evicted,
    Fill,
    Go,
    Granted,
    Leaves,
    Open,
    Opened,
    Part,
    PieceOf,
    Pulled,
    Refused,
    Safe,
    Told,
    Values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FromWorker = (
    Open | Fill | Announce | Part | Pulled | Look | TellStatus | Ask | Fetch | Replace | Put | PutAll | FromData | Swap
    | Agreed | Leaves
)  # fmt: skip
FromShard = Enlist | Filled | Nearly | Whole | Parted | Save | Saved
# Of the coordinator, to all shards.
Decision = Admit | Applied | Dropped | Released | Gone | Committed | Withdrawn | Replacing
FromChief = Decision | Begin | Mark | Refused | Adopt
ToWorker = (
    Opened | Granted | Go | Values | Evicted | Answer | Sight | Refused | Safe | Told | Piece | Done | MayPut
    | ToData | Proposed | Adopt | Swapped
)  # fmt: skip
# What each role may say to a shard; see `offbeat.wire.messages.Claim`.
SAYS: dict[str, tuple[type, ...]] = {
    "worker": get_args(FromWorker),
    "shard": get_args(FromShard),
    "onlooker": (Look,),
    "operator": (Look, Swap),
}
__all__ = [
    "DEALING",
    "LEAVING",
    "LOADING",
    "MOST_REFUSAL",
    "REPLACED_IN",
    "SECRET_BYTES",
    "About",
    "Admit",
    "Adopt",
    "Agreed",
    "Announce",
    "Answer",
    "Answered",
    "Applied",
    "Ask",
    "Back",
    "Begin",
    "BlockOf",
    "Committed",
    "Decision",
    "Details",
    "Done",
    "Dropped",
    "Enlist",
    "Evicted",
    "Fetch",
    "Fill",
    "Filled",
    "FromChief",
    "FromShard",
    "FromWorker",
    "Go",
    "Gone",
    "Granted",
    "Leaves",
    "Look",
    "Mark",
    "MayPut",
    "Nearly",
    "Open",
    "Opened",
    "Part",
    "Parted",
    "Piece",
    "PieceOf",
    "Proposed",
    "Pulled",
    "Put",
    "PutAll",
    "Refused",
    "Released",
    "Replace",
    "Replacing",
    "Safe",
    "Save",
    "Saved",
    "Scene",
    "Seen",
    "Sight",
    "Swap",
    "Swapped",
    "TellStatus",
    "ToWorker",
    "Told",
    "Values",
    "Whole",
    "Withdrawn",
    "details_of",
    "from_chief",
    "from_guest",
    "pack",
    "scenes_of",
    "to_worker",
]

_encode = msgspec.msgpack.Encoder().encode
_from_guest = msgspec.msgpack.Decoder(FromWorker | FromShard).decode
_from_chief = msgspec.msgpack.Decoder(FromChief).decode
_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_details = msgspec.msgpack.Decoder(Details).decode
_scenes = msgspec.msgpack.Decoder(Annotated[tuple[Scene, ...], msgspec.Meta(max_length=256)]).decode


def pack(message: FromWorker | ToWorker | FromShard | FromChief | Details | tuple[Scene, ...]) -> bytes:
    """The message as a frame's metadata, or body."""
    return _encode(message)


def details_of(body: bytes | bytearray) -> Details:
    """What a worker says about its model.

    Raises:
        PeerError: if it is not that.
    """
    details: Details = _read(_details, body, "this worker's model")
    if any(piece.name >= len(details.names) for block in details.blocks for piece in block.pieces):
        raise PeerError("Cannot understand this worker's model: a piece belongs to no parameter.")
    return details


def scenes_of(body: bytes | bytearray | memoryview) -> tuple[Scene, ...]:
    """What the coordinator sees.

    Raises:
        PeerError: if it is not that.
    """
    scenes: tuple[Scene, ...] = _read(_scenes, body, "what this server sees")
    return scenes


def from_guest(metadata: bytes) -> FromWorker | FromShard:
    """What a worker or an onlooker says, or another shard to the coordinator.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromWorker | FromShard = _read(_from_guest, metadata, "this peer")
    return message


def from_chief(metadata: bytes) -> FromChief:
    """What the coordinator says to another shard.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromChief = _read(_from_chief, metadata, "the coordinator")
    return message


def to_worker(metadata: bytes) -> ToWorker:
    """What a shard says.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: ToWorker = _read(_to_worker, metadata, "this server")
    return message


def _read(decode: Callable[[Any], Any], data: bytes | bytearray | memoryview, what: str) -> Any:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: text that is not UTF-8
        raise PeerError(f"Cannot understand {what}: {error}.") from error
