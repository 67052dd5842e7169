"""Starts a sentinel; see `offbeat.wire.sentinel`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from offbeat.wire.sentinel import main

if __name__ == "__main__":
    # A Ctrl-C on a terminal reaches the whole foreground; the worker decides, the sentinel follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="offbeat: %(message)s")
    asyncio.run(main(*map(int, sys.argv[1:4])))
