"""This worker's part in the next exchange: how many batches it drew, and how many of them count."""

from __future__ import annotations


class Share:
    """Counts batches. Without a prepared loader nothing is drawn, and every exchange counts in full."""

    def __init__(self) -> None:
        self.stamp = 0  # batches drawn so far
        self.padding = False  # the batch at hand only keeps the loop going
        self.source = 0  # rank whose buffers count
        self._drawn = self._with_data = 0  # since the last exchange

    def draw(self, *, real: bool, source: int) -> None:
        """The prepared loader gave out a batch.

        Args:
            real: False if it is a repetition that only keeps the loop going; it must not count.
            source: lowest rank that has data, whose buffers count.
        """
        self.stamp += 1
        self._drawn += 1
        self._with_data += real
        self.padding = not real
        self.source = source

    @property
    def weight(self) -> float:
        """This worker's weight in the next exchange: the share of its batches since the last one that are real."""
        return self._with_data / self._drawn if self._drawn else 1.0

    def exchanged(self) -> None:
        """The exchange is done; the next one counts anew."""
        self._drawn = self._with_data = 0
