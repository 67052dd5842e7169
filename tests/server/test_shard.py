"""Workers and a shard in one process."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.errors import DisagreementError, ModelError, NetworkError, PeerError
from offbeat.layout import arrange
from offbeat.protocol.data_leases import RegisterLoader
from offbeat.protocol.messages import pack
from offbeat.protocol.optimizer_spec import OptimizerSpec
from offbeat.protocol.shards import PushDone
from offbeat.protocol.training import ContributionInfo, DensePayload, PushBlock
from offbeat.server import optimizers
from offbeat.server.aggregator import BlockContribution, WeightedMean
from offbeat.server.blocks import Block, ParameterSlice, cut, deal
from offbeat.server.optimizers import describe, hyper
from offbeat.server.pushed_block import PushedBlock, body_of
from offbeat.server.shard.parameter_store import ParameterStore
from offbeat.sync import ASP, BSP, SSP, Action, Drop, KSync, LocalSGD, Policy, Release, RoundRobin, State
from offbeat.tensors import bytes_of
from tests.server.in_process import Together, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from offbeat.protocol.messages import FromShard
    from offbeat.server.client.client import Client
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import PulledParameters

SOON = timedelta(seconds=10)


class Worker:
    """Trains two vectors toward a target, with gradients made by hand.

    Args:
        plan: as TOML; the shard of `Together` reads none.
        make: its optimizer, of its parameters; SGD with momentum if None.
        shards: over how many its blocks are dealt.
    """

    def __init__(
        self,
        client: Client,
        lr: float = 0.5,
        plan: str = "p",
        make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] | None = None,
        shards: int = 1,
    ) -> None:
        torch.manual_seed(client.rank)
        self.client = client
        self.parameters = {"a": torch.nn.Parameter(torch.randn(30)), "b": torch.nn.Parameter(torch.randn(70))}
        make = make or functools.partial(torch.optim.SGD, lr=lr, momentum=0.5)
        self.optimizer = make(self.parameters.values())
        layout = arrange(self.parameters, bucket_bytes=1 << 20)
        self.values = torch.cat([self.parameters["b"].data, self.parameters["a"].data])
        self.blocks = cut(layout, 64)
        names = {id(p): name for name, p in self.parameters.items()}
        opening = client.open(
            0,
            plan=plan,
            layout=layout.digest,
            blocks=self.blocks,
            shards=deal(self.blocks, shards),
            values=[self.values[b.offset : b.offset + b.numel] for b in self.blocks],
            optimizer=describe(self.optimizer, names),
        )
        assert opening.wait(SOON)

    def step(self, gradient: torch.Tensor, weight: float = 1.0) -> int:
        return self.bring(gradient, weight).staleness

    def about(self, weight: float, **also: Any) -> ContributionInfo:
        return ContributionInfo(weight, hyper(self.optimizer), **also)

    def bring(
        self, gradient: torch.Tensor, weight: float = 1.0, used: tuple[tuple[int, int], ...] = (), step: int = 0
    ) -> PulledParameters:
        parts = [gradient[b.offset : b.offset + b.numel].clone() for b in self.blocks]
        exchange = self.client.exchange(0, parts, about=self.about(weight, used=used, step=step))
        assert exchange.wait(SOON)
        return exchange.value

    def push_but_last(self, gradient: torch.Tensor) -> None:
        """Bring all but the last block of a contribution, and wait until updates with the others have come back."""
        models = self.client._models
        push, models._push = models._push, self._push_but_last  # type: ignore[method-assign]
        parts = [gradient[b.offset : b.offset + b.numel].clone() for b in self.blocks]
        self.client.exchange(0, parts, about=ContributionInfo(1.0, hyper(self.optimizer)))
        state, deadline_s = self.client.state(0), time.monotonic() + SOON.total_seconds()
        while state.missing != {len(self.blocks) - 1}:
            assert time.monotonic() < deadline_s, "they have not come back"
            time.sleep(0.001)
        models._push = push  # type: ignore[method-assign]

    def _push_but_last(self, state: ModelState, clock: int) -> None:
        assert state.parts is not None
        state.await_all()
        for block, part in list(state.parts.items())[:-1]:
            link = self.client._links[state.shards[block]]
            link.send(pack(PushBlock(0, clock, block, DensePayload())), bytes_of(body_of(part)))


@pytest.fixture
def together() -> Iterator[Callable[..., Together]]:
    made: list[Together] = []

    def make(policy: Policy, world: int, shards: int = 1) -> Together:
        made.append(Together(policy, world, shards=shards))
        return made[-1]

    yield make
    for one in made:
        one.close()


def workers(job: Together) -> list[Worker]:
    with ThreadPoolExecutor(len(job.clients)) as pool:
        return list(pool.map(functools.partial(Worker, shards=len(job.others) + 1), job.clients))


@pytest.mark.parametrize("kind", optimizers._CLASSES.values(), ids=lambda kind: kind.__name__)
def test_every_optimizer_that_can_be_held_is_taken(kind: Any) -> None:
    """With what torch itself puts into its groups, and what schedulers change there."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    made = kind([{"params": [parameter], "lr": 0.2}], lr=0.1)
    spec = describe(made, {id(parameter): "a"})
    optimizers.check_spec(spec)
    torch.optim.lr_scheduler.StepLR(made, 1)
    made.param_groups[0]["lr"] = 0.05
    optimizers.check_hyper(spec, hyper(made), 0)
    held = optimizers.hold(spec, [("a", torch.zeros(3))])
    assert held is not None
    held.set_hyper(hyper(made), 0.5)
    assert held.optimizer.param_groups[0]["lr"] == 0.025


def test_an_optimizer_is_not_made_another_by_a_flag() -> None:
    spec = OptimizerSpec("AdamW", ({"lr": 0.1, "decoupled_weight_decay": False},), (("a",),))
    with pytest.raises(PeerError, match="Cannot make AdamW from these hyper-parameters"):
        optimizers.check_spec(spec)


def test_all_begin_with_the_first_ones_parameters(together: Callable[[Policy, int], Together]) -> None:
    job = together(BSP(), 3)
    values = [worker.values for worker in workers(job)]
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bsp_is_the_local_optimizer_on_the_mean(together: Callable[[Policy, int], Together], world: int) -> None:
    job = together(BSP(), world)
    team = workers(job)
    reference = torch.nn.Parameter(team[0].values.clone())
    optimizer = torch.optim.SGD([reference], lr=0.5, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradients = [torch.randn(100, generator=generator) for _ in team]
        with ThreadPoolExecutor(world) as pool:
            assert set(pool.map(Worker.step, team, gradients)) == {0}
        reference.grad = sum((g * (1 / world) for g in gradients[1:]), gradients[0] * (1 / world))
        optimizer.step()
        for worker in team:
            assert torch.equal(worker.values, reference.detach())


def test_asp_lets_one_worker_run_ahead(together: Callable[[Policy, int], Together]) -> None:
    job = together(ASP(), 2)
    fast, slow = workers(job)
    before = fast.values.clone()
    assert [fast.step(torch.ones(100)) for _ in range(4)] == [0, 0, 0, 0]
    assert slow.step(torch.ones(100)) == 4
    # Each is half a round: lr 0.25, momentum 0.5.
    moved = before - slow.values
    velocity, expected = 0.0, 0.0
    for _ in range(5):
        velocity = 0.5 * velocity + 1
        expected += 0.25 * velocity
    assert torch.allclose(moved, torch.full((100,), expected))


def test_who_comes_late_is_dropped_and_goes_on(together: Callable[[Policy, int], Together]) -> None:
    """It was never granted, so it pushes nothing, and its next contribution is welcome."""
    job = together(KSync(1), 2)
    fast, slow = workers(job)
    before = fast.values.clone()
    fast.step(torch.ones(100))
    slow.step(torch.full((100,), 1000.0))
    assert torch.equal(slow.values, fast.values), "as if it had never been"
    slow.step(torch.ones(100))
    moved = before - slow.values
    assert torch.allclose(moved, torch.full((100,), 0.5 * (1 + 1.5)))


@pytest.mark.parametrize("policy", [BSP(), ASP()], ids=str)
def test_what_was_computed_from_samples_that_are_dealt_again_is_reported(
    together: Callable[[Policy, int], Together], policy: Policy
) -> None:
    """As by a server that went on from a snapshot, and knows nothing of the leases that were dealt out after it."""
    job = together(policy, 1)
    (worker,) = workers(job)
    told: list[str] = []
    worker.client._tell = lambda text, waits: told.append(text)
    queue = worker.client.register_loader(
        RegisterLoader(loader=0, plan="p", world=1, samples=100, seed=0, shuffle=True, drop_last=False, batch=4)
    )
    assert worker.client.draw(queue).wait(SOON)
    before = worker.values.clone()
    assert not worker.bring(torch.full((100,), 1000.0), 4.0, used=((0, 99),)).is_counted
    assert torch.equal(worker.values, before)
    lease = next(iter(queue.held))
    assert worker.bring(torch.ones(100), 4.0, used=((0, lease),)).is_counted
    assert not torch.equal(worker.values, before)
    look = worker.client.look()
    assert look.wait(SOON)
    (seen,) = look.value[0].workers
    assert (seen.applied, seen.dropped) == (1, 1)
    assert told == [
        "Contribution 0 of rank 0 (4 samples) is dropped: the samples that it was computed from are leased again."
    ]


def test_who_brings_other_data_is_refused_at_once(
    together: Callable[[Policy, int], Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = together(ASP(), 2)
    end, said = job.ends[1], list[str]()
    send = end.send

    def note(metadata: bytes, *rest: Any) -> None:
        said.append(kind_of(metadata))
        send(metadata, *rest)

    monkeypatch.setattr(end, "send", note)
    about = RegisterLoader(loader=0, plan="p", world=2, samples=100, seed=0, shuffle=True, drop_last=False, batch=4)
    team = workers(job)
    team[0].client.register_loader(about)
    queue = team[1].client.register_loader(msgspec.structs.replace(about, batch=8))
    with pytest.raises(DisagreementError, match="its loader has batch=8, that of the others 4"):
        team[1].client.draw(queue).wait(SOON)
    assert said[-1] == "Refused", "else it would come back with the same"


@pytest.mark.parametrize(
    ("policy", "grants"), [(BSP(), 0), (ASP(), 0), (SSP(1), 0), (KSync(2), 5), (RoundRobin(), 5)], ids=str
)
def test_who_need_not_wait_is_not_granted(
    together: Callable[[Policy, int], Together], policy: Policy, grants: int
) -> None:
    """One round trip less in each step: announced and pushed together."""
    job = together(policy, 2)
    team = workers(job)
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(Worker.step, team, [torch.ones(100)] * 2))
    for end in job.ends:
        assert end.took["Announce"] == 5
        assert end.other.took["Granted"] == grants
        assert end.took["PushBlock"] == 5 * len(team[0].blocks)


@pytest.mark.parametrize("refresh", [False, True])
def test_who_has_asked_goes_on(together: Callable[[Policy, int], Together], refresh: bool) -> None:
    """Without new parameters its next contribution waits for a grant: another shard may not know of it yet."""
    job = together(BSP(), 2)
    team = workers(job)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            assert list(pool.map(Worker.step, team, [torch.ones(100)] * 2)) == [0, 0]
            assert all(pool.map(lambda client: client.ask("how many", [1.0], refresh=refresh).wait(SOON), job.clients))
        assert list(pool.map(Worker.step, team, [torch.ones(100)] * 2)) == [0, 0]
    assert [end.other.took["Granted"] for end in job.ends] == [0, 0] if refresh else [2, 2]


def test_who_has_not_opened_the_model_yet_is_asked_too(together: Callable[[Policy, int], Together]) -> None:
    """Those who are early have the parameters of the first one, and could ask before the last one is there."""
    job = together(BSP(), 3)
    early = [Worker(client) for client in job.clients[1:]]
    asked = [worker.client.ask("how many", [1.0]) for worker in early]
    assert job.clients[1].look().wait(SOON)  # what was asked before has been heard
    assert not any(one.done() for one in asked)
    Worker(job.clients[0])
    asked.append(job.clients[0].ask("how many", [10.0]))
    assert all(one.wait(SOON) for one in asked)
    assert [one.value.numbers for one in asked] == [(12.0,)] * 3


# -- a worker is lost in the middle of a push --------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_half_a_contribution_is_taken_out_of_every_block(together: Callable[..., Together], shards: int) -> None:
    """And those who had been given it are given the blocks again: they end as if it had never been announced."""
    job = together(BSP(), 3, shards)
    team = workers(job)
    victim = team[2]
    reference = torch.nn.Parameter(team[0].values.clone())
    optimizer = torch.optim.SGD([reference], lr=0.5, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    with ThreadPoolExecutor(3) as pool:
        for step in range(4):
            gradients = [torch.randn(100, generator=generator) for _ in team]
            if step == 2:
                steps = [pool.submit(Worker.step, worker, g) for worker, g in zip(team[:2], gradients, strict=False)]
                victim.push_but_last(torch.full((100,), 1000.0))
                assert not any(one.done() for one in steps), "they wait for the last block"
                team = team[:2]
                job.kill(2)
                assert [one.result() for one in steps] == [0, 0]
            else:
                assert set(pool.map(Worker.step, team, gradients)) == {0}
            brought = gradients[: len(team)]
            reference.grad = sum((g * (1 / len(team)) for g in brought[1:]), brought[0] * (1 / len(team)))
            optimizer.step()
            for worker in team:
                assert torch.equal(worker.values, reference.detach())
    (seen,) = [seen for scene in job.shard._coordinator.status(0.0) for seen in scene.workers if seen.worker == 2]  # type: ignore[union-attr]
    assert (seen.applied, seen.lost) == (2, 1)
    for shard in (job.shard, *job.others):
        assert not shard.model_shard(0)._scheduler._updates, "nothing is remembered any more"


@pytest.mark.parametrize("shards", [1, 2])
def test_without_order_the_others_have_gone_on_and_the_server_ends_without_it(
    together: Callable[..., Together], shards: int
) -> None:
    job = together(ASP(), 2, shards)
    goes_on, victim = workers(job)
    before = goes_on.values.clone()
    victim.push_but_last(torch.full((100,), 1000.0))
    goes_on.step(torch.ones(100))
    touched = (goes_on.values - before).abs() > 100
    assert 0 < touched.sum() < 100, "it has computed on half of it"
    job.kill(1)
    while job.shard._coordinator.status(0.0)[0].workers[1].phase != "gone":  # type: ignore[union-attr]
        time.sleep(0.001)
    for _ in range(20):  # longer than anything is kept
        goes_on.step(torch.zeros(100))
    # Half a round; then its momentum, in whole rounds, because it is alone.
    torch.testing.assert_close(before - goes_on.values, torch.full((100,), 0.25 + 0.5), rtol=1e-4, atol=1e-4)


def test_a_contribution_that_takes_very_long_counts_when_it_is_whole(together: Callable[..., Together]) -> None:
    """Meanwhile the server does not remember all that others bring."""
    job = together(ASP(), 2, 2)
    fast, slow = workers(job)
    before = fast.values.clone()
    slow.push_but_last(torch.full((100,), 8.0))
    for _ in range(30):
        fast.step(torch.zeros(100))
    schedulers = [shard.model_shard(0)._scheduler for shard in (job.shard, *job.others)]
    assert any(update.is_held for one in schedulers for update in one._updates), "it was taken out"
    assert all(len(one._undo_log.of(block)) <= 8 for one in schedulers for block in one._blocks)
    torch.testing.assert_close(fast.values, before, msg="as if it had not come")
    state = slow.client.state(0)
    last = len(slow.blocks) - 1
    assert state.parts is not None
    body = bytes_of(body_of(state.parts[last]))
    job.loop.call(slow.client._links[state.shards[last]].send, pack(PushBlock(0, 0, last, DensePayload())), body)
    assert state.request.wait(SOON)
    fast.step(torch.zeros(100))
    # Once as half a round, and once as its momentum.
    torch.testing.assert_close(before - fast.values, torch.full((100,), 0.25 * (8 + 4)))


@pytest.mark.parametrize("policy", [BSP(), SSP(1)], ids=str)
def test_a_worker_has_brought_what_it_pulled_although_word_of_it_comes_later(
    together: Callable[..., Together], policy: Policy
) -> None:
    """As from another shard that was stopped in between; else the others would seem to be ahead of it, and wait."""
    job = together(policy, 2, 2)
    (other,) = job.others
    late: list[PushDone] = []
    tell = other._tell_coordinator

    def tell_later(message: FromShard) -> None:
        if isinstance(message, PushDone):
            late.append(message)
        else:
            tell(message)

    other._tell_coordinator = tell_later  # type: ignore[method-assign]
    team = workers(job)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            list(pool.map(Worker.step, team, [torch.ones(100)] * 2))
        assert len(late) == 8, "word was late"
        for message in late:
            job.loop.call(tell, message)
        late.clear()
        list(pool.map(Worker.step, team, [torch.ones(100)] * 2))
    look = team[0].client.look()
    assert look.wait(SOON)
    assert [(seen.applied, seen.lead <= 1) for seen in look.value[0].workers] == [(5, True), (5, True)]


@dataclass(frozen=True)
class DropsOdd(ASP):
    """Drops every second contribution, when it may already be on its way."""

    @property
    def drops(self) -> bool:
        return True

    def decide(self, state: State) -> Sequence[Action]:
        odd = tuple(push for push in state.pending if push[1] % 2)
        return [Drop(odd), *map(Release, state.held)] if odd else super().decide(state)


def test_what_was_pushed_at_once_may_still_be_dropped(together: Callable[[Policy, int], Together]) -> None:
    job = together(DropsOdd(), 1)
    (worker,) = workers(job)
    before = worker.values.clone()
    for step in range(6):
        worker.step(torch.full((100,), 1000.0 if step % 2 else 1.0))
    assert job.ends[0].took["PushBlock"] == 6 * len(worker.blocks), "all were pushed"
    assert torch.allclose(before - worker.values, torch.full((100,), 0.5 * (1 + 1.5 + 1.75)))


def test_contributions_of_the_wrong_kind_are_refused(together: Callable[[Policy, int], Together]) -> None:
    job = together(LocalSGD(every=2, after=1), 1)
    (worker,) = workers(job)
    worker.step(torch.ones(100))
    with pytest.raises(PeerError, match=r"it is a gradient, and with LocalSGD.* that is a change"):
        worker.step(torch.ones(100))  # it should be a change


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_question_before_any_model_is_refused(together: Callable[[Policy, int], Together]) -> None:
    (client,) = together(BSP(), 1).clients
    with pytest.raises(ModelError, match="Cannot ask all workers for the mean"):
        client.ask("the mean", (1.0,)).wait(SOON)


def test_what_is_fetched_ends_when_nothing_can_come_any_more(together: Callable[[Policy, int], Together]) -> None:
    job = together(BSP(), 1)
    workers(job)
    both = threading.Event()
    job.loop.call(both.wait)  # so that no answer can come in between
    fetched = job.clients[0].fetch(0)
    job.loop.call(job.clients[0].fail, NetworkError("A shard is gone."))
    both.set()
    with pytest.raises(NetworkError, match="A shard is gone"):
        fetched.wait(SOON)


def test_state_of_another_optimizer_is_refused_and_what_is_put_replaces_what_was() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    spec = describe(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), {id(parameter): "a"})
    block = Block(0, 0, 0, "float32", 4, (ParameterSlice("a", 0, 3),))
    store = ParameterStore([block], spec, WeightedMean())
    ones = BlockContribution(0, 1.0, PushedBlock(DensePayload(), torch.ones(3)))
    groups = ({"lr": 0.1, "momentum": 0.9},)
    store.update(
        0,
        [ones],
        hyper=[{**spec.groups[0], **groups[0]}],
        rate=1.0,
    )
    ((name, key, momentum),) = store.state_of(0)
    assert (name, key, momentum.tolist()) == ("a", "momentum_buffer", [1.0] * 3)
    for other, value, words in (
        ("exp_avg", torch.ones(3), r"\[3\] float32"),
        ("momentum_buffer", torch.tensor(1.0), r"\[\] float32"),
        ("momentum_buffer", torch.ones(1), r"\[1\] float32"),
        ("momentum_buffer", torch.ones(3, dtype=torch.int64), r"\[3\] int64"),
    ):
        says = rf"Cannot take over {other} {words} of a: with SGD that is momentum_buffer \[D\] float32, .*; D is 3\."
        with pytest.raises(PeerError, match=says):
            store.set_state(0, "a", other, value)
    store.forget_state(0)
    assert store.state_of(0) == []
    store.set_state(0, "a", "momentum_buffer", torch.full((3,), 2.0))
    store.update(
        0,
        [ones],
        hyper=[{**spec.groups[0], **groups[0]}],
        rate=1.0,
    )
    assert store.state_of(0)[0][2].tolist() == pytest.approx([2.8] * 3)


def test_who_left_before_the_start_and_came_back_is_waited_for() -> None:
    one = PolicyRunner(BSP(), 2, lambda: 0.0)
    one.join(0)
    one.leave(0)
    assert one.world == 1
    one.join(0)
    assert one.world == 2
    assert one.start_if_all_are_here() == ()
    one.join(1)
    one.start_if_all_are_here()
    assert one.started
