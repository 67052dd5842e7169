"""The fault matrix: every policy x what is struck x every fault, on real jobs. `make faults`, or

    python -m benchmarks.faults --only bsp,sigkill --only asp,coordinator

Cells that are in the result file are kept; name them with `--only`, or take the file away, to run them again. Writes
benchmarks/results/faults.json, and docs/faults.md from it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from benchmarks import cell
from benchmarks.books import Books, books
from offbeat.collective import WaterFilling
from offbeat.fabric import Elastic, ParameterServer, Routed
from offbeat.fault_spec import Fault, Link, Script, Stranger, Target
from offbeat.lab import hardware
from offbeat.plan import Plan
from offbeat.scheduling import Prophet
from offbeat.sync import ASP, BSP, SSP, LocalSGD, RoundRobin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync import Policy

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/faults.json"
STEP = 12
_SHORT_S, _LONG_S = 0.5 * cell.TIMEOUT_S, 2 * cell.TIMEOUT_S
_MOST_SAID = 4
_AT_STEP = ("nan", "inf", "huge", "stale")

POLICIES: dict[str, Policy] = {
    "bsp": BSP(),
    "ssp": SSP(bound=2),
    "asp": ASP(),
    "round-robin": RoundRobin(),
    "local-sgd": LocalSGD(every=4),
    "bsp-early": BSP(),  # with a scheduler
    "ssp-early": SSP(bound=2),
    "elastic": BSP(),  # without a server
    "elastic-routed": BSP(),  # the same over links between the workers
}
FABRICS = {"elastic": Elastic(), "elastic-routed": Elastic(over=Routed(WaterFilling()))}


@dataclass(frozen=True)
class Case:
    """A fault of the matrix.

    Args:
        ends: the struck worker does not come to the end, and is not to.
        nonfinite: of the plan.
        two_phases: it strikes while workers agree on another plan, of which one has not been heard.
        worker: in whose step it strikes, and that is struck if it is a worker's.
        beside: what is struck in the same moment as well; None for nothing.
        again: so many steps later it strikes once more; 0 for never.
    """

    name: str
    kind: str
    target: Target = "worker"
    seconds: float = 1.0
    ends: bool = False
    nonfinite: str = "pass"
    two_phases: bool = False
    worker: int = 1
    beside: Target | None = None
    again: int = 0

    @property
    def faults(self) -> list[Fault]:
        table = {"worker": self.worker, "step": STEP, "kind": self.kind, "seconds": self.seconds, "target": self.target}
        one = msgspec.convert(table, Fault)
        if self.beside is not None:
            return [one, msgspec.structs.replace(one, target=self.beside)]
        if self.again:
            return [one, msgspec.structs.replace(one, step=STEP + self.again)]
        if not self.two_phases:
            return [one]
        silent = Fault(worker=2, step=STEP, kind="mute", seconds=_LONG_S)
        return [silent, msgspec.structs.replace(one, worker=0)]


_ANYWHERE = (
    ("sigstop, short", "sigstop", _SHORT_S),
    ("sigstop, long", "sigstop", _LONG_S),
    ("slow", "slow", _LONG_S),
    ("disk", "disk", _LONG_S),
    ("partition, short", "partition", _SHORT_S),
    ("partition, long", "partition", _LONG_S),
)
CASES = [
    Case("sigkill", "sigkill", ends=True),
    Case("sigkill of rank 0", "sigkill", ends=True, worker=0),
    *(Case(name, kind, seconds=seconds) for name, kind, seconds in _ANYWHERE),
    Case("gil, long", "gil", seconds=_LONG_S),
    *(Case(kind, kind, ends=True) for kind in ("forward", "backward", "loader", "leave")),
    Case("join", "join"),
    *(Case(f"{kind}, long", kind, seconds=_LONG_S) for kind in ("deaf", "mute")),
    *(Case(kind, kind, seconds=_LONG_S) for kind in ("slow-link", "lossy")),
    *(
        Case(kind, kind)
        for kind in ("cut", "flip", "truncate", "duplicate", "reorder", "replay", "lost-reply", *get_args(Stranger))
    ),
    Case("clock", "clock"),
    *(Case(kind, kind, nonfinite="skip") for kind in ("nan", "inf")),
    *(Case(kind, kind) for kind in ("huge", "stale")),
    *(
        case
        for target in ("server", "coordinator")
        for case in (
            Case("sigkill", "sigkill", target),
            Case("sigterm", "sigterm", target),
            *(Case(name, kind, target, seconds) for name, kind, seconds in _ANYWHERE),
        )
    ),
    *(Case("sigkill, twice", "sigkill", target, again=6) for target in ("server", "coordinator")),
    Case("sigstop, long, twice", "sigstop", "server", _LONG_S, again=6),
    Case("sigkill of both shards", "sigkill", "server", beside="coordinator"),
    Case("sigkill with rank 0", "sigkill", "coordinator", beside="worker", worker=0, ends=True),
    Case("sigkill between two phases", "sigkill", "coordinator", two_phases=True),
]


class Cell(msgspec.Struct, kw_only=True, frozen=True):
    """What came of one.

    Args:
        outcome: "survived", "stopped" (a worker did not come to the end that was to), "hangs" or "never fired".
        named: whether somebody else than who was struck named the culprit after it struck, and `detection_s` when.
        books: of the contributions; None if nobody came to the end.
        equal: whether all that came to the end hold the same parameters.
        lead: the most steps that a worker was ahead of another when it was let go; `bound` is what its policy promises.
        ends: how each worker ended.
        said: the first lines that name the culprit, or an error, as the user sees them.
    """

    policy: str
    target: Target
    fault: str
    outcome: str
    named: bool
    detection_s: float | None
    books: Books | None
    equal: bool
    lead: int
    bound: int | None
    ends: list[str]
    said: list[str]
    took_s: float

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.policy, self.target, self.fault)

    @property
    def troubles(self) -> list[str]:
        """What a law of the design does not allow."""
        found = []
        if self.outcome in ("hangs", "never fired"):
            found.append(self.outcome)
        if self.outcome == "stopped" and not self.named:
            found.append("nobody is named")
        if self.books is not None:
            found += [f"{count} {words}" for count, words in self._wrong(self.books) if count]
            found += self.books.broken
        if not self.equal:
            found.append("replicas differ")
        if self.bound is not None and self.lead > max(1, self.bound):
            found.append(f"{self.lead} steps ahead, {self.bound} allowed")
        return found

    def _wrong(self, books: Books) -> list[tuple[int, str]]:
        return [
            (books.more, "count more than is recorded"),
            (books.less, "count less than is recorded"),
            (books.torn, "of which a part counts"),
            (books.missing, "lost without a word"),
            (books.denied, "said not to be used, and are"),
            (books.miscounted, "that the server counts as something else"),
        ]


class Result(msgspec.Struct, kw_only=True):
    """The file.

    Args:
        conditions: under which its cells ran, for people; "" if one at a time on a quiet machine.
    """

    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    timeout_s: float
    conditions: str = ""
    cells: list[Cell] = []


def plan_of(policy: str, case: Case) -> Plan:
    """The plan of a cell."""
    return Plan(
        sync=POLICIES[policy],
        fabric=FABRICS.get(policy, ParameterServer(block_bytes=16384, patience_s=30)),
        nonfinite=case.nonfinite,  # type: ignore[arg-type]
        scheduling=Prophet() if policy.endswith("-early") else None,
    )


def play(policy: str, case: Case, stories: Path | None = None) -> Cell:
    """Run one cell.

    Args:
        stories: where what its processes wrote and said is kept, in a folder of its own; None if it is not.
    """
    is_served = policy not in FABRICS
    arguments = ["--swap-at", str(STEP)] if case.two_phases else []
    shards = is_served + (case.target == "server")
    with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as passing:
        folder = Path(passing)
        if stories is not None:
            folder = Path(
                tempfile.mkdtemp(prefix=f"{policy}-{case.target}-{case.name}-".replace(", ", "-"), dir=stories)
            )
        story = cell.run(plan_of(policy, case), case.faults, folder, shards=shards, arguments=arguments)
        if stories is not None:
            (folder / "said.txt").write_text(
                "".join(f"{one.time_s:.3f} {one.who}: {one.text}\n" for one in story.lines)
            )
        return judge(story, policy, case)


def judge(story: cell.Story, policy: str, case: Case) -> Cell:
    """What came of it."""
    struck = {one.worker for one in case.faults[-1:] if one.target == "worker"}
    expected = set(range(cell.WORKERS)) - (struck if case.ends else set())
    fired_s = story.fired_s
    after = [] if fired_s is None else story.said_after(fired_s)
    culprit = re.compile(_culprit(case))
    themselves = {f"worker {rank}" for rank in struck}
    naming = [line for line in after if culprit.search(line.text) and line.who not in themselves]
    if None in story.codes:
        outcome = "hangs"
    elif fired_s is None:
        outcome = "never fired"
    elif all(rank in story.held and story.codes[rank] == 0 for rank in expected) and (
        case.kind != "join" or cell.WORKERS in story.held  # it came to the end, too
    ):
        outcome = "survived"
    else:
        outcome = "stopped"
    told = naming or [line for line in after if re.search(r"Cannot|Error|offbeat: ", line.text)]
    seen = [one for held in story.held.values() for one in held.seen]
    return Cell(
        policy=policy,
        target=case.target,
        fault=case.name,
        outcome=outcome,
        named=bool(naming),
        detection_s=None if not naming or fired_s is None else round(naming[0].time_s - fired_s, 2),
        books=books(story, getattr(POLICIES[policy], "every", 1)),
        equal=len({held.digest for held in story.held.values()}) <= 1,
        lead=max((int(one["lead"]) for one in seen), default=0),
        bound=POLICIES[policy].bound if policy.startswith(("bsp", "ssp")) and not case.two_phases else None,
        ends=story.ends,
        said=list(dict.fromkeys(_anonymous(line.text) for line in told))[:_MOST_SAID],
        took_s=round(story.took_s, 1),
    )


def _culprit(case: Case) -> str:
    """What names it."""
    if case.kind in get_args(Stranger):
        return "Refused"
    if case.target == "worker":
        return rf"\b[Rr]ank {case.faults[-1].worker}\b"
    return r"parameter server|shard"


def _anonymous(text: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r"127\.0\.0\.1(:|', )\d+", "HOST:PORT", text.strip())


def why_not(kind: str, target: Target) -> str:
    """Why a fault does not apply to a server, or ""."""
    if target == "worker":
        return ""
    if kind in get_args(Script):
        return "it happens within a training script"
    if kind in get_args(Link) and kind != "partition":
        return "each is a fault of a worker's link, and stands there"
    if kind in get_args(Stranger):
        return "who dials dials a server; it stands with the workers"
    return ""


def why_not_elastic(kind: str, policy: str = "elastic") -> str:
    """Why a fault does not apply to workers without a server, or ""."""
    if policy == "elastic-routed" and kind in get_args(Link) and kind != "lost-reply":
        return ""
    if kind in _AT_STEP:
        return "it is put into a gradient as the optimizer steps, which is behind the exchange there"
    if kind in (*get_args(Link), *get_args(Stranger)):
        return "there is neither a server nor a link to one"
    return ""


def selected(only: Sequence[str]) -> list[tuple[str, Case]]:
    """The cells that are asked for: each selection is words that all have to be a cell's policy, target or fault."""
    cells = [(policy, case) for case in CASES for policy in POLICIES if applies(policy, case)]
    if not only:
        return cells
    wanted = [set(re.split(r",(?! )", words)) for words in only]  # names have commas, too, with a space behind them
    return [
        (policy, case)
        for policy, case in cells
        if any(words <= {policy, case.target, case.name, case.kind} for words in wanted)
    ]


def applies(policy: str, case: Case) -> bool:
    """Whether there is such a cell."""
    if policy in FABRICS:
        return case.target == "worker" and not why_not_elastic(case.kind, policy)
    # Its books have as many steps in every contribution, and behind the swap there would be one.
    return not (case.two_phases and policy == "local-sgd")


def read(path: Path) -> Result:
    """What is known already; nothing, if there is no file."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Result)
    return Result(
        date=hardware.date(), versions=hardware.versions(), hardware=hardware.hardware(), timeout_s=cell.TIMEOUT_S
    )


def write(result: Result, path: Path) -> None:
    """A line per cell, in the order of the matrix."""
    order: dict[tuple[str, str, str], int] = {
        (policy, case.target, case.name): n for n, (policy, case) in enumerate(selected([]))
    }
    result.cells.sort(key=lambda one: order.get(one.key, -1))
    head = msgspec.json.encode(msgspec.structs.replace(result, cells=[])).decode()
    lines = ",\n  ".join(msgspec.json.encode(one).decode() for one in result.cells)
    path.write_text(head.replace('"cells":[]', f'"cells":[\n  {lines}\n]') + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="policy, target and fault, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; more than one makes detection slower")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--stories", type=Path, help="keep what each cell wrote and said, in a folder of its own here")
    parser.add_argument("--keep", action="store_true", help="with --only: keep cells that are there")
    asked = parser.parse_args()
    cell.preload()
    result, lock = read(asked.result), threading.Lock()
    done = set() if asked.only and not asked.keep else {one.key for one in result.cells}
    cells = [(policy, case) for policy, case in selected(asked.only) if (policy, case.target, case.name) not in done]
    if not cells and asked.only and not asked.keep:
        sys.exit(f"No cell is {' or '.join(asked.only)}.")

    def play_one(which: tuple[str, Case]) -> None:
        one = play(*which, asked.stories)
        with lock:
            result.cells = [*(other for other in result.cells if other.key != one.key), one]
            write(result, asked.result)
            trouble = f": {'; '.join(one.troubles)}" if one.troubles else ""
            sys.stdout.write(f"{', '.join(one.key)}: {one.outcome} ({one.took_s:.0f} s){trouble}\n")
            sys.stdout.flush()

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(play_one, cells))
    if asked.result == RESULT:
        from benchmarks.faults_page import write_page

        write_page(result)


if __name__ == "__main__":
    main()
