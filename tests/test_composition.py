"""What may not be composed: each refusal word for word, and that what it advises can be made.

The codes are those of the design. There is no refusal yet of joint codes (R1 to R3), of norms that say nothing (R6),
of noise (R16), of optimizers that are not linear (R18) and of parameters that are sharded (R21), since there is none of
it; nor a word of warning of residuals that a lost worker takes along (R11) and of unbiased sketches (R12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from offbeat import (
    ASP,
    GRBS,
    SSP,
    BatchTuning,
    Cast,
    Dense,
    Elastic,
    ErrorFeedback,
    ErrorReset,
    KSync,
    LocalSGD,
    ParameterServer,
    Plan,
    PowerSGD,
    ProcessGroup,
    RandomK,
    RoundRobin,
    Switch,
    TopK,
)
from offbeat.errors import PlanError
from offbeat.robust import FLTrust, Krum, MeaMed, Median, MultiKrum, Phocas, TrimmedMean, ZenoPS

SERVER, TUNED = ParameterServer(), BatchTuning()
COORDINATES = (Median(), TrimmedMean(1), Phocas(1), MeaMed(1))


@dataclass(frozen=True)
class Refusal:
    """Parts that cannot be, what is said, and what is advised.

    Args:
        code: of the design.
        parts: of the plan.
        says: the whole message.
        instead: parts in place of those, for each way out.
    """

    code: str
    parts: dict[str, Any]
    says: str
    instead: tuple[dict[str, Any], ...]


def refusal(code: str, parts: dict[str, Any], says: str, *instead: dict[str, Any]) -> Any:
    names = "-".join(type(part).__name__ for part in parts.values())
    return pytest.param(Refusal(code, parts, says, instead), id=f"{code}-{names}")


REFUSALS = [
    *(
        refusal(
            "R4",
            {"codec": codec, "fabric": SERVER, "rule": Median()},
            f"Cannot use {codec!r} on {SERVER!r}: it needs Gather, this fabric carries only Sum. Use a codec of that "
            "kind, or a fabric that carries it, such as ProcessGroup() - at `plan.codec`.",
            {"codec": Dense()},
            {"fabric": ProcessGroup(), "rule": None},
        )
        for codec in (TopK(0.1), RandomK(0.1, support="private"))
    ),
    refusal(
        "R5",
        {"codec": TopK(0.1), "fabric": SERVER, "rule": Krum(1)},
        f"Cannot use TopK(ratio=0.1) on {SERVER!r}: it needs Gather, this fabric carries only Sum. Use a codec of that "
        "kind, or a fabric that carries it, such as ProcessGroup() - at `plan.codec`.",
        {"fabric": ProcessGroup(), "rule": None},
    ),
    *(
        refusal(
            "R5b",
            {"fabric": SERVER, "rule": rule},
            f"Cannot combine by {rule!r}: it compares whole contributions, and each shard has blocks of them: use "
            "Median(), TrimmedMean(...), Phocas(...) or MeaMed(...), which look at each coordinate - at `plan.rule`.",
            *({"rule": other} for other in COORDINATES),
        )
        for rule in (MultiKrum(1), FLTrust())
    ),
    *(
        refusal(
            "R8",
            {"sync": policy, "fabric": SERVER, "rule": Median()},
            f"Cannot combine by Median(): with {policy!r} an update is of one worker, and there is nobody to compare "
            "it with: use BSP(), KSync(k) or LocalSGD(...) - at `plan.rule`.",
            {"sync": KSync(2)},
            {"sync": LocalSGD(8)},
        )
        for policy in (ASP(), SSP(4), RoundRobin(), KSync(1))
    ),
    refusal(
        "R9",
        {"fabric": SERVER, "rule": ZenoPS()},
        "Cannot combine by ZenoPS(eta=-0.001, rho=0.6): it compares whole contributions, and each shard has blocks of "
        "them: use Median(), TrimmedMean(...), Phocas(...) or MeaMed(...), which look at each coordinate - at "
        "`plan.rule`.",
        {"rule": Median()},
    ),
    refusal(
        "R10",
        {"sync": ASP(), "codec": ErrorReset(every=8), "fabric": SERVER},
        f"Cannot use {ErrorReset(every=8)!r} on {SERVER!r}: what is not sent is kept in each worker's own parameters, "
        "and this fabric's server has others for all. Use ProcessGroup() or Elastic(), or ErrorFeedback(...) - at "
        "`plan.codec`.",
        {"codec": ErrorFeedback(Cast())},
        {"sync": LocalSGD(8), "codec": ErrorReset(), "fabric": ProcessGroup()},
        {"sync": LocalSGD(8), "codec": ErrorReset(), "fabric": Elastic()},
    ),
    refusal(
        "R10",
        {"sync": KSync(2), "codec": ErrorReset(every=8), "fabric": Switch()},
        f"Cannot use {ErrorReset(every=8)!r} on {Switch()!r}: a switch adds float32: use Dense(), since all else would "
        "go around it - at `plan.codec`.",
        {"codec": Dense()},
    ),
    *(
        refusal(
            "R14",
            {"fabric": fabric, "rule": Median()},
            f"Cannot combine by Median(): on {fabric!r} contributions are added on their way, and nobody sees one by "
            "itself: use fabric=ParameterServer() - at `plan.rule`.",
            {"fabric": SERVER},
        )
        for fabric in (ProcessGroup(), Elastic(), Switch())
    ),
    refusal(
        "R17",
        {"codec": PowerSGD(), "fabric": Elastic()},
        "Cannot use PowerSGD(rank=4) on Elastic(): all workers go on from what each exchange left, and one that joins "
        "later has none of it. Use ProcessGroup(), or a codec that keeps nothing in common, such as "
        "ErrorFeedback(GRBS(32)) - at `plan.codec`.",
        {"fabric": ProcessGroup()},
        {"codec": ErrorFeedback(GRBS(32))},
    ),
    refusal(
        "R17",
        {"sync": ASP(), "codec": PowerSGD(), "fabric": SERVER},
        f"Cannot use PowerSGD(rank=4) on {SERVER!r}: it sends 2 rounds, and a push is one dense sum for each bucket. "
        "Use Dense() or Cast(), or ProcessGroup() - at `plan.codec`.",
        {"codec": Dense()},
        {"codec": Cast()},
    ),
    refusal(
        "R20",
        {"fabric": SERVER, "rule": Median(), "tuning": TUNED},
        f"Cannot combine by Median(): it counts all workers alike, and with {TUNED!r} their batches are not: use "
        "tuning=None - at `plan.rule`.",
        {"tuning": None},
    ),
]


@pytest.mark.parametrize("one", REFUSALS)
def test_what_cannot_be_is_said_word_for_word(one: Refusal) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**one.parts)
    assert str(caught.value) == one.says


@pytest.mark.parametrize("one", REFUSALS)
def test_what_is_advised_can_be(one: Refusal) -> None:
    assert one.instead
    for parts in one.instead:
        Plan(**{**one.parts, **parts}).check_world(8)


@pytest.mark.parametrize(
    ("parts", "world", "says", "instead", "workers"),
    [
        (
            {"rule": TrimmedMean(2)},
            4,
            "TrimmedMean(faulty=2) needs at least 5 contributions, and there are 4. Use faulty=1, or more workers",
            {"rule": TrimmedMean(1)},
            5,
        ),
        (
            {"rule": TrimmedMean(1), "sync": KSync(2)},
            9,
            "TrimmedMean(faulty=1) needs at least 3 contributions, and there are 2. Use more workers, or Median()",
            {"rule": Median()},
            None,
        ),
        (
            {"rule": Phocas(1), "sync": LocalSGD(8)},
            2,
            "Phocas(faulty=1) needs at least 3 contributions, and there are 2. Use more workers, or Median()",
            {"rule": Median()},
            3,
        ),
    ],
    ids=["BSP", "KSync", "LocalSGD"],
)
def test_fewer_than_a_rule_needs_are_refused_once_the_world_is_known(
    parts: dict[str, Any], world: int, says: str, instead: dict[str, Any], workers: int | None
) -> None:
    """R7; that of an update that has fewer while it trains is in tests of the server's aggregator."""
    plan = Plan(fabric=SERVER, **parts)
    with pytest.raises(PlanError) as caught:
        plan.check_world(world)
    assert str(caught.value) == f"Cannot combine: {says} - at `plan.rule`."
    Plan(fabric=SERVER, **{**parts, **instead}).check_world(world)
    if workers is not None:
        plan.check_world(workers)
