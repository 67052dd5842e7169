"""Validators: processes on trusted data, beside which a server judges what workers bring."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import ASP, BSP, GRBS, Carry, ErrorFeedback, ErrorReset, LocalSGD, LookAhead, ParameterServer, Plan
from offbeat.audit import contributions, verify
from offbeat.errors import PlanError
from offbeat.robust import FLTrust, ZenoPlusPlus, ZenoPS, ZenoPSAsync
from tests.cli.commands import offbeat as command
from tests.cli.commands import start
from tests.training.server_jobs import serve
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.codec import Codec
    from offbeat.robust import Rule
    from offbeat.sync import Policy

pytestmark = pytest.mark.timeout(120)
WORLD, STEPS, LR = 3, 60, 0.1
SECRET = "v" * 32


class Trained(NamedTuple):
    """What became of one process's model.

    Args:
        accuracy: on samples of nobody.
        said: what people were told.
        ended: whether its script was ended, with exit code 0.
    """

    accuracy: float
    said: list[str]
    ended: bool


def model(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(20, 3)


def samples(seed: int, count: int) -> TensorDataset:
    """Which of three directions points most where a sample does."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    x = torch.randn(count, 20, generator=generator)
    return TensorDataset(x, (x @ truth.T).argmax(1))


def plan(policy: Policy, rule: Rule | None) -> Plan:
    return Plan(sync=policy, fabric=ParameterServer(), validator=rule)


def come(folder: str) -> int:
    """Find the server of the test, as a worker or, behind those that the job begins with, as a validator."""
    rank = int(os.environ["RANK"])
    if rank >= WORLD:
        del os.environ["OFFBEAT_STORE"], os.environ["OFFBEAT_STORE_PREFIX"]
        os.environ.update(OFFBEAT_ROLE="validator", OFFBEAT_VALIDATOR_TOKEN=SECRET)
    serve(Path(folder), validator_token=SECRET, history=str(Path(folder) / "history"))
    return rank


def train(folder: str, plan: Plan, liars: int, kills: int = -1, waits: int = -1) -> Trained:
    """The same script everywhere; a validator has its own data, of which a loop never ends.

    Args:
        liars: so many of the first workers turn their gradients round, and make them longer.
        kills: the rank of a validator that is killed in its tenth step.
        waits: that of one that does not come before.
    """
    said, rank, here = listen(), come(folder), Path(folder)
    while rank == waits and not (here / "killed").exists():
        time.sleep(0.05)
    net, ended = model(rank), False
    try:
        with offbeat.init(plan, seed=3, timeout=timedelta(seconds=5), history=here / "history") as run:
            assert run.is_validator == (rank >= WORLD)
            data = samples(100 + rank, 256 if run.is_validator else 32 * STEPS * WORLD)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            replica, optimizer, loader = run.prepare(net, optimizer, DataLoader(data, batch_size=32))
            for step, (x, y) in enumerate(loader):
                F.cross_entropy(replica(x), y).backward()
                if rank < liars:
                    for parameter in net.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(-6)
                if rank == kills and step == 10:
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
            if plan.sync == BSP():  # all are there
                assert run.mean(1.0 if rank == 0 else 0.0) == pytest.approx(1 / WORLD), "of the workers"
            run.settle()
    except SystemExit as stop:
        ended = stop.code in (None, 0)
    x, y = samples(99, 500).tensors
    return Trained(float((net(x).argmax(1) == y).float().mean()), said, ended)


@pytest.mark.parametrize(("policy", "rule"), [(LocalSGD(2), ZenoPS()), (ASP(), ZenoPlusPlus())], ids=repr)
def test_most_workers_lie_and_the_model_learns(policy: Policy, rule: Rule, tmp_path: Path) -> None:
    """It also begins with the validator's parameters, and is over when the workers are done."""
    results = run_workers(WORLD, train, str(tmp_path), plan(policy, rule), 2, newcomers=1, timeout_s=100)
    assert [one.ended for one in results] == [False] * WORLD + [True]
    # Under ASP() the server accepts one contribution of a worker for each reference: a slow validator, fewer steps.
    assert min(one.accuracy for one in results) > (0.6 if policy == ASP() else 0.7), results
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations[0]
    assert (verdict.judged > 0, verdict.rejected > 0, verdict.dropped) == (True, True, 0)
    honest, liars = verdict.by_rank[2], [verdict.by_rank[rank] for rank in (0, 1)]
    assert all(one.rejected == one.judged for one in liars), "their gradients point the other way"
    assert honest.rejected < honest.judged / 2
    fates = {one.fate for one in contributions(tmp_path / "history") if one.rank == WORLD}
    assert {"reference"} <= fates <= {"reference", "pending"}


def flood(folder: str, plan: Plan) -> None:
    """One worker computes a gradient once, and pushes it again and again; the others take their time."""
    rank, here = come(folder), Path(folder)
    net, ends = model(rank), contextlib.suppress(*[SystemExit] * (rank == WORLD))  # a validator, with the job
    with ends, offbeat.init(plan, seed=3, timeout=timedelta(seconds=5), history=here / "history") as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=LR))
        data = samples(100 + rank, 32 * STEPS)
        for step in range(2 * STEPS if rank == 0 else STEPS // 4 if rank < WORLD else 1_000_000):
            x, y = data[:32] if rank == 0 else data[32 * (step % STEPS) : 32 * (step % STEPS + 1)]
            time.sleep(0.0 if rank == 0 else 0.05)
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()


@pytest.mark.parametrize("rule", [ZenoPlusPlus(scope="block"), FLTrust()], ids=repr)
def test_a_worker_that_floods_the_server_has_no_larger_share_than_references(rule: Rule, tmp_path: Path) -> None:
    run_workers(WORLD, flood, str(tmp_path), plan(ASP(), rule), newcomers=1, timeout_s=100)
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations[0]
    found = contributions(tmp_path / "history")
    references = sum(one.fate == "reference" for one in found)
    used = sum(one.fate == "applied" for one in found if one.rank == 0)
    assert sum(one.rank == 0 for one in found) == 2 * STEPS > references + 2, "it was faster than the validator"
    assert 0 < used <= references + 2


@pytest.mark.parametrize(
    ("policy", "codec", "rule"),
    [
        (LocalSGD(2), Carry(GRBS(2, 4)), ZenoPS()),
        pytest.param(LocalSGD(2), ErrorReset(GRBS(2, 4)), ZenoPS(scope="block"), marks=pytest.mark.slow),
        (LocalSGD(2, policy=ASP()), LookAhead(GRBS(2, 4)), ZenoPSAsync(alpha=1.0)),
    ],
    ids=repr,
)
def test_zenops_as_one_plan(policy: Policy, codec: Codec, rule: Rule, tmp_path: Path) -> None:
    """Local steps of which a part is sent, judged beside a validator's, with and without waiting for all."""
    whole = Plan(sync=policy, codec=codec, fabric=ParameterServer(), validator=rule)
    results = run_workers(WORLD, train, str(tmp_path), whole, 2, newcomers=1, timeout_s=100)
    assert [one.ended for one in results] == [False] * WORLD + [True]
    assert min(one.accuracy for one in results) > 0.6, results


def test_without_one_they_lead_it_away(tmp_path: Path) -> None:
    results = run_workers(WORLD, train, str(tmp_path), plan(LocalSGD(2), None), 2, timeout_s=100)
    assert max(one.accuracy for one in results) < 0.4, results


def test_one_that_is_killed_holds_all_up_until_there_is_another(tmp_path: Path) -> None:
    results = run_workers(
        WORLD, train, str(tmp_path), plan(BSP(), FLTrust()), 0, WORLD, WORLD + 1,
        newcomers=2, faulty=WORLD, timeout_s=100,
    )  # fmt: skip
    assert (tmp_path / "killed").exists()
    assert min(results[rank].accuracy for rank in (0, 1, 2, 4)) > 0.7
    assert results[4].ended


class Tried(NamedTuple):
    """What one process was told when it tried what only a validator may."""

    swapped: str
    replaced: str
    begins_with: list[torch.Tensor]
    ends_with: list[torch.Tensor]


def try_all(folder: str) -> Tried | None:
    """Rank 0 wants another plan and other parameters, and says that its learning rate and its samples are many."""
    rank = come(folder)
    net = model(rank)
    swapped = replaced = ""
    try:
        with offbeat.init(plan(BSP(), FLTrust()), timeout=timedelta(seconds=5)) as run:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            replica, optimizer = run.prepare(net, optimizer)
            begins = [parameter.detach().clone() for parameter in net.parameters()]
            server = run._session.server
            assert server is not None
            if rank == 0:
                with pytest.raises(PlanError) as caught:
                    run.swap(sync=ASP())
                swapped = str(caught.value)
                put = server.client.put(0, [])
                assert put.wait(timedelta(seconds=20))
                replaced = put.value
            x, y = samples(100, 32).tensors
            for _ in range(10**6 if run.is_validator else 5):
                F.cross_entropy(replica(x), y).backward()
                if rank == 0:
                    optimizer.param_groups[0]["lr"] = 1e9
                optimizer.step()
                optimizer.zero_grad()
            run.settle()
    except SystemExit:
        return None
    return Tried(swapped, replaced, begins, [parameter.detach().clone() for parameter in net.parameters()])


def test_what_a_worker_says_of_the_update_counts_for_nothing(tmp_path: Path) -> None:
    *workers, validator = run_workers(WORLD, try_all, str(tmp_path), newcomers=1, timeout_s=100)
    assert validator is None, "it was ended"
    assert workers[0].swapped == (
        "Cannot swap the plan for rank 0: in this job only who shows a validator's credential may."
    )
    assert "Cannot take other parameters from rank 0: in this job they are those of a validator" in workers[0].replaced
    net = model(WORLD)
    for one in workers:
        for here, there in zip(one.begins_with, net.parameters(), strict=True):
            assert torch.equal(here, there), "the first values are the validator's"
    x, y = samples(100, 32).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(5):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in workers:
        for here, there in zip(one.ends_with, net.parameters(), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def resume(folder: str, saved: str) -> list[torch.Tensor]:
    """A run that writes a checkpoint at its end, or begins with it; workers have others in its place."""
    rank = come(folder)
    net, steps = model(rank), 0
    try:
        with offbeat.init(plan(BSP(), FLTrust()), timeout=timedelta(seconds=5)) as run:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
            replica, optimizer = run.prepare(net, optimizer)
            if Path(saved).exists():
                assert not run.has_joined
                state = torch.load(saved)
                if run.is_validator:
                    net.load_state_dict(state["model"])
                run.load_state_dict(state["run"])
                return [parameter.detach().clone() for parameter in net.parameters()]
            x, y = samples(100, 32).tensors
            for _ in range(10**6 if run.is_validator else 4):
                steps += 1
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            run.settle()
            if rank == 0:
                torch.save({"model": net.state_dict(), "run": run.state_dict()}, saved)
            run.settle()
    except SystemExit:
        assert steps
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.slow
def test_a_checkpoint_is_that_of_the_validator(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.pt")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        results = run_workers(WORLD, resume, str(tmp_path / name), saved, newcomers=1, timeout_s=100)
    for one in results:
        for here, there in zip(one, torch.load(saved)["model"].values(), strict=True):
            assert torch.equal(here, there)


def keep(folder: str, saved: str) -> tuple[bool, int, list[str]]:
    """The same script everywhere, as users write it: it goes on from a checkpoint, and makes one."""
    said, rank = listen(), come(folder)
    net, loaded, first = model(rank), False, 0
    try:
        with offbeat.init(KEPT, timeout=timedelta(seconds=5)) as run:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            replica, optimizer = run.prepare(net, optimizer)
            checkpoints = offbeat.Checkpoints(run, saved, model=net, optimizer=optimizer)
            loaded, first = checkpoints.load(), run.step
            x, y = samples(100, 32).tensors
            for _ in range(10**6 if run.is_validator else 4):
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 3:
                    run.settle()
                    checkpoints.save()
            run.settle()
    except SystemExit:
        pass
    return loaded, first, said


KEPT = Plan(codec=ErrorFeedback(GRBS(2, 4)), fabric=ParameterServer(), validator=FLTrust())


def test_a_validator_is_no_worker_in_a_checkpoint(tmp_path: Path) -> None:
    """Its rank may be a worker's when the job is resumed, which would go on with what the validator has not sent."""
    saved, jobs = tmp_path / "saved", []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        jobs.append(run_workers(WORLD, keep, str(tmp_path / name), str(saved), newcomers=1, timeout_s=100))
        ranks = {path.name.split(".rank")[1][0] for path in saved.glob("*.rank*")}
        assert ranks == {"0", "1", "2"}, sorted(saved.iterdir())
    assert [(loaded, first) for loaded, first, _ in jobs[1]] == [(True, 3)] * (WORLD + 1)
    told = [line for _, _, said in jobs[1] for line in said]
    assert not [line for line in told if "codec" in line or "random numbers" in line]


SCRIPT = """
import torch, offbeat
run = offbeat.init()
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(96, 4))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for x, in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("validates" if run.is_validator else "is done", "OFFBEAT_VALIDATOR_TOKEN" in __import__("os").environ)
"""


@pytest.mark.slow
def test_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text(plan(LocalSGD(2), ZenoPS()).to_toml())
    with start("run", "-n", 2, "--servers", 1, "--plan", "plan.toml", "--run-dir", "job", "train.py",
               folder=tmp_path) as job:  # fmt: skip
        try:
            code, said = command("run", "--validator", "--job", "job", "train.py", folder=tmp_path, timeout_s=100)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (job.returncode, code) == (0, 0), (output, said)
    assert output.count("is done False") == 2, output
    assert "alidator" not in output.partition("ended well")[2], "that it was waited for one is over"
    assert "Starting rank 2, which validates for it." in said
    assert "The job is over: its last worker has said good-bye. This validator ends with it." in said
    assert "validates True" not in said, "its loop has no end"
    assert (tmp_path / "job" / "validator.token").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    """With its validator it learns although three of four lie."""
    example = Path(__file__).parents[2] / "examples/untrusted_workers.py"
    with start("run", "-n", 4, "--servers", 1, "--run-dir", "job", example, "--liars", 3, "--epochs", 6,
               folder=tmp_path) as job:  # fmt: skip
        try:
            code, said = command("run", "--validator", "--job", "job", example, folder=tmp_path, timeout_s=100)
            output, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (job.returncode, code) == (0, 0), (output, said)
    found = re.search(r"([0-9.]+)% of the held-out digits are right", output)
    assert found is not None, output
    assert float(found[1]) > 80


def test_a_server_in_a_workers_hands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text(plan(LocalSGD(2), ZenoPS()).to_toml())
    code, output = command("run", "-n", 2, "--plan", "plan.toml", "train.py", folder=tmp_path)
    assert code == 2
    assert "Start it apart from them, with `offbeat run --servers 1` or `offbeat serve`" in output


FAILING = SCRIPT.replace(
    "    optimizer.step()",
    "    if run.step == 2 and not run.is_validator:\n        raise ValueError('by itself')\n    optimizer.step()",
)


def test_where_all_workers_fail_it_ends_at_once(tmp_path: Path) -> None:
    """It does not look for a server that has said that it ends."""
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "plan.toml").write_text(plan(LocalSGD(2), ZenoPS()).to_toml())
    with start("run", "-n", 2, "--servers", 1, "--plan", "plan.toml", "--run-dir", "job", "train.py",
               folder=tmp_path) as job:  # fmt: skip
        try:
            code, said = command("run", "--validator", "--job", "job", "train.py", folder=tmp_path, timeout_s=100)
            job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 1
    assert "Cannot continue: all workers of the job are gone, and its parameter server has ended." in said
    assert "tries to reconnect" not in said, "nobody is there"
    assert code == 76
