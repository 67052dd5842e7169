"""The models that a worker has prepared, in order, each with what keeps it together with the others' replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.engine.switchable_sync import SwitchableSync


class ModelRegistry:
    """All prepared models of one worker; a model's number is its index.

    Attributes:
        prepared: the models.
        synchronizers: what keeps each of them together.
    """

    def __init__(self) -> None:
        self.prepared: list[PreparedModel] = []
        self.synchronizers: list[SwitchableSync] = []

    def add(self, one: PreparedModel, synchronizer: SwitchableSync) -> None:
        """One more is prepared."""
        self.prepared.append(one)
        self.synchronizers.append(synchronizer)

    def __len__(self) -> int:
        return len(self.synchronizers)

    def pairs(self) -> Iterator[tuple[PreparedModel, SwitchableSync]]:
        """Each model with its synchronizer."""
        return zip(self.prepared, self.synchronizers, strict=True)

    def pair_of(self, model: torch.nn.Module) -> tuple[PreparedModel, SwitchableSync] | None:
        """Return the user's model with its synchronizer; None if it was not prepared."""
        return next((pair for pair in self.pairs() if pair[0].model is model), None)

    @property
    def step(self) -> int:
        """Exchanges so far, of the model prepared first."""
        return self.synchronizers[0].step if self.synchronizers else 0

    @property
    def private_contributions(self) -> int:
        """Contributions that were made with privacy, of all models: they spend together."""
        return sum(one.private.count for one in self.prepared)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The users' models."""
        return [one.model for one in self.prepared]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The trainable parameters of all models."""
        return [parameter for one in self.prepared for parameter in one.parameters.values()]

    @property
    def together(self) -> list[SwitchableSync]:
        """The synchronizers behind whose exchanges all workers can vote."""
        return [one for one in self.synchronizers if one.is_collective]

    def digests(self) -> list[str]:
        """Digests of all parameters, and of what the optimizers have gathered."""
        return [line for one in self.prepared for line in (*one.digests(), *one.digests_gathered())]
