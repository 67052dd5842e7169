"""One bucket's exchange: what the workers hold of it goes through the codec's rounds and comes back as the mean.

A trailer of a few numbers is added up along with it: in the same operation where the payload's dtype can count, in one
of its own beside integers, and beside what is not added at all.

A codec's one sum may be made in two rounds, a reduce-scatter and an all-gather, with other exchanges between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from offbeat import contribution_hooks
from offbeat.payload import Gathered, Reply, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec import Codec, Exchanged, State, Turn
    from offbeat.engine.communicator import Communicator
    from offbeat.fabric import Scattered
    from offbeat.pending import Pending

# Integers up to here are exact in the dtype, so counts and stamps can be summed in it.
EXACT_UP_TO = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def finish_together(exchanges: Sequence[BucketExchange]) -> None:
    """Complete exchanges that have begun to finish, round by round: the later ones of all are on their way together."""
    while going_on := [exchange for exchange in exchanges if not exchange.is_finished]:
        for exchange in going_on:
            exchange.finish_round()


class BucketExchange:
    """Exchanges one bucket. Call order: `issue`, `poll` any number of times, `wait`, `finish`.

    In two rounds `gather` may come between `issue` and `wait`, when others have their turn; else `wait` does it. In
    place of `finish`, `begin_to_finish` of several exchanges and then `finish_together`.

    Args:
        turn: which exchange of which bucket it is.
        values: [D] what this worker brings, multiplied by its share; consumed, and the mean in the end.
        codec: what turns it into payloads.
        state: the codec's, of the bucket's parameters.
        communicator: to the other workers.
        in_two_rounds: whether the codec's sum is made by a reduce-scatter and an all-gather.
        keep_sent: whether `sent` is asked for.

    Attributes:
        payload: of the first round.
        trailer_dtype: in which the trailer is added up.
        issued_s, done_s: when the first round was issued and seen to be done, in clock seconds; a sum in two rounds
            counts as one.
        reduced_s, gathering_s: of a sum in two rounds, when the reduce-scatter was seen to be done, and the all-gather
            was issued.
        sent: [D] what of `values` the others received, once it is finished, if that is asked for.
    """

    __slots__ = ("_carrier", "_communicator", "_generator", "_in_two_rounds", "_is_reduced", "_pending", "_reply",
                 "_scattered", "_trailer_pending", "_weight", "bucket", "done_s", "gathering_s", "issued_s", "payload",
                 "reduced_s", "sent", "trailer_dtype", "values")  # fmt: skip

    def __init__(
        self, turn: Turn, values: torch.Tensor, codec: Codec, state: State, communicator: Communicator,
        *, in_two_rounds: bool = False, keep_sent: bool = False,
    ) -> None:  # fmt: skip
        self.bucket, self.values = turn.bucket, values
        self._communicator = communicator
        contribution_hooks.before_encode([values], (turn.bucket.slots[0], turn.purpose), turn.step, 1 / turn.world)
        self._generator = codec.exchange(values, state, turn, keep_sent=keep_sent)
        self.payload = payload = next(self._generator)
        self._carrier = payload if isinstance(payload, Sum) and payload.tensor.dtype in EXACT_UP_TO else None
        self.trailer_dtype = values.dtype if self._carrier is None else self._carrier.tensor.dtype
        self._in_two_rounds, self._is_reduced = in_two_rounds, False
        self._scattered: Scattered | None = None
        self.issued_s = 0.0
        self.done_s: float | None = None
        self.reduced_s: float | None = None
        self.gathering_s: float | None = None
        self.sent: torch.Tensor | None = None
        self._pending: Pending | None
        self._weight = 1.0
        self._trailer_pending: Pending | None = None
        self._reply: Reply

    def issue(self, trailer: torch.Tensor) -> None:
        """Begin the first round.

        Args:
            trailer: [T] what this worker says along with it.
        """
        self.issued_s = self._communicator.now_s()
        if self._in_two_rounds:
            assert self._carrier is not None, "of codecs a scheduler may go with those that add floats"
            self._scattered = self._communicator.reduce_scatter(replace(self._carrier, tail=trailer))
        elif self._carrier is not None:
            self._pending = self._communicator.start(replace(self._carrier, tail=trailer))
        else:
            self._pending = self._communicator.start(self.payload)
            self._trailer_pending = self._communicator.start(Sum(trailer))

    def poll_reduce(self) -> bool:
        """Whether the reduce-scatter of a sum in two rounds is done; note the time if it is."""
        if self.reduced_s is None and self._scattered is not None and self._scattered.done():
            self.reduced_s = self._communicator.now_s()
        return self.reduced_s is not None

    def reduce(self) -> None:
        """Wait for the reduce-scatter of a sum in two rounds."""
        assert self._scattered is not None
        if not self._is_reduced:
            self._communicator.wait_for_bucket(self._scattered, self.bucket)
            self._is_reduced = True
            self.poll_reduce()

    def gather(self) -> None:
        """Begin the all-gather of a sum in two rounds."""
        self.reduce()
        assert self._scattered is not None
        self.gathering_s = self._communicator.now_s()
        self._pending, self._scattered = self._communicator.all_gather(self._scattered), None

    def poll(self) -> bool:
        """Whether the sum is there; note the time if it is."""
        if self.done_s is None and self._scattered is None and (self._pending is None or self._pending.done()):
            self.done_s = self._communicator.now_s()
        return self.done_s is not None

    def wait(self) -> tuple[torch.Tensor, float]:
        """Wait for the sum; return the trailers' sum [T], and the part of the workers that is in it."""
        if self._scattered is not None:
            self.gather()
        assert self._pending is not None
        total = self._reply = self._communicator.wait_for_bucket(self._pending, self.bucket)
        self.poll()
        if self._trailer_pending is not None:
            total = self._communicator.wait_for_bucket(self._trailer_pending, self.bucket)
        assert isinstance(total, Total)
        return total.tensor if total.tail is None else total.tail, total.weight

    @property
    def includes_own(self) -> bool:
        """Whether what this worker brought is in the first round's total."""
        return not isinstance(self._reply, Total) or self._reply.includes_own

    def finish(self, weight: float) -> None:
        """Complete the remaining rounds and leave the mean in `values`.

        Args:
            weight: sum of the workers' weights; in units in which "everyone once" is 1.
        """
        self.begin_to_finish(weight)
        while not self.is_finished:
            self.finish_round()

    def begin_to_finish(self, weight: float) -> None:
        """Hand the codec what the first round brought, and issue the next, if there is one."""
        self._weight = weight
        self._hand_on()

    def finish_round(self) -> None:
        """Wait for a later round, and issue the next, if there is one."""
        assert self._pending is not None
        self._reply = self._communicator.wait_for_bucket(self._pending, self.bucket)
        self._hand_on()

    @property
    def is_finished(self) -> bool:
        """Whether the mean is in `values`."""
        return self._pending is None

    def _hand_on(self) -> None:
        reply = self._reply
        given: Total | Gathered
        if isinstance(reply, Total):
            given = Total(reply.tensor, self._weight, includes_own=reply.includes_own)
        else:
            given = Gathered(reply, self._weight)
        try:
            self._pending = self._communicator.start(self._generator.send(given))
        except StopIteration as stop:
            exchanged: Exchanged = stop.value
            self._pending = None
            self.sent = exchanged.sent
            if exchanged.update.data_ptr() != self.values.data_ptr():
                self.values.copy_(exchanged.update)
