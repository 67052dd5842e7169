"""How many contributions of one worker count beside one reference: no flood of one worker moves a model."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.coordinator.reference_limit import MOST_SAVED, ReferenceLimit

VALIDATORS = {8, 9}


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 8, 9]), min_size=1, max_size=4, unique=True), max_size=80))
def test_no_worker_has_more_contributions_than_there_are_references(updates: list[list[int]]) -> None:
    """Beside those that are allowed at once; in any stretch of updates, and nobody loses one before that."""
    limit, clocks, references = ReferenceLimit(), Counter[int](), 0
    kept: list[tuple[int, int]] = []  # worker, and references before
    for workers in updates:
        weights = {(worker, clocks[worker]): 32.0 for worker in workers}
        clocks.update(workers)
        beyond = limit.beyond(weights, VALIDATORS)
        references += not VALIDATORS.isdisjoint(workers)
        kept += [(worker, references) for worker, _ in weights.keys() - beyond if worker not in VALIDATORS]
        assert not VALIDATORS.intersection(worker for worker, _ in beyond)
        for worker, _ in weights:
            places = [place for one, place in kept if one == worker]
            most = max((len(places) - i - (references - place) for i, place in enumerate(places)), default=0)
            assert most <= MOST_SAVED
            assert worker not in {one for one, _ in beyond} or most == MOST_SAVED


def test_a_contribution_without_samples_is_none() -> None:
    limit = ReferenceLimit()
    assert not any(limit.beyond({(0, clock): 0.0}, VALIDATORS) for clock in range(10))
    assert not limit.beyond({(0, 10): 1.0}, VALIDATORS)
