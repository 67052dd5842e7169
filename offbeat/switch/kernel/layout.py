"""The structures of `switch.bpf.c` as they lie in its maps; `KernelObject.map` checks their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from offbeat.switch.packet import MOST_WORKERS

SETTINGS = np.dtype([("ip", ">u4"), ("port", ">u2"), ("unused", "<u2")])
JOB = np.dtype(
    [
        ("lock", "<u4"), ("index", "<u4"), ("number", "<u4"), ("workers", "<u4"), ("blocks", "<u4"), ("slots", "<u4"),
        ("ring", "<u4"), ("rows", "<u4"), ("first_slot", "<u4"), ("first_row", "<u4"), ("quorum", "<u4"),
        ("exponent", "<i4"), ("members", "<u8"), ("low", "<u4"), ("high", "<u4"), ("window_old", "<u4"),
        ("window_new", "<u4"), ("effective", "<u4"), ("epoch", "<u4"), ("finished", "<u4", MOST_WORKERS),
        ("acked", "<u4", MOST_WORKERS), ("until", "<u4", MOST_WORKERS), ("refused", "<u8", 16),
        ("is_capped", "<u4"), ("cap_exponent", "<i4"), ("limits", "<i4", 256),
    ]
)  # fmt: skip
MEMBER = np.dtype(
    [
        ("cookie", "<u4"), ("ifindex", "<u4"), ("ip", ">u4"), ("port", ">u2"), ("is_bound", "<u2"), ("mac", "u1", 6),
        ("own_mac", "u1", 6), ("unused", "<u4"), ("heard_ns", "<u8"), ("duplicates", "<u8"), ("packets", "<u8", 16),
        ("elements", "<u8"), ("clamped", "<u8"), ("squares", "<u8"),
    ]
)  # fmt: skip
EXCHANGE = np.dtype([("lock", "<u4"), ("clock", "<u4"), ("is_settled", "<u4"), ("unused", "<u4"), ("who", "<u8")])
COMMAND = np.dtype(
    [
        ("operation", "<u4"), ("job", "<u4"), ("worker", "<u4"), ("number", "<u4"), ("window", "<u4"),
        ("slack", "<u4"), ("quorum", "<u4"), ("is_done", "<u4"),
    ]
)  # fmt: skip


def slot_of(values: int) -> np.dtype[Any]:
    """One slot, with so many int32."""
    return np.dtype(
        [
            ("lock", "<u4"), ("chunk", "<u4"), ("clock", "<u4"), ("attempt", "<u2"), ("flags", "u1"),
            ("is_used", "u1"), ("is_complete", "u1"), ("has_values", "u1"), ("exponent", "i1"),
            ("unused", "u1", 5), ("seen", "<u8"), ("values", "<i4", values),
        ]
    )  # fmt: skip


def row_of(values: int) -> np.dtype[Any]:
    """One row of the table, with so many int32."""
    return np.dtype(
        [
            ("lock", "<u4"), ("flags", "<u4"), ("has_added", "<u8"), ("added", "<u4", MOST_WORKERS),
            ("values", "<i4", values),
        ]
    )  # fmt: skip
