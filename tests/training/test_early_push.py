"""Workers that push to a server while backward computes come to what those come to that push behind it."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections import Counter as Counts
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.protocol.training import ContributionInfo, PullBlock
from offbeat.sync import ASP, BSP, SSP, Hybrid, KSync, LocalSGD, Policy, RoundRobin
from tests.audit.test_real_jobs import ended, recorded
from tests.training.server_jobs import TIMEOUT_S, Counter, kept, kill, look, serve, wait_for_snapshot
from tests.training.test_scheduling import Hidden
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.protocol.status import WorkerStatus
    from offbeat.scheduling import Scheduler
    from offbeat.server.client.model_state import ModelState, Part
    from offbeat.server.client.requests import PulledParameters, ServerRequest

TIMEOUT = timedelta(seconds=TIMEOUT_S)
STEPS = 16  # of which seven are learnt from
_SLEPT_S = 0.05


def plan(
    policy: Policy | None = None,
    *,
    early: bool = True,
    patience_s: float = 30.0,
    shards: int = 1,
    scheduler: Scheduler | None = None,
) -> offbeat.Plan:
    return offbeat.Plan(
        sync=policy or BSP(),
        fabric=ParameterServer(block_bytes=4096, patience_s=patience_s, collocated=shards > 1),
        scheduling=(scheduler or offbeat.Prophet()) if early else None,
    )


def pushed_early(run: offbeat.Run) -> int:
    """Blocks of the contribution at hand that are pushed."""
    server = run._session.server
    assert server is not None
    server._loop.run(asyncio.sleep(0))  # which has heard of all by then
    return len(server.client.state(0).pushed)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 64, bias=False))


def unseen() -> int:
    """Steps with blocks pushed early, of a model in whose answer nobody finds a tensor."""
    net, with_early = Hidden(), 0
    with offbeat.init(plan()) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for _ in range(STEPS):
            replica(torch.randn(4, 16)).logits.square().mean().backward()
            with_early += pushed_early(run) > 0
            optimizer.step()
            optimizer.zero_grad()
    return with_early


def test_who_is_not_seen_to_begin_backward_pushes_behind_it() -> None:
    assert run_workers(2, unseen, timeout_s=55) == [0, 0]


# -- the same as without -----------------------------------------------------------------------------------------------


def trained(
    shards: int, kind: str, early: bool, policy: Policy | None = None, steps: int = STEPS
) -> tuple[list[torch.Tensor], int]:
    """The parameters of a loop that does something between backward and the step, and steps with blocks pushed."""
    net, with_early = network(), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=kind == "scaled")
    with offbeat.init(plan(policy, early=early, shards=shards)) as run:
        replica, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(steps):
            for _ in range(2 if kind == "accumulated" and step % 3 == 2 else 1):
                scaler.scale(replica(torch.randn(5, 64, generator=generator)).square().mean()).backward()
            if kind == "scaled":
                with_early += pushed_early(run) > 0
                if step == 10:
                    overflow(net)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                continue
            if kind == "not finite" and step >= 8:
                next(net.parameters()).data[0, 0] = torch.nan  # and so is each gradient, which nobody has changed
            if kind == "clipped" and step % 3 == 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if kind == "asked" and step % 3 == 2:
                assert run.mean(step) == step
            if kind == "left out" and step % 5 == 4:
                optimizer.zero_grad()
                continue
            if kind == "evaluated" and step % 2:
                with torch.no_grad():
                    replica(torch.ones(3, 64))
            with_early += pushed_early(run) > 0 or (early and kind == "asked" and step % 3 == 2)
            optimizer.step()
            if kind == "clamped":
                for parameter in net.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
            optimizer.zero_grad()
        run.settle()
        return [tensor.clone() for tensor in net.state_dict().values()], with_early


def overflow(net: nn.Module) -> None:
    """A gradient is infinite, so that the step is left out."""
    gradient = next(net.parameters()).grad
    assert gradient is not None
    gradient[0, 0] = torch.inf


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "kind", ["plain", "clipped", "scaled", "asked", "accumulated", "left out", "evaluated", "clamped"]
)
def test_the_bits_are_those_of_pushing_behind_backward(kind: str, shards: int) -> None:
    early, behind = (run_workers(2, trained, shards, kind, is_early, timeout_s=55) for is_early in (True, False))
    for (one, with_early), (other, without) in zip(early, behind, strict=True):
        assert all(map(torch.equal, one, other))
        assert without == 0
        assert with_early >= STEPS - 7 - 3, "most steps behind the first seven push early"


@pytest.mark.timeout(120)
def test_gradients_that_are_not_finite_are_not_taken_for_changed_ones() -> None:
    steps = 24
    for _, with_early in run_workers(2, trained, 1, "not finite", True, None, steps, timeout_s=55):
        assert with_early >= steps - 7 - 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_turns_that_begin_in_backward_have_the_bits_of_those_that_do_not() -> None:
    policy = RoundRobin(strict=True)
    early, behind = (run_workers(2, trained, 1, "plain", is_early, policy, timeout_s=55) for is_early in (True, False))
    for (one, _), (other, without) in zip(early, behind, strict=True):
        assert all(map(torch.equal, one, other))
        assert without == 0


def in_turns() -> int:
    """Steps with blocks that were pushed before the step, in which a worker waits until its turn has come."""
    net, with_early = network(), 0
    with offbeat.init(plan(RoundRobin())) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step in range(STEPS):
            replica(torch.ones(5, 64)).square().mean().backward()
            deadline_s = time.monotonic() + 20
            while step > 8 and not pushed_early(run):  # the server hears in the step before that it would push
                assert time.monotonic() < deadline_s, "its turn does not come"
                time.sleep(0.001)
            with_early += pushed_early(run) > 0
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        return with_early


@pytest.mark.timeout(60)
def test_whose_turn_it_is_pushes_in_backward() -> None:
    assert min(run_workers(2, in_turns)) >= STEPS - 9


class AnotherOrder(nn.Module):
    """Layers that are read in another order than they are registered in."""

    READ = (2, 0, 3, 1)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in self.READ])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.READ:
            x = self.layers[index](x)
        return x


def in_order_of_reading() -> tuple[list[int], list[int], list[int]]:
    """The blocks of a step as they came back, but for the one that is pushed with the step; and where each is read."""
    net = AnotherOrder()
    with offbeat.init(plan()) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for _ in range(10):
            replica(torch.ones(5, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.synchronize()
        server = run._session.server
        sync: Any = run._session.models.synchronizers[0]._gradients
        assert server is not None
        came, hear = list[int](), server.client.hear

        def listen(shard: int, message: Any) -> None:
            if isinstance(message, PullBlock):
                came.append(message.block)
            hear(shard, message)

        server.client.hear = listen  # type: ignore[method-assign]
        replica(torch.ones(5, 64)).square().mean().backward()
        optimizer.step()
        run.synchronize()
        places = {f"layers.{index}": place for place, index in enumerate(AnotherOrder.READ)}
        blocks = server.client.state(0).blocks
        read = [min(places[piece.name.rpartition(".")[0]] for piece in block.pieces) for block in blocks]
        return came, read, sorted(sync._early._held_back)


@pytest.mark.timeout(60)
def test_parameters_come_back_in_the_order_in_which_the_forward_pass_reads_them() -> None:
    for came, read, held_back in run_workers(2, in_order_of_reading):
        assert sorted(came) == list(range(len(read)))
        places = [read[block] for block in came if block not in held_back]
        assert places == sorted(places)
        registered = [read[block] for block in sorted(came, reverse=True) if block not in held_back]
        assert registered != sorted(places), "the server's own order is another"


def clipped_always() -> tuple[int, int]:
    net, counts = network(), list[int]()
    with offbeat.init(plan()) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for _ in range(20):
            replica(torch.ones(5, 64)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            counts.append(pushed_early(run))
            optimizer.step()
            optimizer.zero_grad()
    return sum(count > 0 for count in counts), counts[-1]


def test_who_clips_in_each_step_pushes_behind_backward() -> None:
    assert run_workers(2, clipped_always) == [(8, 0), (8, 0)]


@pytest.mark.parametrize("policy", [KSync(1), Hybrid(BSP(), RoundRobin(), groups=1), LocalSGD(4)], ids=str)
def test_where_nothing_can_be_pushed_early_a_plan_says_so(policy: Policy) -> None:
    with pytest.raises(PlanError, match=r"Cannot schedule with Prophet.*use BSP\(\), ASP\(\)"):
        plan(policy)


# -- faults ------------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Layers whose gradients are ones, and of which some are complete before others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3000, 1, bias=False) for _ in range(4)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, times: float) -> torch.Tensor:
        return torch.cat([layer(torch.full((3000,), times)) for layer in self.layers])


class BlockCounter(Counter):
    """The same with several parameters, which are read by a forward pass."""

    def __init__(self, run: offbeat.Run) -> None:
        self.model = Sums()  # type: ignore[assignment]
        self.replica, self.optimizer = run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))

    def backward(self, times: float = 1.0) -> None:
        self.replica(times).sum().backward()

    def step(self, times: float = 1.0) -> None:
        self.backward(times)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def count(self) -> float:
        values = torch.cat([value.flatten() for value in self.model.state_dict().values()]).unique()
        assert len(values) == 1, values
        return -float(values[0])


def dies_before_it_announces(
    folder: Path, policy: Policy, shards: int, in_backward: bool
) -> tuple[float, list[WorkerStatus]]:
    """Rank 1 dies when it has pushed blocks that would move the parameters by ten times as much as others."""
    serve(folder, shards)
    with offbeat.init(plan(policy, scheduler=offbeat.FIFO()), timeout=TIMEOUT) as run:
        counter, gradients = BlockCounter(run), Counts[str]()

        def die(parameter: torch.Tensor | None = None) -> None:
            gradients["complete"] += 1
            if parameter is not None and gradients["complete"] < len(counter.model.layers) - 1:  # type: ignore[arg-type]
                return
            server = run._session.server
            assert server is not None
            look(run)  # an answer of the server: what was pushed before is there, with one shard
            assert server.client.state(0).pushed, "the fault hits"
            kill(os.getpid())

        for step in range(STEPS):
            if run.rank == 1 and step == 12:
                for parameter in counter.model.parameters() if in_backward else ():
                    parameter.register_post_accumulate_grad_hook(die)
                counter.backward(10.0)
                die()
            counter.step()
        run.settle()
        return counter.count, look(run)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "shards", "in_backward"),
    [
        (BSP(), 1, True),
        (BSP(), 2, False),
        (ASP(), 2, True),
        pytest.param(SSP(2), 1, True, marks=pytest.mark.slow),
        pytest.param(BSP(), 1, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_dies_before_it_announces_leaves_nothing_behind(
    tmp_path: Path, policy: Policy, shards: int, in_backward: bool
) -> None:
    (count, seen), _, (other, _) = run_workers(
        3, dies_before_it_announces, tmp_path, policy, shards, in_backward, faulty=1, timeout_s=110
    )
    assert count == other, "all have the same parameters after settle"
    assert (seen[1].phase, seen[1].applied, seen[1].lost) == ("gone", 12, 0)
    if policy == BSP():
        assert count == STEPS


@dataclass
class Readings:
    """The parameters as modules' forward passes have read them, and what became of them.

    Args:
        layers: by index.
        under_feet: whether one was another when backward was over.
        corrected: whether one was another once all were the newest.
        torn: whether these were not of one step.
    """

    layers: nn.ModuleList
    under_feet: bool = False
    corrected: bool = False
    torn: bool = False

    def __post_init__(self) -> None:
        self._read = [0.0] * len(self.layers)
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(functools.partial(self._note, index))

    def _note(self, index: int, layer: nn.Module, inputs: Any) -> None:
        self._read[index] = self._value(layer)

    def compare(self, run: offbeat.Run) -> None:
        """Look at them between backward and the step."""
        self.under_feet |= [self._value(layer) for layer in self.layers] != self._read
        run.synchronize()
        newest = [self._value(layer) for layer in self.layers]
        self.corrected |= newest != self._read
        self.torn |= len(set(newest)) > 1

    @staticmethod
    def _value(layer: nn.Module) -> float:
        return float(layer.weight.detach().double().sum())  # type: ignore[operator]


def dies_half_way(folder: Path, policy: Policy, shards: int) -> tuple[float, list[WorkerStatus], bool, Readings]:
    """Rank 1 announces a contribution, and dies when blocks with it have come back to others that compute."""
    serve(folder, shards)
    with offbeat.init(plan(policy), timeout=TIMEOUT) as run:
        counter = BlockCounter(run)
        readings = Readings(counter.model.layers)  # type: ignore[arg-type]
        for step in range(STEPS):
            if run.rank == 1 and step == 12:
                run.synchronize()  # of the step before
                die_with_the_last_block(run)
                counter.step(10.0)
            counter.backward()
            readings.compare(run)
            counter.optimizer.step()
            counter.optimizer.zero_grad()
        run.settle()
        ahead = run._session.models.synchronizers[0]._gradients._return is not None  # type: ignore[attr-defined]
        readings.layers = nn.ModuleList()  # which cannot be handed on
        return counter.count, look(run), ahead, readings


def die_with_the_last_block(run: offbeat.Run) -> None:
    """Once all but one block of the next contribution have come back with it, this worker is gone."""
    server = run._session.server
    assert server is not None
    client, hear, push = server.client, server.client.hear, server.client._models._push_block
    last = max(client.state(0).shards.index(shard) for shard in set(client.state(0).shards))

    def push_but_one(state: ModelState, block: int, part: Part, *, again: bool = False) -> None:
        if block != last:
            push(state, block, part, again=again)

    def hear_and_die(shard: int, message: Any) -> None:
        hear(shard, message)
        if client.state(0).missing == {last}:
            kill(os.getpid())

    client._models._push_block, client.hear = push_but_one, hear_and_die  # type: ignore[method-assign]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "shards"), [(BSP(), 1), (BSP(), 2), pytest.param(ASP(), 1, marks=pytest.mark.slow)], ids=str
)
def test_what_is_given_again_lands_behind_backward(tmp_path: Path, policy: Policy, shards: int) -> None:
    """Blocks with half a contribution are there before the next forward pass, which reads them; and then without it."""
    (count, seen, ahead, one), _, (other, _, _, two) = run_workers(
        3, dies_half_way, tmp_path, policy, shards, faulty=1, timeout_s=110
    )
    assert ahead
    assert not one.under_feet
    assert not two.under_feet
    assert count == other, "all have the same parameters after settle, in all elements"
    assert (seen[1].phase, seen[1].applied, seen[1].lost) == ("gone", 12, 1)
    if policy == BSP():
        assert count == STEPS
        assert one.corrected or two.corrected, "somebody has read what was withdrawn"
        torn = one.torn or two.torn
        assert not torn, "between backward and the step all are of one step"


def server_dies(folder: Path, policy: Policy, shards: int, at: int) -> tuple[float, int, bool, WorkerStatus]:
    """Rank 0 kills a shard when blocks of the contribution at hand are pushed."""
    keepers = serve(folder, shards, snapshots=str(folder / "server"), every=3, restarts=5)
    hits, again = 0, False
    with offbeat.init(plan(policy, patience_s=90.0), timeout=TIMEOUT, run_dir=folder) as run:
        counter = BlockCounter(run)
        for step in range(2 * STEPS):
            counter.backward()
            if keepers and step == at:
                assert pushed_early(run), "the fault hits"
                wait_for_snapshot(folder / "server")
                os.kill(kept(keepers[-1]), signal.SIGKILL)
                hits += 1
            counter.optimizer.step()
            counter.optimizer.zero_grad()
        counter.backward()
        again = pushed_early(run) > 0
        counter.optimizer.step()
        run.settle()
        return counter.count, hits, again, look(run)[run.rank]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "shards"), [(BSP(), 1), pytest.param(ASP(), 2, marks=pytest.mark.slow), (BSP(), 2)], ids=str
)
def test_a_server_that_dies_meanwhile_goes_on(tmp_path: Path, policy: Policy, shards: int) -> None:
    results = run_workers(2, server_dies, tmp_path, policy, shards, 14, timeout_s=290)
    (count, hits, again, seen), (other, _, other_again, _) = results
    assert hits == 1
    assert count == other, "all elements agree, on all workers"
    assert again, "blocks are pushed early afterwards, too"
    assert other_again
    if policy == BSP():
        assert count == seen.applied
    assert seen.applied + seen.dropped + seen.lost == 2 * STEPS + 1, "each counts, or is reported"


# -- with data ---------------------------------------------------------------------------------------------------------


def recorded_run(folder: Path, policy: Policy) -> int:
    """Steps with a history, in which a worker asks something and parameters are read."""
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, 2, history=str(folder / "history"))
    with offbeat.init(plan(policy), timeout=TIMEOUT) as run:
        counter, with_early = BlockCounter(run), 0
        for step in range(STEPS):
            counter.backward()
            with_early += pushed_early(run) > 0
            counter.optimizer.step()
            counter.optimizer.zero_grad()
            if step % 5 == 4:
                run.mean(1.0)
        run.settle()
        return with_early


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", [BSP(), SSP(2), pytest.param(RoundRobin(), marks=pytest.mark.slow)], ids=str)
def test_the_history_of_such_a_run_holds(tmp_path: Path, policy: Policy) -> None:
    with_early = run_workers(2, recorded_run, tmp_path, policy, timeout_s=110)
    # Who has asked waits for its grant once.
    assert policy == RoundRobin() or min(with_early) >= STEPS - 7 - 2
    result = recorded(tmp_path)
    assert result.holds, ended(result)
    assert (result.applied, result.lost, result.pending, result.twice) == (2 * STEPS, 0, 0, 0)
    assert result.checked == {1, 2, 3}
    assert result.compared >= (STEPS if policy == BSP() else 2)
    assert not result.notes, "what was decided was decided again"


def resumed(first: int) -> bool:
    """Steps, or so many of them, and the rest in another run that begins with another model; whether bits are equal."""

    def begin(seed: int) -> tuple[offbeat.Run, nn.Module, Callable[[int, int], int]]:
        net = network()
        torch.manual_seed(seed)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        run = offbeat.init(plan())
        replica, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))

        def train(begin: int, end: int) -> int:
            with_early = 0
            for step in range(begin, end):
                generator = torch.Generator().manual_seed(100 * step + run.rank)
                replica(torch.randn(5, 64, generator=generator)).square().mean().backward()
                with_early += pushed_early(run) > 0
                optimizer.step()
                optimizer.zero_grad()
            return with_early

        return run, net, train

    last = 2 * STEPS
    run, net, train = begin(0)
    assert train(0, last) == last - 7
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    run.close()
    run, net, train = begin(0)
    assert train(0, first) == first - 7
    checkpoint = {"model": {k: v.clone() for k, v in net.state_dict().items()}, "run": run.state_dict()}
    run.close()
    run, net, train = begin(1)
    net.load_state_dict(checkpoint["model"])
    run.load_state_dict(checkpoint["run"])
    assert train(first, last) == last - first - 7, "the order is learnt anew"
    result = net.state_dict()
    run.close()
    return all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not_stopped() -> None:
    assert run_workers(2, resumed, 12, timeout_s=110) == [True, True]


class Sleeper(nn.Module):
    """A model that computes for a while before it reads its last parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        time.sleep(_SLEPT_S)
        y: torch.Tensor = self.last(x)
        return y


def computing_times() -> list[float | None]:
    """What a worker says of how long it has computed, step by step."""
    net, said = Sleeper(), list[float | None]()
    with offbeat.init(plan()) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        server = run._session.server
        assert server is not None
        exchange = server.client.exchange

        def listen(*arguments: Any, about: ContributionInfo, **others: Any) -> ServerRequest[PulledParameters]:
            said.append(about.computing_s)
            return exchange(*arguments, about=about, **others)

        server.client.exchange = listen  # type: ignore[method-assign]
        for _ in range(10):
            replica(torch.ones(5, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return said


@pytest.mark.timeout(60)
def test_what_is_computed_while_parameters_come_counts() -> None:
    """Only then: else the server sees by itself how long a worker has computed."""
    for said in run_workers(2, computing_times):
        assert said[:7] == [None] * 7
        assert all(computing_s is not None and computing_s >= _SLEPT_S for computing_s in said[7:])


def swapped_within_a_forward_pass() -> tuple[bool, float, str]:
    """Another thread has the policy swapped while a forward pass reads what comes back; whether it left that alone."""
    with offbeat.init(plan()) as run:
        counter, is_under_way = BlockCounter(run), list[bool]()
        for step in range(STEPS):
            if run.rank == 0 and step == 12:
                sync: Any = run._session.models.synchronizers[0]._gradients

                def swap(layer: nn.Module, inputs: Any, sync: Any = sync) -> None:
                    before = sync._flight
                    thread = threading.Thread(target=run.swap, kwargs={"sync": SSP(2)})
                    thread.start()
                    thread.join()
                    is_under_way.append(before is not None and sync._flight is before)

                hook = counter.model.get_submodule("layers.0").register_forward_pre_hook(swap)
                counter.backward()
                hook.remove()
            else:
                counter.backward()
            counter.optimizer.step()
            counter.optimizer.zero_grad()
        run.settle()
        return all(is_under_way), counter.count, repr(run.plan.sync)


@pytest.mark.timeout(60)
def test_a_swap_leaves_what_comes_back_to_the_forward_pass() -> None:
    (left, count, policy), (_, other, _) = run_workers(2, swapped_within_a_forward_pass)
    assert left
    assert count == other
    assert policy == "SSP(bound=2)"


def with_leases(schedules: bool) -> tuple[list[int], bool]:
    """The samples that this worker has computed, out of data that the server leases."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    data = TensorDataset(torch.arange(400))
    seen: list[int] = []
    with offbeat.init(plan(early=schedules)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=10, shuffle=True))
        for (numbers,) in loader:
            seen += numbers.tolist()
            replica(numbers.float().unsqueeze(1).expand(-1, 64) / 400).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ahead = run._session.models.synchronizers[0]._gradients._return is not None  # type: ignore[attr-defined]
    return seen, ahead


@pytest.mark.timeout(120)
def test_each_sample_is_computed_once() -> None:
    (one, ahead), (other, _) = run_workers(2, with_leases, True, timeout_s=55)
    assert ahead
    assert sorted(one + other) == list(range(400))
