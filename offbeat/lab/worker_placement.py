"""The place of one process of a lab: which host, and how it is reached there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlacement:
    """The place of a worker. `namespace` None is this machine itself, `compute_factor` 2.0 half as fast.

    `interface` is the one that has its address. `port` is the switch's end of its link: namespace and interface; None
    if it does not hang on one switch. `interfaces` are those by which anything leaves the host, if it is not that one.
    """

    host: str
    namespace: str | None
    address: str
    interface: str
    compute_factor: float = 1.0
    port: tuple[str, str] | None = None
    interfaces: tuple[str, ...] = ()
