"""Command lines and environment of the lab's own programs, so that they start from any folder and from any checkout;
and what they said last.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE = Path(__file__).resolve().parent.parent
RESTARTS = 3
"""How often torchrun starts all workers again."""
TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else workers that are started again find the addresses of those before them in the store, and fail to connect."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""How many threads libraries compute with; MKL's own counts for more than OpenMP's."""
VALIDATOR_TOKEN = "OFFBEAT_VALIDATOR_TOKEN"
"""The variable with the secret of validators, which no other process is to have."""
LAST_LINES = 20
"""Of what a process said, where it is quoted."""
_ENTER = Path(__file__).resolve().with_name("netns_exec.py")


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def script(path: Path, *arguments: str) -> list[str]:
    """The command that runs a script in this interpreter."""
    return [sys.executable, str(path), *arguments]


def entered(namespace: str | None, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a network namespace (None: here), ended by the kernel when we end."""
    # -S -I: nothing but the standard library is needed to enter, and start-up is what a row of runs waits for.
    return [sys.executable, "-S", "-I", str(_ENTER), str(os.getpid()), namespace or "-", *command]


def under_torchrun(command: Sequence[str], *, nodes: int, address: str, store: str, is_first: bool) -> list[str]:
    """The command of one host's agent, which starts `command` again, with those of all others, when one of them ends.

    Args:
        nodes: hosts, each with one worker and one agent.
        address: of this host.
        store: address and port where the agents meet, at the first host.
        is_first: whether this is that host.
    """
    agent = module("torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1")
    agent += ["--max-restarts", str(RESTARTS), "--rdzv-backend", "c10d", "--rdzv-id", "lab", "--rdzv-endpoint", store]
    agent += ["--rdzv-conf", f"is_host={int(is_first)}", "--local-addr", address]
    # The agent gives its worker a session of its own, which nobody would end if the agent is killed.
    return [*agent, "--no-python", sys.executable, "-S", "-I", str(_ENTER), "-", "-", *command]


def environment() -> dict[str, str]:
    """The environment of a command: ours without a validator's secret, this very package first where Python looks for
    modules, one thread for each process.

    All processes of all systems start with the same threads: what torch would make of the cores of this machine, which
    stands for many, differs between those that a launcher starts and others.
    """
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {name: value for name, value in os.environ.items() if name != VALIDATOR_TOKEN}
    return {**ours, "PYTHONPATH": os.pathsep.join(paths), **dict.fromkeys(_THREADS, "1")}


def last_lines(log: Path) -> str:
    """Quote the last lines of a process's output."""
    with log.open(errors="replace") as lines:
        last = "".join(f"  {line.rstrip()}\n" for line in deque(lines, LAST_LINES))
    return last.rstrip("\n") or "  (nothing)"
