"""What happened in a run? Tables, plots and pages for people, made from the records in its folder.

* `records` - the lines of metrics.jsonl, read while they are written
* `per_worker` - what they add up to per worker, and who sets the pace
* `outcome` - how the run ended, from last words and stall reports
* `nonfinite` - logged values that became NaN or Inf
* `formatting` - numbers and ranks in sentences
* `job_events` - what happened to the whole job, once each, in order of time
* `time_bins` - sums and quantiles over equal bins of time or steps
* `trace` - trace.json, for Perfetto
* `html_report` - report.html with plots, self-contained
* `groups_page` - the same of models of a table's groups
* `timeline` - the whole run on one axis of time, as SVG; `plots` - the other plots; `buckets` - the time of each bucket
* `scheduled_steps` - what a schedule predicts, beside what its steps have taken; `schedule_plot` - its picture
* `compare` - several runs beside each other
* `job_status` - a job as its parameter server sees it; `hub_status` - one without a server, as the workers' hub sees it
* `prometheus` - the same as figures for Prometheus

Nothing here loads torch.
"""

from offbeat.report.per_worker import WorkerTotals, pace, steps_heading, tally
from offbeat.report.records import Records

__all__ = ["Records", "WorkerTotals", "pace", "steps_heading", "tally"]
