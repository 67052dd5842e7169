"""The memory of a shard that was not killed, after a life of the server has ended.

A shard that was stopped for a while, or could not be reached, ends a life of all shards (see
`offbeat.coordinator.reconnect`), although nothing was forgotten. If all shards of that life come back as the same
processes, the next one continues from their memory, and not from a snapshot:

1. Each follower says what it has (`HeldLife`); the coordinator sends it the decisions that it had not received.
2. An update that all shards have whole is finished. All contributions to any other are withdrawn at all shards
   (`UpdateScheduler.settle`). Their workers still hold them, since a worker lets go of a contribution only when it has
   every block of the update, and push them again.
3. Now all shards have the same version of the parameters, and nothing is open: what a snapshot would hold. The next
   life begins with that, and with the coordinator's record of the workers and the data.

If one shard was killed, all continue from a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.coordinator.events import ModelSettled
from offbeat.coordinator.instructions import AppendHistory, SendToShards
from offbeat.protocol.plan_swap import AdoptPlan
from offbeat.protocol.shards import MOST_WHOLE, BeginLife, HeldLife, SnapshotMark
from offbeat.protocol.training import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.coordinator.coordinator import Coordinator
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.history import Record
    from offbeat.protocol.messages import Decision
    from offbeat.protocol.shards import RegisterShard
    from offbeat.server.shard.model_shard import ModelShard
    from offbeat.server.shard.peer import Peer
    from offbeat.sync import Push


class LiveImage:
    """The memory of one shard after a life.

    Args:
        lives: the one that has ended, and those before it that it continued in the same way.
        life: the one that has ended.
        models: what the shard holds, by number.
        heard: how many messages of the coordinator it received in that life.
        coordinator: that decided, if this is the first shard.
        followers: the links of that life to the other shards, by their processes.
        is_abandoned: no worker was left.
    """

    def __init__(
        self,
        lives: frozenset[int],
        life: int,
        models: Mapping[int, ModelShard],
        *,
        heard: int,
        coordinator: Coordinator | None,
        followers: Mapping[int, Peer],
        is_abandoned: bool,
    ) -> None:
        self.lives, self.life, self.models, self.is_abandoned = lives, life, dict(models), is_abandoned
        self._heard, self._coordinator, self._followers = heard, coordinator, dict(followers)
        for model_shard in self.models.values():
            model_shard.give_up_mark()

    @property
    def shards(self) -> int:
        """The number of shards there were, besides this one."""
        return len(self._followers)

    @property
    def held(self) -> HeldLife | None:
        """The description of this memory for the coordinator; None if that is more than fits into a message."""
        whole = tuple(self._whole())
        return HeldLife(self.life, self._heard, tuple(self.models), whole) if len(whole) <= MOST_WHOLE else None

    def fits(self, registrations: Sequence[RegisterShard]) -> bool:
        """Whether all shards of the life are here, and each remembers it."""
        return {one.process for one in registrations} == self._followers.keys() and all(
            one.memory is not None
            and one.memory.life == self.life
            and set(one.memory.models) == self.models.keys()
            and self._followers[one.process].unheard(one.memory.heard) is not None
            for one in registrations
        )

    def settle(
        self, held: Mapping[Peer, RegisterShard], now_s: float, record: Callable[[Record], None]
    ) -> dict[int, TrainingProgress]:
        """Have all shards make the same of what is open; the workers' progress then, by model. For the coordinator.

        Args:
            held: what the other shards have, by their new links.
            record: writes the history.
        """
        assert self._coordinator is not None
        for peer, one in held.items():
            assert one.memory is not None
            for message in self._followers[one.process].unheard(one.memory.heard) or ():
                if not isinstance(message, BeginLife | SnapshotMark | Refused):
                    peer.say(message)
        arrived = [self._whole(), *(one.memory.whole for one in held.values() if one.memory is not None)]
        for model, model_shard in self.models.items():
            at = [{(worker, clock) for of, worker, clock in one if of == model} for one in arrived]
            holders = model_shard.details.holders
            whole = {push for push in set().union(*at) if sum(push in one for one in at) == holders}
            kept, withdrawn = model_shard.settle(whole)
            for instruction in self._coordinator.handle(ModelSettled(now_s, model, kept, withdrawn)):
                if isinstance(instruction, SendToShards):
                    for peer in held:
                        peer.say(instruction.decision)
                    self.carry_out(instruction.decision)
                elif isinstance(instruction, AppendHistory):
                    record(instruction.record)
        return {model: self._coordinator.progress(model) for model in self._coordinator.models}

    def counted(self, model: int) -> dict[int, int]:
        """Return each worker's last contribution that counts, if the coordinator is here."""
        return {} if self._coordinator is None else self._coordinator.models[model].counted

    def carry_out(self, message: Decision | AdoptPlan) -> Push | None:
        """Carry out what was decided in that life."""
        if isinstance(message, AdoptPlan):
            for model_shard in self.models.values():
                model_shard.adopt(message.plan, message.number)
            return None
        return self.models[message.model].decide(message) if message.model in self.models else None

    def forget(self) -> None:
        """Let go of all: the next life has taken it over, or begins without it."""
        self.models, self._followers, self._coordinator = {}, {}, None

    def finish(self) -> bool:
        """Finish the updates that all shards have; whether nothing is open then, and every block has had all."""
        return all(model_shard.finish() for model_shard in self.models.values())

    def _whole(self) -> list[tuple[int, int, int]]:
        return [(model, *push) for model, model_shard in self.models.items() for push in sorted(model_shard.whole())]
