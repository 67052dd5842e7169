"""How one prepared model is kept together with the other workers' replicas, on whichever fabric the plan names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import (
    AllReduceAverager,
    AllReduceSwitch,
    Buffers,
    Reducer,
    ServerSwitch,
    ServerSync,
    distinct,
    ignored_names,
)
from offbeat.errors import OffbeatError
from offbeat.server.optimizers import lines_of
from offbeat.sync import BSP, LocalSGD

if TYPE_CHECKING:
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine import ControlGroup, HistoryRecorder, StepMetrics
    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.server_session import ServerSession
    from offbeat.plan import Plan


class SynchronizerFactory:
    """Makes what exchanges a model's gradients or changes.

    Args:
        control: this worker's end of the control group.
        waiter: the one waiting primitive.
        meter: where measurements go.
        diary: where digests of the parameters go.
    """

    def __init__(self, control: ControlGroup, waiter: BlockingWait, meter: StepMetrics, diary: HistoryRecorder) -> None:
        self._control, self._waiter, self._meter, self._diary = control, waiter, meter, diary

    def agree_on_optimizer(self, one: PreparedModel, *, is_served: bool) -> None:
        """See that all workers' optimizers are alike. Collective.

        Args:
            is_served: a server is to hold it: then hyper-parameters are compared, too.

        Raises:
            ModelError: if a server cannot hold it.
            DisagreementError: if they are not.
        """
        self._control.agree(
            "optimizer",
            "\n".join(lines_of(one.describe()) if is_served else one.outline()),
            "Build the same optimizer on every worker, with the same groups; what its groups hold may change later.",
        )

    def serve(self, one: PreparedModel, plan: Plan, server: ServerSession) -> ServerSwitch:
        """Have a server keep the model; the optimizers were agreed on. Collective.

        Raises:
            ModelError: if the server cannot hold the optimizer.
            DisagreementError: if another worker has another plan or layout.
        """
        served = self._served(one, plan, server, in_place=not isinstance(plan.sync, LocalSGD))
        return ServerSwitch(served=served, parameters=one.parameters, waiter=self._waiter, model=one.number)

    def replicate(self, one: PreparedModel, plan: Plan, share: BatchAccount | None = None) -> AllReduceSwitch:
        """Have the workers keep the model equal among themselves."""
        buffers = Buffers(one.model, one.fabric) if self._control.world > 1 else None
        reducer = Reducer(
            parameters=one.parameters,
            layout=one.layout(plan, is_served=False),
            plan=plan,
            fabric=one.fabric,
            control=self._control,
            buffers=buffers,
            waiter=self._waiter,
            meter=self._meter,
            model=one.number,
            share=share,
        )

        def average(policy: LocalSGD) -> AllReduceAverager:
            return AllReduceAverager(
                reducer=reducer,
                parameters=one.parameters,
                fabric=one.fabric,
                buffers=buffers,
                waiter=self._waiter,
                policy=policy,
                model=one.number,
            )

        return AllReduceSwitch(
            reducer=reducer,
            average=average,
            parameters=one.parameters,
            optimizer=one.optimizer,
            control=self._control,
            waiter=self._waiter,
            model=one.number,
        )

    # -- from one to the other -----------------------------------------------------------------------------------

    def to_server(self, one: PreparedModel, plan: Plan, server: ServerSession, before: AllReduceSwitch) -> ServerSwitch:
        """Have a server go on from where the workers are, with every gradient; they are `refreshed` next. Collective.

        Raises:
            ModelError: if the server's copy of the optimizer cannot go on from what theirs have gathered.
        """
        before.plan = dataclasses.replace(before.plan, sync=BSP(), controller=None)
        state = before.state_dict()
        served = self._served(one, plan, server, share=before.share)
        served.plan = before.plan
        after = ServerSwitch(served=served, parameters=one.parameters, waiter=self._waiter, model=one.number)
        try:
            served.begin_with(state["step"], state["codec"], one.gathered())
        except OffbeatError:
            served.close()
            raise
        after.sync = before.sync
        return after

    def to_group(self, one: PreparedModel, plan: Plan, before: ServerSwitch, step: int) -> AllReduceSwitch:
        """Have the workers go on by themselves from where all of them, and the server, are. Collective.

        Args:
            step: that all go on with.

        Raises:
            NetworkError: if the server is gone.
        """
        told = self._control.texts("whose optimizer has stepped by itself", "itself" if before.leave() else "")
        were_apart = any(told.values())
        after = self.replicate(one, dataclasses.replace(plan, sync=BSP(), controller=None), before.share)
        after.go_on_from(step, were_apart=were_apart)
        after.sync = before.sync
        self.broadcast(one)
        return after

    def broadcast(self, one: PreparedModel) -> None:
        """Give every rank rank 0's parameters (frozen ones too) and buffers. Collective."""
        if self._control.world == 1:
            return
        ignored = ignored_names(one.model)
        named = [*one.model.named_parameters(), *one.model.named_buffers()]
        with torch.no_grad():
            for name, tensor in named:
                if name in ignored or not tensor.numel():
                    continue
                own = distinct(tensor.detach())
                whole = own.contiguous()
                self._waiter.wait(one.fabric.broadcast(whole, 0), WaitContext(f"the first broadcast of {name}"))
                if whole.data_ptr() != own.data_ptr():
                    own.copy_(whole)

    def _served(
        self,
        one: PreparedModel,
        plan: Plan,
        server: ServerSession,
        *,
        in_place: bool = True,
        share: BatchAccount | None = None,
    ) -> ServerSync:
        return ServerSync(
            parameters=one.parameters,
            layout=one.layout(plan, is_served=True),
            plan=plan,
            optimizer=one.optimizer,
            server=server,
            waiter=self._waiter,
            meter=self._meter,
            diary=self._diary,
            in_place=in_place,
            model=one.number,
            share=share,
        )
