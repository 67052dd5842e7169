"""Models that hop between workers: the first worker says who visits whom, and each fetches the state that it needs."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch

from offbeat.errors import OffbeatError, PeerError
from offbeat.groups.fitting import GroupStatus
from offbeat.groups.hopping import HopCourse, HoppingModel, Visit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.groups.carrier import Carrier, Tensors
    from offbeat.groups.fitting import BucketTask
    from offbeat.groups.group_job import GroupJob
    from offbeat.groups.hopping import HopGroup
    from offbeat.groups.records import GroupRecords
    from offbeat.objects.object_future import ObjectFuture


T = TypeVar("T")


class HopAsk(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker's question for its next visit.

    Args:
        seconds: that the last visit took; negative if there was none.
        sums: of a visit after the last epoch: rows and losses of those trained on, for each configuration of the block,
            then of those held out.
        waits: whether it has nothing else to do.
    """

    seconds: float
    sums: list[float]
    waits: bool


class HopAnswer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first worker's answer.

    Args:
        visit: None if there is none now.
        is_over: whether there will be none.
        soon: a visit whose state the worker may fetch meanwhile.
        old: states that this worker may let go of: group, block and number of visits.
    """

    visit: Visit | None
    is_over: bool
    soon: Visit | None
    old: list[tuple[int, int, int]]


_ask_decoder, _answer_decoder = msgspec.msgpack.Decoder(HopAsk), msgspec.msgpack.Decoder(HopAnswer)


def state_name(group: int, block: int, visits: int) -> str:
    """The name of a block's state after so many visits."""
    return f"hop/state/{group}/{block}/{visits}"


def _state_of(visit: Visit) -> str:
    return state_name(visit.group, visit.block, visit.before)


@dataclass
class ShardRows:
    """One holder's rows of a split group.

    Args:
        trained, held: rows that models are trained on, and by which one is chosen.
    """

    trained: BucketTask
    held: BucketTask


class HoppingShards:
    """One worker's shards, and the models that visit them.

    Args:
        shards: by group.
        tell: called on any thread when `is_ready` may have become true.
        waits: whether the worker has nothing else to do.

    Attributes:
        has_ended: whether all visits were made, of all workers.
    """

    def __init__(
        self,
        carrier: Carrier,
        job: GroupJob,
        groups: Mapping[int, HopGroup],
        shards: Mapping[int, ShardRows],
        tell: Callable[[], None],
        *,
        waits: bool,
    ) -> None:
        self._carrier, self._job, self._groups, self._shards, self._tell = carrier, job, groups, shards, tell
        self._asked, self.has_ended, self.is_idle = 0, False, False
        self._coming: dict[str, ObjectFuture[Tensors]] = {}
        self._answer = self._ask(HopAsk(-1.0, [], waits))

    @property
    def is_ready(self) -> bool:
        """Whether there is an answer."""
        return not self.is_idle and self._answer.done()

    def ask_again(self, *, waits: bool) -> None:
        """Ask for a visit, after there was none.

        Args:
            waits: whether the worker has nothing else to do.
        """
        self.is_idle = False
        self._answer = self._ask(HopAsk(-1.0, [], waits))

    def advance(self, *, waits: bool) -> None:
        """Make the visit that was answered, if there is one, and ask for another one.

        Args:
            waits: whether the worker has nothing else to do.

        Raises:
            NetworkError: if a worker was lost.
        """
        answer = _decoded(_answer_decoder, self._answer.get())
        self._carrier.drop(f"hop/ask/{self._carrier.rank}/{self._asked}")
        for old in answer.old:
            self._carrier.drop(state_name(*old))
        if answer.is_over or answer.visit is None:
            self.has_ended, self.is_idle = answer.is_over, not answer.is_over
            return
        visit = answer.visit
        if visit.group not in self._shards:
            raise PeerError(f"Cannot train group {visit.group}: this worker has no rows of it.")
        state = self._state(visit).get() if visit.before else {}
        self._coming.pop(_state_of(visit), None)
        if answer.soon is not None and answer.soon.before:
            self._state(answer.soon)
        began_s, sums = time.monotonic(), list[float]()
        if visit.epoch < 0:
            sums = self._sums(visit, state)
        else:
            model, shard = self._job.model, self._shards[visit.group]
            assert isinstance(model, HoppingModel)
            state = model.visit(shard.trained, self._configs(visit), state, visit.epoch, visit.shard)
        self._carrier.publish(state_name(visit.group, visit.block, visit.before + 1), state)
        self._answer = self._ask(HopAsk(time.monotonic() - began_s, sums, waits))

    def _configs(self, visit: Visit) -> list[object]:
        return [self._job.configs[at] for at in self._groups[visit.group].blocks[visit.block]]

    def _state(self, visit: Visit) -> ObjectFuture[Tensors]:
        name = _state_of(visit)
        if name not in self._coming:
            self._coming[name] = self._carrier.move(name)
        return self._coming[name]

    def _sums(self, visit: Visit, state: Tensors) -> list[float]:
        """The losses of the block's models in the rows that are here."""
        job, shard, found = self._job, self._shards[visit.group], list[float]()
        assert isinstance(job.model, HoppingModel)
        models = job.model.visited(self._configs(visit), state, len(job.features))[None]
        for task in (shard.trained, shard.held):
            found += [float(len(task.target)), *(float(losses.sum()) for losses in job.losses(task, models))]
        return found

    def _ask(self, ask: HopAsk) -> ObjectFuture[Tensors]:
        self._asked += 1
        rank = self._carrier.rank
        self._carrier.publish(f"hop/ask/{rank}/{self._asked}", _encoded(ask))
        answer = self._carrier.move(f"hop/answer/{rank}/{self._asked}")
        answer.add_done_callback(self._tell)
        return answer


@dataclass
class HopSums:
    """The losses of a group's configurations.

    Args:
        trained, held: (configs,), sums.
        rows: that models are trained on, of each shard that told them.
        held_rows: of all shards.
    """

    trained: np.ndarray
    held: np.ndarray
    rows: list[int] = field(default_factory=list)
    held_rows: int = 0


@dataclass
class HopCoordinator:
    """The first worker's answers to all workers, on a thread for each of them.

    Args:
        groups: by number.

    Attributes:
        error: that an answer ended with.
    """

    carrier: Carrier
    groups: Mapping[int, HopGroup]
    job: GroupJob
    error: Exception | None = None
    sums: dict[int, HopSums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.course, self._changed = HopCourse(self.groups), threading.Condition()
        self._old: dict[int, list[tuple[int, int, int]]] = {}
        self._makers: dict[tuple[int, int, int], int] = {}
        for group in self.groups:
            self.sums[group] = HopSums(np.zeros(len(self.job.configs)), np.zeros(len(self.job.configs)))
        workers = {holder for group in self.groups.values() for holder in group.holders}
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in sorted(workers)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all workers have been told that there is nothing left.

        Raises:
            Exception: with which an answer ended.
        """
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def records(self, group: int) -> GroupRecords:
        """Return the record of a group, once all visits were made; a split group's model is not fitted anew to the
        rows that were held out."""
        job, sums, course = self.job, self.sums[group], self.course
        model, made = job.model, job.records(1)
        assert isinstance(model, HoppingModel)
        made.losses[0] = sums.trained / max(1, sum(sums.rows))
        if len(job.configs) > 1:
            made.held_losses[0] = sums.held / max(1, sums.held_rows)
            made.choose()
        for at, config in enumerate(job.configs):
            made.steps[0, at] = sum(model.steps_of(config, rows) for rows in sums.rows)
        chosen, blocks = int(made.chosen[0]), self.groups[group].blocks
        block = next(number for number, places in enumerate(blocks) if chosen in places)
        visits = sum(map(len, course.visits[group, block]))
        state = self.carrier.move(state_name(group, block, visits)).get()
        models = model.visited([job.configs[at] for at in blocks[block]], state, len(job.features))
        made.coefficients[0] = models[blocks[block].index(chosen)]
        made.status[0] = GroupStatus.OK if np.isfinite(made.coefficients).all() else GroupStatus.NOT_CONVERGED
        return made

    def _serve(self, worker: int) -> None:
        number, is_over, visit = 0, False, None
        try:
            while not is_over:
                number += 1
                ask = _decoded(_ask_decoder, self.carrier.move(f"hop/ask/{worker}/{number}").get())
                if number > 1:
                    self.carrier.drop(f"hop/answer/{worker}/{number - 1}")
                with self._changed:
                    if ask.seconds >= 0:
                        self._take(worker, visit, ask)
                    visit = self.course.next(worker)
                    while visit is None and ask.waits and not self.course.is_done and self.error is None:
                        self._changed.wait()
                        visit = self.course.next(worker)
                    is_over = self.course.is_done or self.error is not None
                    answer = HopAnswer(visit, is_over, self.course.ahead(worker), self._old.pop(worker, []))
                self.carrier.publish(f"hop/answer/{worker}/{number}", _encoded(answer))
        except Exception as error:  # whatever it is: the workers would wait for ever
            with self._changed:
                self.error = self.error or error
                self._changed.notify_all()
            with contextlib.suppress(OffbeatError):
                answer = HopAnswer(None, is_over=True, soon=None, old=[])
                self.carrier.publish(f"hop/answer/{worker}/{number}", _encoded(answer))

    def _take(self, worker: int, visit: Visit | None, ask: HopAsk) -> None:
        """Note what a worker has done."""
        if visit is None:
            raise PeerError(f"Cannot take in a visit of worker {worker}: it made none.")
        places = list(self.groups[visit.group].blocks[visit.block])
        if visit.epoch < 0:
            if len(ask.sums) != 2 * (1 + len(places)):
                raise PeerError(f"Cannot take in {len(ask.sums)} sums of worker {worker} for {len(places)} models.")
            sums, half = self.sums[visit.group], 1 + len(places)
            sums.trained[places] += ask.sums[1:half]
            sums.held[places] += ask.sums[half + 1 :]
            if visit.block == 0:
                sums.rows.append(int(ask.sums[0]))
                sums.held_rows += int(ask.sums[half])
        before = (visit.group, visit.block, visit.before)
        if (maker := self._makers.pop(before, None)) is not None:
            self._old.setdefault(maker, []).append(before)
        self._makers[visit.group, visit.block, visit.before + 1] = worker
        self.course.done(worker, ask.seconds)
        self._changed.notify_all()


def _encoded(message: HopAsk | HopAnswer) -> Tensors:
    return {"": torch.from_numpy(np.frombuffer(msgspec.msgpack.encode(message), np.uint8).copy())}


def _decoded(decoder: msgspec.msgpack.Decoder[T], message: Mapping[str, torch.Tensor]) -> T:
    try:
        return decoder.decode(message[""].numpy().tobytes())
    except (msgspec.DecodeError, KeyError) as error:
        raise PeerError(f"Cannot read a message of another worker: {error}") from error
