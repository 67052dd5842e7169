"""Ranks for newcomers: the coordinator gives each rank to one of them, however many ask at once.

`offbeat run --join`            coordinator
  | -- ReserveRanks(count) ---> |
  | <- RanksReserved(first) --- |      count ranks in a row that nobody has had, and nobody else gets

A server that was restarted has forgotten ranks that nobody has come with yet; the folder of the job has not.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Text

MOST_RANKS = 4096
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]


class ReserveRanks(msgspec.Struct, tag=True, frozen=True):
    """Operator to coordinator: a request for ranks.

    Args:
        count: how many.
        least: none is below this one.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    least: _Rank = 0


class RanksReserved(msgspec.Struct, tag=True, frozen=True):
    """The answer: the first of the ranks, or why there are none."""

    first: _Rank = 0
    refusal: Text = ""
