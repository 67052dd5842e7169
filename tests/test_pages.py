"""Pages and docstrings name files and classes that are there."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
ROOMS = ("offbeat", "tests", "benchmarks", "examples", "fuzz")
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
GLOSSARY = ROOT / "docs" / "glossary.md"
# A user's own files, as pages have them.
THEIRS = {"script.py", "train.py", "yours.py"}


@functools.cache
def identifiers() -> set[str]:
    """All names in the code of the repository, but for those in its strings and comments, and torch's optimizers."""
    found = {*dir(builtins), *dir(torch.optim)}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.alias(name=name):
                    found |= set(name.split("."))
    return found


def missing(text: str) -> set[str]:
    """Python files and classes that a text names and that are not there.

    A file is `engine/reducer.py`, or `reducer.py` alone; a class stands in backticks, as in `LocalSGD(8)`, or in a list
    of what is raised.
    """
    named = re.findall(r"(?<![\w/.*-])(?:[\w-]+/)*\w+\.py\b", text)
    files = {file for file in named if not any(str(path).endswith("/" + file) for path in SOURCES)}
    code = re.findall(r"``.+?``|`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    classes = {name for one in code for name in re.findall(r"(?<![\w/<-])[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+\b", one)}
    for raised in re.findall(r"Raises:\n((?: +.*\n?)+)", text):
        classes |= set(re.findall(r"^    ([A-Z]\w+):", raised, re.MULTILINE))
    return {file for file in files if Path(file).name not in THEIRS} | classes - identifiers()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_is_there(page: Path) -> None:
    assert not missing(page.read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "offbeat").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_what_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert not missing(ast.get_docstring(node) or "")


def test_what_is_not_there_would_be_found() -> None:
    text = "`engine/flat.py`, `a.WaitThreshold` of `NotThere(4)`, `reducer.py`, `train.py`.\n\nRaises:\n    Nope: if."
    assert missing(text) == {"engine/flat.py", "NotThere", "Nope"}


def rows() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The rows of the glossary: the term, what it is, and its classes, each with its file."""
    cells = [line.strip("| ").split(" | ") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [
        (cell[0], cell[1], re.findall(r"`(\w+)` in `(offbeat/[\w/]+\.py)`", cell[2]))
        for cell in cells
        if not cell[0].startswith(("term", "---"))
    ]


@pytest.mark.parametrize(("term", "meaning", "classes"), rows(), ids=[row[0] for row in rows()])
def test_classes_of_the_glossary_are_where_it_says(term: str, meaning: str, classes: list[tuple[str, str]]) -> None:
    assert term
    assert meaning
    assert classes
    for name, file in classes:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, f"{name} is not in {file}"
