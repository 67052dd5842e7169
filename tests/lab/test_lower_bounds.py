"""The least time per step, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import RESULTS, measured
from offbeat.lab import lower_bounds, results
from offbeat.lab.jobs import jobs
from offbeat.lab.results import RawRun
from offbeat.scenario import Replay, Scenario

TEXT = """
[scenario]
name = "limits"
[hosts]
count = 8
servers = {servers}
rate_mbps = 200
[workload]
kind = "replay"
profile = "resnet50"
[[row]]
name = "ddp"
system = "ddp"
"""
D_S = 0.05  # 1.25 MB at 200 Mbit/s
SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
RAW = {
    "row": "ddp", "repeat": 0, "rank": 0, "host": "h0", "step_s": [1.0], "wait_s": [0.5], "bytes_sent": 1, "samples": 1,
    "gradient_bytes": 1_250_000, "compute_s": 0.01, "digest": "", "gradient_error": None, "metrics": [], "notes": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("servers", "compute_s", "together", "wanted_s"),
    [
        (1, 0.4, True, 0.4 + 8 * D_S),
        (1, 0.4, False, 0.4 + D_S),
        (1, 0.1, False, 8 * D_S),
        (2, 0.4, True, 0.4 + 4 * D_S),
        (2, 0.1, False, 4 * D_S),
    ],
)
def test_a_server(servers: int, compute_s: float, together: bool, wanted_s: float) -> None:
    scenario = Scenario.from_toml(TEXT.format(servers=servers))
    limit_s, words = lower_bounds.served(scenario, compute_s=compute_s, size_bytes=1.25e6, workers=8, together=together)
    assert limit_s == pytest.approx(wanted_s)
    assert words == (lower_bounds.TOGETHER if together else lower_bounds.ONE_BY_ONE)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("compute_s", "wanted_s"), [(8.5 * D_S, 8.5 * D_S), (0.1, 8 * D_S)])
def test_a_server_whose_links_work_while_workers_compute(compute_s: float, wanted_s: float, together: bool) -> None:
    scenario = Scenario.from_toml(TEXT.format(servers=1))
    limit_s, words = lower_bounds.served(
        scenario, compute_s=compute_s, size_bytes=1.25e6, workers=8, together=together, overlaps=True
    )
    assert limit_s == pytest.approx(wanted_s)
    assert words == lower_bounds.OVERLAPPED


@pytest.mark.parametrize(("compute_s", "wanted_s"), [(0.4, 0.4), (0.01, 2 * 7 / 8 * D_S)])
def test_a_ring(compute_s: float, wanted_s: float) -> None:
    workers = Scenario.from_toml(TEXT.format(servers=1)).workers
    assert lower_bounds.allreduce(workers, compute_s=compute_s, size_bytes=1.25e6)[0] == pytest.approx(wanted_s)


RING_S = 2 * 7 / 8 * D_S
SERVED = 'fabric = { kind = "ParameterServer" }'
STOPPED = '[[fault]]\nworker = 2\nstep = 10\nkind = "sigstop"\nseconds = 20'
# 5 steps to warm up, then 10 as at the beginning, 10 at half of the rate, and 20 at four times of it.
RATES = "".join(
    f'[[fault]]\nworker = 0\nstep = {step}\nkind = "rate"\nto_mbps = {rate}\ntarget = "TARGET"\n'
    for step, rate in ((14, 100), (24, 800))
)


@pytest.mark.parametrize(
    ("row", "fault", "wanted_s"),
    [
        ('system = "ddp"', "", RING_S),
        ('system = "ddp+bf16"', "", RING_S / 2),
        ('system = "ddp+powersgd"', "", 0.01),
        ('system = "offbeat"', "", RING_S),
        ('system = "offbeat"\nplan = { codec = { kind = "Cast" } }', "", RING_S / 2),
        ('system = "offbeat"\nplan = { sync = { kind = "LocalSGD", every = 4 } }', "", RING_S / 4),
        # A quarter of the model after every second step.
        ('system = "offbeat"\nplan = { sync = { kind = "LocalSGD", every = 8, fragments = 4 } }', "", RING_S / 8),
        # All of a server's parameters come back in every step, however narrow a contribution is.
        (f'system = "offbeat"\nplan = {{ codec = {{ kind = "Cast" }}, {SERVED} }}', "", 0.01 + 8 * D_S),
        (f'system = "offbeat"\nplan = {{ sync = {{ kind = "LocalSGD", every = 4 }}, {SERVED} }}', "", 0.01 + 2 * D_S),
        # While another policy may decide, the least of what any of them demands.
        (f'system = "offbeat"\nplan = {{ controller = {{ kind = "WaitThreshold" }}, {SERVED} }}', "", 8 * D_S),
        # Who is stopped for long is not waited for, where others can go on.
        (f'system = "offbeat"\nplan = {{ {SERVED} }}', STOPPED, 0.01 + 7 * D_S),
        ('system = "ddp"', STOPPED, RING_S),
        # What links carry in each step counts there; that of one worker's decides for all.
        ('system = "ddp"', RATES.replace("TARGET", "workers"), RING_S * (10 + 10 * 2 + 20 / 4) / 40),
        (
            f'system = "offbeat"\nplan = {{ {SERVED} }}',
            RATES.replace("TARGET", "server"),
            0.01 + 8 * D_S * (10 + 10 * 2 + 20 / 4) / 40,
        ),
    ],
)
def test_a_row_is_bounded_by_what_it_sends(tmp_path: Path, row: str, fault: str, wanted_s: float) -> None:
    text = TEXT.format(servers=1).replace('system = "ddp"', f"{row}\n{fault}\n[run]\nsteps = 40")
    (job,) = jobs(Scenario.from_toml(text), tmp_path)
    raw = [RawRun(**(RAW | {"rank": rank})) for rank in range(8)]  # type: ignore[arg-type]
    assert lower_bounds.limit(job, raw)[0] == pytest.approx(wanted_s)


GRAPH = '[topology]\nkind = "{kind}"\ndims = {dims}\nrate_mbps = 200'


@pytest.mark.parametrize(
    ("kind", "dims", "rows", "wanted_s"),
    [
        ("torus", [4, 4], "", 30 / 64 * D_S),
        ("mesh", [4, 4], "", 30 / 48 * D_S),  # gathering only what has been summed takes 15 / 16
        ("ring", [4], "", 6 / 8 * D_S),
        # From the middle on one link carries a quarter.
        (
            "ring",
            [4],
            '[[fault]]\nworker = 0\nstep = 24\nkind = "rate"\nto_mbps = 50\nlink = ["h0", "h1"]',
            (6 / 8 + 6 / 6.5) / 2 * D_S,
        ),
        # What ends forwards all the same, and has nothing to send.
        ("ring", [4], '[[fault]]\nworker = 2\nstep = 10\nkind = "sigkill"', 4 / 6 * D_S),
        ("ring", [4], '[[host]]\nname = "h3"\nrole = "server"', 4 / 6 * D_S),
    ],
)
def test_beside_one_switch_cuts_decide(tmp_path: Path, kind: str, dims: list[int], rows: str, wanted_s: float) -> None:
    text = TEXT.replace("[hosts]\ncount = 8\nservers = {servers}\nrate_mbps = 200", GRAPH.format(kind=kind, dims=dims))
    row = 'system = "offbeat"\nplan = { fabric = { kind = "Elastic" } }' if "sigkill" in rows else 'system = "ddp"'
    scenario = Scenario.from_toml(text.replace('system = "ddp"', f"{row}\n{rows}\n[run]\nsteps = 40"))
    (job,) = jobs(scenario, tmp_path)
    raw = [RawRun(**(RAW | {"rank": rank})) for rank in range(len(scenario.workers.hosts))]  # type: ignore[arg-type]
    limit_s, words = lower_bounds.limit(job, raw)
    assert limit_s == pytest.approx(wanted_s, rel=1e-3)
    assert words == lower_bounds.CUTS


def test_all_goes_through_the_links_of_a_server(tmp_path: Path) -> None:
    """Two in a ring, of which one carries less back."""
    graph = GRAPH.format(kind="ring", dims=[4]) + '\n[[link]]\na = "h3"\nb = "h0"\nback_mbps = 100'
    text = TEXT.replace("[hosts]\ncount = 8\nservers = {servers}\nrate_mbps = 200", graph)
    text = text.replace('system = "ddp"', f'system = "offbeat"\nplan = {{ {SERVED} }}')
    scenario = Scenario.from_toml(f'{text}\n[[host]]\nname = "h3"\nrole = "server"\n[run]\nbaseline = "ddp"')
    (job,) = jobs(scenario, tmp_path)
    raw = [RawRun(**(RAW | {"rank": rank})) for rank in range(3)]  # type: ignore[arg-type]
    limit_s, words = lower_bounds.limit(job, raw)
    assert limit_s == pytest.approx(0.01 + 3 * D_S * 200 / 300)
    assert words == lower_bounds.TOGETHER


@pytest.mark.parametrize("name", measured())
def test_no_row_that_was_measured_passes_its_limit(name: str) -> None:
    """And each file says what follows from its raw records: `python -m benchmarks.limits` writes it."""
    report = results.read(RESULTS / f"{name}.json")
    # A script's step is stretched to a time by a pause, in which backward counts for what it took before training:
    # where nothing is waited for, that is what a step is off by.
    most = 100 if isinstance(Scenario.from_toml(report.scenario).workload, Replay) else 101
    assert {row.row: row.percent_of_bound for row in report.rows if row.percent_of_bound > most} == {}
    again = lower_bounds.again(report, jobs(Scenario.from_toml(report.scenario), SCENARIOS))
    assert again.bounds == report.bounds, "run `make limits`"
    for row, found in zip(report.rows, again.rows, strict=True):
        assert row.bound_s == pytest.approx(found.bound_s)
        assert row.percent_of_bound == pytest.approx(found.percent_of_bound)
