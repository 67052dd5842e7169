"""The first sentence of each docstring stands by itself: it has a subject, or is an imperative.

`Whether ...` is the field's idiom for what returns a bool, and is accepted there alone.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import offbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(offbeat.__file__).parent
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# A sentence that begins with one of these has no subject, or one that only what stands around it explains.
REFUSED = {
    "question word": "How What Whatever When Where Wherever Which Who Whoever Whom Whose Why",
    "pronoun": (
        "Anybody Anything Everybody Everyone Everything Her His It Its Nobody Nothing Nowhere One's Others Our "
        "Somebody Someone Something Somewhere That Their Them These They This Those"
    ),
    "preposition": (
        "About Above After Against Among As At Before Behind Below Beside Between By During For From In Into Of On "
        "Over Through To Under Until Upon With Within Without"
    ),
    "conjunction or adverb": (
        "And Because But Here If Instead Nearly Not Now Once Only Or Really Since So Then There Unless While"
    ),
    "verb in the third person": (
        "Appends Are Asks Begins Brings Calls Carries Cuts Deals Decides Describes Dials Did Does Draws Follows "
        "Forwards Gives Had Has Hears Is Keeps Knows Looks Makes Reads Refuses Says Serves Starts Takes Tells Ties "
        "Waits Was Watches Were Wraps"
    ),
}
KINDS = {word: kind for kind, words in REFUSED.items() for word in words.split()}
DETERMINERS = {"A", "All", "An", "Any", "Both", "Each", "Every", "Few", "Many", "No", "One", "Some", "The"}


def docstrings(path: Path) -> Iterator[tuple[str, Documented, str]]:
    """The docstrings of a file, each with the qualified name of what it documents."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, Documented, str]]:
        here = name
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            here = f"{name}.{node.name}".lstrip(".") if not isinstance(node, ast.Module) else ""
            text = ast.get_docstring(node)
            if text:
                yield here, node, text
        for child in ast.iter_child_nodes(node):
            yield from walk(child, here)

    yield from walk(ast.parse(path.read_text()), "")


def fault(text: str, node: Documented) -> str | None:
    """The reason why a docstring's first sentence does not stand by itself, if it does not."""
    sentence = re.split(r"(?<=[.:;?])\s", " ".join(text.split("\n\n")[0].split()))[0]
    if isinstance(node, ast.Module) and sentence.endswith("?"):
        return None  # a room's question
    words = re.findall(r"[\w'-]+|[^\w\s]", sentence)
    first = words[0]
    if first == "Whether":
        returns = getattr(node, "returns", None)
        return None if returns and "bool" in ast.unparse(returns) else "`Whether` is for what returns a bool"
    if first in KINDS:
        return f"`{first}` is a {KINDS[first]}"
    if first in DETERMINERS and (len(words) > 1 and words[1] in {"of", "that", "which", "who", "whom"}):
        return f"`{first} {words[1]}` has no head noun"
    if first in DETERMINERS and re.search(r"(\w's|\ws')[.:;]?$", sentence):
        return "the sentence ends in a possessive and has no head noun"
    return None


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_first_sentences_stand_by_themselves(path: Path) -> None:
    faults = {name or "the file": fault(text, node) for name, node, text in docstrings(path)}
    assert not {name: reason for name, reason in faults.items() if reason}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Reduce one bucket.", True),
        ("The undo log of one block.", True),
        ("One bucket of gradients.", True),
        ("Of one job.", False),
        ("One worker's.", False),
        ("All that arrives.", False),
        ("What a worker pushes.", False),
        ("Somebody writes it.", False),
    ],
)
def test_a_fragment_would_be_found(text: str, good: bool) -> None:
    node = ast.parse(f'class A:\n    """{text}"""').body[0]
    assert isinstance(node, ast.ClassDef)
    assert (fault(text, node) is None) == good


@pytest.mark.parametrize(("returns", "good"), [("bool", True), ("bool | None", True), ("str", False)])
def test_whether_is_for_what_returns_a_bool(returns: str, good: bool) -> None:
    node = ast.parse(f"def f() -> {returns}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert (fault("Whether it is so.", node) is None) == good
