"""Training with privacy: what leaves a worker is clipped and noised, and counted over checkpoints."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import GRBS, ErrorFeedback, GaussianMechanism, LocalSGD, ParameterServer, Plan
from offbeat.contribution_hooks import register_contribution_hook
from offbeat.robust import ZenoPS
from tests.cli.commands import offbeat as command
from tests.cli.commands import start
from tests.training.test_validators import SCRIPT
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

WORLD, STEPS, NUMEL = 2, 6, 3000
PRIVACY = GaussianMechanism(max_norm=1.0, noise=2.0)
PLANS = [
    Plan(codec=ErrorFeedback(GRBS(4, 16)), fabric=ParameterServer(block_bytes=4096), privacy=PRIVACY),
    Plan(sync=LocalSGD(2), fabric=ParameterServer(block_bytes=4096), privacy=PRIVACY),
]


class Seen:
    """Adds up what is about to be encoded, as whoever decodes it would see it."""

    def __init__(self) -> None:
        self.contributions: list[torch.Tensor] = []

    def before_encode(self, vectors: Any, what: Any, step: int, share: float) -> None:
        self.contributions.append(torch.cat(list(vectors)).double())

    def before_push(self, blocks: Any, what: Any, step: int) -> Any:
        return blocks


def train(folder: str, plan: Plan, steps: int) -> dict[str, Any]:
    """Push long gradients with a learning rate of 1, from a checkpoint if there is one."""
    rank, said, seen = int(os.environ["RANK"]), listen(), Seen()
    model = nn.Linear(NUMEL, 1, bias=False)
    nn.init.zeros_(model.weight)
    with register_contribution_hook(seen), offbeat.init(plan, seed=3, timeout=timedelta(seconds=5)) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        checkpoints = offbeat.Checkpoints(run, folder, model=model)
        resumed, began = checkpoints.load(), run.epsilon
        before = model.weight.detach().clone()
        gradient = 5 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
        for _ in range(steps):
            (model.weight.flatten() * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        state = run._session.models.prepared[0].codec_state.state_dict().get("gradients")
        kept = torch.zeros(NUMEL) if not state else state["weight"]["residual"].clone()
        checkpoints.save()
        checkpoints.wait()
        run.settle()
        spent = run.epsilon
    return {
        "moved": (before - model.weight.detach()).flatten().double(),
        "seen": seen.contributions,
        "kept": kept.double(),
        "resumed": resumed,
        "epsilons": (began, spent),
        "said": [text for text in said if text.startswith("Privacy")],
    }


def train_each(folder: str) -> list[dict[str, Any]]:
    return [train(f"{folder}/{number}", plan, STEPS) for number, plan in enumerate(PLANS)]


@pytest.mark.slow
def test_what_leaves_a_worker_is_noise_and_little_else(tmp_path: Path) -> None:
    """A server under BSP with residuals, and under local steps; then resumed, which goes on counting."""
    fed, local = zip(*run_workers(WORLD, train_each, str(tmp_path)), strict=True)
    for results, count in ((fed, STEPS), (local, STEPS // 2)):
        seen = [one["seen"] for one in results]
        assert all(not one.any() for them in seen for one in them[count:]), "of no steps, which spends nothing"
        seen = [them[:count] for them in seen]
        deviation = torch.cat([contribution for one in seen for contribution in one]).std()
        assert float(deviation) == pytest.approx(2.0, rel=0.02)
        (first, *_), (other, *_) = seen
        assert abs(float(torch.corrcoef(torch.stack((first, other, seen[0][1])))[0, 1:].abs().max())) < 0.1
        whole = sum((sum(one["seen"][:count]) - one["kept"] for one in results), torch.zeros(NUMEL)) / WORLD
        torch.testing.assert_close(results[0]["moved"], whole, rtol=1e-4, atol=1e-4)
        spent = PRIVACY.epsilon(count)
        for rank, one in enumerate(results):
            assert one["epsilons"] == (0.0, spent)
            text = f"Privacy: rank {rank} has spent epsilon {spent:.3g} at delta 1e-05 in {count} contributions."
            assert one["said"] == [text]
    assert all(bool(one["kept"].any()) for one in fed), "there was a residual"

    for rank, one in enumerate(run_workers(WORLD, train, f"{tmp_path}/0", PLANS[0], 2)):
        assert one["resumed"]
        assert one["epsilons"] == (PRIVACY.epsilon(STEPS), PRIVACY.epsilon(STEPS + 2))
        assert f"rank {rank} has spent" in one["said"][0]
        assert f"in {STEPS + 2} contributions" in one["said"][0]


def swap(folder: str) -> tuple[float, float]:
    """Count on through a swap of the policy."""
    model = nn.Linear(4, 1)
    with offbeat.init(PLANS[0], timeout=timedelta(seconds=5)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(6):
            if step == 3:
                run.settle()
                if run.rank == 0:
                    run.swap(sync=offbeat.ASP())
                run.settle()
            replica(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        assert run.plan.sync == offbeat.ASP()
        return run.epsilon, PRIVACY.epsilon(6)


def test_a_swap_counts_on(tmp_path: Path) -> None:
    for spent, expected in run_workers(WORLD, swap, str(tmp_path)):
        assert spent == expected


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_judged_run_is_proved(tmp_path: Path) -> None:
    """Noised contributions are accepted by a norm, the run says at its end what they spent, and the audit holds."""
    plan = Plan(sync=LocalSGD(2), fabric=ParameterServer(), validator=ZenoPS(), privacy=PRIVACY)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    with start("run", "-n", 2, "--servers", 1, "--plan", "plan.toml", "--run-dir", "job", "--history",
               "train.py", folder=tmp_path) as job:  # fmt: skip
        try:
            code, said = command("run", "--validator", "--job", "job", "train.py", folder=tmp_path, timeout_s=100)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (job.returncode, code) == (0, 0), (output, said)
    assert "Privacy: rank 0 has spent epsilon" in output
    assert "Privacy" not in said, "a validator is trusted, and adds no noise"
    code, proof = command("verify-run", "job/history", folder=tmp_path)
    assert code == 0, proof
    found = re.search(r"(\d+) applied.* updates judged, (\d+) contributions? rejected", proof)
    assert found is not None, proof
    assert int(found[2]) < int(found[1]) / 2, "without knowing of noise all are rejected"
