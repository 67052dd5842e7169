"""The first shard's second job: it asks the policy, and tells all shards and workers what was decided."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import PeerError
from offbeat.fabric.server.coordinator import Coordinator, Record
from offbeat.fabric.server.messages import (
    Admit,
    Answer,
    Applied,
    Dropped,
    Evicted,
    Go,
    Gone,
    Granted,
    Released,
)
from offbeat.sync import Apply, Deadline, Drop, Evict, Grant, Pulled, Pushed, Ready, Release, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from offbeat.fabric.server.ledger import Loss
    from offbeat.fabric.server.messages import About, Announce, Ask, Decision, Details, Scene
    from offbeat.sync import Action, Policy, Push


@dataclass
class Model:
    """What the lead knows about one model."""

    coordinator: Coordinator
    groups: int  # of the optimizer
    to_fill: int  # shards that have not got their first values
    shards: int
    announced: dict[Push, About] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that was announced
    whole: dict[Push, int] = field(default_factory=dict)  # at how many shards a contribution has arrived
    granted: set[Push] = field(default_factory=set)  # contributions that may be on their way and are not decided
    joining: set[int] = field(default_factory=set)  # workers that have not got their first values
    left_at: dict[int, int] = field(default_factory=dict)  # workers that have stepped out, and the version then
    timer: asyncio.TimerHandle | None = None


class Lead:
    """Coordinates all models of a job.

    Args:
        policy_of: the policy in a plan's TOML.
        decide: carries a decision to all shards; returns what this one lost by it.
        say: sends a message to a worker.
    """

    def __init__(
        self,
        policy_of: Callable[[str], Policy],
        decide: Callable[[Decision], Loss | None],
        say: Callable[[int, Granted | Go | Evicted | Answer], None],
    ) -> None:
        self._policy_of, self._decide, self._say = policy_of, decide, say
        self.models: dict[int, Model] = {}
        self._workers: set[int] = set()  # that are connected
        self._asked: dict[int, dict[int, Ask]] = {}
        self._answers: dict[int, Answer] = {}  # by worker, until it has the parameters that go with it

    # -- what happens --------------------------------------------------------------------------------------------

    def join(self, model: int, worker: int, details: Details) -> int:
        """A worker takes part in a model; the number of its next contribution."""
        one = self.models.get(model)
        if one is None:
            now_s = asyncio.get_running_loop().time
            coordinator = Coordinator(self._policy_of(details.plan), details.world, now_s)
            one = Model(coordinator, len(details.optimizer.groups), details.shards, details.shards)
            self.models[model] = one
        self._workers.add(worker)
        actions = one.coordinator.join(worker)
        clock = one.coordinator.state.members[worker].step
        self._decide(Admit(model, worker, clock))
        self._carry_out(model, actions)
        if not one.to_fill:
            self._welcome(model, worker)
            self._carry_out(model, one.coordinator.start_if_all_are_here())
        return clock

    def filled(self, model: int) -> None:
        """A shard has its first values."""
        one = self._model(model)
        one.to_fill -= 1
        if not one.to_fill:
            for worker in sorted(one.coordinator.state.members):
                self._welcome(model, worker)
            self._carry_out(model, one.coordinator.start_if_all_are_here())

    def announce(self, worker: int, message: Announce) -> None:
        """A worker has computed a contribution.

        Raises:
            PeerError: if it is not its turn, or not of this model.
        """
        one = self._model(message.model, worker)
        member = one.coordinator.state.members[worker]
        if message.clock != member.step or member.held:
            raise PeerError(f"Cannot take contribution {message.clock} of rank {worker}: number {member.step} is next.")
        if len(message.about.hyper) != one.groups:
            raise PeerError(
                f"Cannot take hyper-parameters of {len(message.about.hyper)} groups: the optimizer has {one.groups}."
            )
        one.announced[(worker, message.clock)] = message.about
        one.clocks[worker] = message.clock
        ready = Ready(worker, message.clock, one.coordinator.now_s(), message.about.weight)
        self._carry_out(message.model, one.coordinator.tell(ready))

    def whole(self, model: int, push: Push) -> None:
        """All of a shard's blocks of a contribution have arrived."""
        one = self._model(model)
        if push[0] not in one.coordinator.state.members:
            return
        one.whole[push] = one.whole.get(push, 0) + 1
        if one.whole[push] == one.shards:
            del one.whole[push]
            self._carry_out(model, one.coordinator.tell(Pushed(*push, one.coordinator.now_s())))

    def pulled(self, model: int, worker: int, step: int) -> None:
        """A worker has all blocks, and computes.

        Raises:
            PeerError: if it was not released for that step.
        """
        one = self._model(model, worker)
        if worker in one.joining:
            one.joining.discard(worker)
            self._answer_those_who_are_ready()
            return
        member = one.coordinator.state.members[worker]
        if member.released_s is None or step != member.step:
            raise PeerError(f"Rank {worker} says it has pulled step {step}, but is at step {member.step}.")
        self._carry_out(model, one.coordinator.tell(Pulled(worker, one.coordinator.now_s())))

    def look(self) -> tuple[Scene, ...]:
        """How it goes."""
        return tuple(one.coordinator.scene(model) for model, one in self.models.items())

    def ask(self, worker: int, message: Ask) -> None:
        """A worker asks what all are to be asked; until they have it takes no part, so that nobody waits for it."""
        self._workers.add(worker)
        self._asked.setdefault(message.number, {})[worker] = message
        for model, one in self.models.items():
            if one.coordinator.started and worker in one.coordinator.state.members:
                one.left_at[worker] = one.coordinator.state.version
                self._decide(Gone(model, worker))
                self._carry_out(model, one.coordinator.leave(worker, returns=True))
        self._answer()

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        self._workers.discard(worker)
        for model, one in self.models.items():
            if worker in one.coordinator.state.members or worker in one.coordinator.state.away:
                self._remove(model, worker)
                self._carry_out(model, one.coordinator.leave(worker))
        self._answers.pop(worker, None)
        for one in self.models.values():
            one.left_at.pop(worker, None)
        for asked in self._asked.values():
            asked.pop(worker, None)
        self._answer()

    # -- what is decided -----------------------------------------------------------------------------------------

    def _welcome(self, model: int, worker: int, values: bool = True) -> None:
        """Tell a worker that has just joined where it is, and give it the parameters."""
        one = self.models[model]
        clock = one.coordinator.state.members[worker].step
        self._say(worker, Go(model, clock, one.coordinator.state.version, 0, values))
        if values:
            one.joining.add(worker)
            self._decide(Released(model, worker, clock))

    def _carry_out(self, model: int, actions: Iterable[Action]) -> None:
        one = self.models[model]
        for action in actions:
            match action:
                case Grant(worker=worker):
                    one.granted.add((worker, one.clocks[worker]))
                    self._say(worker, Granted(model, one.clocks[worker]))
                case Apply(pushes=pushes, rate=rate, in_order=in_order):
                    about = tuple(one.announced.pop(push) for push in pushes)
                    one.granted.difference_update(pushes)
                    self._decide(Applied(model, pushes, about, rate, in_order))
                case Drop(pushes=pushes):
                    for worker, clock in pushes:
                        del one.announced[(worker, clock)]
                        coming = (worker, clock) in one.granted
                        one.granted.discard((worker, clock))
                        self._decide(Dropped(model, worker, clock, coming))
                case Release(worker=worker):
                    step = one.clocks[worker] + 1
                    stale = one.coordinator.last_staleness.get(worker, 0)
                    self._say(worker, Go(model, step, one.coordinator.state.version, stale))
                    self._decide(Released(model, worker, step))
                case Evict(worker=worker):
                    self._remove(model, worker)
                    self._say(worker, Evicted(model, "it kept the others waiting for too long"))
                case Wake(at_s=at_s):
                    self._wake(model, at_s)

    def _remove(self, model: int, worker: int) -> None:
        one = self.models[model]
        if self._decide(Gone(model, worker)) is not None:
            one.coordinator.records.setdefault(worker, Record()).lost += 1
        one.granted = {push for push in one.granted if push[0] != worker}
        one.joining.discard(worker)
        one.left_at.pop(worker, None)
        for push in [push for push in one.announced if push[0] == worker and push in one.whole]:
            del one.whole[push]

    def _wake(self, model: int, at_s: float) -> None:
        one = self.models[model]
        if one.timer is not None:
            one.timer.cancel()
        wait_s = max(0.0, at_s - one.coordinator.now_s())
        one.timer = asyncio.get_running_loop().call_later(wait_s, self._on_wake, model)

    def _on_wake(self, model: int) -> None:
        one = self.models[model]
        one.timer = None
        self._carry_out(model, one.coordinator.tell(Deadline(one.coordinator.now_s())))

    def _answer(self) -> None:
        """Answer what all have asked, once all take part again."""
        for number, asked in list(self._asked.items()):
            if not asked or self._workers - set(asked):
                continue
            del self._asked[number]
            questions = {ask.question for ask in asked.values()}
            width = max(len(ask.numbers) for ask in asked.values())
            sums = tuple(
                sum(ask.numbers[i] if i < len(ask.numbers) else 0.0 for _, ask in sorted(asked.items()))
                for i in range(width)
            )
            disagreement = "" if len(questions) == 1 else ", ".join(sorted(questions))
            for worker, ask in sorted(asked.items()):
                self._answers[worker] = Answer(number, sums, len(asked), disagreement)
                self._step_in(worker, refresh=ask.refresh)
            self._answer_those_who_are_ready()

    def _step_in(self, worker: int, *, refresh: bool) -> None:
        for model, one in self.models.items():
            if worker not in one.left_at:
                continue
            version = one.left_at.pop(worker)
            actions = one.coordinator.join(worker)
            self._decide(Admit(model, worker, one.coordinator.state.members[worker].step))
            self._carry_out(model, actions)
            self._welcome(model, worker, refresh or version != one.coordinator.state.version)

    def _answer_those_who_are_ready(self) -> None:
        for worker in [w for w in self._answers if all(w not in one.joining for one in self.models.values())]:
            self._say(worker, self._answers.pop(worker))

    def _model(self, model: int, worker: int | None = None) -> Model:
        one = self.models.get(model)
        if one is None or (worker is not None and worker not in one.coordinator.state.members):
            raise PeerError(f"Rank {worker} does not take part in model {model}.")
        return one
