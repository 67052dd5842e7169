"""A fit by all workers of a job, on one machine or several: each has some of the groups, and the largest are split.

    fitted = GroupedTrainer(Logistic(), by="store", target="sold", executor=Ranks()).fit("sales/*.parquet")

in a script that `offbeat run --workers 4` or torchrun starts. Each worker reads a part of the table. Groups are counted
by all; then rows go to the workers that fit them (`partition`), part after part in the order of the table, so that a
group that is whole has the same model, to the bit, whoever fits it. A worker fits its whole buckets while it waits for
the others' parts of split groups. In the end all workers have all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.groups.buckets import BUCKET_BYTES
from offbeat.groups.this_process import ThisProcess

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.groups.group_job import JobMaker
    from offbeat.groups.records import GroupModels
    from offbeat.groups.table_input import TableInput
    from offbeat.groups.this_process import Progress


@dataclass(frozen=True)
class Ranks:
    """Fit groups by all workers that torchrun or `offbeat run` has started, each of which calls `fit`. An `Executor`.

    Args:
        own_rows: whether each worker is given a table of its own; else all are given the same one, and each reads a
            part of it.
        bucket_bytes: of rows that are in memory together; a group that has fewer than a quarter is not split.
    """

    own_rows: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def fit(self, trainer: JobMaker, table: TableInput, progress: Progress, folder: Path | None) -> GroupModels:
        """Fit all groups of a table. Collective.

        Raises:
            DisagreementError: if the workers fit different things.
            GroupDataError: if models are neither numbers nor texts, as those of `Estimator`.
            NetworkError: if one cannot be reached, or is lost.
        """
        # Whoever fits in one process does not pay for what several need: it takes a second to import.
        import torch.distributed as dist

        from offbeat.groups.carrier import ObjectCarrier
        from offbeat.groups.job_meeting import JobMeeting, join_job
        from offbeat.groups.shared_fit import SharedFit

        join_job()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ThisProcess(self.bucket_bytes).fit(trainer, table, progress, folder)
        carrier = ObjectCarrier(dist.get_rank(), dist.get_world_size(), JobMeeting())
        try:
            fit = SharedFit(carrier, trainer, table, own_rows=self.own_rows, bucket_bytes=self.bucket_bytes)
            made = fit.run(progress, folder)
        except BaseException as error:
            carrier.abandon(error)
            raise
        carrier.close()
        return made
