"""Hooks of contributions: they see what a worker is about to contribute, and may change it.

Tests have a worker lie by them (`offbeat.testing.attacker`). As torch's hooks of all modules and optimizers they hold
for the whole process; without one nothing is called. No plan knows of them: plans stay equal between workers.

    gradient, or change -- before_encode --> codec -- before_push --> blocks on their way to a server
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

_hooks: OrderedDict[int, ContributionHook] = OrderedDict()


class ContributionHook(Protocol):
    """The Protocol of a hook."""

    def before_encode(self, vectors: Sequence[torch.Tensor], what: Hashable, step: int, share: float) -> None:
        """Look at a contribution, or change it in place, before it is encoded.

        Args:
            vectors: [D] of the buckets that are encoded together: all of a model's with a server, else one.
            what: names them; the same in each step.
            step: of the worker's script.
            share: by which the contribution has been multiplied, because without a server all are added up.
        """

    def before_push(self, blocks: Mapping[int, Any], what: Hashable, step: int) -> Mapping[int, Any]:
        """Return what is pushed in place of these encoded blocks; nothing is pushed of those that are not in it.

        Args:
            blocks: by number; left as they are.
            what, step: as above.
        """


def register_contribution_hook(hook: ContributionHook) -> RemovableHandle:
    """Have a hook called for each contribution of this process, until the handle's `remove()`."""
    handle = RemovableHandle(_hooks)
    _hooks[handle.id] = hook
    return handle


def before_encode(vectors: Sequence[torch.Tensor], what: Hashable, step: int, share: float = 1.0) -> None:
    """Call all hooks with a contribution that is about to be encoded."""
    for hook in tuple(_hooks.values()):
        hook.before_encode(vectors, what, step, share)


def before_push(blocks: Mapping[int, Any], what: Hashable, step: int) -> Mapping[int, Any]:
    """Call all hooks with encoded blocks that are about to be pushed; returns what is."""
    for hook in tuple(_hooks.values()):
        blocks = hook.before_push(blocks, what, step)
    return blocks
