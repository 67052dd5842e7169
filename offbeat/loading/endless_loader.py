"""The loader of a validator: its own data, again and again, for as long as workers train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.loading.sharded_loader import ShardedLoader

if TYPE_CHECKING:
    from collections.abc import Iterator


class EndlessLoader(ShardedLoader):
    """A `ShardedLoader` of one process that has all of the data, whose loop begins anew where the data ends.

    Trusted data is little, and the workers' epochs are long: a loop that ended with it would leave them without a
    validator.
    """

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()
