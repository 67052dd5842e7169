"""The user's optimizer as data: described by a worker, checked, and made again at the server.

Only optimizers that treat every element by itself can be held in pieces, and only torch's own can be named without
sending code. Hyper-parameters travel with each contribution, so a learning-rate schedule works as it does locally.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import ModelError, PeerError
from offbeat.protocol.optimizer_spec import Hyper, Number, OptimizerSpec, Value
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
# How it is computed, which is for the server to decide.
_MEANS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
_BOUNDS = frozenset({"step_sizes", "t0"})  # Rprop's and ASGD's, where infinity is as good as any
OUTER = "outer momentum"  # of changes, as a key of state; no optimizer of torch has such a one


def describe(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
    """Put `optimizer` into words.

    Args:
        names: of the parameters, by `id`.

    Raises:
        ModelError: if a server cannot hold it.
    """
    kind = type(optimizer).__name__
    if type(optimizer) is not _CLASSES.get(kind):
        raise ModelError(
            f"Cannot hold {kind} at a parameter server: it keeps the parameters in pieces, and can only hold torch's "
            f"own element-wise optimizers ({', '.join(sorted(_CLASSES))}). Use one of these, or fabric=ProcessGroup()."
        )
    members = tuple(tuple(names[id(p)] for p in group["params"] if id(p) in names) for group in optimizer.param_groups)
    return OptimizerSpec(kind, hyper(optimizer), members)


def hyper(optimizer: torch.optim.Optimizer) -> tuple[Hyper, ...]:
    """The hyper-parameters of each group as they are now.

    Raises:
        ModelError: if one cannot be sent.
    """
    return tuple(
        {key: _plain(key, value) for key, value in group.items() if key not in _MEANS}
        for group in optimizer.param_groups
    )


def _plain(key: str, value: Any) -> Value:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_number(key, one) for one in value)
    return _number(key, value)


def _number(key: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ModelError(f"Cannot send the optimizer's {key}={value!r} to a parameter server: only numbers can be sent.")


@dataclass
class BlockOptimizer:
    """The optimizer of one block.

    Args:
        optimizer: over the block's pieces, in groups as the user's.
        groups: which of the user's groups each of its groups is.
    """

    optimizer: torch.optim.Optimizer
    groups: list[int]

    def check_state(self, piece: torch.Tensor, name: str, key: str, value: torch.Tensor) -> None:
        """See that it can go on from this tensor of its state.

        Args:
            piece: of parameter `name`.

        Raises:
            PeerError: if it keeps no such tensor.
        """
        (group,) = [g for g in self.optimizer.param_groups if any(piece is one for one in g["params"])]
        _check_state(type(self.optimizer), group, piece, name, {key: value})

    def set_hyper(self, groups: Sequence[Hyper], rate: float) -> None:
        """Take over hyper-parameters, with the learning rate multiplied by `rate`."""
        for group, index in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(_known(type(self.optimizer), groups[index]))
            if rate != 1.0:
                group["lr"] = group["lr"] * rate


def check_hyper(spec: OptimizerSpec, groups: Sequence[Hyper], worker: int) -> None:
    """See that an optimizer held by `spec` can go on with these hyper-parameters, which `worker` brings.

    Raises:
        PeerError: if it cannot: numbers may change, but not which there are, nor what is kept because of them.
    """
    if len(groups) != len(spec.groups):
        raise PeerError(
            f"Cannot take hyper-parameters of {len(groups)} groups from rank {worker}: the optimizer has "
            f"{len(spec.groups)}. Add groups before prepare."
        )
    kind = _CLASSES[spec.kind]
    for index, (before, now) in enumerate(zip(spec.groups, groups, strict=True)):
        if now == before:
            continue
        where = f"in group {index} of {spec.kind}, as rank {worker} has it"
        for key, value in _known(kind, now).items():
            if key not in before or _shape(kind, key, value) != _shape(kind, key, before[key]):
                was = before.get(key, "unknown")
                raise PeerError(f"Cannot continue with {key}={value!r} {where}: it was {was!r}.")
        for key in sorted(_known(kind, before).keys() - now.keys()):
            raise PeerError(f"Cannot continue without {key} {where}: it was {before[key]!r}.")
        if why := _flaw(kind, now):
            raise PeerError(f"Cannot continue {where}: {why}")


def check_spec(spec: OptimizerSpec) -> None:
    """See that there is such an optimizer, and that torch takes its hyper-parameters.

    Raises:
        PeerError: if not.
    """
    if spec.kind not in _CLASSES or len(spec.groups) != len(spec.members):
        raise PeerError(f"Cannot hold an optimizer {spec.kind!r}.")
    for group in spec.groups:
        if why := _flaw(_CLASSES[spec.kind], group):
            raise PeerError(f"Cannot make {spec.kind} from these hyper-parameters: {why}")


def check_states(
    spec: OptimizerSpec, states: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> None:
    """See that an optimizer of `spec` over `parameters` can go on from `states`, both by name.

    Raises:
        PeerError: if they are another optimizer's, or another model's.
    """
    group_of = {name: group for group, names in zip(spec.groups, spec.members, strict=True) for name in names}
    for name, state in states.items():
        if name not in parameters:
            raise PeerError(f"Cannot take over the state of {name}: no parameter that is trained here has that name.")
        _check_state(_CLASSES[spec.kind], group_of.get(name), parameters[name], name, state)


def _check_state(
    kind: Any, group: Hyper | None, parameter: torch.Tensor, name: str, state: Mapping[str, torch.Tensor]
) -> None:
    kept = {OUTER: torch.zeros(2, dtype=parameter.dtype)} | ({} if group is None else _kept(kind, group, parameter))
    for key, value in state.items():
        shape = (parameter.numel(),) if key in kept and kept[key].ndim else ()
        if key not in kept or (value.shape, value.dtype) != (shape, kept[key].dtype):
            there = ", ".join(
                f"{one} {'[D]' if kept[one].ndim else '[]'} {dtype_name(kept[one].dtype)}" for one in sorted(kept)
            )
            raise PeerError(
                f"Cannot take over {key} {list(value.shape)} {dtype_name(value.dtype)} of {name}: with {kind.__name__} "
                f"that is {there}; D is {parameter.numel()}. Was that another optimizer's, or another model's?"
            )


def _kept(kind: Any, group: Hyper, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter after a step, by key: each tensor as for one of two elements."""
    trial = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype))
    trial.grad = torch.zeros_like(trial)
    known = _known(kind, group)
    if kind is torch.optim.SGD and not known.get("momentum"):  # it may have had some since, or before
        known["momentum"] = 0.5
    optimizer = _make(kind, [{"params": [trial], **known}])
    optimizer.step()
    return {key: torch.as_tensor(value) for key, value in optimizer.state[trial].items() if value is not None}


def lines_of(spec: OptimizerSpec) -> list[str]:
    """The lines that all workers must have in common at the beginning.

    Args:
        spec: checked by `check_spec`.
    """
    kind = _CLASSES[spec.kind]
    lines = [spec.kind]
    for index, (group, names) in enumerate(zip(spec.groups, spec.members, strict=True)):
        lines += [f"group {index}: {key}={value!r}" for key, value in sorted(_known(kind, group).items())]
        lines += [f"group {index} holds {name}" for name in names]
    return lines


def _flaw(kind: Any, group: Hyper) -> str:
    """Say why no step can be made with these hyper-parameters, in a sentence; "" if one can."""
    known, taken = _known(kind, group), _arguments(kind, group)
    for key, value in known.items():
        # Some take any number that is no NaN; one step with it, and so are the parameters of all workers.
        if key not in _BOUNDS and not all(map(math.isfinite, _numbers(value))):
            return f"{key}={value!r} is not finite."
    # Torch looks at defaults only, not at what stands in a group; what it would not take fails in the middle of a step.
    try:
        made = kind([torch.zeros(1)], **{"lr": 0.1, **taken})
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        return f"{error}."
    fixed = {key: value for key, value in known.items() if key not in taken and value != made.defaults[key]}
    return f"{fixed} cannot be chosen." if fixed else ""


def _numbers(value: Value) -> list[float]:
    return [one for one in (value if isinstance(value, tuple) else (value,)) if one is not None]


def _shape(kind: type[torch.optim.Optimizer], key: str, value: Value) -> Any:
    """The part of a hyper-parameter that has to stay as it was."""
    if isinstance(value, tuple):
        return tuple(_shape(kind, key, one) for one in value)
    if value is None or isinstance(value, bool):
        return value
    # With it, RMSprop keeps a buffer from its first step on or never; SGD makes one when it is needed.
    return bool(value) if kind is torch.optim.RMSprop and key == "momentum" else "a number"


def _make(kind: Any, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with these groups; what it reads from no group, such as what Adagrad begins with, is the first's."""
    optimizer: torch.optim.Optimizer = kind(groups, **_arguments(kind, groups[0]))
    return optimizer


def _arguments(kind: type[torch.optim.Optimizer], group: Hyper) -> Hyper:
    """The hyper-parameters that can be chosen; torch keeps others beside them, such as what makes an Adam of AdamW."""
    taken = inspect.signature(kind).parameters
    return {key: value for key, value in _known(kind, group).items() if key in taken}


def _known(kind: type[torch.optim.Optimizer], group: Hyper) -> Hyper:
    """The hyper-parameters that the optimizer itself reads; schedulers keep others beside them."""
    defaults = _defaults(kind.__name__)
    return {key: value for key, value in group.items() if key in defaults}


@functools.cache
def _defaults(kind: str) -> frozenset[str]:
    make: Any = _CLASSES[kind]
    return frozenset(make([torch.zeros(1)], lr=0.1).defaults) - _MEANS


def hold(spec: OptimizerSpec, pieces: Sequence[tuple[str, torch.Tensor]]) -> BlockOptimizer | None:
    """The optimizer of a block with these pieces; None if it moves none of them.

    Args:
        spec: checked by `check_spec`.
    """
    group_of = {name: index for index, names in enumerate(spec.members) for name in names}
    groups: dict[int, list[torch.Tensor]] = {}
    for name, piece in pieces:
        if name in group_of:
            groups.setdefault(group_of[name], []).append(piece)
    if not groups:
        return None
    kind = _CLASSES[spec.kind]
    made = [{"params": params, **_known(kind, spec.groups[index])} for index, params in groups.items()]
    return BlockOptimizer(_make(kind, made), list(groups))
