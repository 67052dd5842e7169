"""The records of a result file: what a row measured, from which every claim of speed is made.

`RowResult` is one row of the table, `RawRun` one worker of one repeat, `ResultFile` the file. A report is checked
against these types when it is written, so what is on disk can be read back.

* `seconds_per_step` - a repeat's value is the mean over its measured steps and workers (throughput, so that no pause
  hides); of the repeats: median, least and most.
* `bound_s` - the physical limit for what the row sends; which one is said in `ResultFile.bounds`, by row.
  `percent_of_bound` is 100 bound/median.
* `ratio_to_baseline` - median over the repeats of the ratio to the baseline's repeat, which ran next to it: of times to
  target if the workload has one, else of seconds per sample.
* `bytes_sent_per_worker`, `wait_s_per_worker` - per rank, over the measured steps of one repeat; medians. Waiting is
  what a step took beyond its computation, measured alike for every system.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import ScenarioError
from offbeat.lab.recorder import Begun, MeasuredStep, Metric, Note, RunTotals
from offbeat.report.formatting import brief
from offbeat.safe_write import write_whole
from offbeat.sim import Prediction

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat.lab.recorder import Line

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
FORMAT = 1


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Spread(_Strict, frozen=True, kw_only=True):
    """Median, least and most of the repeats."""

    median: Amount
    min: Amount
    max: Amount

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class Staleness(_Strict, frozen=True, kw_only=True):
    """Updates between the parameters that a gradient was computed on and its own; 0 if all are in step."""

    mean: Amount
    max: Count


class RowResult(_Strict, frozen=True, kw_only=True):
    """One row of a result file; see the module's text for each number."""

    scenario: str
    row: str
    system: str
    plan: str
    repeats: Annotated[int, msgspec.Meta(ge=1)]
    seconds_per_step: Spread
    samples_per_s: Amount
    time_to_target_s: Amount | None
    final_metric: float | None
    bytes_sent_per_worker: list[Count]
    wait_s_per_worker: list[Amount]
    staleness: Staleness
    bound_s: Amount
    percent_of_bound: Amount
    ratio_to_baseline: Amount
    baseline: str
    events: list[str]


class RawRun(_Strict, frozen=True, kw_only=True):
    """The measurements of one worker in one repeat of one row.

    `metrics` are (training seconds, value), and `metric_steps` the steps that had been taken by then. `staleness` is
    each step's, where something went wrong (`[[fault]]`) on offbeat; `barrier_s` is, where a switch's table lets
    workers go on, what of `wait_s` was waited for the others, and neither transfer nor sending again.
    `block_end_error` is, where gradients go by a schedule, how far blocks ended from where it predicts in this worker's
    last steps, as `offbeat plan schedule` shows it for all.
    """

    row: str
    repeat: Count
    rank: Count
    host: str
    step_s: list[Amount]
    wait_s: list[Amount]
    bytes_sent: Count
    samples: Count
    gradient_bytes: Count
    compute_s: Amount
    digest: str
    gradient_error: Amount | None
    metrics: list[tuple[Amount, float]]
    notes: list[str]
    metric_steps: list[Count] = []
    staleness: list[Count] = []
    barrier_s: list[Amount] = []
    block_end_error: Amount | None = None

    @classmethod
    def from_lines(cls, lines: Sequence[Line], *, row: str, repeat: int, rank: int, host: str) -> RawRun:
        """Gather what a worker's recorder wrote.

        Raises:
            ScenarioError: if it did not finish.
        """
        steps = _once(lines)
        end = lines[-1] if lines else None
        if not isinstance(end, RunTotals) or not steps:
            raise ScenarioError(
                f"Cannot measure row {row!r}: the worker program on {host} ended well but recorded no result. "
                "A script must make a Recorder, call step() and finish(); see offbeat/lab/recorder.py (workload.path)."
            )
        return cls(
            row=row,
            repeat=repeat,
            rank=rank,
            host=host,
            step_s=[step.step_s for step in steps],
            wait_s=[step.wait_s for step in steps],
            bytes_sent=end.bytes_sent,
            samples=end.samples,
            gradient_bytes=end.gradient_bytes,
            compute_s=end.compute_s,
            digest=end.digest,
            gradient_error=end.gradient_error,
            metrics=[(line.time_s, line.value) for line in lines if isinstance(line, Metric)],
            notes=[line.text for line in lines if isinstance(line, Note)],
            metric_steps=[line.step for line in lines if isinstance(line, Metric)],
        )


def _once(lines: Sequence[Line]) -> list[MeasuredStep]:
    """Each measured step once, in order.

    After a restart, steps that are done again count for nothing, and the first new one began when the last one before
    had ended: so all the time that was lost is in it.
    """
    kept: list[MeasuredStep] = []
    is_restarted = False
    for line in lines:
        if isinstance(line, Begun):
            is_restarted = bool(kept)
        elif isinstance(line, MeasuredStep) and line.step == len(kept):
            if is_restarted:
                lost_s = line.end_s - line.step_s - kept[-1].end_s
                line = msgspec.structs.replace(line, step_s=line.step_s + lost_s, wait_s=line.wait_s + lost_s)
            kept.append(line)
            is_restarted = False
    return kept


class LinkUse(_Strict, frozen=True, kw_only=True):
    """The use that one row made of one link: the server's, or that of rank 0's host where the row has no server.

    `received_bytes` and `sent_bytes` are the host's, in every `interval_s` of one `repeat`, from the first measured
    step of any worker to the end of the last one. `share` of the link's rate is that of the busier direction;
    `variation` and `idle_share` (see `offbeat.lab.link_sampler`) are means of both directions. These three are medians
    over all repeats.
    """

    row: str
    host: str
    rate_mbps: Amount
    repeat: Count
    interval_s: Amount
    received_bytes: list[Count]
    sent_bytes: list[Count]
    share: Amount
    variation: Amount
    idle_share: Amount

    @property
    def seen_s(self) -> float:
        """Seconds that the link was sampled."""
        return self.interval_s * len(self.sent_bytes)


class ArcUse(_Strict, frozen=True, kw_only=True):
    """The use that one row made of one direction of one link, where hosts do not hang on one switch.

    `sent_bytes` in so many `packets` passed in it while its source was in its measured steps, or any worker was if that
    is a switch, by the kernel's counters, headers included; `payload_bytes` is that without TCP's headers. `share` is
    that of what it could have carried. They are medians over all repeats.
    """

    row: str
    source: str
    target: str
    rate_mbps: Amount
    sent_bytes: Count
    packets: Count
    payload_bytes: Count
    share: Amount


class FaultCost(_Strict, frozen=True, kw_only=True):
    """The cost of one fault, in one repeat of one row, until the next one struck or the row ended.

    * `others_s` - of the steps that the workers it did not strike ended in that time, the longest, less that worker's
      median step; the largest of these. None where all are started again, or no step was measured.
    * `back_s` - where all are started again: from the moment it struck until every worker had done the step at which it
      struck.
    * `redone_steps` - where all are started again: steps that a worker had done and did once more; the most of any.
    * `said` - what the job said of itself in that time, such as what a restarted server has lost.
    """

    row: str
    repeat: Count
    fault: str
    others_s: Amount | None = None
    back_s: Amount | None = None
    redone_steps: Count | None = None
    said: list[str] = []

    @property
    def words(self) -> str:
        """The cost in words, for people."""
        told = []
        if self.others_s is not None:
            told.append(f"the others' longest step took {self.others_s:.2f} s more than usual")
        if self.back_s is not None:
            told.append(f"all were back at that step after {self.back_s:.2f} s")
        if self.redone_steps is not None:
            told.append(f"{self.redone_steps} step{'' if self.redone_steps == 1 else 's'} had to be done again")
        return f"{self.fault}: {', '.join(told) or 'nothing was measured after it'}"


class SwapCost(_Strict, frozen=True, kw_only=True):
    """The cost of one swap, in one repeat of one row.

    * `policy` - which one came to decide, and `time_s` when, after the first measured step began.
    * `agreed_s` - from the proposal until all had agreed, as the job said.
    * `longer_s` - of the steps that lie in the time from the proposal until the last worker had taken it up, and the
      one behind, the longest, less that worker's median step with the slower one of both policies; the largest of all
      workers.
    * `loss_before`, `loss_after` - mean loss of all workers' last 10 steps before those, and of the first 10 behind
      them. None where the script measured none.
    """

    row: str
    repeat: Count
    policy: str
    time_s: Amount
    agreed_s: Amount
    longer_s: Amount
    loss_before: float | None = None
    loss_after: float | None = None

    @property
    def words(self) -> str:
        """The cost in words, for people."""
        told = f"{brief(self.policy)} from {self.time_s:.1f} s on: agreed upon within {1e3 * self.agreed_s:.0f} ms, "
        told += f"the longest step took {1e3 * self.longer_s:.0f} ms more than usual"
        if self.loss_before is not None and self.loss_after is not None:
            told += f", loss {self.loss_before:.3f} before, {self.loss_after:.3f} after"
        return told


class LossCurve(_Strict, frozen=True, kw_only=True):
    """The training loss of one repeat of one row: of each measured step, mean over the workers."""

    row: str
    repeat: Count
    losses: list[float]


class ResultFile(_Strict, frozen=True, kw_only=True):
    """A result file. `scenario` is its text and `digest` that of its meaning.

    `goodput_mbps` is what a plain TCP stream reached on each host's link, all hosts sending at once, before the rows;
    where hosts do not hang on one switch, in each direction of each link, as "h0>h1", and last on the longest way.
    `overhead_us_per_bucket` is, per offbeat row, the median over the repeats of (its step - the baseline's step) /
    buckets, in microseconds. `bounds` says, per row, which limit its `bound_s` is, and `links` how its links were used
    where the scenario has a server; `arcs` says it where hosts do not hang on one switch. `recoveries` say what each
    fault cost, `handovers` what each swap, `courses` how the loss went where there were swaps, and `simulated` what
    `offbeat.sim` says of the rows that it models. `failed` says why a row has no more repeats, or none.
    """

    format: int = FORMAT
    name: str
    description: str
    scenario: str
    digest: str
    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    goodput_mbps: dict[str, Amount]
    overhead_us_per_bucket: dict[str, float]
    rows: list[RowResult]
    raw: list[RawRun]
    bounds: dict[str, str] = {}
    links: list[LinkUse] = []
    arcs: list[ArcUse] = []
    simulated: list[Prediction] = []
    recoveries: list[FaultCost] = []
    handovers: list[SwapCost] = []
    courses: list[LossCurve] = []
    failed: dict[str, str] = {}


def write(report: ResultFile, path: Path) -> None:
    """Write a report, if it is one: one line per row and per worker, so that two files can be compared by eye.

    The file is written whole or not at all: whoever ends this process leaves the one before.

    Raises:
        msgspec.ValidationError: if a value does not have its type.
        OSError: if the file cannot be written.
    """
    msgspec.json.decode(msgspec.json.encode(report), type=ResultFile)
    fields = []
    for name in report.__struct_fields__:
        value = getattr(report, name)
        if isinstance(value, list):
            items = ",\n  ".join(msgspec.json.encode(item).decode() for item in value)
            fields.append(f' "{name}": [\n  {items}\n ]')
        else:
            fields.append(f' "{name}": {msgspec.json.encode(value).decode()}')
    write_whole(path, ("{\n" + ",\n".join(fields) + "\n}\n").encode())


def read(path: Path) -> ResultFile:
    """Read a report back.

    Raises:
        msgspec.ValidationError: if it is none.
    """
    return decode(path.read_bytes())


def decode(text: bytes) -> ResultFile:
    """The report that was written so.

    Raises:
        msgspec.ValidationError: if it is none.
    """
    return msgspec.json.decode(text, type=ResultFile)
