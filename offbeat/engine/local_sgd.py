"""Workers that step by themselves, and average now and then how far they came (`offbeat.sync.LocalSGD`).

    anchor      the parameters after the last average, the same on all workers
    change      anchor - parameters: what a worker's own steps added up to, with the sign of a gradient
    anchor     -= outer(mean of changes); parameters = anchor

A worker's change weighs as many samples as it saw, or batches. In the first steps gradients are averaged, if the policy
says so, by whoever does that in every step of other policies. How changes are averaged is another's:
`local_sgd_allreduce`, `local_sgd_server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.engine import state_checks
from offbeat.engine.nonfinite import leave_out
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.synchronizer import Synchronizer


class Averager(Protocol):
    """Averages the changes of one model.

    Call order, by `LocalSGDSync`: `begin` at the first local step, or `load_state_dict`; then `average` now and then.
    """

    def begin(self) -> None:
        """The first step of a worker's own is about to be taken; the parameters are the same on all workers."""

    def stepped(self) -> None:
        """This worker's own step has used what it drew."""

    def average(self, step: int, steps: int, part: float) -> list[tuple[float, float]]:
        """Bring this worker's change; the parameters are the new anchor.

        Args:
            step: the present one.
            steps: of this worker's own since the last average.
            part: of those with data that counts; 0 after none.

        Returns:
            When each exchange was issued and done, in clock seconds.
        """

    def refreshed(self, steps: int) -> None:
        """The newest parameters of a server are here; this worker's `steps` since the last average are kept."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter name."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], exchanger: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, and have the exchanger take over its own. Collective."""


class LocalSGDSync:
    """One model's local steps and averages. Stands around an exchanger, which it lets work where the policy says so.

    Args:
        exchanger: of the same model.
        averaging: of its changes.
        parameters: trainable parameters by name, in order of registration.
        waiter: the one waiting primitive.
        step: that this worker begins with; above 0 if it joins later.
        ahead: steps that the policy counts more; above 0 if it took over from another.
        model: which of several prepared, from 0.
    """

    def __init__(
        self,
        *,
        exchanger: Synchronizer,
        averaging: Averager,
        parameters: Mapping[str, torch.nn.Parameter],
        waiter: BlockingWait,
        step: int = 0,
        ahead: int = 0,
        model: int = 0,
    ) -> None:
        self.plan, self.layout = exchanger.plan, exchanger.layout
        self.share, self.meter = exchanger.share, exchanger.meter
        self.sync = True  # False inside no_sync()
        self.step, self.ahead = step, ahead
        self.ends = False  # whether this worker is to bring the change it has after this step
        self._exchanger, self._averaging, self._waiter = exchanger, averaging, waiter
        self._parameters = dict(parameters)
        self._anchored = False
        self._model = model
        # Since the last average: steps, those of them with data of this worker's, and of these those that do not count.
        self._steps = self._with_data = self._left_out = 0
        self._spans: list[tuple[float, float]] = []

    # -- called by the front end ---------------------------------------------------------------------------------

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self._exchanger.sync = self.sync and self._mode == "gradient"
        self._exchanger.on_forward(inputs)

    def on_output_grad(self) -> None:
        """The outermost backward has begun."""
        self._exchanger.on_output_grad()

    def on_step(self) -> None:
        """The optimizer is about to step.

        Raises:
            NumericsError: if this worker's gradient holds NaN or Inf and the plan says to raise.
        """
        if self._mode == "gradient":
            self._exchanger.on_step()
            return
        self.meter.fence_begins()
        if not self._anchored:
            self._anchored = True
            self._averaging.begin()
        left_out = not self.share.padding and self._nonfinite()
        self._with_data += not self.share.padding
        self._left_out += left_out
        if self.share.padding or left_out:
            for parameter in self._parameters.values():
                parameter.grad = None  # so that the optimizer leaves it alone: this step does not count

    def after_step(self) -> None:
        """The optimizer has stepped: average, if it is time."""
        mode = self._mode
        if mode == "gradient":
            self._exchanger.after_step()
        else:
            self._steps += 1
            weight = self.share.weight
            self.share.stepped()
            self._averaging.stepped()
            if mode == "change":
                self._average()
            self.meter.fence_ends(self.step, self._spans, weight, model=self._model)
            self._waiter.witness.exchanged(self.share.stamp)
            self._spans = []
        self.step += 1

    def settle(self) -> None:
        """Average now, whatever the policy says; all replicas are equal afterwards. Collective."""
        if self._anchored:
            self._average()

    def refreshed(self) -> None:
        """The newest parameters of a server are here."""
        if self._anchored:
            self._averaging.refreshed(self._steps)
        else:
            self._exchanger.refreshed()

    def state_dict(self) -> dict[str, Any]:
        """Steps, and by parameter name what belongs to the averages: anchors, outer momentum, codec state."""
        own = self._averaging.state_dict() if self._anchored else {}
        return {
            "step": self.step,
            "codec": {},
            "local": own,
            "steps": [self._steps, self._with_data, self._left_out],
            "share": self.share.state_dict(),
            "reducer": self._exchanger.state_dict(),
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
        self.share.load_state_dict(state["share"])
        self._anchored = bool(state["local"])
        if self._anchored:
            self._averaging.load_state_dict(state["local"], state["reducer"])
        else:
            self._exchanger.load_state_dict(state["reducer"])

    def close(self) -> None:
        """Take the hooks off."""
        self._exchanger.close()

    # -- averaging -----------------------------------------------------------------------------------------------

    @property
    def is_anchored(self) -> bool:
        """Whether it has begun to step by itself."""
        return self._anchored

    @property
    def is_even(self) -> bool:
        """Whether nothing is to be brought: the parameters are those of the last average."""
        return not self._steps

    @property
    def _mode(self) -> str | None:
        mode = self.plan.sync.contributes(self.step + self.ahead)
        return "change" if self.ends and mode is None else mode

    def _average(self) -> None:
        part = 1 - self._left_out / self._with_data if self._with_data else 0.0
        self._spans += self._averaging.average(self.step, self._steps, part)
        self._steps = self._with_data = self._left_out = 0
        self.share.exchanged()

    def _nonfinite(self) -> bool:
        if self.plan.nonfinite == "pass":
            return False
        bad = [n for n, p in self._parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        return leave_out(bad, self.plan.nonfinite, what="gradient", step=self.step, meter=self.meter)
