"""A worker's or an operator's link to the control plane of a switch."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, OffbeatError, PeerError, PlanError
from offbeat.protocol.bounds import SECRET_BYTES
from offbeat.protocol.switch_control import (
    EvictFromSwitchJob,
    FromSwitch,
    GetSwitchStatus,
    JoinSwitchJob,
    Strategy,
    SwitchJobJoined,
    SwitchRefused,
    SwitchReturn,
    SwitchStatus,
    ToSwitch,
    from_switch_of,
    pack,
)
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits
from offbeat.wire.tcp import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.switch.job_shape import JobShape
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.messages import Role

_LOOK_S = 0.2  # while other workers are waited for
JOB = "offbeat-switch"  # by which links are known to belong to a switch, whatever is summed there


class ControlClient:
    """The link, and the answers that come over it. It may be used on any thread.

    Args:
        address: "host:port" of the switch's control.
        rank, role: who comes.
        credentials: what both sides prove.
        secret: by which the switch knows this worker again when it dials again; None for a new one.
        timeout: for answers, and after which a silent switch is lost.
        patience: for how long to dial.
        on_lost: called on the event loop's thread when the switch is lost, not when this end is closed.

    Raises:
        NetworkError: if nobody could be reached; says who, where, for how long.
        PeerError: if it refused.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        role: Role = "worker",
        credentials: Credentials | None = None,
        secret: bytes | None = None,
        timeout: timedelta = timedelta(seconds=5),
        patience: timedelta = timedelta(seconds=20),
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_lost = on_lost
        self._address, self._rank, self._timeout = address, rank, timeout
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._requests = itertools.count(1)
        self._answers: dict[int, Future[FromSwitch]] = {}
        self._error: OffbeatError | None = None
        self._is_closed = False
        self._loop = LoopThread("offbeat-switch-control")
        try:
            self._link = self._loop.run(
                connect(
                    address,
                    accept=lambda link: self,
                    job=JOB,
                    rank=rank,
                    role=role,
                    credentials=credentials,
                    limits=Limits(timeout=timeout),
                    patience=patience,
                )
            )
        except BaseException:
            self._loop.close()
            raise

    @property
    def host(self) -> str:
        """The host of the switch, as it was dialled."""
        return self._address.rpartition(":")[0].strip("[]")

    @property
    def is_lost(self) -> bool:
        """Whether there is no switch at the other end any more."""
        return self._error is not None

    def ask(
        self,
        request: Callable[[int], ToSwitch],
        while_waiting: Callable[[], None] | None = None,
        patience: timedelta | None = None,
    ) -> FromSwitch:
        """Ask something, and wait for the answer.

        Args:
            request: makes the request of the number that it is given.
            while_waiting: called again and again until the answer is here, which takes as long as other workers do;
                None for what the switch answers at once.
            patience: for an answer at once; None for the timeout.

        Raises:
            PlanError: if the switch refuses it.
            PeerError: if it ends the link, since it does not take what this end says.
            NetworkError: if it is lost, or does not answer.
        """
        number, patience_s = next(self._requests), (patience or self._timeout).total_seconds()
        message = request(number)
        answer = self._answers[number] = Future()
        try:
            if self._error is not None:
                raise NetworkError(f"The switch at {self._address} is lost: {self._error}") from self._error
            self._loop.call(self._send, message, answer)
            told = self._wait(answer, while_waiting, patience_s)
        except TimeoutError as error:
            raise NetworkError(
                f"The switch at {self._address} has not answered {type(message).__name__} within {patience_s:g} s."
            ) from error
        finally:
            del self._answers[number]
        if isinstance(told, SwitchRefused):
            raise PlanError(told.reason)
        return told

    @staticmethod
    def _wait(answer: Future[FromSwitch], while_waiting: Callable[[], None] | None, patience_s: float) -> FromSwitch:
        while while_waiting is not None and not wait([answer], _LOOK_S).done:
            while_waiting()
        return answer.result(patience_s)

    def join(
        self,
        job: str,
        shape: JobShape,
        strategy: Strategy | None = None,
        *,
        least_slots: int = 0,
        exponent: int = 0,
        again: SwitchReturn | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> tuple[JobShape, SwitchJobJoined]:
        """Take part in a job, as the rank that this link has; the first worker creates it.

        Args:
            job: its name.
            shape: that it has, or is to have; whatever number it says.
            strategy: that it begins with; None for that of a stream of all workers.
            least_slots: with which it can do as well, if the switch has no room for those of the shape; 0 if it cannot.
            exponent: of all values in its table.
            again: how far this worker is in a job that the switch has forgotten; then all its workers are waited for.
            while_waiting: see `ask`.

        Returns:
            The shape with the job's number and slots, and what else this worker is told.

        Raises:
            PlanError: if the switch refuses it.
            NetworkError: if it is lost, or does not answer.
        """
        joined = self.ask(
            lambda request: JoinSwitchJob(
                request=request,
                job=job,
                worker=self._rank,
                workers=shape.workers,
                values=shape.values,
                slots=shape.slots,
                ring=shape.ring,
                rows=shape.rows,
                least_slots=least_slots,
                strategy=strategy or Strategy(),
                exponent=exponent,
                most=shape.most,
                again=again,
                secret=self._secret,
            ),
            while_waiting,
        )
        if not isinstance(joined, SwitchJobJoined):
            raise NetworkError(f"The switch at {self._address} has answered something else: {type(joined).__name__}.")
        return dataclasses.replace(shape, number=joined.number, slots=joined.slots), joined

    def status(self, job: str = "", patience: timedelta | None = None) -> SwitchStatus:
        """Ask what the switch knows of its jobs, or of one.

        Args:
            patience: for the answer; None for the timeout.

        Raises:
            NetworkError: if it is lost, or does not answer.
        """
        told = self.ask(lambda request: GetSwitchStatus(request, job), patience=patience)
        if not isinstance(told, SwitchStatus):
            raise NetworkError(f"The switch at {self._address} has answered something else: {type(told).__name__}.")
        return told

    def evict(self, job: str, worker: int, why: str) -> None:
        """Have a job go on without a worker; does not wait."""
        if self._error is None:
            self._loop.call(self._send, EvictFromSwitchJob(job, worker, why), None)

    def leave(self, job: str) -> None:
        """Have nobody wait for this worker at a job: it takes no part in it any more; does not wait."""
        self.evict(job, self._rank, "it is done")

    def close(self) -> None:
        """Say good-bye; again does nothing."""
        self._is_closed = True
        if self._error is None:
            self._error = NetworkError("it was closed")
            self._loop.run(self._link.close())
        self._loop.close()
        self._give_up(NetworkError(f"The switch at {self._address} is lost: {self._error}"))

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _send(self, message: ToSwitch, answer: Future[FromSwitch] | None) -> None:
        try:
            self._link.send(pack(message))
        except NetworkError as error:
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse: a switch says nothing that has a body."""
        raise PeerError(f"the switch sends a body of {size_bytes} bytes, and nothing that it says has one")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Hand an answer to whoever waits for it."""
        message = from_switch_of(metadata)
        if isinstance(message, SwitchRefused) and not message.request:
            self._give_up(PeerError(f"The switch at {self._address} ends the link: {message.reason}"))
            return
        answer = self._answers.get(message.request)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lost(self, error: OffbeatError | None) -> None:
        """Let nobody wait for answers any more."""
        self._error = error or NetworkError("it has said good-bye")
        self._give_up(NetworkError(f"The switch at {self._address} is lost: {self._error}"))
        if not self._is_closed:
            self._on_lost()

    def _give_up(self, error: OffbeatError) -> None:
        """Have whoever waits for an answer learn that none comes."""
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(error)
