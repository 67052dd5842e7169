"""Messages of a plan swap.

who wants it                     coordinator                          every worker, every shard
  | -- SwapPlan(number, part) -----> |                                                    |
  |                                  | -- PlanProposed(number, plan) -------------------> |   workers only
  |                                  | <----- PlanAgreement(number, digest, refusal) ---- |
  |                                  | -- AdoptPlan(plan) ------------------------------> |   if all agree; else nothing
  |                                  |                                                    |   has changed
  | <----- SwapResult(number, ...) - |

A controller of the plan, which lives at the coordinator, is who wants it as well; then silence is taken for consent.

If the plan has no server, all are to leave it at the same place of their script. Who agrees says how many places it has
passed, and passes no other before it hears an `AdoptPlan`: with the `border` where all meet, which nobody has passed,
or of the plan that has been there before, if one refuses. If a worker is lost before all have met, the others stay.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Text

LEAVING = "whether all leave the server"  # asked by all at their sync point; how many they are
_Digest = Annotated[str, msgspec.Meta(max_length=64)]


class SwapPlan(msgspec.Struct, tag=True, frozen=True):
    """Worker or operator to coordinator: change the plan by this.

    Args:
        part: of a plan, as TOML: what is in it replaces what the present one has there.
        whole: it is a whole plan: what is not in it has its default.
    """

    number: Count
    part: Text
    whole: bool = False


class PlanProposed(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to each worker: a plan to agree to."""

    number: Count
    plan: Text


class PlanAgreement(msgspec.Struct, tag=True, frozen=True):
    """Worker to coordinator: its vote on the proposed plan.

    Args:
        digest: of the plan as it read it; "" if it cannot go by it.
        refusal: why not.
        place: how many places of its script it has passed where all could leave the server.
        pushed: how many contributions it had pushed at the last of them; one that was pushed since is of a step that
            is not over.
    """

    number: Count
    digest: _Digest
    refusal: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    place: Count = 0
    pushed: Count = 0


class AdoptPlan(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to all workers and shards: this plan holds from now on.

    Args:
        number: how often the plan of the job was swapped.
        text: for people: what has changed, and both digests.
        border: the sync point: how many places of their script the workers pass before they leave the server; None if
            they stay.
    """

    plan: Text
    number: Count
    text: Text = ""
    border: Count | None = None


class SwapResult(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to whoever requested the swap: its result.

    Args:
        text: what has changed.
        refusal: why the plan is what it was; "" if it is not.
    """

    number: Count
    text: Text = ""
    refusal: Text = ""
