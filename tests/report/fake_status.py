"""Jobs with a parameter server that never were, as the server sees them."""

from __future__ import annotations

from typing import Any

from offbeat.protocol.status import ModelStatus, WorkerStatus

SLOWEST = 2


def seen(worker: int, **about: Any) -> WorkerStatus:
    """A worker that has brought 100 contributions."""
    usual = {
        "phase": "computing", "step": 100, "made": 100, "clock": 100, "since_s": 0.3, "samples": 32.0,
        "computing_s": 0.05, "turn_s": 0.01, "applied": 100, "staleness": 1.5, "worst": 4, "lead": 2, "waited_s": 5.0,
    }  # fmt: skip
    return WorkerStatus(worker=worker, **{**usual, **about})


def a_scene(*workers: WorkerStatus, **about: Any) -> ModelStatus:
    """Of four workers: one computes, one is held, one is the slowest, one is gone."""
    usual = (
        seen(0),
        seen(1, phase="held", step=101, made=101, clock=100, since_s=12.0),
        seen(SLOWEST, step=98, made=98, clock=98, computing_s=0.1, turn_s=0.02, waited_s=0.0, since_s=0.1),
        WorkerStatus(
            worker=3, phase="gone", made=40, applied=40, dropped=2, lost=1, staleness=0.5, worst=1, waited_s=1.0
        ),
    )
    known = {"model": 0, "policy": "SSP(bound=3)", "version": 1234, "started": True, "running_s": 20.0}
    return ModelStatus(workers=workers or usual, **{**known, **about})
