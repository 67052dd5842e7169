"""What people look at during and after a run, made from the records in its folder.

* `records` - the lines of metrics.jsonl, read while they are written
* `tally` - what they add up to per worker, and who sets the pace
* `ending` - how the run ended, from last words and stall reports
* `nonfinite` - logged values that became NaN or Inf
* `words` - numbers and ranks in sentences
* `trace` - trace.json, for Perfetto
* `page` - report.html with plots, self-contained
* `plots` - the plots as SVG
* `sight` - a job as its parameter server sees it
* `prometheus` - the same as figures for Prometheus

Nothing here loads torch.
"""

from offbeat.report.records import Records
from offbeat.report.tally import Tally, pace, tally

__all__ = ["Records", "Tally", "pace", "tally"]
