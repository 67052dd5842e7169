"""What control makes of the clocks of a table: who waits, and whom it allows more, as the policy does at a server."""

from __future__ import annotations

import random

import pytest

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.clock_watch import ClockWatch, WatchedClock
from offbeat.switch.clocks import Windows
from offbeat.switch.data_plane import JobClocks
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState
from offbeat.switch.packet import Packet, PacketKind
from offbeat.switch.strategy import NEAR, compile_policy, watched
from offbeat.sync import DSSP, Member, State
from offbeat.sync.actions import Remember
from offbeat.sync.dssp import Allowance

RING = 64


def decided(
    policy: DSSP, workers: dict[int, WatchedClock], waiting: set[int], before: dict[int, int]
) -> dict[int, int]:
    """Before which clock workers may begin steps by name, as the policy decides at a server that knows the same."""
    members = {}
    for worker, one in workers.items():
        is_held = worker in waiting
        members[worker] = Member(
            step=one.finished - is_held,
            clock=one.finished,
            ready_s=one.last_ready_s if is_held else None,
            granted_s=one.last_ready_s if is_held else None,
            arrived=is_held,
            weight=1.0,
            last_ready_s=one.last_ready_s,
            interval_s=one.interval_s,
        )
    memory = Allowance(tuple(sorted((worker, clock - 1) for worker, clock in before.items())))
    kept = [one.memory for one in policy.decide(State(members, memory=memory)) if isinstance(one, Remember)]
    return {worker: step + 1 for worker, step in (kept[-1] if kept else memory).until}


def play(policy: DSSP, paces: list[float], until_s: float) -> tuple[ClockWatch, int]:
    """Have workers make steps of so many seconds, and look whenever one is over; the watch, and how many were allowed
    more by it than by the window."""
    strategy, watch = compile_policy(policy), ClockWatch()
    window = strategy.window_in(RING)
    windows, finished, until = Windows(window, window), dict.fromkeys(range(len(paces)), 0), dict.fromkeys(range(9), 0)
    ends = dict(enumerate(paces))
    waiting: set[int] = set()
    allowances = 0
    while (at_s := min(ends.values())) < until_s:
        worker = min(ends, key=lambda one: (ends[one], one))
        finished[worker] += 1
        ends[worker] = float("inf")
        waiting.add(worker)
        low = min(finished.values())
        before = {one: clock for one, about in watch.workers.items() if (clock := about.until) is not None}
        allowed = watch.look(JobClocks(low, windows, dict(finished), dict(until)), strategy, RING, at_s)
        expected = decided(policy, watch.workers, waiting, before)
        for one, about in watch.workers.items():
            if (about.waits or one in allowed) and one not in before:
                assert about.until == expected.get(one), (at_s, one)
        allowances += len(allowed)
        for one, clock in allowed.items():
            assert finished[one] < clock <= low + policy.high + 1
        until |= allowed
        for one in sorted(waiting):
            if windows.grants(finished[one], low) or until[one] > finished[one]:
                assert finished[one] - low <= policy.high
                waiting.discard(one)
                ends[one] = at_s + paces[one]
    return watch, allowances


def test_it_allows_what_the_policy_decides_at_a_server() -> None:
    allowances = 0
    for seed in range(200):
        chance = random.Random(seed)
        low = chance.randint(0, 3)
        policy = DSSP(low, low + chance.randint(0, 6))
        paces = [chance.choice([1.0, 1.7, 2.6, 4.1, 7.3]) * (1 + worker / 97) for worker in range(chance.randint(2, 4))]
        allowances += play(policy, paces, 60.0)[1]
    assert allowances > 300


def test_who_may_go_as_far_ahead_as_it_likes_never_waits_and_is_allowed_a_few_steps_at_a_time() -> None:
    strategy, watch = Strategy("table", window=None), ClockWatch()
    carried = watched(strategy, RING)
    state = JobState(JobShape(7, 2, values=64, ring=RING), carried)
    for worker in (0, 1):
        state.admit(worker, worker)
        state.members[worker].port = worker
    for clock in range(1, RING - 2):
        state.handle(Packet(PacketKind.CLOCK, 7, 0, clock=clock), 0)
        clocks, members = state.clocks, state.members
        assert clocks.windows.grants(clock, clocks.low) or members[0].until > clock, f"it waits behind step {clock}"
        finished = {worker: members[worker].finished for worker in (0, 1)}
        until = {worker: members[worker].until for worker in (0, 1)}
        read = JobClocks(clocks.low, clocks.windows, finished, until)
        for worker, allowed in watch.look(read, strategy, RING, clock / 100).items():
            state.allow(worker, allowed)
        assert members[0].until <= max(clock + NEAR + 1, NEAR + 1)
    assert watch.workers[0].waited_s == 0
    assert state.set_strategy(Strategy("table", window=0)) is not None
    assert state.clocks.windows.effective == members[0].until <= RING - 1


def test_it_measures_how_long_each_worker_waits() -> None:
    watch, _ = play(DSSP(0, 0), [1.0, 4.0], 100.0)
    assert watch.workers[0].waited_s == pytest.approx(24 * 3.0)
    assert watch.workers[1].waited_s == 0.0


def test_who_rests_waits_for_nobody() -> None:
    watch, windows = ClockWatch(), Windows(2, 2)
    for at_s in range(10):
        clocks = JobClocks(5, windows, {0: 5 + RING - 2, 1: 5}, {0: 0, 1: 0})
        assert watch.look(clocks, compile_policy(DSSP(2, 6)), RING, float(at_s)) == {}
    assert watch.workers[0].waited_s == 0.0
