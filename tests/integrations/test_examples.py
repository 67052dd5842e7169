"""The examples, as a new user starts them; and Ray Train, which starts a worker that was killed again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env={**os.environ, **QUIET}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torch", (*TORCHRUN, str(EXAMPLES / "ddp_digits.py"))),
        ("lightning", (str(EXAMPLES / "lightning_digits.py"), "--sync", "LocalSGD")),
        ("accelerate", (*TORCHRUN, str(EXAMPLES / "accelerate_digits.py"))),
        ("transformers", (*TORCHRUN, str(EXAMPLES / "trainer_digits.py"))),
    ],
)
def test_each_learns(tmp_path: Path, package: str, command: tuple[str, ...]) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    process = start(tmp_path, *command)
    said, _ = process.communicate(timeout=140)
    assert process.returncode == 0, said
    shares = [float(share) for share in re.findall(r"([0-9.]+)% of the held-out", said)]
    shares += [100 * float(share) for share in re.findall(r"eval_accuracy'?\"?: '?([0-9.]+)", said)]
    assert shares[-1] > 97, said


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(180)
def test_ray_starts_a_killed_worker_again(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray[train] is not installed", exc_type=ImportError)
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    example, kept = str(EXAMPLES / "ray_digits.py"), str(tmp_path / "kept")
    lines, killed = [], False
    with start(tmp_path, example, "--checkpoints", kept, "--epochs", "30") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"RayTrainWorker pid=(\d+)\).* epoch 3:", line)
            if found is not None and not killed:
                killed = True
                os.kill(int(found[1]), signal.SIGKILL)
    assert process.returncode == 0, "".join(lines)[-4000:]
    assert killed
    told = [found for line in lines if (found := re.search(r"RayTrainWorker pid=(\d+)\).* epoch (\d+):", line))]
    first_of = {pid: int(epoch) for pid, epoch in reversed([found.groups() for found in told])}
    assert int(told[-1][2]) == 30
    assert len(first_of) > 1, "other processes"
    assert all(epoch >= 3 for pid, epoch in first_of.items() if pid != told[0][1]), "from a checkpoint, not from 1 on"


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("command", "right"),
    [
        (("async_sgd.py", "--updates", "60"), r"60 updates of 2 gradients each: ([0-9.]+)% of the held-out"),
        (("ensemble.py", "--models", "2", "--queries", "2"), r"query 1: ([0-9.]+)% are right"),
    ],
)
def test_tasks_with_objects(tmp_path: Path, command: tuple[str, ...], right: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    process = start(tmp_path, str(EXAMPLES / command[0]), *command[1:])
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    found = re.search(right, said)
    assert found is not None, said
    assert float(found[1]) > 75, said


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(120)
def test_readers_on_ray_have_each_version_of_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    process = start(tmp_path, str(EXAMPLES / "ray_weights.py"), "--versions", "3", "--readers", "2")
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 0, said
    told = re.findall(r"version (\d): 2 readers have a mean of \[(.*), (.*)\]", said)
    assert told == [("1", "1.0", "1.0"), ("2", "2.0", "2.0"), ("3", "3.0", "3.0")]
