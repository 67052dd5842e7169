"""Conformance checks, for offbeat's own parts and for yours.

Each takes an instance and raises `AssertionError` with one sentence where it breaks a rule of its room. They need
nothing but offbeat and torch, so they run under any test runner.

* `codec` - `check_codec`: rules of `offbeat.codec.codec`
* `controller` - `check_controller`: rules of `offbeat.control.controller`
* `fabric` - `check_fabric`: rules of `offbeat.fabric.fabric`
* `policy` - `check_policy`: rules of `offbeat.sync.policy`; `interleaving` plays one, `purity_check` sees whether a
  policy decides from the state alone
* `object_stores` - stores in memory around a directory of objects, in a random order
* `rule` - `check_rule`: rules of `offbeat.robust.rule`
* `scheduler` - `check_scheduler`: rules of `offbeat.scheduling.scheduler`

And what goes wrong, on purpose:

* `faults` - faults at (worker, step); `run_with_faults` runs a script with them
* `attacks` - what workers that lie send in place of their own update; `attacker` has this process's worker lie
* `chaos_proxy` - a TCP proxy that does to the bytes what a network should not
"""

from __future__ import annotations

from offbeat.testing.codec import check_codec
from offbeat.testing.controller import check_controller
from offbeat.testing.fabric import check_fabric
from offbeat.testing.policy import check_policy
from offbeat.testing.rule import check_rule
from offbeat.testing.scheduler import check_scheduler

__all__ = ["check_codec", "check_controller", "check_fabric", "check_policy", "check_rule", "check_scheduler"]
