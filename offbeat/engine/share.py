"""This worker's part in the next exchange: how many batches it drew, and how many of them count."""

from __future__ import annotations

from offbeat.errors import ModelError


class Share:
    """Counts batches. Without a prepared loader nothing is drawn, and every exchange counts in full."""

    def __init__(self) -> None:
        self.stamp = 0  # batches drawn so far
        self.padding = False  # the batch at hand only keeps the loop going
        self.source = 0  # rank whose buffers count
        self._drawn = self._with_data = 0  # since the last exchange
        self._weighed = 0.0  # sum of the weights of those drawn since then
        self._scale = 1.0
        self._samples = self._last_samples = 0
        self._ahead = 0  # drawn since the last forward pass

    def draw(self, *, real: bool, source: int, weight: float = 1.0, samples: int = 0) -> None:
        """The prepared loader gave out a batch.

        Args:
            real: False if it is a repetition that only keeps the loop going; it must not count.
            source: lowest rank that has data, whose buffers count.
            weight: of the batch, relative to the other workers' batches of this step; 1 if all are equal.
            samples: in the batch, if it is real.
        """
        self.stamp += 1
        self._drawn += 1
        self._ahead += 1
        self._with_data += real
        self._weighed += weight if real else 0.0
        self._samples += samples if real else 0
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
        """This worker's weight in the next exchange: the mean over its batches since the last one; padding weighs 0.

        A second exchange with the same batch counts as the first did.
        """
        if self._drawn:
            return self._weighed / self._drawn
        return 0.0 if self.padding else self._scale

    @property
    def samples(self) -> int:
        """In the batches since the last exchange; a second exchange with the same batch counts as the first did."""
        return self._samples if self._drawn or self.padding else self._last_samples

    @property
    def drawn(self) -> int:
        """Batches since the last exchange."""
        return self._drawn

    @property
    def scale(self) -> float:
        """By what this worker's gradient is to be multiplied: the mean weight of its real batches."""
        return self._weighed / self._with_data if self._with_data else self._scale

    def exchanged(self) -> None:
        """The exchange is done; the next one counts anew."""
        self._scale, self._last_samples = self.scale, self.samples
        self._samples = 0
        self._drawn = self._with_data = 0
        self._weighed = 0.0
