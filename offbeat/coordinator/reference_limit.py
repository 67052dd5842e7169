"""The limit on how many contributions of one worker are compared with the same reference.

A rule that compares one contribution at a time with a reference sees that it agrees, and not that it has been there
before. A liar that repeats its own honest gradient agrees each time, and moves the model as far along it as it likes,
until a validator pushes a new reference. So each reference allows each worker one contribution. A worker that did not
use the one before has two, so honest workers that are now faster and now slower than a validator lose none. Further
contributions weigh nothing: over many references each worker has at most one for each of them.

The limit follows from the order of decisions alone: the audit replays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from offbeat.sync import Push

MOST_SAVED = 2  # contributions of one worker that are allowed at once


class ReferenceLimit:
    """The limit on the contributions to one model.

    >>> limit = ReferenceLimit()
    >>> [limit.beyond({(3, clock): 32.0}, validators={7}) for clock in range(3)]
    [frozenset(), frozenset(), frozenset({(3, 2)})]
    >>> [limit.beyond({push: 32.0}, validators={7}) for push in [(7, 0), (3, 3), (3, 4)]]
    [frozenset(), frozenset(), frozenset({(3, 4)})]
    """

    def __init__(self) -> None:
        self._references = 0
        self._used: dict[int, int] = {}  # worker: references that have no contribution of it left

    def beyond(self, weights: Mapping[Push, float], validators: Set[int]) -> frozenset[Push]:
        """Count the contributions of the next update; returns those that are to weigh nothing.

        Args:
            weights: of each, in samples; one of a validator is a new reference.
            validators: ranks of those.
        """
        self._references += any(worker in validators for worker, _ in weights)
        beyond = set()
        for push, weight in weights.items():
            if not weight or push[0] in validators:
                continue
            used = max(self._used.get(push[0], -MOST_SAVED), self._references - MOST_SAVED)
            if used == self._references:
                beyond.add(push)
            else:
                self._used[push[0]] = used + 1
        return frozenset(beyond)
