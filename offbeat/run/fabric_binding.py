"""The worker's ends of the fabrics of a run: made as the plan says, and closed at its end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from offbeat.diagnosis.wait import WaitContext
from offbeat.fabric import BindContext, Binds, InMemory, ProcessGroup

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.worker_context import LauncherInfo
    from offbeat.fabric import ElasticGroup, Fabric, FabricSpec
    from offbeat.plan import Plan


_CONNECTING = "the connection to the others"


class FabricBinding:
    """Binds fabrics, and closes what it has bound.

    Args:
        rank, world: of this worker; number of workers.
        waiter: the one waiting primitive.
        group: the workers, if they go on without one that is lost.
        launcher: how this worker proves who it is, and where what it connects with is.
        timeout: how long others are waited for.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        waiter: BlockingWait,
        group: ElasticGroup | None,
        launcher: LauncherInfo,
        timeout: timedelta,
    ) -> None:
        self._waiter = waiter
        self._context = BindContext(
            rank, world, "gloo", group, launcher.settings, launcher.switch, timeout, topology=launcher.topology
        )
        self._bound: list[Fabric] = []

    def bind(self, plan: Plan, backend: str) -> Fabric:
        """Make this worker's end of the plan's fabric, for a model.

        Beside a server that is a process group, which carries what is agreed on at the beginning; a worker that is
        alone needs none.

        Args:
            backend: of torch's process groups, such as "gloo".

        Raises:
            PlanError: if the plan's fabric cannot work here.
        """
        return self._bind(plan.fabric, plan, backend)

    def bind_control(self, plan: Plan) -> Fabric:
        """Make this worker's end of what questions to the others go over: the fabric, or its companion.

        Raises:
            PlanError: if that cannot work here.
        """
        return self._bind(getattr(plan.fabric, "companion", plan.fabric), plan, "gloo")

    def _bind(self, spec: FabricSpec, plan: Plan, backend: str) -> Fabric:
        if self._context.world == 1:
            spec = InMemory()
        elif plan.is_served:
            spec = ProcessGroup()
        assert isinstance(spec, Binds), "checked when the plan was made"
        binds, context = spec, dataclasses.replace(self._context, backend=backend, sync=plan.sync)
        fabric = self._waiter.call(lambda: binds.bind(context), WaitContext(getattr(spec, "connecting", _CONNECTING)))
        self._bound.append(fabric)
        return fabric

    def release(self, *, orderly: bool) -> None:
        """Let go of all.

        Args:
            orderly: whether nothing is under way; else an exchange may be that nobody will ever answer, and closing
                would wait for it.
        """
        for fabric in reversed(self._bound):
            if orderly:
                fabric.close()
            else:
                fabric.abandon()
        self._bound.clear()
