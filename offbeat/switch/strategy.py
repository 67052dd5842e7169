"""Policies as a switch knows them: a few numbers, compiled from the policy's object. No name, so nothing to branch on.

    path      policies                         what decides
    stream    BSP, LocalSGD                    a chunk is complete with all members' values
    stream    KSync(k)                         an exchange is settled by the first k members (`quorum`); with `wait_s`
                                               by all, or by those that are in it when it is over (`sum_watch`)
    table     SSP, DSSP, ASP                   a worker may begin step c + 1 while c - low <= `window`

On the stream every worker applies the same update, and whoever came too late for one is told that it is not in it. What
becomes of its contribution then is its own affair: it drops it, or keeps it as a residual (`keeps_late`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.protocol.switch_control import Strategy
from offbeat.short_name import short_name
from offbeat.switch.job_shape import RING
from offbeat.sync import ASP, BSP, DSSP, SSP, KSync, LocalSGD

if TYPE_CHECKING:
    from offbeat.sync import Policy

NEAR = 8  # steps ahead, under a policy without a bound, that a worker is let at a time


def compile_policy(policy: Policy) -> Strategy:
    """Compile a policy's record.

    Raises:
        PlanError: if a switch cannot carry the policy out, saying why and what to use.

    >>> compile_policy(SSP(bound=8)) == Strategy(path="table", window=8, quorum=None, keeps_late=False, most=None)
    True
    """
    strategy = _compiled(policy)
    check_window(strategy, RING)
    return strategy


def _compiled(policy: Policy) -> Strategy:
    match policy:
        case BSP() | LocalSGD():
            return Strategy()
        case KSync(k=k, late=late, wait_s=wait_s):
            return Strategy(quorum=k, keeps_late=late == "carry", wait_s=wait_s)
        case SSP(bound=bound):
            return Strategy("table", window=bound)
        case DSSP(low=low, high=high):
            return Strategy("table", window=low, most=high)
        case ASP():
            return Strategy("table", window=None)
    raise PlanError(
        f"Cannot use {short_name(policy)} on a switch: it adds up what comes and counts clocks, but gives no turns "
        "and knows no groups of workers. Use BSP(), SSP(4), or fabric=ParameterServer() - at `plan.sync`."
    )


def watched(strategy: Strategy, ring: int) -> Strategy:
    """The record by which a switch carries out this one where control watches its clocks; see `clock_watch`."""
    if strategy.path != "table" or strategy.window is not None:
        return strategy
    return Strategy("table", window=min(NEAR, ring - 2), most=ring - 2)


def check_window(strategy: Strategy, ring: int) -> None:
    """Check that a record fits a switch's ring of clocks.

    Raises:
        PlanError: if a worker may get further ahead than the switch keeps track of.
    """
    if (most := strategy.slack_in(ring)) > ring - 2:
        raise PlanError(
            f"Cannot let workers be {most} steps ahead on a switch that keeps track of {ring} clocks: at most "
            f"{ring - 2} fit. Choose a smaller bound, or ASP() - at `plan.sync`."
        )
