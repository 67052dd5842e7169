"""Files that earlier versions wrote are read, and say what they said (see tests/data/before_renames/README.md)."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import offbeat
from offbeat.cli.app import app
from offbeat.lab import results
from offbeat.report import Records, tally
from offbeat.server.snapshot import read, write
from offbeat.wire.frame import Reader
from tests.training.server_jobs import serve
from tests.workers import run_workers

OLD = Path(__file__).parent / "data/before_renames"


def command(*arguments: object) -> str:
    """What `offbeat` prints, if it ends well."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


PLANS = {
    "controlled": offbeat.Plan(
        fabric=offbeat.ParameterServer(collocated=True),
        controller=offbeat.ByProgress(
            policies=(offbeat.BSP(), offbeat.DSSP(1, 4), offbeat.ASP()), at=(0.25, 0.75), steps=1000
        ),
    ),
    "elastic": offbeat.Plan(fabric=offbeat.Elastic(), bucket_bytes=1 << 20),
    "hybrid": offbeat.Plan(
        sync=offbeat.Hybrid(offbeat.BSP(), offbeat.SSP(3), groups=2),
        fabric=offbeat.ParameterServer(("h0:7000", "h1:7000"), block_bytes=65536, patience_s=5.0),
        tuning=offbeat.BatchTuning(),
    ),
    "in_memory": offbeat.Plan(fabric=offbeat.InMemory()),
    "ksync": offbeat.Plan(sync=offbeat.KSync(3, late="carry"), fabric=offbeat.ParameterServer()),
    "local_sgd": offbeat.Plan(
        sync=offbeat.LocalSGD(4, after=10, outer=offbeat.OuterSGD(lr=0.7, momentum=0.9)),
        codec=offbeat.Cast("bf16"),
        nonfinite="skip",
        keeps="global_batch",
    ),
    "round_robin": offbeat.Plan(sync=offbeat.RoundRobin(strict=True), fabric=offbeat.ParameterServer()),
    "threshold": offbeat.Plan(fabric=offbeat.ParameterServer(), controller=offbeat.WaitThreshold()),
}
DIGESTS = {
    "controlled": "49cae786c977b760438f054de169d75ab38a25f856f58f233b2d1ddee5793cde",
    "elastic": "ad17a7752ce087f2ac3a330ae22f78502c297a33f3aabeaed4752143bddca94b",
    "hybrid": "06f9855ac4ed868ae014a3a0d11248373e92446cf6af485574d555c9f9169fa6",
    "in_memory": "50ba8ff4f7193c9b833bc8a6321d455b27b6e040b10b85636cb3fd1ffbb8e50c",
    "ksync": "a61ff7dfe74131bdebc1d245ef622d139df15a93a4f5ffce8bced9b076bc078e",
    "local_sgd": "3816554f2e05a34277a925a7ed7bb0b4c9fc28f13710604d7cc54b945bbab627",
    "round_robin": "d555c4aa3206aec8dbe00fbb8b1e68e309d71de2e83ef67dedb663be63cdffee",
    "threshold": "a6c4f15ceb0868645b84bc4bc4308c2e93564cccbf6d7f11f6b1cadf06c20bf5",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_the_same_and_is_written_the_same(name: str) -> None:
    text = (OLD / f"82249e7/plans/{name}.toml").read_text()
    plan = offbeat.Plan.from_toml(text)
    assert plan == PLANS[name]
    assert plan.digest == DIGESTS[name]
    assert plan.to_toml() == text


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def checksum(net: nn.Module) -> float:
    """The sum of squares of all parameters."""
    return sum(float(p.detach().double().square().sum()) for p in net.parameters())


def resume(folder: str, fabric: offbeat.ParameterServer | offbeat.ProcessGroup) -> dict[str, Any]:
    """Load the checkpoint of the sixth step, and take one step."""
    with offbeat.init(offbeat.Plan(fabric=fabric)) as run:
        torch.manual_seed(0)
        net = model()
        data = DataLoader(TensorDataset(torch.randn(96, 3)), batch_size=4, shuffle=True)
        replica, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), data)
        torch.manual_seed(1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        checkpoints = offbeat.Checkpoints(run, folder, model=replica, optimizer=optimizer, schedule=schedule)
        assert checkpoints.load()
        found: dict[str, Any] = {"step": run.step, "rate": optimizer.param_groups[0]["lr"], "loaded": checksum(net)}
        found["random"] = torch.rand(1).item()
        (x,) = next(iter(loader))
        loss = replica(x).square().mean()
        loss.backward()
        optimizer.step()
        return {**found, "loss": loss.item(), "next": checksum(net)}


RESUMED: dict[tuple[str, str], dict[str, Any]] = {
    ("82249e7", "alone"): {
        "loaded": 1.5658544165999226,
        "random": 0.7576315999031067,
        "loss": [0.00526368897408247, 0.00982324592769146],
        "next": 1.5479326115890772,
    },
    ("36b2a39", "alone"): {
        "loaded": 1.5658544165999226,
        "random": 0.4229229688644409,  # the checkpoint's; in the others it is the script's
        "loss": [0.00526368897408247, 0.00982324592769146],
        "next": 1.5479326115890772,
    },
    ("82249e7", "server"): {
        "loaded": 1.59341717094276,
        "random": 0.7576315999031067,
        "loss": [0.008636357262730598, 0.020945100113749504],
        "next": 1.5683053575895147,
    },
    ("36b2a39", "server"): {
        "loaded": 1.5780183832287886,
        "random": 0.7576315999031067,
        "loss": [0.008006316609680653, 0.0162416473031044],
        "next": 1.5492547089127697,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("version", "where"), RESUMED)
def test_a_checkpoint_is_gone_on_from(version: str, where: str, tmp_path: Path) -> None:
    """The numbers are what the version that wrote it gets."""
    shutil.copytree(OLD / version / where / "checkpoint", tmp_path / "here")
    fabric = offbeat.ProcessGroup() if where == "alone" else offbeat.ParameterServer()
    expected = {"step": 6, "rate": 0.1 * 0.9**6, **RESUMED[version, where]}
    losses = expected.pop("loss")
    for found, loss in zip(run_workers(2, resume, str(tmp_path / "here"), fabric), losses, strict=True):
        assert found == pytest.approx({**expected, "loss": loss}, rel=1e-5)


# What `train.py` printed before the server was asked to stop.
SERVED = [
    *(0.02028527669608593, 0.32611164450645447, -0.4788628816604614, -0.38348904252052307, -0.1968080848455429),
    *(0.14627571403980255, -0.06494377553462982, 0.4264410138130188, -0.03897134214639664, 0.11248172074556351),
    *(-0.2025114893913269, -0.10174159705638885, -0.5533031225204468, -0.4091278612613678, -0.2265729159116745),
    *(0.0320243313908577, 0.26784172654151917, 0.22176390886306763, -0.27576982975006104, -0.20897993445396423),
    0.13197623193264008,
]


def come_back(folder: Path) -> list[torch.Tensor]:
    """The parameters [D] of a server that goes on from snapshots; and after one contribution of each that is zero."""
    serve(folder, snapshots=str(folder / "server"))
    with offbeat.init(offbeat.Plan(fabric=offbeat.ParameterServer())) as run:
        torch.manual_seed(1)
        net = model()
        _, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        found = [parameters_to_vector(net.parameters()).detach()]
        (0.0 * net(torch.ones(1, 3)).sum()).backward()
        optimizer.step()
        run.settle()
        return [*found, parameters_to_vector(net.parameters()).detach()]


def test_a_server_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """With the parameters, the momentum, and the policy that held: its two updates move by half a step each."""
    shutil.copytree(OLD / "36b2a39/snapshots", tmp_path / "server/0")
    kept = read(io.BytesIO(max((OLD / "36b2a39/snapshots").iterdir()).read_bytes()))
    momentum = {about.name: tensor.flatten() for about, tensor in kept.tensors if about.name}
    moved = torch.cat([momentum[name] for name, _ in model().named_parameters()]) * 0.05 * (0.9 + 0.9**2)
    for loaded, after in run_workers(2, come_back, tmp_path):
        assert loaded.tolist() == SERVED
        assert torch.allclose(after, loaded - moved, atol=1e-7)
        assert moved.abs().max() > 1e-3


def test_a_snapshot_is_written_as_before() -> None:
    """So that a version of before reads it; what it does not know in the header it passes over."""
    for path in (OLD / "36b2a39/snapshots").iterdir():
        again = io.BytesIO()
        write(again, read(io.BytesIO(path.read_bytes())))
        old, new = (
            Reader(max_body_bytes=1 << 20, versions=(4,)).feed(data) for data in (path.read_bytes(), again.getvalue())
        )
        assert new[1:] == old[1:]
        head, was = (msgspec.msgpack.decode(frames[0].body) for frames in (new, old))
        (one,), (before,) = head.pop("models"), was.pop("models")
        assert {**one, "details": one["details"] | before["details"]} == {**before, "details": one["details"]}
        assert head == was


ALONE: dict[str, Any] = {"files": 2, "compared": 12, "hashes": 12, "applied": 12, "releases": 12, "lead": 1, "bound": 1}
SERVED_BY_ONE: dict[str, Any] = {
    **{"files": 3, "lives": 1, "events": 70, "updates": 13, "hashes": 16, "applied": 16, "dropped": 0, "lost": 0},
    **{"pending": 0, "swaps": 1, "releases": 16, "lead": 1, "bound": 1, "replayed": 68, "stalest": 3},
}
HISTORIES: dict[tuple[str, str], dict[str, Any]] = {
    ("82249e7", "alone"): ALONE,
    ("36b2a39", "alone"): ALONE,
    ("82249e7", "server"): {**SERVED_BY_ONE, "compared": 12, "staleness": 6},
    ("36b2a39", "server"): {**SERVED_BY_ONE, "compared": 10, "staleness": 7, "swapped_by": ["rank 1, rank 0"]},
}


@pytest.mark.parametrize(("version", "where"), HISTORIES)
def test_a_history_proves_what_it_proved(version: str, where: str) -> None:
    found = json.loads(command("verify-run", "--json", OLD / version / where / "run"))
    assert found["holds"]
    assert found["checked"] == [1, 2, 3]
    expected = HISTORIES[version, where]
    assert {name: found[name] for name in expected} == expected


def test_a_run_is_reported(tmp_path: Path) -> None:
    shutil.copytree(OLD / "36b2a39/server/run", tmp_path / "run")
    command("report", tmp_path / "run")
    zero, one = tally(Records(tmp_path / "run/metrics.jsonl").all())
    assert [(it.rank, it.steps, it.samples, it.host) for it in (zero, one)] == [(0, 8, 32, "h0"), (1, 8, 32, "h0")]
    html = (tmp_path / "run/report.html").read_text()
    assert "SSP(bound=1) decides when workers may go on, not BSP() any more (wanted by rank 1, rank 0" in html
    assert len(json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]) == 96


def test_a_result_is_predicted_and_shown() -> None:
    """From what it measured follows what is simulated, to the bit as when it was written."""
    folder = OLD / "36b2a39"
    said = command("simulate", folder / "line.toml", "--like", folder / "line.json").splitlines()
    assert [line.split() for line in said if line.startswith((" ddp", " swapped"))] == [
        ["ddp", "47.5", "336.8", "1.000", "37%", "0.0/0", "47.72", "-0.5%"],
        ["swapped", "47.45", "337.2", "0.999", "37%", "0.5/2", "50.46", "-6.0%"],
    ]
    result = results.read(folder / "line.json")
    assert [(row.row, row.seconds_per_step.median) for row in result.rows] == [
        ("ddp", 0.04772195),
        ("swapped", 0.050460375),
    ]
    assert [(one.row, one.fault, one.others_s) for one in result.recoveries] == [
        ("ddp", "sigstop of worker 1 for 0.3 s at its step 4", 0.319),
        ("swapped", "sigstop of worker 1 for 0.3 s at its step 4", 0.325),
    ]
