"""Inputs that end on one worker sooner than on others, where no loader is prepared: `with model.join():`.

As with a prepared loader, a worker that is done takes part with weight 0 until all are.

    before an exchange    each worker asks all: those that have a gradient say so, and of which model
    a worker is done      at the end of the block it answers, and takes part with nothing, until nobody has anything
    then                  it goes on with the parameters, buffers and optimizer state of those that were there last: it
                          has made none of their steps

Until then no plan is swapped and nobody comes in, without a server: a worker that is done makes no steps. With one a
worker that is done has only to wait for the others, and take the newest parameters.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import hand_over
from offbeat.engine.optimizer_state import load_optimizer_state, optimizer_state
from offbeat.engine.prepared_model import tensors_of
from offbeat.errors import DisagreementError, ModelError, PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from offbeat.engine import SwitchableSync
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.worker_context import WorkerContext

_log = logging.getLogger("offbeat")
_QUESTION = "who has inputs, within join()"


class UnevenInputs:
    """One worker's, of all models.

    Args:
        context: of this worker.
        models: those prepared; more may come.

    Attributes:
        is_open: whether the script is within `join`.
    """

    def __init__(self, context: WorkerContext, models: ModelRegistry) -> None:
        self._control, self._history, self._log = context.control, context.history, context.log
        self._models = models
        self.is_open = self._has_told = False
        self._divides_by_all = self._raises = False
        self._present: tuple[int, ...] = ()  # ranks that had a gradient in the last exchange
        self._is_uneven = False  # not all had, in one of them

    @contextmanager
    def join(self, *, divides_by_all: bool, raises: bool) -> Iterator[None]:
        """Let workers make different numbers of steps within the block. Collective.

        Args:
            divides_by_all: whether a sum of gradients is divided by the number of all workers; else by that of those
                that have one.
            raises: whether all end with an error as soon as one is done before the others.

        Raises:
            PlanError: if the policy does not average gradients.
            ModelError: on all, if one is done before the others and that is to be raised.
        """
        if self.is_open:  # of another model, and the block around this one is the one that counts
            yield
            return
        together = self._models.together
        for one in together:
            if one.plan.has_quorum:
                raise PlanError(
                    f"Cannot join uneven inputs under {short_name(one.plan.sync)} on a switch: whoever is done would "
                    "have to be known before each update, and all be waited for. Prepare a loader, or use BSP() - at "
                    "`plan.sync`."
                )
            if (policy := one.plan.local_policy) is not None:
                raise PlanError(
                    f"Cannot join uneven inputs under {short_name(policy)}: workers step by themselves, and one that "
                    "is done cannot know when the others average. Prepare a loader, or use BSP() - at `plan.sync`."
                )
        self._divides_by_all, self._raises = divides_by_all, raises
        self._present, self._is_uneven = (), False
        self.is_open = True
        try:
            for number, one in enumerate(together):
                one.accounting.requests_vote = False
                one.accounting.before_exchange = lambda model=number: self._ask(model)
            yield
            for one in together:
                one.accounting.before_exchange = None
                one.accounting.absent = float(divides_by_all)
            self._follow(together)
            if self._is_uneven:
                self._catch_up()
        finally:
            self.is_open = False
            for one in together:
                one.accounting.before_exchange = one.accounting.absent = None
                one.accounting.source = 0

    def _follow(self, together: Sequence[SwitchableSync]) -> None:
        """Take part with nothing until nobody has anything."""
        holds = any(one.holds_gradient for one in together)
        while (model := self._ask(None)) is not None:
            one, parameters = together[model], self._models.prepared[model].parameters.values()
            if holds:
                holds = False
                _log.warning(
                    "Rank %d is done in the middle of an accumulation: what it has accumulated is in no step. End the "
                    "block behind a step.",
                    self._control.rank,
                )
            for parameter in parameters:
                parameter.grad = None
            one.before_step()
            if (result := one.after_step()) is not None:
                self._history.record_contribution(model, one.step - 1, result, samples=0)
            for parameter in parameters:
                parameter.grad = None

    def _ask(self, model: int | None) -> int | None:
        """Find who has a gradient, and of which model; None if nobody has. Collective.

        Args:
            model: of which this worker has one, or None.
        """
        # The models' numbers are the same if all make their steps in the same order.
        said = self._control.numbers_of(_QUESTION, model)
        if not said:
            return None
        self._present, present = tuple(said), next(iter(said.values()))
        if {present, present if model is None else model} != set(said.values()):
            raise DisagreementError(
                f"Cannot exchange gradients of different models at once, of {model} on rank {self._control.rank} and "
                "of another elsewhere. Have all workers step their models in the same order."
            )
        self._models.synchronizers[present].accounting.source = self._present[0]
        if done := [rank for rank in self._control.members if rank not in said]:
            self._is_uneven = True
            self._tell_of(done)
        return present

    def _tell_of(self, done: Sequence[int]) -> None:
        ranks = f"Rank {', '.join(map(str, done))} {'is' if len(done) == 1 else 'are'} done"
        if self._raises:
            raise ModelError(
                f"{ranks} before the others, and throw_on_early_termination is set: give every worker equally many "
                "inputs, or leave it out."
            )
        if not self._has_told:
            self._has_told = True
            by = "all workers, as before" if self._divides_by_all else "the number of those that have one"
            self._log.all("join", f"{ranks} before the others, which continue: sums of gradients are divided by {by}.")

    # -- at the end ----------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Have what those have that were there in the last exchange. Collective."""
        has_it = self._control.rank in self._present
        mine = {"models": [_state_of(one) for one in self._models.prepared]} if has_it else None
        first = next((rank for rank in self._control.members if rank in self._present), self._control.leader)
        state = hand_over(self._control, lambda: first, mine)
        if not has_it:
            for one, theirs in zip(self._models.prepared, state["models"], strict=True):
                self._take_over(one, theirs)

    def _take_over(self, one: PreparedModel, theirs: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(one.model):
                tensor.copy_(theirs["tensors"][name])
        before = [_numbers(group) for group in one.optimizer.param_groups]
        for name, keys in theirs["beside"].items():
            state = theirs["optimizer"]["state"][name]
            state.update({key: state[key].to(one.parameters[name].device) for key in keys})
        load_optimizer_state(one.optimizer, one.parameters, theirs["optimizer"])
        for mine, group in zip(before, one.optimizer.param_groups, strict=True):
            for key, value in _numbers(group).items():
                if mine.get(key) != value:
                    _log.warning(
                        "Rank %d was done before the others, and has taken over their %s, %r instead of %r: where a "
                        "schedule counts steps, replicas come apart. Have it count run.step, or epochs.",
                        self._control.rank, key, value, mine.get(key),
                    )  # fmt: skip
                    return


def _state_of(one: PreparedModel) -> dict[str, Any]:
    """The state of a model that a worker which was done has to have, on the CPU."""
    optimizer = optimizer_state(one.optimizer, one.parameters)
    beside: dict[str, list[str]] = {}
    for name, state in optimizer["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                beside.setdefault(name, []).append(key)
                state[key] = value.cpu()
    return {
        "tensors": {name: tensor.cpu() for name, tensor in tensors_of(one.model)},
        "optimizer": optimizer,
        "beside": beside,  # what lies on the parameter's device
    }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in group.items() if isinstance(value, (int, float, tuple, list)) and key != "params"
    }
