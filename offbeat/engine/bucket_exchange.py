"""One bucket's exchange under way: the packed gradient goes through the codec's rounds and comes back as the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.payload import Reply, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.codec import Codec, Exchanged, State
    from offbeat.engine.bucket_buffer import BucketBuffer, BucketTrailer
    from offbeat.engine.communicator import Communicator


class BucketExchange:
    """Begins the exchange of a packed bucket. Call order: `look` any number of times, `arrive`, `land`.

    Args:
        flat: the bucket, packed.
        codec: what turns it into payloads.
        state: the codec's, of the bucket's parameters.
        channel: to the other workers.
        now_s: the clock.
        weight, stamp, calls: what this worker says along with it.
    """

    __slots__ = (
        "_channel",
        "_generator",
        "_now_s",
        "_pending",
        "_reply",
        "_tail_pending",
        "done_s",
        "flat",
        "issued_s",
    )

    def __init__(
        self,
        flat: BucketBuffer,
        codec: Codec,
        state: State,
        channel: Communicator,
        now_s: Callable[[], float],
        *,
        weight: float,
        stamp: int,
        calls: bool = False,
    ) -> None:
        self.flat = flat
        self._channel, self._now_s = channel, now_s
        self._generator = codec.exchange(flat.grad, state)
        payload = next(self._generator)
        self.issued_s = now_s()
        self.done_s: float | None = None
        self._reply: Reply | None = None
        self._tail_pending = None
        if isinstance(payload, Sum):
            flat.write_tail(weight=weight, stamp=stamp, calls=calls, dtype=payload.tensor.dtype)
            self._pending = channel.start(Sum(payload.tensor, flat.tail))
        else:
            flat.write_tail(weight=weight, stamp=stamp, calls=calls, dtype=flat.tail.dtype)
            self._pending = channel.start(payload)
            self._tail_pending = channel.start(Sum(flat.tail))

    def look(self) -> None:
        """Note the time if the first round is done."""
        if self.done_s is None and self._pending.done():
            self.done_s = self._now_s()

    def arrive(self) -> BucketTrailer:
        """Wait for the first round, and return what the workers said along with it."""
        bucket = self.flat.bucket
        total = self._reply = self._channel.wait_for_bucket(self._pending, bucket)
        self.look()
        if self._tail_pending is not None:
            total = self._channel.wait_for_bucket(self._tail_pending, bucket)
        assert isinstance(total, Total)
        return self.flat.read_tail(total.tensor if total.tail is None else total.tail, total.weight)

    def land(self, weight: float) -> None:
        """Complete the remaining rounds and leave the mean in the bucket.

        Args:
            weight: sum of the workers' weights; in units in which "everyone once" is 1.
        """
        reply, grad = self._reply, self.flat.grad
        while True:
            assert reply is not None
            try:
                payload = self._generator.send(Total(reply.tensor, weight) if isinstance(reply, Total) else reply)
            except StopIteration as stop:
                exchanged: Exchanged = stop.value
                break
            reply = self._channel.wait_for_bucket(self._channel.start(payload), self.flat.bucket)
        if exchanged.update.data_ptr() != grad.data_ptr():
            grad.copy_(exchanged.update)
