"""A client of its store, in another process or in this one: memory to fill, calls that are awaited or withdrawn."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.errors import DisagreementError, NetworkError, ObjectError, ObjectTimeoutError
from offbeat.objects import memory
from offbeat.objects.client import ObjectClient, connect, embedded, job_name
from offbeat.objects.serve import ObjectServer, open_store
from offbeat.wire.loop_thread import LoopThread
from tests.patience import stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE = 100_000


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with LoopThread() as loop:
        made = loop.run(
            open_store(
                "127.0.0.1", 0, 0, job=job_name("default"), credentials=None, memory_bytes=1 << 24, directories=(),
                directory_port=0, patience=timedelta(seconds=20),
            )
        )  # fmt: skip
        yield made
        loop.run(made.close())


@pytest.fixture(params=["remote", "embedded"])
def client(request: pytest.FixtureRequest, server: ObjectServer) -> Iterator[ObjectClient]:
    """A client of the store, or of a second one in this process."""
    is_remote = request.param == "remote"
    with connect(server.client_address) if is_remote else embedded(server.directories) as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until_s, "this takes too long"
        time.sleep(0.01)


def test_an_object_that_is_deleted_just_before_the_end_is_gone(server: ObjectServer) -> None:
    with connect(server.client_address) as client:
        client.put("x", torch.ones(LARGE))
        assert len(server.store.objects) == 1
        client.delete("x")
    until(lambda: not server.store.objects)


def test_an_object_that_is_deleted_while_it_is_put_again_is_put(server: ObjectServer) -> None:
    with connect(server.client_address) as client, connect(server.client_address) as other:
        client.put("x", torch.ones(LARGE))
        get = client._access.get

        def late(*arguments: Any) -> Any:
            other.delete("x")
            until(lambda: not server.store.objects)
            return get(*arguments)

        client._access.get = late  # type: ignore[assignment]
        client.put("x", torch.ones(LARGE), timeout=20)
        assert torch.equal(other.get("x", timeout=20), torch.ones(LARGE))


def test_what_cannot_be_mapped_is_not_waited_for(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with connect(server.client_address) as client:
        client.put("x", torch.ones(LARGE))
        monkeypatch.setattr(memory, "ObjectMap", refuse)
        with pytest.raises(ObjectError, match="Cannot allocate memory"):
            client.get("x", timeout=20)
        assert client.status().objects
        assert [stored.pins for stored in server.store.objects.values()] == [0]


class TestNobodyIsThere:
    @pytest.fixture
    def address(self) -> str:
        """Return an address of this machine at which nobody listens."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            return f"127.0.0.1:{listening.getsockname()[1]}"

    def test_a_refused_connection_is_an_error_at_once(self, address: str) -> None:
        begin_s = time.monotonic()
        with pytest.raises(NetworkError, match=f"Cannot reach {address} at the first attempt: .* Is the server"):
            connect(address)
        assert time.monotonic() - begin_s < stretched(2)

    def test_a_store_that_is_starting_is_waited_for_as_long_as_is_said(self, address: str) -> None:
        begin_s = time.monotonic()
        with pytest.raises(NetworkError, match=rf"Cannot reach {address} in \d+ attempts within 1 s"):
            connect(address, timeout=1)
        assert 0.5 < time.monotonic() - begin_s < 1 + stretched(2)

    def test_one_that_listens_and_says_nothing_is_waited_for_as_long_as_is_said(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            begin_s = time.monotonic()
            with pytest.raises(NetworkError, match=r"(within 1 s|at the first attempt)"):
                connect(f"127.0.0.1:{listening.getsockname()[1]}", timeout=1)
            assert time.monotonic() - begin_s < 1 + stretched(2)


class TestEmpty:
    def test_what_fills_it_is_put_without_a_copy(self, client: ObjectClient, server: ObjectServer) -> None:
        with connect(server.client_address) as other:
            filled = client.empty("w", (2, LARGE), torch.float32)
            assert filled.shape == (2, LARGE)
            filled.fill_(3.0)
            where = filled.data_ptr()
            client.put("w", filled, timeout=20)
            assert filled.data_ptr() == where
            filled[0] = 7.0
            assert (filled[0] == 7.0).all(), "it stays writable here"
            assert torch.equal(other.get("w", timeout=20), torch.full((2, LARGE), 3.0)), "and nobody else sees that"
            assert torch.equal(client.get("w", timeout=20), torch.full((2, LARGE), 3.0))
            client.put("w", torch.full((2, LARGE), 3.0), timeout=20)
            with pytest.raises(DisagreementError, match="Cannot put 'w': this store has other bytes"):
                client.put("w", filled, timeout=20)

    def test_a_tensor_that_is_dropped_ends_its_name(self, client: ObjectClient, server: ObjectServer) -> None:
        with connect(server.client_address) as other:
            dropped = client.empty("w", (LARGE,))
            getting = other.start_get("w")
            until(lambda: "0 of 400,000 bytes" in getting.progress)
            with pytest.raises(ObjectError, match="it is on its way to this store"):
                client.empty("w", (LARGE,))
            del dropped
            gc.collect()
            with pytest.raises(ObjectError, match=r"'w' (is lost|was deleted)"):
                getting.get(20)
            client.put("w", torch.ones(LARGE), timeout=20)
            assert torch.equal(other.get("w", timeout=20), torch.ones(LARGE))

    def test_another_tensor_is_refused(self, client: ObjectClient) -> None:
        made = client.empty("w", (LARGE,))
        for other in (torch.ones(LARGE), made[1:], made.view(torch.int32), made[::2]):
            with pytest.raises(ObjectError, match=r"Cannot put 'w': empty\(\) has made a tensor for it"):
                client.put("w", other)
        with pytest.raises(ObjectError, match=r"Cannot put 'w' with stripes=2: what empty\(\) has made is not cut"):
            client.put("w", made, stripes=2)
        client.put("w", made.fill_(1.0), timeout=20)
        client.put("small", client.empty("small", (2,), torch.int64).fill_(4), timeout=20)
        assert client.get("small", timeout=20).tolist() == [4, 4]

    @pytest.mark.parametrize("shape", [(-1,), (1,) * 17, (1 << 20, 1 << 20)])
    def test_no_object_is_like_that(self, client: ObjectClient, shape: tuple[int, ...]) -> None:
        with pytest.raises(ObjectError, match=r"Cannot have 'w' as torch\.float32 of shape"):
            client.empty("w", shape)

    def test_there_may_be_no_room(self, client: ObjectClient) -> None:
        with pytest.raises(ObjectError, match="Cannot keep 'w' of 4,294,967,296 bytes: this store holds"):
            client.empty("w", (1 << 30,))


class TestAwaited:
    def test_calls_are_awaited(self, client: ObjectClient, server: ObjectServer) -> None:
        async def story() -> None:
            with connect(server.client_address) as other:
                getting = asyncio.create_task(_outcome(other.start_get("w")))
                await asyncio.sleep(0.05)
                assert await client.start_put("w", torch.ones(LARGE))
                assert not await client.start_put("w", torch.ones(LARGE)), "it was there before"
                assert torch.equal(await getting, torch.ones(LARGE))
                await client.start_put("v", torch.ones(LARGE))
                client.reduce("sum", ["w", "v"])
                assert torch.equal(await client.start_get("sum"), torch.full((LARGE,), 2.0))
                assert torch.equal(await other.start_allreduce("all", ["v", "w"]), torch.full((LARGE,), 2.0))
                client.reduce("w", ["v"])
                with pytest.raises(ObjectError, match="Cannot reduce into 'w': it is there already"):
                    await client.start_get("w")

        asyncio.run(story())

    def test_who_is_cancelled_withdraws_the_call(self, client: ObjectClient, server: ObjectServer) -> None:
        async def story() -> None:
            getting = client.start_get("w")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(getting, 0.1)
            with pytest.raises(ObjectError, match="Cannot get 'w': the call was withdrawn"):
                await getting

        asyncio.run(story())
        with connect(server.client_address) as other:
            other.put("w", torch.ones(LARGE), timeout=20)
            time.sleep(0.3)
            assert client.status().received_bytes == 0, "nobody waits for it any more"

    def test_a_call_may_be_waited_for_again(self, client: ObjectClient, server: ObjectServer) -> None:
        getting = client.start_get("w")
        with pytest.raises(ObjectTimeoutError, match=r"Cannot get 'w' within 0\.1 s"):
            getting.get(0.1)
        with connect(server.client_address) as other:
            other.put("w", torch.ones(LARGE), timeout=20)
        assert torch.equal(getting.get(20), torch.ones(LARGE))


async def _outcome(future: object) -> torch.Tensor:
    return await future  # type: ignore[misc,no-any-return]


def test_what_is_no_tensor_is_refused(client: ObjectClient) -> None:
    with pytest.raises(ObjectError, match=r"Cannot put 'w': it is no tensor or dict of tensors by name \(dict\)"):
        client.put("w", {"a": 3.0})  # type: ignore[dict-item]
    with pytest.raises(ObjectError, match="Cannot put 'w' version 2 with base=1: a base is an earlier version"):
        client.put("w", {"a": torch.ones(2)}, version=2, base="1")  # type: ignore[arg-type]
    with pytest.raises(ObjectError, match="Cannot get 'w' into a list"):
        client.get("w", into=[torch.ones(2)])  # type: ignore[call-overload]


def test_one_tensor_is_not_loaded_into_several(client: ObjectClient) -> None:
    client.put("w", torch.ones(LARGE), version=1, timeout=20)
    with pytest.raises(ObjectError, match=r"Cannot load 'w' version 1 into several tensors: it is one tensor, float32"):
        client.get("w", version=1, into={"a": torch.ones(LARGE)}, timeout=20)


@pytest.mark.parametrize("numel", [5, LARGE])
def test_a_sum_that_waits_names_the_sources_that_are_missing(client: ObjectClient, numel: int) -> None:
    names = [f"g{number}" for number in range(12)]
    client.put(names[3], torch.ones(numel))
    client.reduce("sum", names, num_objects=11)
    with pytest.raises(ObjectTimeoutError, match=r"10 more of its sources: .* 'g0', 'g1', .*'g8' and 3 others"):
        client.get("sum", timeout=1)
    waiting = client.start_get("sum")
    for name in names[:2] + names[4:11]:
        client.put(name, torch.ones(numel))
    with pytest.raises(ObjectTimeoutError, match="waits for 1 more of its sources: nobody has all of 'g2', 'g11'"):
        waiting.get(2)
    client.put("g2", torch.ones(numel))
    assert torch.equal(waiting.get(20), torch.full((numel,), 11.0))


def test_an_object_that_nobody_has_put(client: ObjectClient) -> None:
    with pytest.raises(ObjectTimeoutError, match=r"Cannot get 'w' within 0\.5 s: nobody has put it"):
        client.get("w", timeout=0.5)
