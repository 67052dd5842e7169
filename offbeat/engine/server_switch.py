"""One model at a server, by whichever policy holds: gradients in every step, or changes of steps of the worker's own.

A worker goes over at a border of its own, whenever it hears of the swap:

    to LocalSGD     before a step: the parameters are the server's, so they are the anchor; the step at hand is the
                    first of its own. The optimizer here takes over what the server's copy has gathered.
    from LocalSGD   behind a step: it brings the change it has, of however many steps, and has the server's parameters.
                    The server's copy of the optimizer goes on from where it was.

So each gradient is in one contribution, whatever the others have heard by then; the server applies what is of the
earlier kind by itself (`offbeat.sync.transition`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.engine.local_sgd_server import ServerAverager
from offbeat.engine.swappable import SwitchableSync
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.server_sync import ServerSync
    from offbeat.plan import Plan


class ServerSwitch(SwitchableSync):
    """Each worker goes over by itself.

    Args:
        served: exchanges gradients with the server.
        parameters, waiter, model: as of `SwitchableSync`.
    """

    def __init__(
        self, *, served: ServerSync, parameters: Mapping[str, torch.nn.Parameter], waiter: BlockingWait, model: int = 0
    ) -> None:
        super().__init__(served, parameters=parameters, waiter=waiter, model=model)
        self._served = served
        self._averaging: ServerAverager | None = None
        if isinstance(policy := served.plan.sync, LocalSGD):
            self._begin_own_steps(policy, begun=policy.step_of(served.begins_at), ahead=0)

    @property
    def staleness(self) -> int:
        """Updates between the parameters of this worker's last contribution and its own update."""
        return self._served.staleness

    def leave(self) -> bool:
        """Do without the server from here, behind a `settle`; the optimizer here goes on from where the server's is.

        Returns:
            Whether it has stepped by itself instead, so that it is not as those of the other workers.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        is_own = self._local is not None and self._local.is_anchored
        if not is_own:
            self._served.take_over_optimizer()
        self._served.land(in_place=False)
        return is_own

    def _go_by(self, plan: Plan) -> None:
        self._served.plan = plan
        if self._local is not None and self._local.plan.sync == plan.sync:
            self._local.plan = plan

    def _before_step(self) -> None:
        """Steps of the worker's own may begin with this one."""
        policy = self.plan.sync
        if self._local is None and isinstance(policy, LocalSGD):
            self._served.land(in_place=False)
            begun, sync = self._served.step, self.sync
            self._begin_own_steps(policy, begun=begun, ahead=policy.step_of(self._served.number) - begun)
            self.sync = sync
        self._before_bringing()

    def _before_bringing(self) -> None:
        """Have this worker bring the change it has next, if another policy decides."""
        if self._local is not None and self._averaging is not None:
            self._local.ends = self._averaging.ends = self._is_to_end

    def _after_bringing(self) -> None:
        """Go over, if it is time; the change has been brought."""
        if self._local is None or not self._is_to_end:
            return
        if not self._local.is_even:  # a swap that came since the optimizer began to step
            return
        self._served.step, sync = self._local.step, self.sync
        self._local = None
        self.sync = sync
        self._served.land(in_place=True)

    @property
    def _is_to_end(self) -> bool:
        return self._local is not None and self._local.plan.sync != self.plan.sync

    def _begin_own_steps(self, policy: LocalSGD, *, begun: int, ahead: int) -> None:
        self._averaging = ServerAverager(self._served, self._parameters, policy)
        self._local = self._own_steps(policy, self._averaging, begun=begun, ahead=ahead)
