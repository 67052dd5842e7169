"""The table of what was tried with each framework names tests that are there."""

from __future__ import annotations

import ast

from tests.docs import framework_table


def test_every_line_stands_for_a_test() -> None:
    there = {
        f"{path.stem}.{node.name}"
        for path in framework_table.FOLDER.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = {name.partition("[")[0] for rows in framework_table.ROWS.values() for name in rows}
    assert not named - there


def test_what_did_not_pass_is_said() -> None:
    name, words = next(iter(framework_table.ROWS["trackers"].items()))
    everything = {one: ["passed"] for rows in framework_table.ROWS.values() for one in rows}
    assert "Did not pass here" not in framework_table.table(everything)
    assert f"Did not pass here: {words}" in framework_table.table(everything | {name: ["passed", "failure"]})


def test_the_page_has_the_table() -> None:
    page = framework_table.PAGE.read_text()
    assert framework_table.BEGIN in page
    assert framework_table.END in page
    assert "Did not pass here" not in page
