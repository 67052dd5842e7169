"""Who may not come in at all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.cli.certs import make
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.shards import ModelFilled, PushDone, SaveLastSnapshot
from offbeat.server.launch import ShardSettings, start_shard
from offbeat.wire.credentials import Certificates, Token
from tests.cli.commands import offbeat as command
from tests.rejected_peers.job import (
    BAD,
    JOB,
    SECRET,
    Heard,
    Job,
    in_log,
    told,
    wait_for,
)

if TYPE_CHECKING:
    from pathlib import Path


NO_DETAIL = "it hung up when it saw who we are (another token, certificate or job?)."


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"credentials": Token(b"another secret of some length")}, "its token is wrong"),
        ({"credentials": None}, "its token is wrong"),
        ({"job": "letters"}, "it belongs to job 'letters', this is 'digits'"),
    ],
    ids=["token", "none", "job"],
)
def test_who_does_not_belong_here(job: Job, options: dict[str, Any], logged: str) -> None:
    """Who cannot prove that it belongs here is not told what is wrong; the log is."""
    with pytest.raises(PeerError) as caught:
        job.dial(lambda link: Heard(), BAD, **options)
    assert str(caught.value) == f"Cannot join {job.address}: {NO_DETAIL}"
    assert re.search(r"Refused 127\.0\.0\.1:\d+: " + re.escape(logged), job.log())
    assert SECRET not in job.log()
    job.goes_on()


def test_a_foreign_certificate(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make(tmp_path / name)
    ours = pair(tmp_path / "ours", tmp_path / "ours", "worker")
    files = {"certificate": "server.pem", "key": "server.key", "authority": "authority.pem"}
    job = Job(tmp_path, ours, token="", **{kind: str(tmp_path / "ours" / name) for kind, name in files.items()})
    try:
        job.begin()
        with pytest.raises(PeerError) as caught:
            job.dial(lambda link: Heard(), BAD, credentials=pair(tmp_path / "theirs", tmp_path / "ours", "worker"))
        assert str(caught.value).startswith(f"Cannot join {job.address}: it ")
        assert len(str(caught.value).splitlines()) == 1
        assert re.search(r"Refused 127\.0\.0\.1:\d+: its certificate is not accepted", job.log())
        job.goes_on()
    finally:
        job.close()


def pair(folder: Path, authority: Path, name: str) -> Certificates:
    return Certificates(folder / f"{name}.pem", folder / f"{name}.key", authority / "authority.pem")


@pytest.mark.parametrize("keeps", [False, True], ids=["without snapshots", "with snapshots"])
def test_a_shard_that_nobody_named(tmp_path: Path, keeps: bool) -> None:
    """It ends with a sentence, and the job does not notice."""
    job = Job(tmp_path, snapshots=str(tmp_path / "first") if keeps else "")
    try:
        job.begin()
        second = ShardSettings(
            job=JOB, token=SECRET, coordinator=job.address, snapshots=str(tmp_path / "second") if keeps else ""
        )
        with pytest.raises(NetworkError) as caught:
            start_shard(second)
        assert str(caught.value) == (
            f"Cannot start a parameter server: Cannot serve beside {job.address}: it refused. Cannot admit another "
            "shard: the workers of this job named 1, and all are here. To use more, start the workers anew with the "
            "addresses of all."
        )
        wait_for(lambda: "Cannot admit another shard" in job.log(), "it is not logged")
        job.goes_on()
        assert "is gone" not in job.log()
    finally:
        job.close()


@pytest.mark.parametrize(
    "message", [ModelFilled(0), PushDone(0, 1, 3), SaveLastSnapshot()], ids=lambda message: type(message).__name__
)
def test_a_shard_that_does_not_follow_says_nothing(job: Job, message: Any) -> None:
    said, address = told(job, (message, b""), role="shard")
    assert f"Cannot take {type(message).__name__} from this shard: it does not follow this one" in said
    in_log(job, address, "it does not follow this one")
    job.goes_on()


def test_an_open_door_is_not_opened(tmp_path: Path) -> None:
    code, output = command("serve", "--bind", "0.0.0.0", folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "Cannot open a server on 0.0.0.0 without a token or certificates: anybody could join." in output
