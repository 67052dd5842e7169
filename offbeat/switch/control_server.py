"""The control plane of a switch: who takes part in which job, and by which policy; over authenticated links.

A worker speaks for itself: it joins with the rank that its link has, and a secret. From then on the rank belongs to
that process: another link takes it over only with the secret, and nobody does once the others have gone on without it.
Whoever has joined a job, or is an operator, may evict another from it and change its policy. A worker that says good-
bye, or hangs up as a killed one does, is evicted, and a job ends with its last worker. One whose link ends otherwise
stands still, or thinks that the switch does; it may come back as long as nobody says that it is lost, and so may all
for `_DESERTED_S`. A job that is not known is begun again by its workers, when they meet (`rejoin_meeting`).
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import OffbeatError, PeerError, PlanError
from offbeat.protocol.switch_control import (
    SAYS,
    EvictFromSwitchJob,
    FromSwitch,
    GetSwitchPlan,
    GetSwitchStatus,
    JoinSwitchJob,
    MeetAtSwitch,
    MetAtSwitch,
    SetSwitchStrategy,
    Strategy,
    SwitchJobJoined,
    SwitchJobStatus,
    SwitchMemberStatus,
    SwitchPlan,
    SwitchRefused,
    SwitchReturn,
    SwitchStatus,
    SwitchStrategySet,
    ToSwitch,
    pack,
    to_switch_of,
)
from offbeat.switch.clock_watch import ClockWatch
from offbeat.switch.clocks import Windows
from offbeat.switch.job_shape import JobShape
from offbeat.switch.rejoin_meeting import RejoinMeeting
from offbeat.switch.strategy import check_window, watched
from offbeat.switch.sum_watch import SumWatch

if TYPE_CHECKING:
    from offbeat.switch.data_plane import DataPlane
    from offbeat.wire.link import PeerLink

_log = logging.getLogger("offbeat")
_MOST_JOBS = 1024
_DONE = 64  # jobs of one link
_DESERTED_S = 15.0  # for which a job is kept that has no link to any of its workers
_MOST_SLOT_BYTES = 256 << 20  # of one job's streams


class SwitchJob:
    """One job, as control sees it.

    Args:
        name: by which workers know it.
        shape: what it takes of the switch.
        strategy: of its policy.
        exponent: of all values in its table.
    """

    def __init__(self, name: str, shape: JobShape, strategy: Strategy, exponent: int) -> None:
        self.name, self.shape, self.strategy, self.exponent = name, shape, strategy, exponent
        self.plan, self.reason, self.windows = "", "", Windows()  # of the last change
        self.watch, self.sums, self.is_in_trouble = ClockWatch(), SumWatch(), False
        self.peers: dict[int, SwitchPeer] = {}  # by rank, those that have joined
        self.cookies: dict[int, int] = {}  # likewise
        self.secrets: dict[int, bytes] = {}  # likewise, by which each is known again
        self.gone: set[int] = set()  # ranks that the others have gone on without
        self.met: dict[int, int] = {}  # by rank, the request of those that wait to meet all others
        self.have_met = False
        self.deserted_s: float | None = None  # since when there is no link to any of its workers

    def take(self, peer: SwitchPeer) -> None:
        """Have a link be that of its rank."""
        before = self.peers.get(peer.link.rank)
        if before is not None and before is not peer:
            before.forget(self)
        self.peers[peer.link.rank] = peer
        self.deserted_s, peer.jobs[self.name] = None, self

    def note_link_lost(self) -> None:
        """Note if there is no link to any of its workers any more."""
        if self.deserted_s is None and not any(peer.link.is_open for peer in self.peers.values()):
            self.deserted_s = time.monotonic()


def _is_same(secret: bytes, message: JoinSwitchJob) -> bool:
    """Whether the process that joins is the one that was admitted with this secret."""
    return bool(secret) and hmac.compare_digest(secret, message.secret)


def _shape(message: JoinSwitchJob, number: int) -> JobShape:
    return JobShape(number, message.workers, message.values, message.slots, message.ring, message.rows, message.most)


def _most_slots(values: int) -> int:
    return _MOST_SLOT_BYTES // (4 * values)


class ControlServer:
    """The jobs of one switch.

    Args:
        plane: where packets are summed.
        target: what that is, for people.
        port: the UDP port that takes packets.
    """

    def __init__(self, plane: DataPlane, *, target: str, port: int) -> None:
        self._plane, self._target, self._port = plane, target, port
        self._jobs: dict[str, SwitchJob] = {}
        self._meetings: dict[str, RejoinMeeting[SwitchPeer]] = {}  # by the name of the job that is to begin again
        self._peers: set[SwitchPeer] = set()

    def accept(self, link: PeerLink) -> SwitchPeer:
        """Take a link into use.

        Raises:
            PeerError: if its role has nothing to do here.
        """
        if link.role not in SAYS:
            raise PeerError(f"a {link.role} has nothing to say to a switch")
        peer = SwitchPeer(self, link)
        self._peers.add(peer)
        return peer

    # -- what peers ask ------------------------------------------------------------------------------------------

    def join(self, peer: SwitchPeer, message: JoinSwitchJob) -> FromSwitch | None:
        """Take a worker into a job; None if it is answered later."""
        if message.worker != peer.link.rank:
            raise PeerError(f"rank {peer.link.rank} joins as rank {message.worker}")
        if message.worker >= message.workers:
            why = f"Cannot join {message.job!r} as rank {message.worker}: it has room for {message.workers} workers."
            return SwitchRefused(message.request, why)
        if message.again is not None:
            return self._join_again(peer, message, message.again)
        try:
            job = self._jobs.get(message.job) or self._create(message, message.strategy)
            return self._admit(job, peer, message)
        except PlanError as error:
            return SwitchRefused(message.request, str(error))

    def _admit(self, job: SwitchJob, peer: SwitchPeer, message: JoinSwitchJob) -> SwitchJobJoined:
        shape = _shape(message, job.shape.number)
        if message.least_slots and message.least_slots <= job.shape.slots <= shape.slots:
            shape = dataclasses.replace(shape, slots=job.shape.slots)
        if shape != job.shape:
            raise PlanError(
                f"Cannot join {job.name!r} with {shape}: it has {job.shape}. Start every worker with the same plan."
            )
        before = job.peers.get(message.worker)
        if before is not None and before is not peer and not _is_same(job.secrets[message.worker], message):
            raise PlanError(
                f"Cannot join {job.name!r} as rank {message.worker}: one is here already, from {before.link.peer}."
            )
        if message.worker in job.gone:
            raise PlanError(f"Cannot join {job.name!r}: the others have gone on without rank {message.worker}.")
        cookie = secrets.randbits(32)
        self._plane.admit(shape.number, message.worker, cookie)
        job.cookies[message.worker], job.secrets[message.worker] = cookie, message.secret
        job.take(peer)
        return SwitchJobJoined(message.request, shape.number, cookie, self._port, shape.slots)

    def _create(
        self, message: JoinSwitchJob, strategy: Strategy, *, clock: int = 0, windows: Windows | None = None
    ) -> SwitchJob:
        shape = self._fitting(message)
        if len(self._jobs) >= _MOST_JOBS:
            raise PlanError(f"Cannot begin another job: this switch has {_MOST_JOBS}.")
        if shape.slots > _most_slots(shape.values):
            raise PlanError(
                f"Cannot make room for {shape}: at most {_MOST_SLOT_BYTES >> 20} MiB are given to one job. Use fewer "
                "slots - at `plan.fabric.slots`."
            )
        while any(shape.number == other.shape.number for other in self._jobs.values()):
            shape = dataclasses.replace(shape, number=secrets.randbits(16))
        if windows is not None:
            check_window(Strategy("table", max(windows.old, windows.new)), shape.ring)
        self._plane.create_job(
            shape, watched(strategy, shape.ring), clock=clock, exponent=message.exponent, windows=windows
        )
        job = self._jobs[message.job] = SwitchJob(message.job, shape, strategy, message.exponent)
        return job

    def _fitting(self, message: JoinSwitchJob) -> JobShape:
        """The shape of a new job, with as many of its slots as there is room for and it can do with."""
        shape = _shape(message, secrets.randbits(16))
        least, most = message.least_slots or message.slots, min(self._plane.most_slots, _most_slots(shape.values))
        while shape.slots > most and shape.slots // 2 >= least:
            shape = dataclasses.replace(shape, slots=shape.slots // 2)
        return shape

    def _join_again(self, peer: SwitchPeer, message: JoinSwitchJob, again: SwitchReturn) -> FromSwitch | None:
        rank = message.worker
        if (job := self._jobs.get(message.job)) is not None:
            if job.cookies.get(rank, -1) == again.cookie and _is_same(job.secrets[rank], message):
                return self._resume(job, peer, message.request, again)
            why = f"Cannot join {message.job!r} again: the others have gone on without rank {rank}."
            return SwitchRefused(message.request, why)
        if message.strategy.quorum is not None:
            return SwitchRefused(message.request, "with KSync() nobody knows whose part was in a sum that is lost.")
        if message.job not in self._meetings and len(self._meetings) >= _MOST_JOBS:
            why = f"Cannot join {message.job!r} again: the workers of {_MOST_JOBS} other jobs wait for each other."
            return SwitchRefused(message.request, why)
        meeting = self._meetings.setdefault(message.job, RejoinMeeting())
        if rank in meeting.waiting:
            other, asked = meeting.waiting[rank]
            if other is not peer and not _is_same(asked.secret, message):
                why = f"Cannot join {message.job!r} again as rank {rank}: one is here already, from {other.link.peer}."
                return SwitchRefused(message.request, why)
        if message.job in peer.done:
            peer.done.remove(message.job)
        meeting.waiting[rank] = peer, message
        meeting.lost.discard(rank)
        meeting.lost |= {other.link.rank for other in self._peers if message.job in other.done}
        self._conclude(message.job)
        return None

    def _resume(self, job: SwitchJob, peer: SwitchPeer, request: int, again: SwitchReturn) -> SwitchJobJoined:
        """Give a worker that was never evicted its place back."""
        rank = peer.link.rank
        job.take(peer)
        for other in job.peers.keys() - set(again.members) - {rank}:  # whose loss could not be told meanwhile
            job.peers[other].forget(job)
            self._remove(job, other)
        return SwitchJobJoined(request, job.shape.number, job.cookies[rank], self._port, job.shape.slots)

    def _conclude(self, name: str) -> None:
        """Begin a job again if all are here."""
        meeting = self._meetings[name]
        if meeting.waiting and not meeting.is_complete:
            return
        del self._meetings[name]
        expected, job = meeting.expected if meeting.waiting else set(), None
        for rank, (peer, message) in sorted(meeting.waiting.items()):
            try:
                if rank not in expected:
                    raise PlanError(f"Cannot join {name!r} again: the others go on without rank {rank}.")
                if job is None:
                    strategy, plan, windows = meeting.change
                    job = self._create(message, strategy, clock=meeting.clock, windows=windows)
                    job.plan, job.windows = plan, windows or job.windows
                joined = self._admit(job, peer, message)
                peer.answer(
                    msgspec.structs.replace(
                        joined, progress=meeting.progress, clock=meeting.clock, settled=meeting.settled
                    )
                )
            except PlanError as error:
                peer.answer(SwitchRefused(message.request, str(error)))

    def meet(self, peer: SwitchPeer, message: MeetAtSwitch) -> FromSwitch | None:
        """Let a worker wait for all others of its job."""
        if (job := peer.jobs.get(message.job)) is None:
            return SwitchRefused(message.request, f"Cannot meet the others of {message.job!r}: there is no such job.")
        if job.have_met:  # it did not hear of it
            return MetAtSwitch(message.request)
        job.met[peer.link.rank] = message.request
        self._tell_met(job)
        return None

    @staticmethod
    def _tell_met(job: SwitchJob) -> None:
        if job.peers.keys() <= job.met.keys():
            job.have_met = True
            for rank, peer in job.peers.items():
                peer.answer(MetAtSwitch(job.met[rank]))
            job.met.clear()

    def evict(self, peer: SwitchPeer, message: EvictFromSwitchJob) -> None:
        """Go on without a worker."""
        if (job := self._known(peer, message.job)) is not None and message.worker in job.peers:
            if message.worker != peer.link.rank:  # else it says itself that it is done
                _log.warning(
                    "Job %s goes on without rank %d: %s", job.name, message.worker, message.why or "it is gone"
                )
            job.peers[message.worker].forget(job)
            self._remove(job, message.worker)
        meeting, is_own = self._meetings.get(message.job), message.worker == peer.link.rank
        is_waiting = meeting is not None and peer.link.rank in meeting.waiting
        if peer.link.role == "worker" and is_own:
            if is_waiting:  # it leaves when it has brought back what it had added
                return
            peer.note_done(message.job)
        if meeting is not None and (peer.link.role != "worker" or is_own or is_waiting):
            meeting.lost.add(message.worker)
            self._conclude(message.job)

    def set_strategy(self, peer: SwitchPeer, message: SetSwitchStrategy) -> FromSwitch:
        """Change a job's policy."""
        if (job := self._known(peer, message.job)) is None:
            return SwitchRefused(message.request, f"Cannot change the policy of {message.job!r}: there is no such job.")
        strategy = message.strategy
        if strategy.path != job.strategy.path:
            why = (
                f"Cannot go from the {job.strategy.path} to the {strategy.path} while training: the workers have to "
                "agree on that. Use offbeat swap."
            )
            return SwitchRefused(message.request, why)
        try:
            windows = self._plane.set_strategy(job.shape.number, watched(strategy, job.shape.ring))
        except PlanError as error:
            return SwitchRefused(message.request, str(error))
        if windows is None:
            return SwitchStrategySet(message.request, is_set=False)
        job.strategy, job.plan, job.reason, job.windows = strategy, message.plan, message.reason, windows
        return SwitchStrategySet(message.request, True, windows.effective, windows.epoch, windows.old)

    def plan(self, peer: SwitchPeer, message: GetSwitchPlan) -> FromSwitch:
        """Tell which plan's policy was set last."""
        if (job := self._known(peer, message.job)) is None:
            return SwitchRefused(message.request, f"Cannot tell the plan of {message.job!r}: there is no such job.")
        windows = job.windows
        return SwitchPlan(
            message.request, job.strategy, job.plan, windows.epoch, windows.effective, windows.old, job.reason
        )

    def look(self) -> None:
        """Look at the clocks of all tables, and let those go on who may go further by name; close sums that have waited
        for long enough; end deserted jobs.
        """
        now_s = time.monotonic()
        for job in list(self._jobs.values()):
            if job.deserted_s is not None and now_s - job.deserted_s > _DESERTED_S:
                _log.warning("Job %s has ended: none of its workers has come back.", job.name)
                self._end(job)
                continue
            try:
                if job.strategy.path == "table":
                    self._look_at_clocks(job)
                elif (quorum := job.strategy.quorum) and job.sums.is_due(job.strategy.wait_s, now_s):
                    self._look_at_sums(job, quorum, now_s)
            except Exception:  # one job's trouble is none of the others'
                if not job.is_in_trouble:
                    _log.exception("Cannot look after the clocks and sums of job %s; other jobs go on.", job.name)
                job.is_in_trouble = True

    def _look_at_sums(self, job: SwitchJob, quorum: int, now_s: float) -> None:
        """Close the sums of a quorum that have waited for the others for long enough."""
        unsettled = self._plane.unsettled(job.shape.number, quorum)
        for clock in job.sums.look(unsettled, job.strategy.wait_s, now_s):
            if who := self._plane.close(job.shape.number, clock, quorum):
                job.sums.closed(rank for rank in job.peers if not who >> rank & 1)

    def _look_at_clocks(self, job: SwitchJob) -> None:
        clocks = self._plane.clocks(job.shape.number)
        for worker, until in job.watch.look(clocks, job.strategy, job.shape.ring, time.monotonic()).items():
            self._plane.allow(job.shape.number, worker, until)

    def status(self, message: GetSwitchStatus) -> FromSwitch:
        """Tell what is known of all jobs, or of one."""
        jobs = tuple(self._status_of(job) for job in self._jobs.values() if message.job in ("", job.name))
        return SwitchStatus(message.request, self._target, jobs, dict(self._plane.dropped))

    def _status_of(self, job: SwitchJob) -> SwitchJobStatus:
        stats = self._plane.stats(job.shape.number, time.monotonic())
        waited_s = {worker: one.waited_s for worker, one in job.watch.workers.items()}
        cap = job.shape.cap
        members = tuple(
            SwitchMemberStatus(
                worker, one.finished, one.lag, None if one.silent_s == float("inf") else one.silent_s, dict(one.counts),
                waited_s.get(worker, 0.0), job.sums.left_out.get(worker, 0),
                one.brought.clamped / max(1, one.brought.elements),
                0.0 if cap is None else cap.root_mean_square(one.brought),
            )
            for worker, one in stats.members.items()
        )  # fmt: skip
        strategy, windows = job.strategy, stats.windows
        return SwitchJobStatus(
            job=job.name, number=job.shape.number, workers=job.shape.workers, values=job.shape.values,
            slots=job.shape.slots, ring=job.shape.ring, rows=job.shape.rows, exponent=job.exponent, most=job.shape.most,
            strategy=strategy,
            low=stats.low, high=stats.high,
            window_old=windows.old, window_new=windows.new, effective=windows.effective, epoch=windows.epoch,
            members=members, refused=dict(stats.refused),
        )  # fmt: skip

    # -- ends ----------------------------------------------------------------------------------------------------

    def leave(self, peer: SwitchPeer, error: OffbeatError | None) -> None:
        """Go on without a worker whose link has ended, or wait for it.

        Args:
            error: why; None if it has said good-bye.
        """
        for job in list(peer.jobs.values()):
            if job.peers.get(peer.link.rank) is peer:
                if error is not None and not peer.link.has_hung_up:
                    _log.warning(
                        "Job %s waits for rank %d, unless another worker says that it is lost: %s",
                        job.name, peer.link.rank, error,
                    )  # fmt: skip
                    job.note_link_lost()
                    continue
                if error is not None:
                    _log.warning("Job %s goes on without rank %d: %s", job.name, peer.link.rank, error)
                self._remove(job, peer.link.rank)
        peer.jobs.clear()
        self._peers.discard(peer)
        for name, meeting in list(self._meetings.items()):
            if (asked := meeting.waiting.get(peer.link.rank)) is not None and asked[0] is peer:
                del meeting.waiting[peer.link.rank]
                meeting.lost.add(peer.link.rank)
                self._conclude(name)

    def _remove(self, job: SwitchJob, worker: int) -> None:
        del job.peers[worker], job.cookies[worker], job.secrets[worker]
        job.gone.add(worker)
        self._plane.evict(job.shape.number, worker)
        job.met.pop(worker, None)
        if not job.peers:
            self._end(job)
        else:
            job.note_link_lost()
            self._tell_met(job)

    def _end(self, job: SwitchJob) -> None:
        for peer in job.peers.values():
            peer.forget(job)
        self._plane.destroy_job(job.shape.number)
        del self._jobs[job.name]

    def _known(self, peer: SwitchPeer, name: str) -> SwitchJob | None:
        return peer.jobs.get(name) if peer.link.role == "worker" else self._jobs.get(name)


class SwitchPeer:
    """One link to the control plane. A `Receiver`."""

    def __init__(self, server: ControlServer, link: PeerLink) -> None:
        self._server, self.link = server, link
        self.jobs: dict[str, SwitchJob] = {}  # that it takes part in
        self.done: deque[str] = deque(maxlen=_DONE)  # jobs at which nobody is to wait for it, if they begin again

    def forget(self, job: SwitchJob) -> None:
        """Take no part in a job any more."""
        self.jobs.pop(job.name, None)

    def note_done(self, job: str) -> None:
        """Note that it takes no part in a job any more, whether the switch knows the job or not."""
        if job not in self.done:
            self.done.append(job)

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse: nothing that is said here has a body."""
        raise PeerError(f"it sends a body of {size_bytes} bytes, and nothing that is said to a switch has one")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Answer a request."""
        try:
            self._take_in(to_switch_of(metadata))
        except PeerError as error:
            self.answer(SwitchRefused(0, str(error)))  # else it would take the switch for lost, and say it again
            raise

    def _take_in(self, message: ToSwitch) -> None:
        if not isinstance(message, SAYS[self.link.role]):
            raise PeerError(f"it sent {type(message).__name__}, which is not for a {self.link.role} to send")
        answer: FromSwitch | None = None
        match message:
            case JoinSwitchJob():
                answer = self._server.join(self, message)
            case MeetAtSwitch():
                answer = self._server.meet(self, message)
            case EvictFromSwitchJob():
                self._server.evict(self, message)
            case SetSwitchStrategy():
                answer = self._server.set_strategy(self, message)
            case GetSwitchPlan():
                answer = self._server.plan(self, message)
            case GetSwitchStatus():
                answer = self._server.status(message)
        if answer is not None:
            self.answer(answer)

    def answer(self, answer: FromSwitch) -> None:
        """Answer a request, now or later."""
        if self.link.is_open:
            self.link.send(pack(answer))

    def lost(self, error: OffbeatError | None) -> None:
        """Leave all jobs."""
        self._server.leave(self, error)
