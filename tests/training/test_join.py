"""Workers that join a job without a server while it trains: equal to the bit, and each sample is computed once."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait
from offbeat.engine import ControlGroup, JobInfo, JoinCheck, JoinClient, JoinServer
from offbeat.errors import DisagreementError, ModelError, PlanError
from offbeat.fabric import BindContext, ElasticGroup, InMemory
from tests.patience import stretched
from tests.stalled_thread import stall
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.batching import Keeps
    from offbeat.scheduling import Scheduler
    from offbeat.sync import Policy

SAMPLES, EPOCHS = 1600, 2
TIMEOUT = timedelta(seconds=3)


class Trained(NamedTuple):
    """What one worker did.

    Args:
        digests: of parameters and buffers, by step.
        used: samples by epoch.
        sizes: of its batches, by step.
        longest_s: of its steps.
        said: what people were told.
    """

    digests: dict[int, str]
    used: list[list[int]]
    sizes: dict[int, int]
    longest_s: float
    said: list[str]


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + stretched(30)
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} never came"
        time.sleep(0.01)


def digest(module: nn.Module) -> str:
    tensors = (*module.parameters(), *module.buffers())
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def rank_here() -> int:
    return int(os.environ["RANK"])


def train(
    folder: str,
    starts: dict[int, int],
    kills: dict[int, int],
    keeps: Keeps,
    num_workers: int,
    sync: Policy | None,
    scheduling: Scheduler | None = None,
    in_flight: bool = False,
    over: offbeat.Routed | None = None,
) -> Trained:
    """Train to the end of the epochs; behind each step all ask each other for more, and evaluate now and then.

    Args:
        starts: at which step of the first worker each newcomer starts.
        kills: at which step each of these is killed; it writes down before which samples it has used.
        over: what carries the sums; None for torch's groups.
        in_flight: some of that step's blocks are on their way for ever, so that it is in no step; nobody waits for it.
    """
    said, here = listen(), Path(folder)
    if rank_here() in starts:
        wait_for(here / f"step-{starts[rank_here()]}")
    plan = offbeat.Plan(sync=sync or offbeat.BSP(), fabric=offbeat.Elastic(over), keeps=keeps, scheduling=scheduling)
    run = offbeat.init(plan, timeout=TIMEOUT)
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(1, 20), nn.BatchNorm1d(20), nn.Linear(20, 1))
    samples = TensorDataset(torch.arange(SAMPLES).float()[:, None])
    data = DataLoader(samples, batch_size=10, shuffle=True, num_workers=num_workers)
    prepared, optimizer, loader = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), data)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    trained = Trained({}, [list[int]() for _ in range(EPOCHS)], {}, 0.0, said)
    longest_s = 0.0
    while run.progress < EPOCHS:
        epoch = int(run.progress)
        for (x,) in loader:
            time.sleep(0.03)  # its work: as long as somebody who joins takes, there has to be some
            began_s = time.monotonic()
            breaks_off = in_flight and kills.get(run.rank) == run.step + 1
            if breaks_off:
                (here / f"used-{run.rank}").write_text(json.dumps(trained.used))
                stall(gradients_of(run)._thread, after=len(gradients_of(run).schedule.after) // 2)
            prepared(x / SAMPLES).square().mean().backward()
            if breaks_off:  # before the optimizer's step, behind which there may be a vote
                assert gradients_of(run)._flight is not None
                os.kill(os.getpid(), signal.SIGKILL)
            if run.has_data:
                trained.used[epoch].extend(x.flatten().int().tolist())
                trained.sizes[run.step] = len(x)
            optimizer.step()
            optimizer.zero_grad()
            longest_s = max(longest_s, time.monotonic() - began_s)
            if in_flight and run.step in kills.values():
                assert gradients_of(run).is_ahead
                continue
            run.synchronize()
            trained.digests[run.step] = digest(model)
            (here / f"step-{run.step}").touch()
            if kills.get(run.rank) == run.step:
                (here / f"used-{run.rank}").write_text(json.dumps(trained.used))
                os.kill(os.getpid(), signal.SIGKILL)
            assert run.mean(run.step) == run.step
            schedule.step()
            if run.step % 3 == 0:
                evaluate(run, prepared)
    run.close()
    return trained._replace(longest_s=longest_s)


def gradients_of(run: offbeat.Run) -> Any:
    return run._session.models.synchronizers[0]._gradients


def evaluate(run: offbeat.Run, prepared: nn.Module) -> None:
    prepared.eval()
    with torch.no_grad():
        found = float(prepared(torch.full((3, 1), 0.5)).mean())
    prepared.train()
    assert run.mean(found) == pytest.approx(found, rel=1e-5) or isinstance(run.plan.sync, offbeat.LocalSGD)


def check(results: list[Trained | None], folder: Path, kills: dict[int, int]) -> None:
    """All were equal after each step, and each sample was computed once in each epoch."""
    there = [one for one in results if one is not None]
    at: dict[int, set[str]] = {}
    for one in there:
        for step, found in one.digests.items():
            at.setdefault(step, set()).add(found)
    assert all(len(found) == 1 for found in at.values()), [step for step, found in at.items() if len(found) > 1]
    assert len({max(one.digests) for one in there}) == 1
    used = [one.used for one in there] + [json.loads((folder / f"used-{rank}").read_text()) for rank in kills]
    # What one held that is killed when an epoch ends is computed in the next one, as is what is still missing of it.
    assert Counter(itertools.chain(*itertools.chain(*used))) == Counter(list(range(SAMPLES)) * EPOCHS)
    for epoch in range(EPOCHS):
        assert sum(len(one[epoch]) for one in used) in range(SAMPLES - 10 * len(kills), SAMPLES + 10 * len(kills) + 1)


@pytest.mark.parametrize(
    ("keeps", "num_workers"),
    [("local_batch", 0), pytest.param("global_batch", 2, marks=pytest.mark.slow)],
)
def test_who_joins_is_equal_to_the_bit_and_takes_its_share(keeps: Keeps, num_workers: int, tmp_path: Path) -> None:
    results = run_workers(4, train, str(tmp_path), {4: 2}, {}, keeps, num_workers, None, newcomers=1)
    check(results, tmp_path, {})
    newcomer = results[4]
    assert 2 < min(newcomer.digests) < max(newcomer.digests) - 15
    step = max(newcomer.sizes) - 10
    assert sum(one.sizes[step] for one in results) == (50 if keeps == "local_batch" else 40)
    (told,) = [text for text in results[0].said if "Rank 4 has joined at step" in text]
    assert "5 workers take part; " in told
    assert ("each keeps its batch" if keeps == "local_batch" else "add up to the same") in told
    assert "learning rate" in told


@pytest.mark.parametrize(
    ("start", "scheduling"),
    [
        (3, offbeat.Priority(slice_bytes=100)),
        pytest.param(12, offbeat.Priority(slice_bytes=100), marks=pytest.mark.slow),
        (12, offbeat.ReduceScatterGather(bucket_bytes=100)),
    ],
)
def test_who_joins_learns_the_schedule_with_the_others(start: int, scheduling: Scheduler, tmp_path: Path) -> None:
    """While the others learn it, and when they go by it."""
    results = run_workers(3, train, str(tmp_path), {3: start}, {}, "local_batch", 0, None, scheduling, newcomers=1)
    check(results, tmp_path, {})
    assert start < min(results[3].digests) < max(results[3].digests) - 15


@pytest.mark.parametrize(
    ("scheduling", "in_flight"),
    [
        pytest.param(offbeat.Priority(slice_bytes=100), True, marks=pytest.mark.slow),
        (offbeat.ReduceScatterGather(bucket_bytes=100), True),
        pytest.param(offbeat.ReduceScatterGather(bucket_bytes=100), False, marks=pytest.mark.slow),
    ],
)
def test_who_is_killed_is_left_out_and_what_is_in_no_step_of_it_is_computed_by_others(
    scheduling: Scheduler, in_flight: bool, tmp_path: Path
) -> None:
    """With blocks on their way, in the middle of a round or between the two of them, or behind a step that is whole."""
    kills = {1: 16}
    results = run_workers(3, train, str(tmp_path), {}, kills, "local_batch", 0, None, scheduling, in_flight, faulty=1)
    check(results, tmp_path, kills)
    assert all((16 in one.digests) != in_flight for one in results if one is not None)
    assert max(results[0].digests) > 40


@pytest.mark.parametrize("over", [pytest.param(None, marks=pytest.mark.slow), offbeat.Routed()])
def test_two_at_once_and_one_that_is_killed_later(over: offbeat.Routed | None, tmp_path: Path) -> None:
    kills = {1: 20, 4: 60}
    arguments = str(tmp_path), {3: 2, 4: 2}, kills, "local_batch", 0, None, None, False, over
    results = run_workers(3, train, *arguments, newcomers=2, faulty=set(kills))
    check(results, tmp_path, kills)
    assert min(results[3].digests) < 60


@pytest.mark.slow
def test_one_joins_after_another_was_killed_where_sums_go_by_planned_paths(tmp_path: Path) -> None:
    kills = {1: 5}
    arguments = str(tmp_path), {3: 10}, kills, "local_batch", 0, None, None, False, offbeat.Routed()
    results = run_workers(3, train, *arguments, newcomers=1, faulty=1)
    check(results, tmp_path, kills)
    assert 10 < min(results[3].digests) < max(results[3].digests) - 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_and_goes_each_sample_is_used_once(seed: int, tmp_path: Path) -> None:
    r = random.Random(seed)
    starts = {rank: r.randrange(2, 40) for rank in (3, 4, 5)}
    kills = {rank: r.randrange(5, 60) for rank in r.sample([0, 1, 2], 2)}
    results = run_workers(
        3, train, str(tmp_path), starts, kills, "local_batch", 0, None, newcomers=3, faulty=set(kills)
    )
    check(results, tmp_path, kills)
    assert any(results[rank].used[1] for rank in starts)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [offbeat.LocalSGD(4), offbeat.LocalSGD(4, delay=1, fragments=2)], ids=repr)
def test_who_joins_local_steps_enters_at_an_average(policy: offbeat.LocalSGD, tmp_path: Path) -> None:
    results = run_workers(3, train, str(tmp_path), {3: 2}, {}, "local_batch", 0, policy, newcomers=1)
    newcomer = results[3]
    first = min(newcomer.digests)
    assert first % policy.interval == 1
    averages = [step for step in newcomer.digests if step % 4 == 0]
    assert len(averages) > 5
    for step in averages if policy.loss_class == "local" else ():
        assert len({one.digests[step] for one in results}) == 1
    for epoch in range(EPOCHS):
        assert Counter(itertools.chain(*(one.used[epoch] for one in results))) == Counter(range(SAMPLES))


def come(folder: str, how: str, steps: int) -> tuple[list[float], float, str]:
    """Each step moves every element by -1, whoever takes part. Moves, the longest step, and why it could not join."""
    here, newcomer = Path(folder), rank_here() >= 2
    if newcomer:
        wait_for(here / "step-3")
    plan = offbeat.Plan(fabric=offbeat.Elastic(), bucket_bytes=1 << 20 if newcomer and how == "plan" else 25 << 20)
    model = nn.Linear(2 if newcomer and how == "model" else 1, 50, bias=False)
    nn.init.zeros_(model.weight)
    try:
        run = offbeat.init(plan, timeout=TIMEOUT, seed=5 if newcomer and how == "seed" else 0)
        if newcomer and how.startswith("SIG"):  # it was told where to come in, and does not
            where, name = (
                (run._session.membership, "_transfer_state")
                if how.endswith("later")
                else (run._session.context.group, "arrive")
            )
            setattr(where, name, lambda *_: os.kill(os.getpid(), getattr(signal, how.split()[0])))
        kind = torch.optim.Adam if newcomer and how == "optimizer" else torch.optim.SGD
        prepared, optimizer = run.prepare(model, kind(model.parameters(), lr=1.0))
    except (PlanError, DisagreementError) as error:
        (here / "refused").touch()
        return [], 0.0, str(error)
    moves, longest_s = [], 0.0
    for step in range(steps):
        time.sleep(0.03)
        before, began_s = model.weight.detach().clone(), time.monotonic()
        prepared(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        longest_s = max(longest_s, time.monotonic() - began_s)
        moves += (before - model.weight.detach()).unique().tolist()
        (here / f"step-{step}").touch()
    run.close()
    return moves, longest_s, ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("model", "the model differs from that of the job's workers"),
        ("optimizer", "the optimizer differs from that of the job's workers"),
        ("seed", "the seed differs from that of the job's workers"),
        pytest.param("plan", "Cannot join with another plan", marks=pytest.mark.slow),
    ],
)
def test_who_has_another_model_seed_or_plan_is_refused_and_the_job_goes_on(how: str, says: str, tmp_path: Path) -> None:
    *results, newcomer = run_workers(2, come, str(tmp_path), how, 100, newcomers=1)
    assert says in newcomer[2]
    first = {
        "model": "[50, 2]",
        "optimizer": "this worker has 'Adam', they have 'SGD'",
        "seed": "this worker has '5', they have '0'. Give offbeat.init(seed=...) the same",
        "plan": "26214400",
    }
    assert first[how] in newcomer[2]
    for moves, longest_s, _ in results:
        assert moves == [1.0] * 100
        assert longest_s < 1.0


def resume(folder: str, loads: bool) -> tuple[list[str], str]:
    """A script that loads a checkpoint first, if it joins; digests of each step, and why it ended."""
    here, newcomer = Path(folder), rank_here() >= 2
    if newcomer:
        wait_for(here / "step-3")
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=TIMEOUT)
    model = nn.Linear(1, 50, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    if newcomer:
        try:
            if loads:
                model.load_state_dict({"weight": torch.ones(50, 1)})
            run.load_state_dict({})  # a joiner has what the others have
        except ModelError as error:
            (here / "refused").touch()
            return [], str(error)
    digests = []
    while run.step < 300 and not (here / "refused").exists():
        time.sleep(0.03)
        prepared(torch.ones(1, 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(f"{run.step} {digest(model)}")
        (here / f"step-{run.step}").touch()
    run.close()
    return digests, ""


@pytest.mark.slow
def test_who_joins_and_loads_a_checkpoint_over_what_it_was_handed_is_refused(tmp_path: Path) -> None:
    *_, (digests, why) = run_workers(2, resume, str(tmp_path), True, newcomers=1)
    assert "its script has put other values in their place" in why
    assert not digests


@pytest.mark.slow
def test_who_joins_and_loads_only_the_state_of_the_run_trains_with_the_others(tmp_path: Path) -> None:
    (first, _), _, (newcomer, why) = run_workers(2, resume, str(tmp_path), False, newcomers=1)
    assert not why
    assert newcomer
    assert set(newcomer) <= set(first)


@pytest.mark.parametrize(
    ("how", "most_s"),
    [
        ("SIGKILL", 1.5),
        pytest.param("SIGKILL later", 1.5, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", TIMEOUT.total_seconds() + 1, marks=pytest.mark.slow),
    ],
)
def test_who_fails_while_it_joins_does_not_hold_up_the_others_for_long(how: str, most_s: float, tmp_path: Path) -> None:
    results = run_workers(2, come, str(tmp_path), how, 120, newcomers=1, faulty=2)
    for moves, longest_s, _ in results[:2]:
        assert moves == [1.0] * 120
        assert 0.1 < longest_s < most_s, longest_s


def test_who_runs_another_version_or_is_not_understood_is_told(tmp_path: Path) -> None:
    """The first worker's part alone, over a store of its own."""
    store = HashStore()
    circle = ElasticGroup(store, 0, 1)
    waiter = BlockingWait(clock=WallClock(), timeout=TIMEOUT)
    control = ControlGroup(InMemory().bind(BindContext()), waiter)
    job = JobInfo("a plan", "", b"", "", (JoinCheck("plan", "a plan", ""),))
    server = JoinServer(store, control, circle, waiter, job=lambda: job, version="1")
    newcomers = PrefixStore("newcomers", store)
    for number, hello in enumerate(['{"rank": 1, "version": "2", "plan": "a plan"}', "{", '{"rank": -1}', "\xff"]):
        newcomers.set(f"{number}/hello", hello)
    server._looked_s -= 2.0  # it looks once a second
    assert not server.wants_vote(looks=True)
    for number, says in enumerate(["Cannot join with offbeat 2: the job runs 1"] + ["another offbeat"] * 3):
        answer = json.loads(newcomers.get(f"{number}/answer"))
        assert says in answer["refusal"]
        assert answer["job"] is None
    server.agree_on_newcomers()
    assert not server.expects


def test_of_two_newcomers_with_one_rank_the_second_is_refused() -> None:
    store, waiter = HashStore(), BlockingWait(clock=WallClock(), timeout=TIMEOUT)
    control = ControlGroup(InMemory().bind(BindContext()), waiter)
    job = JobInfo("a plan", "", b"", "", (JoinCheck("plan", "a plan", ""),))
    server = JoinServer(store, control, ElasticGroup(store, 0, 1), waiter, job=lambda: job, version="1")
    newcomers = PrefixStore("newcomers", store)
    for number, rank in enumerate([1, 1, 0, 2]):
        newcomers.set(f"{number}/hello", f'{{"rank": {rank}, "version": "1", "plan": "a plan"}}')
    server._looked_s -= 2.0  # it looks once a second
    server.wants_vote(looks=True)
    refusals = [json.loads(newcomers.get(f"{number}/answer"))["refusal"] for number in range(4)]
    assert [bool(one) for one in refusals] == [False, True, True, False]
    assert refusals[1] == "Cannot join as rank 1: another worker has that rank. Start this one again."


def test_who_waits_while_the_others_go_over_to_a_server_is_told() -> None:
    """One that has said hello, one that is ready, one that is expected already, and one that comes later."""
    store, waiter = HashStore(), BlockingWait(clock=WallClock(), timeout=TIMEOUT)
    control = ControlGroup(InMemory().bind(BindContext()), waiter)
    job = JobInfo("a plan", "", b"", "", (JoinCheck("plan", "a plan", ""),))
    server = JoinServer(store, control, ElasticGroup(store, 0, 1), waiter, job=lambda: job, version="1")
    newcomers = PrefixStore("newcomers", store)

    def look() -> bool:
        server._looked_s -= 2.0  # it looks once a second
        return server.wants_vote(looks=True)

    def come(number: int) -> None:
        newcomers.set(f"{number}/hello", f'{{"rank": {number + 1}, "version": "1", "plan": "a plan"}}')

    for number in range(2):
        come(number)
        assert look() == (number == 1), "the first is ready by then"
        newcomers.set(f"{number}/ready", '{"claims": [{"what": "plan", "text": "a plan", "advice": ""}]}')
    server.agree_on_newcomers()
    assert server.expects
    assert look(), "the second is ready"
    come(2)
    server.reject_pending(looks=True)
    assert not server.expects
    server._looked_s -= 2.0
    come(3)
    server.reject_pending(looks=True)
    for key in ("0/entry", "1/entry", "2/answer", "3/answer"):
        assert "by another plan" in json.loads(newcomers.get(key))["refusal"]
    assert not look(), "nobody is left that is ready"


def test_who_dies_before_it_says_hello_keeps_nobody_behind_it_out() -> None:
    store, waiter = HashStore(), BlockingWait(clock=WallClock(), timeout=TIMEOUT)
    control = ControlGroup(InMemory().bind(BindContext()), waiter)
    job = JobInfo("a plan", "", b"", "", (JoinCheck("plan", "a plan", ""),))
    server = JoinServer(store, control, ElasticGroup(store, 0, 1), waiter, job=lambda: job, version="1")
    JoinClient(store, 1, waiter, version="1")  # and nothing more is heard of it
    second = JoinClient(store, 2, waiter, version="1")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(second.ask, "a plan", lambda: False)
        end_s = time.monotonic() + 3
        while not asked.done() and time.monotonic() < end_s:
            server._looked_s -= 2.0  # it looks once a second
            server.wants_vote(looks=True)
            time.sleep(0.01)
        heard = asked.done()
        if not heard:
            PrefixStore("newcomers", store).set("1/answer", "")  # let it go
            asked.exception()
    assert heard
    assert asked.result() == job


@pytest.mark.slow
def test_who_has_more_steps_goes_on_when_the_others_are_done(tmp_path: Path) -> None:
    *results, newcomer = run_workers(2, come, str(tmp_path), "well", 100, newcomers=1)
    assert all(moves == [1.0] * 100 for moves, _, _ in results)
    assert newcomer[0] == [1.0] * 100


def play(folder: str, steps: int) -> tuple[dict[int, str], list[str]]:
    """Two models, the second of which steps behind the first, without a loader; parameters of both after each pass."""
    said, here = listen(), Path(folder)
    if rank_here() >= 2:
        wait_for(here / "step-4")
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=TIMEOUT)
    torch.manual_seed(run.rank)
    judge, forger = nn.Linear(4, 1), nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1))
    first, optimizer = run.prepare(judge, torch.optim.Adam(judge.parameters(), lr=1e-2))
    second, forgers = run.prepare(forger, torch.optim.Adam(forger.parameters(), lr=1e-2))
    digests: dict[int, str] = {}
    assert run._session.membership is not None
    calls, is_open = run._session.membership.wants_vote, False

    def calls_then(plan: offbeat.Plan, *, looks: bool) -> bool:
        """From a step of the second model on: both call then, the first one in an exchange of the second's step."""
        nonlocal is_open
        called = calls(plan, looks=looks)
        is_open = is_open or (called and run.step % 2 == 0)
        return called and is_open

    run._session.membership.wants_vote = calls_then  # type: ignore[method-assign]
    while run.step < steps:
        time.sleep(0.03)
        with run.no_sync():
            first(second(torch.randn(5, 2)).detach()).square().mean().backward()
        first(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.mean(1.0)
        (1 - first(second(torch.randn(5, 2)))).square().mean().backward()
        forgers.step()
        forgers.zero_grad()
        optimizer.zero_grad()
        assert run.mean(run.step) == run.step
        first.eval()
        shown = first(torch.ones(1, 4))  # an evaluation with gradients in vain
        first.train()
        assert run.mean(shown) == pytest.approx(float(shown.detach()), rel=1e-5)
        digests[run.step] = digest(judge) + digest(forger)
        (here / f"step-{run.step}").touch()
    run.close()
    return digests, said


@pytest.mark.slow
def test_with_two_models_a_newcomer_begins_with_the_first(tmp_path: Path) -> None:
    results = run_workers(2, play, str(tmp_path), 120, newcomers=1)
    newcomer = results[2][0]
    assert 3 < min(newcomer) < 110
    assert max(newcomer) == 120
    for step, found in newcomer.items():
        assert {digests[step] for digests, _ in results} == {found}
    assert sum("Rank 2 has joined at step" in text for text in results[0][1]) == 1


def nest(folder: str) -> dict[int, str]:
    """A loop with steps of another one in it now and then, which is left with a batch in its hands."""
    here = Path(folder)
    if rank_here() >= 2:
        wait_for(here / "step-3")
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=TIMEOUT)
    torch.manual_seed(run.rank)
    model, rest, digests = nn.Linear(1, 5), nn.Linear(1, 1), dict[int, str]()
    data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
    prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
    _, _, other = run.prepare(rest, torch.optim.SGD(rest.parameters(), lr=1e-3), data)

    def step(x: torch.Tensor) -> None:
        time.sleep(0.03)
        prepared(x / SAMPLES).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests[run.step] = digest(model)
        (here / f"step-{run.step}").touch()

    for (x,) in loader:
        step(x)
        if run.step % 12 == 1 and run.progress < 0.8:  # who draws none any more could not say which of two it trains
            for number, (y,) in enumerate(other):
                if number == 7:
                    break
                step(y)
    run.close()
    return digests


@pytest.mark.slow
def test_a_newcomer_begins_with_the_outermost_loop(tmp_path: Path) -> None:
    results = run_workers(2, nest, str(tmp_path), newcomers=1)
    assert 3 < min(results[2]) < max(results[2]) - 10
    for step, found in results[2].items():
        assert {digests[step] for digests in results} == {found}


def begin(folder: str) -> tuple[dict[int, str], int, int]:
    """Two epochs, with a mean behind each; all learn that somebody comes in the last exchange of the first one."""
    here, each = Path(folder), SAMPLES // 20
    if rank_here() >= 2:
        wait_for(here / "step-3")
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=TIMEOUT)
    torch.manual_seed(run.rank)
    model, digests, samples = nn.Linear(1, 5), dict[int, str](), 0
    data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
    prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
    assert run._session.membership is not None
    calls = run._session.membership.wants_vote

    def calls_then(plan: offbeat.Plan, *, looks: bool) -> bool:
        while not (called := calls(plan, looks=looks)) and looks and run.step == each - 1:
            time.sleep(0.02)
        return called and run.step >= each - 1

    run._session.membership.wants_vote = calls_then  # type: ignore[method-assign]
    for _ in range(int(run.progress), EPOCHS):
        for (x,) in loader:
            prepared(x / SAMPLES).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(x) if run.has_data else 0
            digests[run.step] = digest(model)
            (here / f"step-{run.step}").touch()
        assert run.mean(run.step) == run.step
    run.close()
    return digests, samples, each


@pytest.mark.slow
def test_who_comes_at_the_end_of_an_epoch_begins_with_the_next(tmp_path: Path) -> None:
    results = run_workers(2, begin, str(tmp_path), newcomers=1)
    newcomer, _, each = results[2]
    assert min(newcomer) == each + 1
    for step, found in newcomer.items():
        assert {digests[step] for digests, _, _ in results} == {found}
    assert sum(samples for _, samples, _ in results) == EPOCHS * SAMPLES


def swap_often(folder: str, every: int) -> tuple[dict[int, str], list[list[int]], list[str], str]:
    """Swaps between two kinds of exchange all the while that somebody joins; digests where all are equal."""
    said, here, newcomer = listen(), Path(folder), rank_here() >= 2
    if newcomer:
        wait_for(here / "step-3")
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=TIMEOUT)
    torch.manual_seed(run.rank)
    model = nn.Linear(1, 5)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES).float()[:, None]), batch_size=10, shuffle=True)
    prepared, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), data)
    digests, used, policies = {}, [list[int]()], (offbeat.LocalSGD(3), offbeat.BSP())
    while run.progress < 1:
        for (x,) in loader:
            time.sleep(0.05)
            if run.rank == 0 and run.step % every == 0:
                run.swap(sync=policies[run.step // every % 2])
            prepared(x / SAMPLES).square().mean().backward()
            used[0] += x.flatten().int().tolist() if run.has_data else []
            optimizer.step()
            optimizer.zero_grad()
            (here / f"step-{run.step}").touch()
            digests[run.step] = digest(model)
    run.settle()
    digests[-1] = digest(model)
    run.close()
    return digests, used, said, repr(run.plan.sync)


@pytest.mark.slow
def test_swaps_go_on_while_somebody_joins(tmp_path: Path) -> None:
    results = run_workers(2, swap_often, str(tmp_path), 7, newcomers=1)
    assert len({policy for *_, policy in results}) == 1
    assert len({digests[-1] for digests, *_ in results}) == 1
    assert Counter(itertools.chain(*(used[0] for _, used, _, _ in results))) == Counter(range(SAMPLES))
    said = results[0][2]
    assert sum("decides when" in text for text in said) > 5
    (joined,) = [number for number, text in enumerate(said) if "has joined" in text]
    assert any("decides when" in text for text in said[joined:])
