"""The account of this worker's batches for the next exchange: how many it drew, and how many of them count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.engine import state_checks
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class BatchCounts(NamedTuple):
    """Batches that were drawn: how many, how many of them with data, the sum of their weights, and their samples."""

    batches: int = 0
    with_data: int = 0
    weight: float = 0.0
    samples: int = 0

    def plus(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            self.batches + other.batches,
            self.with_data + other.with_data,
            self.weight + other.weight,
            self.samples + other.samples,
        )

    def minus(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            self.batches - other.batches,
            self.with_data - other.with_data,
            self.weight - other.weight,
            self.samples - other.samples,
        )


class DrawnBatch(NamedTuple):
    """A batch that a prepared loader gave out: which of all loaders' together, and how it counts."""

    number: int
    drawn: BatchCounts


class BatchAccount:
    """Counts batches. Without a prepared loader nothing is drawn, and every exchange counts in full."""

    def __init__(self) -> None:
        self.stamp = 0  # batches drawn so far
        self.padding = False  # the batch at hand only keeps the loop going
        self.source = 0  # rank whose buffers count
        self._drawn = BatchCounts()  # since the last exchange
        self._used = BatchCounts()  # of these, by steps of the worker's own
        self._computed = BatchCounts()  # of these, before the last backward began
        self._sent = BatchCounts()  # on their way, and in no step until they have landed
        self._scale = 1.0
        self._last_samples = 0
        self._ahead = 0  # drawn since the last forward pass
        self.uncomputed = 0  # drawn since there was a gradient last
        # Within `join`: called when this worker is about to exchange a gradient; its weight when it has no more inputs.
        self.before_exchange: Callable[[], object] | None = None
        self.absent: float | None = None
        self.requests_vote = False  # this worker wants all to vote behind the next exchange

    def draw(self, *, real: bool, source: int, weight: float = 1.0, samples: int = 0) -> None:
        """The prepared loader gave out a batch.

        Args:
            real: False if it is a repetition that only keeps the loop going; it must not count.
            source: lowest rank that has data, whose buffers count.
            weight: of the batch, relative to the other workers' batches of this step; 1 if all are equal.
            samples: in the batch, if it is real.
        """
        self.stamp += 1
        self._ahead += 1
        self.uncomputed += 1
        self._drawn = self._drawn.plus(BatchCounts(1, 1, weight, samples) if real else BatchCounts(1))
        self.padding = not real
        self.source = source

    def seen(self) -> None:
        """A forward pass that does not train has used the batch."""
        self._ahead = 0

    def forward(self) -> None:
        """A forward pass that trains begins.

        Raises:
            ModelError: if it cannot be known whether its batch counts.
        """
        if self.padding and self._ahead > 1:
            raise ModelError(
                f"Cannot tell which batch is trained: {self._ahead} were drawn before this forward pass, and this "
                "worker's data has ended before another's, so that not all of them count. Draw one batch per forward "
                "pass, or give every worker equally many batches."
            )
        self._ahead = 0

    @property
    def weight(self) -> float:
        """The worker's weight in the next exchange: the mean over its batches since the last one; padding weighs 0.

        A second exchange with the same batch counts as the first did.
        """
        if self.absent is not None:
            return self.absent
        if self._drawn.batches:
            return self._drawn.weight / self._drawn.batches
        return 0.0 if self.padding else self._scale

    @property
    def unlanded(self) -> int:
        """Batches that are in no step yet: since the last exchange, and of one that is on its way. On any thread."""
        drawn = self._drawn  # before `_sent`: what `exchanged` takes from here is there by then
        sent = self._sent
        return drawn.batches + (0 if sent is drawn else sent.batches)

    @property
    def samples(self) -> int:
        """The samples in the batches since the last exchange; a second exchange with the same batch counts as the first
        did.
        """
        return self._drawn.samples if self._drawn.batches or self.padding else self._last_samples

    @property
    def scale(self) -> float:
        """The factor of this worker's gradient: the mean weight of its real batches."""
        return self._drawn.weight / self._drawn.with_data if self._drawn.with_data else self._scale

    def computed(self) -> None:
        """A parameter has a gradient, in which there is what was drawn."""
        self.uncomputed = 0

    def put_back(self, drawn: BatchCounts) -> None:
        """The loop was left with this batch in its hands, and nothing was computed from it."""
        self._drawn = self._drawn.minus(drawn)
        self._ahead = max(0, self._ahead - drawn.batches)
        self.uncomputed -= drawn.batches

    def backward(self) -> None:
        """A backward has begun."""
        self._computed = self._drawn

    def cleared(self) -> None:
        """The gradients of what was computed are gone: it is in no step, as when GradScaler leaves one out."""
        if self._drawn.batches > self._computed.batches:  # else it is computed a second time
            self._drawn = self._used.plus(self._drawn.minus(self._computed))
            self._computed = self._used

    def stepped(self) -> None:
        """A step of the worker's own has used what was drawn."""
        self._used = self._computed = self._drawn
        self.uncomputed = 0

    def give_up(self) -> None:
        """Discard what was drawn since the last step."""
        self._drawn = self._computed = self._used
        self.uncomputed = 0

    def state_dict(self) -> dict[str, Any]:
        """The batches drawn since the last exchange, for a checkpoint between two steps."""
        return {"drawn": list(self._drawn), "scale": self._scale, "last_samples": self._last_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ModelError: if it is damaged.
        """
        batches, with_data, weight, samples = state["drawn"]
        self._drawn = self._used = self._computed = BatchCounts(
            state_checks.whole(batches, "batches"),
            state_checks.whole(with_data, "batches with data"),
            state_checks.number(weight, "weight of what was drawn"),
            state_checks.whole(samples, "samples"),
        )
        self._scale = state_checks.number(state["scale"], "scale of a gradient")
        self._last_samples = state_checks.whole(state["last_samples"], "samples of the last step")

    def sent(self) -> None:
        """Note that what was drawn is on its way, and has not `landed` when it is `exchanged`, which comes next."""
        self._sent = self._drawn

    def landed(self) -> None:
        """Note that what was on its way is in a step."""
        self._sent = BatchCounts()

    def exchanged(self) -> None:
        """The exchange is done, or on its way; the next one counts anew."""
        self._scale, self._last_samples = self.scale, self.samples
        self._drawn = self._used = self._computed = BatchCounts()
        self.uncomputed = 0
