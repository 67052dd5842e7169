"""The Protocol of what keeps one model equal on all workers.

Call order, each step: `on_forward` for each forward pass that trains; `on_backward` when its backward begins;
`before_step` and `after_step` around the optimizer's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.layout import Layout
    from offbeat.plan import Plan

RUN_IS_CLOSED = (
    "Cannot train this replica any further: its run is closed, and the other workers no longer take part. Close the "
    "run after the last step, or continue alone with the replica's .module."
)


class Synchronizer(Protocol):
    """The Protocol of what keeps one model together with the other workers' replicas.

    Attributes:
        sync: False while gradients are only accumulated.
    """

    sync: bool

    @property
    def plan(self) -> Plan:
        """The plan that it goes by."""

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from here on; between two steps, where exchanges are collective at the same place on all."""

    @property
    def step(self) -> int:
        """Exchanges so far, or steps where not every step has one."""

    @property
    def accounting(self) -> BatchAccount:
        """The account of this worker's batches for the next exchange."""

    @property
    def layout(self) -> Layout:
        """The layout of the parameters' gradients."""

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins."""

    def on_backward(self) -> None:
        """Begin to exchange: the gradient of the model's output is known."""

    def before_step(self) -> None:
        """Have in `.grad` what the optimizer is to step with."""

    def after_step(self) -> ExchangeResult | None:
        """Finish the step that the optimizer has made; return what its exchange found out, if it had one."""

    def settle(self) -> ExchangeResult | None:
        """Make all replicas equal; with a server, push what has not been pushed. Collective."""

    def refreshed(self) -> None:
        """Take over the newest parameters of a server, which are here."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def close(self) -> None:
        """Take the hooks off: the run is over."""


class GradientSync(Synchronizer, Protocol):
    """Exchanges the gradients of every step; one for each way they can take.

    Attributes:
        step: as of a `Synchronizer`; another one is set where it goes on from elsewhere.
        ranks: how many workers have a place where they tell each other how long they compute.
        pending_result: the findings of an exchange whose step has not been made.
    """

    step: int
    ranks: int
    pending_result: ExchangeResult | None

    @property
    def is_collective(self) -> bool:
        """Whether all workers meet in each exchange, so that they can vote behind it, and change over together."""

    @property
    def gradient_scale(self) -> float:
        """The factor of a worker's gradient before it is encoded, if all workers weigh the same."""

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not exchanged, because it is being accumulated."""

    @property
    def number(self) -> int:
        """The number of the next contribution, as policies count."""

    def synchronize(self) -> None:
        """Have all steps made that the optimizer was told to make; this worker's own, the others need not be here."""

    def explain(self, error: BaseException) -> str:
        """Say what this synchronizer may have to do with an error that leaves the script; "" if nothing."""

    @property
    def wants_vote(self) -> bool:
        """Whether something is to be decided by all, which `vote` does behind an exchange."""

    def vote(self) -> None:
        """Decide it, if there is something. Collective."""

    def even_out(self) -> None:
        """Be where a newcomer can begin, too; on all workers at the same place."""

    def detach(self, *, has_own_optimizer: bool) -> None:
        """Let another one go on with the model, whose parameters and optimizer are whole here then.

        Args:
            has_own_optimizer: whether the optimizer here has stepped by itself, and keeps what it has gathered.
        """
