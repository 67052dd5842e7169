"""The training of many nets in lockstep: one step of all of them is one pass over stacked tensors.

Each model draws its own batches from the rows of its group, in an order that is a function of (seed, epoch) alone; a
batch never crosses groups, and the last one of an epoch holds what is left. Shorter batches are padded with rows of no
weight. Models are sorted by their steps, so those that have not ended are always the first rows of each tensor: a step
takes a slice, and no work is done for those that have ended.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from offbeat.groups.fitting import similar_sizes
from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from offbeat.groups.families import Family
    from offbeat.groups.optimizers import StackedOptimizer
    from offbeat.groups.stacked_module import StackedModule, Values

_MOST_BYTES = 64 << 20  # of the models that are trained together
_TRIAL_ROWS = 8


@dataclass(frozen=True)
class NetModels:
    """Models that are trained together.

    Args:
        seeds: (models,): what is random in a model is a function of its seed.
        begins, counts: (models,), where the rows of its group begin, and how many there are.
        epochs: (models,).
        rates: (models,), learning rates.
    """

    seeds: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    epochs: np.ndarray
    rates: np.ndarray

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, which: np.ndarray | slice) -> NetModels:
        parts = (self.seeds, self.begins, self.counts, self.epochs, self.rates)
        return NetModels(*(part[which] for part in parts))


@dataclass(frozen=True)
class Trial:
    """The outcome of a first step of two models.

    Args:
        obstacle: why the module's models have to be trained one by one; empty if they have not.
        mixes_rows: whether an output depends on other rows of its batch.
        bytes_a_row: of a model's batch, that are kept for its gradients.
    """

    obstacle: str
    mixes_rows: bool
    bytes_a_row: int


@dataclass(frozen=True)
class NetTraining:
    """The training of models of one module, which differ in their rows, seed, learning rate and epochs.

    Args:
        features: (rows, features), float32.
        target: (rows,), float32.
    """

    module: StackedModule
    optimizer: StackedOptimizer
    family: Family
    batch: int
    features: torch.Tensor
    target: torch.Tensor

    def try_two(self, models: NetModels) -> Trial:
        """Compute outputs and gradients of two models, each alone and both together.

        An error of a model alone is the module's own, and is raised.
        """
        models = models[np.array([0, len(models) - 1])]
        places = np.arange(max(2, min(self.batch, _TRIAL_ROWS)))
        x = self.features[torch.from_numpy(models.begins[:, None] + places % models.counts[:, None])]
        leaves = self._leaves(self.module.initial(models.seeds))
        if self._alone(leaves, x, is_training=False)[0]:
            raise GroupDataError(
                "Cannot predict by a module of which an output depends on other rows of the table, also in evaluation "
                "mode: normalize within rows, or keep running statistics."
            )
        mixes, changed = self._alone(leaves, x, is_training=True)
        obstacle = "an output depends on other rows of its batch" if mixes else ""
        if changed:
            obstacle = f"the buffer {changed!r} changes in training"
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
            ):
                margins = self.module.batched(leaves, x, self._shared())
            torch.autograd.grad(margins.sum(), list(leaves.values()), allow_unused=True)
        except RuntimeError as error:
            obstacle = _culprit(error)
        return Trial(obstacle, mixes, kept // x.shape[1] // 2)

    def _alone(self, leaves: Values, x: torch.Tensor, *, is_training: bool) -> tuple[bool, str]:
        """Whether the first model's output of a row has a gradient by other rows, and the buffer that changes."""
        self.module.module.train(is_training)
        sample, first = x[:1].clone().requires_grad_(), {name: value[:1] for name, value in leaves.items()}
        shared = self._shared()
        with torch.random.fork_rng(devices=[]):
            made = self.module.single(first, sample, shared)
        (reach,) = torch.autograd.grad(made[0, 0], sample, allow_unused=True, materialize_grads=True)
        changed = [name for name, value in self._shared().items() if not torch.equal(value, shared[name])]
        return bool(reach[0, 1:].any()), "".join(changed[:1])

    def fit(self, models: NetModels, trial: Trial) -> np.ndarray:
        """Return (models, width), float64: the trained models; NaN for one that diverged or could not be trained."""
        made = np.full((len(models), self.module.width), np.nan)
        steps = self.steps(models, trial)
        order = np.argsort(-steps, kind="stable")
        for at in self.parts(models, order, trial):
            try:
                made[at] = self._train(models[at], trial).models(self.module).numpy()
            except (RuntimeError, ValueError):  # of one group's rows: the module's own errors came in the trial
                if not trial.obstacle:
                    raise
        made[~np.isfinite(made).all(1)] = np.nan
        return made

    def steps(self, models: NetModels, trial: Trial) -> np.ndarray:
        """Return (models,): how many steps each takes."""
        return np.asarray(self.steps_an_epoch(models, trial) * models.epochs)

    def steps_an_epoch(self, models: NetModels, trial: Trial) -> np.ndarray:
        """Return (models,): how many steps each takes in an epoch."""
        # One row has no variance: BatchNorm refuses it as a batch.
        is_left_out = trial.mixes_rows & (models.counts % self.batch == 1) & (models.counts > self.batch)
        return np.asarray(-(-models.counts // self.batch) - is_left_out)

    def visit(self, models: NetModels, trial: Trial, state: NetState | None, turn: int) -> NetState:
        """Train models of one group for an epoch on some of its rows, and return what they have become.

        Args:
            models: with rows that are here, and one epoch.
            state: that they have come with; None at first.
            turn: a number of the epoch and of these rows, by which their order is drawn.
        """
        if trial.obstacle:
            each = [
                self._train(models[at : at + 1], trial, None if state is None else state.part(slice(at, at + 1)), turn)
                for at in range(len(models))
            ]
            return NetState.joined(each)
        return self._train(models, trial, state, turn)

    def _train(self, models: NetModels, trial: Trial, state: NetState | None = None, turn: int = 0) -> NetState:
        """Train models from a state on, or from the start; they have as many steps left as all or those before."""
        module, each = self.module, self.steps_an_epoch(models, trial)
        steps = each * models.epochs
        module.module.train()
        state = (
            NetState.first(module, self.optimizer, models, is_alone=bool(trial.obstacle)) if state is None else state
        )
        rows, slots, shared = state.rows, state.slots, state.shared_of(module)
        rates = torch.from_numpy(models.rates)
        gradients = torch.empty_like(rows)
        compute = module.single if trial.obstacle else module.batched
        starts = np.cumsum(models.counts) - models.counts
        order = np.empty(models.counts.sum(), np.int64)
        active = 0
        with torch.random.fork_rng(devices=[]):  # of dropout
            torch.manual_seed(int((models.seeds[0] >> np.uint64(1)) ^ np.uint64(turn)))
            for number in range(int(steps[0])):
                now = int(np.searchsorted(-steps, -number))
                if now != active:
                    active, leaves = now, self._leaves(rows[:now])
                new = np.flatnonzero(number % each[:active] == 0)
                _draw(order, starts[new], models[new], turn + number // each[new])
                at, weight = self._batch(models.counts[:active], starts[:active], order, number % each[:active])
                x, target = self.features[at], self.target[at]
                margins = compute(leaves, x, shared)
                slope = self.family.slopes(margins.detach(), target).mul_(weight)
                found = torch.autograd.grad(
                    margins, list(leaves.values()), slope, allow_unused=True, materialize_grads=True
                )
                torch.cat([part.reshape(active, -1) for part in found], 1, out=gradients[:active])
                mine = [slot[:active] for slot in slots]
                self.optimizer.step(rows[:active], gradients[:active], mine, rates[:active], state.steps + number + 1)
        return NetState(rows, slots, state.shared_from(shared), state.steps + int(steps[0]))

    def _batch(
        self, counts: np.ndarray, starts: np.ndarray, order: np.ndarray, number: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of each model's batch, and their weights in its mean: (models, rows)."""
        begins = number * self.batch
        sizes = np.minimum(counts - begins, self.batch)[:, None]
        places = np.arange(sizes.max())
        rows = order[(starts + begins)[:, None] + np.minimum(places, sizes - 1)]
        weight = np.where(places < sizes, 1 / sizes, 0).astype(np.float32)
        return torch.from_numpy(rows), torch.from_numpy(weight)

    def parts(self, models: NetModels, order: np.ndarray, trial: Trial) -> Iterator[np.ndarray]:
        """Return models whose tensors fit into a budget, parameters and their gradients and slots; or each alone."""
        numbers = sum(value.numel() for value in self.module.trained.values())
        of_batch = self.batch * (trial.bytes_a_row + 8 * self.features.shape[1])
        size = 4 * numbers * (3 + self.optimizer.slots) + of_batch + 16 * models.counts
        part = np.arange(len(order)) if trial.obstacle else np.cumsum(size[order]) // _MOST_BYTES
        yield from np.split(order, np.flatnonzero(np.diff(part)) + 1)

    def _leaves(self, rows: torch.Tensor) -> Values:
        values = self.module.views(rows, self.module.trained)
        return {name: value.detach().requires_grad_() for name, value in values.items()}

    def _shared(self) -> Values:
        return self.module.new_shared()


@dataclass
class NetState:
    """Models in the middle of their training, and all that it continues with.

    Args:
        rows: (models, numbers that are trained), changed in place.
        slots: each (models, numbers that are trained): what the optimizer keeps.
        shared: by name, with a first dimension for models: what no gradient changes, where training may change it
            otherwise; else nothing.
        steps: that were taken.
    """

    rows: torch.Tensor
    slots: list[torch.Tensor]
    shared: Values
    steps: int

    @classmethod
    def first(
        cls, module: StackedModule, optimizer: StackedOptimizer, models: NetModels, *, is_alone: bool
    ) -> NetState:
        """Return new models.

        Args:
            is_alone: whether it is one that changes what is shared.
        """
        rows = module.initial(models.seeds)
        shared = {name: value[None] for name, value in module.new_shared().items()} if is_alone else {}
        return cls(rows, [torch.zeros_like(rows) for _ in range(optimizer.slots)], shared, 0)

    @classmethod
    def joined(cls, states: Sequence[NetState]) -> NetState:
        """Return the models of several states, which have taken equally many steps."""
        return cls(
            torch.cat([state.rows for state in states]),
            [torch.cat(slots) for slots in zip(*(state.slots for state in states), strict=True)],
            {name: torch.cat([state.shared[name] for state in states]) for name in states[0].shared},
            states[0].steps,
        )

    @classmethod
    def of_tensors(cls, values: Mapping[str, torch.Tensor], prefix: str) -> NetState:
        """Return the state of `as_tensors`."""
        mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        slots = [mine[name] for name in sorted(mine) if name.startswith("slot/")]
        shared = {name.removeprefix("shared/"): value for name, value in mine.items() if name.startswith("shared/")}
        return cls(mine["rows"], slots, shared, int(mine["steps"]))

    def as_tensors(self, prefix: str) -> Values:
        """Return everything by name."""
        made = {"rows": self.rows, "steps": torch.tensor(self.steps)}
        made |= {f"slot/{number}": slot for number, slot in enumerate(self.slots)}
        made |= {f"shared/{name}": value for name, value in self.shared.items()}
        return {prefix + name: value for name, value in made.items()}

    def part(self, which: slice | np.ndarray) -> NetState:
        """Return the state of some of the models."""
        shared = {name: value[which] for name, value in self.shared.items()}
        return NetState(self.rows[which], [slot[which] for slot in self.slots], shared, self.steps)

    def shared_of(self, module: StackedModule) -> Values:
        """Return what a module is computed with beside trained numbers."""
        return {name: value[0] for name, value in self.shared.items()} or module.new_shared()

    def shared_from(self, shared: Values) -> Values:
        """Return what to keep of what a module was computed with."""
        return {name: shared[name][None] for name in self.shared}

    def models(self, module: StackedModule) -> torch.Tensor:
        """Return (models, width), float64."""
        values = self.shared or {name: value[None] for name, value in module.new_shared().items()}
        kept = [values[name].flatten(1).expand(len(self.rows), -1) for name in module.kept]
        return torch.cat((self.rows, *kept), 1).double()


def _draw(order: np.ndarray, starts: np.ndarray, models: NetModels, epochs: np.ndarray) -> None:
    """Write the rows of each model's group, in the order of an epoch, from its start on."""
    for at in similar_sizes(models.counts, np.ones(len(models), np.bool_), 4):
        mine, places = models[at], np.arange(models.counts[at].max())
        is_row = places < mine.counts[:, None]
        chance = mixed(mine.seeds[:, None], 1 + epochs[at, None], places)
        chance[~is_row] = np.iinfo(np.uint64).max
        rows = mine.begins[:, None] + np.argsort(chance, 1, kind="stable")
        order[(starts[at, None] + places)[is_row]] = rows[is_row]


def _culprit(error: RuntimeError) -> str:
    """The layer and the first sentence of an error."""
    layer = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            layer = type(owner).__name__
    sentence = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    return f"{layer}: {sentence}".removeprefix(": ")
