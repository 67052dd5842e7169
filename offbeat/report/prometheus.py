"""The status of a job for a Prometheus server: `offbeat top --prometheus`.

Names follow the custom there: base units, `_total` for what only grows, and sums rather than means where a server can
divide them itself: `rate(offbeat_worker_staleness_updates_total[1m])` over that of the applied contributions is the
mean staleness of the last minute. A worker's number is the label `worker`, a model's `model`. Neither token nor address
is among the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.protocol.status import ENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client import Metric

    from offbeat.protocol.status import ModelStatus, WorkerStatus
    from offbeat.protocol.worker_status import TableClock, TrainingStatus

PHASES = (
    "computing", "held", "pushing", "pushed", "pulling", "waiting", "starting", "exchanging", "busy", "paused",
    "unreachable", *ENDS,
)  # fmt: skip


@dataclass(frozen=True)
class _Figure:
    """One family of a worker's figures.

    Args:
        of: the figure, or None where it is not known.
        grows: whether it is a counter.
        stays: whether it is still true of a worker that is gone.
    """

    name: str
    help: str
    of: Callable[[ModelStatus, WorkerStatus], float | None]
    grows: bool = False
    stays: bool = False


def _said(
    what: Callable[[TrainingStatus], float | None], *, least: float = -math.inf
) -> Callable[[ModelStatus, WorkerStatus], float | None]:
    """Make a reader of a worker's own figure; None where there is none, or less than `least`."""

    def of(_: ModelStatus, seen: WorkerStatus) -> float | None:
        value = None if seen.status is None else what(seen.status)
        return None if value is None or value < least else value

    return of


def _on_table(
    what: Callable[[TableClock], float | None],
) -> Callable[[ModelStatus, WorkerStatus], float | None]:
    """Make a reader of a figure of a worker's clock on a switch's table; None where there is none."""
    return lambda _, seen: None if seen.table is None else what(seen.table)


_FIGURES = (
    _Figure("phase_seconds", "For how long the worker has been in its phase.", lambda _, w: w.since_s),
    _Figure("step", "The step it computes or exchanges.", lambda _, w: w.step),
    _Figure("script_step", "Steps its script has made.", lambda _, w: w.made, stays=True),
    _Figure("epochs", "Epochs so far, as its script goes by.", _said(lambda status: status.epochs, least=0.0)),
    _Figure("samples_per_second", "Samples it computes, over the last seconds.", _said(lambda s: s.samples_per_s)),
    _Figure("remaining_seconds", "Until its script ends, if it has said when.", _said(lambda status: status.left_s)),
    _Figure("cpu_cores", "Processor seconds per second.", _said(lambda s: s.cpu_cores if s.memory_bytes else None)),
    _Figure("memory_bytes", "Resident memory.", _said(lambda status: status.memory_bytes or None)),
    _Figure(
        "sent_bytes_per_second",
        "Payload that its exchanges send.",
        _said(lambda s: s.sent_bytes_per_s if s.memory_bytes else None),
    ),
    _Figure("clock", "Contributions of it that have arrived.", lambda _, w: w.clock),
    _Figure(
        "ahead_steps",
        "Steps that it is ahead of the slowest worker's contributions.",
        lambda model_status, w: model_status.ahead(w),
    ),
    _Figure(
        "lead_steps_max",
        "The most steps it was ahead of another worker when it was released.",
        lambda _, w: w.lead,
        stays=True,
    ),
    _Figure("samples", "Samples in its last contribution.", lambda _, w: w.samples),
    _Figure("computing_seconds", "Moving average of its computing for one step.", lambda _, w: w.computing_s or None),
    _Figure(
        "turn_seconds",
        "Moving average of the time from its release to all parameters being there.",
        lambda _, w: w.turn_s or None,
    ),
    _Figure(
        "staleness_updates",
        "Sum over its applied contributions of the updates between what each was computed on and its own.",
        lambda _, w: round(w.staleness * w.applied),  # the server keeps the sum, and says the mean
        grows=True,
        stays=True,
    ),
    _Figure(
        "staleness_updates_max", "The largest staleness of one of its contributions.", lambda _, w: w.worst, stays=True
    ),
    _Figure(
        "waited_seconds",
        "Time from having a contribution to being released, without the present wait.",
        lambda _, w: w.waited_s,
        grows=True,
        stays=True,
    ),
    _Figure("lag_steps", "Steps that it is behind the furthest on a switch's table.", _on_table(lambda at: at.lag)),
    _Figure(
        "barrier_seconds",
        "Time that it has waited for others on a switch's table.",
        _on_table(lambda at: at.waited_s),
        grows=True,
    ),
    _Figure("silent_seconds", "Time since the switch has heard of it last.", _on_table(lambda at: at.silent_s)),
)


class Figures:
    """The collector of `prometheus_client`, asked again at each scrape.

    Args:
        model_statuses: that were seen last; later ones are put into `latest`.
        seen_at_s: when, in seconds since 1970.
    """

    def __init__(self, model_statuses: Sequence[ModelStatus], seen_at_s: float) -> None:
        self.latest = (model_statuses, seen_at_s)  # exchanged whole, because scrapes come on threads of their own

    def collect(self) -> Iterator[Metric]:
        """All families."""
        return families(*self.latest)


def families(model_statuses: Sequence[ModelStatus], seen_at_s: float) -> Iterator[Metric]:
    """The figures of all models and workers, as `prometheus_client` takes them.

    Args:
        seen_at_s: when, in seconds since 1970.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    seen_at = GaugeMetricFamily("offbeat_seen_timestamp_seconds", "When the server was last looked at.")
    seen_at.add_metric((), seen_at_s)
    yield seen_at

    policy = InfoMetricFamily("offbeat_policy", "The synchronization policy, as Python.", labels=["model"])
    updates = CounterMetricFamily("offbeat_updates", "Updates of the parameters.", labels=["model"])
    running = GaugeMetricFamily("offbeat_running_seconds", "Time since the model was opened.", labels=["model"])
    started = GaugeMetricFamily(
        "offbeat_started", "Whether all workers of the beginning have joined.", labels=["model"]
    )
    for model_status in model_statuses:
        model = (str(model_status.model),)
        policy.add_metric(model, {"policy": model_status.policy})
        updates.add_metric(model, model_status.version)
        running.add_metric(model, model_status.running_s)
        started.add_metric(model, model_status.started)
    yield from (policy, updates, running, started)

    about = ["model", "worker"]
    phase = GaugeMetricFamily("offbeat_worker_phase", "1 for the phase the worker is in.", labels=[*about, "phase"])
    contributions = CounterMetricFamily(
        "offbeat_worker_contributions", "What became of the worker's contributions.", labels=[*about, "outcome"]
    )
    for labels, _, seen in _workers(model_statuses):
        for name in PHASES:
            phase.add_metric((*labels, name), seen.phase == name)
        for outcome in ("applied", "dropped", "lost"):
            contributions.add_metric((*labels, outcome), getattr(seen, outcome))
    logged = GaugeMetricFamily(
        "offbeat_worker_logged", "What the worker's script logged last, by name.", labels=[*about, "name"]
    )
    for labels, _, seen in _workers(model_statuses):
        said = None if seen.gone else seen.status
        for name, number in (said.values if said is not None else {}).items():
            logged.add_metric((*labels, name), number)
    yield from (phase, contributions, logged)

    for figure in _FIGURES:
        kind = CounterMetricFamily if figure.grows else GaugeMetricFamily
        family = kind(f"offbeat_worker_{figure.name}", figure.help, labels=about)
        for labels, model_status, seen in _workers(model_statuses):
            known = None if seen.gone and not figure.stays else figure.of(model_status, seen)
            if known is not None:
                family.add_metric(labels, known)
        yield family


def _workers(model_statuses: Iterable[ModelStatus]) -> Iterator[tuple[tuple[str, str], ModelStatus, WorkerStatus]]:
    """Each worker of each model, with its labels."""
    for model_status in model_statuses:
        for seen in model_status.workers:
            yield (str(model_status.model), str(seen.worker)), model_status, seen
