"""Batches that the parameter server's coordinator deals out: workers go through the data by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from offbeat.batching import EndOfEpoch, Lease, Leases
from offbeat.diagnosis.wait import WaitContext
from offbeat.engine import state_checks
from offbeat.errors import ModelError, NetworkError
from offbeat.loading.batch_source import Batch
from offbeat.protocol.data_leases import MOST_USED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.server_session import ServerSession
    from offbeat.protocol.data_leases import RegisterLoader


class ServerSource:
    """The source of one loader's batches at a server.

    Args:
        server: this worker's connection to it.
        waiter: the one waiting primitive.
        spec: of the loader.
        progress: as of `BatchSource`, if it goes on from another one.
    """

    def __init__(
        self, server: ServerSession, waiter: BlockingWait, spec: RegisterLoader, progress: float = 0.0
    ) -> None:
        self.leases = Leases(spec.samples, seed=spec.seed, shuffle=spec.shuffle, drop_last=spec.drop_last)
        self._server, self._waiter, self._loader = server, waiter, spec.loader
        self._count = spec.batch  # of the batch at hand
        self.progress = progress
        self._over = 0  # epochs of which this worker knows the end
        self._hand = server.client.register_loader(spec)

    def next(self) -> Batch | None:
        """Take the next lease of the coordinator, or wait for it.

        Raises:
            DisagreementError: if another worker has other data.
            NetworkError: if the server is gone.
        """
        deal = self._deal()
        if isinstance(deal, EndOfEpoch):
            self._over = deal.epoch + 1
            return None
        return Batch(deal)

    def drawn(self, batch: Batch) -> None:
        """The next contribution is computed from it.

        Raises:
            ModelError: if it would be computed from too many.
        """
        assert batch.lease is not None
        if len(self._server.drawn) + len(self._server.used) >= MOST_USED:
            raise ModelError(
                f"Cannot draw another batch: {MOST_USED} were drawn since the last contribution was pushed, and no "
                "contribution is computed from more. Step after fewer, and evaluate with a loader that is not prepared."
            )
        self._server.drawn.append((self._loader, batch.lease.number))
        self._count = batch.lease.count
        # Positions are dealt in their order, so the last tells how far all workers are.
        reached = max(epoch + stop / self.leases.samples for epoch, _, stop in batch.lease.pieces)
        self.progress = max(self.progress, reached)

    def ended(self) -> None:
        """The coordinator knows."""
        self.progress = max(self.progress, float(self._over))

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Return batches unused."""
        numbers = [b.lease.number for b in batches if b.lease is not None]
        back = {(self._loader, number) for number in numbers}
        self._server.drawn = [one for one in self._server.drawn if one not in back]
        if numbers:
            with contextlib.suppress(NetworkError):  # the run is closed, and the server knows that it has ended
                self._server.client.give_back(self._hand, numbers)

    def give_back_undrawn(self) -> None:
        """Return what was leased beforehand; another source is to go on from here."""
        self._server.client.give_back(self._hand, self._hand.take_undrawn())

    @property
    def epoch(self) -> int:
        """The epoch in which this worker draws next."""
        return self._hand.begins

    def out_of_memory(self) -> None:
        """Ask for less; what was drawn since the last step is given back, and so is what was dealt out beforehand."""
        server = self._server
        drawn = [number for loader, number in server.drawn if loader == self._loader]
        server.drawn = [(loader, number) for loader, number in server.drawn if loader != self._loader]
        server.client.out_of_memory(self._hand, self._count, drawn)

    def lost(self, ranks: Iterable[int], *, unused: int) -> None:
        """Do nothing: the server knows."""

    def explain(self) -> str:
        """The coordinator knows."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, of all workers and loaders, as the coordinator has it.

        Raises:
            NetworkError: if the server is gone.
        """
        asked = self._server.client.data_state()
        self._waiter.wait(asked, WaitContext("the place in the data", through_server=True))
        return {"place": asked.value, "progress": self.progress}

    def load_state_dict(self, state: Mapping[str, Any], *, seed: int) -> None:
        """Go on where `state` was taken; rank 0 tells the server, and then everybody is dealt to afresh.

        Raises:
            ModelError: if it is damaged, or of other data.
            NetworkError: if the server is gone.
        """
        client, place = self._server.client, state["place"]
        self.progress = state_checks.number(state.get("progress", 0.0), "progress in the data")
        self.leases = dataclasses.replace(self.leases, seed=seed)
        client.reseed(self._hand, self.leases.seed)
        if self._server.brings_state and self._server.is_brought and self._loader == 0:  # it is that of all loaders
            reply = client.set_data_state(place)
            self._waiter.wait(reply, WaitContext("the server to resume the data", through_server=True))

    def _deal(self) -> Lease | EndOfEpoch:
        while True:
            with contextlib.suppress(IndexError):  # what is void is taken away on the event loop, at any time
                return self._hand.deals.popleft()
            drawn = self._server.client.draw(self._hand)
            self._waiter.wait(drawn, WaitContext("the next samples from the server", through_server=True))
