"""The program that starts a sentinel; see `offbeat.diagnosis.sentinel`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from offbeat.diagnosis.sentinel import main

if __name__ == "__main__":
    # A Ctrl-C on a terminal reaches the whole foreground, and what `offbeat run` sends all that a worker started; the
    # worker decides, the sentinel follows: one that leaves in order is watched until it has.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="offbeat: %(message)s")
    asyncio.run(main(*map(int, sys.argv[1:4])))
