"""A backend of torch: unmodified DDP, all collectives, and what people see when something goes wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.c10d import members
from offbeat.collective import Ring, WaterFilling
from offbeat.errors import PlanError
from offbeat.fabric import lane_network
from offbeat.testing.faults.in_process import hold_gil
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATHS = offbeat.Routed(WaterFilling(2))


def begin(backend: str, spec: offbeat.Routed | None = None, timeout_s: float = 20.0) -> tuple[int, int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init = f"file://{os.environ['OFFBEAT_STORE']}"
    options: Any = spec
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world, pg_options=options, timeout=timeout)
    return rank, world


def train(backend: str, spec: offbeat.Routed | None) -> list[torch.Tensor]:
    rank, _ = begin(backend, spec)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(100, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Linear(400, 10))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x, y = torch.randn(8, 100, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        if step % 3 == 2:
            with replica.no_sync():
                nn.functional.cross_entropy(replica(x), y).backward()
        nn.functional.cross_entropy(replica(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [tensor.clone() for tensor in model.state_dict().values()]
    if backend == "offbeat":  # now and then Gloo's own does not come to an end where DDP still holds it
        dist.destroy_process_group()
    return state


@pytest.mark.parametrize("spec", [PATHS, None], ids=repr)
def test_unmodified_ddp_has_the_bits_of_gloo_with_two_workers(spec: offbeat.Routed | None) -> None:
    expected = run_workers(2, train, "gloo", None)
    for state, theirs in zip(run_workers(2, train, "offbeat", spec), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, theirs, strict=True))


def test_three_workers_agree_along_paths() -> None:
    first, *others = run_workers(3, train, "offbeat", PATHS)
    expected = run_workers(3, train, "gloo", None)[0]
    trained = slice(0, 2)  # running statistics are each worker's own in DDP, but for those of the last forward pass
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first[trained], other[trained], strict=True))
    for one, two in zip(first[trained], expected[trained], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def collectives() -> list[str]:
    """All of them, beside Gloo's; which differ."""
    rank, world = begin("offbeat", PATHS)
    gloo = dist.new_group(backend="gloo")
    wrong = []

    def both(name: str, run: Callable[[Any], Any]) -> None:
        mine, theirs = run(None), run(gloo)
        same = [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]
        if not all(same):
            wrong.append(name)

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(int(torch.Size(shape).numel())).reshape(shape) % 7 + rank).to(dtype)

    def reduced(op: Any, size: int, dtype: torch.dtype) -> Callable[[Any], Any]:
        def run(group: Any) -> list[torch.Tensor]:
            tensor = filled(size, dtype=dtype)
            dist.all_reduce(tensor, op=op, group=group)
            return [tensor]

        return run

    sizes, ops = (1, 100_000), (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in ops:
            for size in sizes:
                both(f"all_reduce {dtype} {op} {size}", reduced(op, size, dtype))

    def gathered(group: Any) -> list[torch.Tensor]:
        found = [torch.zeros(5) for _ in range(world)]
        dist.all_gather(found, filled(5), group=group)
        return found

    def gathered_at_one(group: Any) -> list[torch.Tensor]:
        found = [torch.zeros(5) for _ in range(world)] if rank == 1 else None
        dist.gather(filled(5), found, dst=1, group=group)
        return found or []

    def scattered(group: Any) -> list[torch.Tensor]:
        out, parts = torch.zeros(4), [filled(4) + i for i in range(world)] if rank == 0 else None
        dist.scatter(out, parts, src=0, group=group)
        return [out]

    def broadcast(group: Any) -> list[torch.Tensor]:
        tensor = filled(200_000)
        dist.broadcast(tensor, 1, group=group)
        return [tensor]

    def reduced_at_one(group: Any) -> list[torch.Tensor]:
        tensor = filled(10)
        dist.reduce(tensor, 0, group=group)
        return [tensor] if rank == 0 else []

    def reduce_scattered(group: Any) -> list[torch.Tensor]:
        out = torch.zeros(6)
        dist.reduce_scatter(out, [filled(6) for _ in range(world)], group=group)
        return [out]

    def exchanged(group: Any) -> list[torch.Tensor]:
        out = torch.zeros(world)
        dist.all_to_all_single(out, filled(world), group=group)
        return [out]

    def sent(group: Any) -> list[torch.Tensor]:
        tensor = torch.zeros(3)
        ahead, behind = (rank + 1) % world, (rank - 1) % world
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, filled(3), ahead, group), dist.P2POp(dist.irecv, tensor, behind, group)]
        )
        for work in works:
            work.wait()
        return [tensor]

    def texts(group: Any) -> list[torch.Tensor]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, {"rank": rank}, group=group)
        return [torch.tensor([one["rank"] for one in found])]

    for run in (
        gathered, gathered_at_one, scattered, broadcast, reduced_at_one, reduce_scattered, exchanged, sent, texts,
    ):  # fmt: skip
        both(run.__name__, run)
    dist.barrier()
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert float(work.get_future().value()[0][0]) == world
    turned = filled(300, 200).t()
    dist.all_reduce(turned)
    plain = filled(300, 200)
    dist.all_reduce(plain, group=gloo)
    if not torch.equal(turned, plain.t()):
        wrong.append("a tensor that is not contiguous")
    pair = dist.new_group([0, 2], backend="offbeat")
    if rank in (0, 2):
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=pair)
        if float(tensor[-1]) != 2.0:
            wrong.append("a sub-group")
    dist.destroy_process_group()
    return wrong


def test_every_collective_gives_what_gloo_gives() -> None:
    assert run_workers(3, collectives) == [[], [], []]


def lose(size: int) -> tuple[float, str]:
    rank, _ = begin("offbeat", PATHS)
    tensor = torch.ones(size)
    for step in range(10_000):
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        try:
            dist.all_reduce(tensor)
        except Exception as error:
            return time.monotonic() - began_s, str(error)
        tensor /= 3
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("size", [10, 200_000], ids=["by Gloo", "along paths"])
def test_who_is_killed_is_named_on_every_rank(size: int) -> None:
    results = run_workers(3, lose, size, faulty=1)
    for took_s, said in (results[0], results[2]):
        assert took_s < 1.5
        assert re.search(r"rank 1 \(.+, pid \d+\) is lost", said), said


def detect_within(timeout_s: float) -> None:
    """Have links give up a machine that is silent for so long."""
    lane_network._LIMITS = replace(lane_network._LIMITS, timeout=timedelta(seconds=timeout_s))


def stand_still(how: str, seconds: float) -> None:
    """Say nothing for so long."""
    if how == "holds the GIL":
        hold_gil(seconds)
    else:
        subprocess.Popen(["bash", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def sum_while_one_stands_still(how: str, size: int) -> tuple[float, list[str]]:
    detect_within(2)
    told = listen()
    rank, _ = begin("offbeat", PATHS)
    total = torch.zeros(size)
    for step in range(8):
        if (rank, step) == (1, 4):
            stand_still(how, 5)
        total += rank + 1
        dist.all_reduce(total)
        total /= 2
    dist.destroy_process_group()
    return float(total[-1]), told


@pytest.mark.parametrize("size", [10, 200_000], ids=["by Gloo", "along paths"])
@pytest.mark.parametrize("how", ["holds the GIL", "is paused"])
def test_a_worker_that_stands_still_ends_nothing_and_is_named(how: str, size: int) -> None:
    (total, told), (other, _) = run_workers(2, sum_while_one_stands_still, how, size)
    assert total == other == 12.0
    said = rf"in all_reduce .*: rank 1 \(.+, pid \d+\) .* while its machine answers: it {how}"
    assert any(re.search(said, line) for line in told), told


def wait_for_one_that_is_stopped(size: int) -> tuple[float, str, list[str]]:
    detect_within(2)
    told = listen()
    rank, _ = begin("offbeat", PATHS, timeout_s=4)
    tensor = torch.ones(size)
    began_s = time.monotonic()
    try:
        dist.all_reduce(tensor)
        # What rank 1 still owes to rank 0 may stop with it: then rank 0 waits here already.
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(tensor)
    except Exception as error:
        return time.monotonic() - began_s, str(error), told
    raise AssertionError("it was not stopped")


@pytest.mark.parametrize("size", [10, 200_000], ids=["by Gloo", "along paths"])
def test_a_worker_that_is_stopped_for_good_ends_the_call_at_the_timeout(size: int) -> None:
    took_s, said, told = run_workers(2, wait_for_one_that_is_stopped, size, faulty=1)[0]
    assert 3.5 < took_s < 6.5
    assert re.search(r"rank 1 \(.+, pid \d+\) .*: it is paused \(SIGSTOP\)", said), said
    assert any("is paused (SIGSTOP)" in line for line in told), "long before"


def lose_one_with_a_child() -> tuple[float, str]:
    rank, _ = begin("offbeat", PATHS)
    tensor = torch.ones(200_000)
    began_s = time.monotonic()
    try:
        dist.all_reduce(tensor)
        if rank == 1:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    except Exception as error:
        return time.monotonic() - began_s, str(error)
    raise AssertionError("nobody was lost")


def test_a_killed_worker_whose_child_lives_on_is_lost_at_once() -> None:
    took_s, said = run_workers(2, lose_one_with_a_child, faulty=1)[0]
    assert took_s < 3.0
    assert re.search(r"rank 1 \(.+, pid \d+\) is lost", said), said


def call_other_things(small: bool) -> str:
    rank, _ = begin("offbeat", PATHS)
    tensor = torch.ones(10 if small else 200_000)
    try:
        if rank == 0:
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, 0)
    except Exception as error:
        return str(error)
    # A root of a broadcast does not wait for the others: the next thing it does says so.
    try:
        dist.barrier()
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("small", [True, False])
def test_who_calls_what_is_told_where_workers_call_different_things(small: bool) -> None:
    said = run_workers(2, call_other_things, small)
    numel = 10 if small else 200000
    assert any(f"rank 1 has called broadcast of {numel} float32" in one for one in said), said


def be_late() -> str:
    rank, _ = begin("offbeat", PATHS, timeout_s=4)
    if rank == 1:
        time.sleep(6)
        return ""
    try:
        dist.all_reduce(torch.ones(10))
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_who_does_not_come_in_time_is_named() -> None:
    assert "rank 1 has not called it" in run_workers(2, be_late)[0]


def begin_with_nonsense() -> str:
    try:
        begin("offbeat", Ring())  # type: ignore[arg-type]
    except PlanError as error:
        return str(error)
    return "nothing"


def test_options_that_are_none() -> None:
    for said in run_workers(2, begin_with_nonsense):
        assert "Cannot make a group with pg_options=Ring(by_links=False): give offbeat.Routed(...)" in said


def torch_rank() -> int:
    return int(os.environ["RANK"])


def ask_alone() -> str:
    try:
        begin("gloo" if torch_rank() else "offbeat", timeout_s=3)
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_backend_asked_for_on_one_rank_only() -> None:
    said = run_workers(2, ask_alone)[0]
    assert "Cannot make a group within the timeout of 3 s: rank 1 has not come." in said


def make_group_alone() -> str:
    begin("offbeat", timeout_s=10)
    if torch_rank():
        dist.barrier()
        return ""
    try:
        dist.new_group([0, 1], timeout=timedelta(seconds=2))
    except Exception as error:
        dist.barrier()
        return str(error)
    return "nothing"


def test_a_new_group_on_one_rank_only() -> None:
    said = run_workers(2, make_group_alone)[0]
    assert "Cannot make a group within the timeout of 2 s: rank 1 has not come." in said


def run_another_version() -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(members, "__version__", f"1.{torch_rank()}")
        try:
            begin("offbeat")
        except Exception as error:
            return str(error)
    return "nothing"


def test_versions_that_differ() -> None:
    said = run_workers(2, run_another_version)
    assert re.search(r"rank 1 \(.+\) runs offbeat 1\.1, and rank 0 1\.0\. Install the same", said[0]), said[0]
    assert re.search(r"rank 0 \(.+\) runs offbeat 1\.0, and rank 1 1\.1\. Install the same", said[1]), said[1]


def begin_again(port: int) -> list[float]:
    """Make a group, and end it, several times in one process, by the store of torch's own launchers."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = []
    for _ in range(3):
        dist.init_process_group("offbeat", timeout=timedelta(seconds=20))
        total = torch.ones(50_000)
        dist.all_reduce(total)
        found.append(float(total[-1]))
        dist.destroy_process_group()
    return found


def test_a_group_is_made_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run_workers(2, begin_again, port) == [[2.0] * 3] * 2


def sum_strided(spec: offbeat.Routed | None) -> list[bool | str]:
    rank, _ = begin("offbeat", spec)
    found: list[bool | str] = []
    for size in (10, 200_000):
        whole = torch.arange(2.0 * size) * (rank + 1)
        dist.all_reduce(whole[::2])
        expected = torch.arange(2.0 * size) * (rank + 1)
        expected[::2] = torch.arange(2.0 * size)[::2] * 3
        found.append(torch.equal(whole, expected))
    try:
        dist.all_reduce(torch.ones(1).expand(10))
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("spec", [PATHS, None], ids=repr)
def test_a_tensor_that_is_not_contiguous(spec: offbeat.Routed | None) -> None:
    for small, large, said in run_workers(2, sum_strided, spec):
        assert (small, large) == (True, True)
        assert str(said).endswith("Give its .contiguous().")


def sum_other_sizes_at_once() -> str:
    rank, _ = begin("offbeat")
    try:
        dist.all_reduce(torch.ones(100_000 + rank))
    except Exception as error:
        return str(error)
    return "nothing"


def test_who_sums_what_is_told_at_the_first_sum() -> None:
    first, second = run_workers(2, sum_other_sizes_at_once)
    assert "rank 1 has called all_reduce (SUM) of 100001 float32" in first, first
    assert "rank 0 has called all_reduce (SUM) of 100000 float32" in second, second


def call_in_fork() -> str:
    begin("offbeat", PATHS)
    dist.all_reduce(torch.ones(100_000))  # there are threads now
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        said = "nothing"
        try:
            dist.all_reduce(torch.ones(10))
        except Exception as error:
            said = str(error)
        os.write(theirs, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(ours, 1000).decode().replace(str(child), "CHILD").replace(str(os.getpid()), "PARENT")
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return said


def test_a_process_that_was_forked_has_no_group() -> None:
    for said in run_workers(2, call_in_fork):
        assert said.startswith("Cannot call all_reduce"), said
        assert "in process CHILD: it was forked from PARENT" in said


def load_in_forks() -> float:
    """Workers of a loader are forked, and end while there is a group."""
    begin("offbeat", PATHS)
    data = torch.utils.data.TensorDataset(torch.arange(40.0))
    total = torch.zeros(30_000)
    for _ in range(2):
        for (values,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
            total += values.sum()
            dist.all_reduce(total)
            total /= 2
    dist.destroy_process_group()
    return float(total[-1])


def test_a_loader_with_workers() -> None:
    assert run_workers(2, load_in_forks) == [1560.0, 1560.0]


def train_in_shards(backend: str) -> list[torch.Tensor]:
    """FSDP: all-gather of parameters, reduce-scatter of gradients."""
    rank, world = begin(backend)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x, y = torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    if backend == "offbeat":
        dist.destroy_process_group()
    return state


def test_fsdp_has_the_bits_of_gloo() -> None:
    expected = run_workers(2, train_in_shards, "gloo")
    for state, theirs in zip(run_workers(2, train_in_shards, "offbeat"), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, theirs, strict=True))


ENDS_WITH_WORK_UNDER_WAY = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("offbeat")
works = []
for _ in range(20):
    works.append(dist.all_reduce(torch.ones(10), async_op=True))
    works.append(dist.barrier(async_op=True))
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["destroy", "leave it to the end"])
def test_a_script_that_ends_with_work_under_way_ends_well(how: str, tmp_path: Path) -> None:
    for turn in range(3):
        environment = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            environment["MASTER_PORT"] = str(free.getsockname()[1])
        processes = []
        for rank in range(3):
            with (tmp_path / f"{turn}-{rank}.log").open("w") as log:
                command = [sys.executable, "-X", "faulthandler", "-c", ENDS_WITH_WORK_UNDER_WAY, how]
                processes.append(
                    subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=log, stderr=log)
                )
        try:
            ended = [process.wait(120) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert ended == [0, 0, 0], [log.read_text() for log in sorted(tmp_path.iterdir())]
