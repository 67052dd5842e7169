"""A name that is deleted and put again, over and over, by several stores: what was put last stays."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.objects.client import ObjectClient, connect, embedded, job_name
from offbeat.objects.directory import Directory
from offbeat.objects.serve import open_store
from offbeat.protocol import objects as say
from offbeat.protocol.objects import ObjectName
from offbeat.testing.object_stores import LINKS, META, ModelStore, ObjectWorld
from offbeat.wire.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.protocol.objects import FromStore

W = ObjectName("w")
LARGE = 100_000


class RecordingWorld(ObjectWorld):
    """Stores that put, want and delete one name in any order, with a record of what the directory has heard."""

    def __init__(self, seed: int, *, small: bool) -> None:
        super().__init__(seed, stores=4)
        self.small = small
        self.heard: list[tuple[str, FromStore]] = []

    def _tell_directory(self, store: ModelStore) -> None:
        self.heard.append((store.address, store.outbox[0]))
        super()._tell_directory(store)

    def act(self) -> None:
        """A store does something that its clients may ask for."""
        dice, address = self.random, self.random.choice(sorted(self.stores))
        store, what = self.stores[address], self.random.random()
        copy = store.copies.get(W)
        if what < 0.4 and copy is None and W not in store.deleting:
            self.put(address, W, dice.choice((1, 1, 2)), small=self.small, whole=dice.random() < 0.5)
        elif what < 0.5 and copy is not None and copy.is_own and not store.values(W):
            self.abandon(address, W)
        elif what < 0.7 and copy is None:
            self.want(address, W)
        elif what < 0.8 and W in store.wants:
            self.stop_wanting(address, W)
        elif what > 0.9:
            self.delete(address, W)

    def lose_no_put(self) -> None:
        """Let one thing happen; what a store has put ends by a deletion, or a refusal, that came after it alone."""
        before = {address: store.copies.get(W) for address, store in self.stores.items()}
        waiting = {address: store.inbox[0] if store.inbox else None for address, store in self.stores.items()}
        self.step()
        for address, copy in before.items():
            message = waiting[address]
            if copy is None or not copy.is_own or W in self.stores[address].copies:
                continue
            if isinstance(message, say.ForgetObject):
                self.check_deleted(address, tuple(copy.generations))

    def check_deleted(self, store: str, generations: tuple[int, ...]) -> None:
        at = [
            number
            for number, (address, message) in enumerate(self.heard)
            if address == store and isinstance(message, say.PutObject) and message.generations == generations
        ]
        assert at, "it was deleted before the directory knew of it"
        assert any(isinstance(message, say.DeleteObject) for _, message in self.heard[at[0] :]), "nobody deleted it"


def check(seed: int, *, small: bool) -> None:
    world = RecordingWorld(seed, small=small)
    for _ in range(40):
        world.act()
        for _ in range(world.random.randrange(5)):
            world.lose_no_put()
    for _ in range(2000):
        world.lose_no_put()
    assert not world.step()
    entries = {entry.name: entry for entry in world.directory.entries()}
    entry = entries.get(W)
    have = {address for address, store in world.stores.items() if W in store.copies}
    waiting = {address for address, store in world.stores.items() if W in store.wants} - have
    if (
        entry is not None
    ):  # who has stopped and wants it again may have a part of what was deleted, until it is put anew
        again = {address for address in have & entry.waiting.keys() if not world.stores[address].values(W)}
        have, waiting = have - again, waiting | again
    assert not any(store.deleting for store in world.stores.values())
    if entry is None:
        assert not have | waiting
        return
    if entry.inline is None:
        assert have == set().union(*(chains.stores for chains in entry.chains), entry.twins)
    assert waiting == set(entry.waiting)
    assert have <= {*entry.put_by, *entry.inline_at, *(one for chains in entry.chains for one in chains.stores)}
    assert entry.put_by.keys() <= have
    assert {*entry.twins} <= have
    values = {tuple(world.stores[address].values(W)) for address in have} - {()}
    assert len(values) <= 1


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("part", range(2))
def test_what_was_put_last_stays(small: bool, part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        check(seed, small=small)


def put(generation: int, digest: str = "1") -> say.PutObject:
    return say.PutObject(name=W, meta=META, generations=(generation,), whole=True, digest=digest)


class TestStoresThatWereAway:
    def test_no_copy_comes_back_of_whatever_generation(self) -> None:
        directory = Directory(LINKS["chain"])
        for generation in (1, 2, 3):
            for store in "ab":
                directory.handle(store, put(10 * generation + (store == "b")))
            directory.lost("b")
            directory.handle("c", say.DeleteObject(name=W))
        for generation in (10, 11, 20, 21, 30, 31):
            ((to, forget),) = directory.handle("b", put(generation))
            assert isinstance(forget, say.ForgetObject)
            assert (to, forget.generations) == ("b", (generation,))
        assert not list(directory.entries())

    def test_a_deletion_that_is_repeated_spares_what_was_put_since(self) -> None:
        directory = Directory(LINKS["chain"])
        directory.handle("a", put(1))
        for generations in ((), (1,)):
            told = directory.handle("a", say.DeleteObject(name=W, generations=generations))
            assert told[-1] == ("a", say.ObjectDeleted(name=W))
            directory.handle("b", put(2, "2"))
        (entry,) = directory.entries()
        assert entry.whole_at == {"b"}

    def test_few_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("offbeat.objects.directory_entry._MOST_DELETED", 3)
        directory = Directory(LINKS["chain"])
        for generation in range(5):
            directory.handle("a", put(generation))
            directory.handle("a", say.DeleteObject(name=W))
        told = [type(directory.handle("a", put(generation))[0][1]) for generation in (4, 3, 2, 1)]
        assert told == [say.ForgetObject] * 3 + [say.PutTaken]


@pytest.fixture(params=["remote", "embedded"])
def clients(request: pytest.FixtureRequest) -> Iterator[tuple[ObjectClient, ObjectClient, ObjectClient]]:
    """Return two clients of one store, and one of another one."""
    with LoopThread() as loop, contextlib.ExitStack() as stack:
        server = loop.run(
            open_store(
                "127.0.0.1", 0, 0, job=job_name("default"), credentials=None, memory_bytes=1 << 26, directories=(),
                directory_port=0, patience=timedelta(seconds=20),
            )
        )  # fmt: skip
        stack.callback(lambda: loop.run(server.close()))
        other = stack.enter_context(embedded(server.directories))
        if request.param == "remote":
            one, two = (stack.enter_context(connect(server.client_address)) for _ in range(2))
        else:
            one = stack.enter_context(embedded(server.directories))
            two = ObjectClient(one._access)
        yield one, two, other


@pytest.mark.parametrize("numel", [5, LARGE])
@pytest.mark.parametrize("changes", [True, False])
def test_a_name_that_is_deleted_and_put_again(
    clients: tuple[ObjectClient, ObjectClient, ObjectClient], numel: int, changes: bool
) -> None:
    one, two, other = clients
    one.put("w", torch.full((numel,), 0.0), timeout=20)
    for number in range(1, 101):
        value = float(number) if changes else 0.0
        putter = (one, two)[number % 2]
        if number % 3 == 0:
            other.get("w", timeout=20)
        one.delete("w")
        if putter is two:
            one.status()  # the store has heard of it
        putter.put("w", torch.full((numel,), value), timeout=20)
        for getter in (one, two):
            assert torch.equal(getter.get("w", timeout=20), torch.full((numel,), value))
        if not changes:
            assert torch.equal(other.get("w", timeout=20), torch.zeros(numel))
    assert torch.equal(two.get("w", timeout=20), torch.full((numel,), value))
