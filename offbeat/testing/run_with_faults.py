"""Run a training script with the faults, and the attacks, that the environment asks for.

    python -m offbeat.testing.run_with_faults train.py --its --own --options
    python -m offbeat.testing.run_with_faults -m its.module --its --own --options

Where a launcher takes a script's path, this file is one: `offbeat run offbeat/testing/run_with_faults.py train.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

from offbeat.testing import attacker
from offbeat.testing.faults import from_environment


def main() -> None:
    """Run the script named on the command line as ``__main__``."""
    sys.argv = sys.argv[1:]
    kept = from_environment(), attacker.from_environment()  # their hooks hold as long as the process
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    del kept


if __name__ == "__main__":
    main()
