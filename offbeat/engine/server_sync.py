"""Training where a server holds the parameters: gradients out, parameters in, at `optimizer.step()`.

The loop is the user's own. Its `optimizer.step()` brings what has been accumulated since the last one to the server,
waits until the policy lets this worker go on, and returns with the parameters of the next step; the local optimizer
itself finds no gradient and does nothing. What it was asked to do (learning rate, momentum ...) travels along.

Clipping, accumulation and scaling act on this worker's own gradient, before it is sent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import state_checks
from offbeat.engine.batch_accounting import BatchAccount
from offbeat.engine.bucket_buffer import view_in
from offbeat.engine.nonfinite import leave_out
from offbeat.engine.optimizer_state import load
from offbeat.engine.synchronizer import RUN_IS_CLOSED
from offbeat.errors import ModelError, PeerError
from offbeat.payload import Sum, Total
from offbeat.protocol.training import ContributionInfo
from offbeat.server.blocks import cut, deal
from offbeat.server.optimizer_checkpoint import from_bytes, gather, scatter, to_bytes
from offbeat.server.optimizers import OUTER, check_states, describe, hyper
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from offbeat.codec import Exchange, State
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.history_recorder import HistoryRecorder
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.layout import Bucket, Layout
    from offbeat.plan import Plan
    from offbeat.server.optimizer_checkpoint import States

_log = logging.getLogger("offbeat")


class ServerSync:
    """One model's parameters at a server. Replaces `Reducer` where the fabric is a parameter server.

    Args:
        parameters: trainable parameters by name; their memory is moved into flat buckets.
        layout: where they lie; nothing sparse in it.
        plan: codec and policy.
        optimizer: the user's.
        server: this worker's connection to it.
        waiter: the one waiting primitive.
        meter: where measurements go.
        diary: where digests of the parameters go.
        in_place: whether what the server sends lands in the parameters themselves, if they are on the CPU.
        model: which of several prepared, from 0.
        share: this worker's part in the next exchange, if it goes on from another exchanger's.

    Raises:
        ModelError: if the server cannot hold the optimizer.
        DisagreementError: if another worker has another plan or layout.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        server: ServerSession,
        waiter: BlockingWait,
        meter: StepMetrics,
        diary: HistoryRecorder,
        in_place: bool = True,
        model: int = 0,
        share: BatchAccount | None = None,
    ) -> None:
        self._diary = diary
        self.plan, self.layout = plan, layout
        self.share = share or BatchAccount()
        self.meter = meter
        self.sync = True  # as the reducer's, which the front end switches; nothing is sent before the optimizer steps
        self.step = 0
        self.staleness = 0  # of the last contribution: updates between its parameters and its own
        self._was_dropped = False  # the last contribution
        self._brought = 0.0  # weight of the last contribution
        self._computed = False  # a backward has run since the last step
        self._closed = False
        self._optimizer, self._server, self._client = optimizer, server, server.client
        self._waiter, self._model = waiter, model
        self._parameters, self._in_place = dict(parameters), in_place
        self._codec = plan.codec
        self.values = [_memory(bucket) for bucket in layout.buckets]  # as the server sent them last
        self.grads = [_memory(bucket) for bucket in layout.buckets]  # what is brought
        self._slots = list(self._lay_out())
        self._states: list[State] = [plan.codec.init(bucket) for bucket in layout.buckets]
        self._set_aside: dict[str, torch.Tensor] = {}
        self._blocks = cut(layout, server.block_bytes)
        self._names = {id(p): name for name, p in parameters.items()}
        opening = self._client.open(
            model,
            plan=plan.to_toml(),
            layout=layout.digest,
            blocks=self._blocks,
            shards=deal(self._blocks, server.shards),
            values=[self.values[b.bucket][b.offset : b.offset + b.numel] for b in self._blocks],
            optimizer=describe(optimizer, self._names),
        )
        waiter.wait(opening, WaitContext("the parameters of the server", outlives=True))
        self.begins_at = opening.step  # the number of its first contribution
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: self.share.computed())
            for parameter in parameters.values()
        ]
        self._take_values()

    # -- called by the front end ---------------------------------------------------------------------------------

    def on_forward(self, inputs: Any) -> None:
        """A forward pass that trains begins."""
        self.meter.forward(inputs)
        self.share.forward()
        self._look_for_cleared()

    def on_output_grad(self) -> None:
        """The outermost backward has begun; nothing is sent before the optimizer steps.

        Raises:
            ModelError: if the run is closed: the replicas would silently drift apart.
        """
        if self._closed:
            raise ModelError(RUN_IS_CLOSED)
        self._look_for_cleared()
        self._computed = True
        self.share.backward()

    def _look_for_cleared(self) -> None:
        """Gradients that are gone are in no step: the optimizer's was left out (as GradScaler does)."""
        if self._computed and all(parameter.grad is None for parameter in self._parameters.values()):
            self._computed = False
            self.share.cleared()

    def weight(self, otherwise: float) -> float:
        """How much a contribution counts: the samples since the last, or `otherwise` if no loader has counted any."""
        # A loader whose batches hold no tensors counts none.
        return float(self.share.samples if self.meter.loader_counts else 0) or otherwise

    @property
    def number(self) -> int:
        """Of the next contribution."""
        return self._client.place(self._model).clock

    def land(self, *, in_place: bool) -> None:
        """Have what the server sends land in the parameters themselves from now on, or not."""
        self._in_place = in_place
        for _, parameter, value, _ in self._slots:
            if in_place and self._lands_in(parameter):
                value.copy_(parameter.data)
                parameter.data = value
            elif parameter.data.data_ptr() == value.data_ptr():
                parameter.data = value.clone()

    def keep_drawn(self) -> None:
        """What was drawn is used in the next contribution; nobody else is to compute it."""
        self._server.keep_drawn()

    def on_step(self) -> None:
        """The optimizer is about to step: bring the gradient, and come back with the next parameters.

        Raises:
            NumericsError: if what is brought holds NaN or Inf and the plan says to raise.
            WorkerLostError, NetworkError: if the server is gone.
        """
        self.meter.fence_begins()
        self._server.keep_drawn()
        about = ContributionInfo(self.weight(self.share.weight), hyper(self._optimizer))
        span = self.exchange(about, self._pack())
        dropped = self._was_dropped
        self.meter.fence_ends(self.step, [span], self._brought, self.staleness, model=self._model, dropped=dropped)
        self.step += 1
        self._computed = False
        self._waiter.witness.exchanged(self.share.stamp)
        self.share.exchanged()

    def exchange(
        self, about: ContributionInfo, unused: Sequence[str] = (), *, step: int | None = None
    ) -> tuple[float, float]:
        """Bring what is in `grads`, and wait for the next parameters.

        Args:
            about: what it is; `unused` and `used` are filled in.
            unused: names of parameters that have no gradient.
            step: for reports; that of this model's gradients if None.

        Returns:
            When it was issued and done, in clock seconds.

        Raises:
            NumericsError: if it holds NaN or Inf and the plan says to raise.
            WorkerLostError, NetworkError: if the server is gone.
        """
        issued_s = self.meter.now_s()
        wires = self._encode()
        step = self.step if step is None else step
        is_finite = self._finite(wires, "change" if about.change else "gradient", step)
        self._brought = about.weight if is_finite else 0.0
        used = tuple(self._server.used)
        about = msgspec.structs.replace(about, weight=self._brought, used=used, step=step)
        self._server.used = []
        parts = [wires[block.bucket][block.offset : block.offset + block.numel] for block in self._blocks]
        exchange = self._client.exchange(self._model, parts, about=about, unused=tuple(unused))
        self._waiter.wait(
            exchange,
            WaitContext(
                f"the exchange with the server ({short_name(self.plan.sync)})", step, model=self._model, outlives=True
            ),
        )
        self._take_values()
        if exchange.fate:
            text = f"Rank {self._client.rank} is back: what it had computed in step {step} {exchange.fate}."
            _log.warning("%s", text)
            self.meter.event("server", text, step)
        self.meter.sent_bytes += exchange.sent_bytes
        self.staleness = exchange.staleness
        self._was_dropped = self._brought > 0 and not exchange.is_counted
        self._diary.record_server_parameters(self._model, step, self.values, exchange, samples=self._brought)
        return issued_s, self.meter.now_s()

    def take_over_optimizer(self) -> None:
        """Give the optimizer here the state that the server's copy has gathered; the server's stays as it is.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        gathered = self._fetch()
        own = {name: {k: v for k, v in state.items() if k != OUTER} for name, state in gathered.items()}
        load(self._optimizer, self._parameters, own)

    def begin_with(self, step: int, codec: Mapping[str, Any], gathered: States) -> None:
        """Go on where workers without a server are; the first brings its parameters and what its optimizer has.

        All have them when they are `refreshed`.

        Args:
            step: they have made.
            codec: state of the codec, as in `state_dict`.

        Raises:
            ModelError: if the server's copy of the optimizer cannot go on from that.
            NetworkError: if the server is gone.
        """
        self.load_state_dict({"step": step, "codec": codec, "server": to_bytes(gathered)})

    def _fetch(self) -> States:
        fetched = self._client.fetch(self._model)
        self._waiter.wait(fetched, WaitContext("the optimizer's state at the server", outlives=True))
        return gather(fetched.portions, self._blocks)

    def after_step(self) -> None:
        """The optimizer has stepped, and found nothing to do: gradients may be looked at again."""
        for name, grad in self._set_aside.items():
            self._parameters[name].grad = grad
        self._set_aside.clear()

    def settle(self) -> None:
        """Nothing to do: every step brings what it has."""

    def refreshed(self) -> None:
        """The newest parameters are here: bring them to the model's device."""
        self._take_values()
        exchange = self._client.place(self._model).exchange
        self._diary.record_server_parameters(self._model, self.step, self.values, exchange, brought=False)

    def state_dict(self) -> dict[str, Any]:
        """Step count, and the optimizer's state at the server, by parameter name, as bytes.

        Raises:
            NetworkError: if the server is gone.
        """
        codec = {name: dict(tensors) for state in self._states for name, tensors in state.items()}
        return {"step": self.step, "codec": codec, "server": to_bytes(self._fetch())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the first brings it, and its parameters, to the server.

        All have them when they are `refreshed`.

        Raises:
            ModelError: if it is damaged, or of another model; then the server has heard nothing of it.
            NetworkError: if the server is gone.
        """
        brought = from_bytes(state["server"]) if state.get("server") else {}
        try:
            check_states(describe(self._optimizer, self._names), brought, self._parameters)
        except PeerError as error:
            raise ModelError(f"Cannot load the optimizer's state from this checkpoint: {error}") from error
        self.step = state_checks.whole(state["step"], "step")
        for states in self._states:
            for name, tensors in states.items():
                for key, tensor in tensors.items():
                    state_checks.copy_(tensor, state["codec"][name], name, key)
        if self._server.is_first:
            portions = list(scatter(brought, self._blocks))
            for _, parameter, value, _ in self._slots:
                value.copy_(parameter.data)
            put = self._client.put(self._model, portions)
            self._waiter.wait(put, WaitContext("the server to take over a checkpoint", outlives=True))
            if put.refused:  # all hear why when they are asked what a checkpoint holds
                self._server.is_brought = False
                _log.warning("The server keeps what it has. %s", put.refused)

    def close(self) -> None:
        """Take the hooks off; the parameters stay as they are."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- memory --------------------------------------------------------------------------------------------------

    def _lay_out(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor, torch.Tensor]]:
        """Move each parameter into its bucket, if that is on its device; (name, it, its place, its gradient's)."""
        for bucket, values, grads in zip(self.layout.buckets, self.values, self.grads, strict=True):
            for slot in bucket.slots:
                parameter = self._parameters[slot.name]
                value, grad = view_in(values, slot.offset, parameter), view_in(grads, slot.offset, parameter)
                value.copy_(parameter.data)
                if self._lands_in(parameter):
                    parameter.data = value
                yield slot.name, parameter, value, grad

    def _take_values(self) -> None:
        """Bring what arrived to the model's device."""
        for _, parameter, value, _ in self._slots:
            if not self._lands_in(parameter):
                parameter.data.copy_(value, non_blocking=True)

    def _lands_in(self, parameter: torch.nn.Parameter) -> bool:
        return self._in_place and parameter.device.type == "cpu"

    def _pack(self) -> list[str]:
        """Copy every gradient into its bucket and set it aside; the names of those that are missing."""
        unused = []
        for name, parameter, _, place in self._slots:
            grad = parameter.grad
            if grad is None:
                unused.append(name)
                place.zero_()
                continue
            place.copy_(grad.to_dense() if grad.is_sparse else grad.detach())
            self._set_aside[name] = grad
            parameter.grad = None
        return unused

    def _finite(self, wires: Sequence[torch.Tensor], what: str, step: int) -> bool:
        """Whether what is sent can be taken; with a narrow codec it may overflow where the gradient did not."""
        if self.plan.nonfinite == "pass" or all(bool(torch.isfinite(wire).all()) for wire in wires):
            return True
        bad = [
            slot.name
            for bucket, wire in zip(self.layout.buckets, wires, strict=True)
            for slot in bucket.slots
            if not bool(torch.isfinite(wire[slot.offset : slot.offset + slot.numel]).all())
        ]
        return not leave_out(bad, self.plan.nonfinite, what=what, step=step, meter=self.meter)

    def _encode(self) -> list[torch.Tensor]:
        """What the codec makes of each bucket of `grads`."""
        wires = []
        for grad, state in zip(self.grads, self._states, strict=True):
            exchange = self._codec.exchange(grad, state)
            payload = next(exchange)
            if not isinstance(payload, Sum) or payload.tensor.shape != grad.shape:
                raise ModelError(
                    f"Cannot push with {self._codec!r}: a parameter server takes one dense sum per bucket. Use Dense() "
                    "or Cast()."
                )
            wires.append(payload.tensor)
            if state:
                _end(exchange, payload.tensor)
        return wires


def _end(exchange: Exchange, sent: torch.Tensor) -> None:
    """Let the codec write its state: what was sent is all that it hears of."""
    try:
        exchange.send(Total(sent.clone()))
    except StopIteration:
        return
    raise ModelError("Cannot push with this codec: it needs several rounds, a push has one. Use Dense() or Cast().")


def _memory(bucket: Bucket) -> torch.Tensor:
    pinned = bucket.device.type == "cuda"
    return torch.zeros(bucket.numel, dtype=bucket.dtype, pin_memory=pinned)
