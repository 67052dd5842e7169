"""The factory of synchronizers: each keeps one prepared model together with the other workers' replicas, on whichever
fabric the plan names.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.explain import FIRST_BROADCAST
from offbeat.diagnosis.wait import WaitContext
from offbeat.engine.buffers import Buffers
from offbeat.engine.communicator import Communicator
from offbeat.engine.cross_iteration import CrossIterationReducer
from offbeat.engine.local_sgd_allreduce import AllReduceAverager
from offbeat.engine.local_sgd_server import ServerAverager
from offbeat.engine.local_sgd_switch import SwitchAverager
from offbeat.engine.prepared_model import tensors_of
from offbeat.engine.reducer import Reducer
from offbeat.engine.server_sync import ServerSync
from offbeat.engine.state_average import average_states
from offbeat.engine.switchable_sync import SwitchableSync, Transport
from offbeat.errors import OffbeatError
from offbeat.server.optimizers import lines_of
from offbeat.sync import BSP, StepsLocally

if TYPE_CHECKING:
    from offbeat.engine.batch_accounting import BatchAccount
    from offbeat.engine.local_sgd import Averager
    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.server_session import ServerSession
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.plan import Plan


class SynchronizerFactory:
    """The factory of what exchanges a model's gradients or changes.

    Args:
        context: of this worker.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def check_optimizers_equal(self, one: PreparedModel, *, is_served: bool) -> None:
        """See that all workers' optimizers are alike. Collective.

        Args:
            is_served: a server is to hold it: then hyper-parameters are compared, too.

        Raises:
            ModelError: if a server cannot hold it.
            DisagreementError: if they are not.
        """
        self._context.control.check_equal(
            "optimizer",
            "\n".join(lines_of(one.describe()) if is_served else one.outline()),
            "Build the same optimizer on every worker, with the same groups; what its groups hold may change later.",
        )

    def serve(self, one: PreparedModel, plan: Plan, server: ServerSession) -> SwitchableSync:
        """Have a server keep the model; the optimizers were agreed on. Collective.

        Raises:
            ModelError: if the server cannot hold the optimizer.
            DisagreementError: if another worker has another plan or layout.
        """
        return SwitchableSync(one, self._by_server(one, ServerSync(one, plan, server, self._context)), self._context)

    def replicate(self, one: PreparedModel, plan: Plan) -> SwitchableSync:
        """Have the workers keep the model equal among themselves."""
        if self._context.control.world == 1 and plan.is_tabled:  # nobody to be ahead of
            plan = dataclasses.replace(plan, sync=BSP())
        return SwitchableSync(one, self._by_all_reduce(one, plan), self._context)

    # -- from one to the other -----------------------------------------------------------------------------------

    def to_server(
        self, one: PreparedModel, plan: Plan, server: ServerSession, synchronizer: SwitchableSync
    ) -> Transport:
        """Have a server go on from where the workers are, with every gradient. Collective.

        Returns:
            What `synchronizer`, which is as it was, can go by next; it is to be `refreshed` then.

        Raises:
            ModelError: if the server's copy of the optimizer cannot go on from what theirs have gathered.
        """
        synchronizer.adopt(dataclasses.replace(synchronizer.plan, sync=BSP(), controller=None))
        gradients = ServerSync(one, plan, server, self._context, synchronizer.accounting)
        gradients.adopt(synchronizer.plan)
        try:
            gradients.begin_with(synchronizer.step, one.gathered())
        except OffbeatError:
            gradients.close()
            raise
        return self._by_server(one, gradients)

    def to_group(self, one: PreparedModel, plan: Plan, synchronizer: SwitchableSync, step: int) -> None:
        """Have the workers go on by themselves from where all of them, and the server, are. Collective.

        Args:
            step: that all go on with.

        Raises:
            NetworkError: if the server is gone.
        """
        control = self._context.control
        said = "itself" if synchronizer.has_own_optimizer else ""
        told = control.texts("whose optimizer has stepped by itself", said)
        plan = dataclasses.replace(plan, sync=BSP(), controller=None)
        transport = self._by_all_reduce(one, plan, synchronizer.accounting)
        synchronizer.go_by(transport)
        transport.gradients.step = step
        if any(told.values()):
            average_states(one.optimizer, one.parameters, Communicator(one.fabric, self._context, one.number), control)
        self.broadcast(one)

    def broadcast(self, one: PreparedModel) -> None:
        """Give every rank rank 0's parameters (frozen ones too) and buffers. Collective."""
        if self._context.control.world == 1:
            return
        with torch.no_grad():
            for name, own in tensors_of(one.model):
                whole = own.contiguous()
                self._context.waiter.wait(one.fabric.broadcast(whole, 0), WaitContext(f"{FIRST_BROADCAST} {name}"))
                if whole.data_ptr() != own.data_ptr():
                    own.copy_(whole)

    def _by_server(self, one: PreparedModel, gradients: ServerSync) -> Transport:
        return Transport(gradients, lambda plan: ServerAverager(gradients, one.parameters, local_policy(plan)))

    def _by_all_reduce(self, one: PreparedModel, plan: Plan, accounting: BatchAccount | None = None) -> Transport:
        context = self._context
        buffers = Buffers(one.model, one.fabric) if context.control.world > 1 else None
        kind = Reducer if plan.scheduling is None else CrossIterationReducer
        reducer = kind(one, plan, context, buffers=buffers, accounting=accounting)

        def averager(plan: Plan) -> Averager:
            if plan.is_tabled:
                return SwitchAverager(one, reducer, buffers, plan.sync, context)
            return AllReduceAverager(one, reducer, buffers, local_policy(plan), context)

        return Transport(reducer, averager)


def local_policy(plan: Plan) -> StepsLocally:
    """The plan's policy, with which workers step by themselves."""
    policy = plan.local_policy
    assert policy is not None, "asked for averages of steps that are all of them exchanged"
    return policy
