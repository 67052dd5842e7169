"""The command line is frozen, and documented."""

from __future__ import annotations

import pytest
from typer.main import get_command

from offbeat.cli.app import app
from tests.docs.command_line import PAGE, commands, options, page

# An option that leaves this table breaks somebody's script: that needs a fragment changes/<issue>.breaking.md.
COMMANDS = {
    "run": [
        "SCRIPT",
        "ARGUMENTS",
        "--workers",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--plan",
        "--sync",
        "--codec",
        "--fabric",
        "--controller",
        "--scheduling",
        "--tuning",
        "--rule",
        "--validating-rule",
        "--privacy",
        "--bucket-bytes",
        "--nonfinite",
        "--keeps",
        "--too-few",
        "--refine",
        "--servers",
        "--join",
        "--validator",
        "--job",
        "--timeout",
        "--run-dir",
        "--history",
        "--hash-every",
        "--check-freshness",
    ],
    "groups fit": [
        "DATA",
        "--by",
        "--target",
        "--model",
        "--l2",
        "--features",
        "--standardize",
        "--hold-out",
        "--hold-out-by",
        "--min-rows",
        "--small-fallback",
        "--workers",
        "--folder",
        "--out",
        "--results",
    ],
    "groups explain": ["DATA", "--by", "--target", "--model", "--l2", "--features", "--standardize", "--workers"],
    "groups predict": ["MODELS", "DATA", "--out"],
    "groups show": ["MODELS", "--out"],
    "objects doctor": ["ADDRESS", "--job", "--token-file", "--certificate", "--key", "--authority", "--json"],
    "objects ls": ["ADDRESS", "--job", "--token-file", "--certificate", "--key", "--authority"],
    "objects serve": [
        "--bind",
        "--port",
        "--client-port",
        "--directory",
        "--directory-port",
        "--directories",
        "--memory-mib",
        "--until-unused",
        "--job",
        "--token-file",
        "--certificate",
        "--key",
        "--authority",
    ],
    "objects stop": ["--job"],
    "switch ctl": ["ADDRESS", "--token-file", "--certificate", "--key", "--authority", "--evict", "--show-rules"],
    "switch serve": [
        "--bind",
        "--port",
        "--token-file",
        "--certificate",
        "--key",
        "--authority",
        "--trusted-network",
        "--timeout",
        "--target",
        "--interfaces",
        "--table-mib",
    ],
    "switch doctor": ["ADDRESS", "--token-file", "--certificate", "--key", "--authority", "--json"],
    "serve": [
        "--bind",
        "--port",
        "--job",
        "--coordinator",
        "--token-file",
        "--certificate",
        "--key",
        "--authority",
        "--timeout",
        "--snapshots",
        "--every",
        "--history",
    ],
    "track": [
        "RUN_DIR",
        "--tensorboard",
        "--wandb",
        "--mlflow",
        "--steps",
        "--follow",
    ],
    "top": [
        "RUN_DIR",
        "--job",
        "--once",
        "--interval",
        "--json",
        "--prometheus",
        "--bind",
        "--job-name",
        "--token-file",
        "--certificate",
        "--key",
        "--authority",
    ],
    "report": ["RUN_DIRS", "--output"],
    "swap": ["POLICY", "--job", "--fabric", "--job-name", "--token-file", "--certificate", "--key", "--authority"],
    "verify-run": ["PATHS", "--against", "--json"],
    "simulate": ["SCENARIO", "--like", "--workers", "--steps", "--json", "--write"],
    "doctor": ["--json"],
    "plan show": ["PATH"],
    "plan diff": ["FIRST", "SECOND"],
    "plan schedule": ["RUN_DIR", "--scheduler", "--model", "--json", "--png"],
    "lab run": ["SCENARIO", "--json", "--png", "--repeats", "--steps"],
    "lab show": ["SCENARIO"],
    "lab clean": ["--force"],
    "bench codec": [
        "CODECS",
        "--model",
        "--workers",
        "--bucket-mb",
        "--device",
        "--seconds",
        "--repeats",
        "--json",
    ],
    "bench objects": ["--size-mb", "--hosts", "--mbps", "--repeats", "--json"],
    "bench rule": ["RULES", "--workers", "--size-mb", "--seconds", "--repeats", "--json"],
    "bench wire": ["--json", "--seconds", "--repeats", "--tls"],
    "bench switch": [
        "--target",
        "--workers",
        "--values",
        "--loss",
        "--what",
        "--clocks",
        "--seconds",
        "--repeats",
        "--json",
        "--history",
    ],
    "collective show": [
        "METHOD",
        "--network",
        "--hosts",
        "--rate-mbps",
        "--size",
        "--chunk",
        "--table",
        "--out",
        "--trees",
        "--time-line",
    ],
    "collective verify": ["PATH", "--network"],
    "collective evaluate": ["--network", "--json", "--png"],
    "certs": ["FOLDER", "--host", "--validator", "--peer", "--worker"],
    "privacy": ["--noise", "--contributions", "--delta", "--max-norm", "--model-size", "--workers"],
}


def test_commands_and_options_are_frozen() -> None:
    assert {name: options(command) for name, command in commands().items()} == COMMANDS
    assert options(get_command(app)) == ["--version", "--debug"]


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_has_help(name: str) -> None:
    command = commands()[name]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{name} {parameter.name}"


def test_what_is_required_is_marked() -> None:
    """On the page, and in --help, which typer writes."""
    required = {
        f"{name} {longest}"
        for name, command in commands().items()
        for parameter, longest in zip(command.params, options(command), strict=True)
        if parameter.required
    }
    assert {"run SCRIPT", "swap --job", "swap POLICY", "lab run --json"} <= required
    marked, name = set(), ""
    for line in page().splitlines():
        name = line.removeprefix("## offbeat ") if line.startswith("## ") else name
        if line.endswith("**Required.** |"):
            marked.add(f"{name} {max(line.split('|')[1].strip(' `').split('`, `'), key=len)}")
    assert marked == required


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
