"""Uses of a parameter before the last step is in it: who looks for them, what is said, and that nobody else is told."""

from __future__ import annotations

import copy
import io
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import offbeat
from offbeat.engine import cross_iteration
from offbeat.errors import ModelError, PlanError
from offbeat.run.environment import Environment
from tests.cli.commands import offbeat as command
from tests.training.test_scheduling import is_ahead
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 12  # of which seven are learnt from
WORDS, WIDTH = 7, 8
PLAN = offbeat.Plan(scheduling=offbeat.Priority(slice_bytes=100))


class Writer(nn.Module):
    """Tied weights, parameters in a list, a module that is called twice, and one by its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.twice, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.by_weight, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scales[0] * self.scales[1]
        x = self.norm(self.twice(torch.tanh(self.twice(x))))
        return torch.as_tensor(self.head(F.linear(x, self.by_weight.weight, self.by_weight.bias)))


def mean_of(model: Any) -> object:
    """A moving average of a weight, as people keep it."""
    mean = torch.zeros_like(model.twice.weight)
    return mean.mul_(0.9).add_(model.twice.weight.detach(), alpha=0.1)


EARLY: dict[str, Callable[[Any], object]] = {
    "embed.weight": lambda model: F.linear(torch.ones(1, WIDTH), model.embed.weight),
    "twice.weight": mean_of,
    "scales.1": lambda model: float(model.scales[1].detach().norm()),
    "by_weight.bias": lambda model: model.by_weight.bias.data[2:3].item(),
    "norm.weight": lambda model: model.norm.weight.tolist(),
    "the memory of twice.bias": lambda model: model.view_before.norm(),
}


def train(early: str = "", *, waits: bool = False, checks: bool = True) -> tuple[str, bool]:
    """What is said of a loop that reads a parameter behind a step; whether steps were hidden by then."""
    net: Any = Writer()
    with offbeat.init(PLAN, check_freshness=checks) as run:
        replica, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        generator = torch.Generator().manual_seed(run.rank)
        net.view_before = net.twice.bias.data
        for step in range(STEPS):
            words = torch.randint(0, WORDS, (5,), generator=generator)
            F.cross_entropy(replica(words), words).backward()
            if step == 9:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step == 8:  # they wait by themselves, as state_dict() does
                copy.deepcopy(net)
            if step == 9:
                torch.save(net, io.BytesIO())
            if early and step == STEPS - 2:
                if waits:
                    run.synchronize()
                try:
                    EARLY[early](net)
                except ModelError as error:
                    return str(error), is_ahead(run)
            optimizer.zero_grad()
            if step % 4 == 1:
                with torch.no_grad():
                    replica(words)
                kept = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
                optimizer.load_state_dict(kept[1])
                net.load_state_dict(kept[0])
            [torch.empty_like(p).view(-1) for p in net.parameters()]
        return "", is_ahead(run)


@pytest.mark.slow
@pytest.mark.parametrize("early", EARLY)
def test_whoever_reads_too_early_is_told_where_and_what_to_do(early: str) -> None:
    for said, was_ahead in run_workers(2, train, early):
        assert was_ahead
        assert said.startswith(f"Cannot use {early} in ")
        assert f"{__file__}:" in said
        assert "call run.synchronize() before" in said.lower()


@pytest.mark.slow
def test_whoever_has_waited_may_read() -> None:
    for early in EARLY:
        assert run_workers(2, waited, early) == [("", True)] * 2


def waited(early: str) -> tuple[str, bool]:
    return train(early, waits=True)


def test_the_rest_of_a_job_is_silent() -> None:
    """Tied weights, lists of parameters, clipping, evaluations, checkpoints out and in, shapes."""
    assert run_workers(2, train) == [("", True)] * 2


def stepped_by_two() -> bool:
    """Whether steps are hidden, where the optimizer that was prepared lacks a parameter that another one steps."""
    net = Writer()
    bias = net.by_weight.bias
    with offbeat.init(PLAN, check_freshness=True) as run:
        most = [p for p in net.parameters() if p is not bias]
        replica, optimizer = run.prepare(net, torch.optim.Adam(most, lr=0.01))
        second = torch.optim.SGD([bias], lr=0.1)
        for _ in range(STEPS):
            words = torch.arange(5)
            F.cross_entropy(replica(words), words).backward()
            optimizer.step()
            second.step()
            optimizer.zero_grad()
            second.zero_grad()
        return is_ahead(run)


def test_another_optimizer_may_step_what_the_prepared_one_lacks() -> None:
    assert run_workers(2, stepped_by_two) == [True, True]


def unchecked() -> tuple[tuple[str, bool], bool]:
    return train("twice.weight", checks=False), _get_current_dispatch_mode() is None


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert run_workers(2, unchecked) == [(("", True), True)] * 2


def compiled() -> tuple[bool, float, bool]:
    """Whether a compiled model trains without being told anything, and what it comes to; what is left behind."""
    net = Writer()
    with offbeat.init(PLAN, check_freshness=True) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step_of = torch.compile(replica, backend="eager")
        for _ in range(STEPS):
            words = torch.arange(WORDS)
            F.cross_entropy(step_of(words), words).backward()
            optimizer.step()
            optimizer.zero_grad()
        was_ahead = is_ahead(run)
        run.synchronize()
        weight = float(net.twice.weight.double().sum())
    return was_ahead, weight, _get_current_dispatch_mode() is None


@pytest.mark.slow
def test_a_compiled_model_raises_no_alarm() -> None:
    first, second = run_workers(2, compiled)
    assert first == second
    assert first[0]
    assert math.isfinite(first[1])
    assert first[2], "nothing is looked at behind the run"


SCRIPT = """
import torch, offbeat
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
with offbeat.init() as run:
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(12):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            print(net[3].weight.norm())
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_command_line_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    code, output = command("run", "--workers", 2, "--plan", "plan.toml", "train.py", folder=tmp_path)
    assert code == 0, output
    code, output = command(
        "run", "--workers", 2, "--plan", "plan.toml", "--check-freshness", "train.py", folder=tmp_path
    )
    assert code == 2, output
    assert "Cannot use 3.weight in norm at train.py:11 under --check-freshness" in output


def test_the_environment_asks_for_it() -> None:
    assert Environment({"OFFBEAT_CHECK_FRESHNESS": "1"}).check_freshness
    assert not Environment({}).check_freshness
    with pytest.raises(PlanError, match="Cannot read OFFBEAT_CHECK_FRESHNESS='yes': it must be 0 or 1"):
        _ = Environment({"OFFBEAT_CHECK_FRESHNESS": "yes"}).check_freshness


def watched(begins: int, in_graph: bool = False) -> tuple[str, list[str], dict[str, list[int]]]:
    """Use a view from some step on in a job that watches every fourth step.

    Returns:
        The notes of the error that ended it; what offbeat said; and the steps by what was true after each: at the
        barrier, watched, hidden, or hidden but done already.
    """
    cross_iteration._EACH = 4
    net, told, steps = Writer(), listen(), dict[str, list[int]]()
    try:
        with offbeat.init(PLAN) as run:
            replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
            bias = net.twice.bias.view(WIDTH) if in_graph else net.twice.bias.data
            for step in range(24):
                words, loss = torch.arange(5), torch.zeros(())
                if step >= begins:
                    loss = (bias * bias).sum()
                (F.cross_entropy(replica(words), words) + loss).backward()
                optimizer.step()
                gradients: Any = run._session.models.synchronizers[0]._gradients
                if not is_ahead(run):
                    state = "barrier"
                elif gradients._watch.is_open:
                    state = "watched"
                else:
                    state = "hidden" if gradients._gradients else "done"
                steps.setdefault(state, []).append(step)
                optimizer.zero_grad()
            return "", told, steps
    except RuntimeError as error:
        return "".join(getattr(error, "__notes__", ())), told, steps


def test_an_ordinary_script_is_hidden_but_for_the_steps_that_are_watched() -> None:
    for notes, told, steps in run_workers(2, watched, 24):
        assert steps["barrier"] == list(range(6))
        every_fourth = {6, 10, 14, 18, 22}
        # The watch ends early in a step that votes for another schedule, which a busy machine can make any step do.
        assert set(steps["watched"]) <= every_fourth <= {*steps["watched"], *steps.get("done", ())}
        assert len(steps["watched"]) >= 3
        assert len(steps["hidden"]) > len(steps.get("done", ()))
        assert notes == ""
        assert not any("uses" in text for text in told)


def test_a_view_that_is_used_late_is_found_in_the_next_step_that_is_watched() -> None:
    (_, told, steps), (_, _, others) = run_workers(2, watched, 9)
    assert steps["watched"][-1] in (10, 14), "the next one after the first use is watched"
    assert steps["barrier"][6:] == others["barrier"][6:]
    assert max(steps["hidden"]) < steps["watched"][-1], "every later step is done at its end"
    assert steps["barrier"][-1] == 23
    (text,) = [text for text in told if "wait for the gradients after backward" in text]
    assert f"rank 0: {__file__}:" in text
    assert "uses the memory of twice.bias (aten.mul.Tensor) through another tensor" in text


def test_backward_that_misses_what_a_step_has_written_says_whose_step_that_was() -> None:
    for notes, _, _ in run_workers(2, watched, 12, True):
        assert "offbeat may have stepped that tensor: with Priority(slice_bytes=100)" in notes
        assert "call run.synchronize() after optimizer.step()" in notes


def beside_others() -> tuple[int, int, bool, bool]:
    """What becomes of a compiled function of the script, and of a mode of its own that looks at each step.

    Returns:
        How often the function was run as it was compiled, of how many; whether steps are hidden; whether no mode is
        left.
    """
    cross_iteration._EACH = 2
    net, runs = Writer(), 0

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        def run_compiled(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return module(*args)

        return run_compiled

    teacher = torch.compile(lambda x: torch.tanh(x) * 2, backend=backend)
    with offbeat.init(PLAN) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step in range(16):
            words = torch.arange(5)
            teacher(torch.ones(3))
            with Looks() if step >= 10 else torch.enable_grad():  # type: ignore[no-untyped-call]
                F.cross_entropy(replica(words), words).backward()
                optimizer.step()
            optimizer.zero_grad()
        return runs, 16, is_ahead(run), _get_current_dispatch_mode() is None


class Looks(TorchDispatchMode):
    """A mode of the script's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_watch_leaves_compiled_code_and_other_modes_as_they_are() -> None:
    assert run_workers(2, beside_others) == [(16, 16, True, True)] * 2
