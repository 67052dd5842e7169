"""What may not be composed: each refusal word for word, and that what it advises can be made.

The codes are those of the design. There is no refusal yet of joint codes (R1 to R3), of optimizers that are not linear
(R18) and of parameters that are sharded (R21), since there is none of it. That a lost worker takes a residual along
(R11) is said when it happens (`tests/training/test_worker_loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from offbeat import (
    ASP,
    GRBS,
    QSGD,
    SSP,
    BatchTuning,
    Carry,
    Dense,
    Elastic,
    ErrorFeedback,
    ErrorReset,
    GaussianMechanism,
    KSync,
    LocalSGD,
    LookAhead,
    ParameterServer,
    Plan,
    PowerSGD,
    ProcessGroup,
    RandomK,
    RoundRobin,
    Sign,
    Switch,
    TopK,
)
from offbeat.errors import PlanError
from offbeat.robust import FLTrust, GeometricMedian, Krum, MeaMed, Mean, Median, MultiKrum, Phocas, TrimmedMean, ZenoPS
from offbeat.short_name import short_name

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
            code,
            {"codec": codec, "fabric": SERVER, "rule": rule},
            f"Cannot combine by {short_name(rule)}: with {short_name(codec)} each worker sends other elements, and "
            "what is compared is which: use a codec whose elements are the same on all workers, such as GRBS(32), or "
            "Mean() - at `plan.rule`.",
            {"codec": ErrorFeedback(GRBS(32))},
            {"rule": Mean()},
        )
        for code, rule in (("R4", Median()), ("R5", Krum(1)))
        for codec in (TopK(0.1), RandomK(0.1, support="private"))
    ),
    refusal(
        "R5b",
        {"sync": LocalSGD(8), "codec": Carry(TopK(0.1)), "fabric": SERVER, "validator": ZenoPS()},
        f"Cannot judge by {short_name(ZenoPS())}: with {short_name(Carry(TopK(0.1)))} a contribution and its "
        "reference are of different elements: use a codec whose elements are the same on all workers, such as "
        "GRBS(32) - at `plan.validator`.",
        {"codec": Carry(GRBS(32))},
    ),
    refusal(
        "R6",
        {"codec": ErrorFeedback(Sign()), "fabric": SERVER, "validator": ZenoPS()},
        f"Cannot judge by {short_name(ZenoPS())}: with {short_name(ErrorFeedback(Sign()))} all contributions are "
        "equally long, whatever they were made of: use GRBS(32) or QSGD(8), or FLTrust(), which goes by the angle "
        "alone - at `plan.validator`.",
        {"codec": ErrorFeedback(GRBS(32))},
        {"codec": QSGD(8)},
        {"validator": FLTrust()},
    ),
    *(
        refusal(
            "R16",
            {"codec": ErrorFeedback(GRBS(32)), "fabric": SERVER, "validator": rule, "privacy": GaussianMechanism()},
            f"Cannot use {short_name(rule)} with privacy={short_name(GaussianMechanism())}: with "
            f"{short_name(ErrorFeedback(GRBS(32)))} noise of earlier contributions is sent with later ones, and "
            "nobody knows of how many: use a codec without a residual, such as Dense() or GRBS(4) - at "
            "`plan.validator`.",
            {"codec": Dense()},
            {"codec": GRBS(4)},
            {"privacy": None},
        )
        for rule in (ZenoPS(), FLTrust())
    ),
    *(
        refusal(
            "R8",
            {"sync": policy, "fabric": SERVER, "rule": Median()},
            f"Cannot combine by Median(): with {short_name(policy)} an update is of one worker, and there is nobody "
            "to compare it with: use BSP(), KSync(k) or LocalSGD(...) - at `plan.rule`.",
            {"sync": KSync(2)},
            {"sync": LocalSGD(8)},
        )
        for policy in (ASP(), SSP(4), RoundRobin(), KSync(1))
    ),
    *(
        refusal(
            "R9",
            {"fabric": SERVER, "rule": rule},
            f"Cannot combine by {short_name(rule)}: it compares contributions with a reference on trusted data, which "
            "only a validator can bring: give it as validator=, or use Median(), MultiKrum(...) or "
            "GeometricMedian(), which compare them with each other - at `plan.rule`.",
            {"rule": None, "validator": rule},
            *({"rule": other} for other in (*COORDINATES, MultiKrum(1), GeometricMedian())),
        )
        for rule in (FLTrust(), ZenoPS())
    ),
    refusal(
        "R10",
        {"sync": LocalSGD(8, policy=ASP()), "codec": ErrorReset(), "fabric": SERVER},
        f"Cannot use {short_name(ErrorReset())} with {short_name(LocalSGD(8, policy=ASP()))}: a reset is of what all "
        "workers have at one version, and with this policy they have different ones. Use "
        f"LookAhead({short_name(GRBS(8))}) or Carry({short_name(GRBS(8))}) - at `plan.codec`.",
        {"codec": LookAhead(GRBS(8))},
        {"codec": Carry(GRBS(8))},
    ),
    refusal(
        "R10",
        {"sync": ASP(), "codec": ErrorReset(), "fabric": SERVER},
        f"Cannot use {short_name(ErrorReset())} with ASP() on {short_name(SERVER)}: what is not sent of a worker's "
        "own steps stays in its parameters, and here the server's optimizer steps. Use sync=LocalSGD(8), or "
        "LocalSGD(8, policy=ASP()) to wait for nobody, or ErrorFeedback(...) - at `plan.codec`.",
        {"sync": LocalSGD(8)},
        {"sync": LocalSGD(8, policy=ASP()), "codec": Carry(GRBS(8))},
        {"codec": ErrorFeedback(GRBS(8))},
    ),
    refusal(
        "R10",
        {"sync": ASP(), "codec": LookAhead(GRBS(8)), "fabric": SERVER},
        f"Cannot use {short_name(LookAhead(GRBS(8)))} with ASP() on {short_name(SERVER)}: what is not sent of a "
        "worker's own steps stays in its parameters, and here the server's optimizer steps. Use sync=LocalSGD(8), or "
        "LocalSGD(8, policy=ASP()) to wait for nobody, or ErrorFeedback(...) - at `plan.codec`.",
        {"sync": LocalSGD(8)},
        {"sync": LocalSGD(8, policy=ASP())},
        {"codec": ErrorFeedback(GRBS(8))},
    ),
    refusal(
        "R10",
        {"sync": KSync(2), "codec": ErrorReset(every=8), "fabric": Switch()},
        f"Cannot use {short_name(ErrorReset(every=8))} on {short_name(Switch())}: a switch adds float32: use Dense(), "
        "since all else would go around it - at `plan.codec`.",
        {"codec": Dense()},
    ),
    *(
        refusal(
            "R14",
            {"fabric": fabric, "rule": Median()},
            f"Cannot combine by Median(): on {short_name(fabric)} contributions are added on their way, and nobody "
            "sees one by itself: use fabric=ParameterServer() - at `plan.rule`.",
            {"fabric": SERVER},
        )
        for fabric in (ProcessGroup(), Elastic(), Switch())
    ),
    refusal(
        "R17",
        {"codec": PowerSGD(), "fabric": Elastic()},
        "Cannot use PowerSGD() on Elastic(): all workers go on from what each exchange left, and one that joins "
        "later has none of it. Use ProcessGroup(), or a codec that keeps nothing in common, such as "
        "ErrorFeedback(GRBS(32)) - at `plan.codec`.",
        {"fabric": ProcessGroup()},
        {"codec": ErrorFeedback(GRBS(32))},
    ),
    refusal(
        "R17",
        {"sync": ASP(), "codec": PowerSGD(), "fabric": SERVER},
        f"Cannot use PowerSGD() on {short_name(SERVER)}: it sends 2 rounds, and a push is one. Use a codec of "
        "one round, such as GRBS(32), TopK(0.01) or QSGD(8), or ProcessGroup() - at `plan.codec`.",
        {"codec": GRBS(32)},
        {"codec": TopK(0.01)},
        {"codec": QSGD(8)},
    ),
    refusal(
        "R20",
        {"fabric": SERVER, "rule": Median(), "tuning": TUNED},
        f"Cannot combine by Median(): it counts all workers alike, and with {short_name(TUNED)} their batches are "
        "not: use tuning=None - at `plan.rule`.",
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


def test_what_is_right_on_average_alone_is_warned_of() -> None:
    """R12: an unbiased sketch of a large variance, without feedback."""
    assert Plan(codec=RandomK(0.1, is_unbiased=True)).caution == (
        "RandomK(ratio=0.1, is_unbiased=True) sends what is right on average, and up to 3 times the gradient's norm "
        "beside it, as noise that no residual makes up for. Use a codec that sends more, or ErrorFeedback(...) around "
        "one that is biased - at `plan.codec`."
    )
    for quiet in (RandomK(0.2, is_unbiased=True), RandomK(0.01), ErrorFeedback(RandomK(0.01)), TopK(0.01)):
        assert Plan(codec=quiet).caution == ""
