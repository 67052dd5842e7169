"""Averages of local steps at a parameter server: it applies the mean change to its parameters, the new anchor.

The optimizer steps at the worker. After ordinary steps, in which it stepped at the server, the worker's own takes over
what the server's has gathered, such as momentum: replicas go on as if there had been no server. The outer momentum
stays at the server. Buffers stay each worker's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.protocol.optimizer_spec import outer_hyper
from offbeat.protocol.training import ContributionInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from offbeat.engine.server_sync import ServerSync
    from offbeat.sync import LocalSGD


class ServerAverager:
    """One model's averages. An `Averager`.

    Args:
        served: of the same model; nothing the server sends lands in the parameters themselves.
        parameters: trainable parameters by name.
        policy: when changes are brought, and how they are applied.
    """

    def __init__(self, served: ServerSync, parameters: Mapping[str, torch.nn.Parameter], policy: LocalSGD) -> None:
        self._served, self._policy = served, policy
        self.ends = False  # whether the next change is the last, since the policy is swapped
        self._anchors = [Anchor(bucket, parameters) for bucket in served.layout.buckets]

    def begin(self) -> None:
        """Anchor here; the optimizer goes on from where the server's copy of it is.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        for anchor in self._anchors:
            anchor.here()
        if self._served.step:
            self._served.take_over_optimizer()

    def stepped(self) -> None:
        """What this worker drew is in its parameters; nobody else is to compute it."""
        self._served.keep_drawn()

    def average(self, step: int, steps: int, part: float) -> list[tuple[float, float]]:
        """Bring this worker's change, and wait for the others'; when it was issued and done. Collective.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        served = self._served
        for anchor, grad in zip(self._anchors, served.grads, strict=True):
            anchor.change(grad)
        weight = served.weight(float(steps))
        about = ContributionInfo(weight * part, outer_hyper(self._policy.outer), change=True, ends=self.ends)
        span = served.exchange(about, step=step)
        for anchor in self._anchors:
            anchor.here()
        return [span]

    def refreshed(self, steps: int) -> None:
        """The server's parameters are the new anchor; what this worker's own `steps` added up to is kept."""
        if not steps:
            self._served.refreshed()
        for anchor, values in zip(self._anchors, self._served.values, strict=True):
            if steps:
                anchor.move_(values)
            else:
                anchor.here()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Anchors, by parameter name."""
        return {name: {"anchor": value.clone()} for anchor in self._anchors for name, _, value in anchor.slots}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], exchanger: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the server gets rank 0's anchors as its parameters.

        What this worker's own steps since then have added up to is in its parameters, and stays there.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        own = [[parameter.detach().clone() for _, parameter, _ in anchor.slots] for anchor in self._anchors]
        for anchor in self._anchors:
            for name, _, value in anchor.slots:
                state_checks.copy_(value, state[name], name, "anchor")
            anchor.return_()
        self._served.load_state_dict(exchanger)
        for anchor, mine in zip(self._anchors, own, strict=True):
            for (_, parameter, _), values in zip(anchor.slots, mine, strict=True):
                parameter.data.copy_(values)
