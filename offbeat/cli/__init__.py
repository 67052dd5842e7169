"""The command line: `offbeat run | serve | top | plan | lab | report | doctor | bench | certs`.

One file per command. Names (of policies, codecs, fabrics) exist only here and in TOML.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `offbeat` command."""
    from offbeat.cli.app import run_app  # typer is not needed by the worker that `offbeat run` starts

    run_app()


__all__ = ["main"]
