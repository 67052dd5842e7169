"""Every optimizer that a server can hold: its state out and in again is the same as if nothing had happened."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.layout import arrange
from offbeat.protocol.shards import (
    AdmitWorker,
    ApplyContributions,
    CommitUpdates,
    ReleaseFromShard,
    WithdrawContribution,
    WorkerRemoved,
)
from offbeat.protocol.training import BlockOf, ContributionInfo, DensePayload, ModelInfo, PieceOf
from offbeat.server import optimizers
from offbeat.server.blocks import cut
from offbeat.server.optimizer_checkpoint import from_bytes, gather, scatter, to_bytes
from offbeat.server.optimizers import describe
from offbeat.server.pushed_block import PushedBlock
from offbeat.server.shard.model_shard import ModelShard
from offbeat.server.snapshot import FORMAT, Snapshot, SnapshotHeader, SnapshotId, describe_tensor, read, write
from offbeat.sync import BSP
from tests.server.in_process import Together
from tests.server.test_shard import SOON, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec

    Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"lambd": 1e-2, "alpha": 0.7, "t0": 2, "weight_decay": 0.01}],
    "Adadelta": [{"rho": 0.8, "weight_decay": 0.01, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{"betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.01}, {"decoupled_weight_decay": True}],
    "AdamW": [{}, {"betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.1}],
    "Adamax": [{"betas": (0.8, 0.95), "weight_decay": 0.01}],
    "NAdam": [{"momentum_decay": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{"betas": (0.8, 0.9), "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.5, "centered": True}],
    "Rprop": [{"etas": (0.4, 1.3), "step_sizes": (1e-4, 1.0)}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}],
}
ALL = pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind in optimizers._CLASSES for options in OPTIONS[kind]],
    ids=lambda it: it if isinstance(it, str) else ",".join(it) or "plain",
)
NUMEL = {"a": 30, "b": 70}


def made(kind: str, options: dict[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    make: Any = optimizers._CLASSES[kind]
    optimizer: torch.optim.Optimizer = make(parameters, **{"lr": 0.05, **options})
    return optimizer


def gradients(first: int, last: int) -> list[torch.Tensor]:
    return [torch.randn(sum(NUMEL.values()), generator=torch.Generator().manual_seed(n)) for n in range(first, last)]


def dense(part: torch.Tensor) -> PushedBlock:
    return PushedBlock(DensePayload(), part.clone())


# -- snapshots ---------------------------------------------------------------------------------------------------------


class Alone:
    """A shard's table, and the one worker that brings to it."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        parameters = {name: torch.zeros(numel) for name, numel in NUMEL.items()}
        self.blocks = cut(arrange(parameters, bucket_bytes=1 << 20), 64)
        names = tuple(NUMEL)
        blocks = tuple(
            BlockOf(b.index, b.dtype, tuple(PieceOf(names.index(p.name), p.start, p.numel) for p in b.pieces))
            for b in self.blocks
        )
        details = ModelInfo(1, 1, 1, "p", "l", names, blocks, optimizer)
        self.model_shard = ModelShard(0, details, lambda worker, message, values: None)
        for block in self.blocks:  # as the first worker does; nobody has zeroed them
            self.model_shard.values(block.index).zero_()
        self._clock = 0
        self.model_shard.decide(AdmitWorker(0, 0, 0))

    def step(self, gradient: torch.Tensor, hyper: tuple[Hyper, ...], half: torch.Tensor | None = None) -> None:
        """One update.

        Args:
            half: of what another worker brings to it, only the first half of the blocks comes.
        """
        push = (0, self._clock)
        pushes = (push,) if half is None else (push, (1, 0))
        self.model_shard.decide(
            ApplyContributions(0, pushes, (ContributionInfo(1.0, ()),) * len(pushes), hyper, 1.0, in_order=half is None)
        )
        for block in self.blocks[: 0 if half is None else len(self.blocks) // 2]:
            assert half is not None
            self.model_shard.arrive((1, 0), block.index, dense(half[block.offset : block.offset + block.numel]))
        for block in self.blocks:
            self.model_shard.arrive(push, block.index, dense(gradient[block.offset : block.offset + block.numel]))
        self.model_shard.decide(CommitUpdates(0, *push))
        self._clock += 1
        self.model_shard.decide(ReleaseFromShard(0, 0, self._clock))

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([self.model_shard.values(block.index) for block in self.blocks])

    def parts_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's, of what lies as the blocks do."""
        pieces = [piece for block in self.blocks for piece in block.pieces]
        parts = list(zip(pieces, flat.split([piece.numel for piece in pieces]), strict=True))
        return {name: torch.cat([part for piece, part in parts if piece.name == name]) for name in NUMEL}

    def snapshot(self) -> Snapshot:
        values = {block: self.model_shard.values(block) for block in self.model_shard.blocks}
        tensors = [(describe_tensor(0, block, "", "", value), value) for block, value in values.items()]
        tensors += [
            (describe_tensor(0, it.block, it.name, it.key, it.tensor), it.tensor) for it in self.model_shard.state()
        ]
        return Snapshot(SnapshotHeader(FORMAT, "", SnapshotId(0, 0), 1, ()), tensors)


def through_a_file(snapshot: Snapshot) -> Snapshot:
    file = io.BytesIO()
    write(file, snapshot)
    return read(io.BytesIO(file.getvalue()))


@ALL
def test_a_server_that_was_killed_goes_on_from_its_snapshot(kind: str, options: dict[str, Any]) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in NUMEL.items()}
    optimizer = made(kind, options, [{"params": [parameters["a"]]}, {"params": [parameters["b"]], "lr": 0.02}])
    spec = describe(optimizer, {id(p): name for name, p in parameters.items()})
    whole, half, rest = Alone(spec), Alone(spec), Alone(spec)
    for gradient in gradients(0, 6):
        whole.step(gradient, spec.groups)
        for name, part in whole.parts_of(gradient).items():
            parameters[name].grad = part
        optimizer.step()
    for name, part in whole.parts_of(whole.values).items():
        torch.testing.assert_close(part, parameters[name].detach(), msg="it is the optimizer itself")
    for gradient in gradients(0, 3):
        half.step(gradient, spec.groups)
    for what, tensor in through_a_file(half.snapshot()).tensors:
        rest.model_shard.restore(what, tensor)
    for gradient in gradients(3, 6):
        rest.step(gradient, spec.groups)
    assert whole.values.any()
    assert torch.equal(rest.values, whole.values)


@ALL
def test_what_is_withdrawn_leaves_no_trace(kind: str, options: dict[str, Any]) -> None:
    """Neither in the parameters nor in what the optimizer keeps, whatever was made in these blocks since."""
    parameters = {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in NUMEL.items()}
    spec = describe(made(kind, options, parameters.values()), {id(p): name for name, p in parameters.items()})
    one, other = Alone(spec), Alone(spec)
    for gradient in gradients(0, 2):
        one.step(gradient, spec.groups)
        other.step(gradient, spec.groups)
    one.model_shard.decide(AdmitWorker(0, 1, 0))
    one.step(gradients(2, 3)[0], spec.groups, half=gradients(9, 10)[0])
    other.step(gradients(2, 3)[0], spec.groups)
    one.step(gradients(3, 4)[0], spec.groups, half=None)
    other.step(gradients(3, 4)[0], spec.groups)
    assert not torch.equal(one.values, other.values)
    one.model_shard.decide(WorkerRemoved(0, 1))
    one.model_shard.decide(WithdrawContribution(0, 1, 0))
    assert as_bytes(one) == as_bytes(other)


def as_bytes(one: Alone) -> bytes:
    file = io.BytesIO()
    write(file, one.snapshot())
    return file.getvalue()


def test_momentum_that_began_later_is_in_a_snapshot_too() -> None:
    """What is kept follows from the hyper-parameters as they are, not as they were when the model was opened."""
    parameters = {name: torch.nn.Parameter(torch.zeros(numel)) for name, numel in NUMEL.items()}
    spec = describe(torch.optim.SGD(parameters.values(), lr=0.1), {id(p): name for name, p in parameters.items()})
    later = ({**spec.groups[0], "momentum": 0.9},)
    half, rest = Alone(spec), Alone(spec)
    for gradient in gradients(0, 2):
        half.step(gradient, later)
    for what, tensor in through_a_file(half.snapshot()).tensors:
        rest.model_shard.restore(what, tensor)
    for one in (half, rest):
        one.step(gradients(2, 3)[0], later)
    assert torch.equal(rest.values, half.values)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trained(make: Make, first: int, last: int, checkpoint: tuple[torch.Tensor, bytes] | None = None) -> Any:
    """Values and state after steps `first` to `last` at a server of its own; as `ServerSync` saves and loads them."""
    job = Together(BSP(), 1)
    try:
        worker = Worker(job.clients[0], make=make)
        if checkpoint is None:
            worker.values.zero_()
            checkpoint = (worker.values.clone(), to_bytes({}))
        worker.values.copy_(checkpoint[0])
        assert worker.client.put(0, list(scatter(from_bytes(checkpoint[1]), worker.blocks))).wait(SOON)
        assert worker.client.ask("the newest parameters", refresh=True).wait(SOON)
        for gradient in gradients(first, last):
            worker.step(gradient)
        fetched = worker.client.fetch(0)
        assert fetched.wait(SOON)
        return worker.values.clone(), to_bytes(gather(fetched.value, worker.blocks))
    finally:
        job.close()


@ALL
def test_a_checkpoint_goes_on_where_it_was(kind: str, options: dict[str, Any]) -> None:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return made(kind, options, parameters)

    whole, state = trained(make, 0, 6)
    rest, rest_state = trained(make, 3, 6, trained(make, 0, 3))
    assert whole.any()
    assert torch.equal(rest, whole)
    assert rest_state == state
