"""The place of one process of a lab: which host, and how it is reached there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlacement:
    """The place of a worker. `namespace` None is this machine itself, `compute_factor` 2.0 half as fast.

    `port` is the switch's end of its link: namespace and interface; None if it has no link.
    """

    host: str
    namespace: str | None
    address: str
    interface: str
    compute_factor: float = 1.0
    port: tuple[str, str] | None = None
