"""The front end: joining, preparing, state, and what is refused."""

from __future__ import annotations

import copy
import math
import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import DisagreementError, ModelError, NumericsError, PlanError
from offbeat.fabric import BindContext, Fabric, InMemory, Offers, ProcessGroup
from tests.parity import jobs
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.sync import Policy

# -- what a DDP user's evaluation and checkpoint code expects ------------------------------------------------------


@pytest.fixture
def run() -> Any:
    with offbeat.init() as run:
        yield run


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = jobs.MLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_replica_is_used_as_ddp_is(run: offbeat.Run) -> None:
    model, optimizer = small()
    model.temperature = 3.0  # type: ignore[assignment]
    replica, same = run.prepare(model, optimizer)
    assert same is optimizer
    assert replica.module is model
    assert replica.temperature == 3.0
    assert [key.removeprefix("module.") for key in replica.state_dict()] == list(model.state_dict())
    assert all(key.startswith("module.") for key in replica.state_dict())
    assert [id(p) for p in replica.parameters()] == [id(p) for p in model.parameters()]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = replica.no_such_thing
    replica.eval()
    assert not model.training
    replica.load_state_dict({f"module.{n}": torch.zeros_like(t) for n, t in model.state_dict().items()})
    assert all(not t.any() for t in model.state_dict().values())


def test_a_copy_does_not_communicate(run: offbeat.Run) -> None:
    model, optimizer = small()
    replica, _ = run.prepare(model, optimizer)
    ema = torch.optim.swa_utils.AveragedModel(replica)
    F.cross_entropy(copy.deepcopy(replica)(torch.randn(2, 20)), torch.tensor([0, 1])).backward()
    assert run.step == 0
    assert all(p.grad is None for p in replica.parameters())
    ema.update_parameters(replica)


def test_comm_hooks_are_refused(run: offbeat.Run) -> None:
    replica, _ = run.prepare(*small())
    with pytest.raises(PlanError, match="Plan\\(codec="):
        replica.register_comm_hook(None, print)


def test_join_is_a_shim(run: offbeat.Run) -> None:
    replica, optimizer = run.prepare(*small())
    with replica.join(divide_by_initial_world_size=False):
        replica(torch.randn(2, 20)).sum().backward()
        optimizer.step()
    assert run.step == 1


def test_an_inner_autograd_grad_is_no_step(run: offbeat.Run) -> None:
    replica, _ = run.prepare(*small())
    x = torch.randn(2, 20, requires_grad=True)
    torch.autograd.grad(replica(x).sum(), x)
    assert run.step == 0
    replica(x).sum().backward()
    assert run.step == 1


# -- refusals ------------------------------------------------------------------------------------------------------


def test_no_trainable_parameter(run: offbeat.Run) -> None:
    model, optimizer = small()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter with requires_grad"):
        run.prepare(model, optimizer)


def test_several_devices(run: offbeat.Run) -> None:
    model, _ = small()
    model[4] = nn.Linear(32, 5, device="meta")  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"0\.weight is on cpu, 4\.weight on meta"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_stranger_in_the_optimizer(run: offbeat.Run) -> None:
    model, _ = small()
    stranger = nn.Parameter(torch.zeros(3, 7))
    with pytest.raises(ModelError, match=r"parameter 6 of group 0 \(shape \[3, 7\]\)"):
        run.prepare(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))


def test_sync_batchnorm_on_the_cpu(run: offbeat.Run) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(jobs.CNN())
    with pytest.raises(ModelError, match=r"Cannot train 1 \(SyncBatchNorm\) on the CPU"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_prepared_twice(run: offbeat.Run) -> None:
    model, optimizer = small()
    replica, _ = run.prepare(model, optimizer)
    with pytest.raises(ModelError, match="twice"):
        run.prepare(replica, optimizer)


def test_lazy_parameters(run: offbeat.Run) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelError, match="shape is not known"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_no_batches(run: offbeat.Run) -> None:
    with pytest.raises(ModelError, match="loader without batches"):
        run.prepare(*small(), [])


def test_what_is_no_loader(run: offbeat.Run) -> None:
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = TensorDataset(torch.ones(8, 20))
    loader = DataLoader(data)
    with pytest.raises(ModelError, match="Cannot prepare StepLR behind a model, its optimizer and its loader"):
        run.prepare(model, optimizer, loader, scheduler)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="Cannot prepare StepLR as a loader: it is a scheduler, which stays as it is"):
        run.prepare(model, optimizer, scheduler)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"it is a dataset, which has no batches. Give DataLoader\(TensorDataset"):
        run.prepare(model, optimizer, data)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="Cannot prepare int as a loader: it is no iterable of batches"):
        run.prepare(model, optimizer, 5)  # type: ignore[call-overload]
    assert len(run.prepare(model, optimizer, loader)) == 3, "nothing was claimed by what was refused"


@pytest.mark.parametrize("plan", [offbeat.Plan(), offbeat.Plan(sync=offbeat.LocalSGD(4))], ids=["BSP", "LocalSGD"])
def test_another_dtype_after_prepare(plan: offbeat.Plan) -> None:
    model, optimizer = small()
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, optimizer)
        replica(torch.randn(2, 20)).sum().backward()
        optimizer.step()
        model.double()
        with pytest.raises(
            ModelError, match=r"0.weight: it was torch.float32 on cpu when .* is torch.float64 on cpu now"
        ):
            replica(torch.randn(2, 20).double())
        with torch.no_grad():
            replica(torch.randn(2, 20).double())
        model.float()
        replica(torch.randn(2, 20)).sum().backward()


def test_no_plan() -> None:
    with pytest.raises(PlanError, match=r"Cannot use \{\} as a plan: make one with offbeat.Plan"):
        offbeat.init({})  # type: ignore[arg-type]


def refusals(samples: int, batch: int) -> str:
    with offbeat.init() as run:
        data = TensorDataset(torch.zeros(samples, 20), torch.zeros(samples, dtype=torch.int64))
        with pytest.raises(ModelError) as caught:
            run.prepare(*small(), DataLoader(data, batch_size=batch, drop_last=True))
        return str(caught.value)


def test_a_loader_shorter_than_the_workers() -> None:
    assert all("Cannot split 2 samples among 3 workers" in text for text in run_workers(3, refusals, 2, 1))


def test_a_loader_with_batches_for_some_only() -> None:
    """Every rank refuses, not only the one that has no batch."""
    assert all("worker 1 of 2 gets none" in text for text in run_workers(2, refusals, 7, 4))


def odd_model(what: str) -> str:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)]
    if rank == 1:
        layers[2] = {
            "shape": nn.Linear(64, 6),
            "dtype": nn.Linear(64, 5, dtype=torch.float64),
            "more": nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 5)),
        }[what]
    model = nn.Sequential(*layers)
    with offbeat.init() as run, pytest.raises(DisagreementError) as caught:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "named"), [("shape", "2.weight [6, 64]"), ("dtype", "float64"), ("more", "2.0.weight")]
)
def test_models_that_differ(what: str, named: str) -> None:
    for text in run_workers(3, odd_model, what):
        assert "rank 1" in text
        assert named in text


def odd_plan() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(DisagreementError) as caught:
        offbeat.init(offbeat.Plan(bucket_bytes=(1 << 20) + rank // 2))
    return str(caught.value)


def test_plans_that_differ() -> None:
    for text in run_workers(3, odd_plan):
        assert "rank 2" in text
        assert "bucket_bytes" in text


# -- NaN and Inf ---------------------------------------------------------------------------------------------------


def nonfinite(policy: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    model, optimizer = small()
    with offbeat.init(offbeat.Plan(nonfinite=policy)) as run:  # type: ignore[arg-type]
        replica, optimizer = run.prepare(model, optimizer)
        error = ""
        for step in range(3):
            x = torch.ones(2, 20) * (float("nan") if rank == 1 and step == 1 else 1.0)
            try:
                replica(x).sum().backward()
            except NumericsError as caught:
                error = str(caught)
                break
            optimizer.step()
            optimizer.zero_grad()
        return {"finite": all(bool(t.isfinite().all()) for t in model.state_dict().values()), "error": error}


def test_nan_passes_by_default() -> None:
    assert all(result == {"finite": False, "error": ""} for result in run_workers(2, nonfinite, "pass"))


def test_nan_is_skipped() -> None:
    assert all(result == {"finite": True, "error": ""} for result in run_workers(2, nonfinite, "skip"))


def test_nan_raises_on_every_rank_and_names_the_culprit() -> None:
    for result in run_workers(3, nonfinite, "raise"):
        assert "NaN or Inf in the gradient of rank 1: 4.weight" in result["error"]
        assert "rank 0:" not in result["error"]


@dataclass(frozen=True)
class Theirs:
    """A fabric that is not offbeat's own."""

    @property
    def offers(self) -> Offers:
        return ProcessGroup().offers

    def bind(self, context: BindContext) -> Fabric:
        return ProcessGroup().bind(context)


@dataclass(frozen=True)
class Unbound:
    """One that cannot be bound."""

    @property
    def offers(self) -> Offers:
        return ProcessGroup().offers


@dataclass(frozen=True)
class BoundByBackend:
    """One that is still bound by a backend alone."""

    @property
    def offers(self) -> Offers:
        return ProcessGroup().offers

    def bind(self, *, backend: str) -> Fabric:
        return ProcessGroup().bind(BindContext(backend=backend))


@dataclass(frozen=True)
class NowhereServed:
    """One that offers a server, and does not say where that is."""

    block_bytes: int = 1 << 20

    @property
    def offers(self) -> Offers:
        return offbeat.ParameterServer().offers


@dataclass(frozen=True)
class TheirServer:
    """A description of a server that is not offbeat's own."""

    addresses: tuple[str, ...] = ()
    block_bytes: int = 1 << 20
    patience_s: float = 60.0
    collocated: bool = False

    @property
    def offers(self) -> Offers:
        return offbeat.ParameterServer().offers


def with_their_fabric() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with offbeat.init(offbeat.Plan(fabric=Theirs(), tuning=offbeat.BatchTuning())) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        replica(torch.tensor([[float(run.rank)]])).sum().backward()
        optimizer.step()
    return model.weight.flatten().tolist()


def test_a_fabric_of_somebody_else() -> None:
    assert run_workers(2, with_their_fabric) == [[-0.5], [-0.5]]


def test_a_fabric_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^Cannot run over Unbound\(\): it has no bind\(context\)"):
        offbeat.Plan(fabric=Unbound())
    with pytest.raises(PlanError) as refused:
        offbeat.Plan(fabric=BoundByBackend())
    assert str(refused.value) == (
        "Cannot run over BoundByBackend(): its bind takes backend, but a fabric is given one BindContext now; write "
        "bind(self, context), and read context.backend - at `plan.fabric`."
    )


@pytest.mark.parametrize("sync", [offbeat.BSP(), offbeat.ASP()], ids=repr)
def test_a_fabric_whose_server_cannot_be_reached_is_refused(sync: Policy) -> None:
    with pytest.raises(PlanError) as refused:
        offbeat.Plan(sync=sync, fabric=NowhereServed())
    assert str(refused.value) == (
        f'Cannot reach the server of {NowhereServed()!r}: it offers holds="server", but has no addresses, patience_s, '
        'collocated; give it what ParameterServer() has, or have it offer holds="workers" and a bind(context) - at '
        "`plan.fabric`."
    )


def with_their_server() -> tuple[bool, list[float]]:
    # A shard reads the plan as TOML, in which kinds have offbeat's own names.
    fabric = type("ParameterServer", (TheirServer,), {})()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with offbeat.init(offbeat.Plan(fabric=fabric)) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        replica(torch.tensor([[float(run.rank)]])).sum().backward()
        optimizer.step()
        is_served = run._session.server is not None
    return is_served, model.weight.flatten().tolist()


def test_a_server_of_somebody_else() -> None:
    assert run_workers(2, with_their_server) == [(True, [-0.5]), (True, [-0.5])]


def test_collocated_shards_of_somebody_else_are_no_place_for_single_turns() -> None:
    turns = offbeat.RoundRobin(slots=1)
    offbeat.Plan(sync=turns, fabric=TheirServer())
    with pytest.raises(PlanError, match=r"would be idle"):
        offbeat.Plan(sync=turns, fabric=TheirServer(collocated=True))


def test_a_fabric_for_threads_is_refused_in_one_of_several_processes() -> None:
    with pytest.raises(PlanError, match=r"^Cannot run 2 worker processes over InMemory\(\)"):
        InMemory().bind(BindContext(rank=0, world=2))


def with_more_than_there_are() -> str:
    with pytest.raises(PlanError) as caught:
        offbeat.init(offbeat.Plan(sync=offbeat.KSync(k=3), fabric=offbeat.ParameterServer()))
    return str(caught.value)


def test_a_plan_for_more_workers_is_refused() -> None:
    for refused in run_workers(2, with_more_than_there_are):
        assert refused.startswith("Cannot make updates of 3 contributions with 2 workers")


@pytest.mark.parametrize("timeout", [5, 0.5, timedelta(seconds=5)], ids=repr)
def test_a_timeout_is_a_number_of_seconds_or_a_timedelta(timeout: float | timedelta) -> None:
    with offbeat.init(timeout=timeout) as run:
        assert run.world == 1


@pytest.mark.parametrize(
    ("timeout", "says"),
    [
        (timedelta(0), "after 0 s: the timeout must be above 0"),
        (-1, "after -1 s: the timeout must be above 0"),
        (0.0, "after 0 s: the timeout must be above 0"),
        (math.inf, "after inf s: give a finite number of seconds"),
        (math.nan, "after nan s: give a finite number of seconds"),
        (10**5000, "after so many s: give a finite number of seconds"),
        (True, "after True: give a number of seconds, or a datetime.timedelta"),
        ("5", "after '5': give a number of seconds, or a datetime.timedelta"),
    ],
    ids=["timedelta(0)", "-1", "0", "inf", "nan", "huge", "True", "text"],
)
def test_other_timeouts_are_refused(timeout: Any, says: str) -> None:
    with pytest.raises(PlanError, match=f"^Cannot explain waits {says}"):
        offbeat.init(timeout=timeout)


def overflow(policy: str) -> dict[str, Any]:
    """Every worker's gradient fits fp16; their sum does not."""
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    plan = offbeat.Plan(codec=offbeat.Cast("fp16"), nonfinite=policy)  # type: ignore[arg-type]
    with offbeat.init(plan) as run:
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            replica(torch.tensor([[100_000.0]])).sum().backward()
        except NumericsError as caught:
            return {"error": str(caught), "kept": False}
    return {"error": "", "kept": model.weight.grad is not None, "same": torch.equal(before, model.weight)}


def test_a_sum_that_overflows_is_noticed_on_every_rank() -> None:
    for result in run_workers(2, overflow, "raise"):
        assert "NaN or Inf in the gradient of the mean of weight, in none of the workers' own" in result["error"]
    assert all(result["error"] == "" and not result["kept"] for result in run_workers(2, overflow, "skip"))
    assert all(result["error"] == "" and result["kept"] for result in run_workers(2, overflow, "pass"))


def sparse_nan(policy: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    model = nn.Embedding(5, 2, sparse=True)
    with offbeat.init(offbeat.Plan(nonfinite=policy)) as run:  # type: ignore[arg-type]
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            (replica(torch.tensor([1])).sum() * (float("nan") if rank == 1 else 1.0)).backward()
        except NumericsError as error:
            return {"finite": True, "error": str(error)}
        optimizer.step()
    return {"finite": bool(model.weight.isfinite().all()), "error": ""}


@pytest.mark.slow
def test_nan_in_a_sparse_gradient() -> None:
    for result in run_workers(2, sparse_nan, "raise"):
        assert "NaN or Inf in the gradient of rank 1: weight" in result["error"]
    assert run_workers(2, sparse_nan, "skip") == [{"finite": True, "error": ""}] * 2
    assert run_workers(2, sparse_nan, "pass") == [{"finite": False, "error": ""}] * 2


# -- state ---------------------------------------------------------------------------------------------------------


def resume(folder: str) -> list[bool]:
    """Train 6 steps at once; 3 steps, save, begin anew, load, 3 steps: the same bits."""
    whole = _train(0, 6)
    half = _train(0, 3)
    checkpoint = {"model": half["model"].state_dict(), "optimizer": half["optimizer"].state_dict(), "run": half["run"]}
    if os.environ["RANK"] == "0":
        torch.save(checkpoint, Path(folder) / "checkpoint.pt")
    rest = _train(3, 6, checkpoint)
    ours, theirs = rest["model"].state_dict(), whole["model"].state_dict()
    return [torch.equal(ours[name], theirs[name]) for name in theirs]


def _train(first: int, last: int, checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = jobs.CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 5, (24,)))
    with offbeat.init(seed=7) as run:
        replica, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
        if checkpoint:
            replica.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            run.load_state_dict(checkpoint["run"])
        for _ in range(first // 3, last // 3):  # three batches in an epoch of each of two workers
            for x, y in loader:
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert run.step == last
        return {"model": replica, "optimizer": optimizer, "run": run.state_dict()}


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    for same in run_workers(2, resume, str(tmp_path)):
        assert same
        assert all(same)


def save_and_load_with_dcp(folder: str) -> bool:
    with offbeat.init() as run:
        model, optimizer = small()
        replica, optimizer = run.prepare(model, optimizer)
        for _ in range(2):
            replica(torch.randn(2, 20)).sum().backward()
            optimizer.step()
        before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        save({"model": replica.state_dict(), "run": run}, checkpoint_id=folder)
    with offbeat.init() as run:
        torch.manual_seed(9)
        model = jobs.MLP()
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state: dict[str, Any] = {"model": replica.state_dict(), "run": run}
        load(state, checkpoint_id=folder)
        replica.load_state_dict(state["model"])
        return run.step == 2 and all(torch.equal(t, before[n]) for n, t in replica.state_dict().items())


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """`Run` is Stateful: it goes into `torch.distributed.checkpoint` as it is."""
    assert run_workers(2, save_and_load_with_dcp, str(tmp_path / "checkpoint")) == [True, True]


def test_state_of_another_run_is_refused(run: offbeat.Run) -> None:
    state = run.state_dict()
    run.prepare(*small())
    with pytest.raises(ModelError, match="it has 0 models, this run 1"):
        run.load_state_dict(state)


# -- joining -------------------------------------------------------------------------------------------------------


def join_existing() -> tuple[int, int, float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=2)
    with offbeat.init() as run:
        mean = run.mean(float(rank), weight=1.0 + rank)
        result = run.rank, run.world, mean
    assert dist.is_initialized(), "the group is its owner's"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()
    return result


def test_joins_a_group_that_exists() -> None:
    results = run_workers(2, join_existing)
    assert [r[:2] for r in results] == [(0, 2), (1, 2)]
    assert all(r[2] == pytest.approx(2 / 3) for r in results)


def owns_and_closes() -> bool:
    with offbeat.init() as run:
        run.prepare(*small())
    return dist.is_initialized()


def elastic_in_a_group() -> str:
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    try:
        with pytest.raises(PlanError) as caught:
            offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()))
        return str(caught.value)
    finally:
        dist.destroy_process_group()


def test_elastic_in_a_group_that_exists_names_who_makes_one() -> None:
    for text in run_workers(2, elastic_in_a_group):
        assert "Cannot run Elastic() in a process group that offbeat did not make" in text
        assert "before whatever makes one: init_process_group, TrainingArguments (then OffbeatTrainer(run=run))" in text
        assert "Ray Train always makes one" in text


def test_its_own_group_is_closed_with_the_run() -> None:
    assert run_workers(2, owns_and_closes) == [False, False]


def different_start() -> dict[str, torch.Tensor]:
    torch.manual_seed(int(os.environ["RANK"]))
    model = jobs.CNN()
    model[1].running_mean.fill_(float(os.environ["RANK"]))  # type: ignore[operator]
    model[0].weight.requires_grad_(False)
    with offbeat.init() as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_everyone_starts_from_rank_0() -> None:
    """Parameters, frozen ones too, and buffers."""
    states = run_workers(3, different_start)
    torch.manual_seed(0)
    expected = jobs.CNN().state_dict()
    for state in states:
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


class OddBuffers(nn.Module):
    """Buffers that counts, masks and tables are kept in; each rank's are its own at first."""

    count: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mask", torch.tensor([rank == 0, False]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("short", torch.full((3,), rank, dtype=torch.int16))
        self.register_buffer("complex", torch.tensor([rank + 2j]))
        self.register_buffer("bf16", torch.full((3,), rank, dtype=torch.bfloat16))
        self.register_buffer("expanded", torch.tensor([float(rank)]).expand(4))
        self.register_buffer("transposed", (torch.arange(6.0) + rank).reshape(2, 3).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1 + int(os.environ["RANK"])
        output: torch.Tensor = self.layer(x) * self.scale + self.nothing.sum()
        return output


def odd_buffers() -> dict[str, list[Any]]:
    model = OddBuffers(int(os.environ["RANK"]))
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            replica(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_buffers_of_every_kind() -> None:
    expected = {name: buffer.tolist() for name, buffer in OddBuffers(0).named_buffers()} | {"count": 3}
    assert run_workers(2, odd_buffers) == [expected, expected]


class Replaces(nn.Module):
    """Puts a new tensor in its buffer's place instead of writing into it."""

    ema: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("ema", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = 0.5 * self.ema + x.mean(0)
        output: torch.Tensor = self.layer(x)
        return output


def replaced_buffers() -> list[float]:
    model = Replaces()
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            replica(torch.full((1, 2), float(run.rank))).sum().backward()
            optimizer.step()
        values: list[float] = model.ema.tolist()
        model.ema = torch.zeros(3)
        with pytest.raises(ModelError, match=r"Cannot keep the buffer ema equal: it was \[2\] .* is \[3\]"):
            model.layer(torch.ones(1, 2)).sum().backward()
        return values


def test_buffers_that_are_replaced() -> None:
    assert run_workers(2, replaced_buffers) == [[0.0, 0.0]] * 2


def trains_after_close() -> str:
    model, optimizer = small()
    with offbeat.init() as run:
        replica, _ = run.prepare(model, optimizer)
    loss = replica(torch.ones(2, 20)).sum()
    replica.module(torch.ones(2, 20)).sum().backward()
    try:
        loss.backward()
    except ModelError as error:
        return str(error)
    return "nothing was said"


def test_replicas_do_not_drift_apart_in_silence_after_close() -> None:
    assert all("its run is closed" in text for text in run_workers(2, trains_after_close))


def after_close() -> list[str]:
    said, told = [], listen()
    run = offbeat.init()
    replica, optimizer = run.prepare(*small())
    replica(torch.randn(4, 20)).sum().backward()
    try:
        offbeat.init()
    except PlanError as error:
        said.append(str(error))
    run.close()
    for late in (
        lambda: run.mean(1.0),
        run.settle,
        lambda: run.swap(sync=offbeat.BSP()),
        lambda: run.prepare(*small()),
    ):
        try:
            late()
        except ModelError as error:
            said.append(str(error))
    for _ in range(2):
        optimizer.step()
    assert run.state_dict()["models"][0]["step"] == 1
    return said + told


def test_what_comes_too_late_is_said() -> None:
    closed = "this run is closed. Call run.close() behind all that the workers do together."
    for rank, said in enumerate(run_workers(2, after_close)):
        assert said == [
            f"Cannot begin a second run: this process is rank {rank} of 2 in one that is open. Call run.close() first, "
            "or write with offbeat.init() as run: around what belongs together.",
            f"Cannot take a mean over all workers: {closed}",
            f"Cannot make replicas equal: {closed}",
            f"Cannot swap the plan: {closed}",
            f"Cannot prepare a model: {closed}",
            f"Rank {rank} makes a step, and its run is closed: from here on its model is no longer that of the other "
            "workers. Call run.close() behind the last step.",
        ]


def test_a_second_run_of_a_worker_that_is_alone_ends_the_first() -> None:
    told = listen()
    first = offbeat.init()
    first.prepare(*small())
    with offbeat.init() as second:
        assert len(told) == 1
        assert "the run that this process had open, at step 0, is closed" in told[0]
        with pytest.raises(ModelError, match="Cannot take a mean over all workers: this run is closed"):
            first.mean(1.0)
        assert second.mean(1.0) == 1.0
    with offbeat.init():
        assert len(told) == 1


def compiled(backend: str) -> bool:
    """A compiled model inside, and the replica compiled as a whole, against the same without torch.compile."""
    results = []
    for how in ("eager", "inside", "outside"):
        torch.manual_seed(0)
        model: Any = jobs.MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.init() as run:
            if how == "inside":
                model = torch.compile(model, backend=backend)
            replica: Any
            replica, optimizer = run.prepare(model, optimizer)
            if how == "outside":
                replica = torch.compile(replica, backend=backend)
            generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
            for _ in range(4):
                x, y = jobs.vectors(generator)
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert run.step == 4
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return all(torch.allclose(results[0], other, atol=1e-6) for other in results[1:])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: torch.compile generates code")
def test_torch_compile_with_generated_code() -> None:
    assert run_workers(2, compiled, "inductor", timeout_s=500) == [True, True]


@pytest.mark.slow
def test_torch_compile() -> None:
    assert run_workers(2, compiled, "aot_eager") == [True, True]
