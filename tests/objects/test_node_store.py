"""Stores with real links on one event loop: objects, sums and losses."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.errors import DisagreementError, NetworkError, ObjectError, OffbeatError, PeerError
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.client import tensor_of
from offbeat.objects.data_links import FeederLink
from offbeat.objects.directory_link import DIRECTORY_LIMITS
from offbeat.objects.directory_list import why_no_member
from offbeat.objects.directory_server import DirectoryServer
from offbeat.objects.memory import MakerMap
from offbeat.objects.node_store import DIRECTORY_PATIENCE, NodeStore
from offbeat.objects.reduce_plan import LinkEstimate
from offbeat.objects.store_access import FoundObject
from offbeat.protocol.object_lanes import ReaderHello
from offbeat.protocol.objects import DeleteObject, ObjectMeta, ObjectName, ReduceObjects, StoreHello
from offbeat.tensors import bytes_of, dtype_name
from offbeat.wire import tcp
from offbeat.wire.session import Limits
from tests.patience import stretched
from tests.wire.meshes import in_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from torch import Tensor

    from offbeat.objects.stored_object import Outcome, StoredObject
    from offbeat.protocol.objects import ReduceOp, WireDtype
    from offbeat.wire.link import PeerLink

JOB = "test/objects"
LARGE = 3_000_001
WAYS: list[dict[str, bool]] = [{}, {"striped": True}, {"in_order": True}, {"striped": True, "in_order": True}]
LINKS = {"chain": LinkEstimate(0.0, 1e9, 1 << 16), "star": LinkEstimate(10.0, 1e9, 1 << 16)}


def limits(silence_s: float = 1.0) -> Limits:
    """All stores are on one loop, so on a busy machine a second of silence is no loss."""
    return Limits(timeout=timedelta(seconds=stretched(silence_s)), max_body_bytes=1 << 20)


class Cluster:
    """A directory and some stores."""

    def __init__(self, stores: list[NodeStore], directory: DirectoryServer, address: str) -> None:
        self.stores, self.directory, self.address = stores, directory, address

    async def put(self, store: int, name: str, tensor: Tensor, *, version: int = 0, stripes: int = 1) -> None:
        node, data = self.stores[store], bytes_of(tensor)
        called = ObjectName(name, version)
        meta = ObjectMeta(dtype_name(tensor.dtype), tuple(tensor.shape), len(data), stripes)
        room: asyncio.Future[ObjectError | None] = asyncio.get_running_loop().create_future()
        node.when_room(called, len(data), room.set_result)
        if (error := await room) is not None:
            raise error
        over, told = outcome()
        if meta.size_bytes <= 64 << 10:
            node.put_small(called, meta, bytes(data), told)
        else:
            stored = node.create(called, meta)
            stored.memory[:] = data
            node.finish(stored, told)
        await over

    async def get(self, store: int, name: str) -> Tensor:
        over, told = outcome()
        self.stores[store].want(ObjectName(name), told)
        stored = await asyncio.wait_for(over, 30)
        return tensor_of(FoundObject(stored.meta, stored.memory, ()))

    async def reduced(self, store: int, target: str, sources: list[str]) -> None:
        over: asyncio.Future[OffbeatError | None] = asyncio.get_running_loop().create_future()
        names = tuple(ObjectName(source) for source in sources)
        request = ReduceObjects(name=ObjectName(target), sources=names, op="sum", count=len(names), least=len(names))
        self.stores[store].reduce(request, over.set_result)
        if (error := await asyncio.wait_for(over, 10)) is not None:
            raise error

    def reduce(
        self,
        store: int,
        target: str,
        sources: list[str],
        *,
        op: ReduceOp = "sum",
        count: int = 0,
        striped: bool = False,
        in_order: bool = False,
        wire: WireDtype = "",
        splices: bool = False,
    ) -> None:
        number = count or len(sources)
        names = tuple(ObjectName(source) for source in sources)
        self.stores[store].reduce(
            ReduceObjects(
                name=ObjectName(target),
                sources=names,
                op=op,
                count=number,
                least=number,
                striped=striped,
                in_order=in_order,
                wire=wire,
                splices=splices,
            )
        )

    def cut_off(self, store: int, until: asyncio.Event) -> None:
        """Cut a store off from the directory, which lives on."""
        link = self.stores[store]._directories[0]
        dial = link._dial

        async def later(patience: timedelta) -> PeerLink:
            await until.wait()
            return await dial(patience)

        link._dial = later  # type: ignore[method-assign]
        assert link._link is not None
        link._link.abort()
        link.lost(NetworkError("It was cut."))

    async def restart_directory(self) -> None:
        self.directory.abort()
        host, _, port = self.address.rpartition(":")
        self.directory = DirectoryServer(self.directory.directory.link)
        await self.directory.open(host, int(port), job=JOB, credentials=None, limits=DIRECTORY_LIMITS)

    def sent_bytes(self) -> int:
        return sum(store.status(0).sent_bytes for store in self.stores)


def outcome() -> tuple[asyncio.Future[StoredObject], Callable[[Outcome], None]]:
    over: asyncio.Future[StoredObject] = asyncio.get_running_loop().create_future()

    def told(what: Outcome) -> None:
        if isinstance(what, OffbeatError):
            over.set_exception(what)
        else:
            over.set_result(what)

    return over, told


@contextlib.asynccontextmanager
async def cluster(
    count: int,
    memory: int = 1 << 30,
    link: LinkEstimate | None = None,
    patience: timedelta = DIRECTORY_PATIENCE,
    silence_s: float = 1.0,
) -> AsyncIterator[Cluster]:
    directory = DirectoryServer(link or LinkEstimate(0.0001, 1e9, 512 << 10))
    address = await directory.open("127.0.0.1", 0, job=JOB, credentials=None, limits=DIRECTORY_LIMITS)
    stores = []
    for _ in range(count):
        store = NodeStore(
            job=JOB,
            credentials=None,
            most_bytes=memory,
            arithmetic=TorchArithmetic,
            limits=limits(silence_s),
            directory_patience=patience,
        )
        await store.open("127.0.0.1", 0, [address], timedelta(seconds=5))
        stores.append(store)
    made = Cluster(stores, directory, address)
    try:
        yield made
    finally:
        await asyncio.gather(*(store.close() for store in stores))
        await made.directory.close()


async def nowhere(made: Cluster) -> None:
    """Wait until no store has an object, and the directory knows of none."""
    until_s = asyncio.get_running_loop().time() + stretched(5)
    while any(store.objects for store in made.stores) or list(made.directory.directory.entries()):
        assert asyncio.get_running_loop().time() < until_s
        await asyncio.sleep(0.01)


def tensor(value: float, numel: int = LARGE, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(numel) % 7).to(dtype) * value


@pytest.mark.parametrize("numel", [0, 3, LARGE])
@in_loop
async def test_all_get_the_same_bytes(numel: int) -> None:
    async with cluster(5, silence_s=20) as made:  # nobody is taken for lost, and read from again
        readers = [asyncio.create_task(made.get(store, "w")) for store in (1, 2)]
        await made.put(0, "w", tensor(3, numel))
        readers += [asyncio.create_task(made.get(store, "w")) for store in (3, 4, 0)]
        for got in await asyncio.gather(*readers):
            assert torch.equal(got, tensor(3, numel))
        small = numel * 4 <= 64 << 10
        assert made.sent_bytes() == (0 if small else 4 * numel * 4), "to each reader once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize(
    "more", [{}, {"striped": True}, {"in_order": True}, {"striped": True, "in_order": True}], ids=str
)
@in_loop
async def test_a_sum(dtype: torch.dtype, more: dict[str, bool]) -> None:
    async with cluster(4) as made:
        names = [f"g{number}" for number in range(4)]
        for number, name in enumerate(names):
            await made.put(number, name, tensor(2**number, dtype=dtype))
        made.reduce(1, "sum", names, **more)  # type: ignore[arg-type]
        for got in await asyncio.gather(*(made.get(store, "sum") for store in range(4))):
            assert torch.equal(got, tensor(15, dtype=dtype))


@pytest.mark.parametrize(("op", "value"), [("sum", 7.0), ("mean", 7 / 3), ("min", 1.0), ("max", 4.0), ("prod", 8.0)])
@pytest.mark.parametrize("numel", [5, 200_000, LARGE])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("caller", [0, 3])
@in_loop
async def test_every_op_along_every_tree(op: ReduceOp, value: float, numel: int, link: str, caller: int) -> None:
    async with cluster(4, link=LINKS[link]) as made:
        for number in range(3):
            await made.put(number, f"g{number}", torch.full((numel,), 2.0**number))
        made.reduce(caller, "out", ["g0", "g1", "g2"], op=op)
        torch.testing.assert_close(await made.get(2, "out"), torch.full((numel,), value))


@in_loop
async def test_the_first_two_of_three() -> None:
    async with cluster(3) as made:
        made.reduce(0, "sum", ["g0", "g1", "g2"], count=2)
        waiting = asyncio.create_task(made.get(0, "sum"))
        await made.put(2, "g2", tensor(4))
        await made.put(1, "g1", tensor(2))
        assert torch.equal(await waiting, tensor(6))
        assert {source.name.id for source in made.stores[0].used[ObjectName("sum")]} == {"g1", "g2"}


@pytest.mark.parametrize("numel", [4, LARGE])
@in_loop
async def test_whoever_gets_a_sum_later_is_told_of_what_it_is_made(numel: int) -> None:
    async with cluster(3) as made:
        for number in (1, 2):
            await made.put(number, f"g{number}", tensor(number, numel))
        await made.reduced(0, "sum", ["g1", "g2"])
        await made.get(0, "sum")
        for store in (1, 2):
            await made.get(store, "sum")
            assert {source.name.id for source in made.stores[store].used[ObjectName("sum")]} == {"g1", "g2"}


@in_loop
async def test_a_sum_that_was_not_waited_for_long_enough() -> None:
    async with cluster(3) as made:
        await made.put(1, "g1", tensor(2))
        made.reduce(0, "sum", ["g1", "g2"])
        over, told = outcome()
        made.stores[0].want(ObjectName("sum"), told)
        await made.put(2, "g2", tensor(4))
        while ObjectName("sum") not in made.stores[0].objects:
            await asyncio.sleep(0.001)
        made.stores[0].stop_wanting(ObjectName("sum"), told)
        assert torch.equal(await made.get(0, "sum"), tensor(6))
        assert torch.equal(await made.get(1, "sum"), tensor(6))
        over.cancel()


@in_loop
async def test_one_question_a_second_however_often_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(1) as made:
        store, name = made.stores[0], ObjectName("w")
        for _ in range(30):
            over, told = outcome()
            store.want(name, told)
            await asyncio.sleep(0.001)
            store.stop_wanting(name, told)
            over.cancel()
        asked: list[ObjectName] = []
        want_again = store._want_again

        def counted(name: ObjectName) -> None:
            asked.append(name)
            want_again(name)

        monkeypatch.setattr(store, "_want_again", counted)
        over, told = outcome()
        store.want(name, told)
        await asyncio.sleep(2.2)
        assert len(asked) <= 2
        over.cancel()


@in_loop
async def test_two_sums_in_the_same_order_have_the_same_bits() -> None:
    sums = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        async with cluster(4) as made:
            torch.manual_seed(1)
            parts = [torch.randn(LARGE) for _ in range(4)]
            made.reduce(2, "sum", [f"g{number}" for number in range(4)], in_order=True)
            for number in order:
                await made.put(number, f"g{number}", parts[number])
            sums.append((await made.get(2, "sum")).clone())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], ((parts[0] + parts[1]) + parts[2]) + parts[3])


class TestLosses:
    """A store is gone in the middle: the others go on, and what is sent twice is what was lost."""

    @pytest.mark.parametrize("victim", [1, 2, 3])
    @in_loop
    async def test_a_reader_in_the_middle_of_a_chain(self, victim: int) -> None:
        size = 64 << 20
        async with cluster(5) as made:
            await made.put(0, "w", tensor(3, size // 4))
            others = [store for store in range(1, 5) if store != victim]
            readers = {store: asyncio.create_task(made.get(store, "w")) for store in range(1, 5)}
            while made.sent_bytes() < size:
                await asyncio.sleep(0.001)
            name, lost = ObjectName("w"), made.stores[victim].address
            behind = [made.stores[store].objects[name] for store in others]
            behind = [stored for stored in behind if stored.feeders[0] == lost and not stored.is_whole]
            had = [stored.have_bytes for stored in behind]
            began_s = asyncio.get_running_loop().time()
            made.stores[victim].abort()
            while any(stored.have_bytes == before for stored, before in zip(behind, had, strict=True)):
                await asyncio.sleep(0.001)
            assert asyncio.get_running_loop().time() - began_s < stretched(1.5), "until the next block comes"
            for store in others:
                assert torch.equal(await readers[store], tensor(3, size // 4))
            readers[victim].cancel()
            again = made.sent_bytes() - 4 * size
            assert again < 4 << 20, "what was on its way to the lost one, or from it"

    @pytest.mark.parametrize("holders", [1, 2])
    @in_loop
    async def test_one_of_several_feeders_costs_its_stripes_alone(self, holders: int) -> None:
        size, name = 48 << 20, ObjectName("w")
        async with cluster(5) as made:
            for store in range(holders):
                await made.put(store, "w", tensor(3, size // 4), stripes=3)
            readers = {store: asyncio.create_task(made.get(store, "w")) for store in range(holders, 5)}
            sent, went = made.sent_bytes(), len(readers) * size
            while made.sent_bytes() - sent < size:
                await asyncio.sleep(0.001)
            addresses = [store.address for store in made.stores]
            fed = [[*made.stores[reader].objects[name].feeders.values()] for reader in readers]
            victim = next(
                store for store in range(holders, 5) if any(0 < one.count(addresses[store]) < 3 for one in fed)
            )
            made.stores[victim].abort()
            for store in set(readers) - {victim}:
                assert torch.equal(await readers[store], tensor(3, size // 4))
            readers[victim].cancel()
            assert made.sent_bytes() - sent - went < 4 << 20, "what was on its way to the lost one, or from it"

    @in_loop
    async def test_a_source_is_lost_and_a_spare_takes_its_place(self) -> None:
        size = 32 << 20
        async with cluster(5) as made:
            made.reduce(0, "sum", [f"g{number}" for number in range(1, 5)], count=3)
            waiting = asyncio.create_task(made.get(0, "sum"))
            for number in (1, 2, 3):
                await made.put(number, f"g{number}", tensor(2**number, size // 4))
            await asyncio.sleep(0.01)
            made.stores[2].abort()
            await made.put(4, "g4", tensor(16, size // 4))
            got = await waiting
            value = int(got[1].item())
            assert value in (2 + 4 + 8, 2 + 8 + 16)
            assert torch.equal(got, tensor(value, size // 4)), "of the same sources in each block"
            used = {source.name.id for source in made.stores[0].used[ObjectName("sum")]}
            assert sum(2 ** int(name[1:]) for name in used) == value

    @pytest.mark.parametrize("striped", [False, True])
    @in_loop
    async def test_a_spare_is_added_from_where_the_lost_source_ended(self, striped: bool) -> None:
        size = 32 << 20
        async with cluster(5) as made:
            made.reduce(0, "sum", [f"g{number}" for number in range(1, 5)], count=3, striped=striped, splices=True)
            waiting = asyncio.create_task(made.get(0, "sum"))
            for number in (1, 2, 3):
                await made.put(number, f"g{number}", tensor(2**number, size // 4))
            target = ObjectName("sum")
            while target not in made.stores[0].objects or made.stores[0].objects[target].have_bytes < size // 8:
                await asyncio.sleep(0)
            made.stores[2].abort()
            await made.put(4, "g4", tensor(16, size // 4))
            got = await waiting
            expected = torch.zeros_like(got)
            for source in made.stores[0].used[target]:
                for begin, end in source.ranges or [(0, size // 4)]:
                    expected[begin:end] += tensor(2 ** int(source.name.id[1:]), size // 4)[begin:end]
            assert torch.equal(got, expected)
            for begin in (1, size // 8 + 1, size // 4 - 6):
                assert int(got[begin : begin + 7].max()) // 6 in (2 + 4 + 8, 2 + 8 + 16), "three in each element"
            if not striped:
                used = {source.name.id: source.ranges for source in made.stores[0].used[target]}
                (((begin, after),), ((first, end),)) = used["g2"], used["g4"]
                assert (begin, end) == (0, size // 4)
                assert size // 32 <= after == first < size // 4
                assert used["g1"] == used["g3"] == ()

    @in_loop
    async def test_a_link_that_could_not_be_made_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with cluster(3) as made:
            for number in range(3):
                await made.put(number, f"g{number}", tensor(2**number))
            dial = FeederLink.dial
            failures: list[str] = []
            reader, feeder = made.stores[1].address, made.stores[0].address

            async def failing(link: FeederLink, **more: Any) -> None:
                if not failures and link.address == feeder and link._unsent[0] == ReaderHello(reader):
                    failures.append(link.address)
                    link.lost(NetworkError("It was busy."))
                else:
                    await dial(link, **more)

            monkeypatch.setattr(FeederLink, "dial", failing)
            made.reduce(0, "sum", ["g0", "g1", "g2"], striped=True)
            assert torch.equal(await made.get(0, "sum"), tensor(7)), "the store that adds does not wait for it itself"
            assert failures

    @in_loop
    async def test_the_maker_is_lost_and_another_one_makes_it_again(self) -> None:
        async with cluster(3) as made:
            store = made.stores[0]
            stored = store.create(ObjectName("w"), ObjectMeta("float32", (LARGE,), LARGE * 4))
            data = bytes_of(tensor(3))
            stored.memory[: LARGE * 2] = data[: LARGE * 2]
            store.filled(stored, LARGE * 2)
            waiting = asyncio.create_task(made.get(1, "w"))
            while (there := made.stores[1].objects.get(ObjectName("w"))) is None or not there.have_bytes:
                await asyncio.sleep(0.001)
            store.abort()
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await made.put(2, "w", tensor(5))
            assert torch.equal(await waiting, tensor(5))


class TestANewDirectory:
    """A directory is killed; what passes between stores continues, and another one at its address learns it all."""

    @pytest.mark.parametrize("more", WAYS, ids=str)
    @in_loop
    async def test_a_sum_and_its_readers_continue(self, more: dict[str, bool]) -> None:
        size = 32 << 20
        async with cluster(5) as made:
            names = [f"g{number}" for number in range(4)]
            for number, name in enumerate(names):
                await made.put(number, name, tensor(2**number, size // 4))
            sent = made.sent_bytes()
            made.reduce(4, "sum", names, **more)  # type: ignore[arg-type]
            readers = [asyncio.create_task(made.get(store, "sum")) for store in range(5)]
            while made.sent_bytes() - sent < size:
                await asyncio.sleep(0.001)
            await made.restart_directory()
            for got in await asyncio.gather(*readers):
                assert torch.equal(got, tensor(15, size // 4))
            assert made.stores[4].used[ObjectName("sum")]
            again = made.sent_bytes() - sent - (7 if more.get("striped") else 8) * size
            assert again < size // 2, "a making of it anew sends it all; a reader that is moved, what was on its way"
            with pytest.raises(DisagreementError, match="its bytes differ"):
                await made.put(4, "g0", tensor(5, size // 4))
            await made.put(4, "more", tensor(5))
            assert torch.equal(await made.get(0, "more"), tensor(5))

    @in_loop
    async def test_readers_continue_where_they_are(self) -> None:
        size = 64 << 20
        async with cluster(4) as made:
            await made.put(0, "w", tensor(3, size // 4))
            readers = [asyncio.create_task(made.get(store, "w")) for store in range(1, 4)]
            while made.sent_bytes() < size:
                await asyncio.sleep(0.001)
            await made.restart_directory()
            for got in await asyncio.gather(*readers):
                assert torch.equal(got, tensor(3, size // 4))
            assert made.sent_bytes() < 3.5 * size, "what is on its way to a reader that is moved comes twice"

    @in_loop
    async def test_what_is_done_while_it_is_away(self) -> None:
        async with cluster(3) as made:
            await made.put(0, "old", tensor(1))
            await made.put(0, "small", tensor(1, 5))
            await made.put(1, "gone", tensor(1))
            waiting = asyncio.create_task(made.get(2, "w"))
            await asyncio.sleep(0.05)
            made.directory.abort()
            await asyncio.sleep(0.3)
            put = asyncio.create_task(made.put(1, "w", tensor(3)))
            gets = [asyncio.create_task(made.get(1, name)) for name in ("old", "small")]
            made.stores[0].delete(ObjectName("gone"))
            await asyncio.sleep(0.2)
            assert not any(call.done() for call in (put, *gets))
            await made.restart_directory()
            await put
            old, small = await asyncio.gather(*gets)
            assert torch.equal(old, tensor(1))
            assert torch.equal(small, tensor(1, 5))
            assert torch.equal(await waiting, tensor(3))
            assert ObjectName("gone") not in made.stores[1].objects

    @in_loop
    async def test_a_deletion_does_not_come_after_a_later_put(self) -> None:
        async with cluster(2) as made:
            made.directory.abort()
            await asyncio.sleep(0.3)
            made.stores[0].delete(ObjectName("w"))
            put = asyncio.create_task(made.put(0, "w", tensor(3)))
            await asyncio.sleep(0.1)
            await made.restart_directory()
            await asyncio.wait_for(put, 20)
            await asyncio.sleep(0.3)
            assert torch.equal(await made.get(1, "w"), tensor(3))

    @in_loop
    async def test_a_put_that_failed_without_it_can_be_done_again(self) -> None:
        async with cluster(1, patience=timedelta(seconds=0.3)) as made:
            made.directory.abort()
            with pytest.raises(ObjectError, match="has been lost for"):
                await made.put(0, "w", tensor(1))
            await made.restart_directory()
            await made.put(0, "w", tensor(2))
            assert torch.equal(await made.get(0, "w"), tensor(2))

    @pytest.mark.parametrize("numel", [3, LARGE])
    @in_loop
    async def test_a_store_that_was_cut_off_lets_go_of_what_was_replaced(self, numel: int) -> None:
        async with cluster(3) as made:
            for name in ("w", "kept"):
                await made.put(0, name, tensor(1, numel))
                await made.get(1, name)
            gate = asyncio.Event()
            for store in (0, 1):
                made.cut_off(store, gate)
            await asyncio.sleep(0.1)
            made.stores[2].delete(ObjectName("w"))
            await made.put(2, "w", tensor(2, numel))
            gate.set()
            assert torch.equal(await made.get(2, "kept"), tensor(1, numel))
            assert not made.directory._is_rebuilt, "it is the same directory, so it collects nothing"
            while any(made.stores[store].directory_away_s(ObjectName("w")) for store in (0, 1)):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            for store in (0, 1):
                assert torch.equal(await made.get(store, "w"), tensor(2, numel))

    @in_loop
    async def test_a_link_that_ends_costs_no_other_store_its_own(self) -> None:
        async with cluster(3) as made:
            await made.put(0, "w", tensor(3))
            await made.get(1, "w")
            links = [made.directory._stores[store.address].link for store in made.stores]
            links[1].abort()
            made.directory.handle(made.stores[2].address, DeleteObject(name=ObjectName("w")))
            await asyncio.sleep(0.2)
            assert made.directory._stores[made.stores[2].address].link is links[2]
            assert ObjectName("w") not in made.stores[0].objects

    @in_loop
    async def test_it_does_not_come_back(self) -> None:
        async with cluster(2, patience=timedelta(seconds=0.5)) as made:
            waiting = asyncio.create_task(made.get(1, "w"))
            await asyncio.sleep(0.05)
            made.directory.abort()
            with pytest.raises(ObjectError, match=r"Cannot get 'w': the directory at 127.* has been lost for"):
                await waiting


class TestRefused:
    @in_loop
    async def test_what_torch_cannot_add_ends_that_sum_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise NotImplementedError("no kernel for this dtype")

        async with cluster(2) as made:
            await made.put(0, "a", tensor(1, 5))
            await made.put(1, "b", tensor(2, 5))
            with monkeypatch.context() as patched:
                patched.setattr(TorchArithmetic, "add", fail)
                made.reduce(0, "s", ["a", "b"])
                with pytest.raises(ObjectError, match="Cannot make 's': no kernel for this dtype"):
                    await made.get(0, "s")
            made.reduce(0, "t", ["a", "b"])
            assert torch.equal(await made.get(1, "t"), tensor(3, 5)), "the store has kept its directory"

    @in_loop
    async def test_other_bytes_of_the_same_name(self) -> None:
        async with cluster(2) as made:
            await made.put(0, "w", tensor(3))
            with pytest.raises(DisagreementError, match="its bytes differ"):
                await made.put(1, "w", tensor(4))
            with pytest.raises(ObjectError, match="this store has it already"):
                await made.put(0, "w", tensor(3))

    @pytest.mark.parametrize("numel", [3, LARGE])
    @in_loop
    async def test_another_shape_of_the_same_name(self, numel: int) -> None:
        async with cluster(2) as made:
            await made.put(0, "w", tensor(3))
            with pytest.raises(DisagreementError, match="it is float32"):
                await asyncio.wait_for(made.put(1, "w", tensor(3, numel, torch.float64)), 10)
            assert torch.equal(await made.get(1, "w"), tensor(3))

    @in_loop
    async def test_a_sum_into_the_name_of_an_object(self) -> None:
        async with cluster(2) as made:
            await made.put(0, "w", tensor(3))
            await made.put(0, "g", tensor(5))
            made.reduce(0, "w", ["g"])
            await asyncio.sleep(0.2)
            assert torch.equal(await made.get(0, "w"), tensor(3)), "the object stays"
            assert torch.equal(await made.get(1, "w"), tensor(3))

    @in_loop
    async def test_a_sum_that_is_refused_before_anybody_waits_for_it(self) -> None:
        async with cluster(2) as made:
            await made.put(0, "g", tensor(5))
            with pytest.raises(ObjectError, match="a source is named twice"):
                await made.reduced(1, "sum", ["g", "g"])
            await made.reduced(1, "sum", ["g"])
            await made.reduced(0, "sum", ["g"])
            assert torch.equal(await made.get(1, "sum"), tensor(5))
            with pytest.raises(ObjectError, match="it is there already"):
                await made.reduced(0, "sum", ["g", "h"])
            assert torch.equal(await made.get(0, "sum"), tensor(5)), "others may get it all the same"

    @in_loop
    async def test_a_sum_of_what_two_directories_keep(self) -> None:
        async with cluster(0) as one, cluster(0) as other:
            store = NodeStore(
                job=JOB, credentials=None, most_bytes=1 << 30, arithmetic=TorchArithmetic, limits=limits()
            )
            await store.open("127.0.0.1", 0, [one.address, other.address], timedelta(seconds=5))
            made = Cluster([store], one.directory, one.address)
            ids = [f"{number}/g" for number in range(20)]
            for name in ids:
                await made.put(0, name, tensor(2))
            for name in ids:
                made.reduce(0, name.replace("g", "sum"), [name])
                assert torch.equal(await made.get(0, name.replace("g", "sum")), tensor(2))
            with pytest.raises(ObjectError, match=r'is kept by another directory.*"grad/0" and "grad/sum"'):
                await made.reduced(0, "0/all", ids)
            await store.close()

    @in_loop
    async def test_a_second_put_that_is_given_up(self) -> None:
        async with cluster(3) as made:
            await made.put(0, "w", tensor(3))
            meta = ObjectMeta("float32", (LARGE,), LARGE * 4)
            made.stores[1].abandon(made.stores[1].create(ObjectName("w"), meta))
            await asyncio.sleep(0.2)
            assert torch.equal(await made.get(2, "w"), tensor(3)), "it is not the other store's to delete"

    @in_loop
    async def test_the_memory_of_what_was_read_is_sealed(self) -> None:
        async with cluster(2) as made:
            await made.put(0, "w", tensor(3))
            await made.get(1, "w")
            for store in made.stores:
                segment = store.objects[ObjectName("w")].segment
                assert segment is not None
                with pytest.raises(ObjectError, match="Operation not permitted"):
                    MakerMap(os.getpid(), segment.descriptor, LARGE * 4)

    @in_loop
    async def test_no_room_for_what_was_asked_for(self) -> None:
        async with cluster(2, memory=13 << 20) as made:
            await made.put(0, "a", tensor(3))
            await made.put(1, "b", tensor(4))
            await made.put(0, "small", tensor(3, 10_000))
            with pytest.raises(ObjectError, match="Cannot keep 'a'"):
                await made.get(1, "a")
            made.stores[1].most_bytes = made.stores[1].used_bytes
            with pytest.raises(ObjectError, match="Cannot keep 'small'"):
                await made.get(1, "small")
            assert torch.equal(await made.get(1, "b"), tensor(4)), "and the store lives on"

    @in_loop
    async def test_the_same_bytes_are_a_second_copy(self) -> None:
        async with cluster(3) as made:
            await made.put(0, "w", tensor(3))
            await made.put(1, "w", tensor(3))
            made.stores[0].abort()
            assert torch.equal(await made.get(2, "w"), tensor(3))

    @in_loop
    async def test_memory_that_is_full(self) -> None:
        async with cluster(2, memory=20 << 20) as made:
            await made.put(0, "a", tensor(3))
            with pytest.raises(ObjectError, match=r"Cannot keep 'b' of 12,000,004 bytes: this store holds 12,000,004"):
                await made.put(0, "b", tensor(4))
            await made.get(1, "a")
            await made.put(0, "b", tensor(4))  # now another store has it, too, so it goes
            assert set(made.stores[0].objects) == {ObjectName("b")}
            assert torch.equal(await made.get(1, "a"), tensor(3))
            with pytest.raises(ObjectError, match="Cannot keep 'b'"):
                await made.get(1, "b")  # this is the only store now that has the other one

    @in_loop
    async def test_what_was_used_least_lately_is_dropped_and_no_more_than_that(self) -> None:
        async with cluster(2, memory=20 << 20) as made:
            for number in range(19):
                await made.put(0, f"x{number}", tensor(1, 1 << 18))
                if number != 1:
                    await made.get(1, f"x{number}")
            await made.get(0, "x0")
            await made.put(0, "y", tensor(1, 1 << 19))
            left = {name.id for name in made.stores[0].objects}
            assert left == {"y", *(f"x{number}" for number in range(19))} - {"x2"}, "others have not 'x1'"
            with pytest.raises(ObjectError, match="Cannot keep 'z'"):
                await made.put(0, "z", tensor(1, 6 << 20))
            assert len(made.stores[0].objects) == 19, "nothing is dropped for what does not fit at all"

    @in_loop
    async def test_it_is_not_kept_when_there_is_room_and_nobody_wants_it_any_more(self) -> None:
        async with cluster(2, memory=13 << 20) as made:
            await made.put(1, "a", tensor(1))
            await made.put(0, "full", tensor(1))
            over, told = outcome()
            made.stores[0].want(ObjectName("a"), told)
            await asyncio.sleep(0.1)
            made.stores[0].stop_wanting(ObjectName("a"), told)
            made.stores[0].delete(ObjectName("full"))
            await asyncio.sleep(0.3)
            assert not made.stores[0].objects
            over.cancel()

    @pytest.mark.parametrize("numel", [5, LARGE])
    @pytest.mark.parametrize("first", ["the sum", "the question"])
    @in_loop
    async def test_no_room_for_a_sum(self, numel: int, first: str) -> None:
        async with cluster(3, memory=13 << 20) as made:
            for number in range(3):
                await made.put(number, f"g{number}", tensor(1, numel if number else LARGE))
            made.stores[0].most_bytes = made.stores[0].used_bytes
            asked = asyncio.create_task(made.get(0, "sum")) if first == "the question" else None
            await asyncio.sleep(0.05)
            with pytest.raises(ObjectError, match="Cannot keep 'sum'"):
                await made.reduced(0, "sum", ["g1", "g2"])
            if asked is not None:
                with pytest.raises(ObjectError, match="Cannot keep 'sum'"):
                    await asyncio.wait_for(asked, 10)

    @pytest.mark.parametrize("numel", [5, LARGE])
    @in_loop
    async def test_who_waits_for_a_sum_hears_that_there_is_no_room_for_it(self, numel: int) -> None:
        async with cluster(3, memory=26 << 20) as made:
            await made.put(0, "full", tensor(1))
            for number in (1, 2):
                await made.put(number, f"g{number}", tensor(number, numel))
            made.stores[0].most_bytes = made.stores[0].used_bytes
            asked = asyncio.create_task(made.get(1, "sum"))
            await asyncio.sleep(0.05)
            made.reduce(0, "sum", ["g1", "g2"])
            with pytest.raises(ObjectError, match=r"Cannot keep 'sum' of .* Delete some"):
                await asyncio.wait_for(asked, 10)
            made.reduce(1, "sum", ["g1", "g2"])
            assert torch.equal(await made.get(2, "sum"), tensor(1, numel) + tensor(2, numel)), "another store has room"

    @pytest.mark.parametrize("striped", [False, True])
    @in_loop
    async def test_a_copy_that_others_have_makes_room_for_a_sum(self, striped: bool) -> None:
        async with cluster(3, memory=26 << 20) as made:
            for number in range(2):
                await made.put(number, f"g{number}", tensor(number))
            await made.put(2, "full", tensor(7))
            await made.get(0, "full")
            made.reduce(0, "sum", ["g0", "g1"], striped=striped)
            assert torch.equal(await made.get(0, "sum"), tensor(0) + tensor(1))
            assert ObjectName("full") not in made.stores[0].objects

    @in_loop
    async def test_deleted_before_it_was_whole(self) -> None:
        async with cluster(2) as made:
            store = made.stores[0]
            stored = store.create(ObjectName("w"), ObjectMeta("float32", (LARGE,), LARGE * 4))
            await asyncio.sleep(0.1)
            made.stores[1].delete(ObjectName("w"))
            await asyncio.sleep(0.1)
            over, told = outcome()
            store.finish(stored, told)
            with pytest.raises(ObjectError, match="'w' was deleted by the store at"):
                await asyncio.wait_for(over, 10)

    @in_loop
    async def test_a_refused_put_is_given_up_after_the_object_was_got(self) -> None:
        async with cluster(2) as made:
            await made.put(1, "w", tensor(1))
            store = made.stores[0]
            stored = store.create(ObjectName("w"), ObjectMeta("float64", (LARGE,), LARGE * 8))
            while stored.refused is None:
                await asyncio.sleep(0.01)
            await made.get(0, "w")
            store.abandon(stored)
            assert store.objects[ObjectName("w")].is_whole
            assert store.used_bytes == LARGE * 4

    @in_loop
    async def test_a_small_one_is_deleted_and_put_anew(self) -> None:
        async with cluster(3) as made:
            await made.put(0, "a", tensor(1, 5))
            await made.get(1, "a")
            made.stores[0].delete(ObjectName("a"))
            await asyncio.sleep(0.2)
            await made.put(2, "a", tensor(2, 5))
            assert torch.equal(await made.get(1, "a"), tensor(2, 5))

    @in_loop
    async def test_what_was_deleted(self) -> None:
        async with cluster(2) as made:
            await made.put(0, "w", tensor(3))
            await made.get(1, "w")
            made.stores[1].delete(ObjectName("w"))
            await asyncio.sleep(0.2)
            assert not made.stores[0].objects
            assert made.stores[0].used_bytes == made.stores[1].used_bytes == 0

    @pytest.mark.parametrize("numel", [3, LARGE])
    @in_loop
    async def test_what_was_deleted_is_nowhere(self, numel: int) -> None:
        async with cluster(3) as made:
            await made.put(0, "w", tensor(3, numel))
            for store in (1, 2):
                await made.get(store, "w")
            made.stores[1].delete(ObjectName("w"))
            await nowhere(made)

    @in_loop
    async def test_a_sum_that_is_deleted_while_it_is_put(self) -> None:
        async with cluster(2) as made:
            for number in range(50):
                await made.put(0, f"g{number}", tensor(3, 5))
                made.reduce(1, f"sum{number}", [f"g{number}"])
                await asyncio.sleep(number * 2e-5)
                for name in ("g", "sum"):
                    made.stores[0].delete(ObjectName(f"{name}{number}"))
            await asyncio.sleep(0.1)
            known = {entry.name for entry in made.directory.directory.entries() if entry.meta is not None}
            assert known == set(made.stores[1].objects), "the directory knows what is there, and nothing else"

    @pytest.mark.parametrize("role", ["shard", "worker"])
    @in_loop
    async def test_who_has_nothing_to_do_here(self, role: str) -> None:
        async with cluster(1) as made:
            for address in (made.address, made.stores[0].address):
                with pytest.raises(PeerError, match=f"takes no {role}: .*(connect to a store|OFFBEAT_OBJECTS=)"):
                    await tcp.connect(address, accept=lambda _: made.stores[0], job=JOB, rank=0, role=role)  # type: ignore[arg-type,return-value]


class TestDirectoriesThatStoresName:
    async def refusal(self, first: list[str], second: list[str]) -> str:
        """A store has these directories, and then a second one those: the refusal of that one."""
        async with contextlib.AsyncExitStack() as stack:
            real = {}
            for name in "xyz":
                directory = DirectoryServer(LINKS["chain"])
                stack.push_async_callback(directory.close)
                real[name] = await directory.open("127.0.0.1", 0, job=JOB, credentials=None, limits=DIRECTORY_LIMITS)
            said = ""
            for directories in (first, second):
                store = NodeStore(job=JOB, credentials=None, most_bytes=1 << 20, arithmetic=TorchArithmetic)
                stack.push_async_callback(store.close)
                try:
                    await store.open("127.0.0.1", 0, [real[name] for name in directories], timedelta(seconds=5))
                except PeerError as error:
                    said = str(error)
            return said

    @pytest.mark.parametrize("second", [["y", "x"], ["x"], ["x", "z"], ["z", "y"], ["x", "y", "z"]])
    @in_loop
    async def test_others_are_refused(self, second: list[str]) -> None:
        said = await self.refusal(["x", "y"], second)
        assert "Name the same directories in the same order for all stores" in said

    @in_loop
    async def test_the_same_are_not(self) -> None:
        assert await self.refusal(["x", "y"], ["x", "y"]) == ""

    @pytest.mark.parametrize(
        ("one", "other", "may_be"),
        [
            ("10.0.0.1:4700", "10.0.0.2:4700", False),
            ("10.0.0.1:4700", "10.0.0.1:4701", False),
            ("10.0.0.1:4700", "node1:4700", True),
            ("127.0.0.1:4700", "10.0.0.1:4700", True),
            ("[fd00::1]:4700", "[fd00:0::1]:4700", True),
        ],
    )
    def test_a_directory_may_have_several_addresses(self, one: str, other: str, may_be: bool) -> None:
        hellos = [StoreHello(address, ("10.0.0.9:4700", address), 0) for address in (one, other)]
        assert (why_no_member(*hellos) == "") == may_be
