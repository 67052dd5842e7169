"""`offbeat privacy`: what a plan would spend."""

from __future__ import annotations

from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.errors import PlanError


def test_what_contributions_spend_and_how_long_noise_is() -> None:
    asked = ["privacy", "--noise", "1.1", "--contributions", "500", "--max-norm", "2"]
    done = CliRunner().invoke(app, [*asked, "--model-size", "10000", "--workers", "4"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "500 contributions of a worker, clipped to 2, with noise of 2.2 in each element, at delta 1e-05:",
        "epsilon 292.4, compared with nothing of this worker",
        "epsilon 998.9, compared with other data in its place, be it one sample of it",
        "Noise energy 4.84e+04: a contribution of 10000 elements is 220 long by noise alone, and the mean of 4 110.",
    ]
    assert "energy" not in CliRunner().invoke(app, asked).output
    assert isinstance(CliRunner().invoke(app, [*asked, "--delta", "1"]).exception, PlanError)
