"""The public names, and what they promise in their docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
import offbeat.testing
from offbeat.testing import attacks

ROOT = Path(__file__).parent.parent

# A name that leaves this list breaks somebody's script: that needs a fragment changes/<issue>.breaking.md.
NAMES = {
    "ASP",
    "AdaptQuorum",
    "BSP",
    "BatchTuning",
    "ByProgress",
    "Carry",
    "Cast",
    "Checkpoints",
    "Credit",
    "DSSP",
    "Dense",
    "Elastic",
    "ErrorFeedback",
    "ErrorReset",
    "FIFO",
    "FixedPoint",
    "GRBS",
    "GaussianMechanism",
    "Hybrid",
    "InMemory",
    "KSync",
    "LocalSGD",
    "LookAhead",
    "MergedGradient",
    "ObjectStore",
    "OuterSGD",
    "ParameterServer",
    "Plan",
    "PowerSGD",
    "Priority",
    "ProcessGroup",
    "Prophet",
    "QSGD",
    "RandomK",
    "ReduceScatterGather",
    "Replica",
    "RoundRobin",
    "Routed",
    "Run",
    "SSP",
    "Sign",
    "Switch",
    "TopK",
    "WaitThreshold",
    "init",
}
RUN = {
    "averaged",
    "close",
    "epsilon",
    "expect",
    "has_data",
    "has_joined",
    "is_first",
    "is_validator",
    "load_rng_state",
    "load_state_dict",
    "log",
    "mean",
    "no_sync",
    "out_of_memory",
    "plan",
    "prepare",
    "progress",
    "rank",
    "rng_state",
    "run_dir",
    "score_by",
    "settle",
    "share",
    "state_dict",
    "step",
    "swap",
    "synchronize",
    "world",
}
ATTACKS = {
    "Attack",
    "BitFlip",
    "Distance",
    "Gaussian",
    "Inflate",
    "InnerProduct",
    "LineSearch",
    "LittleIsEnough",
    "Mimic",
    "NotFinite",
    "RandomDirection",
    "SignFlip",
    "Repeat",
    "StaleUpdate",
    "Zero",
    "flipped_labels",
    "hiding_deviations",
}
TESTING = {"check_codec", "check_controller", "check_fabric", "check_policy", "check_rule", "check_scheduler"}


def test_public_names_are_frozen() -> None:
    assert set(offbeat.__all__) == NAMES
    assert set(offbeat.testing.__all__) == TESTING
    assert set(attacks.__all__) == ATTACKS
    with offbeat.init() as run:
        assert {name for name in dir(run) if not name.startswith("_")} == RUN


def test_type_checkers_know_every_public_name_and_no_other() -> None:
    """They do not see `__getattr__`, which would make each typo a name."""
    tree = ast.parse((ROOT / "offbeat/__init__.py").read_text())
    guarded = {ast.unparse(node.test): node.body for node in tree.body if isinstance(node, ast.If)}
    imports = [one for one in guarded["TYPE_CHECKING"] if isinstance(one, ast.ImportFrom)]
    assert {alias.name for one in imports for alias in one.names} == NAMES
    assert [one.name for one in guarded["not TYPE_CHECKING"] if isinstance(one, ast.FunctionDef)] == ["__getattr__"]
    assert "__getattr__" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_public_names_have_docstrings(name: str) -> None:
    thing = getattr(offbeat, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert inspect.getdoc(getattr(thing, method)), f"{name}.{method} has no docstring"


def first_lines() -> dict[str, str]:
    """The first line of the docstring of each public name, and of each public method of a class: an IDE's tooltip."""
    things = {name: getattr(offbeat, name) for name in NAMES}
    things |= {f"testing.{name}": getattr(offbeat.testing, name) for name in TESTING}
    for name, thing in list(things.items()):
        if inspect.isclass(thing):
            members = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
            things |= {
                f"{name}.{key}": value
                for key, value in members.items()
                if inspect.isroutine(value) or (isinstance(value, property) and value.__doc__)
            }
    return {name: (inspect.getdoc(thing) or "").partition("\n")[0] for name, thing in things.items()}


# A line that begins so makes sense only to who has read what stands around it.
NO_SUBJECT = re.compile(
    r"(What|Who|Whoever|Whose|Of|One|Those|These|This|That|It|Its|They|Each|All(?!-)|Some|Nobody|Nothing|Somebody|Everyone|"
    r"Everybody|No|As|At|By|For|From|In|On|With|Under|Once|Does|Has|Had|Is|Are|Was|Were|Begins|Describes|Wraps|Refused|"
    r"False|True|`\w+`)\b"
)


def test_first_lines_say_what_it_is() -> None:
    """Each is a noun phrase or an imperative that stands by itself, and is not cut off."""
    for name, line in first_lines().items():
        assert not NO_SUBJECT.match(line), f"{name}: {line}"
        assert len(line.split()) > 2, f"{name}: {line}"
        assert re.search(r"[.:]$", line), f"{name} goes on in the next line: {line}"
        assert not re.search(r"\brooms?\b", line), f"{name} is in this house's words: {line}"
    again = [line for name, line in first_lines().items() if "." not in name]
    assert len(set(again)) == len(again)


def test_dir_shows_public_names_alone() -> None:
    """Also once its modules are loaded, which then are attributes; names are loaded when they are used, as before."""
    code = (
        "import offbeat, sys; assert 'offbeat.plan' not in sys.modules; offbeat.Plan();"
        "assert 'plan' in vars(offbeat); print(*dir(offbeat)); offbeat.plan; from offbeat import *; SSP(4)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, timeout=50, capture_output=True, text=True).stdout
    assert set(shown.split()) == {*NAMES, "__version__"}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_than_linux_are_refused_in_a_sentence(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import offbeat"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=20, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: Cannot use offbeat on {platform}: it watches its processes by Linux's own means. Use a "
        "Linux machine, a Linux container, or WSL 2."
    )


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(offbeat.__path__, "offbeat.") if not m.name.endswith("__main__")]
    return [name for name in found if name.rpartition(".")[2] not in OPTIONAL or name.count(".") == 1]


OPTIONAL = {"lightning", "accelerate", "transformers", "worker_start", "ray_transport", "ray_collective"}
"""Frameworks; the modules of `offbeat.integrations` that have their names need them."""


NEEDS_WORKERS = {"offbeat.run.run", "offbeat.run.replica"}  # their examples are in docs/using.md


def test_doctests() -> None:
    """Every example in a docstring gives what it says, and each module that has something public has one."""
    attempted = {}
    for name in modules():
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert result.failed == 0, name
        attempted[name] = result.attempted
    public = {getattr(offbeat, name).__module__ for name in NAMES}
    assert {name for name in public if not attempted[name]} == NEEDS_WORKERS


def test_every_module_says_what_it_is_for() -> None:
    for name in modules():
        assert (importlib.import_module(name).__doc__ or "").strip(), f"{name} has no docstring"


def test_imports_are_light() -> None:
    """Importing offbeat loads no torch, so the sentinel and the command line start fast; and it has no effects."""
    code = "import sys, offbeat; assert 'torch' not in sys.modules; offbeat.BSP"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=20)


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "changes").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text()
    linked = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
    named = re.findall(r"`((?:offbeat|tests|examples|benchmarks|docs)/[\w./-]+)`", text)
    for path in linked:
        assert (page.parent / path).exists(), f"{page.name} links to {path}"
    for path in named:
        assert (ROOT / path).exists() or "yours" in path, f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_pages_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")


def test_news_fragments_are_named_by_kind() -> None:
    for path in (ROOT / "changes").iterdir():
        assert re.fullmatch(r"\d+\.(breaking|added|changed|fixed)\.md", path.name), path.name
