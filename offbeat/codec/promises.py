"""The promises of a codec: what others may rely on, and ask instead of its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Support = Literal["full", "shared", "private"]


@dataclass(frozen=True)
class Promises:
    """The bounds that hold for a codec and every gradient z of D elements; C(z) is what the others have of z.

    Args:
        linear: C(a) + C(b) = C(a + b) up to rounding, so that what is encoded may be added on its way.
        support: which elements C(z) has: all; some, the same on all workers in one turn; or some that each worker
            chooses.
        contraction: a delta above 0 with E|C(z) - z|^2 <= (1 - delta) |z|^2; 1 where only rounding is lost, 0 where it
            may be as small as 1 / D. None if there is no such delta: then a residual may grow without end.
        variance: an omega with E C(z) = z and E|C(z) - z|^2 <= omega |z|^2; None if C is biased.
        rounds: of one exchange. What has several cannot be pushed to a server.
        keeps_norm: whether |C(z)| says how large z is.
        keeps_shared_state: whether workers hold a state in common that each exchange changes, so that none may miss
            one.
        is_additive: whether the update is the sum of what each worker's part is decoded to, so that these can be
            decoded one by one; else it takes all of them at once.
        offset: what becomes of what is not sent of a worker's own steps, where it is kept in that worker's own
            parameters: it is "carried" into the next contribution, or "dropped" with it; "" where it is not kept there.
        most_workers: that it can carry; None for any number.
        passes: how often, about, the memory of z is read or written beyond what sending it as it is would take.
    """

    linear: bool = True
    support: Support = "full"
    contraction: float | None = 1.0
    variance: float | None = 0.0
    rounds: int = 1
    keeps_norm: bool = True
    keeps_shared_state: bool = False
    is_additive: bool = True
    offset: Literal["", "carried", "dropped"] = ""
    most_workers: int | None = None
    passes: float = 0.0
