"""Who may come as a validator, and who as which worker: that is in the credential, and not in what anybody says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from offbeat import BSP, ParameterServer, Plan
from offbeat.cli.certs import LOCAL, make
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol.messages import pack
from offbeat.protocol.training import InitBlock, ModelOpened, OpenModel, Refused
from offbeat.robust import FLTrust
from offbeat.server.launch import ShardSettings, start_shard
from offbeat.wire.credentials import Certificates, CertifiedRole, Token
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.tcp import connect
from tests.rejected_peers.job import JOB, SECRET, Heard, Job, details, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink

VALIDATORS = "a secret of validators alone"
WORKER, VALIDATOR = Token(SECRET.encode()), Token(SECRET.encode(), VALIDATORS.encode())


class Server:
    """A server that nobody trains through, and whoever dials it."""

    def __init__(self, **settings: Any) -> None:
        self.process, self.address = start_shard(ShardSettings(job=JOB, **settings))
        self.loop = LoopThread()

    def dial(self, credentials: Credentials, heard: Heard | None = None, **claim: Any) -> PeerLink:
        known: dict[str, Any] = {"job": JOB, "rank": 0, "credentials": credentials, **claim}
        link: PeerLink = self.loop.run(connect(self.address, accept=lambda link: heard or Heard(), **known))
        return link

    def refusal(self, credentials: Credentials, **claim: Any) -> str:
        with pytest.raises(PeerError) as caught:
            self.dial(credentials, **claim)
        return str(caught.value).removeprefix(f"Cannot join {self.address}: ")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.loop.close()


@pytest.fixture(scope="module")
def by_token() -> Iterator[Server]:
    server = Server(token=SECRET, validator_token=VALIDATORS)
    yield server
    server.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make(folder, LOCAL, [CertifiedRole("worker", 3)])
    made = make(folder, roles=[CertifiedRole("validator")])
    assert made == ["validator.pem", "validator.key"], "of the same authority"
    return folder


@pytest.fixture(scope="module")
def by_certificate(certificates: Path) -> Iterator[Server]:
    server = Server(**{kind: str(path) for kind, path in files(certificates, "server").items()})
    yield server
    server.close()


def files(folder: Path, name: str) -> dict[str, Any]:
    return {
        "certificate": folder / f"{name}.pem",
        "key": folder / f"{name}.key",
        "authority": folder / "authority.pem",
    }


def test_a_validator_knows_another_token(by_token: Server) -> None:
    assert by_token.refusal(WORKER, role="validator", rank=4) == (
        "it refused: it is no validator: it does not show the token of validators."
    )
    wrong = Token(SECRET.encode(), b"some other secret of validators")
    assert "it is no validator" in by_token.refusal(wrong, role="validator", rank=4)
    assert "it is no shard of this server" in by_token.refusal(WORKER, role="shard")
    for role in ("validator", "operator", "worker"):
        by_token.dial(VALIDATOR, role=role, rank=4)
    by_token.dial(WORKER, role="worker", rank=5)


def test_a_server_without_such_a_token_has_no_validators(job: Job) -> None:
    with pytest.raises(PeerError, match=re.escape("the token of validators, and this server was started without")):
        job.dial(lambda link: Heard(), 4, role="validator", credentials=VALIDATOR)
    job.goes_on()


def test_its_token_is_none_by_itself() -> None:
    with pytest.raises(NetworkError, match="set OFFBEAT_TOKEN, too"):
        ShardSettings(job=JOB, validator_token=VALIDATORS).credentials()
    with pytest.raises(NetworkError, match="it could be guessed"):
        Token(SECRET.encode(), b"short")


@pytest.mark.parametrize(
    ("name", "claim", "says"),
    [
        ("worker", {"role": "validator"}, "its certificate is that of a worker, and it comes as a validator"),
        ("worker-3", {"role": "validator"}, "its certificate is that of a worker, and it comes as a validator"),
        ("worker", {"role": "shard"}, "its certificate is that of a worker, and it comes as a shard"),
        ("validator", {"role": "worker"}, "its certificate is that of a validator, and it comes as a worker"),
        ("server", {"role": "validator", "rank": 4}, "a certificate of `offbeat certs --validator`"),
        ("worker-3", {"rank": 5}, "its certificate is that of rank 3, and it comes as rank 5"),
        ("worker-3", {"rank": 3}, ""),
        ("worker", {"rank": 5}, ""),
        ("worker-3", {"role": "operator"}, ""),
        ("validator", {"role": "validator", "rank": 4}, ""),
    ],
)
def test_a_certificate_says_who_shows_it(
    by_certificate: Server, certificates: Path, name: str, claim: dict[str, Any], says: str
) -> None:
    credentials = Certificates(**files(certificates, name))
    if says:
        assert says in by_certificate.refusal(credentials, **claim)
        assert by_certificate.refusal(credentials, **claim).startswith("it refused: ")
    else:
        by_certificate.dial(credentials, **claim)


def test_a_validator_of_a_job_without_one_is_told(by_token: Server) -> None:
    heard = Heard()
    link = by_token.dial(VALIDATOR, heard=heard, rank=7, role="validator")
    by_token.loop.call(link.send, pack(OpenModel(0)), pack(details()))
    assert heard.over.wait(10)
    assert "Cannot admit rank 7 as a validator: the plan of this job has none" in str(heard.error)
    (refused,) = [one for one in heard.messages if isinstance(one, Refused)]
    assert refused.reason.endswith("Plan(validator=ZenoPS(), ...).")


def test_first_values_are_a_validators(by_token: Server) -> None:
    """A worker is not asked for them, and is sent away if it sends them."""
    plan = Plan(sync=BSP(), fabric=ParameterServer(), validator=FLTrust()).to_toml()
    worker, validator = Heard(), Heard()
    link = by_token.dial(WORKER, heard=worker)
    by_token.loop.call(link.send, pack(OpenModel(0)), pack(details(plan=plan)))
    other = by_token.dial(VALIDATOR, heard=validator, rank=7, role="validator")
    by_token.loop.call(other.send, pack(OpenModel(0)), pack(details(plan=plan)))
    for heard, wanted in ((worker, False), (validator, True)):
        wait_for(heard.messages.__len__, "it is not opened")
        assert [one.wants_values for one in heard.messages if isinstance(one, ModelOpened)] == [wanted]
    other.abort()
    taker = Heard()
    third = by_token.dial(WORKER, heard=taker, rank=7)
    by_token.loop.call(third.send, pack(OpenModel(0)), pack(details(plan=plan)))
    assert taker.over.wait(10)
    assert "Cannot admit rank 7 as a worker: it is a validator's" in str(taker.error), "also if that is away"
    by_token.loop.call(link.send, pack(InitBlock(0, 0)), bytes(56))
    assert worker.over.wait(10)
    assert "Rank 0 was not asked for the values of block 0" in str(worker.error)
