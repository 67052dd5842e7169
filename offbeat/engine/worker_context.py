"""The context of one worker: where it is among the others, and the parts that are one per process.

Made in one place (`offbeat.run.session`), before the first of those parts, and handed to each of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat.engine.trusted_loss import TrustedLoss

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from offbeat.clock import Clock
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.control_group import ControlGroup
    from offbeat.engine.freshness_mode import FreshnessMode
    from offbeat.engine.history_recorder import HistoryRecorder
    from offbeat.engine.run_log import RunLog
    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.fabric import ElasticGroup
    from offbeat.server.launch import ShardSettings


@dataclasses.dataclass(frozen=True)
class LauncherInfo:
    """The launcher's information about the job around this worker.

    Args:
        servers: "host:port" of each shard of a parameter server that is there already.
        settings: how to connect with a shard, and to start one.
        survival_file: this worker creates it once the job goes on without one that is lost; None if nobody looks.
        ended: a file that is there when the job that this worker joins has ended; None if nobody creates it.
        switch: "host:port" of a switch's control; "" if none is named.
        topology: a file that says which links connect the workers; None if they are to find that out.
        first_here, here: the first of the workers on this machine, and their number; 0 if that is not known.
    """

    servers: tuple[str, ...]
    settings: ShardSettings
    survival_file: Path | None = None
    ended: Path | None = None
    switch: str = ""
    topology: Path | None = None
    first_here: int = 0
    here: int = 0

    def note_survival(self, survives: bool) -> None:
        """Tell the launcher whether a worker that is lost ends the job."""
        if self.survival_file is None:
            return
        if survives:
            self.survival_file.touch()
        else:
            self.survival_file.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """The parts that are one per worker, for all parts of a run.

    Args:
        rank: of this worker.
        world: number of workers with which it trains now, without a server that others use, too.
        began_with: number of workers that the job began with.
        joins: whether it joins a job that trains already.
        seed: of the order of samples, as given to `offbeat.init`.
        timeout: a wait longer than this is explained.
        run_dir: where metrics are written, and word for others is left; None for nowhere.
        clock: all time comes from it.
        waiter: the one waiting primitive.
        control: this worker's end of the control group.
        group: the workers, if they go on without one that is lost; else None.
        metrics: where measurements go.
        history: where digests of the parameters go.
        log: says what people should know.
        launcher: what this worker was told of the job.
        freshness: refuses to have parameters read too early, if that is asked for.
        is_validator: whether it is no worker, but computes on trusted data what workers are judged by.
        trusted_loss: that a validator's script has named.
    """

    rank: int
    world: int
    began_with: int
    joins: bool
    seed: int
    timeout: timedelta
    run_dir: Path | None
    clock: Clock
    waiter: BlockingWait
    control: ControlGroup
    group: ElasticGroup | None
    metrics: StepMetrics
    history: HistoryRecorder
    log: RunLog
    launcher: LauncherInfo
    freshness: FreshnessMode | None = None
    is_validator: bool = False
    trusted_loss: TrustedLoss = dataclasses.field(default_factory=TrustedLoss)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that train: it does what one has to do for all."""
        return self.rank == (0 if self.group is None else self.group.members[0])
