"""One model that was prepared, with its optimizer: what a synchronizer is made from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_64_hexdigest

from offbeat.engine.buffers import distinct
from offbeat.engine.codec_state import CodecState
from offbeat.engine.ignored_parameters import ignored_names
from offbeat.engine.optimizer_state import gathered
from offbeat.engine.private_contributions import PrivateContributions
from offbeat.engine.sparse import sparse_names
from offbeat.errors import ModelError
from offbeat.fabric import SumsSome
from offbeat.layout import arrange
from offbeat.server.optimizers import describe
from offbeat.short_name import short_name
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from offbeat.fabric import Fabric
    from offbeat.layout import Layout
    from offbeat.plan import Plan
    from offbeat.protocol.optimizer_spec import OptimizerSpec
    from offbeat.server.optimizer_checkpoint import States


@dataclasses.dataclass(eq=False)
class PreparedModel:
    """One model that was prepared.

    Args:
        number: which of several, from 0.
        parameters: trainable ones by name, in order of registration.
        optimizer: steps it; another one may take its place between two steps.
        fabric: this worker's end of the workers' own; beside a server it carries what is the same at the beginning.
        codec_state: what the codec keeps of it on this worker, whichever way gradients take.
        private: protects what this worker contributes, if the plan has privacy, and counts it.
    """

    number: int
    model: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    fabric: Fabric
    codec_state: CodecState = dataclasses.field(default_factory=CodecState)
    private: PrivateContributions = dataclasses.field(default_factory=PrivateContributions)

    def describe(self) -> OptimizerSpec:
        """The optimizer in words.

        Raises:
            ModelError: if a server cannot hold it.
        """
        return describe(self.optimizer, {id(p): name for name, p in self.parameters.items()})

    def outline(self) -> list[str]:
        """The class of the optimizer, and what is in which of its groups: where that differs, replicas come apart."""
        names = {id(p): name for name, p in self.parameters.items()}
        groups = enumerate(group["params"] for group in self.optimizer.param_groups)
        held = [f"group {index} holds {names[id(p)]}" for index, group in groups for p in group if id(p) in names]
        return [type(self.optimizer).__qualname__, *held]

    def gathered(self) -> States:
        """The optimizer's state here, by parameter name."""
        return gathered(self.optimizer, self.parameters)

    def digests(self, values: Mapping[str, torch.Tensor] | None = None) -> list[str]:
        """Each parameter's name, and a digest of its values.

        Args:
            values: to take instead, by name.
        """
        return [
            f"{name} {xxh3_64_hexdigest(bytes_of(value.detach().cpu()))}"
            for name, value in (self.parameters if values is None else values).items()
        ]

    def digests_gathered(self) -> list[str]:
        """The digests of the optimizer's state here: parameter, key, and a digest of the values."""
        return [
            f"{name} {key} {xxh3_64_hexdigest(bytes_of(value))}"
            for name, states in self.gathered().items()
            for key, value in states.items()
        ]

    def layout(self, plan: Plan, *, is_served: bool) -> Layout:
        """The layout of its parameters."""
        sparse = set() if is_served else sparse_names(self.model) & set(self.parameters)
        return arrange(self.parameters, bucket_bytes=plan.bucket_bytes, sparse=sparse)


def check_sums_some(one: PreparedModel, plan: Plan) -> None:
    """See that sums of some workers can be made of a model's gradients.

    Raises:
        ModelError: if they cannot; the text says what can be done.
    """
    layout, advice = one.layout(plan, is_served=False), "Use BSP(), or fabric=ParameterServer()."
    if layout.sparse:
        raise ModelError(
            f"Cannot train {layout.sparse[0]} with {short_name(plan.sync)} on a switch: its gradient is sparse, and "
            f"those are gathered from all workers. {advice}"
        )
    if any(bucket.dtype != torch.float32 or bucket.device.type != "cpu" for bucket in layout.buckets):
        raise ModelError(
            f"Cannot train this model with {short_name(plan.sync)} on a switch: it adds float32 on CPUs. {advice}"
        )
    if not isinstance(one.fabric, SumsSome):
        raise ModelError(
            f"Cannot train with {short_name(plan.sync)} here: the workers have met for sums of all. Begin with "
            f"{short_name(plan.fabric)} - at `plan.fabric`."
        )


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is the same on all workers, by name: parameters, frozen ones too, and buffers."""
    ignored = ignored_names(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in ignored and tensor.numel():
            yield name, distinct(tensor.detach())
