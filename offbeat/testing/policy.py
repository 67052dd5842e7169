"""The promises of every synchronization policy, checked.

`check_policy` plays a server and its workers in virtual time, thousands of times, each time with other luck: unequal
and equal times, workers that come, go, crash and hang in every phase, another policy in between, memory that is lost.
Every second worker would push while it computes, if it were granted then.
What is promised is read off `offbeat.audit.invariants`, which are kept from the events and actions alone.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import TYPE_CHECKING

from offbeat.sync import ASP, BSP, SSP, KSync
from offbeat.testing.interleaving import Interleaving

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync import Policy

_OTHERS: tuple[Policy, ...] = (BSP(), ASP(), SSP(bound=1), KSync(k=2))
_STEPS = range(1000)  # of which a policy is asked what they contribute
_OTHERWISE = "it decided otherwise when the same was played again: it knows more than the state"
_CONTRIBUTES = ("gradient", "change", None)


def check_policy(
    policy: Policy,
    *,
    world: int = 4,
    interleavings: int = 1000,
    seed: int = 0,
    evicts: bool = False,
    others: Sequence[Policy] = _OTHERS,
) -> Mapping[str, int]:
    """Check that `policy` keeps what every policy promises.

    1. It decides from the state alone: the same state, the same answer, whatever the order of what it maps, and the
       state is left as it is. It reads no clock and keeps nothing to itself. Its memory may be lost at any moment.
    2. What it decides is possible, and comes to an end. No rate is below 0 or above one for each contribution.
    3. Each contribution is applied at most once, and in the end exactly one of applied, dropped, or lost with its
       worker; dropped only if the policy says that it `drops`. What is pending of workers that are gone goes into an
       update of those that come after them. Where the policy is `replicated`, an update holds all of a round.
    4. Its `bound` holds at every release, where a worker that takes part in every m-th round only counts as one that
       takes part in those between. It lets everyone push at once, unless it is `gated`.
    5. Nobody waits for ever while nothing is under way. A worker that hangs may make others wait until somebody notices
       and it is gone; a policy that `evicts` notices by itself. Whoever is evicted keeps others waiting: it computes,
       pushes or pulls, and does not only wait itself.
    6. What it says about itself is of the right kind; its workers contribute something.

    Args:
        policy: any; in some of the interleavings others take over from it and give back.
        world: workers at the beginning.
        interleavings: how many to play.
        seed: of the first; the others count on from it, so that a failure can be played alone.
        evicts: whether it must evict a worker that others wait for in vain.
        others: that take over from it and give back.

    Returns:
        What was played: how often workers crashed or hung ("crash while pushing"), joined, and so on, so that a test
        can assert that its faults fired.

    Raises:
        AssertionError: with the rule that is broken, and the story of the worker it was broken for.

    >>> from offbeat.sync import SSP
    >>> played = check_policy(SSP(bound=2), interleavings=20)
    >>> played["interleavings"]
    20
    """
    if wrong := _what_it_says_wrong(policy):
        raise AssertionError(f"{policy!r}: {wrong}.")
    fresh = deepcopy(policy)
    played: Counter[str] = Counter()
    for number in range(seed, seed + interleavings):
        play = Interleaving(policy, fresh, world, number, evicts, others)
        play.run()
        if number % 64 == 0:
            again = Interleaving(policy, fresh, world, number, evicts, others)
            again.run()
            if play.log != again.log:
                raise AssertionError(again.story(_OTHERWISE))
        played.update(play.played)
        played["interleavings"] += 1
    return played


def _what_it_says_wrong(policy: Policy) -> str:
    """Find what the policy declares wrongly about itself; "" if nothing."""
    for name in ("replicated", "drops", "gated"):
        if not isinstance(value := getattr(policy, name), bool):
            return f"`{name}` is {value!r}, and has to be True or False"
    bound = policy.bound
    if bound is not None and (type(bound) is not int or bound < 0):
        return f"`bound` is {bound!r}, and has to be a whole number from 0, or None if nothing is promised"
    if policy.replicated and (bound != 0 or policy.drops):
        return (
            f"it is `replicated`, where every update holds one contribution of every worker, but its bound is {bound} "
            f"and `drops` is {policy.drops}: that has to be 0 and False"
        )
    said = [policy.contributes(step) for step in _STEPS]
    if strange := [(step, what) for step, what in zip(_STEPS, said, strict=True) if what not in _CONTRIBUTES]:
        step, what = strange[0]
        return f"after step {step} it has a worker contribute {what!r}, which is none of {_CONTRIBUTES}"
    if not any(said):
        return f"it never has a worker contribute anything in its first {len(_STEPS)} steps"
    if said != [policy.contributes(step) for step in _STEPS]:
        return "asked twice what a worker contributes after a step, it says something else"
    return ""
