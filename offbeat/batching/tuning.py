"""Batch tuning: each worker's batch is as large as its machine is fast, so that nobody holds up the others.

Unequal machines with equal batches all go at the pace of the slowest. Here each worker's steps are fitted
(`cost_model`), and the batches chosen so that all cycles, computation and transfer, are equally long (`balance`), while
the sum of the batches of a round stays what the user asked for: the optimization is that of the same global batch. It
follows that each contribution has to weigh as many samples as it is made from.

Rules:

* Batches change only between rounds, and only if that could shorten the round by more than 5 %, or if somebody was
  blocked for more than 10 % of three rounds in a row; and by more than the fits may be wrong. No batch moves by more
  than a quarter at a time (at least by one sample), unless the sum demands it: after a worker has left, has run out
  of memory, or has been found too slow for every round.
* In the first rounds of a job all batches are equal but for 10 % more or less, in turns: it takes two sizes to learn
  what a batch costs and what a sample costs. Who joins later begins with a quarter of an equal share, for as long.
* Who runs out of memory gets at most half of that batch from then on.
* Who is clearly too slow even with the smallest batch takes part in every m-th round only, with a batch that fills its
  m rounds; in that round the others take less. Not where all wait for all: there it has the smallest batch.
* The bounds of batches are kept before the sum is; if they leave no choice, `explain` says so.

`BatchTuning` is the description, `TuningState` the state. Both are plain data; nothing here knows what time it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.batching.explain import explain
from offbeat.batching.next_batches import MOST_EVERY, in_round, next_batches
from offbeat.batching.worker_speed import TuningState, WorkerSpeed
from offbeat.errors import ModelError, PlanError
from offbeat.number_range import WholeNumbers

_VERSION = 1  # of the saved form
_MOST_COUNTED = 1 << 61  # of what is saved


@dataclass(frozen=True, kw_only=True)
class BatchTuning:
    """Batch sizes that follow the machines' speed, so that a batch takes all workers equally long.

    All methods are pure; those that change the state return the new one.

    1) `init` with the global batch, and `join` for each worker.
    2) `plan` at each border between rounds.
    3) `observe` each step of each worker; `out_of_memory`, `join` and `leave` when it happens.

    Args:
        smallest: batch of a worker; less only if there are not enough samples for all, or too little memory. Of a model
            with BatchNorm it is at least 2, because that refuses to train on one sample.
        largest: batch of a worker; None for no bound but the global batch.
        memory: steps that a fit is about.
        gain: by which part a round must become shorter for batches to change.
        blocked: part of a round that a worker may wait.
        most_change: of a batch, at a time.
        first_rounds: for which a new worker is not trusted to be known.

    Raises:
        PlanError: if a value cannot be.

    >>> tuning = BatchTuning()
    >>> state = tuning.init(96)
    >>> for worker in range(2):
    ...     state = tuning.join(state, worker)
    >>> for round in range(20):
    ...     state, batches = tuning.plan(state, round)
    ...     for worker, batch in batches.items():  # worker 0 needs 10 ms per sample, worker 1 twice as long
    ...         state = tuning.observe(state, worker, batch, 0.01 * (worker + 1) * batch, 0.1, 0.0)
    >>> batches
    {0: 64, 1: 32}
    """

    smallest: int = 1
    largest: int | None = None
    memory: int = 50
    gain: float = 0.05
    blocked: float = 0.1
    most_change: float = 0.25
    first_rounds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("smallest", 1), ("memory", 10), ("first_rounds", 3)):
            value = getattr(self, name)
            if value not in WholeNumbers(least):
                raise PlanError(
                    f"Cannot tune batches with {name}={value!r}: choose a whole number from {least} "
                    f"- at `plan.tuning.{name}`."
                )
        if self.largest is not None and self.largest not in WholeNumbers(self.smallest):
            raise PlanError(
                f"Cannot tune batches up to {self.largest!r} from {self.smallest}: choose a larger whole number, or "
                "None - at `plan.tuning.largest`."
            )
        for name in ("gain", "blocked", "most_change"):
            value = getattr(self, name)
            if not isinstance(value, float) or not 0 < value < 1:
                raise PlanError(
                    f"Cannot tune batches with {name}={value!r}: it is a part, above 0 and below 1 "
                    f"- at `plan.tuning.{name}`."
                )

    def init(self, total: int, *, together: bool = False, floor: int = 1) -> TuningState:
        """Make the state in which nobody takes part yet.

        Args:
            total: the global batch, in samples.
            together: whether all wait for all in every round, so that no batch may fill several.
            floor: no batch is smaller, whatever else is asked for.

        Raises:
            PlanError: if it is smaller than the smallest batch of one worker, or the largest is too small.
        """
        if total < self.smallest:
            raise PlanError(
                f"Cannot split a global batch of {total} in batches of at least {self.smallest}: use a larger one, "
                "or smaller batches - at `plan.tuning.smallest`."
            )
        if self.largest is not None and self.largest < floor:
            raise PlanError(
                f"Cannot tune batches up to {self.largest}: this model has BatchNorm, which needs {floor} samples to "
                f"train on. Choose {floor} or more, or None - at `plan.tuning.largest`."
            )
        return TuningState(total, together=together, floor=floor)

    def join(self, state: TuningState, worker: int, *, most: int | None = None) -> TuningState:
        """Let `worker` take part, of which nothing is known yet.

        Args:
            most: samples that fit into its memory, if that is known.
        """
        bounds = [bound for bound in (most, self.largest, state.total) if bound is not None]
        machine = WorkerSpeed(most=max(state.floor, min(bounds)))
        return _with(state, worker, machine, changed=True)

    def leave(self, state: TuningState, worker: int) -> TuningState:
        """Forget `worker`, which is gone; the others take its part from the next round on."""
        machines = {other: machine for other, machine in state.machines.items() if other != worker}
        return dataclasses.replace(state, machines=machines, changed=True)

    def observe(
        self, state: TuningState, worker: int, batch: int, compute_s: float, transfer_s: float, blocked_s: float
    ) -> TuningState:
        """Take in a step of `worker`: what it computed, pushed and pulled, and how long it waited for others.

        What is said about a worker that does not take part changes nothing.
        """
        machine = state.machines.get(worker)
        if machine is None:
            return state
        too_long = blocked_s > self.blocked * (compute_s + transfer_s + blocked_s)
        machine = dataclasses.replace(
            machine,
            compute=machine.compute.observe(batch, compute_s, memory=self.memory),
            transfer=machine.transfer.observe(1, transfer_s, memory=self.memory),
            blocked=machine.blocked + 1 if too_long else 0,
        )
        return _with(state, worker, machine)

    def out_of_memory(self, state: TuningState, worker: int, batch: int) -> TuningState:
        """Give `worker` at most half of `batch`, for which it had no memory, from the next round on."""
        machine = state.machines.get(worker)
        if machine is None:
            return state
        most = max(state.floor, min(machine.most, batch // 2))
        return _with(state, worker, dataclasses.replace(machine, most=most), changed=True)

    def plan(self, state: TuningState, round: int) -> tuple[TuningState, dict[int, int]]:
        """Plan `round`, at the border before it: each worker that takes part in it, and its batch.

        The batches add up to the global batch, unless the bounds of all workers forbid it. A round that was planned
        before is not planned again.
        """
        if round > state.round and state.machines:
            state = dataclasses.replace(state, round=round)
            state = next_batches(
                state, known=self._known(state), least=self._least(state), gain=self.gain, most_change=self.most_change
            )
        return state, in_round(state, round, known=self._known(state), least=self._least(state))

    def explain(self, state: TuningState) -> str:
        """Explain who paces the rounds, why, and how sure that is, in one sentence for people."""
        return explain(state, known=self._known(state), least=self._least(state), most_change=self.most_change)

    def with_floor(self, state: TuningState, floor: int) -> TuningState:
        """Make no batch smaller than `floor` from the next round on."""
        machines = {w: dataclasses.replace(m, most=max(m.most, floor)) for w, m in state.machines.items()}
        return dataclasses.replace(state, machines=machines, floor=floor, changed=state.changed or state.floor != floor)

    def to_plain(self, state: TuningState) -> dict[str, Any]:
        """The state in dicts, lists and numbers, for a checkpoint in JSON or MessagePack."""
        return {"version": _VERSION, "tuning": msgspec.to_builtins(state, str_keys=True)}

    def from_plain(self, plain: Any, total: int) -> TuningState:
        """The state that `to_plain` gave.

        Raises:
            ModelError: if it was saved with another global batch than `total`, or cannot be one.
        """
        if not isinstance(plain, dict) or plain.get("version") != _VERSION:
            raise ModelError("Cannot continue tuning batches: the checkpoint has nothing that this version can read.")
        try:
            state = msgspec.convert(plain.get("tuning"), TuningState, str_keys=True)
        except msgspec.ValidationError as error:
            raise ModelError(f"Cannot continue tuning batches: the checkpoint is damaged ({error}).") from error
        if state.total != total:
            raise ModelError(
                f"Cannot continue with a global batch of {total}: the checkpoint was made with {state.total}. Use the "
                "same, by the batch size or the number of workers, or continue with tuning=None."
            )
        if not -1 <= state.round < _MOST_COUNTED or not 0 <= state.plans < _MOST_COUNTED:
            raise ModelError(
                f"Cannot continue tuning batches: the checkpoint is damaged (round {state.round}, {state.plans} plans)."
            )
        for worker, machine in state.machines.items():
            counts = 1 <= machine.most <= total and 0 <= machine.batch <= total
            counts = counts and (machine.every == 1 or (1 < machine.every <= MOST_EVERY and machine.batch > 0))
            counts = counts and 0 <= machine.blocked < _MOST_COUNTED and 0 <= worker < _MOST_COUNTED
            if not counts or not machine.compute.sound or not machine.transfer.sound:
                raise ModelError(
                    f"Cannot continue tuning batches: the checkpoint is damaged (worker {worker}: {machine})."
                )
        return state

    def _known(self, state: TuningState) -> dict[int, WorkerSpeed]:
        """The machines whose fits can be used."""
        return {w: m for w, m in state.machines.items() if m.compute.known and m.compute.steps >= self.first_rounds}

    def _least(self, state: TuningState) -> dict[int, int]:
        """The smallest batch of each worker: where there are many workers or little memory, less than was asked for."""
        least = max(state.floor, min(self.smallest, state.total // max(1, len(state.machines))))
        return {worker: min(least, machine.most) for worker, machine in state.machines.items()}


def _with(state: TuningState, worker: int, machine: WorkerSpeed, *, changed: bool = False) -> TuningState:
    return dataclasses.replace(state, machines={**state.machines, worker: machine}, changed=state.changed or changed)
