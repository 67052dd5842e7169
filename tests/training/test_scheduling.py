"""Steps that are hidden behind the next one, in loops that do more than step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from tests.workers import run_workers

STEPS = 14  # of which seven are learnt from


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def is_ahead(run: offbeat.Run) -> bool:
    return run._session.models.synchronizers[0]._gradients.is_ahead  # type: ignore[attr-defined, no-any-return]


def plan(fabric: str, *, hides: bool = True) -> offbeat.Plan:
    made = offbeat.ProcessGroup() if fabric == "group" else offbeat.Elastic()
    return offbeat.Plan(fabric=made, scheduling=offbeat.Priority(slice_bytes=400) if hides else None)


def asked_between(fabric: str, hides: bool) -> list[float]:
    """The parameters of a loop that asks all others behind each step, and once leaves out a backward."""
    net = network()
    with offbeat.init(plan(fabric, hides=hides)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(3 * STEPS):
            loss = replica(torch.randn(5, 16, generator=generator)).square().mean()
            if step % 10 != 9:
                loss.backward()
            optimizer.step()
            if step % 4 == 3:
                optimizer.step()  # with the same gradient
            optimizer.zero_grad()
            assert run.mean(step) == step
        assert is_ahead(run) is hides if hides else True
        return [float(p.double().sum()) for p in net.state_dict().values()]


@pytest.mark.parametrize("fabric", ["group", "elastic"])
def test_questions_between_steps_and_steps_without_backward(fabric: str) -> None:
    hidden = run_workers(2, asked_between, fabric, True)
    assert hidden[0] == hidden[1]
    assert hidden == run_workers(2, asked_between, fabric, False)


def rewound() -> tuple[bool, bool, bool]:
    """Whether a run that is set back to its beginning comes to the same again, and whether it was ahead both times."""
    net = network()
    with offbeat.init(plan("group")) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
        start = copy.deepcopy([net.state_dict(), run.state_dict()])
        came_to, were_ahead = [], []
        for _ in range(2):
            net.load_state_dict(start[0])
            run.load_state_dict(start[1])
            generator = torch.Generator().manual_seed(run.rank)
            for _ in range(STEPS):
                x, y = torch.randn(5, 16, generator=generator), torch.randint(0, 3, (5,), generator=generator)
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            came_to.append([tensor.clone() for tensor in net.state_dict().values()])
            were_ahead.append(is_ahead(run))
        return all(map(torch.equal, *came_to)), were_ahead[0], were_ahead[1]


def test_a_run_that_is_rewound_learns_again() -> None:
    assert run_workers(2, rewound) == [(True, True, True)] * 2
