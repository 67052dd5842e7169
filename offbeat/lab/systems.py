"""offbeat and the systems it is compared with, behind one function.

The only file that knows stock DistributedDataParallel. A worker program calls `bind` with its model and optimizer and
trains what comes back; which system carries the gradients is the scenario's choice.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import ScenarioError
from offbeat.run.run import init

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.run.run import Run

POWERSGD_START = 2
"""torch's PowerSGD sends the first steps dense: DDP moves its buckets once, after the first."""

_ONE_BUCKET = 1 << 40
"""torch's PowerSGD issues its later rounds from callbacks; with several buckets in flight their order differs between
ranks, and on Gloo the workers then end through C++ terminate. So it gets all gradients in one bucket."""

_last_works: list[Any] = []  # kept until the process ends


@dataclass
class Bound:
    """A model and an optimizer whose gradients some system keeps equal on all workers. `run` is offbeat's, if it is."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    run: Run | None
    _resources: ExitStack
    loader: Any = None  # only where offbeat tunes batches

    def settle(self) -> None:
        """Make all replicas equal now, before a digest of them is made; ddp's are after every step. Collective."""
        if self.run is not None:
            self.run.settle()

    def common_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Copy a model's state as it is to be evaluated now: with what all workers have in common, if that is never
        what this one trains (`LocalSGD` with a delay or fragments).
        """
        state = dict(model.state_dict())
        if self.run is not None and not self.averages_replicas:
            for one in self.run._session.models.synchronizers:
                state |= one.anchors
        return copy.deepcopy(state)

    @property
    def averages_replicas(self) -> bool:
        """Whether it is the mean of all replicas that is trained, and each worker has to bring its own to see it."""
        return self.run is not None and not self.run.plan.is_served and bool(self.run.plan.codec.promises.offset)

    def mean_of(self, model: torch.nn.Module, states: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """The means of the states that all workers had at several moments. Collective; the model stays as it is."""
        assert self.run is not None
        own, means = copy.deepcopy(model.state_dict()), []
        for state in states:
            model.load_state_dict(state)
            with self.run.averaged():
                means.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict(own)
        return means

    def close(self) -> None:
        """Leave the other workers. Collective."""
        self._resources.close()


def bind(
    system: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    bucket_bytes: int | None = None,
    loader: Any = None,
) -> Bound:
    """Hand `model` to a system. Collective: every worker calls it.

    Args:
        system: "offbeat" (with the plan in the environment), "ddp", "ddp+restarts", "ddp+bf16", "ddp+powersgd" or
            "torchft".
        bucket_bytes: DDP's bucket size; None is its default. offbeat's stands in its plan.
        loader: a `DataLoader` that is prepared if the plan tunes batches.

    Raises:
        ScenarioError: if there is no such system, or it is not installed.
    """
    resources = ExitStack()
    if system == "offbeat":
        run = init()
        resources.callback(run.close)
        if run.plan.tuning is not None and loader is not None:
            replica, optimizer, loader = run.prepare(model, optimizer, loader)
            return Bound(replica, optimizer, run, resources, loader)
        replica, optimizer = run.prepare(model, optimizer)
        return Bound(replica, optimizer, run, resources)
    if system == "torchft":
        from offbeat.lab import torchft_peer

        return Bound(*torchft_peer.wrap(model, optimizer, bucket_bytes, resources), None, resources)
    hooks = {"ddp": None, "ddp+restarts": None, "ddp+bf16": _cast_to_bf16, "ddp+powersgd": _powersgd}
    if system not in hooks:
        raise ScenarioError(
            f"Unknown system {system!r}. Use offbeat, torchft or one of {', '.join(hooks)} (row.system)."
        )
    dist.init_process_group("gloo")
    resources.callback(dist.destroy_process_group)
    resources.callback(_barrier)
    if system == "ddp+powersgd":
        bucket_bytes = _ONE_BUCKET
    wrapped = DistributedDataParallel(model, bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20)
    hook = hooks[system]
    if hook is not None:
        hook(wrapped)
    return Bound(wrapped, optimizer, None, resources)


def _barrier() -> None:
    """Wait for all: otherwise a worker that is done closes its sockets while another still reads its last bucket."""
    # Seen once in some twenty runs with a communication hook: DDP's reducer, the last to know the group, is deallocated
    # with the GIL held and joins Gloo's thread, which needs the GIL to drop the last reference to this operation.
    work = dist.barrier(async_op=True)
    work.wait()
    _last_works.append(work)


def _cast_to_bf16(model: DistributedDataParallel) -> None:
    # By its own name DDP refuses the hook without NCCL; Gloo sums bf16 all the same.
    def bf16_on_gloo(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(group, bucket)

    # DDP compares the annotations with its own types, and here they are strings.
    bf16_on_gloo.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, bf16_on_gloo)


def _powersgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=POWERSGD_START
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
