"""The validator of one run: the workers' own program beside the server, on data that its script trusts.

It is no worker: it has the rank behind theirs, records nothing, and is in no figure. That it validates is in its
credential, a secret of this run that its process and the shards know, and no worker. It ends with the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from offbeat.exit_codes import how_it_ended
from offbeat.lab import command_lines, lab_registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from offbeat.lab.worker_placement import WorkerPlacement

LINGERS_S = 20.0
"""From the end of a validator that ended well until the last worker has, too."""


class ValidatorProcess:
    """The validator of one run: started on construction, gone when the `with` block ends.

    Args:
        command: the program and its arguments, the same as the workers'.
        place: where it runs, which is where the server's first shard does.
        folder: for its output (`validator.log`).
        world: how many workers the job begins with.
        token: the validators' secret, which the shards know, too.
        environment: variables of the row, of the server, and its own.
        lab: the lab's identity; None outside of namespaces.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        place: WorkerPlacement,
        folder: Path,
        world: int,
        token: str,
        environment: Mapping[str, str],
        lab: str | None = None,
    ) -> None:
        self._host, self._log = place.host, folder / "validator.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command_lines.entered(place.namespace, command),
                env={
                    **command_lines.environment(),
                    "RANK": str(world),
                    "WORLD_SIZE": "1",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GLOO_SOCKET_IFNAME": place.interface,
                    "PYTHONUNBUFFERED": "1",
                    "OFFBEAT_JOINS": str(world),
                    **({lab_registry.MARK: lab} if lab is not None else {}),
                    **environment,
                    "OFFBEAT_ROLE": "validator",
                    command_lines.VALIDATOR_TOKEN: token,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Tell its process id; the process is not waited for before the end."""
        return self._process.pid

    def obituary(self, code: int) -> str:
        """Say that it ended while workers trained, and what it said last.

        Args:
            code: its return code; 0 if it left them although it did well.
        """
        told = f"the validator on host {self._host} {how_it_ended(code)}"
        if code:
            told += " before the workers were done"
        else:
            told += f", and {LINGERS_S:g} s later workers still run. Its loop must not end before the job does: see "
            told += "run.is_validator (workload.path)"
        return f"{told}. Its last output was\n{command_lines.last_lines(self._log)}"

    def end(self) -> None:
        """End it and what it started, at once; ending twice is allowed."""
        if self._process.returncode is None:
            # Not yet waited for, so the group's name cannot have passed to strangers.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> ValidatorProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
