"""`offbeat switch`: a switch by itself, a job that it sums for, and what its operator sees."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import TRAIN, offbeat, script, start

if TYPE_CHECKING:
    from pathlib import Path

WIDE = TRAIN.replace("Linear(4, 2)", "Linear(64, 64)").replace("randn(3, 4)", "randn(3, 64)")


def test_a_switch_by_itself(tmp_path: Path) -> None:
    path = script(tmp_path, WIDE + "print('norm', float(model.weight.norm()))\n")
    with start("switch", "serve", folder=tmp_path) as served:
        try:
            assert served.stdout is not None
            said = served.stdout.readline()
            address = re.findall(r"summing at (127\.0\.0\.1:\d+): ", said)[0]
            code, output = offbeat("run", "--workers", 2, "--fabric", f'Switch("{address}")', path, folder=tmp_path)
            assert code == 0, output
            norms = re.findall(r"norm ([\d.]+)", output)
            assert len(norms) == 2
            assert norms[0] == norms[1]
            code, output = offbeat("switch", "ctl", address, folder=tmp_path)
            assert code == 0, output
            assert "no job is summed by this switch (udp)" in output
            served.send_signal(signal.SIGTERM)
            assert served.wait(10) == 0
        finally:
            served.kill()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--bind", "0.0.0.0"), "--trusted-network"),
        (("serve", "--bind", "0.0.0.0", "--trusted-network"), "without a token"),
        (("ctl", "127.0.0.1:9"), "Cannot reach 127.0.0.1:9"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    code, output = offbeat("switch", *arguments, folder=tmp_path)
    assert code == 2, output
    assert says in output


def test_a_job_without_a_switch_says_how_to_start_one(tmp_path: Path) -> None:
    code, output = offbeat("run", "--workers", 2, "--fabric", "Switch()", script(tmp_path, WIDE), folder=tmp_path)
    assert code == 2, output
    assert "offbeat switch serve" in output
