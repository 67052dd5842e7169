"""A torch module of which there are many models, each a row of numbers: its trained parameters, then what it keeps.

Initial weights are functions of a model's seed alone, whatever models are made with it. `make` is called once,
since to call it, or `reset_parameters`, for each model is slow (2,000 MLPs: 0.6 s and 0.8 s, and 0.05 s as here, CPU
seconds of one thread). Weights and biases of `Linear` and of convolutions are
drawn for each model from a counter, uniform within torch's default bound, 1 / sqrt(fan in). All else starts in each
model with the values of the one module that was made: other layers, and also such weights that `make` has set otherwise
(to a constant, or beyond the bound).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap

from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Values = dict[str, torch.Tensor]

_DRAWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class StackedModule:
    """Many models of one module.

    Args:
        make: the module, by the number of features.
        seed: of torch's generator while it is made.

    Attributes:
        trained: parameters that need a gradient, of the module that was made.
        kept: frozen parameters and buffers of real numbers, part of a model too.
        fixed: other buffers, which are no part of it: counters, indices.
    """

    def __init__(self, make: Callable[[int], nn.Module], features: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make(features)
        if not isinstance(module, nn.Module):
            raise GroupDataError(f"Cannot train {module!r}: `make` has to return a torch.nn.Module.")
        self.module = module.float()
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.trained = {name: value.detach() for name, value in parameters.items() if value.requires_grad}
        self.kept = {name: value.detach() for name, value in parameters.items() if not value.requires_grad}
        self.kept |= {name: value for name, value in buffers.items() if value.is_floating_point()}
        self.fixed = {name: value for name, value in buffers.items() if name not in self.kept}
        if not self.trained:
            raise GroupDataError(f"Cannot train {module!r}: it has no parameter that needs a gradient.")

    @property
    def width(self) -> int:
        """Return how many numbers a model is."""
        return sum(value.numel() for value in (*self.trained.values(), *self.kept.values()))

    def initial(self, seeds: np.ndarray) -> torch.Tensor:
        """Return (models, numbers of `trained`): new models.

        Args:
            seeds: (models,), of which they are functions.
        """
        bounds = self._bounds()
        reference = torch.cat([value.flatten() for value in self.trained.values()])
        rows = reference.repeat(len(seeds), 1)
        at = 0
        for name, value in self.trained.items():
            places = np.arange(at, at + value.numel())
            if name in bounds:
                chance = (mixed(seeds[:, None], 0, places) >> np.uint64(40)).astype(np.float32) * np.float32(2**-23)
                rows[:, at : at + value.numel()] = torch.from_numpy((chance - 1) * np.float32(bounds[name]))
            at += value.numel()
        return rows

    def views(self, rows: torch.Tensor, like: Mapping[str, torch.Tensor]) -> Values:
        """Return rows as named tensors, each with a first dimension for models.

        Args:
            rows: (models, numbers of `like`).
        """
        parts = rows.split([value.numel() for value in like.values()], 1)
        return {
            name: part.view(len(rows), *value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)
        }

    def batched(self, values: Values, x: torch.Tensor, shared: Values) -> torch.Tensor:
        """Return (models, rows): the outputs of all models, computed together.

        Args:
            values: of each model, with a first dimension for models.
            x: (models, rows, features).
            shared: the values that all models share.
        """

        def one(mine: Values, x: torch.Tensor) -> Any:
            return functional_call(self.module, {**shared, **mine}, (x,))

        return _checked(vmap(one, randomness="different")(values, x), x)

    def single(self, values: Values, x: torch.Tensor, shared: Values) -> torch.Tensor:
        """Return (1, rows): the outputs of the one model, which may change what is `shared`."""
        merged = {**shared, **{name: value[0] for name, value in values.items()}}
        made = functional_call(self.module, merged, (x[0],))
        shared.update((name, merged[name].detach()) for name in shared)
        return _checked(made[None], x)

    def predict(self, rows: np.ndarray, x: torch.Tensor) -> torch.Tensor:
        """Return (models, rows): outputs in evaluation mode.

        Args:
            rows: (models, width).
            x: (models, rows, features).
        """
        self.module.eval()
        values = self.views(torch.from_numpy(rows.astype(np.float32)), {**self.trained, **self.kept})
        with torch.no_grad():
            try:
                return self.batched(values, x, self.fixed)
            except RuntimeError:  # it cannot be vmapped
                each = [{name: value[[at]] for name, value in values.items()} for at in range(len(rows))]
                return torch.cat([self.single(mine, x[[at]], dict(self.fixed)) for at, mine in enumerate(each)])

    def new_shared(self) -> Values:
        """Return a copy of the values with which each model begins that no gradient changes."""
        return {name: value.clone() for name, value in {**self.kept, **self.fixed}.items()}

    def _bounds(self) -> dict[str, float]:
        """The bound of each tensor that is drawn."""
        found = {}
        for path, layer in self.module.named_modules():
            if isinstance(layer, _DRAWN):
                bound = 1 / math.sqrt(max(1, layer.weight[0].numel()))
                for name in ("weight", "bias"):
                    value = self.trained.get(f"{path}.{name}".lstrip("."))
                    if value is not None and _is_default(value, bound):
                        found[f"{path}.{name}".lstrip(".")] = bound
        return found


def _is_default(value: torch.Tensor, bound: float) -> bool:
    """Whether values look like those that torch draws."""
    is_constant = bool((value == value.flatten()[0]).all()) and (value.numel() > 1 or not value.any())
    return not is_constant and bool((value.abs() <= bound).all())


def _checked(made: Any, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(made, torch.Tensor) or made.shape not in (x.shape[:2], (*x.shape[:2], 1)):
        shape = tuple(made.shape[1:]) if isinstance(made, torch.Tensor) else type(made).__name__
        raise GroupDataError(
            f"Cannot use outputs {shape} for {x.shape[1]} rows: a module has to make one for each row."
        )
    return made.view(x.shape[:2]) if made.is_contiguous() else made.reshape(x.shape[:2])
