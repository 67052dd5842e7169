"""The check that a worker trains what the others train; and if it does not, where that shows first."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING

from offbeat.errors import DisagreementError
from offbeat.server.optimizers import check_spec, lines_of
from offbeat.server.shard.model_shard import digest_of

if TYPE_CHECKING:
    from offbeat.protocol.training import ModelInfo


def compare(rank: int, theirs: ModelInfo, ours: ModelInfo) -> None:
    """Refuse a worker whose plan, model, optimizer or job is another.

    Args:
        theirs: what that worker says of itself.
        ours: what the first worker said.

    Raises:
        PeerError: if its optimizer is none that can be held.
        DisagreementError: if it differs.
    """
    check_spec(theirs.optimizer)
    plan, theirs_plan = digest_of(ours.plan), digest_of(theirs.plan)
    # A plan from before a swap will do, or after one that this shard has not heard of: the coordinator sees to that.
    if theirs_plan in ours.former or (theirs.back is not None and theirs.back.swaps != ours.swaps):
        theirs_plan = plan
    seed = ours.seed if theirs.seed is None or ours.seed is None else theirs.seed
    optimizers = zip_longest(lines_of(theirs.optimizer), lines_of(ours.optimizer), fillvalue="nothing")
    for what, there, here in (
        ("plan", theirs_plan, plan),
        ("layout", theirs.layout, ours.layout),
        # What the digest is of cannot be known here, so whoever came first may have said one thing and meant another.
        ("way to cut it into blocks", digest_of(str(theirs.blocks)), digest_of(str(ours.blocks))),
        ("number of workers", str(theirs.world), str(ours.world)),
        ("number of shards", str(theirs.shards), str(ours.shards)),
        ("number of shards that hold it", str(theirs.holders), str(ours.holders)),
        ("seed", str(seed), str(ours.seed)),
        *(("optimizer", there, here) for there, here in optimizers),
    ):
        if there != here:
            where = _line(theirs.plan, ours.plan) if what == "plan" else _parameter(theirs, ours)
            raise DisagreementError(
                f"Cannot admit rank {rank}: its {what} is {there!r}, that of the job here is {here!r}"
                f"{where if what in ('plan', 'layout') else ''}. Start every worker with the same plan, the same seed, "
                "the same model and the same optimizer."
            )


def _line(theirs: str, ours: str) -> str:
    """The first line in which two plans differ."""
    for there, here in zip_longest(theirs.splitlines(), ours.splitlines(), fillvalue="nothing"):
        if there != here:
            return f"; where it says {there!r}, the job's says {here!r}"
    return ""


def _parameter(theirs: ModelInfo, ours: ModelInfo) -> str:
    """The first parameter in which two models differ."""
    for there, here in zip_longest(theirs.names, ours.names):
        if there != here:
            has = "ends" if there is None else f"has the parameter {there!r}"
            return f"; it {has} where the job's model {'ends' if here is None else f'has {here!r}'}"
    mine, others = _elements(ours), _elements(theirs)
    for number, name in enumerate(ours.names):
        if mine[number] != others[number]:
            return f"; of {name!r} it has {others[number]} elements for this shard, and the job's model {mine[number]}"
    return ""


def _elements(details: ModelInfo) -> Counter[int]:
    """Count the elements of each parameter that a shard holds, by the parameter's number."""
    found: Counter[int] = Counter()
    for block in details.blocks:
        for piece in block.pieces:
            found[piece.name] += piece.numel
    return found
