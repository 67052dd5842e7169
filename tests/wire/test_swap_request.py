"""Wishes that are left in a job's folder: each is answered or given up by whoever left it, and by nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from offbeat.cli.swap import _swap_by_folder
from offbeat.errors import NetworkError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.wire import swap_request
from offbeat.wire.swap_request import SwapReply
from tests.report.fake_records import step, write

if TYPE_CHECKING:
    from pathlib import Path


def test_a_wish_is_taken_once_and_answered(tmp_path: Path) -> None:
    left = swap_request.post(tmp_path, "a part")
    with pytest.raises(NetworkError, match="it has not answered the request before"):
        swap_request.post(tmp_path, "another")
    assert swap_request.claim(tmp_path) == left
    assert swap_request.claim(tmp_path) is None
    assert swap_request.answered(tmp_path, left) is None
    reply = SwapReply(left.number, "done")
    swap_request.answer(tmp_path, reply)
    assert swap_request.answered(tmp_path, left) == reply


def test_of_many_at_once_one_is_left_and_the_others_are_told(tmp_path: Path) -> None:
    def leave(part: str) -> swap_request.SwapRequest | str:
        try:
            return swap_request.post(tmp_path, part)
        except NetworkError as error:
            return str(error)

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            said = list(pool.map(leave, map(str, range(8))))
        left = swap_request.claim(tmp_path)
        said.remove(left or "nothing was left")
        assert all("it has not answered the request before" in str(one) for one in said)
    assert not list(tmp_path.iterdir())


def test_who_gives_up_takes_back_only_what_it_left(tmp_path: Path) -> None:
    mine = swap_request.post(tmp_path, "a")
    assert swap_request.claim(tmp_path) == mine
    other = swap_request.post(tmp_path, "b")
    swap_request.withdraw(tmp_path, mine)
    assert swap_request.is_posted(tmp_path, other)
    swap_request.withdraw(tmp_path, other)
    assert swap_request.claim(tmp_path) is None


def test_who_asks_a_job_that_goes_over_to_a_server_meanwhile_is_told_to_ask_that(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "server.json").touch()
    with pytest.raises(NetworkError, match="all workers have moved to a server before they read this"):
        _swap_by_folder(tmp_path, "")
    assert swap_request.claim(tmp_path) is None


def test_who_asks_before_the_job_has_reached_its_server_is_told_to_ask_later(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "plan.toml").write_text(Plan(fabric=ParameterServer()).to_toml())
    with pytest.raises(NetworkError, match=r"it begins with a server, and has not reached offbeat\.init"):
        _swap_by_folder(tmp_path, "")
    assert swap_request.claim(tmp_path) is None
    write(tmp_path, [step(0, 0)])
    (tmp_path / "server.json").touch()  # it had left its server, and comes to one again
    with pytest.raises(NetworkError, match="all workers have moved to a server before they read this"):
        _swap_by_folder(tmp_path, "")


def test_what_nobody_has_taken_can_be_taken_back(tmp_path: Path) -> None:
    swap_request.withdraw(tmp_path, swap_request.post(tmp_path, "a part"))
    assert swap_request.claim(tmp_path) is None
