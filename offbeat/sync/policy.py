"""A synchronization policy is a rule for when a worker may go on; it does no I/O and reads no clock.

With bulk-synchronous training on a replicated fabric the collective itself is the rule, so a policy declares no more
than what it needs of a fabric.
"""

from __future__ import annotations

from typing import Protocol


class Policy(Protocol):
    """Describes a synchronization policy."""

    @property
    def replicated(self) -> bool:
        """Whether it can run where every worker holds the parameters and applies the same update."""
