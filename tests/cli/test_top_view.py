"""What `offbeat top` draws: all there is room for, the most important first, and nothing that is cut."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from offbeat.cli.top_view import TopView, how_far, state
from offbeat.protocol.worker_status import StatusEvent, TrainingStatus
from tests.report.fake_status import a_scene, seen

if TYPE_CHECKING:
    from offbeat.protocol.status import ModelStatus


def drawn(
    *scenes: ModelStatus, width: int = 80, height: int = 24, is_terminal: bool = True, silent_s: float = 0.0
) -> str:
    console = Console(
        width=width, height=height, force_terminal=is_terminal, highlight=False, color_system=None, legacy_windows=False
    )
    view = TopView()
    view.add(scenes)
    view.silent_s = silent_s
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_80_columns_have_room_for_everything() -> None:
    text = drawn(a_scene(*a_scene().workers[:3]))
    lines = text.splitlines()
    assert lines[0] == "SSP(bound=3)  1,234 updates (61.7/s in all), running for 20 s"
    assert lines[1].split() == ["rank", "state", "step", "ahead", "stale", "worst", "waits", "batch", "applied"]
    assert re.fullmatch(r" +0  computing for 0\.3 s +100 +2 +1\.5 +4 +25% +32 +100 *", lines[2])
    assert re.fullmatch(r" +1  held for 12 s +101 +3 +1\.5 +4 +85% +32 +100 *", lines[3])
    assert lines[5].startswith("Rank 2 sets the pace: a step takes it 120.0 ms (100.0 ms of it computing), 100%")
    assert max(map(len, lines)) <= 80


def test_what_happened_to_the_server_is_told() -> None:
    note = "The parameter server was restarted and resumes from version 40: update 41 is lost."
    assert "version 40: update 41 is lost." in " ".join(drawn(a_scene(note=note)).split())
    assert len(drawn(a_scene(*[seen(rank) for rank in range(50)], note=note)).splitlines()) <= 24


def test_lost_and_dropped_contributions_are_told_where_there_are_any() -> None:
    text = drawn(a_scene(), width=120)
    assert re.search(r"applied +dropped +lost", text)
    assert re.search(r" +3  gone +40 +0\.5 +1 +40 +2 +1", text)
    assert "dropped" in drawn(a_scene(), width=80), "more important than how many were applied"


def test_it_is_said_where_it_stands_who_is_rejected() -> None:
    """Not here: whoever may train may look."""
    assert "rejected" not in drawn(a_scene())
    text = " ".join(drawn(a_scene(plan='[sync]\nkind = "BSP"\n\n[rule]\nkind = "Krum"\n')).split())
    assert "who is rejected stands in the history (offbeat verify-run)." in text
    many = a_scene(*[seen(rank) for rank in range(50)], plan="[validator]\n")
    assert len(drawn(many, width=60).splitlines()) <= 24
    validator = seen(9, validates=True, applied=50, staleness=0.0, worst=0)
    assert re.search(r" 9  validator, .* 50", drawn(a_scene(validator))) is None


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_narrow_terminal_has_fewer_columns(width: int) -> None:
    text = drawn(a_scene(), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"0  computing for 0\.3 s", text)
    assert ("ahead" in text) == (width >= 60)


def test_a_low_terminal_shows_the_slowest() -> None:
    many = [seen(rank, phase="held" if rank % 2 else "computing", since_s=0.01) for rank in range(100)]
    many[77] = seen(77, computing_s=3.0)
    many[50] = seen(50, since_s=60.0)
    many[51] = seen(51, phase="gone", computing_s=9.0)
    text = drawn(a_scene(*many), height=24)
    lines = text.splitlines()
    assert len(lines) <= 24
    ranks = [int(line.split()[0]) for line in lines if re.match(r" +\d+  ", line)]
    assert ranks == sorted(ranks)
    assert {77, 50} <= set(ranks)
    assert 51 not in ranks
    more = 100 - len(ranks)
    assert re.search(rf"and {more} more: \d+ held, \d+ computing, 1 gone", text)
    assert len(drawn(a_scene(*many), a_scene(*many, model=1), height=24).splitlines()) <= 24


def test_a_pipe_has_room_for_all() -> None:
    many = a_scene(*(seen(rank, dropped=1, lost=1) for rank in range(100)), policy="x" * 300)
    text = drawn(many, width=4096, height=5, is_terminal=False)
    assert len(text.splitlines()) == 103
    assert "x" * 300 in text
    assert "\x1b" not in text


def test_how_fast_it_goes_is_taken_over_some_seconds() -> None:
    view = TopView()
    for tick in range(41):
        view.add((a_scene(version=100 + tick // 4, running_s=10 + tick / 2),))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view)
    assert "110 updates (0.6/s now, 3.7/s in all), running for 30 s" in capture.get()


def test_who_has_not_come_and_who_does_not_answer() -> None:
    assert "The server is running, but no worker has joined yet." in drawn()
    assert "; 3 workers are here, it begins with the last" in drawn(a_scene(started=False), width=150)
    assert "has not answered" not in drawn(a_scene(), silent_s=1.0)
    assert drawn(a_scene(), silent_s=4.0).startswith("The server has not answered for 4.0 s.")


def test_several_models() -> None:
    text = drawn(a_scene(policy="BSP()"), a_scene(model=1, policy="ASP()"))
    assert text.startswith("model 0: BSP()")
    assert "\n\nmodel 1: ASP()" in text


def test_no_text_commands_the_terminal() -> None:
    evil = a_scene(seen(0, phase="\x1b[2J"), policy="ASP\x1b]0;x\x07\r\n()")
    text = drawn(evil, is_terminal=False)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.startswith("ASP?]0;x???()")


@pytest.mark.parametrize(
    ("phase", "since_s", "words"),
    [
        ("computing", 0.31, "computing for 0.3 s"),
        ("held", 47.2, "held for 47 s"),
        ("pushed", 600.0, "pushed, waits 10 min"),
        ("pulling", 9000.0, "pulling for 2.5 h"),
        ("gone", 3.0, "gone"),
    ],
)
def test_states_in_words(phase: str, since_s: float, words: str) -> None:
    assert state(seen(0, phase=phase, since_s=since_s)) == words


def status(rank: int, **about: Any) -> TrainingStatus:
    known = {
        "host": f"node{rank}", "step": 100, "samples": 3200, "epochs": 3.25, "epochs_per_s": 0.05, "steps_per_s": 9.0,
        "samples_per_s": 288.0, "values": {"loss": 0.5 + rank, "accuracy": 0.75},
    }  # fmt: skip
    return TrainingStatus(**{**known, **about})


def told(*about: dict[str, Any], **of_scene: Any) -> ModelStatus:
    workers = [seen(rank, status=status(rank, **one)) for rank, one in enumerate(about)]
    return a_scene(*workers, **of_scene)


def test_how_far_and_how_fast_it_is() -> None:
    total = {"total_epochs": 12.0}
    assert how_far(told(total, total)) == (
        "epoch 3.25 of 12, about 3 min left, loss 1, accuracy 75.0%, 576 samples/s, 2 workers on 2 hosts"
    )
    assert how_far(told({})).startswith("epoch 3.25, this epoch about 15 s more, loss 0.5,"), "nothing is invented"
    assert how_far(told({"epochs": -1.0, "total_steps": 1000})).startswith("step 100 of 1,000, about 100 s left, ")
    assert how_far(told({"epochs": -1.0})).startswith("loss 0.5, ")
    assert how_far(told({"epochs_per_s": 0.0}, {"epochs_per_s": 0.0})).startswith("epoch 3.25, loss 1, ")
    assert "loss NaN" in how_far(told({"values": {"loss": math.nan}}, {}))
    assert how_far(a_scene()) == "", "these have said nothing"
    assert how_far(told(total, total), 40) == "epoch 3.25 of 12, about 3 min left"


def test_before_a_validator_has_come_it_is_what_all_wait_for() -> None:
    """Its parameters are the first: until then nobody computes."""
    plan, workers = "[validator]\n", [seen(rank, since_s=23.0) for rank in range(3)]
    text = drawn(a_scene(*workers, started=False, version=0, world=3, plan=plan), width=150)
    assert "; 3 workers are here, it begins with a validator" in text
    assert text.count("waiting for 23 s") == 3
    assert "computing" not in text
    text = drawn(a_scene(*workers[:1], started=False, version=0, world=3, plan=plan), width=150)
    assert "; 1 worker is here, it begins with the last and a validator" in text
    validator = seen(3, validates=True)
    text = drawn(a_scene(*workers[:2], validator, started=False, version=0, world=3, plan=plan), width=150)
    assert "; 2 workers are here, it begins with the last" in text
    assert "computing for 23 s" in text


def test_a_validator_is_not_counted_with_the_workers() -> None:
    """Nor are the samples and the loss of its own data."""
    validator = seen(3, validates=True, status=status(3, host="node1"))
    workers = [seen(rank, status=status(rank)) for rank in range(2)]
    assert how_far(a_scene(*workers, validator)).endswith(
        "loss 1, accuracy 75.0%, 576 samples/s, 2 workers and 1 validator on 2 hosts"
    )


def test_each_worker_has_its_loss_its_rate_and_its_host() -> None:
    lines = drawn(told({}, {}), width=120).splitlines()
    assert lines[2].split()[:7] == ["rank", "state", "step", "loss", "samples/s", "host", "ahead"]
    assert re.match(r" +1  computing for 0\.3 s +100 +1\.5 +288 +node1 ", lines[4])
    assert max(map(len, drawn(told({}, {})).splitlines())) <= 80


def test_what_it_uses_of_its_machine() -> None:
    used = {"cpu_cores": 1.27, "memory_bytes": 345_000_000, "sent_bytes_per_s": 2_600_000.0}
    lines = drawn(told(used, {}), width=140).splitlines()
    assert re.search(r" samples/s +cores +memory +sent/s +host ", lines[2])
    assert re.search(r" 288 +1\.27 +345 MB +3 MB +node0 ", lines[3])
    assert re.search(r" 288 +node1 ", lines[4]), "it has not said"


def test_without_a_server_nothing_is_said_of_one() -> None:
    workers = [seen(rank, status=status(rank), applied=0, samples=0.0, phase="exchanging") for rank in range(2)]
    text = drawn(a_scene(*workers, policy="BSP()", fabric="Elastic()"), width=120)
    assert text.startswith("BSP() on Elastic()  1,234 steps (61.7/s in all), running for 20 s")
    assert text.splitlines()[2].split() == ["rank", "state", "step", "loss", "samples/s", "host", "waits"]
    silent = drawn(a_scene(*workers, fabric="Elastic()"), silent_s=4.0)
    assert silent.startswith("The hub of the workers has not answered for 4.0 s.")


def test_what_happened_last_is_told_once_and_the_latest_last() -> None:
    now_s = time.time()
    joined = "Rank 2 has joined at step 8: 3 workers take part"
    swapped = [StatusEvent(now_s - 9, f"SSP(4) decides from step 9 on (it took {took} ms).") for took in (3, 7)]
    mine = StatusEvent(now_s - 2, "step 90: rank 1 has waited 4.4 s " + "x" * 200)
    events = ((StatusEvent(now_s - 60, joined), swapped[0]), (StatusEvent(now_s - 60.1, joined), swapped[1], mine))
    text = drawn(told(*({"events": both} for both in events)))
    lines = text.splitlines()[-3:]
    assert lines[0] == f"60 s ago: {joined}"
    assert re.fullmatch(r"9\.\d s ago: SSP\(4\) decides from step 9 on \(it took [37] ms\)\.", lines[1])
    assert re.fullmatch(r"2\.\d s ago, rank 1: step 90: rank 1 has waited 4\.4 s x+…", lines[2])
    assert max(map(len, lines)) == 80
    many = [{"events": tuple(StatusEvent(now_s - i, f"{rank} {i}") for i in range(4))} for rank in range(50)]
    assert len(drawn(told(*many), height=24).splitlines()) <= 24


def test_how_a_worker_ended() -> None:
    words = {"gone": "gone", "left": "has left", "done": "is done", "evicted": "evicted", "failed": "gone (error)"}
    assert {phase: state(seen(0, phase=phase)) for phase in words} == words


def test_what_went_over_to_a_server_is_not_compared_with_what_was_before() -> None:
    view = TopView()
    view.add((a_scene(version=5000, running_s=90.0, fabric="ProcessGroup()"),))
    view.add((a_scene(version=10, running_s=5.0),))
    view.add((a_scene(version=20, running_s=10.0),))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view)
    assert "20 updates (2.0/s now, 2.0/s in all)" in capture.get()
