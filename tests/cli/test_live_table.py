"""What the terminal shows of a run: lines while it goes on, tables and sentences at its end. Nothing is ever cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from offbeat.cli.live_table import LiveView, final_table
from offbeat.cli.report import no_step
from offbeat.report import Records
from tests.report.fake_records import a_run, end, log, start, step, write

if TYPE_CHECKING:
    from pathlib import Path

VALUES = {"lr": 0.000833, "loss": -1.234e-05, "acc": 0.9917, "gn": 0.543}
FIXED = ("steps", "steps/s", "samples/s", "waiting", "waited s", "sent MB")


def terminal(width: int, *, is_one: bool = True) -> Console:
    """As `offbeat run` makes it."""
    return Console(width=width, force_terminal=is_one, highlight=False, soft_wrap=True, color_system=None)


def shown(what: Any, console: Console) -> str:
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def logged(steps: int = 1234) -> list[dict[str, Any]]:
    records = [start(0), start(1)]
    for number in range(steps - 20, steps):
        records += [record for rank in (0, 1) for record in (step(rank, number), log(rank, number, **VALUES))]
    return records


def test_the_live_view_has_a_line_per_worker(tmp_path: Path) -> None:
    earlier = write(tmp_path, a_run()).read_bytes()  # of a run in the same folder: not to be shown
    console = Console(force_terminal=True, width=120, record=True)
    with LiveView(console, tmp_path / "metrics.jsonl", ranks=range(3)) as view:
        assert view.skip_bytes == len(earlier)
        view.update()
        assert "starting" in shown(view._lines(), terminal(120))
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(earlier)
        view.update()
        console.print(view._lines())
    text = console.export_text()
    assert re.search(r"rank 0 +step 50 +loss 0\.02 +accuracy 97\.5% .* 160 samples/s +waiting 90% +done", text)
    assert re.search(r"rank 2 +starting", text)


def test_the_live_view_is_silent_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(Console(force_terminal=False), write(tmp_path, a_run()), ranks=range(2)) as view:
        view.update()
    assert capsys.readouterr().out == ""


def test_the_table_at_the_end(tmp_path: Path) -> None:
    table = final_table(Records(write(tmp_path, a_run())))
    assert table is not None
    console = Console(record=True, width=160)
    console.print(table)
    assert re.search(r"rank 0 +0\.02 +97\.5% +NaN +50 +5\.00 +160 +90% +8\.82 +0\.05", console.export_text())
    assert final_table(Records(tmp_path / "nothing")) is None


def test_the_share_of_waiting_and_its_seconds_are_of_the_same_steps(tmp_path: Path) -> None:
    steps = [step(0, 0, compute_s=0.5, wait_s=2.5), *(step(0, n, compute_s=0.05, wait_s=0.05) for n in range(1, 11))]
    text = shown(final_table(Records(write(tmp_path, steps))), terminal(140))
    assert re.search(r"rank 0 +11 +10\.00 .*50% +0\.50 ", text), text
    text = shown(final_table(Records(write(tmp_path, steps[:1]))), terminal(140))
    assert re.search(r"rank 0 +1 .*83% +2\.50 ", text), text


def test_the_steps_of_a_run_that_was_resumed_are_said_to_be_its_own(tmp_path: Path) -> None:
    table = shown(final_table(Records(write(tmp_path, [step(0, number) for number in range(40, 96)]))), terminal(140))
    assert "run's steps" in table
    assert re.search(r"rank 0 +56 ", table)


@pytest.mark.parametrize("width", [24, 60, 80, 140])
def test_the_table_is_continued_where_the_terminal_ends(tmp_path: Path, width: int) -> None:
    table = final_table(Records(write(tmp_path, logged())))
    text = shown(table, terminal(width))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for word in (*FIXED, *VALUES, "0.000833", "-1.23e-05", "0.992", "0.543", "0.02", "rank 1"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text), word
    headings = [line.split() for line in text.splitlines() if "worker" in line]
    if width == 140:
        assert len(headings) == 1
    if width == 80:
        assert [heading[1] for heading in headings] == ["run's", "lr"]  # what is always there comes first


def test_the_table_is_whole_in_a_pipe(tmp_path: Path) -> None:
    table = final_table(Records(write(tmp_path, logged())))
    text = shown(table, terminal(20, is_one=False))
    assert "…" not in text
    assert sum("worker" in line for line in text.splitlines()) == 1


def test_a_value_that_is_wider_than_the_terminal_is_not_cut(tmp_path: Path) -> None:
    name = "a_very_long_name_of_a_value_that_was_logged"
    table = final_table(Records(write(tmp_path, [step(0, 0), log(0, 0, **{name: 1.0})])))
    assert name in shown(table, terminal(30))


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_live_lines_leave_out_what_does_not_fit(tmp_path: Path, width: int) -> None:
    path = tmp_path / "metrics.jsonl"
    console = terminal(width)
    with console.capture(), LiveView(console, path, ranks=range(2)) as view:
        write(tmp_path, [*logged(), end(1, 1234)])
        view.update()
        lines = view._lines()
    text = shown(lines, console)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    says = {
        40: r"rank 0 +step 1234 +loss -1.23e-05",
        60: r"rank 0 +step 1234 +loss -1.23e-05 +160 samples/s",
        80: r"rank 0 +step 1234 +loss -1.23e-05 +160 samples/s +waiting 50%",
        140: r"rank 0 +step 1234 +loss -1.23e-05 +lr 0.000833 +acc 0.992 +gn 0.543 +160 samples/s +waiting 50%",
    }
    assert re.match(says[width], text)
    assert ("done" in text) == (width >= 80)


def test_why_there_is_no_table(tmp_path: Path) -> None:
    assert "does not use offbeat" in no_step(tmp_path)
    write(tmp_path, [end(0, 0)])
    assert no_step(tmp_path) == "No step was recorded: no worker prepared a model. Call run.prepare in the script."
    write(tmp_path, [end(0, 0, "DisagreementError: Cannot join: the model differs.\nMore.")])
    assert no_step(tmp_path).endswith("it ended before, with DisagreementError: Cannot join: the model differs.")
    write(tmp_path, [start(0)])
    assert "before the first exchange" in no_step(tmp_path)
    earlier = write(tmp_path, a_run()).stat().st_size
    assert "does not use offbeat" in no_step(tmp_path, skip_bytes=earlier)
