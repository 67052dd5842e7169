"""Parts of a plan on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import offbeat
from offbeat.cli.part_syntax import read_part
from offbeat.codec import Cast
from offbeat.errors import PlanError
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, RoundRobin
from tests.cli.commands import TRAIN, script
from tests.cli.commands import offbeat as command

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [
    *(("sync", part) for part in (ASP(), BSP(), DSSP(2, 8), SSP(4), KSync(3, late="carry"), RoundRobin(slots=2))),
    ("sync", Hybrid(BSP(), SSP(2), ((0, 1), (2, 3)))),
    ("sync", LocalSGD(8, outer=OuterSGD(lr=0.7))),
    ("sync", LocalSGD(8)),
    ("sync", LocalSGD(8, delay=1, fragments=4)),
    ("codec", Cast("fp16")),
    ("fabric", offbeat.ParameterServer(addresses=("10.0.0.7:7070",), block_bytes=8192)),
    ("fabric", offbeat.ProcessGroup()),
]


@pytest.mark.parametrize(("room", "part"), PARTS, ids=repr)
def test_what_a_part_prints_makes_it_again(room: str, part: object) -> None:
    assert read_part(room, repr(part)) == part


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ASP", ASP()),
        (" SSP( 4 ) ", SSP(4)),
        ("DSSP(1, high=3)", DSSP(1, 3)),
        ("Hybrid(BSP, ASP, 2)", Hybrid(BSP(), ASP(), 2)),
    ],
)
def test_short_forms(text: str, part: object) -> None:
    assert read_part("sync", text) == part


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SPS(4)", "Unknown sync 'SPS' (did you mean 'SSP' or 'BSP'?) - at `plan.sync.kind`."),
        ("Zzzzz()", "Unknown sync 'Zzzzz' (there is ASP, BSP, DSSP, Hybrid, KSync, LocalSGD, RoundRobin, SSP)"),
        ("Hybrid(BSP(), SPS(1), 2)", "Unknown outer 'SPS' (did you mean 'SSP' or 'BSP'?) - at `plan.sync.outer.kind`."),
        ("Cast('bf16')", "Unknown sync 'Cast'"),
        (
            "SSP(bond=4)",
            "Unknown key 'bond' of SSP (did you mean 'bound'?) - at `plan.sync.bound`.".replace(
                "sync.bound", "sync.bond"
            ),
        ),
        ("SSP(-1)", "- at `plan.sync.bound`."),
        ("SSP('many')", "Cannot use 'many' as bound."),
        ("SSP(1, 2)", "Cannot make SSP of 2 values: it takes bound."),
        (
            "LocalSGD(8, 0, OuterSGD(0.7))",
            "Unknown key 'a value without a name' of OuterSGD (there is lr, momentum, nes",
        ),
        ("ASP(1)", "Cannot make ASP of 1 values: it takes none."),
    ],
)
def test_what_there_is_not(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_part("sync", text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SSP(",
        "4",
        "'SSP(4)'",
        "SSP(4)(5)",
        "offbeat.SSP(4)",
        "SSP(**{})",
        "SSP(4, bound=5)",
        "SSP(bound=1, bound=2)",
        "__import__('os').system('false')",
        "SSP(__import__('os').getpid())",
        "(lambda: 0)()",
        "SSP(2 ** 70)",
        "[SSP(4)]",
        "\0",
        "(" * 500,
    ],
)
def test_nothing_else_is_read_and_nothing_is_run(text: str) -> None:
    with pytest.raises(PlanError):
        read_part("sync", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Switch(127.0.0.1:7100)", """Put text in quotes: 'Switch("127.0.0.1:7100")'."""),
        ("Switch(node-c:7100, values=352)", """Put text in quotes: 'Switch("node-c:7100", values=352)'."""),
        (
            "ParameterServer(addresses=(10.0.0.7:7070, 10.0.0.8:7070,))",
            """Put text in quotes: 'ParameterServer(addresses=("10.0.0.7:7070", "10.0.0.8:7070",))'.""",
        ),
        ("Switch([::1", "Put text in quotes, and the whole in others for the shell."),
    ],
)
def test_text_without_quotes_is_shown_with_them(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_part("fabric", text)
    assert str(caught.value).endswith(says)


def test_on_the_command_line(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    plan = ("--workers", 1, "--run-dir", "out", "--sync", "SSP(2)", "--fabric", "ParameterServer(block_bytes=4096)")
    code, output = command("run", *plan, path, folder=tmp_path)
    assert code == 0, output
    written = offbeat.Plan.from_toml((tmp_path / "out/plan.toml").read_text())
    assert written == offbeat.Plan(sync=SSP(2), fabric=offbeat.ParameterServer(block_bytes=4096))


def test_an_option_mends_a_plan_that_could_not_be_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[sync]\nkind = 'SSP'\nbound = 2\n")
    path = script(tmp_path, "")
    code, output = command("run", "--workers", 1, "--run-dir", "out", "--plan", "plan.toml", path, folder=tmp_path)
    assert (code, "Cannot use SSP(bound=2) on ProcessGroup()" in output) == (2, True), output
    mended = ("--plan", "plan.toml", "--fabric", "ParameterServer()")
    code, output = command("run", "--workers", 1, "--run-dir", "out", *mended, path, folder=tmp_path)
    assert code == 0, output
    written = offbeat.Plan.from_toml((tmp_path / "out/plan.toml").read_text())
    assert written == offbeat.Plan(sync=SSP(2), fabric=offbeat.ParameterServer())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sync", "SPS(4)"), "Unknown sync 'SPS' (did you mean 'SSP' or 'BSP'?)"),
        (("--sync", "SSP(4)"), "Cannot use SSP(bound=4) on ProcessGroup()"),
        (("--fabric", "ParamServer"), "did you mean 'ParameterServer'?"),
        (("--codec", "print('x')"), "Unknown codec 'print'"),
    ],
)
def test_refused_in_one_sentence(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    code, output = command("run", *options, script(tmp_path, TRAIN), folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert says in output
    assert not (tmp_path / "runs").exists()
