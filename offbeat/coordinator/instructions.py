"""The instructions of the coordinator to its owner: send, set, write and raise, in the order of its decisions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from offbeat.errors import PeerError
    from offbeat.history import Record
    from offbeat.protocol.messages import Decision, ToWorker
    from offbeat.protocol.plan_swap import AdoptPlan


@dataclass(frozen=True)
class PolicyTimer:
    """The timer at which the policy of a model is asked again."""

    model: int


@dataclass(frozen=True)
class ControllerTimer:
    """The timer at which the controller of the plan is asked again."""


@dataclass(frozen=True)
class ConsentTimer:
    """The timer at which silence is taken for consent to a proposal of the controller.

    Args:
        number: of the proposal.
    """

    number: int


Timer = PolicyTimer | ControllerTimer | ConsentTimer


@dataclass(frozen=True)
class SendToWorker:
    """Send a message to a worker; nothing if it is not connected."""

    worker: int
    message: ToWorker


@dataclass(frozen=True)
class SendToShards:
    """Have all shards carry out a decision, the one that coordinates included."""

    decision: Decision


@dataclass(frozen=True)
class SendToAll:
    """Tell all workers and shards which plan holds."""

    message: AdoptPlan


@dataclass(frozen=True)
class SendReply:
    """Answer whoever asked, by the name that the question came with."""

    asker: Hashable
    message: ToWorker


@dataclass(frozen=True)
class SetTimer:
    """Hand in `TimePassed` for this timer at that time, and not at the one that was set before; None for never."""

    timer: Timer
    at_s: float | None


@dataclass(frozen=True)
class AppendHistory:
    """Write a record into the history."""

    record: Record


@dataclass(frozen=True)
class WriteLog:
    """Write a line for people into the log."""

    text: str
    level: int = logging.WARNING


@dataclass(frozen=True)
class RejectPeer:
    """End the connection of whoever this event came from with an error; nothing follows it."""

    error: PeerError


Instruction = SendToWorker | SendToShards | SendToAll | SendReply | SetTimer | AppendHistory | WriteLog | RejectPeer


class Outbox:
    """Instructions that one event leads to, in order."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []

    def take(self) -> list[Instruction]:
        """Take all instructions; the next event begins with none."""
        taken, self._instructions = self._instructions, []
        return taken

    def send(self, worker: int, message: ToWorker) -> None:
        """Add a message to a worker."""
        self._instructions.append(SendToWorker(worker, message))

    def decide(self, decision: Decision) -> None:
        """Add a decision that all shards carry out."""
        self._instructions.append(SendToShards(decision))

    def adopt(self, message: AdoptPlan) -> None:
        """Add word to everybody of the plan that holds."""
        self._instructions.append(SendToAll(message))

    def reply(self, asker: Hashable, message: ToWorker) -> None:
        """Add an answer to whoever asked."""
        self._instructions.append(SendReply(asker, message))

    def set_timer(self, timer: Timer, at_s: float | None) -> None:
        """Set a timer, or stop it."""
        self._instructions.append(SetTimer(timer, at_s))

    def record(self, record: Record) -> None:
        """Add a record of the history."""
        self._instructions.append(AppendHistory(record))

    def log(self, text: str, level: int = logging.WARNING) -> None:
        """Add a line of the log."""
        self._instructions.append(WriteLog(text, level))

    def reject(self, error: PeerError) -> None:
        """Add the end of the connection that the event came from."""
        self._instructions.append(RejectPeer(error))
