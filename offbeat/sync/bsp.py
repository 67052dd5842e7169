"""Bulk-synchronous parallel (Valiant, "A bridging model for parallel computation", CACM 1990).

Every worker contributes to every step, and no worker starts the next one before it has the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BSP:
    """All workers in step.

    >>> BSP()
    BSP()
    """

    @property
    def replicated(self) -> bool:
        return True
