"""The meeting of a job's workers at a switch that was started again and knows nothing of the job.

Each says who is still there, as far as it knows, and how far it is itself. The job begins again once all are here whom
nobody takes for lost: whoever is missing would lack what the others add up from there on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from offbeat.switch.clocks import Windows
from offbeat.switch.packet import wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.protocol.group_progress import GroupProgress
    from offbeat.protocol.switch_control import JoinSwitchJob, Strategy, SwitchReturn


P = TypeVar("P")


class RejoinMeeting(Generic[P]):
    """One job's meeting.

    Attributes:
        waiting: who is here, by rank: its link, and what it asked.
        lost: ranks that somebody knows to be gone.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[P, JoinSwitchJob]] = {}
        self.lost: set[int] = set()

    @property
    def expected(self) -> set[int]:
        """The ranks that nobody takes for lost."""
        return set.intersection(*(set(one.members) for one in self._returns.values())) - self.lost

    @property
    def is_complete(self) -> bool:
        """Whether all are here that are expected."""
        return self.expected <= self.waiting.keys()

    @property
    def progress(self) -> dict[int, GroupProgress]:
        """The exchanges whose results each has."""
        return {rank: one.progress for rank, one in self._returns.items() if rank in self.expected}

    @property
    def clock(self) -> int:
        """The last clock that all have finished, but for the one that they are to bring back."""
        clocks = [one.clock for one in self._returns.values() if one.clock is not None]
        return wrapped(min(clocks, default=1) - 1)

    @property
    def settled(self) -> int:
        """The most that one of them has seen the table settled."""
        return max(one.settled for one in self._returns.values())

    @property
    def change(self) -> tuple[Strategy, str, Windows | None]:
        """The policy's record, its plan and windows, of whoever knows the latest."""

        def epoch(asked: tuple[P, JoinSwitchJob]) -> int:
            windows = None if asked[1].again is None else asked[1].again.windows
            return -1 if windows is None else windows[3]

        _, latest = max(self.waiting.values(), key=epoch)
        assert latest.again is not None, "else it would not be here"
        windows = latest.again.windows
        return latest.strategy, latest.again.plan, None if windows is None else Windows(*windows)

    @property
    def _returns(self) -> Mapping[int, SwitchReturn]:
        return {rank: asked.again for rank, (_, asked) in self.waiting.items() if asked.again is not None}
