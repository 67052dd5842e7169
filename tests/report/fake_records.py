"""Records of a run that never was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


def start(rank: int) -> dict[str, Any]:
    buckets = [{"index": 0, "size_bytes": 400, "parameters": ["fc.bias", "fc.weight"]}]
    about = {"world": 2, "host": f"host{rank}", "pid": 7, "torch": "2.13", "offbeat": "0.1", "plan": "Plan()"}
    return {"kind": "start", "rank": rank, "step": 0, "time_s": 100.0, "model": "Net<b>", "buckets": buckets, **about}


def step(rank: int, number: int, *, compute_s: float = 0.1, wait_s: float = 0.1) -> dict[str, Any]:
    return {
        "kind": "step",
        "rank": rank,
        "step": number,
        "time_s": 100.0 + 0.2 * number,
        "step_s": compute_s + wait_s,
        "compute_s": compute_s,
        "communication_s": 0.12,
        "wait_s": wait_s,
        "bytes_sent": 1000,
        "samples": 32,
        "weight": 1.0,
        "buckets": [[0.05, 0.17]],
    }


def a_run() -> list[dict[str, Any]]:
    records = [start(0), start(1)]
    for number in range(50):
        records += [step(0, number, compute_s=0.02, wait_s=0.18), step(1, number, compute_s=0.19, wait_s=0.01)]
        records.append(
            {
                "kind": "log",
                "rank": 0,
                "step": number,
                "time_s": 100 + 0.2 * number,
                "values": {"loss": 1 / (number + 1)},
            }
        )
    text = "rank 1 <script>alert(1)</script>"
    records.append({"kind": "event", "rank": 0, "step": 3, "time_s": 101.0, "what": "stall", "text": text})
    records.append({"kind": "log", "rank": 0, "step": 49, "time_s": 110.0, "values": {"accuracy": 0.975, "bad": None}})
    records += [
        {"kind": "end", "rank": 0, "step": 50, "time_s": 110.0, "steps": 50, "error": None},
        {"kind": "end", "rank": 1, "step": 50, "time_s": 110.0, "steps": 50, "error": "ValueError: <x>"},
    ]
    return records


def end(rank: int, steps: int, error: str | None = None) -> dict[str, Any]:
    return {"kind": "end", "rank": rank, "step": steps, "time_s": 110.0, "steps": steps, "error": error}


def log(rank: int, number: int, **values: float | None) -> dict[str, Any]:
    return {"kind": "log", "rank": rank, "step": number, "time_s": 100.0 + 0.2 * number, "values": values}


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path
