"""The accounts of contributions and workers: what became of each contribution, how far every worker is, and which
updates have all they need.

The accounts are kept from events and actions alone, so that they do not share a mistake with `offbeat.sync.state`. Each
entry is checked against what policies promise as it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.sync import (
    Adopted,
    Apply,
    Drop,
    Evict,
    Grant,
    Joined,
    Left,
    Pulled,
    Pushed,
    Ready,
    Release,
    TakesEveryNth,
)

if TYPE_CHECKING:
    from offbeat.sync import Action, Event, Policy, Push, State

_A_LITTLE_MORE = 1 + 1e-9  # than what is allowed, for rates are rounded


class InvariantViolation(AssertionError):
    """A promise is broken.

    Args:
        what: as a sentence without its end.
        rank: of the worker whose story tells it; None for that of all.
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__(what)
        self.rank = rank


@dataclass(eq=False)
class UpdateInFlight:
    """An `Apply` on its way.

    Args:
        waits: contributions in it that have not arrived.
    """

    index: int
    in_order: bool
    waits: set[Push]


@dataclass(eq=False)
class WorkerAccount:
    """One life of a worker.

    Args:
        number: of the contribution it computes or brings.
        pace, brought: steps begun and contributions arrived; what it leaves out counts as well.
        every: it takes part in every such round.
        push: its last contribution that was announced.
        held: whether it has a contribution and is not released.
        granted: number of the last that it may push, perhaps before it is announced.
        arrived: whether that is there, or was dropped.
        pulls: whether it is released, and has not all parameters.
        update: that its contribution is in.
        needs: updates it waits for while it pulls.
        late: contributions before the last that have not arrived, as far as is known: what a worker pulled has them in
            it, but word of their last block, from another shard, may come after the next was announced.
    """

    rank: int
    number: int
    pace: int
    brought: int
    every: int = 1
    push: Push = (-1, -1)
    held: bool = False
    granted: int | None = None
    arrived: bool = True
    pulls: bool = False
    update: UpdateInFlight | None = None
    needs: set[UpdateInFlight] = field(default_factory=set)
    late: set[Push] = field(default_factory=set)

    @property
    def may_push(self) -> bool:
        """Whether it may push what it has."""
        return self.granted == self.push[1]

    @property
    def unarrived(self) -> set[Push]:
        """Contributions that have not arrived, as far as is known, and are not dropped."""
        return self.late if self.arrived else {*self.late, self.push}

    def arrives(self) -> None:
        """Note that its contribution has arrived, or is not waited for any longer."""
        if not self.arrived:
            self.arrived = True
            self.brought += 1


class InvariantChecker:
    """The invariants of one interleaving. Call order: `hear` for an event, `enter` for each action that follows it;
    `make_updates` after each of them.

    Raises:
        InvariantViolation: if an action breaks a promise of the policy that decided it, or a rule for all.
    """

    def __init__(self) -> None:
        self.accounts: dict[int, WorkerAccount] = {}
        self.fates: dict[Push, str] = {}
        self._open: list[UpdateInFlight] = []
        self._updates = 0

    def hear(self, event: Event, state: State) -> None:
        """Enter an event; `state` is that behind it."""
        match event:
            case Joined(worker=rank):
                self._joined(rank, state.members[rank].step, state.members[rank].pace)
            case Ready(worker=rank, clock=clock):
                self._ready(rank, clock)
            case Pushed(worker=rank, clock=clock):
                self._pushed(rank, clock)
            case Pulled(worker=rank):
                self._pulled(rank)
            case TakesEveryNth(worker=rank, every=every):
                self._paced(rank, every)
            case Left(worker=rank):
                self.left(rank)
            case Adopted(level=True):
                self._levelled()

    def enter(self, action: Action, policy: Policy) -> int:
        """Enter an action of this policy; if it releases a worker, how many steps that is ahead of the slowest."""
        match action:
            case Grant(worker=rank):
                self._granted(rank)
            case Apply():
                self._applied(action, policy)
            case Drop(pushes=pushes):
                for push in pushes:
                    self._dropped(push, policy)
            case Release(worker=rank):
                return self._released(rank, policy)
            case Evict(worker=rank):
                self._evicted(rank)
        return 0

    # -- events --------------------------------------------------------------------------------------------------

    def _joined(self, rank: int, number: int, pace: int) -> None:
        """Open an account; `pace` is that of somebody who is there, or between."""
        paces = [account.pace for account in self.accounts.values()]
        assert not paces or min(paces) <= pace <= max(paces), f"{rank} joins at {pace}, others: {paces}"
        self.accounts[rank] = WorkerAccount(rank, number, pace, pace)

    def _ready(self, rank: int, number: int) -> None:
        """A contribution is announced."""
        account, push = self.accounts[rank], (rank, number)
        assert push not in self.fates, f"{push} was announced before"
        account.late = account.unarrived
        account.push, account.held, account.arrived, account.update = push, True, False, None
        self.fates[push] = "pending"

    def _pushed(self, rank: int, number: int) -> None:
        """A contribution has arrived."""
        account, push = self.accounts[rank], (rank, number)
        if account.push == push:
            account.arrives()
        elif push in account.late:
            account.late.discard(push)
            account.brought += 1
        self._no_longer_awaited((rank, number))

    def _pulled(self, rank: int) -> None:
        """A worker computes again."""
        self.accounts[rank].pulls = False

    def _paced(self, rank: int, every: int) -> None:
        """A worker leaves rounds out, from its next release on."""
        self.accounts[rank].every = every

    def _levelled(self) -> None:
        """All leads are forgiven."""
        low = min((account.pace for account in self.accounts.values()), default=0)
        for account in self.accounts.values():
            account.brought -= account.pace - low
            account.pace = low

    def left(self, rank: int) -> None:
        """Close an account; what had not arrived is lost."""
        account = self.accounts.pop(rank)
        for push in account.unarrived:
            if self.fates[push] == "pending":
                self.fates[push] = "lost"
            self._no_longer_awaited(push)

    # -- actions -------------------------------------------------------------------------------------------------

    def _granted(self, rank: int) -> None:
        """A worker may push."""
        account = self.accounts[rank]
        account.granted = account.number

    def _applied(self, apply: Apply, policy: Policy) -> None:
        """An update is decided."""
        if not 0 <= apply.rate <= len(apply.pushes) * _A_LITTLE_MORE:
            raise InvariantViolation(
                f"{apply} has no sensible rate: each contribution is at most a whole round, which is 1"
            )
        if policy.replicated and (missing := self._missing(apply)) is not None:
            raise InvariantViolation(
                f"it is `replicated`, but {apply} is made without worker {missing}, which is no further", missing
            )
        self._updates += 1
        update = UpdateInFlight(self._updates, apply.in_order, set())
        for push in apply.pushes:
            self._decided(push, "applied")
            account = self.accounts.get(push[0])
            if account is not None and account.push == push:
                account.update = update
                if not account.arrived:
                    update.waits.add(push)
        self._open.append(update)

    def _dropped(self, push: Push, policy: Policy) -> None:
        """A contribution is not used."""
        if not policy.drops:
            raise InvariantViolation(
                f"contribution {push} is dropped, but the policy does not say that it drops any", push[0]
            )
        self._decided(push, "dropped")
        account = self.accounts.get(push[0])
        if account is not None and account.push == push:
            account.arrives()

    def _released(self, rank: int, policy: Policy) -> int:
        """A worker may go on; how many steps it is ahead of the slowest, as a bound counts them."""
        account, bound, lead = self.accounts[rank], policy.bound, 0
        for other in self.accounts.values():
            if other is account:
                continue
            brought = other.brought + (other.update is not None and not other.arrived and _sees(account, other))
            lead = max(lead, account.pace + 1 - brought)
            if bound is not None and brought < account.pace + 1 - bound:
                raise InvariantViolation(
                    f"worker {rank} is released for step {account.pace + 1}, but worker {other.rank} has pushed "
                    f"{brought}: that breaks the bound of {bound}",
                    rank,
                )
        account.pace += account.every
        account.brought += account.every - 1
        account.number += 1
        account.held, account.pulls = False, True
        account.needs = {update for update in self._open if account.update in (None, update)}
        return lead

    def _evicted(self, rank: int) -> None:
        """A worker is not waited for any longer; its account is closed."""
        account = self.accounts[rank]
        if waits := self._why_it_waits(account):
            raise InvariantViolation(f"worker {rank} is evicted, but has done all it was asked for: {waits}", rank)
        if not any(other.held or other.pulls for other in self.accounts.values() if other is not account):
            raise InvariantViolation(f"worker {rank} is evicted, but nobody waits for it", rank)
        self.left(rank)

    def make_updates(self) -> list[int]:
        """Make the updates that have all they need; who now has all that it waited for."""
        left: list[UpdateInFlight] = []
        for update in self._open:
            if update.waits or (update.in_order and left):
                left.append(update)
        served = []
        if len(left) < len(self._open):
            for account in self.accounts.values():
                if account.needs and account.needs.isdisjoint(left):
                    served.append(account.rank)
                account.needs.intersection_update(left)
        self._open = left
        return served

    # -- accounts -----------------------------------------------------------------------------------------------------

    def _decided(self, push: Push, fate: str) -> None:
        if self.fates[push] != "pending":
            raise InvariantViolation(f"contribution {push} is {fate}, but it was {self.fates[push]}", push[0])
        self.fates[push] = fate

    def _missing(self, apply: Apply) -> int | None:
        """Find one of the slowest workers whose contribution is in neither this update nor an earlier one."""
        low = min((account.pace for account in self.accounts.values()), default=0)
        for account in self.accounts.values():
            brings = not account.held or self.fates[account.push] == "pending"
            if account.pace == low and brings and account.push not in apply.pushes:
                return account.rank
        return None

    def _why_it_waits(self, account: WorkerAccount) -> str:
        """Say what a worker that is not at work, and need not be, waits for; "" if something is expected from it."""
        if account.held and account.arrived:
            return f"contribution {account.push} was {self.fates[account.push]}, and it waits to be released"
        if account.held and not account.may_push:
            return f"it waits until it may push contribution {account.push}"
        missing = sorted(push for update in account.needs for push in update.waits if push != account.push)
        if account.arrived and missing:
            return f"it pulls, and the update it waits for waits for contribution {missing[0]}"
        return ""

    def _no_longer_awaited(self, push: Push) -> None:
        for update in self._open:
            update.waits.discard(push)


def _sees(one: WorkerAccount, other: WorkerAccount) -> bool:
    """Whether a worker is given no block before the last contribution of another is in it."""
    mine, theirs = one.update, other.update
    assert theirs is not None
    return mine is None or theirs is mine or (mine.in_order and theirs.index < mine.index)
