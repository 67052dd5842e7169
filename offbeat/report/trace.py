"""trace.json in Chrome's trace event format, which https://ui.perfetto.dev opens.

One process per worker with a track each for computing and waiting and one per bucket on the wire, or per block of a
schedule (twice, if it is reduced and gathered apart); where a forward pass waited for a block, what that holds stands
beside it; one for the parameter server, if there was one, with a track per worker: from a contribution's announcement
until that worker had the parameters for its next step, as the worker measured it, and what the server told people.
Clocks of several machines are taken as they are: their offset is that of their system clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.report.job_events import OF_SERVER, job_events
from offbeat.report.records import OF_JOB, BucketNames, EventRecord, LogRecord, StartRecord, StepRecord, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.report.records import BucketRecord, Record

# Viewers take some hundred thousand slices: a longer run is shown from its end.
_MOST_SLICES = 300_000
_COMPUTE, _WAIT, _FIRST_BUCKET = 1, 2, 10
_SERVER, _TOLD = 1 << 20, 0  # a process beyond all ranks; tracks above 0 are those of the workers
_SERVED = "ParameterServer("


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """The records as a trace; times in microseconds since the first record."""
    records, first_step = _shown(records)
    origin_s = min((record.time_s for record in records), default=0.0)
    names = BucketNames(records)
    served = _served_times(records)
    events: list[dict[str, Any]] = _told_by_server(records, origin_s)
    for record in records:
        start_us = (record.time_s - origin_s) * 1e6
        if isinstance(record, StepRecord):
            events += _step(record, start_us, names.of(record))
            if any(begin <= record.time_s + record.step_s <= end for begin, end in served):
                events += _contribution(record, start_us)
        elif isinstance(record, LogRecord):
            events += [
                {"ph": "C", "name": name, "pid": record.rank, "tid": 0, "ts": start_us, "args": {name: value}}
                for name, value in record.values.items()
                if value is not None
            ]
        elif isinstance(record, EventRecord) and record.what not in OF_SERVER:
            of_job = record.rank == OF_JOB
            instant = {"ph": "i", "s": "g" if of_job else "p", "name": record.what, "pid": 0 if of_job else record.rank}
            events.append(instant | {"tid": _COMPUTE, "ts": start_us, "args": {"text": record.text}})
    events.sort(key=lambda event: event["ts"])
    about = {"first step": first_step, "clocks": "unix time of each worker's host"}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": _names(records, events) + events}


def _shown(records: Sequence[Record]) -> tuple[Sequence[Record], int]:
    """The records of the steps that are shown, and the first of these steps."""
    left = _MOST_SLICES
    for record in reversed(records):
        if isinstance(record, StepRecord):
            left -= 2 + len(record.buckets) + len(record.between) + len(record.waits)
            if left < 0:
                first = record.step + 1
                return [r for r in records if not isinstance(r, StepRecord | LogRecord) or r.step >= first], first
    return records, 0


def _step(record: StepRecord, start_us: float, buckets: Sequence[BucketRecord]) -> list[dict[str, Any]]:
    before_s = record.compute_s + record.early_wait_s
    fence_us = start_us + before_s * 1e6
    totals = {"step": record.step, "samples": record.samples, "bytes_sent": record.bytes_sent, "weight": record.weight}
    events = [
        _slice(record.rank, _COMPUTE, f"step {record.step}", start_us, before_s, totals),
        _slice(record.rank, _WAIT, f"waiting in step {record.step}", fence_us, record.wait_s - record.early_wait_s, {}),
    ]
    for index, (issued_s, done_s) in enumerate(record.buckets):
        about: dict[str, Any] = {"step": record.step if record.buckets_of < 0 else record.buckets_of}
        name = f"bucket {index + 1}"
        if index < len(buckets):
            about |= {"size_bytes": buckets[index].size_bytes, "parameters": ", ".join(buckets[index].parameters)}
            if record.buckets_of >= 0:
                name = f"block {index + 1}: {label(buckets[index])}"
        rounds = [(name, issued_s, done_s)]
        if index < len(record.between):
            reduced_s, gathering_s = record.between[index]
            rounds = [(f"{name}, reduced", issued_s, reduced_s), (f"{name}, gathered", gathering_s, done_s)]
        for what, began_s, ended_s in rounds:
            start, took_s = start_us + began_s * 1e6, ended_s - began_s
            events.append(_slice(record.rank, _FIRST_BUCKET + index, what, start, took_s, about))
    for began_s, ended_s, index in record.waits:
        what = f"block {index + 1}" + (f": {label(buckets[index])}" if index < len(buckets) else "")
        start, about = start_us + began_s * 1e6, {"step": record.buckets_of}
        events.append(_slice(record.rank, _WAIT, f"waiting for {what}", start, ended_s - began_s, about))
    return events


def _served_times(records: Sequence[Record]) -> list[tuple[float, float]]:
    """The intervals (unix time) in which the plan had a parameter server."""
    plans = [(record.time_s, _SERVED in record.plan) for record in records if isinstance(record, StartRecord)][:1]
    plans = [(0.0, plans[0][1])] if plans else []
    for record in records:
        if isinstance(record, EventRecord) and record.plan:
            plans.append((record.time_s, 'kind = "ParameterServer"' in record.plan))
    plans.sort()
    ends = [time_s for time_s, _ in plans[1:]] + [float("inf")]
    return [(begin, end) for (begin, served), end in zip(plans, ends, strict=False) if served]


def _contribution(record: StepRecord, start_us: float) -> list[dict[str, Any]]:
    if not record.buckets:
        return []
    issued_s, done_s = min(one[0] for one in record.buckets), max(one[1] for one in record.buckets)
    about = {"step": record.step, "samples": record.samples, "staleness": record.staleness}
    name = f"step {record.step} of rank {record.rank}"
    return [_slice(_SERVER, record.rank + 1, name, start_us + issued_s * 1e6, done_s - issued_s, about)]


def _told_by_server(records: Sequence[Record], origin_s: float) -> list[dict[str, Any]]:
    """The notices of the server to all workers, once each."""
    return [
        {"ph": "i", "s": "p", "name": "told", "pid": _SERVER, "tid": _TOLD, "ts": (event.time_s - origin_s) * 1e6}
        | {"args": {"text": event.text}}
        for event in job_events(records)
        if event.what in OF_SERVER
    ]


def _slice(rank: int, track: int, name: str, start_us: float, took_s: float, about: dict[str, Any]) -> dict[str, Any]:
    took_us = max(0.0, took_s * 1e6)
    start_us = round(start_us, 3)
    return {"ph": "X", "name": name, "pid": rank, "tid": track, "ts": start_us, "dur": round(took_us, 3), "args": about}


def _names(records: Sequence[Record], events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    hosts = {record.rank: record.host for record in records if isinstance(record, StartRecord)}
    names = []
    if any(event["pid"] == _SERVER for event in events):
        names.append(_name("process_name", _SERVER, 0, "parameter server"))
        names.append({"ph": "M", "name": "process_sort_index", "pid": _SERVER, "tid": 0, "args": {"sort_index": -1}})
    for rank in sorted({record.rank for record in records if record.rank != OF_JOB}):
        process = f"rank {rank} on {hosts.get(rank, 'an unknown host')}"
        names.append(_name("process_name", rank, 0, process))
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for rank, track in sorted({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}):
        if rank == _SERVER:
            names.append(_name("thread_name", rank, track, f"contributions of rank {track - 1}"))
            continue
        label = {_COMPUTE: "compute", _WAIT: "waiting"}.get(track, f"communication, bucket {track - _FIRST_BUCKET + 1}")
        names.append(_name("thread_name", rank, track, label))
    return names


def _name(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}
