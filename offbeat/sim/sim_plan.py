"""The plan of a row as a coordinator wants to know it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.batching import BatchTuning, Keeps
    from offbeat.control import Controller
    from offbeat.plan import Plan
    from offbeat.robust import TooFew
    from offbeat.sync import Policy


@dataclass(frozen=True)
class SimPlan:
    """The parts of a plan that decide; it is not written down, so that policies and controllers need no names."""

    sync: Policy
    tuning: BatchTuning | None
    keeps: Keeps
    controller: Controller | None
    is_served = True
    is_tabled = False
    has_elastic_group = False
    judging_rule = None
    too_few: TooFew = "skip"

    @classmethod
    def of(cls, plan: Plan) -> SimPlan:
        """The parts of this plan."""
        return cls(plan.cadence, plan.tuning, plan.keeps, plan.controller)

    @property
    def digest(self) -> str:
        return repr(self.sync)

    def to_toml(self) -> str:
        return self.digest

    def swapped(self, part: str, *, whole: bool = False) -> SimPlan:
        raise PlanError(f"Cannot swap {self.sync!r} for {part!r}: only controllers swap policies in a simulation.")

    def controlled(self, sync: Policy) -> SimPlan:
        return dataclasses.replace(self, sync=sync)

    def check_world(self, world: int) -> None:
        """Any number will do."""
