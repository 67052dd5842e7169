"""The checkpoint of a script that torchrun starts again: rank 0 writes it now and then, and all read it.

As in torch's tutorial on fault tolerance with torchrun: one file, the model's and the optimizer's state and the number
of steps. Rows of other systems keep none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat.lab.recorder import SNAPSHOT

if TYPE_CHECKING:
    from offbeat.lab.recorder import Work


class Snapshots:
    """The checkpoints of one row, in the file that the environment names; none if it names no file.

    Call `load` after `bind`, on every worker, and `save` after each step.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Work) -> None:
        name = os.environ.get(SNAPSHOT)
        self._file = None if name is None else Path(name)
        self._parts: dict[str, torch.nn.Module | torch.optim.Optimizer] = {"model": model, "optimizer": optimizer}
        self._every = work.save_every
        self._writes = os.environ.get("RANK", "0") == "0"

    def load(self) -> int:
        """Set model and optimizer to what was saved last; returns the steps they had taken, 0 if nothing was saved."""
        if self._file is None or not self._file.exists():
            return 0
        saved: dict[str, Any] = torch.load(self._file, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        return int(saved["steps"])

    def save(self, steps: int) -> None:
        """Write them down after so many steps, if it is time and this is rank 0."""
        if self._file is None or not self._writes or self._every is None or steps % self._every:
            return
        draft = self._file.with_suffix(".draft")
        torch.save({"steps": steps, **{name: part.state_dict() for name, part in self._parts.items()}}, draft)
        draft.replace(self._file)  # whole or not at all
