"""The hooks around each step of the script's loop: exchange, then whatever all do together.

Call order: `claim` and `attach` when a model is prepared. Each step: `before_forward` for each forward pass that
trains; `before_step` and `after_step` around the optimizer's step. Where leased data is drawn the loader calls
`on_loop` and `before_draw` instead of `before_forward`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import torch

from offbeat.codec import Rescales
from offbeat.engine import ignored_names
from offbeat.errors import ModelError
from offbeat.exit_codes import LEFT
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

    from offbeat.engine import SwitchableSync
    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.run.elastic_join import JoinResult
    from offbeat.run.session import WorkerSession

_log = logging.getLogger("offbeat")
_REPLACE_IT = "If it replaces that one, call model, optimizer = run.prepare(model, optimizer) again, on every worker."
KEEP_IT = (
    "Keep the prepared one, whose groups (lr, weight_decay, ...) may be changed at any time; for another optimizer, "
    "begin another run: run.close(), offbeat.init(), run.prepare."
)


class StepHooks:
    """The hooks of one worker, for all its models; the `LoopObserver` of its loaders.

    Args:
        session: of the worker.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        if session.steps is not None:
            session.steps.on_other = self.other_stepped
        self._attached: dict[int, tuple[RemovableHandle, ...]] = {}  # to the optimizer of each model
        self._told_untuned = self._looked_for_scaler = False
        self._names: dict[int, str] = {}  # of the parameters of all prepared models, by id
        self._ignored: set[int] = set()  # ids of parameters that the user asked not to average

    def claim(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Average these parameters from now on.

        Raises:
            ModelError: if one of them is already, as part of another model.
        """
        taken = [name for name, p in parameters.items() if id(p) in self._names]
        if taken:
            raise ModelError(
                f"Cannot prepare {taken[0]} twice: it is {self._names[id(parameters[taken[0]])]} of a model that "
                "was prepared before, and would be averaged twice. Prepare one module that holds all parts."
            )
        self._names.update({id(p): name for name, p in parameters.items()})
        ignored = ignored_names(model)
        self._ignored |= {id(p) for name, p in model.named_parameters() if name in ignored}

    def attach(self, one: PreparedModel, synchronizer: SwitchableSync, check: Callable[[], None]) -> None:
        """Exchange around the steps of the model's optimizer from now on, and of no earlier one.

        Args:
            check: called before each step.
        """
        optimizer = one.optimizer

        def before() -> None:
            check()
            self.before_step(optimizer, synchronizer)

        self.detach(one.number)
        self._attached[one.number] = (
            optimizer.register_step_pre_hook(lambda *_: before()),
            optimizer.register_step_post_hook(lambda *_: self.after_step(one.number, synchronizer)),
        )
        if self._session.steps is not None:
            self._session.steps.prepared(optimizer)

    def detach(self, number: int) -> None:
        """Take the hooks off the optimizer of this model, if they are on one."""
        for hook in self._attached.pop(number, ()):
            hook.remove()

    # -- called around a step ------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """A forward pass that trains is about to begin."""
        if not self._session.uneven.is_open:
            self.admit(drawing=False)

    def before_step(self, optimizer: torch.optim.Optimizer, synchronizer: SwitchableSync) -> None:
        """The optimizer is about to step.

        Raises:
            ModelError: if a parameter has a gradient that was not averaged, or gradients are scaled that have a
                residual.
        """
        if not self._looked_for_scaler:
            self._looked_for_scaler = True
            self._check_scaler()
        session, world = self._session, self._session.context.world
        if session.plan.tuning is not None and world > 1 and not session.data.loaders and not self._told_untuned:
            self._told_untuned = True
            _log.warning("Batches are not tuned: %s needs a prepared DataLoader.", short_name(session.plan.tuning))
        session.data.stepped()
        session.plans.take_plan()
        synchronizer.before_step()
        if world > 1:
            self._check_averaged(optimizer)

    def _check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) not in self._names and id(p) not in self._ignored:
                    raise ModelError(
                        f"Cannot step: a parameter of shape {list(p.shape)} has a gradient that was not averaged, "
                        "because it was frozen, or not there, when the model was prepared. Unfreeze and add parameters "
                        "before prepare."
                    )

    def other_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Look at an optimizer that was not prepared and has stepped; return whether it may go on doing so.

        Raises:
            ModelError: if the workers' replicas come apart by it.
        """
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        kind, world = type(optimizer).__name__, self._session.context.world
        for one, synchronizer in self._session.models.pairs():
            own = [held[id(p)] for p in one.parameters.values() if id(p) in held]
            if not own:
                continue
            if all(p.grad is None for p in own):
                return False
            prepared = type(one.optimizer).__name__
            if why := synchronizer.needs_its_optimizer:
                way_out = KEEP_IT if synchronizer.plan.is_served else _REPLACE_IT
                raise ModelError(
                    f"Cannot step a prepared model with another optimizer ({kind}) than the {prepared} that was "
                    f"prepared with it: {why}. {way_out}"
                )
            if world > 1 and torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"Cannot step a prepared model with {kind} within backward: its gradients are averaged over the "
                    "workers only when backward ends. Step after it, with the optimizer that was prepared."
                )
            if world > 1:
                self._check_averaged(optimizer)
                _log.warning(
                    "A prepared model is stepped by another optimizer (%s) than the %s that was prepared with it. "
                    "Gradients are still averaged; but plan swaps, workers that join, and the history follow the "
                    "prepared one. %s",
                    *(kind, prepared, _REPLACE_IT),
                )
        return True

    def _check_scaler(self) -> None:
        plan = self._session.plan
        if plan.is_served or not isinstance(plan.working_codec, Rescales) or not _steps_in_scaler():
            return
        raise ModelError(
            f"Cannot train with GradScaler and {short_name(plan.codec)}: gradients are exchanged while they are "
            "multiplied by its scale, and what is not sent would be fed back when that is another one. Use autocast "
            "with bfloat16, which needs no scaler, or ErrorReset(...) - at `plan.codec`."
        )

    def after_step(self, model: int, synchronizer: SwitchableSync) -> None:
        """The optimizer has stepped."""
        session = self._session
        result = synchronizer.after_step()
        session.came_with = []
        if session.server is None and synchronizer.step and not session.plan.is_tabled:
            self._record(model, synchronizer, result)
        if session.uneven.is_open:
            pass  # those that are done make no step, behind which all could confer
        elif synchronizer.is_collective:
            self._vote_if_asked(model, synchronizer, result)
        else:
            if session.membership is not None:
                session.membership.reject_pending(looks=session.context.is_first)
            if not session.data.leased:
                session.plans.at_sync_point()
        if session.drains:  # not before the script is through with this step
            session.drains = False
            for prepared in session.models.modules:
                prepared.register_forward_pre_hook(lambda *_: self._drain())

    def _record(self, model: int, synchronizer: SwitchableSync, result: ExchangeResult | None) -> None:
        """Write the parameters after a step into the history."""
        step = synchronizer.step - 1
        weights, given = ((), ()) if result is None else (result.weights, result.given)
        context = self._session.context
        if context.history.is_kept:
            synchronizer.synchronize()
        parameters = synchronizer.history_values.values()
        samples = context.metrics.last_samples
        context.history.record_parameters(model, step, parameters, samples=samples, weights=weights, given=given)

    # -- what all do together ------------------------------------------------------------------------------------

    def on_loop(self) -> None:
        """A loop over leased data begins."""
        self._session.plans.at_sync_point()

    def before_draw(self) -> None:
        """The next batch of leased data is about to be drawn."""
        self.admit(drawing=True)

    def _vote_if_asked(self, model: int, synchronizer: SwitchableSync, result: ExchangeResult | None) -> None:
        session = self._session
        # The first one may come too late for every update, and what it wants with it: so whoever is in this one looks.
        is_heard = result is not None and any(result.given)
        looks = is_heard if session.plan.has_quorum else session.context.is_first
        wanted = session.plans.wants_vote(looks=looks, step_times={} if result is None else result.step_times)
        if session.membership is not None:
            session.membership.stepped(model)
            wanted |= session.membership.wants_vote(session.plan, looks=looks)
        if not model:
            wanted |= session.rerouting.wants_vote()
        synchronizer.accounting.requests_vote = wanted or synchronizer.wants_vote
        if result is not None and result.vote_requested:
            self._hold_vote()

    def _hold_vote(self) -> None:
        """Have another plan hold, and expect newcomers, if that is wanted. Collective, behind a step of all."""
        session = self._session
        for one in session.models.synchronizers:
            one.vote()
        session.plans.hold_vote()
        if session.membership is not None:
            session.membership.agree_on_newcomers()
        session.rerouting.hold_vote()
        for one in session.models.synchronizers:
            one.accounting.requests_vote = False

    def admit(self, *, drawing: bool) -> None:
        """Admit those that are expected, if all are where a newcomer begins. Collective there.

        Args:
            drawing: whether a batch of leased data is about to be drawn; else a forward pass is about to begin.
        """
        session = self._session
        if session.membership is None or session.server is not None:
            return
        if joined := session.membership.admit(session.plan, drawing=drawing):
            self.tell_of(joined)
            session.context.history.record_newcomers(joined.ranks)
            session.plans.joined(joined.ranks)

    def tell_of(self, joined: JoinResult) -> None:
        """Say who has joined, and what that changes."""
        context = self._session.context
        assert context.group is not None
        has = "has" if len(joined.ranks) == 1 else "have"
        context.log.all(
            "membership",
            f"Rank {', '.join(map(str, joined.ranks))} {has} joined at step {self._session.models.step}: "
            f"{len(context.group.members)} workers take part; {joined.changes}.",
        )

    def _drain(self) -> None:
        """Leave the others in order, between two steps, and end as one who was told to."""
        if self._session.close(None) is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LEFT)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _steps_in_scaler() -> bool:
    """Whether the step that is about to be made is made by a `torch.amp.GradScaler` that is enabled."""
    frame = sys._getframe()
    while (above := frame.f_back) is not None:
        frame = above
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return bool(getattr(frame.f_locals.get("self"), "_enabled", True))
    return False
