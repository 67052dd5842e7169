"""Sums of 16-bit tensors are added in float32 and rounded once, along every tree; with a `wire` dtype on each edge."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

import offbeat
from offbeat.errors import DisagreementError, ObjectError
from offbeat.objects.client import ObjectClient, embedded
from offbeat.objects.edge_dtypes import EdgeDtypes
from offbeat.objects.reduce_plan import LinkEstimate, ReduceTree, choose, ring
from offbeat.protocol.objects import ObjectName
from tests.objects.test_node_store import WAYS, cluster
from tests.wire.meshes import in_loop

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.protocol.objects import WireDtype
    from tests.objects.test_node_store import Cluster

NUMEL = 1_000_001
NAMES = [f"g{number}" for number in range(5)]
LINKS = {
    "chain": LinkEstimate(0.0, 1e9, 1 << 16),
    "tree": LinkEstimate(0.003, 1e9, 1 << 16),
    "star": LinkEstimate(10.0, 1e9, 1 << 16),
}


def part(number: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sums float32 holds exactly in any order, and 16 bits do not."""
    generator = torch.Generator().manual_seed(number)
    digits = torch.randint(-127, 128, (numel,), generator=generator)
    return (digits * 2.0 ** -torch.randint(0, 9, (numel,), generator=generator)).to(dtype)


def parts_of(numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [part(number, numel, dtype) for number in range(5)]


async def put_all(made: Cluster, parts: list[Tensor]) -> None:
    for number, one in enumerate(parts):
        await made.put(number, NAMES[number], one)


def rounded_once(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).float().sum(0).to(parts[0].dtype)


def rounded_each_time(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total


class TestRoundedOnce:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("more", WAYS, ids=str)
    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize("numel", [5, 300_001])
    @pytest.mark.parametrize("caller", [0, 5])
    @in_loop
    async def test_a_sum(self, dtype: torch.dtype, more: dict[str, Any], link: str, numel: int, caller: int) -> None:
        parts = parts_of(numel, dtype)
        async with cluster(6, link=LINKS[link]) as made:
            await put_all(made, parts)
            made.reduce(caller, "sum", NAMES, **more)
            for got in await asyncio.gather(*(made.get(store, "sum") for store in (caller, 2))):
                assert torch.equal(got, rounded_once(parts))
        assert numel == 5 or not torch.equal(rounded_once(parts), rounded_each_time(parts)), "else it shows nothing"

    @pytest.mark.parametrize("more", WAYS, ids=str)
    @pytest.mark.parametrize("numel", [1000, 200_000])
    @in_loop
    async def test_every_op(self, more: dict[str, Any], numel: int) -> None:
        parts = parts_of(numel, torch.bfloat16)
        whole = torch.stack(parts).float()
        expected = {"mean": whole.sum(0) / 5, "min": whole.amin(0), "max": whole.amax(0)}
        async with cluster(5) as made:
            await put_all(made, parts)
            for op, value in expected.items():
                made.reduce(1, op, NAMES, op=op, **more)  # type: ignore[arg-type]
                assert torch.equal(await made.get(3, op), value.to(torch.bfloat16))
            made.reduce(1, "prod", NAMES[:3], op="prod", **more)  # 3 factors of 8 bits are exact in 24
            assert torch.equal(await made.get(3, "prod"), whole[:3].prod(0).to(torch.bfloat16))

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    @pytest.mark.parametrize("numel", [1000, 200_000])
    @in_loop
    async def test_float8_which_torch_does_not_add(self, dtype: torch.dtype, numel: int) -> None:
        parts = [(one.float() / 64).to(dtype) for one in parts_of(numel, torch.float16)]
        async with cluster(5) as made:
            await put_all(made, parts)
            for op in ("sum", "max"):
                made.reduce(1, op, NAMES, op=op)
                whole = torch.stack([one.float() for one in parts])
                expected = (whole.sum(0) if op == "sum" else whole.amax(0)).to(dtype)
                assert torch.equal((await made.get(3, op)).float(), expected.float())

    @pytest.mark.parametrize("own", [0, 1])
    @in_loop
    async def test_of_one_source(self, own: int) -> None:
        async with cluster(2) as made:
            await made.put(0, "g0", part(0, NUMEL, torch.bfloat16))
            made.reduce(own, "sum", ["g0"])
            assert torch.equal(await made.get(1, "sum"), part(0, NUMEL, torch.bfloat16))

    @pytest.mark.parametrize("more", WAYS, ids=str)
    @in_loop
    async def test_a_directory_dies_in_the_middle(self, more: dict[str, Any]) -> None:
        parts = parts_of(4 << 20, torch.bfloat16)
        async with cluster(6) as made:
            await put_all(made, parts)
            made.reduce(5, "sum", NAMES, **more)
            readers = [asyncio.create_task(made.get(store, "sum")) for store in (5, 2)]
            while made.sent_bytes() < 8 << 20:
                await asyncio.sleep(0.001)
            await made.restart_directory()
            for got in await asyncio.gather(*readers):
                assert torch.equal(got, rounded_once(parts))

    @in_loop
    async def test_a_source_is_lost_and_read_elsewhere_from_the_middle(self) -> None:
        parts = parts_of(4 << 20, torch.bfloat16)
        async with cluster(7, link=LINKS["chain"]) as made:
            await put_all(made, parts)
            await made.get(6, "g0")
            made.reduce(5, "sum", NAMES)
            waiting = asyncio.create_task(made.get(5, "sum"))
            sent = made.sent_bytes()
            while made.sent_bytes() < sent + (8 << 20):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            made.stores[0].abort()
            assert torch.equal(await waiting, rounded_once(parts))


class TestBytes:
    """A leaf edge has the bytes of a source; partial sums of 16 bits have twice as many."""

    @pytest.mark.parametrize(
        ("more", "link", "edges"),
        [
            ({}, "chain", 1 + 4 * 2),
            ({}, "star", 5),
            ({"in_order": True}, "chain", 1 + 4 * 2),
            ({"striped": True}, "chain", 4),
        ],
        ids=str,
    )
    @in_loop
    async def test_of_a_sum(self, more: dict[str, Any], link: str, edges: int) -> None:
        async with cluster(6, link=LINKS[link]) as made:
            await put_all(made, parts_of(NUMEL, torch.bfloat16))
            made.reduce(5, "sum", NAMES, **more)
            while ObjectName("sum") not in made.stores[5].used:
                await asyncio.sleep(0.005)
            assert made.sent_bytes() == edges * NUMEL * 2

    def test_a_star_is_chosen_where_the_bytes_of_partial_sums_cost_more_than_its_root(self) -> None:
        link, size = LinkEstimate(0.0002, 118e6, 512 << 10), 100 << 20
        assert [choose(n, size, link).degree for n in (2, 3, 4, 8)] == [1, 1, 1, 1]
        assert [choose(n, size, link, 2.0).degree for n in (2, 3, 4, 8)] == [2, 1, 1, 1]
        assert choose(3, size, link, 4.0).degree == 3, "3 sources, or a partial sum of 4 times the bytes"

    @pytest.mark.parametrize("n", range(1, 17))
    @pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
    def test_the_busiest_node_is_what_bounds_a_tree(self, n: int, factor: float) -> None:
        for degree in range(1, n + 1):
            tree = ReduceTree(n, degree)
            takes = [0.0] * (n + 1)
            for position, parent in enumerate(tree.parents):
                takes[parent] += factor if position in tree.parents else 1.0
            assert tree.busiest(factor) == max(takes)

    def test_no_partial_sum_of_16_bits_travels_in_a_ring(self) -> None:
        assert ring(4, EdgeDtypes.of("bfloat16", "sum").inner_factor) == ReduceTree(4, 4)
        assert ring(4, EdgeDtypes.of("bfloat16", "max").inner_factor) == ReduceTree(4, 1)
        assert ring(4, EdgeDtypes.of("float32", "sum").inner_factor) == ReduceTree(4, 1)


class TestWire:
    """Sources and partial sums travel in 16 bits, are added in float32, and each edge rounds."""

    def parts(self) -> list[Tensor]:
        return [torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)) for number in range(5)]

    @pytest.mark.parametrize(("wire", "narrow"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
    @in_loop
    async def test_along_a_chain_each_edge_rounds_once(self, wire: WireDtype, narrow: torch.dtype) -> None:
        parts = self.parts()
        total = parts[0].to(narrow).float()
        for one in parts[1:]:
            total = (total + one).to(narrow).float()
        async with cluster(6, link=LINKS["chain"]) as made:
            await put_all(made, parts)
            made.reduce(5, "sum", NAMES, in_order=True, wire=wire)
            assert torch.equal(await made.get(5, "sum"), total)
            assert made.sent_bytes() == 5 * NUMEL * 2, "half of what float32 takes"

    @pytest.mark.parametrize("more", WAYS, ids=str)
    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize("caller", [0, 5])
    @in_loop
    async def test_the_error_is_the_declared_one(self, more: dict[str, Any], link: str, caller: int) -> None:
        parts = self.parts()
        async with cluster(6, link=LINKS[link]) as made:
            await put_all(made, parts)
            made.reduce(caller, "mean", NAMES, op="mean", wire="bfloat16", **more)
            for got in await asyncio.gather(*(made.get(store, "mean") for store in (caller, 2))):
                roundings = torch.stack(parts).abs().sum(0) * len(parts) / 256
                error = (got * 5 - torch.stack(parts).sum(0)).abs()
                assert bool((error <= roundings * 1.01).all())
                assert bool(error.any()), "else nothing was rounded"

    @in_loop
    async def test_sums_of_16_bits_may_travel_in_16_bits(self) -> None:
        parts = parts_of(NUMEL, torch.bfloat16)
        async with cluster(6, link=LINKS["chain"]) as made:
            await put_all(made, parts)
            made.reduce(5, "sum", NAMES, in_order=True, wire="bfloat16")
            assert torch.equal(await made.get(5, "sum"), rounded_each_time(parts))
            assert made.sent_bytes() == 5 * NUMEL * 2

    @in_loop
    async def test_a_source_is_lost_and_read_elsewhere_from_the_middle(self) -> None:
        parts = [one.float() for one in parts_of(6 << 20, torch.bfloat16)]
        async with cluster(7, link=LINKS["star"]) as made:
            await put_all(made, parts)
            await made.get(6, "g0")
            made.reduce(5, "sum", NAMES, wire="bfloat16")
            waiting = asyncio.create_task(made.get(5, "sum"))
            sent = made.sent_bytes()
            while made.sent_bytes() < sent + (8 << 20):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            made.stores[0].abort()
            assert torch.equal(await waiting, sum(parts[1:], parts[0]))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.complex64])
    @in_loop
    async def test_what_cannot_be_rounded_is_refused(self, dtype: torch.dtype) -> None:
        async with cluster(2) as made:
            await made.put(0, "g0", torch.ones(100_000).to(dtype))
            made.reduce(1, "sum", ["g0"], wire="bfloat16")
            with pytest.raises(DisagreementError, match=r"only float32 and float64 can be rounded to bfloat16.*Leave"):
                await made.get(1, "sum")

    def test_another_codec_is_refused(self) -> None:
        for wire in (offbeat.TopK(0.01), "bf16"):
            with pytest.raises(ObjectError, match=r"Cannot reduce into 'sum' with wire=.*Cast\(\"bf16\"\) or"):
                ObjectClient(None).reduce("sum", ["g0"], wire=wire)  # type: ignore[arg-type]

    @in_loop
    async def test_through_a_client(self) -> None:
        async with cluster(1) as made:

            def sums() -> tuple[Tensor, Tensor]:
                with embedded([made.address], job="test") as one, embedded([made.address], job="test") as other:
                    for client, name in ((one, "g0"), (other, "g1")):
                        client.put(name, torch.full((100_000,), 1 + 2**-12))
                    other.reduce("sum", ["g0", "g1"], wire=offbeat.Cast("bf16"))
                    return other.get("sum", timeout=30).clone(), one.allreduce(
                        "all", ["g0", "g1"], wire=offbeat.Cast("bf16"), timeout=30
                    ).clone()

            plain, striped = await asyncio.to_thread(sums)
            assert set(plain.tolist()) == {2.0}, "on its way to the root it is rounded"
            assert set(striped.tolist()) == {2 + 2**-12}, "a root does not round its own"
