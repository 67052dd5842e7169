"""Averages of local steps at a parameter server: it applies the mean delta to its parameters, the new anchor.

The optimizer steps at the worker. After ordinary steps, in which it stepped at the server, the worker's own takes over
what the server's has gathered, such as momentum: replicas go on as if there had been no server. The outer momentum
stays at the server. Buffers stay each worker's own.

With a codec that keeps an offset (see `offbeat.codec.local_offset`) a worker's parameters are ahead of the server's by
what it has not sent; what all have in common is the server's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine import state_checks
from offbeat.engine.anchor import Anchor
from offbeat.protocol.optimizer_spec import outer_hyper
from offbeat.protocol.training import ContributionInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.exchange_result import ExchangeResult
    from offbeat.engine.server_sync import ServerSync
    from offbeat.sync import StepsLocally


class ServerAverager:
    """One model's averages. An `Averager`.

    Args:
        gradients: exchanges the model's gradients; nothing the server sends lands in the parameters themselves.
        parameters: trainable parameters by name.
        policy: when deltas are pushed, and how they are applied.
    """

    table = None

    def __init__(
        self, gradients: ServerSync, parameters: Mapping[str, torch.nn.Parameter], policy: StepsLocally
    ) -> None:
        self._gradients, self._policy = gradients, policy
        self._anchors = [Anchor(bucket, parameters) for bucket in gradients.layout.buckets]
        self._offset = gradients.plan.codec.promises.offset
        self._has_parted = False  # from the server's parameters, by what was not sent
        self._weight = 0.0  # of the last delta
        self._before: list[torch.Tensor] = []  # the server's parameters, where this worker's anchor is ahead of them
        gradients.land(in_place=False)

    @property
    def is_even(self) -> bool:
        """Whether the parameters were the server's when they last came."""
        return not self._has_parted

    def begin(self) -> None:
        """Anchor here; the optimizer goes on from where the server's copy of it is.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        for anchor in self._anchors:
            anchor.set_to_parameters_()
        if self._gradients.step:
            self._gradients.take_over_optimizer()

    def before_step(self) -> None:
        """Do nothing: what is pushed is how far this worker is from the anchor."""

    def stepped(self) -> None:
        """Note that what this worker drew is in its parameters; nobody else is to compute it."""
        self._gradients.keep_drawn()

    def average(self, step: int, steps: int, part: float, *, fragment: int | None, is_last: bool) -> ExchangeResult:
        """Push this worker's delta, and wait for the others'. Collective.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        gradients = self._gradients
        for anchor, grad in zip(self._anchors, gradients.grads, strict=True):
            anchor.delta(grad)
        weight = gradients.weight(float(steps)) * part
        if not weight and self._has_parted:  # an offset by itself, which is of the steps before
            weight = self._weight
        self._weight = weight
        info = ContributionInfo(weight, outer_hyper(self._policy.outer), change=True, ends=is_last)
        result = gradients.exchange(info, step=step, is_whole=fragment is None)
        self._anchor_here(gradients.left)
        return result

    def _anchor_here(self, left: Sequence[torch.Tensor]) -> None:
        """Anchor at the server's parameters, which have come, and go on ahead of them by what was not sent.

        Args:
            left: [D] of each bucket, of the delta; empty if nothing.
        """
        self._has_parted = bool(left)
        for anchor in self._anchors:
            anchor.set_to_parameters_()
        for anchor, delta in zip(self._anchors, left, strict=bool(left)):
            anchor.offset_parameters_(delta)
            if self._offset == "dropped":
                anchor.set_to_parameters_()
        if self._offset == "dropped":
            self._before = [values.clone() for values in self._gradients.values]

    def end(self, *, evens_optimizers: bool) -> None:
        """Let what the server sends land in the parameters again; its copy of the optimizer goes on."""
        self._gradients.land(in_place=True)

    def leave(self) -> None:
        """Do nothing: who leaves says so to the others."""

    def refreshed(self, steps: int) -> None:
        """Anchor at the server's parameters; what this worker's own `steps` added up to is kept."""
        values = self._gradients.values
        if steps and self._before:
            for anchor, before, now in zip(self._anchors, self._before, values, strict=True):
                anchor.shift_(before, now)
            self._before = [now.clone() for now in values]
            return
        if steps:
            for anchor, now in zip(self._anchors, values, strict=True):
                anchor.rebase_(now)
            return
        left = [torch.zeros_like(grads) for grads in self._gradients.grads] if self._offset == "carried" else []
        for anchor, delta in zip(self._anchors, left, strict=bool(left)):
            anchor.delta(delta)
        self._gradients.refreshed()
        self._anchor_here(left)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters that all have in common, by name."""
        return {name: {"anchor": value.clone()} for name, value in self.common.items()}

    @property
    def common(self) -> dict[str, torch.Tensor]:
        """The server's parameters, as they came last, by name."""
        if not self._offset:
            return self.anchors
        pairs = zip(self._anchors, self._gradients.values, strict=True)
        return {name: value for anchor, values in pairs for name, value in anchor.views_in(values).items()}

    @property
    def anchors(self) -> dict[str, torch.Tensor]:
        """The parameters from which this worker's delta is measured, by name."""
        return {name: value for anchor in self._anchors for name, _, value in anchor.slots}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], gradients: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the server gets rank 0's anchors as its parameters.

        What this worker's own steps since then have added up to is in its parameters, and stays there.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        own = [[parameter.detach().clone() for _, parameter, _ in anchor.slots] for anchor in self._anchors]
        for anchor in self._anchors:
            for name, _, value in anchor.slots:
                state_checks.copy_(value, state[name], name, "anchor")
            anchor.restore_parameters_()
        self._gradients.load_state_dict(gradients)
        if self._offset == "dropped":
            self._before = [anchor.values.cpu().clone() for anchor in self._anchors]
        for anchor, mine in zip(self._anchors, own, strict=True):
            for (_, parameter, _), values in zip(anchor.slots, mine, strict=True):
                parameter.data.copy_(values)
