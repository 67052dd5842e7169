"""Fabric migration while training: between the workers' own fabric and a parameter server.

    to a server     behind an exchange in which one worker has requested a vote (`engine.plan_vote`); with leased data
                    where the next loop over it begins. A server is found or started, and rank 0 brings the parameters,
                    what the optimizer has gathered, and the place in the data.
    from a server   where in its script no worker has been yet (`engine.sync_point`): all take the newest parameters,
                    and what the server's optimizer has gathered, and work out alike who computes what. The server ends.

Either way nothing is under way then: what was computed is in the parameters, and these are the same on all workers, to
the bit. Steps of the workers' own (`LocalSGD`) end before, and begin anew after, if both plans have them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from typing import TYPE_CHECKING

import torch

from offbeat.errors import NetworkError, OffbeatError, PlanError
from offbeat.server.optimizers import check_states
from offbeat.short_name import short_name
from offbeat.sync import BSP

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.engine.factory import SynchronizerFactory
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.server_launch import ServerLaunch
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.switchable_sync import Transport
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.loading.manager import LoaderManager
    from offbeat.loading.server_source import ServerSource
    from offbeat.plan import Plan


class FabricMigration:
    """One worker's models and data, and how they go over.

    Args:
        context: of this worker.
        models: those prepared; more may come.
        data: of the run's loops.
        factory: makes what exchanges a model's gradients.

    Attributes:
        due: the plan with a server that all go over to, when that is started, or where the next loop over leased data
            begins; None if there is none.
        starting: its server, if that is started here.
    """

    def __init__(
        self, context: WorkerContext, models: ModelRegistry, data: LoaderManager, factory: SynchronizerFactory
    ) -> None:
        self._control, self._waiter, self._history = context.control, context.waiter, context.history
        self._models, self._data, self._factory = models, data, factory
        self.due: Plan | None = None
        self.starting: ServerLaunch | None = None

    def check(self, plan: Plan) -> None:
        """See that this worker, which has no server, can go by another plan.

        Raises:
            OffbeatError: if it cannot.
        """
        if self.due is not None:
            raise PlanError(
                f"Cannot swap the plan now: all workers are about to move to {short_name(self.due.fabric)}. "
                "Try again when they have."
            )
        plan.check_world(len(self._control.members))
        if not plan.is_served:
            return
        for one in self._models.prepared:
            check_states(one.describe(), one.gathered(), one.parameters)

    @property
    def stays(self) -> str:
        """The reason why this worker could not leave the server, or ""."""
        return self._data.stays

    @property
    def wants_vote(self) -> bool:
        """Whether this worker wants all to confer, as the server is there that it has started, or never will be."""
        if self.due is None or self.starting is None:
            return False
        if self.starting.beside not in self._control.members:
            return self._control.is_leader
        return self._control.rank == self.starting.beside and self.starting.done()

    def is_due(self) -> bool:
        """Whether all go over now. Collective, behind a step of all."""
        if self.due is None or self._data.leased:
            return False
        is_there = self.starting is None or self.starting.done()
        told = self._control.texts("whether the server has been started", "" if is_there else "not yet")
        return not any(told.values())

    def to_server(self, plan: Plan, connect: Callable[[], ServerSession]) -> tuple[ServerSession | None, str]:
        """Go over to a server, or say why that cannot be. Collective, behind a step of all.

        Args:
            connect: finds or starts it. Collective.

        Raises:
            OffbeatError: if another worker, or the server, is lost meanwhile.
        """
        server, refusal = self._connect(connect)
        starting, self.due, self.starting = self.starting, None, None
        refusals = self._control.texts("whether all can reach the server", refusal)
        if server is not None:
            server.begin_with(tuple(refusals))
        refusal = next((text for text in refusals.values() if text), "")
        if server is None or refusal:
            self._let_go(server, starting)
            return None, refusal
        step = max((synchronizer.step for synchronizer in self._models.synchronizers), default=0)
        before = [synchronizer.plan for synchronizer in self._models.synchronizers]
        self._end_own_steps()
        # Until all are there, each has all that it needs to go on without: who brings it to the server may be lost.
        kept = [tensor.detach().clone() for tensor in self._models.tensors]
        transports, sources, refusal = self._bring_to(plan, server)
        refusals = self._control.texts("whether all are at the server", refusal)
        if refusal := next((text for text in refusals.values() if text), ""):
            for transport in transports:
                transport.gradients.close()
            self._let_go(server, starting)
            with torch.no_grad():
                for tensor, own in zip(self._models.tensors, kept, strict=True):
                    tensor.copy_(own)
            for synchronizer, own_plan in zip(self._models.synchronizers, before, strict=True):
                synchronizer.adopt(own_plan)
            return None, refusal
        place = self._leave_stretch(plan, step, server.job)
        self._data.to_server(server, sources)
        for synchronizer, transport in zip(self._models.synchronizers, transports, strict=True):
            synchronizer.go_by(transport)
            synchronizer.refreshed()
            synchronizer.adopt(plan)
        self._enter_stretch(place, step)
        return server, ""

    def _end_own_steps(self) -> None:
        """All step together. Collective."""
        for synchronizer in self._models.synchronizers:
            synchronizer.adopt(dataclasses.replace(synchronizer.plan, sync=BSP(), controller=None))

    def _bring_to(self, plan: Plan, server: ServerSession) -> tuple[list[Transport], dict[int, ServerSource], str]:
        """Have the server know all that it goes on from; what exchanges with it, or why it cannot. Collective."""
        transports: list[Transport] = []
        try:
            for one, synchronizer in self._models.pairs():
                transports.append(self._factory.to_server(one, plan, server, synchronizer))
            sources = self._data.bring_to(server)
            server.take_over(self._waiter)
        except OffbeatError as error:
            self._waiter.failure = None  # the workers are as they were
            server.abort()  # the others are not to wait for this one there
            return transports, {}, str(error)
        return transports, sources, ""

    def _let_go(self, server: ServerSession | None, starting: ServerLaunch | None) -> None:
        """The workers stay as they are, and the server ends."""
        if server is not None:
            with contextlib.suppress(NetworkError):  # it was let go of before
                server.abort()
        if starting is not None:
            starting.abandon()
        self._waiter.ask_server = str

    def to_group(self, plan: Plan, server: ServerSession) -> None:
        """Leave the server, where all have come together. Collective.

        Raises:
            OffbeatError: if another worker, or the server, is lost meanwhile.
        """
        steps = self._control.texts(
            "the steps that were made", str(max(one.step for one in self._models.synchronizers))
        )
        witness = self._waiter.witness
        done = self._control.texts("the exchanges that were made", str(witness.exchanges))
        witness.exchanges = max(map(int, done.values()))
        stamps = self._control.texts(
            "the batches that were drawn", str(max(r.accounting.stamp for r in self._models.synchronizers))
        )
        step = max(map(int, steps.values()))
        place = self._leave_stretch(plan, step)
        for one, synchronizer in self._models.pairs():
            synchronizer.accounting.stamp = max(map(int, stamps.values()))
            self._factory.to_group(one, plan, synchronizer, step)
            synchronizer.adopt(plan)
        self._enter_stretch(place, step)
        self._data.to_group(server)
        self._waiter.ask_server = str
        server.close()

    def _connect(self, connect: Callable[[], ServerSession]) -> tuple[ServerSession | None, str]:
        try:
            return connect(), ""
        except OffbeatError as error:
            self._waiter.failure = None  # the workers are as they were
            return None, str(error)

    # -- the history ---------------------------------------------------------------------------------------------

    def _leave_stretch(self, plan: Plan, step: int, job: str = "") -> str:
        """End a stretch of the history, and begin another; the name of the place. Collective.

        Args:
            plan: that holds then.
            step: that all go on with.
            job: at the server; "" if there is none.
        """
        if not self._history.is_kept:
            return ""
        names = self._control.texts("the name of this place in the history", secrets.token_hex(8))
        place = next(iter(names.values()))
        self._history.record_departure(place, job or place, step, self._models.tensors)
        members = self._control.members
        world = len(members) if members == tuple(range(len(members))) else 0  # else nobody knows who should be there
        for one in self._models.prepared:
            self._history.record_model(one.number, plan, world, one.parameters.values())
        return place

    def _enter_stretch(self, place: str, step: int) -> None:
        """Record what this worker has behind the place."""
        if place:
            self._history.record_arrival(place, step, self._models.tensors)
