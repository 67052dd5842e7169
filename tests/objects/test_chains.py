"""Chains in any order of arrivals, losses and broken links: no circle, nobody told a wrong feeder, nobody forgotten."""

from __future__ import annotations

import random

import pytest

from offbeat.objects.chains import Chains
from offbeat.testing.object_stores import descendants


def test_readers_that_ask_together_are_one_pipeline() -> None:
    chains = Chains()
    chains.put("a")
    for reader in "bcd":
        chains.read(reader)
    assert chains.feeders == {"b": "a", "c": "b", "d": "c"}


def test_readers_that_ask_one_after_another_double_the_holders() -> None:
    chains = Chains()
    chains.put("a")
    holders = 1
    names = iter("bcdefghijklmnop")
    while holders < 16:
        readers = [next(names) for _ in range(holders)]
        for reader in readers:
            chains.read(reader)
        assert len(set(chains.feeders.values())) == holders, "each holder feeds one"
        for reader in readers:
            chains.arrived(reader)
        holders *= 2
    assert len(chains.whole) == 16
    assert not chains.feeders


def test_readers_before_the_object_wait_and_become_a_pipeline() -> None:
    chains = Chains()
    assert chains.read("b") == {"b"}
    assert chains.read("c") == {"c"}
    assert chains.feeders == {"b": None, "c": None}
    assert chains.put("a", is_whole=False) == {"b", "c"}
    assert sorted(chains.feeders.values(), key=str) == ["a", "b"]


def test_a_lost_reader_is_bridged_and_a_lost_first_one_orphans_its_chain() -> None:
    chains = Chains()
    chains.put("a")
    for reader in "bcd":
        chains.read(reader)
    assert chains.lose("c") == {"d"}
    assert chains.feeders["d"] == "b"
    assert chains.lose("a") == {"b"}
    assert chains.is_orphaned
    assert chains.feeders == {"b": None, "d": "b"}
    assert chains.put("e") == {"b"}, "d goes on behind b"
    assert chains.feeders == {"b": "e", "d": "b"}


def test_an_orphaned_chain_is_put_after_another_one_once() -> None:
    chains = Chains()
    chains.put("a")
    chains.read("b")
    chains.put("x")
    chains.read("c")
    assert chains.feeders == {"b": "a", "c": "x"}
    assert chains.lose("x") == {"c"}
    assert chains.feeders == {"b": "a", "c": "b"}
    assert chains.lose("x") == set(), "a second report of it changes nothing"


def test_a_slow_reader_is_last() -> None:
    chains = Chains()
    chains.put("a")
    chains.read("slow", slow={"slow"})
    chains.read("b", slow={"slow"})
    assert chains.feeders == {"b": "a", "slow": "b"}
    chains.read("c", slow={"slow"})
    assert chains.feeders == {"b": "a", "c": "b", "slow": "c"}
    assert chains.avoid("b") == {"c", "b"}
    assert chains.feeders == {"c": "a", "slow": "c", "b": "slow"}
    assert chains.avoid("a") == set(), "the only one that has it"
    chains.arrived("c")
    chains.avoid("a")
    chains.read("d")
    assert chains.avoid("a", {"a"}) == {"d"}
    assert chains.feeders["d"] != "a"


class TestApart:
    """A reader and its feeder cannot reach each other, and others reach both."""

    def test_the_reader_takes_its_feeders_place(self) -> None:
        chains = Chains()
        chains.put("a")
        for reader in "bcd":
            chains.read(reader)
        assert chains.feeder_failed("c", "b") == {"c", "b"}
        assert chains.feeders == {"c": "a", "d": "c", "b": "d"}
        assert chains.feeder_failed("c", "b") == set(), "out of date"

    def test_who_has_nobody_else_waits_for_another(self) -> None:
        chains = Chains()
        chains.put("a")
        chains.read("b")
        chains.read("c")
        chains.feeder_failed("c", "b")
        assert chains.feeders == {"c": "a", "b": None}
        assert chains.arrived("c") == {"b"}
        assert chains.feeders == {"b": "a"}

    def test_those_after_it_do_not_wait_with_it(self) -> None:
        chains = Chains()
        chains.put("a")
        for reader in "bcd":
            chains.read(reader)
        assert chains.feeder_failed("b", "a") == {"b", "c"}
        assert chains.feeders == {"c": "a", "d": "c", "b": "d"}

    def test_asking_again_tries_the_link_again(self) -> None:
        chains = Chains()
        chains.put("a")
        chains.read("b")
        assert chains.feeder_failed("b", "a") == {"b"}
        assert chains.feeders == {"b": None}
        assert chains.read("b") == {"b"}
        assert chains.feeders == {"b": "a"}


class Readers:
    """A model of what stores have, moved on at random; it asks the chains alone who feeds whom."""

    def __init__(self, seed: int, size: int = 20) -> None:
        self.random, self.size = random.Random(seed), size
        self.chains = Chains()
        self.have: dict[str, int] = {}
        self.told: dict[str, str | None] = {}
        self.broken: set[frozenset[str]] = set()
        self.lost = 0

    def tell(self, changed: set[str]) -> None:
        feeders = self.chains.feeders
        for store in changed:
            self.told[store] = feeders[store]
        self.told = {store: feeder for store, feeder in self.told.items() if store in feeders}
        assert self.told == feeders, "those not told have the feeder that they had"
        for store in feeders:
            assert store not in descendants(store, feeders)
        assert all(self.have[store] == self.size for store in self.chains.whole)

    def move(self) -> None:
        """Each reader takes a few bytes from its feeder, or finds that it cannot."""
        for store, feeder in self.random.sample(sorted(self.told.items()), len(self.told)):
            if feeder is None or self.told.get(store, 0) != feeder:
                continue
            if frozenset((store, feeder)) in self.broken:
                self.tell(self.chains.feeder_failed(store, feeder))
                continue
            more = min(self.have[feeder], self.have[store] + self.random.randint(0, 6))
            self.have[store] = max(self.have[store], more)
            if self.have[store] == self.size:
                self.tell(self.chains.arrived(store))

    def strike(self) -> None:
        """Something happens."""
        what, stores = self.random.random(), sorted(self.have)
        if what < 0.5 and len(stores) < 9:
            name = f"s{len(stores) + self.lost}"
            self.have[name] = 0
            slow = set(self.random.sample(stores, min(len(stores), 1)))
            self.tell(self.chains.read(name, slow))
        elif what < 0.6 and len(stores) > 2:
            gone = self.random.choice(stores)
            self.lost += 1
            del self.have[gone]
            self.broken = {pair for pair in self.broken if gone not in pair}
            self.tell(self.chains.lose(gone))
        elif what < 0.7 and len(stores) > 1:
            self.broken.add(frozenset(self.random.sample(stores, 2)))
        elif stores:
            self.tell(self.chains.avoid(self.random.choice(stores)))


@pytest.mark.parametrize("moved_by", ["a report of a slow link", "a broken link"])
def test_a_store_that_was_moved_and_is_whole_does_not_free_those_before_it(moved_by: str) -> None:
    chains = Chains()
    chains.put("a")
    for reader in "bcd":
        chains.read(reader)
    if moved_by == "a broken link":
        chains.feeder_failed("c", "b")
    else:
        chains.avoid("b")
    chains.arrived("b")  # by what "a" had sent it
    assert chains.feeders == {"c": "a", "d": "c"}, "these have not all of it"
    chains.lose("a")
    if moved_by == "a broken link":
        assert chains.feeders == {"d": "b", "c": "d"}, "one cannot read from it, the next one can"
    else:
        assert chains.feeders == {"c": "b", "d": "c"}


@pytest.mark.parametrize("seed", range(300))
def test_any_order_of_events(seed: int) -> None:
    readers = Readers(seed)
    readers.have["maker"] = 0
    readers.tell(readers.chains.put("maker", is_whole=False))
    for _ in range(60):
        if "maker" in readers.have and readers.have["maker"] < readers.size:
            readers.have["maker"] += 1
            if readers.have["maker"] == readers.size:
                readers.tell(readers.chains.arrived("maker"))
        readers.strike()
        readers.move()
    # Then all is well again, and somebody has the object: all the others get it.
    readers.broken.clear()
    readers.have["again"] = readers.size
    readers.tell(readers.chains.put("again"))
    for _ in range(200):
        for store, feeder in list(readers.told.items()):
            if feeder is None:
                readers.tell(readers.chains.read(store))
        readers.move()
    assert readers.chains.whole == set(readers.have)
