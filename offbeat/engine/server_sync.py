"""Training where a server holds the parameters: gradients out, parameters in, at `optimizer.step()`.

The loop is the user's own. Its `optimizer.step()` brings what has been accumulated since the last one to the server,
waits until the policy lets this worker go on, and returns with the parameters of the next step; the local optimizer
itself finds no gradient and does nothing. What it was asked to do (learning rate, momentum ...) travels along.

Clipping, accumulation and scaling act on this worker's own gradient, before it is sent. Then a plan's privacy clips and
noises it, and only then it is encoded.

With a scheduler gradients leave while backward computes (`early_push`), and what they weigh and are to be applied with
follows at `optimizer.step()`: it is the server that weighs contributions. That returns at once, and the next forward
pass begins while parameters come back (`parameter_return`), all of which are here before the next backward.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from offbeat import contribution_hooks
from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import state_checks
from offbeat.engine.batch_accounting import BatchAccount
from offbeat.engine.bucket_buffer import view_in
from offbeat.engine.early_push import EarlyPush
from offbeat.engine.exchange_result import ExchangeResult
from offbeat.engine.loss_scorer import LossScorer
from offbeat.engine.nonfinite import leave_out
from offbeat.engine.optimizer_state import load
from offbeat.engine.parameter_return import ParameterReturn
from offbeat.engine.private_contributions import clip_reference_
from offbeat.engine.push_encoder import PushEncoder
from offbeat.engine.synchronizer import RUN_IS_CLOSED
from offbeat.errors import ModelError, PeerError
from offbeat.protocol.training import ContributionInfo
from offbeat.server.blocks import cut, deal
from offbeat.server.optimizer_checkpoint import from_bytes, gather, scatter, to_bytes
from offbeat.server.optimizers import OUTER, check_states, hyper
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from offbeat.codec import Purpose
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.layout import Bucket
    from offbeat.plan import Plan
    from offbeat.server.client.requests import PulledParameters, ServerRequest
    from offbeat.server.encoded_block import EncodedBlock
    from offbeat.server.optimizer_checkpoint import States

_QUESTIONS = 3  # to find out how long the way to the server and back takes
_log = logging.getLogger("offbeat")


class ServerFlight(NamedTuple):
    """A contribution that was brought, and the parameters that come for it.

    Args:
        step: whose it is, for reports.
        weight, stamp: of this worker's batches in it.
        issued_s: when it was announced.
        number: as contributions are counted at the server.
    """

    request: ServerRequest[PulledParameters]
    step: int
    weight: float
    issued_s: float
    stamp: int
    number: int


class ServerSync:
    """Exchanges one model's gradients for the parameters that a server holds. A `GradientSync`.

    Args:
        model: its parameters, whose memory is moved into flat buckets, and the user's optimizer.
        plan: codec and policy.
        server: this worker's connection to it.
        context: of this worker.
        accounting: this worker's part in the next exchange, if it goes on from another synchronizer's.

    Attributes:
        values: of each bucket, as the server sent them last.
        grads: of each bucket, what is pushed.

    Raises:
        ModelError: if the server cannot hold the optimizer.
        DisagreementError: if another worker has another plan or layout.
    """

    is_collective = False
    gradient_scale = 1.0  # the server takes the mean

    def __init__(
        self,
        model: PreparedModel,
        plan: Plan,
        server: ServerSession,
        context: WorkerContext,
        accounting: BatchAccount | None = None,
    ) -> None:
        self._model, self._server, self._context, self._client = model, server, context, server.client
        self.plan, self.layout = plan, model.layout(plan, is_served=True)
        self.accounting = accounting or BatchAccount()
        self.sync = True  # False inside no_sync(); nothing is sent before the optimizer steps
        self.step = self.ranks = 0
        self.pending_result: ExchangeResult | None = None
        self._in_place = True  # what the server sends lands in the parameters themselves, if they are on the CPU
        self._computed = False  # a backward has run since the last step
        self._closed = False
        self.values = [_memory(bucket) for bucket in self.layout.buckets]
        self.grads = [_memory(bucket) for bucket in self.layout.buckets]
        self._slots = list(self._lay_out())
        self._places = self._lay_out_grads()
        self._set_aside: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()  # gradients that were taken in backward, and are others now
        self._blocks = cut(self.layout, server.block_bytes)
        shards = deal(self._blocks, server.shards)
        self._encoder = PushEncoder(
            plan, self.layout, self._blocks, model.codec_state, rank=context.rank, seed=context.seed
        )
        self._scorer: LossScorer | None = None
        if context.is_validator and plan.validator is not None and plan.validator.needs_losses:
            self._scorer = LossScorer(model, self.layout, self._blocks, self._client, context)
        self._flight: ServerFlight | None = None
        self._return: ParameterReturn | None = None  # once modules wait for what they read
        self._early: EarlyPush | None = None
        if plan.scheduling is not None and not context.is_validator:  # whose reference is whole, or of no use
            self._early = EarlyPush(
                model,
                plan.scheduling,
                self._blocks,
                shards,
                context.metrics.now_s,
                take=self._take_gradient,
                push=self._push_early,
            )
        opening = self._client.open(
            model.number,
            plan=plan.to_toml(),
            layout=self.layout.digest,
            blocks=self._blocks,
            shards=shards,
            values=[self.values[b.bucket][b.offset : b.offset + b.numel] for b in self._blocks],
            optimizer=model.describe(),
        )
        context.waiter.wait(opening, WaitContext("the parameters of the server", through_server=True))
        # All draw the same random numbers in one step: one that joins later counts those that it has not made.
        self._ahead = plan.step_of(self._client.state(model.number).clock)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_grad, name))
            for name, parameter in model.parameters.items()
        ]
        self._take_values()

    # -- called by the front end ---------------------------------------------------------------------------------

    def adopt(self, plan: Plan) -> None:
        """Go by this plan from here on."""
        self.plan = plan

    def on_forward(self, inputs: Any) -> None:
        """Count a forward pass that trains, which begins."""
        self._context.metrics.forward(inputs)
        self.accounting.forward()
        self._look_for_cleared()
        if self._early is not None and self.sync:
            self._early.forward_begins()

    def on_backward(self) -> None:
        """Note that the outermost backward has begun; without a scheduler nothing is sent before the optimizer steps.

        Raises:
            ModelError: if the run is closed: the replicas would silently drift apart.
        """
        if self._closed:
            raise ModelError(RUN_IS_CLOSED)
        self._land()
        self._look_for_cleared()
        self._computed = True
        self.accounting.backward()
        if self._early is not None and self.sync:
            self._early.backward_begins()

    def _on_grad(self, name: str, parameter: torch.Tensor) -> None:
        self.accounting.computed()
        if self._early is not None and self.sync:
            self._early.complete(name)

    def _look_for_cleared(self) -> None:
        """Count gradients that are gone in no step: the optimizer's was left out (as GradScaler does)."""
        if self._computed and all(parameter.grad is None for parameter in self._model.parameters.values()):
            self._computed = False
            self.accounting.cleared()

    def weight(self, otherwise: float) -> float:
        """The weight of a contribution: the samples since the last, or `otherwise` if no loader has counted any."""
        # A loader whose batches hold no tensors counts none.
        return float(self.accounting.samples if self._context.metrics.loader_counts else 0) or otherwise

    @property
    def number(self) -> int:
        """The number of the next contribution, whether or not the parameters for it are here."""
        if self._flight is not None:
            return self._flight.number + 1
        return self._client.state(self._model.number).clock

    @property
    def holds_gradient(self) -> bool:
        """Whether there is a gradient that was not pushed, because it is being accumulated."""
        return self._computed

    def land(self, *, in_place: bool) -> None:
        """Have what the server sends land in the parameters themselves from now on, or not."""
        self._in_place = in_place
        for _, parameter, value in self._slots:
            if in_place and self._lands_in(parameter):
                value.copy_(parameter.data)
                parameter.data = value
            elif parameter.data.data_ptr() == value.data_ptr():
                parameter.data = value.clone()

    def keep_drawn(self) -> None:
        """Note that what was drawn is used in the next contribution; nobody else is to compute it."""
        self._server.keep_drawn()

    def before_step(self) -> None:
        """Push the gradient, and come back with the next parameters.

        Raises:
            NumericsError: if what is pushed holds NaN or Inf and the plan says to raise.
            WorkerLostError, NetworkError: if the server is gone.
        """
        self.synchronize()  # of an earlier call; or a part that was given again
        metrics = self._context.metrics
        metrics.compute_done()
        self._server.keep_drawn()
        if self._early is not None and self._computed:
            self._early.backward_ends()
        info = ContributionInfo(self.weight(self.accounting.weight), hyper(self._model.optimizer))
        if self._return is not None:  # the server sees it compute from when all parameters are here, which is later
            info = msgspec.structs.replace(info, computing_s=max(0.0, metrics.own_s))
        flight = self._issue(info, self._pack(), self.step)
        if self._return is None:
            self.pending_result = self._finish(flight)
        else:
            self._flight = flight
            self._return.begin(flight.request)
        result = self.pending_result  # of the step before, if this one's is not known yet
        metrics.exchange_done(
            self.step,
            () if result is None else result.spans,
            flight.weight,
            0 if result is None else result.staleness,
            model=self._model.number,
            dropped=result is not None and result.dropped,
        )
        self.step += 1
        self._computed = False
        self.accounting.exchanged()

    def exchange(
        self, info: ContributionInfo, unused: Sequence[str] = (), *, step: int | None = None, is_whole: bool = False
    ) -> ExchangeResult:
        """Push what is in `grads`, and wait for the next parameters.

        Args:
            info: what it is; `unused` and `used` are filled in.
            unused: names of parameters that have no gradient.
            step: for reports; that of this model's gradients if None.
            is_whole: whether nothing is to be left of it, whatever the codec.

        Raises:
            NumericsError: if it holds NaN or Inf and the plan says to raise.
            WorkerLostError, NetworkError: if the server is gone.
        """
        return self._finish(self._issue(info, unused, self.step if step is None else step, is_whole=is_whole))

    @property
    def left(self) -> Sequence[torch.Tensor]:
        """The part [D] of each bucket's last change that was not sent, where it stays in the worker's parameters."""
        return self._encoder.left

    def _issue(
        self, info: ContributionInfo, unused: Sequence[str], step: int, *, is_whole: bool = False
    ) -> ServerFlight:
        if self._scorer is not None and self.plan.validator is not None:
            self._context.trusted_loss.check(self.plan.validator)
        metrics, number, contribution = self._context.metrics, self._model.number, self.number
        issued_s, stamp = metrics.now_s(), self.accounting.stamp
        purpose: Purpose = "change" if info.change else "gradient"
        if self._protect_(info.weight):
            unused = ()  # there is noise in each element, and where it is useless is nobody else's business
        contribution_hooks.before_encode(self.grads, (number, info.change), step)
        parts = self._encoder.encode(self.grads, step=self._ahead + step, purpose=purpose, is_whole=is_whole)
        weight = info.weight
        if not self._finite(parts, purpose, step):
            weight = 0.0
            self._encoder.forget()
        info = msgspec.structs.replace(info, weight=weight, used=tuple(self._server.used), step=step)
        self._server.used = []
        early = self._early
        request = self._client.exchange(
            number,
            parts,
            about=info,
            unused=tuple(unused),
            order=() if early is None else early.order,
            changed=self._blocks_with(self._changed),
        )
        metrics.sent_bytes += request.sent_bytes
        return ServerFlight(request, step, weight, issued_s, stamp, contribution)

    def _protect_(self, weight: float) -> bool:
        """Clip what is in `grads`, and add noise, if the plan says so; a reference stays as it is but for its norm."""
        mechanism = self.plan.privacy
        if mechanism is None:
            return False
        if self._context.is_validator:
            clip_reference_(self.grads, mechanism)
        elif not weight:  # it is in no update: nothing is shown of it, and nothing spent
            for grads in self.grads:
                grads.zero_()
        else:
            self._model.private.protect_(self.grads, mechanism)
        return True

    def _finish(self, flight: ServerFlight) -> ExchangeResult:
        """Wait for the next parameters, and take those that were not taken yet."""
        metrics, number = self._context.metrics, self._model.number
        request, step, weight = flight.request, flight.step, flight.weight
        operation = f"the exchange with the server ({short_name(self.plan.sync)})"
        where = WaitContext(operation, step, model=number, through_server=True)
        if self._scorer is None:
            self._context.waiter.wait(request, where)
        else:
            self._scorer.wait(request, where)
            self._context.trusted_loss.forget()
        if self._return is None:
            self._take_values()
        else:
            self._return.finish()
        self._context.waiter.witness.exchanged(flight.stamp)
        if self._early is not None:
            self._after_exchange(self._early, metrics.now_s() - flight.issued_s)
        pulled = request.value
        self._encoder.book(counts=pulled.is_counted and weight > 0)
        if pulled.fate:
            text = f"Rank {self._client.rank} is back: what it had computed in step {step} {pulled.fate}."
            _log.warning("%s", text)
            metrics.event("server", text, step)
        self._context.history.record_server_parameters(number, step, self.values, pulled, samples=weight)
        return ExchangeResult(
            weights=(weight,),
            staleness=pulled.staleness,
            dropped=weight > 0 and not pulled.is_counted,
            spans=((flight.issued_s, metrics.now_s()),),
        )

    def take_over_optimizer(self) -> None:
        """Give the optimizer here the state that the server's copy has gathered; the server's stays as it is.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        gathered = self._fetch()
        own = {name: {k: v for k, v in state.items() if k != OUTER} for name, state in gathered.items()}
        load(self._model.optimizer, self._model.parameters, own)

    def begin_with(self, step: int, gathered: States) -> None:
        """Go on where workers without a server are; the first brings its parameters and what its optimizer has.

        All have them when they are `refreshed`.

        Args:
            step: they have made.

        Raises:
            ModelError: if the server's copy of the optimizer cannot go on from that.
            NetworkError: if the server is gone.
        """
        self.load_state_dict({"step": step, "server": to_bytes(gathered)})

    def _fetch(self) -> States:
        fetched = self._client.fetch(self._model.number)
        self._context.waiter.wait(fetched, WaitContext("the optimizer's state at the server", through_server=True))
        return gather(fetched.value, self._blocks)

    def after_step(self) -> ExchangeResult | None:
        """Let gradients be looked at again; the optimizer has found none, and done nothing."""
        for name, grad in self._set_aside.items():
            self._model.parameters[name].grad = grad
        self._set_aside.clear()
        if self._context.history.is_kept:  # of this very step
            self.synchronize()
        result, self.pending_result = self.pending_result, None
        return result

    def synchronize(self) -> None:
        """Have all parameters of the next step here. This worker's own: others may be anywhere."""
        self._land()
        if self._return is not None:
            self._return.take_again()

    def _land(self) -> None:
        """Have all parameters here; those that a forward pass has read stay as it read them."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.pending_result = self._finish(flight)

    def explain(self, error: BaseException) -> str:
        """Say nothing: no parameter is stepped between a forward pass and its backward."""
        return ""

    @property
    def wants_vote(self) -> bool:
        """Whether there is something to be decided by all: never."""
        return False

    def vote(self) -> None:
        """Do nothing: there is nothing to decide."""

    def even_out(self) -> None:
        """Do nothing: whoever joins has all that it takes to go on."""

    def settle(self) -> None:
        """Do nothing: every step pushes what it has."""

    def refreshed(self) -> None:
        """Bring the newest parameters, which are here, to the model's device."""
        self._take_values()
        number = self._model.number
        pulled = self._client.state(number).request.value
        self._context.history.record_server_parameters(number, self.step, self.values, pulled, brought=False)

    def state_dict(self) -> dict[str, Any]:
        """Step count, and the optimizer's state at the server, by parameter name, as bytes.

        Raises:
            NetworkError: if the server is gone.
        """
        return {"step": self.step, "server": to_bytes(self._fetch())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the first brings it, and its parameters, to the server.

        All have them when they are `refreshed`.

        Raises:
            ModelError: if it is damaged, or of another model; then the server has heard nothing of it.
            NetworkError: if the server is gone.
        """
        brought = from_bytes(state["server"]) if state.get("server") else {}
        try:
            check_states(self._model.describe(), brought, self._model.parameters)
        except PeerError as error:
            raise ModelError(f"Cannot load the optimizer's state from this checkpoint: {error}") from error
        self.step = state_checks.whole(state["step"], "step")
        if self._server.brings_parameters:
            portions = list(scatter(brought, self._blocks))
            for _, parameter, value in self._slots:
                value.copy_(parameter.data)
            put = self._client.put(self._model.number, portions)
            self._context.waiter.wait(put, WaitContext("the server to take over a checkpoint", through_server=True))
            if refusal := put.value:  # all hear why when they are asked what a checkpoint holds
                self._server.is_brought = False
                _log.warning("The server keeps what it has. %s", refusal)

    def detach(self, *, has_own_optimizer: bool) -> None:
        """Let another one go on with the model.

        Raises:
            WorkerLostError, NetworkError: if the server is gone.
        """
        if not has_own_optimizer:
            self.take_over_optimizer()
        self.land(in_place=False)
        self.close()

    def close(self) -> None:
        """Take the hooks off; the parameters stay as they are."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._flight = None  # who leaves in order has waited before it said good-bye
        if self._early is not None:
            self._early.close()
        if self._return is not None:
            self._return.close()
            self._server.before_question.remove(self.synchronize)
            self._return = None

    # -- memory --------------------------------------------------------------------------------------------------

    def _lay_out(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Move each parameter into its bucket, if that is on its device; (name, it, its place)."""
        for bucket, values in zip(self.layout.buckets, self.values, strict=True):
            for slot in bucket.slots:
                parameter = self._model.parameters[slot.name]
                real = parameter.numel() * (1 + parameter.is_complex())
                value = view_in(_as_whole(values[slot.offset : slot.offset + real]), 0, parameter)
                value.copy_(parameter.data)
                if self._lands_in(parameter):
                    parameter.data = value
                yield slot.name, parameter, value

    def _lay_out_grads(self) -> dict[str, torch.Tensor]:
        """The place of each gradient in `grads`, by name."""
        return {
            slot.name: view_in(grads, slot.offset, self._model.parameters[slot.name])
            for bucket, grads in zip(self.layout.buckets, self.grads, strict=True)
            for slot in bucket.slots
        }

    def _take_values(self) -> None:
        """Bring what arrived to the model's device."""
        for _, parameter, value in self._slots:
            if not self._lands_in(parameter):
                parameter.data.copy_(value, non_blocking=True)

    def _lands_in(self, parameter: torch.nn.Parameter) -> bool:
        return self._in_place and parameter.device.type == "cpu"

    def _pack(self) -> list[str]:
        """Copy every gradient into its bucket and set it aside; the names of those that are missing."""
        unused = []
        taken = set() if self._early is None else self._early.taken
        self._changed = {name for name in taken if not self._is_as_taken(name)}
        if self._changed:  # what was taken is on its way
            self.grads = [grads.clone() for grads in self.grads]
            self._places = self._lay_out_grads()
        for name, parameter, _ in self._slots:
            place, grad = self._places[name], parameter.grad
            if grad is None:
                unused.append(name)
                place.zero_()
                continue
            if name not in taken or name in self._changed:
                place.copy_(grad.to_dense() if grad.is_sparse else grad.detach())
            self._set_aside[name] = grad
            parameter.grad = None
        return unused

    # -- what leaves during backward -----------------------------------------------------------------------------

    def _take_gradient(self, name: str) -> bool:
        """Copy a gradient that is complete into its bucket, unless it is sparse."""
        grad = self._model.parameters[name].grad
        if grad is None or grad.is_sparse:
            return False
        self._places[name].copy_(grad.detach())
        return True

    def _is_as_taken(self, name: str) -> bool:
        grad = self._model.parameters[name].grad
        if grad is None or grad.is_sparse:
            return False
        taken = self._places[name]
        now = grad.detach().to(taken.device)
        return torch.equal(now, taken) or bool(torch.isclose(now, taken, rtol=0.0, atol=0.0, equal_nan=True).all())

    def _push_early(self, index: int) -> None:
        block = self._blocks[index]
        grad = self.grads[block.bucket][block.offset : block.offset + block.numel]
        self._client.push_early(
            self._model.number, index, self._encoder.encode_block(index, grad, step=self._ahead + self.step)
        )

    def _blocks_with(self, names: Collection[str]) -> list[int]:
        """The blocks that any of these gradients is in."""
        return [b.index for b in self._blocks if any(piece.name in names for piece in b.pieces)] if names else []

    def _after_exchange(self, early: EarlyPush, exchange_s: float) -> None:
        """Find the order when enough is known, or push behind backward from here on."""
        changed, self._changed = bool(self._changed), set[str]()
        early.stepped(exchange_s, changed=changed)
        if why := early.objection:
            early.close()
            self._early = None
            text = f"step {self.step}: gradients are pushed behind backward: {why}."
            self._context.metrics.event("scheduling", text, self.step)
            _log.warning("%s", text)
        elif early.is_enough:
            early.plan(min(self._answer_s() for _ in range(_QUESTIONS)))
            text = f"gradients are pushed in {len(self._blocks)} blocks while backward computes, in the order of"
            self._context.log.all("scheduling", f"step {self.step}: {text} {self.plan.scheduling!r}.")
            if early.readers:
                self._return_ahead(early)

    def _return_ahead(self, early: EarlyPush) -> None:
        """Have `optimizer.step()` return at once from here on, and modules wait for what they read."""
        self._client.pull_in_order(self._model.number, early.pull_order)
        self.land(in_place=False)  # what comes must not land under a forward pass's feet
        self._return = ParameterReturn(
            self._model.model,
            {name: (parameter, value) for name, parameter, value in self._slots},
            self._blocks,
            self._client.state(self._model.number),
            early.readers,
            self._context.waiter,
            come_to_rest=self.synchronize,
        )
        self._server.before_question.append(self.synchronize)

    def _answer_s(self) -> float:
        """The time that the server takes to answer a question."""
        began_s = self._context.metrics.now_s()
        self._context.waiter.wait(self._client.look(), WaitContext("an answer of the server", through_server=True))
        return self._context.metrics.now_s() - began_s

    def _finite(self, parts: Sequence[torch.Tensor | EncodedBlock], what: str, step: int) -> bool:
        """Whether what is sent can be taken; with a narrow codec it may overflow where the gradient did not."""
        if self.plan.nonfinite == "pass":
            return True
        bad: dict[str, None] = {}
        for block, part in zip(self._blocks, parts, strict=True):
            values = self.grads[block.bucket][block.offset : block.offset + block.numel]
            if isinstance(part, torch.Tensor):
                values = part
            if bool(torch.isfinite(values).all()):
                continue
            pieces = values.split([piece.numel for piece in block.pieces])
            for piece, own in zip(block.pieces, pieces, strict=True):
                if not bool(torch.isfinite(own).all()):
                    bad[piece.name] = None
        return not leave_out(list(bad), self.plan.nonfinite, what=what, step=step, metrics=self._context.metrics)


def _memory(bucket: Bucket) -> torch.Tensor:
    pinned = bucket.device.type == "cuda"
    return torch.zeros(bucket.numel, dtype=bucket.dtype, pin_memory=pinned)


def _as_whole(part: torch.Tensor) -> torch.Tensor:
    """The same memory, as a storage of its own: safetensors takes two stretches of one storage for shared tensors."""
    if part.is_pinned():  # what lands there is copied to the device
        return part
    return torch.from_numpy(part.view(torch.uint8).numpy()).view(part.dtype)
