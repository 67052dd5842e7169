"""The vote on another plan among workers without a server: one requests it, all hold it behind the next exchange
(`BatchAccount.requests_vote`).

any worker      wants a plan: its own script's, one that somebody left in the run's folder
                (`offbeat.wire.swap_request`), or what the present plan's controller has decided
all             say which plan they want: if these are several, nothing changes; people come before controllers
all             say whether they can go by it: if one cannot, nothing changes
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from offbeat.errors import OffbeatError, PeerError, PlanError
from offbeat.wire import swap_request
from offbeat.wire.swap_request import SwapReply, SwapRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.engine.control_group import ControlGroup
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")
_LOOK_S = 0.2


class VoteResult(NamedTuple):
    """The plan that holds from now on, and why it is no other one, if that was wanted; the reason of a controller."""

    plan: Plan
    refusal: str = ""
    reason: str = ""


class PlanRequest(msgspec.Struct, frozen=True):
    """A worker's request for a plan.

    Args:
        plan: as TOML; "" for none.
        reason: of the controller that wants it; "" if a person does.
    """

    plan: str = ""
    reason: str = ""


_decode_request = msgspec.json.Decoder(PlanRequest).decode


class PlanVote:
    """One worker's part.

    Args:
        control: this worker's end of the control group.
        now_s: the clock.
        folder: where wishes are left, if anywhere.
        check: called with a plan that is wanted; raises if this worker cannot go by it.
    """

    def __init__(
        self,
        control: ControlGroup,
        now_s: Callable[[], float],
        folder: Path | None,
        check: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self._control, self._now_s, self._folder, self._check = control, now_s, folder, check
        self._proposal = PlanRequest()
        self._request: SwapRequest | None = None
        self._looked_s = 0.0

    def propose(self, plan: Plan, reason: str = "") -> None:
        """Propose this plan, for this reason of a controller if it is one's."""
        self._proposal = PlanRequest(plan.to_toml(), reason)

    @property
    def is_due(self) -> bool:
        """Whether this worker wants a plan."""
        return bool(self._proposal.plan)

    def is_wanted(self, present: Plan, *, looks: bool) -> bool:
        """Whether this worker wants all to confer.

        Args:
            present: the plan that holds.
            looks: whether it is the one that looks for wishes, now and then.
        """
        now_s = self._now_s()
        if (
            looks
            and self._folder is not None
            and self._request is None
            and not self.is_due
            and now_s - self._looked_s > _LOOK_S
        ):
            self._looked_s = now_s
            self._look(self._folder, present)
        return self.is_due

    def decide(self, present: Plan) -> VoteResult:
        """Decide which plan holds from now on. Collective."""
        mine, self._proposal = msgspec.json.encode(self._proposal).decode(), PlanRequest()
        all_ = [_decode_request(text) for text in self._control.texts("the question for another plan", mine).values()]
        plans = {one.plan for one in all_ if one.plan and not one.reason}
        by_controller = None if plans else next((one for one in all_ if one.plan), None)
        reason = "" if by_controller is None else by_controller.reason
        plans = plans if by_controller is None else {by_controller.plan}
        plan, refusal = present, ""
        try:
            if len(plans) > 1:
                raise PlanError(f"Cannot swap the plan for {len(plans)} others at once. Try again with one.")
            plan = present.swapped(min(plans), whole=True) if plans else present
            if plan.digest != present.digest:
                self._check(plan)
        except OffbeatError as error:
            refusal = str(error)
        refusals = self._control.texts("the agreement on another plan", refusal)
        refusal = next((text for text in refusals.values() if text), "")
        return VoteResult(present if refusal else plan, refusal, reason)

    def withdraw(self, present: Plan) -> VoteResult:
        """The plan that this worker wants, which is to hold without a vote."""
        wanted, self._proposal = self._proposal, PlanRequest()
        return VoteResult(present.swapped(wanted.plan, whole=True), reason=wanted.reason)

    def answer(self, text: str, refusal: str) -> None:
        """Say what became of it to whoever had left a wish."""
        if self._request is not None and self._folder is not None:
            swap_request.answer(self._folder, SwapReply(self._request.number, text, refusal))
        self._request = None

    def _look(self, folder: Path, present: Plan) -> None:
        try:
            self._request = swap_request.claim(folder)
            if self._request is not None:
                self.propose(present.swapped(self._request.part))
        except PlanError as error:
            self.answer("", str(error))
        except PeerError as error:
            _log.warning("%s", error)
