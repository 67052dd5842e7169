"""The clocks of a job at a switch: who has finished which step, and who may begin the next one.

    low      the newest step that all members have finished
    W(c)     window `new` from the effective clock on, `old` before it
    a worker that has finished step c may begin the next one while c - low <= W(c), or while it is allowed to by name

A worker says that step c is over (`CLOCK`) when all its updates are acknowledged. That is said of all steps before it,
too: by a broadcast `GRANT` a worker may go on although its own clock was lost.

Each clock within the ring has a bit per worker, as a switch's pipeline can keep it. To change the windows moves
nothing, since all of them look at the same bits; that a change is in effect from clock low + old + 1 on means that no
step is granted by two different windows, whatever is lost, delayed or repeated: a grant for such a clock by the old
window would need a `low` that has moved since, and every packet that says so has the new windows in it. What was
allowed by name lies before the change, too: it is in effect no earlier, and until it is, nothing more is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from offbeat.switch.members import ALL, Answer, Members, MemberState
from offbeat.switch.packet import Packet, PacketKind, Reason, distance, is_newer, wrapped
from offbeat.switch.strategy import check_window

if TYPE_CHECKING:
    from offbeat.protocol.switch_control import Strategy
    from offbeat.switch.job_shape import JobShape


class Windows(NamedTuple):
    """The windows that say which steps may be begun; see the module's text.

    Args:
        old, new: steps ahead of the slowest.
        effective: the first clock that `new` decides about.
        epoch: counts changes.
    """

    old: int = 0
    new: int = 0
    effective: int = 0
    epoch: int = 0

    def of(self, clock: int) -> int:
        """W(clock)."""
        return self.old if is_newer(self.effective, clock) else self.new

    def are_in_effect(self, low: int) -> bool:
        """Whether every step is over that the windows of before the last change decided about."""
        return not is_newer(wrapped(self.effective - 1), low)

    def grants(self, clock: int, low: int) -> bool:
        """Whether who has finished `clock` may begin the next step while all have finished `low`."""
        return distance(clock, low) <= self.of(clock)


def first_windows(strategy: Strategy, ring: int, clock: int) -> Windows:
    """The windows of a job that begins behind `clock`, over a ring of so many clocks."""
    window = strategy.window_in(ring)
    return Windows(window, window, clock, 0)


class Clocks:
    """The ring of clocks, and the windows.

    Args:
        shape, members: of the job.
        strategy: that it begins with.
        clock: the last step that all workers have finished.
        windows: that another switch had; None for those of the strategy.
    """

    def __init__(
        self, shape: JobShape, members: Members, strategy: Strategy, clock: int = 0, windows: Windows | None = None
    ) -> None:
        check_window(strategy, shape.ring)
        self._shape, self._members, self.strategy = shape, members, strategy
        self.windows = windows or first_windows(strategy, shape.ring, clock)
        self.low = self.high = clock
        self.ring = [0] * shape.ring

    # -- control -------------------------------------------------------------------------------------------------

    @property
    def is_in_effect(self) -> bool:
        """Whether the last change is in effect for all; see `Windows.are_in_effect`."""
        return self.windows.are_in_effect(self.low)

    def set_strategy(self, strategy: Strategy) -> list[Answer] | None:
        """Change the policy from the next clock on that nobody can have been granted yet.

        Returns:
            What to send, so that whoever waits learns it at once; None while the change before is not in effect for
            all: try again.

        Raises:
            PlanError: if the strategy does not fit the job's shape.
        """
        check_window(strategy, self._shape.ring)
        if not self.is_in_effect:
            return None
        old, ring = self.windows, self._shape.ring
        by_name = (distance(self._members[worker].until, self.low) for worker in self._members)
        effective = wrapped(self.low + max(old.new + 1, *by_name, 0))
        self.windows = Windows(old.new, strategy.window_in(ring), effective, (old.epoch + 1) % (1 << 16))
        self.strategy = strategy
        return [self.to_all()]

    def allow(self, worker: int, until: int) -> list[Answer]:
        """Let one worker begin steps before clock `until`, as far as the strategy allows it for single workers."""
        if (member := self._members.get(worker)) is None or not self.is_in_effect:
            return []
        most = wrapped(self.low + self.strategy.slack_in(self._shape.ring) + 1)
        until = most if is_newer(until, most) else until
        if is_newer(until, member.until):  # what was allowed before is not taken back: the worker knows of it
            member.until = until
        return [self.to_one(worker)]

    def evict(self, worker: int) -> list[Answer]:
        """Go on without a worker, which is no member any more."""
        self.forget(worker)
        return self._advance()

    def forget(self, worker: int) -> None:
        """Forget which steps ahead of all a worker has finished: its next incarnation has not."""
        self.ring = [bits & ~(1 << worker) for bits in self.ring]

    # -- packets -------------------------------------------------------------------------------------------------

    def clock(self, packet: Packet, member: MemberState) -> list[Answer]:
        """Take in that a worker has finished a step."""
        lead = distance(packet.clock, self.low)
        if lead > self._shape.ring - 2:
            return [self._members.refuse(packet, Reason.AHEAD_OF_RING)]
        told = self.finish(packet.worker, member, packet.clock) if lead > 0 else []
        if told:  # all, and so this one
            return told
        may_go_on = self.windows.grants(packet.clock, self.low) or is_newer(member.until, packet.clock)
        return [self.to_one(packet.worker)] if may_go_on else []

    def finish(self, worker: int, member: MemberState, clock: int) -> list[Answer]:
        """Note that a worker has finished all steps up to `clock`."""
        for step in range(1, distance(clock, self.low) + 1):
            self.ring[(self.low + step) % self._shape.ring] |= 1 << worker
        if is_newer(clock, member.finished):
            member.finished = clock
        if is_newer(clock, self.high):
            self.high = clock
        return self._advance()

    def _advance(self) -> list[Answer]:
        """Advance `low` over the steps that all members have finished; tell them if it has moved."""
        before, members = self.low, self._members.bits
        while members and self.ring[(self.low + 1) % self._shape.ring] & members == members:
            self.low = wrapped(self.low + 1)
            self.ring[self.low % self._shape.ring] = 0
        return [self.to_all()] if self.low != before else []

    # -- answers -------------------------------------------------------------------------------------------------

    def to_all(self) -> Answer:
        """Tell all members how far all are, and the windows."""
        return Answer(ALL, self._grant(ALL, 0, PacketKind.GRANT))

    def to_one(self, worker: int, kind: PacketKind = PacketKind.GRANT) -> Answer:
        """Tell one member the same, and how far it may go by name."""
        return Answer(worker, self._grant(worker, self._members[worker].until, kind))

    def _grant(self, worker: int, until: int, kind: PacketKind) -> Packet:
        old, new, effective, epoch = self.windows
        return Packet(
            kind, self._shape.number, worker, cookie=until, clock=self.low, epoch=epoch, bitmap=effective,
            window_old=old, window_new=new,
        )  # fmt: skip
