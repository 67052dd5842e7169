"""TOML that somebody else wrote: bounded time, and one short sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from offbeat import toml_reader
from offbeat.cli.part_syntax import read_part
from offbeat.cli.plan import read_plan
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.sync import SSP, LocalSGD

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = 100_000
ENDLESS = [
    (f"sync = {'[' * MANY}{']' * MANY}", "nested more than 32 deep"),
    (f"sync = {'{a=' * 20_000}1{'}' * 20_000}", "nested more than 32 deep"),
    (f"sync = {'[' * 40}{']' * 40}", "nested more than 32 deep - at `plan.sync[0]"),
    (f"a{'.a' * MANY} = 1", "a key has more than 32 parts"),
    (f'"a"{" . a" * 20_000} = 1', "a key has more than 32 parts"),
    (f"[{'a.' * MANY}a]", "a key has more than 32 parts"),
    (f"bucket_bytes = {'9' * 5000}", "a number has thousands of digits"),
    (f"bucket_bytes = 0x{'f' * MANY}", "a number has about 120,412 digits; the largest is 2^63 - 1 - at `plan.bucket"),
    (f"[sync]\nkind = 'SSP'\nbound = {'9' * 300}", "a number has about 300 digits"),
    (f"{'x' * 300} = 1", "a key has 300 characters, and 64 are the most"),
    (f"[sync]\nkind = '{'B' * 300}'", "Unknown sync 'BBB"),
    (f"nonfinite = '{'n' * 3000}'", "a text has 3,000 characters, and 2,000 are the most - at `plan.nonfinite`"),
    (f"# {'x' * (1 << 20)}", "and 262,144 are the most"),
    ("\n".join(f"k{number} = 1" for number in range(20_000)), "Unknown key 'k0'"),
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("text", "says"), ENDLESS, ids=lambda value: value[:24])
@pytest.mark.parametrize("read", [Plan.from_toml, Plan().swapped])
def test_a_plan_without_end_is_refused_in_one_sentence(text: str, says: str, read: Callable[[str], Plan]) -> None:
    """From a file or a checkpoint (`from_toml`), and from whoever asks for a swap (`swapped`)."""
    with pytest.raises(PlanError) as caught:
        read(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        f"SSP({'9' * 300})",
        f"SSP({'9' * 5000})",
        f"{'B' * 3000}()",
        "(" * 5000,
        f"SSP({'-' * 5000}1)",
        f"SSP({[1] * 5000})",
    ],
    ids=lambda text: text[:12],
)
def test_a_part_without_end_on_the_command_line_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_part("sync", text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan(bucket_bytes=10**5000),
        lambda: Plan(sync=SSP(10**5000)),
        lambda: Plan(sync=LocalSGD(10**300)),
        lambda: Plan(sync=SSP(1 << 63), fabric=ParameterServer()),
    ],
)
def test_a_plan_that_no_other_worker_would_read_is_not_made(make: Callable[[], Plan]) -> None:
    with pytest.raises(PlanError, match=r"a number has about [\d,]+ digits; the largest is 2\^63 - 1 - at `plan\."):
        make()


def test_the_largest_plan_that_is_made_is_read() -> None:
    plan = Plan(
        sync=SSP((1 << 63) - 1), fabric=ParameterServer(addresses=tuple(f"h{n}.a.example:7070" for n in range(64)))
    )
    assert Plan.from_toml(plan.to_toml()) == plan


def _fifo(folder: Path) -> Path:
    os.mkfifo(path := folder / "fifo")
    return path


def _holding(data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (path := folder / "plan.toml").write_bytes(data)
        return path

    return write


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_fifo, "it is no regular file"),
        (lambda folder: folder, "it is no regular file"),
        (lambda _: Path("/dev/zero"), "it is no regular file"),
        (lambda folder: folder / "nowhere.toml", "No such file or directory"),
        (lambda folder: folder / ("n" * 300), "File name too long"),
        (lambda folder: folder / "nul\0", "embedded null byte"),
        (_holding(b"bucket_bytes = 1 # \xff"), "it is not UTF-8 (byte 19 is 0xff)"),
        (_holding(b"#" * (1 << 20)), "it has more than 256 KiB"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_one_sentence(
    make: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        read_plan(make(tmp_path))
    assert says in str(caught.value)
    assert "offbeat plan show" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "value", [{"a": [{"b": [[1, 2], "c"]}]}, {}, [], True, 1.5, "x" * 2000, (1 << 63) - 1, -(1 << 63) + 1]
)
def test_what_is_bounded_is_not_refused(value: Any) -> None:
    toml_reader.check_values(value, "plan", "plan", PlanError)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("dtype = float16", 'A word stands in quotes: dtype = "float16".'),
        ("  dtype=bf16  # half", 'A word stands in quotes: dtype = "bf16".'),
        ("seeded = True", "Write seeded = true, in lower case."),
        ("dtype = ", ""),
        ("dtype = 3x", ""),
        (f"dtype = {'x' * 300}", ""),
    ],
)
def test_a_word_without_quotes_is_told_with_its_line_and_the_way_out(line: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        toml_reader.decode(f"[codec]\n{line}\n", "plan", PlanError)
    assert "(at line 2" in str(caught.value)
    assert str(caught.value).partition(").")[2].strip() == hint
