"""Replacements of the server's state by the first worker's: a checkpoint, or where workers without a server were.

Where there are validators it is the first of them that brings parameters, and workers' are not taken.

It is let do so when all others wait for it, in a question of `REPLACED_IN`. Until then, and so for ever if they train
on, it waits. If they wait for something else, or one of them cannot load what it brings, it is told so: what it asks
next they will never answer as it expects.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from offbeat.errors import PeerError
from offbeat.history import ParametersReplaced
from offbeat.protocol.checkpoints import REPLACED_IN, MayPut
from offbeat.protocol.data_leases import DataState
from offbeat.protocol.shards import AllowReplacement

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from offbeat.coordinator.data_requests import DataRequests
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.questions import CollectiveQuestions
    from offbeat.protocol.checkpoints import RequestReplacement

_MOST_DUE = 1 << 9  # models and loaders are no more than 256 each


class _Due(NamedTuple):
    worker: int
    carry_out: Callable[[str], None]  # with "", or with why the others do not wait for it


class Replacements:
    """The replacements that wait for the other workers.

    Args:
        questions: that workers ask.
        data: of the job.
    """

    def __init__(self, job: JobRecord, questions: CollectiveQuestions, data: DataRequests) -> None:
        self._job, self._questions, self._data = job, questions, data
        self._due: list[_Due] = []
        self._replaced_at = -1  # version at which something was replaced last

    def want_parameters(self, worker: int, message: RequestReplacement) -> None:
        """A worker has other parameters for a model, and puts them when all others wait for that.

        Raises:
            PeerError: if another brings what one brings for all, or there is no such model.
        """
        job, model = self._job, message.model
        job.model(model)
        first = min(job.ranks, default=worker)
        if job.needs_validator and worker != (first := min(job.validators & job.workers, default=-1)):
            why = f"Cannot take other parameters from rank {worker}: in this job they are those of a validator alone."
            job.out.send(worker, MayPut(message.number, why))
            return

        def answer(refusal: str) -> None:
            if refusal or model not in job.models:
                job.out.send(worker, MayPut(message.number, refusal or f"Model {model} is trained no more."))
                return
            self._tell(worker)
            job.out.decide(AllowReplacement(model, worker, message.number))

        self._want(worker, first, "other parameters", answer)

    def want_data(self, worker: int, number: int, state: bytes | bytearray, asker: Hashable) -> None:
        """A worker has where another run's data was; all go on there when all others wait for that.

        Raises:
            PeerError: if another is the one that sends it for all.
        """
        job = self._job

        def answer(refusal: str) -> None:
            model = min(job.models)
            if not (refusal := refusal or self._data.load(state)):
                self._tell(worker)
                version = job.models[model].runner.state.version
                job.out.record(ParametersReplaced(model, version, worker, is_data=True))
            job.out.reply(asker, DataState(number, refusal))

        self._want(worker, min(job.ranks, default=worker), "another place in the data", answer)

    def leave(self, worker: int) -> None:
        """Cancel the replacements of a worker that is gone."""
        self._due = [due for due in self._due if due.worker != worker]

    def look(self) -> None:
        """Carry out, or refuse, what no worker trains on beside."""
        if not self._job.started:  # those who are not here, or not back, are to wait for it, too
            return
        workers = self._job.asked
        while self._due and (others := workers - {self._due[0].worker}) <= self._questions.askers:
            lacking = sorted(others - self._questions.asking(REPLACED_IN))
            why = ""
            if lacking:
                those = ", ".join(map(str, lacking))
                why = f"Not all load a checkpoint: rank {those} waits for something else, or cannot load it."
            self._due.pop(0).carry_out(why)

    def _want(self, worker: int, first: int, what: str, carry_out: Callable[[str], None]) -> None:
        if worker != first:
            raise PeerError(f"Cannot take {what} from rank {worker}: rank {first} is the one that sends it for all.")
        if len(self._due) >= _MOST_DUE:
            raise PeerError(f"Cannot take {what} from rank {worker}: too much waits for the others already.")
        self._due.append(_Due(worker, carry_out))
        self.look()

    def _tell(self, worker: int) -> None:
        """Say once of each load that what the server has is replaced, part by part."""
        job = self._job
        for one in job.models.values():
            one.schedules.forget()
        if job.version == self._replaced_at:
            return
        self._replaced_at = job.version
        text = f"Rank {worker} replaces what the server has at version {job.version}: all load a checkpoint together."
        if job.version:
            job.tell(text, worker)
        else:  # as when a job is resumed: each has said that by itself
            job.out.log(text, logging.INFO)
