"""Jobs of a shard and its workers in one process, recorded; and histories that are changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import HistoryRecorder
from offbeat.fabric import ParameterServer
from offbeat.history import HistoryEnded, HistoryHeader, HistoryLog, Record, write_log
from offbeat.plan import Plan
from offbeat.protocol.training import ContributionInfo
from offbeat.server.optimizers import hyper
from tests.server.in_process import Together
from tests.server.test_shard import SOON, Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.robust import Rule
    from offbeat.sync import Policy

JOB = "made up"


class Recorded:
    """A job of some workers, each of which takes so many steps.

    Args:
        folder: for its history.
        leaves: a worker that is cut off after so many of its steps, by rank.
        rule: makes updates of what workers bring.
    """

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        *,
        world: int = 3,
        steps: int = 8,
        leaves: dict[int, int],
        rule: Rule | None = None,
    ) -> None:
        self.plan, self.steps, self.leaves = Plan(sync=policy, fabric=ParameterServer(), rule=rule), steps, leaves
        self.records: list[Record] = [HistoryHeader(1, "coordinator", JOB, 0, 0.0, "now")]
        self.folder = folder
        self.job = Together(policy, world, read_plan=Plan.from_toml, record=self.records.append, rule=rule)
        # One after another, so that all begin with what rank 0 has.
        workers = [Worker(client, plan=self.plan.to_toml()) for client in self.job.clients]
        with ThreadPoolExecutor(world) as pool:
            list(pool.map(self._train, workers))
        self.job.close()
        self.records.append(HistoryEnded())
        self.coordinator = folder / "coordinator.log"
        write_log(self.coordinator, self.records)

    def _train(self, worker: Worker) -> None:
        history, client, rank = HistoryRecorder(), worker.client, worker.client.rank
        history.open(self.folder, job=JOB, rank=rank)
        history.record_model(0, self.plan, self.job.shard.model_shard(0).details.world, worker.parameters.values())
        generator = torch.Generator().manual_seed(rank)
        for step in range(self.steps):
            if self.leaves.get(rank) == step:
                self.job.loop.call(self.job.ends[rank].cut, None)
                break
            gradient = torch.randn(100, generator=generator)
            parts = [gradient[b.offset : b.offset + b.numel].clone() for b in worker.blocks]
            weight = 1.0 + rank
            exchange = client.exchange(0, parts, about=ContributionInfo(weight, hyper(worker.optimizer)))
            assert exchange.wait(SOON)
            history.record_server_parameters(0, step, [worker.values], exchange.value, samples=weight)
        else:
            self.job.loop.call(self.job.ends[rank].cut, None)
        history.close()


def rewrite(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Have a history say something else, with all checksums right."""
    records = list(HistoryLog(path))
    change(records)
    write_log(path, records)
