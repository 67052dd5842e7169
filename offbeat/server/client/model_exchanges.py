"""The models of a worker at the server: opened there, and in each step a contribution for the next parameters.

Lives on the event loop. A model is opened at all shards, and at the coordinator last, because it then lets the others
send values; so it is again when the links were lost. A worker whose contribution is outdated is told to come later: it
opens the model at the coordinator once more when it has its next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import OffbeatError, PeerError
from offbeat.protocol.messages import pack
from offbeat.protocol.training import (
    Announce,
    InitBlock,
    ModelInfo,
    OpenModel,
    PullDone,
    PullOrder,
    PushBlock,
    Reconnect,
)
from offbeat.server.client.requests import PulledParameters
from offbeat.server.pushed_block import body_of, payload_of
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from offbeat.protocol.loss_scores import ScoreContributions
    from offbeat.protocol.plan_swap import AdoptPlan
    from offbeat.protocol.training import ContributionInfo, ModelOpened, PullBlock, ReleaseWorker, SnapshotAck
    from offbeat.server.client.connections import ShardConnections
    from offbeat.server.client.lease_requests import LeaseRequests
    from offbeat.server.client.model_state import ModelState, Part
    from offbeat.server.client.question_client import QuestionClient
    from offbeat.server.client.requests import EndOfTraining, ServerRequest
    from offbeat.server.client.state_transfer import StateTransfers


class ModelExchanges:
    """The exchanges of all models of one worker.

    Args:
        connections: to all shards.
        questions, leases, transfers: what waits until the models are open.
        world: how many workers the job begins with.
        hosts: on which each shard runs; if empty, all on one.
        seed: of this worker, which the server compares with the others'; None if it has none.

    Attributes:
        ranks: of the workers that the job begins with at the server, if not all below `world`.
        states: of the models, by number.
    """

    def __init__(
        self,
        connections: ShardConnections,
        *,
        questions: QuestionClient,
        leases: LeaseRequests,
        transfers: StateTransfers,
        world: int,
        hosts: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        self._connections, self._links = connections, connections.links
        self._questions, self._leases, self._transfers = questions, leases, transfers
        self._world, self._hosts, self._seed = world, tuple(hosts), seed
        self.ranks: tuple[int, ...] = ()
        self.states: dict[int, ModelState] = {}
        self._secrets: dict[int, bytes] = {}  # by shard, by which it knows this worker again

    def state(self, model: int) -> ModelState:
        """The state of a model.

        Raises:
            PeerError: if this worker did not open it.
        """
        if model not in self.states:
            raise PeerError(f"The server speaks of model {model}, which was not opened.")
        return self.states[model]

    @property
    def can_ask(self) -> bool:
        """Whether this worker takes part in all its models; a question steps out of them, in place of a pull."""
        return all(state.is_in and not state.is_entering for state in self.states.values())

    @property
    def can_transfer(self) -> bool:
        """Whether all shards know this worker as one that trains all its models, also if it has to come again first."""
        return self._connections.is_up and all(state.is_in or state.is_outdated for state in self.states.values())

    # -- what the worker wants -----------------------------------------------------------------------------------

    def add(self, state: ModelState) -> None:
        """Train one more model; it is not opened yet."""
        state.swaps = max((other.swaps for other in self.states.values()), default=0)
        self.states[state.model] = state

    def open(self, state: ModelState) -> None:
        """Open a model, unless the links are lost: then it is when they are there again."""
        state.name_all()
        if self._connections.is_up:
            self._enter(state)

    def announce(
        self,
        request: ServerRequest[PulledParameters],
        model: int,
        parts: Mapping[int, Part],
        about: ContributionInfo,
        unused: tuple[str, ...],
        changed: Collection[int] = (),
        *,
        pushes_early: bool = False,
    ) -> None:
        """Bring a contribution; done when this worker has the next parameters.

        Args:
            parts: of each block, in the order in which they are pushed.
            unused: names of parameters without a gradient.
            changed: blocks that are not what was pushed of them before.
            pushes_early: blocks of the next one are pushed before it is announced, where the server lets this worker.
        """
        state = self.states[model]
        state.request, state.parts, state.announced = request, parts, ()
        state.pushes_early, state.complete = pushes_early, {}
        # A parameter without elements is in no block.
        known = tuple(state.names[name] for name in unused if name in state.names)
        again = state.void.union(state.pushed.intersection(changed))
        state.about = msgspec.structs.replace(about, unused=known, again=tuple(sorted(again)))
        if state.is_in:
            self._announce(state, state.about)
            if state.may_push:
                self._push(state, state.clock)
        elif state.is_outdated:
            self._come_again(state)

    def push_early(self, model: int, block: int, part: Part) -> None:
        """Push a block of the contribution that is being computed, once the server takes it before it is announced."""
        state = self.states[model]
        can_push = state.computes and self._connections.is_up and not self._questions.is_asking
        if can_push and block not in state.void | state.pushed:
            if not state.may_push:
                state.complete[block] = part
                return
            self._push_block(state, block, part)
            state.pushed.add(block)

    def pull_in_order(self, model: int, order: Sequence[int]) -> None:
        """Have shards send blocks in this order from here on, also when this worker comes to the job again."""
        state = self.states[model]
        state.pull_order = order
        if state.is_in:
            self._order_pulls(state)

    def forget_pushes(self) -> None:
        """Push anew what was pushed of contributions that are not announced: this worker steps out with a question."""
        for state in self.states.values():
            state.forget_pushes()

    def come_again(self) -> None:
        """Come again with all models that are outdated, although there is no contribution yet: something is asked."""
        for state in self.states.values():
            if state.is_outdated:
                self._come_again(state)

    # -- what the server says ------------------------------------------------------------------------------------

    def opened(self, shard: int, message: ModelOpened) -> None:
        """Handle that a shard has opened a model, or wants this worker to come later."""
        state = self.state(message.model)
        self._connections.survives = message.survives
        if message.secret:
            self._secrets[shard] = message.secret
        if message.wants_values:
            self._fill(state, shard)
        if message.later:
            state.is_outdated = True
            self._leases.enrol_again()  # it may wait for data, and without has nothing to come with
            if state.parts is not None or self._questions.is_asking:  # it has its contribution by now
                self._come_again(state)
            if self.can_transfer:
                self._transfers.begin_due()
            return
        if shard in state.unopened:
            state.unopened.discard(shard)
            if not state.unopened:
                self._open_at(state, 0)
        state.new_life, state.is_kept = message.life, message.kept

    def granted(self, model: int, clock: int) -> None:
        """Push: it is this worker's turn, perhaps while it computes.

        Raises:
            PeerError: if it has no such contribution.
        """
        state = self.state(model)
        if not state.computes:
            self._push(state, clock)
            return
        if not state.pushes_early or clock != state.clock:
            raise PeerError(f"The server granted contribution {clock}, this worker computes {state.clock}.")
        if self._questions.is_asking:
            return  # it steps out with a question, and its turn with it
        state.granted = clock
        complete, state.complete = state.complete, {}
        for block, part in complete.items():
            self.push_early(model, block, part)

    def released(self, go: ReleaseWorker) -> None:
        """Handle that this worker takes part (again), or may take its next step."""
        state = self.state(go.model)
        was_in, state.is_in, state.is_gated = state.is_in, True, go.waits
        if not was_in:
            self._order_pulls(state)  # all shards have opened it by now
            if not state.life:
                self._questions.begin_at(go.asked)
            if state.life != state.new_life and not state.is_kept:
                state.done.clear()  # what was lost is counted
            state.life = state.new_life
            self._leases.enrol_again()
        if not was_in and state.parts is not None and not go.values:
            assert state.about is not None
            state.count_on(go.step)
            self._announce(state, state.about)
            if self.can_transfer:  # while it waits for its parameters a validator fetches others' contributions
                self._transfers.begin_due()
            return
        state.going, state.is_entering = go, state.is_entering or not was_in
        self._finish(state)

    def pulled(self, message: PullBlock) -> None:
        """Handle that a block of the parameters is here."""
        state = self.state(message.model)
        state.versions[message.block] = message.version
        with state.block_came:
            state.take(message.block, message.number)
            state.block_came.notify_all()
        self._finish(state)

    def ask_for_losses(self, message: ScoreContributions) -> None:
        """Handle that this validator is to find out losses, when its training thread waits next."""
        state = self.state(message.model)
        with state.block_came:
            state.to_score.append(message)
            state.block_came.notify_all()

    def forget_done(self, message: SnapshotAck) -> None:
        """Forget contributions that are in two snapshots."""
        done = self.state(message.model).done
        while done and done[0][0] < message.clock:
            done.popleft()

    def adopt(self, adopt: AdoptPlan) -> None:
        """Note the plan that holds, should this worker come to the job again."""
        for state in self.states.values():
            state.plan, state.swaps = adopt.plan, adopt.number

    # -- what becomes of the links -------------------------------------------------------------------------------

    def stranded(self) -> None:
        """Handle the loss of all links."""
        for state in self.states.values():
            state.is_in = state.is_outdated = False
            state.forget_pushes()
            state.forget_questions()

    def arrived(self) -> None:
        """Open all models: there are links to all shards again."""
        for state in self.states.values():
            self._enter(state)

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail what is waited for: there will be no links again."""
        for state in self.states.values():
            state.request.fail(error)
            state.tell_over()

    # -- inside --------------------------------------------------------------------------------------------------

    def _enter(self, state: ModelState) -> None:
        """Open the model; at the coordinator when all others have done so, because it then lets them send values."""
        state.is_in = state.is_entering = state.is_outdated = False
        state.going = None
        state.await_all()
        state.unopened = set(range(1, len(self._links)))
        for shard in state.unopened or {0}:
            self._open_at(state, shard)

    def _come_again(self, state: ModelState) -> None:
        state.is_outdated = False
        self._open_at(state, 0)

    def _open_at(self, state: ModelState, shard: int) -> None:
        assert state.optimizer is not None
        details = ModelInfo(
            world=self._world,
            shards=len(self._links),
            holders=len(set(state.shards)),
            plan=state.plan,
            layout=state.layout,
            names=tuple(state.names),
            blocks=state.held_by(shard),
            optimizer=state.optimizer,
            back=self._back(state, shard),
            hosts=self._hosts_of(state),
            ranks=self.ranks,
            seed=self._seed,
        )
        self._links[shard].send(pack(OpenModel(state.model, self._connections.entry)), pack(details))

    def _hosts_of(self, state: ModelState) -> int:
        """Count the hosts that hold its blocks."""
        return len({self._hosts[shard] for shard in state.shards} if self._hosts else {0})

    def _back(self, state: ModelState, shard: int) -> Reconnect | None:
        if not state.life:
            return None
        return Reconnect(
            life=state.life,
            clock=state.clock,
            version=state.version,
            holds=state.parts is not None,
            waits=state.waits or self._questions.is_asking,
            weight=None if state.about is None else state.about.weight,
            done=tuple(state.done),
            answered=tuple(self._questions.answered),
            swaps=state.swaps,
            secret=self._secrets.get(shard, b""),
        )

    def _order_pulls(self, state: ModelState) -> None:
        for shard, link in enumerate(self._links if state.pull_order else ()):
            if blocks := tuple(block for block in state.pull_order if state.shards[block] == shard):
                link.send(pack(PullOrder(state.model, blocks)))

    def _announce(self, state: ModelState, about: ContributionInfo) -> None:
        self._connections.say(Announce(state.model, state.clock, about))
        state.announced += (state.clock,)

    def _fill(self, state: ModelState, shard: int) -> None:
        for block, holder in enumerate(state.shards):
            if holder == shard:
                self._links[shard].send(pack(InitBlock(state.model, block)), bytes_of(state.values[block]))

    def _push(self, state: ModelState, clock: int) -> None:
        parts = state.parts
        if parts is None or clock != state.clock:
            raise PeerError(f"The server granted contribution {clock}, this worker has {state.clock}.")
        state.await_all()
        again = () if state.about is None else state.about.again
        # What comes again goes first: without the rest no shard takes the contribution to be whole.
        for block in sorted(parts, key=lambda one: one not in again):
            if block in again or block not in state.pushed:
                self._push_block(state, block, parts[block], again=block in again)

    def _push_block(self, state: ModelState, block: int, part: Part, *, again: bool = False) -> None:
        push = PushBlock(state.model, state.clock, block, payload_of(part, state.blocks[block].dtype), again)
        self._links[state.shards[block]].send(pack(push), bytes_of(body_of(part)))

    def _finish(self, state: ModelState) -> None:
        """Take the next step, if the parameters for it are here."""
        go = state.going
        if go is None or (go.values and state.missing):
            return
        if go.counted and state.about is not None:
            state.done.append((state.clock, state.about.weight))
        state.going = None
        state.count_on(go.step)
        if go.values:
            if state.about is not None:
                self._leases.queues.brought(state.about.used)
            state.parts, state.version, state.last_number = None, go.version, state.number
            state.await_all()
            self._connections.progressed()
            self._connections.say(PullDone(state.model, state.clock, state.pushes_early))
            state.request.finish(
                PulledParameters(
                    life=state.life,
                    versions=tuple(state.versions[block.index] for block in state.blocks),
                    announced=state.announced,
                    is_counted=go.counted,
                    staleness=go.staleness,
                    fate=go.fate,
                )
            )
            state.tell_over()
        if state.is_entering:
            state.is_entering = False
            if self.can_ask:
                self._questions.ask_again()
                if self.can_transfer:
                    self._transfers.begin_due()
