"""The command line: `offbeat run`, `serve`, `top`, `swap`, `plan`, `simulate`, `lab`, `report` and more.

One file per command, and `app` - the table of all commands. Names (of policies, codecs, fabrics) exist only here and in
TOML: `part_syntax` reads them.

* `run` - start local workers: `launch` starts and ends them, `worker_main` is what each is, `threads` says how many
  threads each gets, `shards` looks after their servers, `live_table` shows how they train, `join_target` finds the job
  that others join, `nodes` are the machines of one job
* `serve` - one shard of a parameter server by itself; `shard_main` - the process of a shard, whoever starts it
* `switch` - a switch that sums gradients, and what its operator sees; `switch_doctor` - the path to it, tested
* `objects` - a store of tensors that tasks hand to each other, and what is in it
* `groups` - a model for each group of a table
* `top` - look at a job: `status_client` asks it, `top_view` draws the answer; `job_address` - where a job is
* `swap` - have another policy decide; `plan` - write, read and compare plans
* `operator_client` - one request to a job's coordinator
* `simulate`, `lab` - predict and measure a scenario
* `report`, `verify_run` - what a run's records and history say; `track` - for those who draw them
* `bench` - how fast parts of offbeat are here: `wire_benchmark` measures, with the calls of `rpc`;
  `switch_benchmark`, `codec_benchmark`, `rule_benchmark`, `object_benchmark`
* `collective` - the paths of an all-reduce; `interconnect_view` - MultiTree's evaluation, as it is shown
* `doctor` - what works on this machine; `certs` - certificates for development; `privacy` - what contributions spend
* `help_group` - the pages of `--help`; `timeout` - the option of that name of several commands
"""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the `offbeat` command."""
    # Ctrl-C ends the process at once while modules are imported: within one, KeyboardInterrupt is a traceback.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offbeat.cli.app import run_app  # typer is not needed by the worker that `offbeat run` starts

    signal.signal(signal.SIGINT, handler)
    run_app()


__all__ = ["main"]
