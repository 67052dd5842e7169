"""The coordinator's record of a job as a whole; its parts share it, and what they decide goes through its outbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.coordinator.instructions import Outbox
from offbeat.errors import PeerError
from offbeat.protocol.training import Notice

if TYPE_CHECKING:
    from offbeat.coordinator.model_record import ModelRecord
    from offbeat.coordinator.plan_proposal import DecidingParts, JudgingRule
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.robust import TooFew


@dataclass
class JobRecord:
    """One job in one incarnation of its server.

    Args:
        life: number of this incarnation.
        out: what this event leads to.
        now_s: time of this event.
        is_over: nothing is decided any more.
        models: by number.
        entries: of workers: the `OpenModel.entry` that they came with last.
        workers: that are connected.
        statuses: what workers say of themselves.
        evicted: by model and worker: why.
        validators: ranks of those that came as one, also if they are gone.
        rule: that makes updates, of its own or beside validators; None for the mean.
        too_few: what to do when fewer workers are left than that needs.
        was_ended: all workers were told that the job cannot go on.
    """

    life: int = 0
    out: Outbox = field(default_factory=Outbox)
    now_s: float = 0.0
    is_over: bool = False
    models: dict[int, ModelRecord] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)
    statuses: dict[int, TrainingStatus] = field(default_factory=dict)
    evicted: dict[tuple[int, int], str] = field(default_factory=dict)
    validators: set[int] = field(default_factory=set)
    rule: JudgingRule | None = None
    too_few: TooFew = "skip"
    was_ended: bool = False

    @property
    def compares(self) -> bool:
        """Whether a rule makes updates, so that no contribution is taken by itself."""
        return self.rule is not None

    @property
    def needs_validator(self) -> bool:
        """Whether contributions are judged beside a validator's, or by losses on its trusted samples."""
        return self.rule is not None and self.rule.needs_validator

    @property
    def needs_losses(self) -> bool:
        """Whether contributions are judged by losses."""
        return self.rule is not None and self.rule.needs_losses

    @property
    def expects_like_batches(self) -> bool:
        """Whether contributions are held against one of a validator that is as noisy as they are."""
        return self.rule is not None and self.rule.needs_reference and not self.rule.is_calibrated

    def goes_by(self, plan: DecidingParts) -> None:
        """Note by which rule updates are made, and what to do if contributions are too few."""
        self.rule, self.too_few = plan.judging_rule, plan.too_few

    def time_s(self) -> float:
        """Time of the event at hand."""
        return self.now_s

    @property
    def version(self) -> int:
        """Updates of all models together; none may be decided on while a model has not started."""
        return sum(one.runner.state.version for one in self.models.values())

    @property
    def started(self) -> bool:
        """Whether something is decided about every model."""
        return bool(self.models) and all(one.runner.started for one in self.models.values())

    @property
    def asked(self) -> set[int]:
        """The workers that are connected, without validators: who is asked what all are."""
        return self.workers - self.validators

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks of the workers that the job began with here, as far as that is known."""
        return max((one.ranks for one in self.models.values()), key=len, default=frozenset())

    def model(self, model: int, worker: int | None = None) -> ModelRecord:
        """A model that is trained.

        Args:
            worker: that is to take part in it; None if a shard speaks of it.

        Raises:
            PeerError: if it is not trained, or the worker does not take part.
        """
        one = self.models.get(model)
        if one is None or (worker is not None and worker not in one.runner.state.members):
            if worker is None:
                raise PeerError(f"A shard speaks of model {model}, which is not trained.")
            why = self.evicted.get((model, worker))
            if why is not None:
                raise PeerError(f"Rank {worker} was evicted from model {model}: {why}.")
            raise PeerError(f"Rank {worker} does not take part in model {model}.")
        return one

    def tell(self, text: str, but: int | None = None, *, waits: bool | None = None, life: int | None = None) -> None:
        """Tell people, at the server and at all workers `but` one.

        Args:
            waits, life: as of `Notice`.
        """
        self.out.log(text)
        for worker in sorted(self.workers - {but}):
            self.out.send(worker, Notice(text, waits, life))
