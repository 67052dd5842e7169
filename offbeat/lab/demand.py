"""The demand of a row on its machines and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.plan import Plan
    from offbeat.sync import Policy


@dataclass(frozen=True)
class Demand:
    """The demand of a row on its machines and links, whichever of its policies decides.

    Args:
        together: whether one update takes the contributions of all workers.
        tuned: whether batches follow the machines.
        part: bytes that pass between a worker and the others in a step, on average, for each of a gradient's.
        overlaps: whether a server's links work while workers compute, where they wait for each other.
    """

    together: bool = True
    tuned: bool = False
    part: float = 1.0
    overlaps: bool = False

    @classmethod
    def of(cls, plan: Plan, steps: Iterable[int], world: int) -> Demand:
        """The demand of a plan.

        Args:
            steps: numbers of the steps that are measured.
            world: how many workers there are.
        """
        from offbeat.codec.wire_bytes import allreduce_bytes, flat_bucket

        policies = (plan.cadence, *(() if plan.controller is None else plan.controller.policies))
        numbers = list(steps)
        part = min(sum(_part(one, step) for step in numbers) for one in policies) / len(numbers)
        if not plan.is_served:
            # Of matrices of low rank nobody knows here how low; of all else the bytes are a part of the elements.
            whole = flat_bucket(1 << 22)
            bytes_ = allreduce_bytes(plan.codec, whole, world)
            part *= 0.0 if plan.codec.promises.rounds > 1 else bytes_ / whole.size_bytes
        together = all(one.replicated for one in policies)
        return cls(together, plan.tuning is not None, part, overlaps=plan.scheduling is not None)


def _part(policy: Policy, step: int) -> float:
    """The part of the model of which something is contributed behind a step."""
    from offbeat.sync import StepsLocally

    what = policy.contributes(step)
    if what == "change" and isinstance(policy, StepsLocally):
        return 1 / policy.fragments
    return float(what is not None)
