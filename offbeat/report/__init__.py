"""What happened? What people look at during a run and after it.

A run folder holds `metrics.jsonl`, to which every worker appends whole lines. This room reads it, also while it grows,
and never imports torch.

===============  ====================================================================================================
`records.py`     the lines of `metrics.jsonl`, and a reader that forgives a torn one
`curve.py`       a curve of any length in bounded memory
`summary.py`     `Run` and `Worker`: the records added up, and who paces the run
`trace.py`       `trace.json`, which opens in Perfetto: compute, communication and waiting per worker
`palette.py`     one colour per worker, everywhere
`plots.py`       the plots of the page, as SVG
`page.py`        `report.html`: one file, no network
===============  ====================================================================================================
"""

from __future__ import annotations

from offbeat.report.page import write_page
from offbeat.report.records import Follower, Record, read_records
from offbeat.report.summary import Run, Worker, read_run
from offbeat.report.trace import write_trace

__all__ = ["Follower", "Record", "Run", "Worker", "read_records", "read_run", "write_page", "write_trace"]
