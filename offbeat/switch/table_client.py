"""A worker's side of the table: its update goes in row by row, then its clock, and once it may go on it reads. No I/O.

    push    the update of a step, until every row is acknowledged      INC -> INC_OK
    clock   the step is over; wait until the next one may begin        CLOCK -> GRANT
    pull    all rows, as they are now, but for those that were read    READ -> ROW
            while others were pushed
    rest    this worker makes no step now, and holds nobody up         CLOCK, as far ahead as the switch keeps track
    restore all that it has added, to a switch that knows nothing      INC -> INC_OK, as the change of its last step
    confirm that step is over, and all is in                           READ -> ROW

Whether it may go on the worker finds by itself from what the switch broadcasts: how far all are, and the windows. If it
may at once, it reads without a `CLOCK`, which a `READ` implies. What is not answered in time is sent again; all of it
may come twice. A table without rows is a barrier: there is nothing to push or to pull, only clocks.

Links carry both ways at once. So where a worker may go on while its update still goes in, it reads each row as soon as
its own part of that is acknowledged, by a `READ` with a clock of long ago, which implies nothing. The last row is read
behind all: that says that the step is over. What was read so counts if the worker might have gone on by what it knew
then, and by the windows that hold when its update is in.

A table is the sum of what each worker has added, as integers. So each keeps the sum of its own, for a switch that was
started again: since the table was last settled, when all had read the same, which all keep and none has to bring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from offbeat.errors import NumericsError
from offbeat.switch.clocks import Windows
from offbeat.switch.fixed_point import to_floats, to_integers
from offbeat.switch.packet import (
    HEADER_BYTES,
    MAGIC,
    VALUES_STEP,
    VERSION,
    Flag,
    PacketKind,
    Reason,
    distance,
    is_newer,
    wrapped,
)
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.resend_timer import ResendTimer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.job_shape import JobShape

Phase = Literal["computing", "push", "clock", "pull", "rest", "restore", "confirm"]
EPOCHS = 1 << 16
_HALF = 1 << 30
_LONG_AGO = 1 << 30  # steps: no other packet has such a clock, and no switch makes anything of it
_AHEAD_BYTES = 1 << 16  # of an update that may be under way while rows are read: requests wait behind it


def too_far(exponent: int) -> str:
    """The sentence about a value that a table with this exponent cannot hold."""
    return (
        "Cannot go on with the table at the switch: a parameter has moved further than its integers reach "
        f"(2^{exponent}). Lower the learning rate, or use BSP() or ParameterServer() - at `plan.sync`."
    )


def _narrowed(table: NDArray[np.int64], exponent: int) -> NDArray[np.int32]:
    """The same as int32.

    Raises:
        NumericsError: if a value does not fit.
    """
    found = table.astype(np.int32)
    if not np.array_equal(found, table):
        raise NumericsError(too_far(exponent))
    return found


class StepGrant(NamedTuple):
    """The grounds on which a worker has gone on.

    Args:
        clock: the step that it had finished.
        low: the newest step that all had.
        window: steps that it may be ahead of that.
        epoch: of the windows.
        until: it may begin steps before this clock by name.
    """

    clock: int
    low: int
    window: int
    epoch: int
    until: int

    @property
    def lead(self) -> int:
        """Steps that it was ahead of the slowest, as far as it knew."""
        return max(0, distance(self.clock, self.low))


class TableClient:
    """One worker's end of a job's table.

    Args:
        shape: of the job.
        worker: its rank.
        cookie: of its incarnation.
        exponent: of all values in the table.
        clock: the last step that all have finished, as the job begins or the worker joins.
        window: packets that may be under way.
        rto_s: the shortest time after which an unanswered packet is sent again.

    Attributes:
        clock: the last step that this worker has finished.
        low: the newest step that all members have finished, as far as this worker knows.
        windows: which steps may be begun.
        until: it may begin steps before this clock, whatever the windows say.
        is_saturated: whether a value of the table did not fit.
        has_joined: whether the switch has answered to its `JOIN`.
        refusal: why the switch will not go on with this worker; None as long as it does.
        resent: packets that were sent again.
        damaged: packets that were damaged on their way here.
        spent_s: seconds in each phase but computing.
        grant: why it went on behind its last step; None before the first.
        settled: how often all have read the same table.
        is_restored: whether all that it has added is in the table, since `begin_again`.
    """

    def __init__(
        self,
        shape: JobShape,
        worker: int,
        cookie: int,
        *,
        exponent: int = 0,
        clock: int = 0,
        window: int = 64,
        rto_s: float = 0.005,
    ) -> None:
        self.shape, self.worker, self.cookie, self.exponent = shape, worker, cookie, exponent
        self.settled, self.is_restored = 0, True
        self._after: Phase = "computing"  # what it does once it has brought back what it had added
        self._restored = clock  # the clock that it does so by
        self._has_halted = False
        self.clock = self.low = self.until = clock
        self.windows = Windows(0, 0, clock, 0)
        self._knows_windows = False  # of this job at this switch
        self.phase: Phase = "computing"
        self.is_saturated = self.has_joined = False
        self.refusal: Reason | None = None
        self.resent = self.damaged = 0
        self.grant: StepGrant | None = None
        self.spent_s: dict[Phase, float] = dict.fromkeys(("push", "clock", "pull", "rest", "restore", "confirm"), 0.0)
        self._began_s = self._now_s = 0.0
        self._timer = ResendTimer(rto_s)
        self.window = window
        self._owed = np.zeros(shape.rows, np.bool_)  # rows whose answer lacks
        self._sent_s = np.full(shape.rows, -np.inf)
        self._was_resent = np.zeros(shape.rows, np.bool_)
        self._has_read = np.zeros(shape.rows, np.bool_)  # rows that were read while others were pushed
        self._read_s = np.full(shape.rows, -np.inf)  # when these were asked for
        self._read_low: int | None = None  # `low` when the first of them was asked for
        self._clock_sent_s = -np.inf
        self._update = np.zeros((shape.rows, shape.values), np.int32)
        self._residual = np.zeros((shape.rows, shape.values), np.float32)  # which rounding has left out so far
        self._table = np.zeros((shape.rows, shape.values), np.int32)
        self._added = np.zeros((shape.rows, shape.values), np.int64)  # by this worker, since the table was settled
        self._settled = np.zeros((shape.rows, shape.values), np.int32)  # the table as it was then
        self._base: NDArray[np.int32] | None = None  # what the table of a switch that was started again lacks
        self._brought = self._update  # into such a table
        self._batch = PacketBatch(2 * window, shape.values)

    # -- a step --------------------------------------------------------------------------------------------------

    def push(self, update: NDArray[np.float32]) -> None:
        """Finish a step: add its update [D] to the table, and read the table as soon as the next step may begin.

        Raises:
            NumericsError: if a value is NaN, infinite, or larger than the table's integers can say; then nothing is
                sent.
        """
        assert self.doing == "computing", self.doing
        exponent = np.full(self.shape.rows, self.exponent, np.int8)
        most = max(float(update.max(initial=0)), -float(update.min(initial=0)))
        if not np.isfinite(most):
            raise NumericsError("Cannot add a change that holds NaN or Inf to a switch's table: it adds up integers.")
        if most >= 2.0**self.exponent / 2:  # what rounding has left out before is small beside that
            raise NumericsError(too_far(self.exponent))
        self._residual.reshape(-1)[: len(update)] += update
        self._update = to_integers(self._residual, exponent, 1)
        self._residual -= to_floats(self._update, exponent, 1)
        self.clock = wrapped(self.clock + 1)
        self._go_on_to("push")

    def rest(self) -> None:
        """Make no step, and hold nobody up, until `resume`."""
        assert self.doing == "computing", self.doing
        self._go_on_to("rest")

    def halt(self) -> int:
        """Say of no more steps that they are over, now that all rest; returns the last one of which it was said."""
        assert self.doing == "rest", self.doing
        self._has_halted = True
        return self.clock

    def resume(self, clock: int) -> None:
        """Go on behind `clock`, which all members have agreed on, and read the table first.

        Args:
            clock: the largest of those that have halted. A change of a step that is said to be over would not count.
        """
        assert self._has_halted, "it would not know which steps it has said to be over"
        self.clock, self._has_halted = clock, False
        self._forget_read()
        self._go_on_to("pull")

    def settle(self) -> None:
        """Keep the table as it was read last: all have read the same, and pushed nothing since."""
        self._settled = self._table.copy()
        self._added[:] = 0
        self.settled += 1

    def values(self, size: int) -> NDArray[np.float32]:
        """[size] the table as it was read last."""
        exponent = np.full(self.shape.rows, self.exponent, np.int8)
        return to_floats(self._table, exponent, 1).reshape(-1)[:size]

    # -- a switch that was started again -------------------------------------------------------------------------

    @property
    def doing(self) -> Phase:
        """The phase, or the one that it goes on with once it has brought back what it had added."""
        return self._after if self.phase in ("restore", "confirm") else self.phase

    @property
    def added_by(self) -> int:
        """The clock of the last step whose change it has added, or is about to."""
        return self._restored if self.phase in ("restore", "confirm") else self.clock

    def begin_again(self, shape: JobShape, cookie: int, low: int, settled: int, *, has_left: bool = False) -> None:
        """Bring back what it had added, into a new job's table of zeros, and then wait for `go_on`.

        Args:
            low: the clock behind which the job begins.
            settled: how often others have seen the table settled.
            has_left: whether it makes no more steps, so that its own clock is of no account.

        Raises:
            NumericsError: if that is more than its integers can say.
        """
        self._restored = wrapped(low + 1) if has_left else self.added_by
        self._after = "clock" if self.doing == "push" and self._restored == self.clock else self.doing
        if settled > self.settled:  # they have gone on since, and this one has read the same
            self.settle()
        if self.settled:
            self._base = self._settled
        self._brought = _narrowed(self._added, self.exponent)
        self.shape, self.cookie, self.windows = shape, cookie, Windows(0, 0, self.clock, 0)
        self.has_joined, self.refusal, self.is_restored = False, None, False
        self._forget_read()
        self._knows_windows = False
        self._begin("restore")
        self._owed[:] = self._brought.any(axis=1)
        self._owed[0] = True

    def go_on(self) -> None:
        """Go on with what it did: all have brought back what they had added."""
        assert self.is_restored, "not all is in the table"
        self._brought = self._update  # so that its memory is free
        self._begin(self._after)

    @property
    def is_half_full(self) -> bool:
        """Whether a value of the table, as it was read last, has come half as far as integers reach."""
        table = self._table
        return bool(table.size) and max(int(table.max()), -int(table.min())) >= _HALF

    @property
    def may_go_on(self) -> bool:
        """Whether the next step may begin."""
        return self._grants(self.low)

    def _grants(self, low: int) -> bool:
        """Whether the next step may begin where all have finished this one."""
        return self.windows.grants(self.clock, low) or is_newer(self.until, self.clock)

    # -- packets -------------------------------------------------------------------------------------------------

    @property
    def rto_s(self) -> float:
        """Seconds after which an unanswered packet is sent again."""
        return self._timer.rto_s

    @property
    def pause_s(self) -> float:
        """Seconds in which to let answers gather before they are taken in."""
        return self._timer.pause_s if int(self._owed.sum()) > self.window // 4 else 0.0

    @property
    def trouble(self) -> str:
        """A sentence for reports about what keeps it from going on; "" if nothing is known to."""
        return f"Not all workers have finished step {wrapped(self.low + 1)}." if self.phase == "clock" else ""

    def wake_s(self) -> float:
        """The time when `packets` has something to send again if nothing is received; infinite for never."""
        if self._is_idle:
            return float("inf")
        if self.phase in ("clock", "rest"):
            return max(0.0, self._clock_sent_s) + self.rto_s
        # What was not sent yet waits for an answer.
        sent_s = np.append(self._sent_s[self._owed], self._read_s[~self._has_read] if self.phase == "push" else ())
        sent_s = sent_s[sent_s > -np.inf]
        return float(sent_s.min()) + self.rto_s if len(sent_s) else 0.0

    def packets(self, now_s: float) -> PacketBatch:
        """The packets to send now; the batch is used again by the next call."""
        self._now_s = now_s
        if self._is_idle:
            return self._batch.first(0)
        if self._began_s < 0:
            self._began_s = now_s
        if self.phase == "rest" and self._has_halted:
            return self._batch.first(0)
        if self.phase == "rest":
            furthest = wrapped(self.low + self.shape.ring - 2)
            if is_newer(furthest, self.clock):
                self.clock, self._clock_sent_s = furthest, -np.inf
                self._timer.restart()
        if self.phase in ("clock", "rest"):
            if now_s - self._clock_sent_s < self.rto_s:
                return self._batch.first(0)
            self._note_resent(int(self._clock_sent_s > -np.inf))
            self._clock_sent_s = now_s
            return self._written(np.zeros(1, np.int64), PacketKind.CLOCK)
        reads_ahead = self.phase == "push" and self.may_go_on
        rows = self._due(self._owed, self._sent_s, self._update_window if reads_ahead else self.window)
        self._was_resent[rows[self._sent_s[rows] > -np.inf]] = True
        if reads_ahead:
            ahead = self._due(~(self._owed | self._has_read), self._read_s, self.window)
            if len(ahead) and self._read_low is None:
                self._read_low = self.low
        else:
            ahead = rows[:0]
        self._note_resent(int((self._sent_s[rows] > -np.inf).sum() + (self._read_s[ahead] > -np.inf).sum()))
        self._sent_s[rows] = self._read_s[ahead] = now_s
        return self._written(rows, PacketKind.INC if self.phase in ("push", "restore") else PacketKind.READ, ahead)

    def _due(self, owed: NDArray[np.bool_], sent_s: NDArray[np.float64], window: int) -> NDArray[np.int64]:
        """The rows whose packets are to be sent now, of those that are owed, with so many under way at most."""
        under_way = owed & (sent_s + self.rto_s > self._now_s)
        return np.flatnonzero(owed & ~under_way)[: max(0, window - int(under_way.sum()))]

    @property
    def _update_window(self) -> int:
        """Packets of an update that may be under way while rows are read."""
        return max(1, min(self.window, _AHEAD_BYTES // (HEADER_BYTES + 4 * self.shape.values)))

    def receive(self, batch: PacketBatch, now_s: float) -> None:
        """Take in packets from the switch; what answers nothing that is owed is passed over."""
        self._now_s = now_s
        intact = batch.intact()
        self.damaged += len(batch) - len(intact)
        batch = intact.narrowed(self.shape.values)
        header = batch.header
        ours = batch.are_ours(self.shape.number, from_workers=False)
        granted = ours & np.isin(header["kind"], (PacketKind.GRANT, PacketKind.JOIN_OK, PacketKind.PROBE_OK))
        self.has_joined = self.has_joined or bool((header["kind"][granted] == PacketKind.JOIN_OK).any())
        for one in header[granted]:
            self._take_grant(one)
        refused = ours & (header["kind"] == PacketKind.NACK)
        for one in header[refused]:
            if 1 <= one["window_new"] <= len(Reason) and one["window_new"] != Reason.AHEAD_OF_RING:
                self.refusal = self.refusal or Reason(int(one["window_new"]))
        if self.phase in ("push", "restore"):
            added = ours & (header["kind"] == PacketKind.INC_OK) & (header["clock"] == self.added_by)
            if self._read_low is not None:
                self._take_read_ahead(batch, self._rows_of(header, ours, self._read_clock))
            self._note(header[added])
        elif self.phase in ("pull", "confirm"):
            # An answer to an earlier read may come late, and would be of a table of then.
            rows = self._rows_of(header, ours, self.added_by)
            owed = rows[self._owed[header["chunk"][rows]]]
            if self.phase == "pull":
                self._table[header["chunk"][owed]] = batch.values[owed]
            self._note(header[owed])
        if self.phase == "clock" and self.may_go_on:
            low = self.low if self._read_low is None else self._read_low
            if not self._grants(low):  # but not by what it knew when it began to read
                low = self.low
                self._forget_read()
            window, epoch = self.windows.of(self.clock), self.windows.epoch
            self.grant = StepGrant(self.clock, low, window, epoch, self.until)
            self._begin("pull")

    def _rows_of(self, header: NDArray[np.void], ours: NDArray[np.bool_], clock: int) -> NDArray[np.int64]:
        """Find the packets that are rows of the table, and were asked for with this clock."""
        fits = (header["count"] == self.shape.values // VALUES_STEP) & (header["chunk"] < self.shape.rows)
        return np.flatnonzero(ours & fits & (header["bitmap"] == clock) & (header["kind"] == PacketKind.ROW))

    def _take_read_ahead(self, batch: PacketBatch, which: NDArray[np.int64]) -> None:
        """Take in rows that were asked for while others were pushed."""
        rows = batch.header["chunk"][which]
        self._table[rows] = batch.values[which]
        self._has_read[rows] = True
        self.is_saturated = self.is_saturated or bool((batch.header["flags"][which] & Flag.SATURATED).any())
        if len(rows):
            self._timer.restart()

    def _forget_read(self) -> None:
        self._has_read[:], self._read_s[:], self._read_low = False, -np.inf, None

    @property
    def _read_clock(self) -> int:
        """The clock of a read before its step is over: of this step, and of no other."""
        return wrapped(self.clock - _LONG_AGO)

    def _note_resent(self, packets: int) -> None:
        if packets:
            self.resent += packets
            self._timer.expired()

    def _note(self, header: NDArray[np.void]) -> None:
        """Note that some rows are answered; go on when all are."""
        if not len(header):
            return
        self._timer.restart()
        rows = header["chunk"][header["chunk"] < self.shape.rows]
        once = rows[self._owed[rows] & ~self._was_resent[rows]]
        if len(once):
            self._timer.measure(self._now_s - float(self._sent_s[once].mean()))
        self.is_saturated = self.is_saturated or bool((header["flags"] & Flag.SATURATED).any())
        self._owed[rows] = False
        if self._owed.any():
            return
        if self.phase == "restore":
            self._begin("confirm")
        elif self.phase == "confirm":
            self.is_restored = True
        elif self.phase == "push":
            self._begin("clock")
        else:
            if self._base is not None:
                self._table = _narrowed(self._base.astype(np.int64) + self._table, self.exponent)
            self._begin("computing")

    @property
    def _is_idle(self) -> bool:
        return self.phase == "computing" or (self.phase == "confirm" and self.is_restored)

    def _go_on_to(self, phase: Phase) -> None:
        if self.phase in ("restore", "confirm"):
            self._after = phase
        else:
            self._begin(phase)

    def _begin(self, phase: Phase) -> None:
        if self.phase != "computing":
            self.spent_s[self.phase] += self._now_s - self._began_s
        self._began_s = self._now_s if self.phase != "computing" else -1.0
        if not self.shape.rows and phase in ("push", "pull"):  # a barrier alone
            phase = "clock" if phase == "push" else "computing"
        if phase == "push":
            self._added += self._update
        self.phase = phase
        self._timer.restart()
        self._was_resent[:] = False
        if phase == "push":
            self._forget_read()
        self._owed[:] = phase == "push" or (phase == "pull" and ~self._has_read)
        self._owed[:1] |= phase == "confirm"
        self._sent_s[:] = self._clock_sent_s = -np.inf

    def _take_grant(self, one: np.void) -> None:
        low, epoch = int(one["clock"]), int(one["epoch"])
        if is_newer(low, self.low):
            self.low = low
        if not self._knows_windows or (epoch - self.windows.epoch) % EPOCHS < EPOCHS // 2:
            self._knows_windows = True
            self.windows = Windows(int(one["window_old"]), int(one["window_new"]), int(one["bitmap"]), epoch)
        if one["worker"] == self.worker and is_newer(int(one["cookie"]), self.until):
            self.until = int(one["cookie"])

    def _written(
        self, rows: NDArray[np.int64], kind: PacketKind, ahead: NDArray[np.int64] | None = None
    ) -> PacketBatch:
        """Packets of one kind for these rows, and behind them reads of those that are read ahead."""
        count, reads = len(rows), 0 if ahead is None else len(ahead)
        batch = self._batch.first(count + reads)
        header = batch.header
        header["magic"], header["flags"], header["kind"] = MAGIC, VERSION << 4, kind
        header["job"], header["worker"], header["cookie"] = self.shape.number, self.worker, self.cookie
        header["clock"], header["exponent"], header["count"] = self.added_by, self.exponent, 0
        header["chunk"][:count] = rows
        batch.sizes[:] = HEADER_BYTES
        if kind == PacketKind.INC:
            header["count"][:count] = self.shape.values // VALUES_STEP
            batch.values[:count] = (self._update if self.phase == "push" else self._brought)[rows]
            batch.sizes[:count] += 4 * self.shape.values
        if ahead is not None and reads:
            header["kind"][count:], header["clock"][count:] = PacketKind.READ, self._read_clock
            header["chunk"][count:] = ahead
        batch.seal()
        return batch
