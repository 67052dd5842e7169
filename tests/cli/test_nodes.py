"""`offbeat run --nodes`: the launchers of several machines start one job. Here all of them are on loopback."""

from __future__ import annotations

import re
import signal
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from offbeat.cli import nodes
from offbeat.cli.nodes import NodeGroup, NodeSpec
from offbeat.errors import NetworkError, PlanError
from tests.cli.commands import TRAIN, offbeat, script, start

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 50
TELLS = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
weight = float(model.module.weight.detach().sum())
print("place", *(os.environ[name] for name in names), run.world, weight, flush=True)
"""
KILLED = TRAIN.replace("range(4)", "range(40)").replace(
    "    optimizer.step()",
    "    if run.rank == 0 and step == 9:\n        import os, signal\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    optimizer.step()",
)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def together(folder: Path, port: int, path: Path, *nodes: tuple[object, ...]) -> list[tuple[int, str]]:
    """Exit code and output of the launcher of each machine, whose own options are given."""
    with ExitStack() as stack:
        started = []
        for rank, options in enumerate(nodes):
            where = ("--nodes", len(nodes), "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port)
            started.append(stack.enter_context(start("run", *where, *options, path, folder=folder)))
            stack.callback(started[-1].kill)
        ended = [(process.communicate(timeout=PATIENCE_S)[0], process) for process in started]
        return [(process.returncode, output) for output, process in ended]


def test_workers_are_numbered_across_machines(tmp_path: Path, port: int) -> None:
    ended = together(tmp_path, port, script(tmp_path, TRAIN + TELLS), ("-n", 2), ("-n", 1))
    assert [code for code, _ in ended] == [0, 0], ended
    places = [re.findall(r"place (.*) (\S+)", output) for _, output in ended]
    assert [sorted(place for place, _ in found) for found in places] == [["0 0 3 2 3", "1 1 3 2 3"], ["2 0 3 1 3"]]
    assert len({weight for found in places for _, weight in found}) == 1, "one model"
    assert "ranks 0 and 1 of 3" in ended[0][1]
    assert "rank 2 of 3" in ended[1][1]


def test_the_death_of_the_first_worker_does_not_end_the_job(tmp_path: Path, port: int) -> None:
    plan = ("--fabric", "Elastic()", "-n", 1)
    (first, said), (second, there) = together(tmp_path, port, script(tmp_path, KILLED), plan, plan)
    assert (first, second) == (128 + signal.SIGKILL, 0), (said, there)
    assert "rank 0 was killed by SIGKILL; the others continue." in said
    assert "The others, rank 1, continue" in there
    assert " 40 " in there, "it comes to the end"


def test_a_worker_that_fails_before_all_meet_ends_the_job_on_every_machine(tmp_path: Path, port: int) -> None:
    path = script(tmp_path, f"import os\nassert os.environ['RANK'] != '1', 'no data here'\n{TRAIN}")
    (first, said), (second, there) = together(tmp_path, port, path, ("-n", 1), ("-n", 1))
    assert (first, second) == (76, 1), (said, there)
    assert f"The job has ended on node 1: rank 1 on {socket.gethostname()} ended with exit code 1." in said
    assert "AssertionError: no data here" in there


ENDLESS = TRAIN.replace("range(4)", "range(10**6)").replace(
    "    optimizer.step()", "    optimizer.step()\n    if step == 9: print('ready', flush=True)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ((), "rank 0 "),
        (("--fabric", "Elastic()"), "the store in which the workers met cannot be reached any more"),
    ],
)
def test_the_job_ends_with_the_launcher_of_node_0(tmp_path: Path, port: int, plan: tuple[str, ...], says: str) -> None:
    where = ("--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "-n", 1, *plan)
    path = script(tmp_path, ENDLESS)
    with ExitStack() as stack:
        options = [("run", *where, "--node-rank", rank, path) for rank in range(2)]
        nodes = [stack.enter_context(start(*one, folder=tmp_path, cold=True)) for one in options]
        for one in nodes:
            stack.callback(one.kill)
        assert nodes[1].stdout is not None
        while "ready" not in (line := nodes[1].stdout.readline()):
            assert line
        nodes[0].kill()
        said, _ = nodes[1].communicate(timeout=PATIENCE_S)
    assert nodes[1].returncode == 76, said
    assert says in said
    assert "frame #" not in said, "no page of C++"


@pytest.mark.slow
def test_a_worker_joins_where_the_machines_met(tmp_path: Path, port: int) -> None:
    loop = "import itertools, os\nfor step in itertools.count():"
    turn = """    optimizer.step()
    if step == 9: print("ready", flush=True)
    if step == 5 and run.has_joined: open("over", "w").close()
    if run.mean(float(os.path.exists("over"))) > 0: break"""
    path = script(tmp_path, TRAIN.replace("for step in range(4):", loop).replace("    optimizer.step()", turn))
    where = ("--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "-n", 1, "--fabric", "Elastic()")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(start("run", *where, "--node-rank", k, "--run-dir", f"out-{k}", path, folder=tmp_path))
            for k in range(2)
        ]
        for one in nodes:
            stack.callback(one.kill)
        assert nodes[0].stdout is not None
        while "ready" not in (line := nodes[0].stdout.readline()):
            assert line
        code, output = offbeat("run", "--join", "out-0", "-n", 1, path, folder=tmp_path)
        assert code == 0, output
        for one in nodes:
            said, _ = one.communicate(timeout=PATIENCE_S)
            assert one.returncode == 0, said


# -- what is refused, in one sentence ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nodes", 2, "--node-rank", 2, "--master-addr", "127.0.0.1"), "--node-rank must be from 0 to 1"),
        (("--node-rank", 1), "--node-rank must be 0"),
        (("--nodes", 2, "--master-addr", "127.0.0.1"), "give --node-rank"),
        (("--nnodes", 2, "--node-rank", 1), "give --master-addr"),
        (
            ("--nodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--servers", 1),
            "Start `offbeat serve` on one machine",
        ),
        (("--nodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--join", "out"), "leave out --nodes"),
        (("--nodes", 2, "--node-rank", 0, "--master-addr", "192.0.2.1"), "192.0.2.1 is no address of this machine"),
        (("--nodes", 2, "--node-rank", 1, "--master-addr", "no.such.name.invalid"), "no.such.name.invalid"),
        (("--nodes", 2, "--node-rank", 0, "--master-addr", "a..b"), "Cannot find node 0 at a..b: that cannot be"),
        (("--nodes", 2, "--node-rank", 1, "--master-addr", "a" * 70), "that cannot be the name of a machine"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: tuple[object, ...], says: str) -> None:
    code, output = offbeat("run", *options, script(tmp_path, TRAIN), folder=tmp_path)
    assert code == 2, output
    assert says in output
    assert output.count("offbeat: ") == 1
    assert "Traceback" not in output


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        where = ("--nodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port)
        code, output = offbeat("run", *where, script(tmp_path, TRAIN), folder=tmp_path)
    assert code == 2, output
    assert f"Cannot let the machines meet at 127.0.0.1:{port}: Address already in use" in output


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (("--nodes", 3, "--node-rank", 1), "node 1 was started with --nodes 3, and node 0 with --nodes 2"),
        (("--nodes", 2, "--node-rank", 1, "--fabric", "Elastic()"), "the plan differs between machines"),
    ],
)
def test_machines_that_disagree_all_say_so(tmp_path: Path, port: int, others: tuple[object, ...], says: str) -> None:
    path = script(tmp_path, TRAIN)
    where = ("--master-addr", "127.0.0.1", "--master-port", port)
    with start("run", *where, "--nodes", 2, "--node-rank", 0, path, folder=tmp_path) as first:
        try:
            code, there = offbeat("run", *where, *others, path, folder=tmp_path)
            said, _ = first.communicate(timeout=PATIENCE_S)
        finally:
            first.kill()
    assert (first.returncode, code) == (2, 2), (said, there)
    for output in (said, there):
        assert says in output
        assert output.count("offbeat: ") == 1


def test_a_number_that_another_machine_has_is_refused_there_alone(tmp_path: Path, port: int) -> None:
    path = script(tmp_path, "import os, time\nwhile not os.path.exists('over'): time.sleep(0.05)")
    where = ("--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--timeout", 0.5)
    with ExitStack() as stack:
        first = stack.enter_context(start("run", *where, "--node-rank", 1, path, folder=tmp_path))
        stack.callback(first.kill)
        assert first.stdout is not None
        assert f"Waiting for node 0 at 127.0.0.1:{port}" in first.stdout.readline(), "whoever comes first waits"
        zeroth = stack.enter_context(start("run", *where, "--node-rank", 0, path, folder=tmp_path))
        stack.callback(zeroth.kill)
        assert first.stdout.readline()
        code, output = offbeat("run", *where, "--node-rank", 1, path, folder=tmp_path)
        assert code == 2, output
        assert "Cannot start as node 1: process" in output
        (tmp_path / "over").touch()
        ended = [one.communicate(timeout=PATIENCE_S)[0] for one in (zeroth, first)]
        assert [zeroth.returncode, first.returncode] == [0, 0], ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_killed_while_it_waits_can_be_started_again(
    tmp_path: Path, port: int, number: signal.Signals
) -> None:
    where = ("--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "-n", 1)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with start("run", *where, "--node-rank", 1, script(tmp_path, TRAIN), folder=tmp_path) as killed:
        try:
            PrefixStore("offbeat-run", store).wait(["node/1"], timedelta(seconds=PATIENCE_S))
            killed.send_signal(number)
            assert killed.wait(timeout=PATIENCE_S) == -number
        finally:
            killed.kill()
    again = start("run", *where, "--node-rank", 1, "--timeout", 0.5, script(tmp_path, TRAIN), folder=tmp_path)
    with again:
        try:
            assert again.stdout is not None
            assert "Waiting for node 0 of 2" in again.stdout.readline()
        finally:
            again.kill()


def test_something_else_that_listens_at_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_ANSWER", timedelta(seconds=1))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        group = NodeGroup(NodeSpec(2, 1, *other.getsockname()), lambda text: None)
        with pytest.raises(NetworkError, match="does not answer as the `offbeat run` of node 0 does"):
            group.meet(1, "", 5.0)


def test_a_launcher_that_was_lost_before_it_started_workers_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(nodes, "_SILENT_S", 0.2)
    group = NodeGroup(NodeSpec(2, 0, "127.0.0.1", port), lambda text: None)
    group._store = PrefixStore("offbeat-run", HashStore())
    for _ in range(2):
        group._hear()
        assert not group.failure
    time.sleep(0.3)
    group._hear()
    assert group.failure == "node 1: its `offbeat run` was lost before it started any worker."
    lived = NodeGroup(NodeSpec(2, 0, "127.0.0.1", port), lambda text: None)
    lived._store = group._store
    lived._store.add("beat/1", 1)
    lived._hear()
    time.sleep(0.3)
    lived._hear()
    assert not lived.failure, "its workers may train on"


def test_one_machine_needs_no_address() -> None:
    assert NodeSpec.of(1, None, "", 29500) is None
    assert NodeSpec.of(1, 0, "", 29500) is None
    with pytest.raises(PlanError, match="--node-rank must be from 0 to 2, and is -1"):
        NodeSpec.of(3, -1, "10.0.0.1", 29500)
