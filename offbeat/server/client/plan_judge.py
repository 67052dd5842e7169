"""The judge of another plan that is proposed while a worker trains with a server: what the worker makes of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PlanVerdict(NamedTuple):
    """One worker's verdict on a plan that is proposed.

    Args:
        digest: of the plan as the worker reads it; "" if it cannot go by it.
        refusal: why not; "" if it can.
        passed: how many places of its script it has passed where all could leave the server; 0 if the plan has one.
        pushed: how many contributions it had pushed at the last of them.
    """

    digest: str
    refusal: str = ""
    passed: int = 0
    pushed: int = 0


class PlanJudge(Protocol):
    """The judge of which plans a worker can go by. Called on the event loop's thread."""

    def judge(self, plan: str) -> PlanVerdict:
        """Judge a plan that is proposed, as TOML.

        If the plan has no server, the worker passes no place of its script from now on, until something is adopted or
        it is `let_go`.
        """

    def adopt(self, plan: str, text: str, sync_point: int | None) -> None:
        """Adopt this plan; all leave the server once they have passed `sync_point` places, unless that is None."""

    def let_go(self) -> None:
        """Give up waiting for the outcome of a proposal: it may never be heard."""
