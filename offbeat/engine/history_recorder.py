"""The records of a worker in the history of its run: a digest of the parameters it has after each of its steps.

Where a switch's table lets workers go on at their own pace: by what it did, and a digest whenever all are settled.

The digest (xxh3, 64 bits) is of all parameters' bytes, in order of their names' registration or of the server's blocks:
the same on all workers. It is made by the training thread, as the parameters change with the next step: 1 ms for some
10 MB, and for parameters on another device the time to copy them. `every` makes it of fewer steps.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from offbeat.errors import PlanError
from offbeat.history import (
    CheckpointLoaded,
    FabricMigrated,
    HistoryWriter,
    ModelPrepared,
    ParametersAfter,
    PlanAdopted,
    StepGranted,
    WorkersAdmitted,
)
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.plan import Plan
    from offbeat.server.client.requests import PulledParameters
    from offbeat.switch.table_client import StepGrant

_log = logging.getLogger("offbeat")


class HistoryRecorder:
    """One worker's, of all its models. Without a folder nothing is written, and nothing is computed.

    Args:
        every: steps between two digests.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._writer: HistoryWriter | None = None
        self._folder, self._rank = Path(), 0

    def open(self, folder: Path, *, job: str, rank: int) -> None:
        """Begin a file of this process.

        Raises:
            PlanError: if it cannot be written.
        """
        self._folder, self._rank = folder, rank
        try:
            self._writer = HistoryWriter(folder, f"worker-{rank}", kind="worker", job=job, rank=rank)
        except OSError as error:
            why = error.strerror or error
            raise PlanError(f"Cannot keep a history in {folder}: {why}. Choose another folder.") from error

    @property
    def is_kept(self) -> bool:
        """Whether anything is written."""
        return self._writer is not None

    def record_model(self, model: int, plan: Plan, world: int, parameters: Iterable[torch.Tensor]) -> None:
        """A model is prepared."""
        if self._writer is not None:
            self._writer.append(ModelPrepared(model, plan.to_toml(), world, sum(p.numel() for p in parameters)))

    def record_plan(self, plan: Plan) -> None:
        """Another plan holds, without a server."""
        if self._writer is not None:
            self._writer.append(PlanAdopted(plan.to_toml()))

    def record_newcomers(self, ranks: Iterable[int]) -> None:
        """Record that other workers have joined, without a server."""
        if self._writer is not None:
            self._writer.append(WorkersAdmitted(tuple(ranks)))

    def record_parameters(
        self,
        model: int,
        step: int,
        tensors: Iterable[torch.Tensor],
        *,
        samples: float = 0.0,
        weights: tuple[float, ...] = (),
        given: tuple[float, ...] = (),
    ) -> None:
        """The parameters after a step, without a server.

        Args:
            weights: in the step's exchange: this worker's, and the sums over all workers.
            given: of this worker's, what is in each of these sums, where they may be of some workers.
        """
        if self._writer is None:
            return
        now_s = time.monotonic()
        self._writer.append(
            ParametersAfter(model, step, now_s, self._digest(step, tensors), samples, weights=weights, given=given)
        )

    def record_grant(self, model: int, grant: StepGrant) -> None:
        """Record by what a switch's table let this worker go on."""
        if self._writer is not None:
            self._writer.append(StepGranted(model, *grant))

    def record_contribution(self, model: int, step: int, result: ExchangeResult, *, samples: float) -> None:
        """Record what this worker contributed to a step that it does not make itself: it leaves after the exchange.

        Args:
            result: of that exchange.
        """
        if self._writer is not None:
            at_s, weights, given = time.monotonic(), result.weights, result.given
            self._writer.append(ParametersAfter(model, step, at_s, None, samples, weights=weights, given=given))

    def record_server_parameters(
        self,
        model: int,
        step: int,
        tensors: Iterable[torch.Tensor],
        pulled: PulledParameters,
        *,
        samples: float = 0.0,
        brought: bool = True,
    ) -> None:
        """The parameters that the server gave.

        Args:
            step: that was exchanged, or the next one, if nothing was brought.
            pulled: what the server said about them.
            samples: that the contribution weighs.
            brought: whether there was one.
        """
        if self._writer is None:
            return
        now_s = time.monotonic()
        versions = pulled.versions
        if len(set(versions)) > 1:
            each = xxhash.xxh3_64_intdigest(",".join(map(str, versions)).encode())
            versions = (min(versions), max(versions), each)
        digest = self._digest(step, tensors, always=not brought)
        numbers = pulled.announced if brought else ()
        is_counted = brought and pulled.is_counted
        self._writer.append(
            ParametersAfter(model, step, now_s, digest, samples, pulled.life, versions[:3], numbers, is_counted)
        )

    def record_departure(self, place: str, job: str, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """A stretch ends, with a server or without, and another begins, in a file of its own.

        Args:
            place: its name.
            job: of the stretch that begins.
            step: that all go on with.
            tensors: of all models.
        """
        if self._writer is None:
            return
        self._writer.append(FabricMigrated(place, step, self._digest_of(tensors)))
        self._writer.close("")
        try:
            self.open(self._folder, job=job, rank=self._rank)
        except PlanError as error:  # a full disk is no reason to end the run
            self._writer = None
            _log.warning("%s", error)

    def record_arrival(self, place: str, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """The stretch has begun; what all have there."""
        if self._writer is not None:
            self._writer.append(FabricMigrated(place, step, self._digest_of(tensors)))

    def record_loaded(self) -> None:
        """A checkpoint is taken over."""
        if self._writer is not None:
            self._writer.append(CheckpointLoaded())

    def close(self, why: str = "") -> None:
        """Record the end of this process; `why`, if the job does not end."""
        if self._writer is not None:
            self._writer.close(why)

    def _digest(self, step: int, tensors: Iterable[torch.Tensor], *, always: bool = False) -> int | None:
        if step % self._every and not always:
            return None
        return self._digest_of(tensors)

    @staticmethod
    def _digest_of(tensors: Iterable[torch.Tensor]) -> int:
        digest = xxhash.xxh3_64()
        for tensor in tensors:
            digest.update(bytes_of(tensor.detach().cpu()))
        return digest.intdigest()
