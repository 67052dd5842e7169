"""What a repeat amounts to, and what rows of a file can be compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import claims, page
from benchmarks.claims import Claim
from offbeat.lab import results
from offbeat.lab.result_table import table
from offbeat.lab.results import LinkUse, ResultFile
from offbeat.lab.run_result import Reached, RunResult, behind_faults, reached, repeats
from offbeat.scenario import Scenario
from tests.lab.test_results import raw

MNIST = results.read(Path(__file__).parent.parent.parent / "benchmarks/results/mnist.json")
TEXT = """
[scenario]
name = "race"
[hosts]
count = 2
servers = 1
rate_mbps = 100
[workload]
kind = "script"
path = "work.py"
target = 2.0
better = "lower"
[run]
baseline = "slow"
[[row]]
name = "slow"
system = "ddp"
[[row]]
name = "fast"
system = "offbeat"
plan = { fabric = { kind = "ParameterServer" } }
"""


def ran(row: str, factor: float, *, metric: float = 2.0) -> list[Any]:
    """Three repeats that take `factor` times as long as 1, 2 and 4 s per step, and reach 2.0 after 8 of 2 + 8 steps."""
    metrics = {"metrics": [(1.0, 3.0), (factor * 8.0, metric)], "metric_steps": [4, 8]}
    return [
        raw(row, index, rank, factor * step_s, **(metrics if rank == 0 else {}))
        for index, step_s in enumerate((1.0, 2.0, 4.0))
        for rank in range(2)
    ]


def report(**changes: Any) -> ResultFile:
    """`fast` takes half as long as `slow`."""
    rows = [
        msgspec.structs.replace(
            MNIST.rows[0], row=row, plan=plan, baseline="slow", time_to_target_s=1.0, final_metric=metric
        )
        for row, plan, metric in (("slow", "DistributedDataParallel", 1.9), ("fast", "ParameterServer()", 1.8))
    ]
    values = {"name": "race", "scenario": TEXT, "rows": rows, "raw": ran("slow", 1.0) + ran("fast", 0.5)}
    return msgspec.structs.replace(MNIST, **(values | changes))


def test_the_target_may_lie_below() -> None:
    first = repeats(report(), "fast")[0]
    # 1000 and 1001 bytes in 2 steps.
    assert first.reached(Scenario.from_toml(TEXT).workload) == Reached(8, 4.0, 1000.5 / 2 * 8)
    assert reached(report(), "slow") == Reached(8, 8.0, 4002.0)
    assert reached(report(raw=ran("slow", 1.0, metric=2.1) + ran("fast", 0.5)), "slow") is None


def test_workers_of_unequal_pace_add_up() -> None:
    workers = [raw("a", 0, 0, 1.0), raw("a", 0, 1, 2.0)]  # two steps of 4 samples each
    assert RunResult(workers).samples_per_s == 4 / 1.0 + 4 / 2.0


def test_steps_are_told_apart_by_the_faults_they_follow() -> None:
    faults = "".join(f'[[fault]]\nworker = 0\nstep = {step}\nkind = "sigstop"\nseconds = 1\n' for step in (2, 4, 6, 4))
    text = TEXT.replace("[[row]]", f"{faults}[[row]]", 1)
    taken = [[1.0] * 1 + [3.0] * 5, [1.0] * 1 + [5.0] * 5]  # behind 5 steps of warming up
    slow = [msgspec.structs.replace(raw("slow", 0, rank, 1.0), step_s=step_s) for rank, step_s in enumerate(taken)]
    fast = [msgspec.structs.replace(one, row="fast", step_s=[step / 2 for step in one.step_s]) for one in slow]
    made = report(scenario=text, raw=slow + fast)
    assert behind_faults(made, "slow") == {4: 1.0, 6: 4.0}, "nobody's steps are measured between 2 and 4"
    claim = Claim(claims.BESIDE_BEST, "slow", at_most=1.1)
    assert (claim.measured(made), claim.met(made)) == (2.0, False)
    assert Claim(claims.BESIDE_BEST, "fast", at_most=1.1).met(made)
    assert claim.measured(report()) is None, "without a fault"


@pytest.mark.parametrize(
    ("errors", "value", "met"), [((0.05, 0.2), 0.125, False), ((0.04, 0.1), 0.07, True), ((0.05, None), None, False)]
)
def test_ends_of_blocks_are_claimed_where_all_workers_have_told(
    errors: tuple[float | None, ...], value: float | None, met: bool
) -> None:
    told = [msgspec.structs.replace(raw("fast", 0, i, 1.0), block_end_error=one) for i, one in enumerate(errors)]
    claim, made = Claim(claims.BLOCK_ENDS, "fast", at_most=0.1), report(raw=ran("slow", 1.0) + told)
    assert claim.measured(made) == (None if value is None else pytest.approx(value))
    assert claim.met(made) == met


@pytest.mark.parametrize(
    ("claim", "value", "met"),
    [
        (Claim(claims.TIME, "fast", "slow", at_most=0.5), 0.5, True),
        (Claim(claims.TIME, "slow", "fast", at_most=1.9), 2.0, False),
        (Claim(claims.THROUGHPUT, "fast", "slow", at_least=2.0), 2.0, True),
        (Claim(claims.THROUGHPUT, "fast", "slow", at_least=2.1), 2.0, False),
        (Claim(claims.TO_TARGET, "fast", "slow", at_most=0.8), 0.5, True),
        (Claim(claims.BYTES, "fast", "slow", at_most=0.2), 1.0, False),
        (Claim(claims.POINTS, "fast", "slow", at_least=-0.05), -0.1, False),
        (Claim(claims.STALEST, "fast", at_most=0), 0.0, True),
        (Claim(claims.NEVER, "", at_most=0), 0.0, True),
        (Claim(claims.WAITING, "fast", at_most=0.05), 0.99, False),
        (Claim(claims.UNEVEN, "fast", "slow", at_most=0.5), None, False),
        (Claim(claims.TIME, "lost", "slow", at_most=1.0), None, False),
    ],
)
def test_claims_are_judged(claim: Claim, value: float | None, met: bool) -> None:
    assert claim.measured(report()) == (None if value is None else pytest.approx(value))
    assert claim.met(report()) is met


def test_a_target_that_was_missed_once_is_no_time() -> None:
    missed = ran("fast", 0.5)
    missed[2] = msgspec.structs.replace(missed[2], metrics=[(1.0, 3.0)], metric_steps=[4])
    late = report(raw=ran("slow", 1.0) + missed)
    assert Claim(claims.TO_TARGET, "fast", "slow", at_most=9.0).measured(late) is None
    assert Claim(claims.NEVER, "", at_most=0).measured(late) == 1.0


def test_ideal_workers_are_as_fast_as_the_fastest() -> None:
    replay = TEXT.replace('kind = "script"\npath = "work.py"\ntarget = 2.0\nbetter = "lower"', 'kind = "replay"')
    replay = replay.replace('kind = "replay"', 'kind = "replay"\nprofile = "resnet50"\nbatch = 4')
    # Two workers of 4 samples in 2 s each, in the middle repeat; the fastest alone takes 0.01 s for 4.
    claim = Claim(claims.IDEAL, "slow", "0.5", at_least=0.9)
    assert claim.measured(report(scenario=replay)) == pytest.approx(2 * 4 / 2.0 / (0.5 * 4 / 0.01))


def test_a_schedule_has_followed_a_rate_if_it_is_near_the_bound_twenty_steps_later() -> None:
    """Two workers, whose gradient of 1 MB takes 0.1 s at 80 Mbit/s and more at 40: what is sent bounds a step."""
    replay = TEXT.replace('kind = "script"\npath = "work.py"\ntarget = 2.0\nbetter = "lower"', 'kind = "replay"')
    layer = '[[workload.layer]]\nname = "one"\nshapes = [[250000]]\nbackward_s = 0.01\n'
    fault = '[[fault]]\nworker = 0\nstep = 4\nkind = "rate"\nto_mbps = 40\ntarget = "workers"\n'
    text = replay.replace("rate_mbps = 100", "rate_mbps = 80").replace("[run]", f"{layer}{fault}[run]\nsteps = 30")
    raws = [msgspec.structs.replace(one, step_s=[9.0] * 20 + [0.25] * 10) for one in ran("fast", 1.0)]
    followed = Claim(claims.FOLLOWED, "fast", at_least=0.9)
    value = followed.measured(report(scenario=text, raw=raws))
    assert value == pytest.approx(0.21 / 0.25, rel=0.06), "0.2 s at 95 % of the rate; the first steps do not count"
    assert followed.measured(report(scenario=text.replace(fault, ""), raw=raws)) is None, "without such a fault"


def test_weights_are_the_same_in_each_repeat_or_not() -> None:
    same = Claim(claims.SAME, "fast", "slow", at_least=1)
    raws = [msgspec.structs.replace(one, digest=f"{one.repeat}") for one in ran("slow", 1.0) + ran("fast", 0.5)]
    assert same.met(report(raw=raws))
    assert "same weights, bit for bit, of fast as of slow: at least 1" in same.words
    raws[-1] = msgspec.structs.replace(raws[-1], rank=0, digest="other")
    raws[-2] = msgspec.structs.replace(raws[-2], rank=1)
    assert same.measured(report(raw=raws)) == pytest.approx(2 / 3)


def test_evenness_is_that_of_the_links() -> None:
    use = LinkUse(
        row="slow",
        host="s0",
        rate_mbps=100,
        repeat=0,
        interval_s=0.05,
        received_bytes=[],
        sent_bytes=[],
        share=0.5,
        variation=1.0,
        idle_share=0.5,
    )
    links = [use, msgspec.structs.replace(use, row="fast", variation=0.25)]
    assert Claim(claims.UNEVEN, "fast", "slow", at_most=0.5).measured(report(links=links)) == 0.25


def test_the_page_says_whether_the_server_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [msgspec.structs.replace(one, row="ddp") for one in report().rows[:1]] + report().rows[1:]
    text = TEXT.replace('"slow"', '"ddp"')
    made = report(rows=named, raw=ran("ddp", 1.0) + ran("fast", 0.5), scenario=text)
    monkeypatch.setitem(claims.CLAIMS, "race", (Claim(claims.TIME, "fast", "ddp", at_most=0.4),))
    shown = page.section(made)
    assert "By time to target, faster than ddp: fast (0.50 x)." in shown
    assert "* time per step of fast: at most 0.40 x ddp's. Measured: **0.500 x** (missed)." in shown
    slower = page.section(msgspec.structs.replace(made, raw=ran("ddp", 1.0, metric=2.1) + ran("fast", 1.5)))
    assert "By time per step, slower than ddp: fast (1.50 x)." in slower


def test_a_race_shows_what_the_target_took() -> None:
    headings, rows = table(report())
    assert headings[-4:] == ["steps to target", "s to target", "MB to target", "final"]
    assert rows[1][-4:] == ["8", "4.00", "0.00", "1.8000"]
    assert "min" not in headings
