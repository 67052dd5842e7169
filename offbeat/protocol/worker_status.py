"""The progress of a worker's training, for people: how far it is, how fast, what its script logged, what happened.

A worker says it about once a second: to its sentinel, by the page, and to a parameter server if it has one. Both only
keep the latest one, and hand it to whoever looks; nothing is decided by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_VALUES, MOST_EVENTS = 16, 4
MOST_NAME, MOST_TEXT, MOST_EVENT = 64, 256, 320
MOST_BYTES = 16 << 10  # of one, as the page has it

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
MOST_NUMBER = 1e15
_Number = Annotated[float, msgspec.Meta(gt=-MOST_NUMBER, lt=MOST_NUMBER)]  # refuses NaN as well
_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
_Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]


class StatusEvent(msgspec.Struct, frozen=True):
    """An event worth showing to people; `time_s` in seconds since 1970."""

    time_s: _Number
    text: Annotated[str, msgspec.Meta(max_length=MOST_EVENT)]


class TableClock(msgspec.Struct, frozen=True):
    """One worker's clock on the table of a switch, as the switch knows it.

    Args:
        worker: whose it is.
        lag: steps that it is behind the furthest.
        waited_s: for others, in all.
        silent_s: since its last packet; None before the first.
    """

    worker: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    lag: _Count
    waited_s: _Number
    silent_s: _Number | None


class TrainingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The training status of one worker.

    Args:
        host: this machine's name.
        step: as `Run.step` counts.
        exchanges: that were complete then, of all its `models`, as its last words count them.
        samples: that it has computed, in all.
        waited_s, computed_s: for others, and by itself, in all. here_s: since it trains.
        epochs: as `Run.progress` counts; below 0 if no loader was prepared.
        total_epochs, total_steps: how many there are to be, if the script has said so; else 0.
        steps_per_s, samples_per_s, epochs_per_s: lately. computing_s: by itself in a step, lately.
        cpu_cores, memory_bytes, sent_bytes_per_s: what it uses of its machine, lately; memory is 0 if that is unknown.
        values: what the script logged last, by name; also NaN.
        policy, fabric: of the plan that holds, as Python.
        residual: the norm of what it has computed and not sent, lately.
        events: the last ones.
        left: it was asked to leave, and did in order.
        clocks: of all workers, where they go on by a switch's table, and this is the one that looks.
    """

    host: _Name = ""
    step: _Count = 0
    exchanges: _Count = 0
    models: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    samples: _Count = 0
    waited_s: _Number = 0.0
    computed_s: _Number = 0.0
    here_s: _Number = 0.0
    epochs: _Number = -1.0
    total_epochs: _Number = 0.0
    total_steps: _Count = 0
    steps_per_s: _Number = 0.0
    samples_per_s: _Number = 0.0
    epochs_per_s: _Number = 0.0
    computing_s: _Number = 0.0
    cpu_cores: _Number = 0.0
    memory_bytes: _Count = 0
    sent_bytes_per_s: _Number = 0.0
    values: Annotated[dict[_Name, float], msgspec.Meta(max_length=MOST_VALUES)] = {}
    policy: _Text = ""
    fabric: _Text = ""
    residual: _Number = 0.0
    events: Annotated[tuple[StatusEvent, ...], msgspec.Meta(max_length=MOST_EVENTS)] = ()
    left: bool = False
    clocks: Annotated[tuple[TableClock, ...], msgspec.Meta(max_length=64)] = ()

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, at the present rate; None if that is not known."""
        if self.total_epochs and self.epochs >= 0:
            return _until(self.total_epochs - self.epochs, self.epochs_per_s)
        return _until(self.total_steps - self.step, self.steps_per_s) if self.total_steps else None

    @property
    def epoch_left_s(self) -> float | None:
        """Seconds until the end of this epoch, at the present rate; None if that is not known."""
        return _until(1.0 - self.epochs % 1.0, self.epochs_per_s) if self.epochs >= 0 else None


def residual_lost(norm: float) -> str:
    """Say what is lost with a worker, as a sentence behind another one; "" if that is nothing.

    >>> residual_lost(3.24159)
    ' What it had computed and not sent, of norm 3.24, is lost with it.'
    """
    return f" What it had computed and not sent, of norm {norm:.3g}, is lost with it." if norm else ""


def _until(rest: float, per_s: float) -> float | None:
    if rest <= 0:
        return 0.0
    return rest / per_s if per_s > 0 else None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TrainingStatus).decode


def pack_status(status: TrainingStatus) -> bytes:
    """Encode a status as bytes; without events if it is too long with them."""
    data = _encode(status)
    return data if len(data) <= MOST_BYTES else _encode(msgspec.structs.replace(status, events=()))


def read_status(data: Buffer) -> TrainingStatus | None:
    """Decode what `pack_status` encoded; None if it is not that."""
    try:
        status: TrainingStatus = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return status
