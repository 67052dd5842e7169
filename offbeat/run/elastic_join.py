"""Workers that come to a job without a server while it trains: what a run does for them, and as one of them.

All that train and the newcomers form the next generation of the group (`offbeat.engine.join`). These are handed
parameters, buffers, what the optimizers have gathered, step counts, the plan that holds and the place in the data;
then all compare their parameters, and go on. Nobody starts again, and nothing is computed twice.

A newcomer's script begins its loop, so the others have to be there, too: whatever they call behind a step (`run.mean`,
an evaluation, a learning rate's schedule) is over by then. That is

    with leased data    before the next batch is drawn, in the outermost of the loops over such data (`LoaderManager`);
                        of the next epoch, where this one has no more
    without             before the next forward pass that trains, behind a step of the model that steps last in the loop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from offbeat.diagnosis.explain import END_OF_RUN
from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import JobInfo, JoinCheck, JoinClient, JoinServer, LeaveBarrier, hand_over
from offbeat.engine.prepared_model import tensors_of
from offbeat.errors import PeerError
from offbeat.plan import Plan
from offbeat.tensors import bytes_of
from offbeat.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

    from offbeat.diagnosis.stall_witness import SentinelWitness
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.loading.manager import LoaderManager


class JoinResult(NamedTuple):
    """The ranks that joined, what becomes of the batches in words, and the plan that holds."""

    ranks: tuple[int, ...]
    changes: str
    plan: Plan


class ElasticJoin:
    """One worker's view of who comes to its job.

    Args:
        store: where the workers met.
        context: of this worker.
        models: those prepared; more may come.
        data: of the run's loops.
        newcomer: this worker, if it comes to others.
        witness: of the workers; None if there is none.
        history: the name of the run's history.
    """

    def __init__(
        self,
        store: Store,
        context: WorkerContext,
        models: ModelRegistry,
        data: LoaderManager,
        *,
        newcomer: JoinClient | None,
        witness: SentinelWitness | None,
        history: str,
    ) -> None:
        assert context.group is not None
        self._newcomer, self._control, self._group = newcomer, context.control, context.group
        self._waiter, self._models = context.waiter, models
        self._witness, self._data, self._history = witness, data, history
        self._plan = Plan()
        self._turns: list[int] = []  # the models that have stepped, in the order in which each first did
        self._is_last = False  # the last of them has stepped, so the loop begins again
        self._server = JoinServer(
            store, context.control, context.group, context.waiter, job=self._describe, version=__version__
        )

    # -- among those that train ----------------------------------------------------------------------------------

    def wants_vote(self, plan: Plan, *, looks: bool) -> bool:
        """Whether this worker wants all to come together, because somebody is ready to come in.

        Args:
            plan: that holds.
            looks: whether it is the one that looks for newcomers.
        """
        self._plan = plan
        return self._server.wants_vote(looks=looks)

    def reject_pending(self, *, looks: bool) -> None:
        """Have nobody wait to come in here, while those that train do so at a server; `looks` as in `wants_vote`."""
        self._server.reject_pending(looks=looks)

    def stepped(self, model: int) -> None:
        """A model has stepped."""
        if model not in self._turns:
            self._turns.append(model)
        self._is_last = model == self._turns[-1]

    def agree_on_newcomers(self) -> None:
        """Learn who comes in where the loop begins again. Collective, behind a step of all."""
        self._server.agree_on_newcomers()

    def admit(self, plan: Plan, *, drawing: bool) -> JoinResult | None:
        """Have those come in that are expected; None if there are none. Collective, where the loop may begin again.

        Args:
            plan: that holds.
            drawing: whether a batch of leased data is about to be drawn; else a forward pass is about to begin.
        """
        if not self._server.expects or not self._begins_again(drawing=drawing):
            return None
        if not self._data.is_settled:
            self._server.postpone()
            return None
        for one in self._models.together:
            one.even_out()
        ranks = self._server.admit_pending()
        if not ranks:
            return None
        self._transfer_state(self._state(plan, ranks))
        return JoinResult(ranks, self._data.join(ranks), plan)

    def _begins_again(self, *, drawing: bool) -> bool:
        """Whether the script's loop does, here."""
        if self._data.leased:
            return drawing and not self._data.is_through
        return not drawing and self._is_last

    def _describe(self) -> JobInfo | None:
        # Data that is not leased is dealt out for the whole job.
        if self._witness is None or len(self._data.leased) < len(self._data.loaders):
            return None
        claims = tuple(JoinCheck(*one) for one in self._control.checks_made)
        return JobInfo(self._plan.to_toml(), self._witness.watch.hub, self._witness.watch.token, self._history, claims)

    def _state(self, plan: Plan, ranks: Sequence[int]) -> dict[str, Any]:
        return {
            "plan": plan.to_toml(),
            "newcomers": list(ranks),
            "exchanges": 0 if self._witness is None else self._witness.exchanges,
            "models": [
                {"tensors": dict(tensors_of(model)), "exchanger": one.hand_over()}
                for model, one in zip(self._models.modules, self._models.together, strict=True)
            ],
            "loaders": self._data.hand_over(),
            "turns": self._turns,
        }

    def leave(self, told_at: int | None = None) -> None:
        """Leave when done: wait until all are, or the others train without this worker.

        Args:
            told_at: behind which of its steps, if it was asked to leave.

        Raises:
            WorkerLostError, NetworkError: as `BlockingWait.wait`.
        """
        self._waiter.wait(LeaveBarrier(self._group, told_at), WaitContext(END_OF_RUN))

    # -- as a newcomer -------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether this worker is a newcomer that has prepared all that the others have."""
        return self._newcomer is not None and self._newcomer.is_complete

    @property
    def is_outside(self) -> bool:
        """Whether this worker is a newcomer that is not in yet."""
        return self._newcomer is not None

    def join(self) -> JoinResult:
        """Take part from now on, with what the others have.

        Raises:
            PlanError: if this worker is not let in.
            WorkerLostError: if nobody trains any more.
            PeerError: if it has not become what the others are.
        """
        assert self._newcomer is not None
        self._newcomer.join(self._group, lambda: {} if self._witness is None else self._witness.ended())
        self._newcomer = self._control.newcomer_check = None
        state = self._transfer_state(None)
        plan, ranks = Plan.from_toml(state["plan"]), tuple(int(rank) for rank in state["newcomers"])
        for one, theirs in zip(self._models.together, state["models"], strict=True):
            one.take_over(theirs["exchanger"], plan)
        if self._witness is not None:
            self._witness.exchanges = int(state["exchanges"])
        self._turns = [int(model) for model in state["turns"]]
        return JoinResult(ranks, self._data.join(ranks, state["loaders"]), plan)

    def _transfer_state(self, mine: dict[str, Any] | None) -> dict[str, Any]:
        state = hand_over(self._control, lambda: self._group.members[0], mine)
        if mine is None:
            with torch.no_grad():
                for model, theirs in zip(self._models.modules, state["models"], strict=True):
                    for name, tensor in tensors_of(model):
                        tensor.copy_(theirs["tensors"][name])
        digest = xxhash.xxh3_64()
        for model in self._models.modules:
            for _, tensor in tensors_of(model):
                digest.update(bytes_of(tensor))
        # A newcomer tells nothing of its own: only what those that train have counts.
        said = digest.hexdigest()
        texts = self._control.texts("the comparison with new workers", "" if mine is None else said)
        if mine is None and said not in texts.values():
            raise PeerError("Cannot join: this worker's parameters are those of no worker of the job. Start it again.")
        return state
