"""Stopping and going on in a new model and a new run is the same as not stopping."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import offbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def is_the_same_when_resumed(
    plan: offbeat.Plan,
    model: Callable[[], torch.nn.Module],
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batches: Callable[[int], Sequence[tuple[torch.Tensor, torch.Tensor]]],
    stop: int,
    begun: int = 0,
) -> bool:
    """Whether this worker's parameters have the same bits.

    Args:
        batches: of a rank.
        stop: after so many of them.
        begun: the run that is not stopped goes on from a checkpoint, too, of after so many of them: of what it has
            learnt by then.
    """

    def go(state: Any, first: int, last: int | None) -> Any:
        net = model()
        optimizer = optimizer_of(net)
        with offbeat.init(plan) as run:
            replica, optimizer = run.prepare(net, optimizer)
            if state is not None:
                net.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                run.load_state_dict(state[2])
            for x, y in batches(run.rank)[first:last]:
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return copy.deepcopy([net.state_dict(), optimizer.state_dict(), run.state_dict()])

    first = go(None, 0, begun) if begun else None
    whole = go(copy.deepcopy(first), begun, None)
    resumed = go(go(first, begun, stop), stop, None)
    return all(torch.equal(tensor, resumed[0][name]) for name, tensor in whole[0].items())
