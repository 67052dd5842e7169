"""An optimizer goes on from where another one is that has stepped on the same parameters, here or at a server.

gathered, load                          tensors only, on the CPU: what a server's optimizer knows
optimizer_state, load_optimizer_state   all of it, with the hyper-parameters of each group: another worker's
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.engine.bucket_buffer import view_in

if TYPE_CHECKING:
    from collections.abc import Mapping


def gathered(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of what `optimizer` has gathered, as `load` takes it: by parameter name and key, on the CPU.

    Args:
        parameters: by name.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                states.setdefault(name, {})[key] = _flat(value.detach().cpu(), parameter)
    return states


def _flat(value: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not value.dim():
        return value.clone()
    flat = torch.empty(value.numel(), dtype=value.dtype)
    view_in(flat, 0, parameter).copy_(value)
    return flat


def load(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    states: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Give `optimizer` the state of others over the same parameters; it goes through its own `load_state_dict`.

    Args:
        parameters: by name.
        states: by parameter name and key: one number, or [D] the parameter's elements in the order of its memory.
    """
    saved: dict[str, Any] = optimizer.state_dict()
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    number_of = {id(p): index for p, index in zip(ours, indices, strict=True)}
    for name, state in states.items():
        parameter = parameters[name]
        if state and id(parameter) in number_of:
            saved["state"][number_of[id(parameter)]] = {
                key: value if not value.dim() else view_in(value, 0, parameter).clone() for key, value in state.items()
            }
    optimizer.load_state_dict(saved)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    """The optimizer's state by name of the parameter, and the hyper-parameters of each group."""
    return {
        "state": {name: dict(optimizer.state[p]) for name, p in parameters.items() if optimizer.state.get(p)},
        "groups": [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups],
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], theirs: Mapping[str, Any]
) -> None:
    """Go on with what `optimizer_state` returned of another worker's optimizer.

    Hyper-parameters are what they are there now, such as a learning rate that a schedule has lowered; what is no
    number, text or tensor stays as it is here.
    """
    for name, state in theirs["state"].items():
        optimizer.state[parameters[name]] = dict(state)
    for mine, group in zip(optimizer.param_groups, theirs["groups"], strict=True):
        for key, value in group.items():
            if isinstance(value, list):
                mine[key] = tuple(value) if isinstance(mine.get(key), tuple) else value
            elif value is not None:
                mine[key] = value
