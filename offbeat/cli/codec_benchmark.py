"""The measurements of `offbeat bench codec`: what encoding and decoding takes on this machine, and when that pays.

One worker's own part of an exchange is timed: it encodes every bucket of a model, and decodes the replies, which are
there at once, as if the links took no time. Of what is gathered it decodes as many contributions as there are workers.
On a link of rate r a codec pays where what it saves takes longer than that:

    2 (N - 1) / N (S - A) / r > t        S, A: bytes of the model, and of the all-reduce that is as long; t: measured
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat.codec import (
    GRBS,
    QSGD,
    Cast,
    Dense,
    ErrorFeedback,
    FixedPoint,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
    Turn,
)
from offbeat.codec.wire_bytes import allreduce_bytes
from offbeat.layout import arrange
from offbeat.model_profiles import profile
from offbeat.payload import Gather, Gathered, GatheredPart, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.codec import Codec, State
    from offbeat.layout import Bucket

CODECS: tuple[Codec, ...] = (
    Dense(),
    Cast("bf16"),
    Cast("fp16"),
    QSGD(8),
    QSGD(4),
    QSGD(8, is_random=False),
    Sign(),
    FixedPoint(8),
    TopK(0.01),
    RandomK(0.01),
    GRBS(32),
    GRBS(256),
    PowerSGD(4),
    ErrorFeedback(Sign()),
    ErrorFeedback(TopK(0.01)),
    ErrorFeedback(GRBS(32)),
    ErrorFeedback(PowerSGD(4)),
)


@dataclass
class CodecFigure:
    """The measurement of one codec.

    Args:
        codec: as it is written in a plan.
        sent: bytes that a worker brings, for each byte of the gradient.
        on_wire: size of the all-reduce that takes a link as long, for each byte of the gradient.
        pays_below_gbit_s: rate of the links below which it is worth its time; None if it never is.
        values: GB of gradients that are encoded and decoded in a second, one per turn.
    """

    codec: str
    sent: float
    on_wire: float
    pays_below_gbit_s: float | None = None
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of all turns."""
        return statistics.median(self.values)


def measure_codecs(
    codecs: Sequence[Codec],
    *,
    model: str,
    workers: int,
    bucket_bytes: int,
    device: torch.device,
    seconds: float,
    repeats: int,
    tell: Callable[[str], None],
) -> list[CodecFigure]:
    """Measure each codec by turns.

    Args:
        model: whose shapes the gradients have; a name of `offbeat.model_profiles`.
        workers: how many contributions are decoded.
        bucket_bytes: as of a plan.
        device: where gradients are.
        seconds: that each turn takes; one exchange at least.
        repeats: turns of each.
        tell: what is measured now.
    """
    shapes = {f"{layer.name}.{i}": shape for layer in profile(model) for i, shape in enumerate(layer.shapes)}
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    layout = arrange(parameters, bucket_bytes=bucket_bytes)
    buckets = [dataclasses.replace(bucket, device=device) for bucket in layout.buckets]
    benches = [_Bench(codec, buckets, workers, device) for codec in codecs]
    figures = [bench.figure for bench in benches]
    for repeat in range(repeats + 1):
        for bench in benches:
            tell(f"{bench.figure.codec}, turn {repeat} of {repeats}" if repeat else f"{bench.figure.codec}, to warm up")
            rate = bench.turn(seconds if repeat else 0.0)
            if repeat:
                bench.figure.values.append(rate)
    for figure in figures:
        saved = 2 * (workers - 1) / workers * (1 - figure.on_wire)
        figure.pays_below_gbit_s = 8 * saved * figure.median if saved > 0 else None
    return figures


class _Bench:
    """One codec's exchanges of all buckets, on one worker."""

    def __init__(self, codec: Codec, buckets: Sequence[Bucket], workers: int, device: torch.device) -> None:
        self._codec, self._buckets, self._workers, self._device = codec, buckets, workers, device
        generator = torch.Generator(device).manual_seed(0)
        self._grads = [torch.randn(one.numel, generator=generator, device=device) / workers for one in buckets]
        self._states: list[State] = [codec.init(bucket) for bucket in buckets]
        self._step = 0
        self._size_bytes = sum(bucket.size_bytes for bucket in buckets)
        self.figure = CodecFigure(
            repr(codec),
            sum(codec.payload_bytes(bucket) for bucket in buckets) / self._size_bytes,
            sum(allreduce_bytes(codec, bucket, workers) for bucket in buckets) / self._size_bytes,
        )

    def turn(self, seconds: float) -> float:
        """Exchange for so long, or once; GB of gradients a second."""
        spent_s, exchanges = 0.0, 0
        while not exchanges or spent_s < seconds:
            spent_s += sum(map(self._exchange_s, range(len(self._buckets))))
            exchanges += 1
            self._step += 1
        return exchanges * self._size_bytes / spent_s / 1e9

    def _exchange_s(self, index: int) -> float:
        """The time that this worker's own work of one bucket takes."""
        turn = Turn(self._buckets[index], self._step, 0, self._workers)
        grad = self._grads[index].clone()  # it is consumed
        exchange = self._codec.exchange(grad, self._states[index], turn)
        spent_s, reply = 0.0, None
        while True:
            self._synchronize()
            began_s = time.perf_counter()
            try:
                payload = exchange.send(reply) if reply is not None else next(exchange)
            except StopIteration:
                self._synchronize()
                return spent_s + time.perf_counter() - began_s
            self._synchronize()
            spent_s += time.perf_counter() - began_s
            reply = self._reply(payload)

    def _reply(self, payload: Sum | Gather) -> Total | Gathered:
        """Answer as if all workers had brought the like; nobody's memory is another's."""
        if isinstance(payload, Sum):
            return Total(payload.tensor)
        parts = [
            GatheredPart(rank, tuple(tensor.clone() for tensor in payload.tensors)) for rank in range(self._workers)
        ]
        return Gathered(parts)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
