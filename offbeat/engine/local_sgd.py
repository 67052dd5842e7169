"""Workers that step by themselves, and average now and then how far they came (`offbeat.sync.LocalSGD`).

    anchor      the parameters after the last average, the same on all workers
    delta       anchor - parameters: what a worker's own steps added up to, with the sign of a gradient
    anchor     -= outer(mean of deltas); parameters = anchor

With a delay, or part by part, the last line is another one, and replicas are the same behind `settle` alone: what has
been done since is kept (see `offbeat.sync.local_sgd`).

A worker's delta weighs as many samples as it saw, or batches. In the first steps gradients are averaged, if the policy
says so, by whoever does that in every step of other policies. How deltas are averaged is another's:
`local_sgd_allreduce`, `local_sgd_server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.engine import state_checks
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.nonfinite import leave_out
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.engine.local_sgd_switch import SwitchAverager
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.synchronizer import GradientSync
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.plan import Plan


class Averager(Protocol):
    """Averages the deltas of one model.

    Call order, by `LocalSGDSync`: `begin` at the first local step, or `load_state_dict`; `average` now and then; `end`.
    """

    @property
    def table(self) -> SwitchAverager | None:
        """The averager itself, if a switch decides by which plan all go, so that they need not meet; else None."""

    @property
    def is_even(self) -> bool:
        """Whether nothing is on its way, and no part of the model was left out by the last average."""

    @property
    def common(self) -> dict[str, torch.Tensor]:
        """The parameters that all workers have in common while theirs differ, by name; empty if there are none."""

    def begin(self) -> None:
        """Anchor here, before the first step of a worker's own; the parameters are the same on all workers."""

    def before_step(self) -> None:
        """Note that this worker's optimizer is about to step."""

    def stepped(self) -> None:
        """Note that this worker's own step has used what it drew."""

    def average(self, step: int, steps: int, part: float, *, fragment: int | None, is_last: bool) -> ExchangeResult:
        """Push this worker's delta; the parameters are the new anchor.

        Args:
            step: the present one.
            steps: of this worker's own since the last average.
            part: of those with data that counts; 0 after none.
            fragment: of the model, whose delta it is; None for all of it, and no delay.
            is_last: whether this worker exchanges gradients from here on.
        """

    def end(self, *, evens_optimizers: bool) -> None:
        """Let gradients be exchanged from here on, behind an average. Collective where exchanges are.

        Args:
            evens_optimizers: whether what optimizers have gathered is to be the same on all workers.
        """

    def leave(self) -> None:
        """Have the others go on without this worker, which makes no further step."""

    def refreshed(self, steps: int) -> None:
        """Take over the newest parameters of a server; this worker's `steps` since the last average are kept."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state by parameter name."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], gradients: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, and have what exchanges gradients take over its own. Collective."""


class LocalSGDSync:
    """One model's local steps and averages. A `Synchronizer`, which has gradients exchanged where the policy says so.

    Args:
        model: whose parameters step.
        gradients: exchanges its gradients.
        averager: of its deltas.
        context: of this worker.
        step: that this worker begins with; above 0 if it joins later.
        ahead: steps that the policy counts more; above 0 if it took over from another.
    """

    def __init__(
        self,
        model: PreparedModel,
        gradients: GradientSync,
        averager: Averager,
        context: WorkerContext,
        *,
        step: int = 0,
        ahead: int = 0,
    ) -> None:
        self.plan, self.layout, self.accounting = gradients.plan, gradients.layout, gradients.accounting
        self._sync = gradients.sync
        self.step, self.ahead = step, ahead
        self.ends = False  # whether this worker is to push the delta it has after this step
        self._model, self._gradients, self._averager, self._context = model, gradients, averager, context
        self._is_anchored = False
        # Since the last average: steps, those of them with data of this worker's, and of these those that do not count.
        self._steps = self._with_data = self._left_out = 0
        self._spans: list[tuple[float, float]] = []  # of exchanges since the last step

    # -- called by the front end ---------------------------------------------------------------------------------

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from here on."""
        self.plan = plan

    @property
    def sync(self) -> bool:
        """False while gradients are only accumulated."""
        return self._sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._sync = sync
        self._gradients.sync = sync and self._mode == "gradient"

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins."""
        self.sync = self._sync  # the mode may be another one since the last step
        self._gradients.on_forward(inputs)

    def on_backward(self) -> None:
        """Begin to exchange gradients, if this step's are."""
        self._gradients.on_backward()

    def before_step(self) -> None:
        """Have in `.grad` what the optimizer is to step with: this worker's own, unless it does not count.

        Raises:
            NumericsError: if this worker's gradient holds NaN or Inf and the plan says to raise.
        """
        if self._mode == "gradient":
            self._gradients.before_step()
            return
        self._context.metrics.compute_done()
        if not self._is_anchored:
            self._is_anchored = True
            self._averager.begin()
        self._averager.before_step()
        padding = self.accounting.padding
        left_out = not padding and self._nonfinite()
        self._with_data += not padding
        self._left_out += left_out
        if padding or left_out:
            for parameter in self._model.parameters.values():
                parameter.grad = None  # so that the optimizer leaves it alone: this step does not count

    def after_step(self) -> ExchangeResult | None:
        """Average, if it is time."""
        mode = self._mode
        if mode == "gradient":
            result = self._gradients.after_step()
        else:
            self._steps += 1
            weight = self.accounting.weight
            self.accounting.stepped()
            self._averager.stepped()
            result = self._average(None if self.ends else self._fragment) if mode == "change" else None
            found = ExchangeResult() if result is None else result
            self._context.metrics.exchange_done(
                self.step,
                self._spans,
                weight,
                model=self._model.number,
                barrier_s=found.barrier_s,
                resent=found.resent,
                lead=found.lead,
            )
            self._context.waiter.witness.exchanged(self.accounting.stamp)
            self._spans = []
        self.step += 1
        return result

    def settle(self) -> ExchangeResult | None:
        """Average now, whatever the policy says; all replicas are equal afterwards. Collective."""
        return self._average(None) if self._is_anchored else None

    def end(self, *, evens_optimizers: bool) -> None:
        """Have gradients exchanged from here on, behind an average; see `Averager.end`."""
        self._gradients.step, self._gradients.sync = self.step, self.sync
        self._averager.end(evens_optimizers=evens_optimizers and self._is_anchored)

    def leave(self) -> None:
        """Have the others go on without this worker, which makes no further step."""
        if self._is_anchored:
            self._averager.leave()

    def refreshed(self) -> None:
        """Take over the newest parameters of a server."""
        if self._is_anchored:
            self._averager.refreshed(self._steps)
        else:
            self._gradients.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """Steps, and by parameter name what belongs to the averages: anchors, outer momentum."""
        own = self._averager.state_dict() if self._is_anchored else {}
        return {
            "step": self.step,
            "local": own,
            "steps": [self._steps, self._with_data, self._left_out],
            "share": self.accounting.state_dict(),
            "reducer": self._gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ModelError: if it is damaged, or of another model.
        """
        step = state_checks.whole(state["step"], "step")
        steps, with_data, left_out = state_checks.counts(state["steps"], "steps since the last average", 3)
        if not left_out <= with_data <= steps <= step:
            raise ModelError(
                f"Cannot load this state: at step {step} it has {steps} steps since the last average, {with_data} of "
                f"them with data, of which {left_out} were left out. It is damaged: use another checkpoint."
            )
        self.step = step
        self._steps, self._with_data, self._left_out = steps, with_data, left_out
        self.accounting.load_state_dict(state["share"])
        self._is_anchored = bool(state["local"])
        if self._is_anchored:
            self._averager.load_state_dict(state["local"], state["reducer"])
        else:
            self._gradients.load_state_dict(state["reducer"])

    def close(self) -> None:
        """Take the hooks off: the run is over."""
        self._gradients.close()

    # -- averaging -----------------------------------------------------------------------------------------------

    @property
    def averager(self) -> Averager:
        """The averager of its deltas."""
        return self._averager

    @property
    def is_anchored(self) -> bool:
        """Whether it has begun to step by itself."""
        return self._is_anchored

    @property
    def is_even(self) -> bool:
        """Whether nothing is to be pushed: the parameters are those of the last average."""
        return not self._steps and self._averager.is_even

    @property
    def _mode(self) -> str | None:
        mode = self.plan.contributes(self.step + self.ahead)
        return "change" if self.ends and mode is None else mode

    @property
    def _fragment(self) -> int:
        """The part of the model whose delta is due."""
        policy = self.plan.local_policy
        return 0 if policy is None else policy.fragment(self.step + self.ahead)

    def _average(self, fragment: int | None) -> ExchangeResult:
        part = 1 - self._left_out / self._with_data if self._with_data else 0.0
        result = self._averager.average(self.step, self._steps, part, fragment=fragment, is_last=self.ends)
        self._spans += result.spans
        self._steps = self._with_data = self._left_out = 0
        self.accounting.exchanged()
        return result

    def _nonfinite(self) -> bool:
        plan, metrics = self.plan, self._context.metrics
        if plan.nonfinite == "pass":
            return False
        grads = ((name, parameter.grad) for name, parameter in self._model.parameters.items())
        bad = [name for name, grad in grads if grad is not None and not bool(torch.isfinite(grad).all())]
        return leave_out(bad, plan.nonfinite, what="gradient", step=self.step, metrics=metrics)
