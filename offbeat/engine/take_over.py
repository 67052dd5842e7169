"""A worker's optimizer goes on from where another one is that has stepped on the same parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.engine.flat import view_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


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
