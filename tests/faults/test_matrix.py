"""The fault matrix: a few cells in full, and that what a cell shows is judged as it should be."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from benchmarks import cell, faults
from benchmarks.cell import Line, Story
from benchmarks.faults import CASES, POLICIES, Case, judge, plan_of, play, selected
from benchmarks.faults_page import page
from benchmarks.workloads.marked import Held
from offbeat.audit import ContributionFate
from offbeat.fault_spec import Fault, Fired, Link, Process, Script, Stranger
from offbeat.testing.faults import assert_fired, environment
from tests.cli.commands import COMMAND, TRAIN, clean_environment, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.audit.updates import Fate

ROOT = Path(__file__).parent.parent.parent
FIRED_S = 1000.0


def case_of(target: str, name: str) -> Case:
    (case,) = (case for case in CASES if (case.target, case.name) == (target, name))
    return case


# -- cells -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("policy", "target", "fault"),
    [
        ("asp", "worker", "sigkill"),
        *(
            pytest.param(*which, marks=pytest.mark.slow)
            for which in (
                ("bsp", "worker", "sigstop, long"),
                ("ssp", "worker", "flip"),
                ("round-robin", "worker", "forward"),
                ("local-sgd", "worker", "cut"),
                ("asp", "coordinator", "sigstop, short"),
                ("asp", "server", "sigstop, long"),
                ("round-robin", "coordinator", "sigstop, long"),
                ("ssp", "server", "partition, long"),
                ("ssp", "worker", "join"),
                ("bsp-early", "worker", "sigkill"),
                ("bsp-early", "server", "sigkill"),
                ("ssp-early", "worker", "sigstop, long"),
                ("elastic", "worker", "join"),
                ("elastic", "worker", "leave"),
            )
        ),
    ],
)
def test_nothing_is_lost_and_all_agree(policy: str, target: str, fault: str) -> None:
    one = play(policy, case_of(target, fault))
    assert one.outcome == "survived", one
    assert one.troubles == []
    assert one.books is not None
    assert one.books.applied > 0
    if target != "worker" and case_of(target, fault).kind in ("sigstop", "partition"):
        assert (one.books.lost, one.books.dropped) == (0, 0), "nobody was killed"


@pytest.mark.slow
@pytest.mark.timeout(340)
@pytest.mark.parametrize("target", ["server", "coordinator"])
@pytest.mark.parametrize("kind", ["sigstop", "partition"])
def test_a_server_that_was_away_changes_no_bit(tmp_path: Path, target: str, kind: str) -> None:
    """Counts alone could lie: a contribution that is applied twice is not lost, either."""
    case, digests = case_of(target, f"{kind}, long"), []
    for some in ([], case.faults):
        folder = tmp_path / str(len(some))
        folder.mkdir()
        story = cell.run(plan_of("bsp", case), some, folder, shards=2, arguments=["--exactly", "20"])
        assert story.codes == [0, 0, 0], [line.text for line in story.lines]
        assert story.verdict.violations == []
        assert (story.verdict.applied, story.verdict.lost, story.verdict.dropped) == (60, 0, 0)
        digests.append({held.digest for held in story.held.values()})
    assert_fired(case.faults, story.log)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


@pytest.mark.timeout(60)
def test_a_script_under_offbeat_run_is_struck_as_well(tmp_path: Path) -> None:
    """One that knows nothing of it, started by the launcher as any other; the launcher says who it was."""
    train, log = script(tmp_path, TRAIN), tmp_path / "log"
    asked = [Fault(worker=1, step=2, kind="forward")]
    process = subprocess.run(
        [*COMMAND, "run", "--workers", "2", str(ROOT / "offbeat/testing/run_with_faults.py"), str(train)],
        cwd=tmp_path,
        env={**clean_environment(), **environment(asked, log)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert_fired(asked, log)
    assert process.returncode == 1, process.stdout
    assert re.search(r"rank 1 on \S+ ended with exit code 1", process.stdout)
    assert "a fault in forward, as was asked for" in process.stdout


# -- how a cell is judged ----------------------------------------------------------------------------------------------


def story_of(folder: Path, case: Case) -> Story:
    """A job in which worker 1 was killed at its step 2 and all went well: the others did 3 steps, as one third each."""
    rows = [[-1 / 3] * 3, [-1 / 3, -1 / 3, 0.0], [-1 / 3] * 3]
    one = Held(rank=0, done=3, marks=rows, torn=0, digest="same", seen=seen(), loss=1.0)
    story = Story(case.faults, folder, codes=[0, -9, 0])
    story.held = {0: one, 2: msgspec.structs.replace(one, rank=2)}
    story.known = [applied(rank, step) for rank, done in ((0, 3), (1, 2), (2, 3)) for step in range(done)]
    story.lines = [Line(FIRED_S + 0.4, "shard 0", "offbeat: Rank 1 is gone: it hung up. The others continue.")]
    log = [Fired(number=n, fault=fault, time_s=FIRED_S) for n, fault in enumerate(case.faults)]
    cell.log_of(folder).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in log))
    return story


def applied(rank: int, step: int) -> ContributionFate:
    return ContributionFate(0, rank, (step,), step, "applied", 1 / 3, True)


def seen(lead: int = 1) -> list[dict[str, Any]]:
    done = (3, 2, 3)
    return [{"worker": rank, "applied": done[rank], "dropped": 0, "lost": 0, "lead": lead} for rank in range(len(done))]


def test_all_is_well(tmp_path: Path) -> None:
    one = judge(story_of(tmp_path, case_of("worker", "sigkill")), "ssp", case_of("worker", "sigkill"))
    assert (one.outcome, one.named, one.detection_s, one.troubles) == ("survived", True, 0.4, [])
    assert one.books is not None
    assert one.books.applied == 8


def _unused(story: Story, fate: Fate = "dropped") -> None:
    """Step 1 of rank 2 is in no update, and the server says so."""
    story.known = [
        replace(o, fate=fate, share=0.0, told=False) if (o.rank, o.step) == (2, 1) else o for o in story.known
    ]
    story.held[0].marks[2][1] = 0.0
    story.held[0].seen[2] |= {"applied": 2, "dropped": 1}


def _said(story: Story) -> None:
    _unused(story, "lost")
    story.lines.append(
        Line(FIRED_S + 1, "shard 0", "Contribution 1 of rank 2 (32 samples) is lost: only a part arrived.")
    )


def _twice(story: Story) -> None:
    story.held[0].marks[2][1] = -2 / 3


def _vanished(story: Story) -> None:
    story.held[0].marks[2][1] = 0.0


def _lost(story: Story) -> None:
    _unused(story)


def _miscounted(story: Story) -> None:
    story.held[0].seen[2] |= {"applied": 2, "dropped": 1}


def _broken(story: Story) -> None:
    story.verdict.violated(2, "Update 3 was made twice.")


def _denied(story: Story) -> None:
    text = "Rank 2 is back: what it had computed in step 1 was outdated, and is not used."
    story.lines.append(Line(FIRED_S + 1, "worker 2", text))


def _torn(story: Story) -> None:
    story.held[0].torn = 4


def _differ(story: Story) -> None:
    story.held[2].digest = "another"


def _too_far(story: Story) -> None:
    story.held[0].seen = seen(lead=3)


@pytest.mark.parametrize(
    ("spoil", "trouble"),
    [
        (_twice, "1 count more than is recorded"),
        (_vanished, "1 count less than is recorded"),
        (_lost, "1 lost without a word"),
        (_miscounted, "2 that the server counts as something else"),
        (_broken, "law 2: Update 3 was made twice."),
        (_denied, "1 said not to be used, and are"),
        (_torn, "4 of which a part counts"),
        (_differ, "replicas differ"),
        (_too_far, "3 steps ahead, 2 allowed"),
    ],
)
def test_a_broken_law_is_seen(tmp_path: Path, spoil: Callable[[Story], None], trouble: str) -> None:
    case = case_of("worker", "sigkill")
    story = story_of(tmp_path, case)
    spoil(story)
    assert judge(story, "ssp", case).troubles == [trouble]


def test_what_is_lost_and_said_to_be_is_counted(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    story = story_of(tmp_path, case)
    _said(story)
    one = judge(story, "ssp", case)
    assert one.troubles == []
    assert one.books is not None
    assert (one.books.lost, one.books.dropped) == (1, 0)


def test_a_change_of_several_steps_weighs_alike_in_each(tmp_path: Path) -> None:
    """Of a worker that was killed the last one is known from the coordinator alone."""
    case = case_of("worker", "sigkill")
    story = story_of(tmp_path, case)
    rows = [[-0.5] * 4 + [-0.25] * 2, [-0.25] * 4, [-0.25] * 4 + [-0.75] * 2]
    for rank in (0, 2):
        story.held[rank] = msgspec.structs.replace(story.held[rank], done=6, marks=rows, seen=[])
    shares = {0: [0.5, 0.25], 1: [0.25], 2: [0.25, 0.75]}
    story.known = [
        ContributionFate(0, rank, (number,), None if rank == 1 else (3, 6)[number], "applied", share, True)
        for rank, of in shares.items()
        for number, share in enumerate(of)
    ]
    assert judge(story, "local-sgd", case).troubles == []
    story.known[1] = replace(story.known[1], share=0.75)
    assert judge(story, "local-sgd", case).troubles == ["2 count less than is recorded"]


def test_without_a_server_the_marks_of_a_step_add_up(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    story = story_of(tmp_path, case)
    story.known = []
    for step in (1, 2):
        story.held[0].marks[0][step] = story.held[0].marks[2][step] = -0.5
    story.held[0].marks[1][1] = 0.0
    assert judge(story, "elastic", case).troubles == []
    story.held[0].marks[2][1] = 0.0
    assert judge(story, "elastic", case).troubles == ["1 count less than is recorded", "1 lost without a word"]
    story.held[2] = msgspec.structs.replace(story.held[2], idle=[1])
    assert judge(story, "elastic", case).troubles == ["1 count less than is recorded"]


def test_who_hangs_does_not_survive(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    story = replace(story_of(tmp_path, case), codes=[0, -9, None])
    assert judge(story, "asp", case).troubles == ["hangs"]


def test_a_fault_that_never_fired_is_no_survival(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    story = story_of(tmp_path, case)
    cell.log_of(tmp_path).unlink()
    assert judge(story, "asp", case).troubles == ["never fired"]


def test_who_stops_without_a_culprit_is_a_trouble(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    story = replace(story_of(tmp_path, case), codes=[0, -9, 1])
    assert judge(story, "asp", case).troubles == []
    assert judge(replace(story, lines=[]), "asp", case).troubles == ["nobody is named"]
    themselves = [Line(FIRED_S + 1, "worker 1", "rank 1 is lost")]
    assert not judge(replace(story, lines=themselves), "asp", case).named, "who was struck is no witness"
    before = [Line(FIRED_S - 1, "shard 0", "rank 1 is lost")]
    assert not judge(replace(story, lines=before), "asp", case).named, "said before it struck"


# -- which cells there are, and how they are shown ---------------------------------------------------------------------


def test_every_fault_stands_in_the_matrix() -> None:
    kinds = {kind for one in (Process, Script, Link, Stranger) for kind in one.__args__}  # type: ignore[attr-defined]
    assert {case.kind for case in CASES if case.target == "worker"} == kinds - {"sigterm"}
    for target in ("server", "coordinator"):
        struck = {case.kind for case in CASES if case.target == target}
        assert all((kind in struck) != bool(faults.why_not(kind, target)) for kind in kinds)


def test_without_a_server_only_what_happens_to_workers_strikes() -> None:
    kinds = {case.kind for _, case in selected(["elastic"])}
    assert {case.target for _, case in selected(["elastic"])} == {"worker"}
    assert {"sigkill", "sigstop", "leave", "join", "forward"} <= kinds
    assert not kinds & {"partition", "nan", "wrong-token"}


def test_a_name_with_a_comma_is_one_word() -> None:
    assert [(policy, case.name) for policy, case in selected(["bsp,server,partition, long"])] == [
        ("bsp", "partition, long")
    ]


def test_cells_are_selected_by_words() -> None:
    assert {policy for policy, _ in selected(["bsp"])} == {"bsp"}
    chosen = selected(["asp,coordinator,sigkill", "ssp,flip"])
    assert [(policy, case.target, case.name) for policy, case in chosen] == [
        ("ssp", "worker", "flip"),
        ("asp", "coordinator", "sigkill"),
        ("asp", "coordinator", "sigkill, twice"),
        ("asp", "coordinator", "sigkill with rank 0"),
        ("asp", "coordinator", "sigkill between two phases"),
    ]
    assert len({(policy, case.target, case.name) for policy, case in selected([])}) == len(selected([]))
    assert set(POLICIES) == {policy for policy, _ in selected([])}


def test_the_page_is_the_result_file() -> None:
    """Run `python -m benchmarks.faults_page` if it is not."""
    assert (ROOT / "docs/faults.md").read_text() == page(faults.read(faults.RESULT))


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    case = case_of("worker", "sigkill")
    one = judge(story_of(tmp_path, case), "asp", case)
    result = faults.read(tmp_path / "none.json")
    result.cells = [one]
    faults.write(result, tmp_path / "faults.json")
    assert faults.read(tmp_path / "faults.json") == result
    others = " not run |" * 5
    assert f"| sigkill | not run | not run | survived, 0.4 s |{others}" in (text := page(result))
    assert f"| nan | not run | not run |{others} - |" in text, "there is no such cell"
