"""The promises of every controller, checked.

`check_controller` tells it of workers whose waiting comes and goes, as it would be told of a job: what it decides is
adopted, under the last of its policies hardly anybody waits, and each brings more or less than the others.
"""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import TYPE_CHECKING

from offbeat.control import Keep, Metrics, Pace, Reading, Swap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.control import Controller
    from offbeat.sync import Policy

_ASKED = 20  # times in the seconds that it looks back
_LONG = 60  # times these seconds
_MOST_SWAPS = 4  # in so many seconds as it looks back, several times over
_WITHIN = 5


def check_controller(controller: Controller, *, world: int = 4, plays: int = 20, seed: int = 0) -> Mapping[str, int]:
    """Check that `controller` keeps what every controller promises.

    1. It decides from the metrics alone: the same metrics, the same answer, and again after it was asked other things.
    2. What it wants is one of its `policies`, another than decides already, and it gives a reason.
    3. It does not flap, however waiting comes and goes: no more than 4 swaps in 5 times the seconds that it looks back.
    4. It leaves alone what is none of its policies.

    Args:
        controller: any.
        world: workers.
        plays: how many to play, each with other luck.
        seed: of the first; the others count on from it.

    Returns:
        How often it was asked ("decisions") and swapped ("swaps").

    Raises:
        AssertionError: with the rule that is broken.

    >>> from offbeat.control import WaitThreshold
    >>> check_controller(WaitThreshold(), plays=1)["decisions"]
    1200
    """
    assert len(set(controller.policies)) > 1, f"{controller!r}: it knows one policy only, and cannot swap"
    counts: Counter[str] = Counter()
    for number in range(seed, seed + plays):
        _play(controller, world, random.Random(number), counts)
    return counts


def _play(controller: Controller, world: int, chance: random.Random, counts: Counter[str]) -> None:
    fresh, sync = deepcopy(controller), controller.policies[0]
    back_s = controller.looks_back_s
    every_s = back_s / _ASKED
    waited_s, steps, since_s = dict.fromkeys(range(world), 0.0), dict.fromkeys(range(world), 0.0), 0.0
    left_out = dict.fromkeys(range(world), 0.0)
    readings: list[Reading] = []
    swaps: list[float] = []
    late, until_s = 0.0, 0.0
    brings = {policy: chance.uniform(0.5, 1.0) for policy in controller.policies}
    paces: dict[Policy, Pace] = {}
    for asked in range(_LONG * _ASKED):
        now_s = asked * every_s
        if now_s >= until_s:  # for a while one worker is as late as this
            late, until_s = chance.choice((0.0, 0.2, 0.4, 0.9)), now_s + back_s * chance.uniform(0.1, 6)
        loosest = sync == controller.policies[-1]
        for worker in range(world):
            waits = late if worker and not loosest else 0.0
            waited_s[worker] += every_s * waits
            made = (1 - late if loosest and not worker else 1.0) * (1 - waits)
            steps[worker] += made
            left_out[worker] += made * late * (not worker and sync != controller.policies[0])
        whole = {worker: int(count) for worker, count in steps.items()}
        left = {worker: int(count) for worker, count in left_out.items()}
        readings.append(Reading(now_s, whole, dict(waited_s), brought=whole, left_out=left))
        readings = [one for one in readings if one.at_s >= now_s - back_s - 2 * every_s]
        if now_s - since_s > back_s:
            paces[sync] = Pace(now_s, brings[sync])
        metrics = Metrics(sync, tuple(readings), since_s, tuple(swaps[-16:]), paces=dict(paces))
        decision = controller.decide(metrics)
        counts["decisions"] += 1
        if asked % 7 == 0 and (decision != controller.decide(metrics) or decision != fresh.decide(metrics)):
            raise AssertionError(
                f"{controller!r}: asked twice with the same metrics it decides otherwise: it knows more than the "
                "metrics."
            )
        if isinstance(decision, Keep):
            continue
        _check(controller, metrics, decision)
        sync, since_s = decision.sync, now_s
        swaps.append(now_s)
        counts["swaps"] += 1
        lately = [at_s for at_s in swaps if at_s > now_s - _WITHIN * back_s]
        if len(lately) > max(_MOST_SWAPS, len(controller.policies)):
            raise AssertionError(f"{controller!r} flaps: it has swapped {len(lately)} times in {_WITHIN * back_s:g} s.")
    stranger = _Stranger()
    if readings and not isinstance(controller.decide(Metrics(stranger, tuple(readings))), Keep):  # type: ignore[arg-type]
        raise AssertionError(f"{controller!r} swaps for a policy that is none of its own: a person has chosen that.")


def _check(controller: Controller, metrics: Metrics, swap: Swap) -> None:
    if swap.sync not in controller.policies:
        raise AssertionError(f"{controller!r}: {swap.sync!r}, which it wants, is none of its policies.")
    if swap.sync == metrics.sync:
        raise AssertionError(f"{controller!r}: {swap.sync!r}, which it wants, decides already.")
    if not swap.reason or swap.reason.endswith("."):
        raise AssertionError(f"{controller!r}: it has to give a reason without a full stop, not {swap.reason!r}.")


class _Stranger:
    """A policy that no controller knows."""
