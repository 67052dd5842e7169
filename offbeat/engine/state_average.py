"""The average of the workers' optimizer states, after steps of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from offbeat.payload import Sum, Total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.communicator import Communicator
    from offbeat.engine.control_group import ControlGroup


def average_states(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    communicator: Communicator,
    control: ControlGroup,
) -> None:
    """Average every floating-point tensor of the optimizer's state over the workers. Collective.

    A worker whose optimizer has none for a parameter, because that got no gradient there, counts with zeros, and has
    one afterwards. What is no such tensor stays as it is.

    Args:
        parameters: by name.
        communicator: to the other workers.
        control: this worker's end of the control group.
    """
    mine = {
        f"{name}\n{key}": list(tensor.shape)
        for name, parameter in parameters.items()
        for key, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }
    shapes: dict[str, Sequence[int]] = {}
    for theirs in control.texts("the comparison of the optimizers' states", json.dumps(mine)).values():
        shapes.update(json.loads(theirs))
    for place in sorted(shapes):
        name, _, key = place.partition("\n")
        if name not in parameters:
            continue
        parameter = parameters[name]
        tensor = optimizer.state[parameter].get(key)
        like = parameter.detach() if tensor is None else tensor
        total = like.new_zeros(tuple(shapes[place])) if tensor is None else tensor.detach().clone()
        total = total.to(parameter.device)  # a step count may be kept elsewhere, where the fabric does not come
        # Exact: an optimizer divides by second moments, and in fixed point small ones are 0 beside large ones.
        pending = communicator.start(Sum(total.reshape(-1), exact=True))
        reply = communicator.wait(pending, "averaging of the optimizers' states", name)
        assert isinstance(reply, Total)
        mean = (reply.tensor / (communicator.world * reply.weight)).reshape(total.shape)
        if tensor is None:
            optimizer.state[parameter][key] = mean
        else:
            tensor.copy_(mean)
