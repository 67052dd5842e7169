"""What trains under DistributedDataParallel trains the same where steps are hidden behind the next one."""

from __future__ import annotations

import dataclasses

import pytest

import offbeat
from offbeat.scheduling import Priority, Prophet, ReduceScatterGather
from tests.parity import jobs
from tests.parity.jobs import Job
from tests.parity.test_drop_in import (
    JOBS,
    OPTIMIZERS,
    assert_same_bits,
    autocast,
    check_grad_scaler,
    check_lbfgs,
    check_two_models,
)

PLANS = [
    offbeat.Plan(scheduling=Prophet(least_bytes=1 << 10)),
    offbeat.Plan(scheduling=Priority(slice_bytes=300)),
    offbeat.Plan(scheduling=ReduceScatterGather(bucket_bytes=2000)),
]
# What differs between schedules is in which blocks they send: slices of one gradient are in those of Prophet, too.
IN_TURN = [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow), PLANS[2]]
STAYS = (  # a barrier
    "unused",
    "unused, adamw",
    "different ones unused per rank",
    "frozen mid-run",
    "sparse",
    "checkpoint around BatchNorm",
)


@pytest.mark.parametrize("plan", IN_TURN)
def test_same_bits_as_ddp(plan: offbeat.Plan) -> None:
    made = {}
    for name, job in JOBS.items():
        # Who uses gradients in each step, or sets them to zero in place, goes back to the barrier at some step.
        goes_back = job.before_step is not None or not job.set_to_none
        made[name] = dataclasses.replace(
            job, steps=20 if goes_back else 16, plan=plan, is_ahead=not goes_back and name not in STAYS
        )
    made["adafactor, autocast"] = Job(
        jobs.CNN, jobs.images, OPTIMIZERS["Adafactor"], autocast, steps=16, plan=plan, is_ahead=True
    )
    assert_same_bits(made)


@pytest.mark.slow
@pytest.mark.parametrize("plan", IN_TURN)
def test_any_optimizer(plan: offbeat.Plan) -> None:
    assert_same_bits(
        {
            name: Job(jobs.MLP, jobs.vectors, optimizer, steps=12, plan=plan, is_ahead=True)
            for name, optimizer in OPTIMIZERS.items()
        }
    )


@pytest.mark.parametrize("check", [check_grad_scaler, check_lbfgs, check_two_models])
def test_the_same_with(check: object) -> None:
    assert callable(check)
    check(PLANS[1])
