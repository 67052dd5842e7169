"""What a codec has not sent is not lost: updates and residuals add up to the gradients, whatever is swapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import ModelError
from offbeat.fabric import Elastic, ParameterServer
from offbeat.sync import BSP, LocalSGD
from offbeat.testing import check_codec
from tests.engine import grid_codec
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

WORLD, NUMEL = 2, 5


class Trained:
    """A model whose gradients are known, and are no multiples of the grid; steps of 1 add them up."""

    def __init__(self, run: offbeat.Run) -> None:
        self.run = run
        self.model = nn.Linear(NUMEL, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.replica, self.optimizer = run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.given = torch.zeros(NUMEL)

    def step(self) -> None:
        """Make one; the gradient is this worker's own."""
        gradient = torch.arange(1.0, NUMEL + 1) * (5 + 4 * self.run.rank) / 256
        self.given += gradient
        self.replica(gradient.unsqueeze(0)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def moved(self) -> torch.Tensor:
        """The sum of all updates."""
        return -self.model.weight.detach().flatten()

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """This worker's residuals, by kind."""
        state = self.run._session.models.prepared[0].codec_state.state_dict()
        return {kind: state[kind]["weight"]["residual"].clone() for kind in ("gradients", "deltas") if state.get(kind)}


def swap(fabric_swaps: bool, sync_in_between: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients by all-reduce or from a server, to local steps and back, or to all-reduce."""
    grid_codec.known()
    codec = grid_codec.feedback()
    fabric = ParameterServer(block_bytes=4096)
    plan = offbeat.Plan(codec=codec, fabric=fabric) if fabric_swaps else offbeat.Plan(codec=codec)
    with offbeat.init(plan) as run:
        trained = Trained(run)
        for _ in range(3):
            trained.step()
        if fabric_swaps:
            if run.rank == 0:
                run.swap(offbeat.Plan(codec=codec))
            while run.plan.is_served:
                trained.step()
        for policy in (LocalSGD(2), BSP()) if sync_in_between else ():
            if run.rank == 0:
                run.swap(sync=policy)
            while run.plan.sync != policy:
                trained.step()
            for _ in range(3):
                trained.step()
        for _ in range(3):
            trained.step()
        return trained.moved, trained.given, trained.kept


def test_the_codec_of_these_tests_is_one() -> None:
    for dtype in ("bf16", "int8"):
        check_codec(grid_codec.feedback(dtype), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("fabric_swaps", "sync_in_between"), [(False, True), (True, False), (True, True)], ids=["steps", "fabric", "both"]
)
def test_updates_and_residuals_are_the_gradients(fabric_swaps: bool, sync_in_between: bool) -> None:
    results = run_workers(WORLD, swap, fabric_swaps, sync_in_between, timeout_s=100)
    moved = [one for one, _, _ in results]
    assert torch.equal(*moved)
    given = sum((one for _, one, _ in results), torch.zeros(NUMEL)) / WORLD
    kept = [tensor for _, _, one in results for tensor in one.values()]
    assert len(kept) == WORLD * (1 + sync_in_between), "the codec has kept something of each kind"
    assert any(bool(tensor.any()) for tensor in kept)
    torch.testing.assert_close(moved[0] + sum(kept, torch.zeros(NUMEL)), given, rtol=0, atol=1e-6)


def count(sync: str, dtype: Literal["bf16", "int8"]) -> torch.Tensor:
    policy = BSP() if sync == "BSP" else LocalSGD(2)
    with offbeat.init(offbeat.Plan(codec=grid_codec.feedback(dtype), sync=policy)) as run:
        trained = Trained(run)
        for _ in range(4):
            trained.step()
        return trained.moved


@pytest.mark.parametrize("sync", ["BSP", "LocalSGD"])
def test_integers_on_the_way_are_counted_beside_them(sync: str) -> None:
    """The weights of the workers and the numbers of their batches are no integers of 8 bits."""
    expected = run_workers(WORLD, count, sync, "bf16")
    assert all(torch.equal(one, expected[0]) for one in run_workers(WORLD, count, sync, "int8"))


def come() -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two train, and a third joins: what it begins with."""
    grid_codec.known()
    with offbeat.init(offbeat.Plan(codec=grid_codec.feedback(), fabric=Elastic())) as run:
        trained = Trained(run)
        begins_with = trained.kept
        members = run._session.context.group
        assert members is not None
        while len(members.members) < WORLD + 1:
            trained.step()
        for _ in range(2):
            trained.step()
        return run.rank, begins_with, trained.kept


@pytest.mark.slow
def test_who_joins_has_not_kept_what_another_has_not_sent() -> None:
    results = run_workers(WORLD, come, newcomers=1, timeout_s=100)
    rank, begins_with, kept = results[-1]
    assert rank == WORLD
    assert not any(bool(tensor.any()) for tensor in begins_with.values())
    assert kept["gradients"].any(), "it keeps its own from then on"


def save(folder: Path) -> dict[str, torch.Tensor]:
    with offbeat.init(offbeat.Plan(codec=grid_codec.feedback())) as run:
        trained = Trained(run)
        for _ in range(3):
            trained.step()
        checkpoints = offbeat.Checkpoints(run, folder, model=trained.model, optimizer=trained.optimizer)
        checkpoints.save()
        return trained.kept


def load(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    told = listen()
    grid_codec.known()
    with offbeat.init(offbeat.Plan(codec=grid_codec.feedback())) as run:
        trained = Trained(run)
        checkpoints = offbeat.Checkpoints(run, folder, model=trained.model, optimizer=trained.optimizer)
        assert checkpoints.load()
        return trained.kept, [text for text in told if "codec" in text]


def test_each_worker_goes_on_with_its_own(tmp_path: Path) -> None:
    saved = [one["gradients"] for one in run_workers(WORLD, save, tmp_path)]
    assert not torch.equal(*saved)
    for (kept, told), own in zip(run_workers(WORLD, load, tmp_path), saved, strict=True):
        assert torch.equal(kept["gradients"], own)
        assert told == []


@pytest.mark.slow
def test_with_more_or_fewer_workers_what_is_missing_is_said(tmp_path: Path) -> None:
    saved = [one["gradients"] for one in run_workers(WORLD, save, tmp_path)]
    alone, told = run_workers(1, load, tmp_path)[0]
    torch.testing.assert_close(alone["gradients"], saved[0] * WORLD)  # its gradients are not halved any more
    assert len(told) == 1
    assert "rank 1" in told[0]
    three = run_workers(WORLD + 1, load, tmp_path)
    assert not any(bool(tensor.any()) for tensor in three[2][0].values())
    assert "Rank 2 begins with no codec state" in three[0][1][0]
    (tmp_path / "run-000003.rank1-codec.pt").unlink()
    _, (kept, told) = run_workers(WORLD, load, tmp_path)
    assert "Rank 1 begins with no codec state" in told[0]
    assert not any(bool(tensor.any()) for tensor in kept.values())


def scaled(enabled: bool, codec: Any) -> str:
    net = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    with offbeat.init(offbeat.Plan(codec=codec)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scaler.scale(replica(torch.ones(1, 4)).sum()).backward()
        try:
            scaler.step(optimizer)
        except ModelError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_scaled_gradients_have_no_residual() -> None:
    feedback = offbeat.ErrorFeedback(offbeat.TopK(0.5))
    said = run_workers(WORLD, scaled, True, feedback)
    assert all("Cannot train with GradScaler and ErrorFeedback(inner=TopK(ratio=0.5))" in text for text in said)
    for enabled, codec in ((False, feedback), (True, offbeat.Cast()), (True, offbeat.ErrorReset(every=2))):
        assert run_workers(WORLD, scaled, enabled, codec) == [""] * WORLD
