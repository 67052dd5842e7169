"""The worker's ends of the fabrics of a run: made as the plan says, and closed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.diagnosis.wait import WaitContext
from offbeat.fabric import BindContext, Binds, InMemory, ProcessGroup

if TYPE_CHECKING:
    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.fabric import ElasticGroup, Fabric
    from offbeat.plan import Plan


class FabricBinding:
    """Binds fabrics, and closes what it has bound.

    Args:
        rank, world: of this worker; number of workers.
        waiter: the one waiting primitive.
        group: the workers, if they go on without one that is lost.
    """

    def __init__(self, rank: int, world: int, waiter: BlockingWait, group: ElasticGroup | None) -> None:
        self._rank, self._world, self._waiter, self._group = rank, world, waiter, group
        self._bound: list[Fabric] = []

    def bind(self, plan: Plan, backend: str) -> Fabric:
        """Make this worker's end of the plan's fabric.

        Beside a server that is a process group, which carries what is agreed on at the beginning; a worker that is
        alone needs none.

        Args:
            backend: of torch's process groups, such as "gloo".

        Raises:
            PlanError: if the plan's fabric cannot work here.
        """
        spec = InMemory() if self._world == 1 else ProcessGroup() if plan.is_served else plan.fabric
        assert isinstance(spec, Binds), "checked when the plan was made"
        context = BindContext(self._rank, self._world, backend, self._group)
        fabric = self._waiter.call(lambda: spec.bind(context), WaitContext("the connection to the others"))
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
