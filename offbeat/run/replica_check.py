"""A state that is saved while replicas differ: between two averages of local steps it is one worker's own.

Nothing fails, and the file holds a model that no other worker has. A warning names the ways to save what all have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.engine.module_hook import ModuleHook
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.engine import SwitchableSync


class ReplicaCheck:
    """The check of one prepared model; it warns once.

    Args:
        model: the user's.
        synchronizer: keeps it equal with the other workers' replicas.
        tell: called once with what is wrong.
    """

    def __init__(self, model: torch.nn.Module, synchronizer: SwitchableSync, tell: Callable[[str], None]) -> None:
        self._synchronizer, self._tell = synchronizer, tell
        hook = ModuleHook(lambda *_: self._on_state_dict())
        # TorchScript takes no such hook; a module around it, whose state holds that part's, does.
        watched = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._hooks = [module.register_state_dict_pre_hook(hook) for module in watched]

    def _on_state_dict(self) -> None:
        synchronizer = self._synchronizer
        if not synchronizer.holds_own_replica:
            return
        self.close()
        plan = synchronizer.plan
        part = plan.codec if plan.codec.promises.offset else plan.sync
        averaged = ", or take the state within `with run.averaged():`" if synchronizer.can_average else ""
        self._tell(
            f"The state_dict that is taken after step {synchronizer.step} holds this worker's own replica: with "
            f"{short_name(part)} replicas differ between two averages. To save what all workers have in common, call "
            f"run.settle() before{averaged}; on every worker."
        )

    def close(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()
