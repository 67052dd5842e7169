"""`offbeat switch doctor`: what works between this machine and a switch, and what to do about the rest."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from offbeat.cli.job_address import Authority, Certificate, Key, TokenFile, credentials_given


def doctor(
    address: Annotated[str, typer.Argument(help="host:port of the switch's control.")],
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Test the path from this machine to a switch by summing over it. Exit code 1 if summing cannot work.

    It joins a job of its own for a few seconds, which disturbs no other.
    """
    from offbeat.cli.doctor import report
    from offbeat.switch.switch_doctor import examine_switch

    credentials = credentials_given(token_file, certificate, key, authority)
    with Console(stderr=True).status("") as status:
        found = list(examine_switch(address, credentials, status.update))
    report(found, json=json)
