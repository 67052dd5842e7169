"""What the workers' optimizers have gathered while each stepped by itself, made the same on all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from offbeat.payload import Gather, Sum, Total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.engine.channel import Channel


def average_states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], channel: Channel
) -> None:
    """Average every floating-point tensor of the optimizer's state over the workers. Collective.

    A worker whose optimizer has none for a parameter, because that got no gradient there, counts with zeros, and has
    one afterwards. What is no such tensor stays as it is.

    Args:
        parameters: by name.
        channel: to the other workers.
    """
    mine = {
        f"{name}\n{key}": list(tensor.shape)
        for name, parameter in parameters.items()
        for key, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }
    shapes: dict[str, Sequence[int]] = {}
    for theirs in _told(mine, channel):
        shapes.update(theirs)
    for place in sorted(shapes):
        name, _, key = place.partition("\n")
        if name not in parameters:
            continue
        parameter = parameters[name]
        tensor = optimizer.state[parameter].get(key)
        like = parameter.detach() if tensor is None else tensor
        total = like.new_zeros(tuple(shapes[place])) if tensor is None else tensor.detach().clone()
        reply = channel.wait(channel.start(Sum(total.reshape(-1))), "averaging of the optimizers' states", name)
        assert isinstance(reply, Total)
        mean = (reply.tensor / (channel.world * reply.weight)).reshape(total.shape)
        if tensor is None:
            optimizer.state[parameter][key] = mean
        else:
            tensor.copy_(mean)


def _told(mine: Mapping[str, Sequence[int]], channel: Channel) -> list[dict[str, list[int]]]:
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    reply = channel.wait(channel.start(Gather((data,))), "comparison of the optimizers' states")
    assert isinstance(reply, list)
    return [json.loads(one.tensors[0].numpy().tobytes()) for one in reply]
