"""The tree of errors that offbeat raises on purpose.

    OffbeatError
    ├── PlanError         what was composed cannot work (whose fault: the plan; exit code 2)
    ├── ModelError        what was prepared cannot be trained: model, optimizer or loader (exit code 2)
    ├── ScenarioError     a scenario file describes something that cannot be built (exit code 2)
    ├── HistoryError      what a run recorded cannot be read (exit code 2)
    ├── NetworkError      a host, link or address cannot be used
    ├── PeerError         another process broke the protocol or may not speak to us
    │   └── DisagreementError   the workers differ about plan, layout or step
    ├── ObjectError       an object is lost, was deleted, or cannot be kept
    │   └── ObjectTimeoutError  it has not come in time
    ├── WorkerLostError   a worker died or left while others still need it
    └── NumericsError     NaN or Inf where the plan says to stop on them

The text of each says what cannot be, why (with both values), and what to do. Errors of configuration end with
the path of the value (``plan.codec.dtype``).
"""

from __future__ import annotations


class OffbeatError(Exception):
    """Root of all errors that offbeat raises on purpose."""


class PlanError(OffbeatError, ValueError):
    """The plan cannot work, or cannot be read."""


class ModelError(OffbeatError, ValueError):
    """The model, optimizer or loader cannot be prepared."""


class ScenarioError(OffbeatError, ValueError):
    """The scenario file cannot be built."""


class HistoryError(OffbeatError, ValueError):
    """A run's record cannot be read."""


class NetworkError(OffbeatError, ConnectionError):
    """A host, link or address cannot be used."""


class PeerError(OffbeatError):
    """Another process broke the protocol, or is not allowed to speak to us."""


class DisagreementError(PeerError):
    """The workers differ about the plan, the layout or the step."""


class ObjectError(OffbeatError, LookupError):
    """An object is lost, was deleted, or cannot be kept."""


class ObjectTimeoutError(ObjectError, TimeoutError):
    """An object has not come in time."""


class WorkerLostError(OffbeatError):
    """A worker died or left while the others still need it."""


class NumericsError(OffbeatError, ArithmeticError):
    """A gradient is NaN or Inf and the plan says to stop on it."""


def brief(text: str, most: int = 80) -> str:
    """A text, or how it begins: what somebody else wrote is not told in full, however long it is.

    >>> brief("x" * 100, most=5)
    'xxxxx...'
    """
    return text if len(text) <= most else f"{text[:most]}..."
