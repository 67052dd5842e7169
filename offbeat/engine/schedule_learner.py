"""The profile that a scheduler plans from, learnt in the first steps: when gradients are complete, when the next
forward pass needs their parameters, and what the link carries.

All workers come to the same profile. Each tells what it has measured; of the times the latest counts, since the slowest
worker is waited for, and of the links the slowest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from offbeat.engine.forward_watch import ForwardWatch
from offbeat.engine.pass_clock import PassClock
from offbeat.engine.schedule_monitor import read_told
from offbeat.errors import DisagreementError
from offbeat.payload import Sum
from offbeat.scheduling import BackwardProfile, GradientTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.engine.communicator import Communicator
    from offbeat.engine.control_group import ControlGroup

_SKIPPED = 2  # steps: buckets are arranged anew behind the first, and memory is still being found
_WATCHED = 5
_SIZES = (1 << 16, 1 << 18, 1 << 20)  # bytes of the exchanges by which the link is measured
_SMALL = 1 << 14  # bytes of those of which only the number counts
_REPEATS = 3
_ROW = 8  # small exchanges, two of them under way
_LEAST_BANDWIDTH = 1.0
BLIND = "no backward was seen to begin: call what prepare() returned, and have it return tensors"
"""Why nothing can be planned where a learner `is_blind`."""


class Measured(msgspec.Struct, frozen=True):
    """The measurements of one worker.

    Args:
        ready_s: [G] when each gradient is complete, since backward began.
        needed_s: [G] when the forward pass needs each parameter, since it began.
        forward_s, backward_s: how long the passes take.
        exchanges_s: of each size that was tried, how long its exchange takes.
        gap_s: what each small exchange takes, where two are under way.
    """

    ready_s: list[float]
    needed_s: list[float]
    forward_s: float
    backward_s: float
    exchanges_s: list[float]
    gap_s: float

    @property
    def trouble(self) -> str:
        """The part of it that cannot be, in words; "" if all can."""
        if len(self.exchanges_s) != len(_SIZES):
            return f"{len(self.exchanges_s)} exchanges by which the link is measured, and not {len(_SIZES)}"
        passes = (self.forward_s, self.backward_s, self.gap_s)
        times = itertools.chain(self.ready_s, self.needed_s, passes, self.exchanges_s)
        return next((f"a time of {s} s" for s in times if not (math.isfinite(s) and s >= 0)), "")


_decode = msgspec.json.Decoder(Measured).decode


class Pass(NamedTuple):
    """A forward pass, by marks of a `PassClock`: when it began, when each module's did, and when it ended."""

    began: Any
    modules_began: Mapping[torch.nn.Module, Any]
    ended: Any


class ScheduleLearner:
    """A watch on the steps in which gradients are waited for behind backward.

    Args:
        model, parameters: of whose passes.
        now_s: the clock.
        is_known: the schedule is; only the modules that read each parameter are to be found.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        now_s: Callable[[], float],
        *,
        is_known: bool = False,
    ) -> None:
        self._skipped, self._watched = (0, 1) if is_known else (_SKIPPED, _WATCHED)
        self._parameters, self._now_s = parameters, now_s
        self._clock = PassClock(self._device, now_s)
        self._watch = ForwardWatch(model, self._clock.mark)
        self._steps = 0
        self._forward_began = self._backward_began = self._clock.mark()
        self._passes: list[Pass] = []  # forward ones of the step at hand
        self._completed: list[tuple[str, Any]] = []  # gradients of it, and when
        self._ready: dict[str, list[float]] = {name: [] for name in parameters}
        self._needed: dict[str, list[float]] = {name: [] for name in parameters}
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []
        self.readers: dict[str, tuple[torch.nn.Module, ...]] = {}
        self.unread: set[str] = set()  # parameters that no module's forward pass has been seen to read, in some step

    def forward_begins(self) -> None:
        """A forward pass begins."""
        self._forward_began = self._clock.mark()
        self._watch.begin()

    def backward_begins(self) -> None:
        """A backward begins: the forward pass is over."""
        self._backward_began = self._clock.mark()
        if self._steps < self._skipped:
            return
        self.readers = self._watch.readers(self._parameters)
        began = self._watch.began
        self.unread |= {name for name, modules in self.readers.items() if not any(one in began for one in modules)}
        self._passes.append(Pass(self._forward_began, dict(began), self._backward_began))

    def complete(self, name: str) -> None:
        """A gradient is complete."""
        if self._steps >= self._skipped:
            self._completed.append((name, self._clock.mark()))

    def backward_ends(self) -> None:
        """The backward is over."""
        if self._steps >= self._skipped:
            ended = self._clock.mark()
            self._clock.settle()
            self._note(ended)
        self._steps += 1

    def _note(self, ended: Any) -> None:
        between_s = self._clock.between_s
        for one in self._passes:
            self._forward_s.append(between_s(one.began, one.ended))
            for name, modules in self.readers.items():
                marks = (one.modules_began.get(module, one.began) for module in modules)
                self._needed[name].append(min(between_s(one.began, mark) for mark in marks))
        for name, mark in self._completed:
            self._ready[name].append(between_s(self._backward_began, mark))
        self._backward_s.append(between_s(self._backward_began, ended))
        self._passes, self._completed = [], []

    @property
    def is_done(self) -> bool:
        """Whether enough steps were watched; after the same step on all workers."""
        return self._steps >= self._skipped + self._watched

    @property
    def is_blind(self) -> bool:
        """Whether no backward was seen to begin, so that nothing is known of the forward pass before it."""
        return not self._forward_s

    @property
    def lacking(self) -> list[str]:
        """Parameters that had no gradient in one of the steps."""
        return [name for name, times in self._ready.items() if len(times) < len(self._backward_s)]

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the model is compiled, so that nobody can wait there for what it reads."""
        return self._watch.is_compiled

    def close(self) -> None:
        """Watch no longer."""
        self._watch.close()

    def agree(self, communicator: Communicator, control: ControlGroup) -> BackwardProfile:
        """Make one profile of what all workers have measured. Collective, between two exchanges.

        Raises:
            DisagreementError: if another worker has other gradients, or has told what cannot be.
        """
        exchanges_s = [self._exchange_s(communicator, size) for size in _SIZES]
        mine = self._measured(exchanges_s, self._gap_s(communicator))
        told = control.texts("what the steps so far have taken", msgspec.json.encode(mine).decode())
        return self.profile([read_told(text, _decode, f"rank {rank}") for rank, text in told.items()])

    def measured(self, latency_s: float, bandwidth: float) -> Measured:
        """The measurements of this worker, where it is known what the link carries."""
        return self._measured([latency_s + size / bandwidth for size in _SIZES], 0.0)

    def _measured(self, exchanges_s: list[float], gap_s: float) -> Measured:
        return Measured(
            ready_s=[statistics.median(times) for times in self._ready.values()],
            needed_s=[statistics.median(times) for times in self._needed.values()],
            forward_s=statistics.median(self._forward_s),
            backward_s=statistics.median(self._backward_s),
            exchanges_s=exchanges_s,
            gap_s=gap_s,
        )

    def profile(self, measured: Sequence[Measured]) -> BackwardProfile:
        """The profile of what all workers have measured; the same from the same numbers.

        Raises:
            DisagreementError: if they have other gradients.
        """
        count = len(self._parameters)
        if any(len(one.ready_s) != count or len(one.needed_s) != count for one in measured):
            raise DisagreementError("Cannot make a schedule: the workers do not have the same gradients.")
        ready = [max(times) for times in zip(*(one.ready_s for one in measured), strict=True)]
        needed = [max(times) for times in zip(*(one.needed_s for one in measured), strict=True)]
        forward_s = max(*needed, *(one.forward_s for one in measured))
        exchanges = [max(times) for times in zip(*(one.exchanges_s for one in measured), strict=True)]
        latency_s, bandwidth = fitted(_SIZES, exchanges)
        names, parameters = list(self._parameters), list(self._parameters.values())
        # By number, in order of registration: "cuda:0" here is "cuda:1" on another worker of this host.
        devices = list(dict.fromkeys(one.device for one in parameters))
        # What is read at the same time is needed in reverse order of its gradients: so it is sent as it comes.
        order = sorted(range(count), key=lambda i: (needed[i], -ready[i], i))
        ends = [*(needed[i] for i in order[1:]), forward_s]
        return BackwardProfile(
            tuple(
                GradientTimes(
                    name=names[i],
                    numel=parameters[i].numel(),
                    itemsize=parameters[i].dtype.itemsize,
                    kind=f"{parameters[i].dtype} device {devices.index(parameters[i].device)}",
                    ready_s=ready[i],
                    forward_s=end_s - needed[i],
                )
                for i, end_s in zip(order, ends, strict=True)
            ),
            backward_s=max(one.backward_s for one in measured),
            latency_s=latency_s,
            bandwidth=bandwidth,
            gap_s=max(one.gap_s for one in measured),
        )

    def _exchange_s(self, communicator: Communicator, size_bytes: int) -> float:
        """The time that the exchange of so many bytes takes. Collective."""
        tensor = torch.zeros(size_bytes // 4, device=self._device)
        return statistics.median(self._taken_s(communicator, [tensor]) for _ in range(_REPEATS))

    def _gap_s(self, communicator: Communicator) -> float:
        """The time that each of several small exchanges takes, two of them under way. Collective."""
        tensors = [torch.zeros(_SMALL // 4, device=self._device) for _ in range(_ROW)]
        return statistics.median(self._taken_s(communicator, tensors) for _ in range(_REPEATS)) / _ROW

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _taken_s(self, communicator: Communicator, tensors: Sequence[torch.Tensor]) -> float:
        """The time that the exchange of these takes, with two of them under way. Collective."""
        began_s, before = self._now_s(), None
        for tensor in tensors:
            started = communicator.start(Sum(tensor))
            if before is not None:
                communicator.wait(before, "measuring the link")
            before = started
        assert before is not None
        communicator.wait(before, "measuring the link")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now_s() - began_s


def fitted(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The latency (s) and bandwidth (bytes/s) of a line through measured exchanges, by least squares; none negative.

    >>> fitted([0, 1000], [0.5, 1.5])
    (0.5, 1000.0)
    """
    mean_size, mean_s = statistics.fmean(sizes_bytes), statistics.fmean(seconds)
    spread = sum((size - mean_size) ** 2 for size in sizes_bytes)
    slope = sum((size - mean_size) * (s - mean_s) for size, s in zip(sizes_bytes, seconds, strict=True)) / spread
    bandwidth = (
        1 / slope if slope > 0 else max(size / max(s, 1e-9) for size, s in zip(sizes_bytes, seconds, strict=True))
    )
    return max(0.0, mean_s - mean_size / bandwidth), max(_LEAST_BANDWIDTH, bandwidth)
