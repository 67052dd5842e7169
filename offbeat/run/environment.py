"""The environment: the one place that reads the `OFFBEAT_*` variables, and those of torchrun, for a run.

A value is read when it is asked for, so that a variable that nobody needs may hold anything.

| variable | said by | what |
| --- | --- | --- |
| `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | offbeat run, torchrun | which worker this is |
| `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_*` | torchrun | where the workers meet |
| `OFFBEAT_STORE` | offbeat run | where they meet instead: a file, or tcp://host:port |
| `OFFBEAT_STORE_PREFIX`, `OFFBEAT_JOINS` | offbeat run --join | the job that this worker joins |
| `OFFBEAT_ROLE`, `OFFBEAT_VALIDATOR_TOKEN` | offbeat run --validator | that it is a validator, and what shows that |
| `OFFBEAT_PLAN_PARTS` | offbeat run --refine | fields of a plan as TOML, which replace those of the script's plan |
| `OFFBEAT_PLAN`, `OFFBEAT_TIMEOUT_S`, `OFFBEAT_RUN_DIR`, `OFFBEAT_HISTORY`, `OFFBEAT_HASH_EVERY`, \
`OFFBEAT_CHECK_FRESHNESS` | offbeat run, user | what the script does not say itself |
| `OFFBEAT_SERVERS`, `OFFBEAT_JOB`, `OFFBEAT_TOKEN`, `OFFBEAT_CERTIFICATE`, `OFFBEAT_KEY`, `OFFBEAT_AUTHORITY` \
| the user | the parameter server, and how to connect with it |
| `OFFBEAT_SWITCH` | the user | host:port of the switch that sums gradients |
| `OFFBEAT_TOPOLOGY` | the user | a file that says which links connect the workers, for `Routed()` |
| `OFFBEAT_OUTLIVES`, `OFFBEAT_ENDED`, `OFFBEAT_WORKERS` | offbeat run | files by which both know of each other |
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.engine.worker_context import LauncherInfo
from offbeat.errors import PlanError
from offbeat.server.launch import settings_from

if TYPE_CHECKING:
    from collections.abc import Mapping

_TCP = "tcp://"


class Environment:
    """The variables that a worker goes by.

    Args:
        variables: of this process, or made up.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self._variables = variables

    # -- what `init` is not told ---------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """The plan as TOML; "" if none is named."""
        return self._variables.get("OFFBEAT_PLAN", "")

    @property
    def plan_parts(self) -> str:
        """The fields, as TOML, that replace those of the plan that the script gives; "" for none."""
        return self._variables.get("OFFBEAT_PLAN_PARTS", "")

    @property
    def timeout(self) -> timedelta | None:
        """A wait longer than this is explained; None if it is not said.

        Raises:
            PlanError: if it is no number of seconds.
        """
        if not (text := self._variables.get("OFFBEAT_TIMEOUT_S")):
            return None
        try:
            return timedelta(seconds=float(text))
        except (ValueError, OverflowError) as error:
            raise PlanError(f"Cannot read OFFBEAT_TIMEOUT_S={text!r}: it must be a number of seconds.") from error

    @property
    def run_dir(self) -> Path | None:
        """The folder for metrics."""
        return self._path("OFFBEAT_RUN_DIR")

    @property
    def history(self) -> Path | None:
        """The folder of the run's history."""
        return self._path("OFFBEAT_HISTORY")

    @property
    def hash_every(self) -> int:
        """Steps between two digests of the parameters.

        Raises:
            PlanError: if it is no whole number from 1.
        """
        text = self._variables.get("OFFBEAT_HASH_EVERY", "1")
        if not text.isdecimal() or not int(text):
            raise PlanError(f"Cannot read OFFBEAT_HASH_EVERY={text!r}: it must be a whole number of steps from 1.")
        return int(text)

    @property
    def check_freshness(self) -> bool:
        """Whether parameters that are read too early are looked for.

        Raises:
            PlanError: if it is neither 0 nor 1.
        """
        text = self._variables.get("OFFBEAT_CHECK_FRESHNESS") or "0"
        if text not in ("0", "1"):
            raise PlanError(f"Cannot read OFFBEAT_CHECK_FRESHNESS={text!r}: it must be 0 or 1.")
        return text == "1"

    # -- which worker this is ------------------------------------------------------------------------------------

    def number(self, name: str, default: int) -> int:
        """A whole number.

        Raises:
            PlanError: if it is none.
        """
        text = self._variables.get(name, str(default))
        if not text.lstrip("-").isdigit():
            raise PlanError(
                f"Cannot read {name}={text!r}: it must be a whole number. Start with `offbeat run` or torchrun."
            )
        return int(text)

    @property
    def stated_rank(self) -> str:
        """`RANK` as it stands there, for the name of a file."""
        return self._variables.get("RANK", "0")

    @property
    def is_first_here(self) -> bool:
        """Whether it is the first worker that was started on this machine."""
        return self._variables.get("LOCAL_RANK", "0") == "0"

    @property
    def joins(self) -> tuple[int, int] | None:
        """The rank of this worker and how many the job began with, if it joins one that trains; else None.

        Raises:
            PlanError: if these are no such numbers.
        """
        if "OFFBEAT_JOINS" not in self._variables:
            return None
        rank, world = self.number("RANK", -1), self.number("OFFBEAT_JOINS", 0)
        if not 1 <= world <= rank:
            raise PlanError(
                f"Cannot join a job that began with {world} workers as rank {rank}: those ranks are taken. Start the "
                "script with `offbeat run --join`."
            )
        return rank, world

    @property
    def is_validator(self) -> bool:
        """Whether this process validates for the job that it joins, and is no worker of it.

        Raises:
            PlanError: if the role is neither.
        """
        role = self._variables.get("OFFBEAT_ROLE") or "worker"
        if role not in ("worker", "validator"):
            raise PlanError(f"Cannot come as OFFBEAT_ROLE={role!r}: it must be worker or validator.")
        return role == "validator" and self.joins is not None

    # -- where the workers meet ----------------------------------------------------------------------------------

    @property
    def store_file(self) -> Path | None:
        """The file in which they meet, if they do."""
        place = self._variables.get("OFFBEAT_STORE")
        return None if place is None or place.startswith(_TCP) else Path(place)

    @property
    def store_address(self) -> tuple[str, int] | None:
        """Host and port of the store in which the workers of a job met that this one joins."""
        place = self._variables.get("OFFBEAT_STORE", "")
        if not place.startswith(_TCP):
            return None
        host, _, port = place.removeprefix(_TCP).rpartition(":")
        return host, int(port)

    @property
    def store_prefix(self) -> str:
        """The prefix of that job's keys in its store; "" if this worker joins none."""
        return self._variables.get("OFFBEAT_STORE_PREFIX", "")

    @property
    def store_for_others(self) -> str:
        """The name by which new workers find the store."""
        if self.store_file is not None:
            return str(self.store_file)
        return f"{_TCP}{self.first_address}:{self._variables.get('MASTER_PORT', '')}"

    @property
    def agent_prefix(self) -> str:
        """The prefix that torchrun's agent adds to the keys in its store; "" elsewhere."""
        if self._variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return ""
        return f"/worker/attempt_{self._variables.get('TORCHELASTIC_RESTART_COUNT', '0')}/"

    @property
    def meeting_place(self) -> str:
        """Host and port of the first worker, for people."""
        return ":".join(self._variables.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))

    @property
    def first_address(self) -> str:
        """The host of the first worker, as this one was told it."""
        return self._variables.get("MASTER_ADDR", "")

    @property
    def worker_pids(self) -> Path | None:
        """A file that names the processes of the workers that were started on this machine."""
        return self._path("OFFBEAT_WORKERS")

    # -- the job around it ---------------------------------------------------------------------------------------

    def launcher(self, timeout: timedelta) -> LauncherInfo:
        """The launcher's information about the job around this worker."""
        return LauncherInfo(
            servers=tuple(filter(None, self._variables.get("OFFBEAT_SERVERS", "").split(","))),
            settings=settings_from(self._variables, "default", timeout),
            survival_file=self._path("OFFBEAT_OUTLIVES"),
            ended=self._path("OFFBEAT_ENDED"),
            switch=self._variables.get("OFFBEAT_SWITCH", ""),
            topology=self._path("OFFBEAT_TOPOLOGY"),
            first_here=self.number("RANK", 0) - self.number("LOCAL_RANK", 0),
            here=self.number("LOCAL_WORLD_SIZE", 0),
        )

    def _path(self, name: str) -> Path | None:
        text = self._variables.get(name)
        return Path(text) if text else None
