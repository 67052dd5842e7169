"""Other paths while training, when links have changed: what a run does about it.

A worker that finds its links to carry much less or more than they did asks all to come together behind a step. There
they measure, and go by other paths from the next exchange on if that is worth it. The plan stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.fabric import Reroutes

if TYPE_CHECKING:
    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.worker_context import WorkerContext


class Rerouting:
    """One worker's part in it, for all its models.

    Args:
        context: of this worker.
        models: those prepared; more may come.
    """

    def __init__(self, context: WorkerContext, models: ModelRegistry) -> None:
        self._context, self._models = context, models
        self._found: list[Reroutes] = []
        self._looked = 0  # at so many models

    def wants_vote(self) -> bool:
        """Whether this worker wants all to come together; asked behind each step."""
        wants = [one.wants_reroute() for one in self._fabrics]  # each is to see each step
        return any(wants)

    def hold_vote(self) -> None:
        """Go by other paths if somebody wants to, and links have changed. Collective, behind a step of all."""
        fabrics, control = self._fabrics, self._context.control
        if not fabrics:
            return
        mine = "".join("1" if one.wants_reroute() else "0" for one in fabrics)
        wanted = control.texts("the paths", mine).values()
        for place, fabric in enumerate(fabrics):
            if not any(text[place : place + 1] == "1" for text in wanted):
                continue
            for one in self._models.together:
                one.even_out()
            if text := fabric.reroute(self._meet):
                self._context.log.all("paths", text)
                self._context.metrics.event("paths", text, self._models.step)

    @property
    def _fabrics(self) -> list[Reroutes]:
        # A model keeps its fabric, and to ask what it can takes longer than all else here, in every step.
        if self._looked < len(self._models):
            self._looked = len(self._models)
            self._found = [one.fabric for one in self._models.prepared if isinstance(one.fabric, Reroutes)]
        return self._found

    def _meet(self, text: str) -> list[str]:
        return list(self._context.control.texts("the paths", text).values())
