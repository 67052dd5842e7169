"""`offbeat top`: looking at a job, what is said when that cannot be, and that it disturbs nobody."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import ssl
import struct
import sys
import termios
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from offbeat.cli import job_address
from offbeat.cli.certs import make
from offbeat.cli.job_address import JobAddress, find
from offbeat.cli.status_client import JobEnded, StatusClient
from offbeat.cli.top import last_lines, top
from offbeat.engine.server_session import _leave_address
from offbeat.errors import NetworkError, PeerError
from offbeat.protocol import messages
from offbeat.protocol.status import ModelStatus, StatusReply, WorkerStatus
from offbeat.server.client.client import Client
from offbeat.server.launch import ShardSettings, start_shard
from offbeat.server.shard.shard import Shard
from offbeat.sync import SSP
from offbeat.wire.credentials import Certificates, Token
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.tcp import connect, listen
from tests.cli.commands import COMMAND, clean_environment, offbeat, script, start
from tests.report.fake_status import a_scene
from tests.server.in_process import Parts
from tests.server.test_shard import Worker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink

JOB, SECRET = "mnist", "a secret of at least 16 bytes"


# -- where the job is --------------------------------------------------------------------------------------------------


def leave_address(folder: Path, address: str, **changes: str) -> Path:
    """As rank 0 does."""
    about = {"address": address, "job": JOB, "token": SECRET, "certificate": "", "key": "", "authority": ""}
    (folder / "server.json").write_text(json.dumps({**about, **changes}))
    return folder


def test_a_run_folder_tells_how_to_get_in(tmp_path: Path) -> None:
    leave_address(tmp_path, "127.0.0.1:7000", certificate="c.pem")
    for where in (tmp_path, tmp_path / "server.json"):
        target = find(str(where), {"key": "mine.pem", "certificate": "mine too.pem"})
        assert (target.address, target.job, target.token) == ("127.0.0.1:7000", JOB, SECRET)
        assert (target.certificate, target.key, target.folder) == (
            "mine too.pem",
            "mine.pem",
            str(tmp_path),
        )


def test_with_an_address_the_environment_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB", "TOKEN", "CERTIFICATE", "KEY", "AUTHORITY"):
        monkeypatch.delenv(f"OFFBEAT_{name}", raising=False)
    assert find("[::1]:7000", {}) == JobAddress(address="[::1]:7000", job="default")
    monkeypatch.setenv("OFFBEAT_JOB", "theirs")
    monkeypatch.setenv("OFFBEAT_TOKEN", SECRET)
    monkeypatch.setenv("OFFBEAT_AUTHORITY", "ca.pem")
    found = find("host:7000", {"job": JOB})
    assert (found.job, found.token, found.authority) == (JOB, SECRET, "ca.pem")


def test_certificates_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers were given may be relative to where they were started."""
    monkeypatch.chdir(tmp_path)
    settings = ShardSettings(job=JOB, certificate="own/c.pem", key="/own/c.key")
    _leave_address(tmp_path / "server.json", ["127.0.0.1:7000"], settings)
    target = find(str(tmp_path), {})
    assert (target.certificate, target.key, target.authority) == (
        str(tmp_path / "own/c.pem"),
        "/own/c.key",
        "",
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"address": 3, "job": "x"}', "\udcff", '{"job": "x"}'])
def test_a_damaged_server_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(NetworkError, match=r"Cannot read .*server\.json: .* Give host:port of the job's first shard"):
        find(str(tmp_path), {})


def test_no_server_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"it has neither server\.json nor hub\.json\. Either it has not reached"):
        find(str(tmp_path), {})
    for where in (str(tmp_path / "nothing"), "7000", "runs/a:b"):
        with pytest.raises(NetworkError, match=r"there is no such folder\. Give one that `offbeat run` writes to"):
            find(where, {})


def test_what_is_said_at_the_end() -> None:
    assert last_lines(()) == "The job has ended."
    assert last_lines([a_scene()]) == "The job has ended. When last seen it had made 1,234 updates in 20 s."
    two = [a_scene(), a_scene(model=1, version=5, running_s=3.0)]
    assert "made 1,234 updates of model 0 and 5 updates of model 1 in 20 s." in last_lines(two)


# -- a real server, in this process ------------------------------------------------------------------------------------


class Served:
    """A job's only shard, reached over TCP, and its workers."""

    def __init__(
        self,
        accept: Callable[[PeerLink], Any] | None = None,
        *,
        coordinates: bool = True,
        credentials: Credentials = Token(SECRET.encode()),  # noqa: B008 - frozen
    ) -> None:
        self.ended = threading.Event()
        self.loop = LoopThread()
        self.shard = Shard((lambda plan: Parts(SSP(2))) if coordinates else None, self.ended.set)
        accept = accept or self.shard.accept
        self.listener = self.loop.run(listen("127.0.0.1", 0, accept=accept, job=JOB, credentials=credentials))
        self.address: str = self.listener.address
        self.clients: list[Client] = []

    def workers(self, world: int) -> list[Worker]:
        for rank in range(world):
            client = Client(self.loop, rank=rank, world=world)
            token = Token(SECRET.encode())
            self.loop.run(connect(self.address, accept=client.accept, job=JOB, rank=rank, credentials=token))
            self.clients.append(client)
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(Worker, self.clients))

    def end(self) -> None:
        """As `offbeat.cli.shard_main` does."""
        for client in self.clients:
            client.close()
        self.loop.call(self.listener.close)
        self.loop.run(self._say_good_bye())

    async def _say_good_bye(self) -> None:
        await asyncio.gather(*(link.close() for link in self.listener.links))


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Served]:
    make(tmp_path)
    certificate, key, authority = (tmp_path / name for name in ("server.pem", "server.key", "authority.pem"))
    server = Served(credentials=Certificates(certificate, key, authority))
    yield server
    server.end()
    server.loop.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(**getattr(request, "param", {}))
    yield server
    server.end()
    server.loop.close()


def step_all(workers: list[Worker], steps: int) -> None:
    with ThreadPoolExecutor(len(workers)) as pool:
        for _ in range(steps):
            list(pool.map(Worker.step, workers, [torch.ones(100)] * len(workers)))


def test_one_look(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_all(served.workers(2), 7)
    top(job=str(leave_address(tmp_path, served.address)))  # no terminal, so once
    text = capsys.readouterr().out
    assert re.match(r"SSP\(bound=2\)  14 updates \([\d.]+/s in all\), running for", text)
    assert re.search(r"\n +1  \w+ .* 7 *\n", text)
    (tmp_path / "token").write_text(SECRET + "\n")
    top(job=served.address, job_name=JOB, token_file=tmp_path / "token", once=True, json=True, interval=0.1)
    look = msgspec.json.decode(capsys.readouterr().out)
    (scene,) = look["scenes"]
    assert (scene["version"], [worker["applied"] for worker in scene["workers"]]) == (14, [7, 7])
    assert abs(look["time_s"] - time.time()) < 60


def test_looks_until_the_job_ends(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While nobody is in the way of the workers, and the server's end is noticed at once."""
    workers = served.workers(2)

    def train() -> None:
        step_all(workers, 60)
        time.sleep(0.3)
        served.end()

    stepping = threading.Timer(0.2, train)
    stepping.start()
    began_s = time.monotonic()
    top(job=str(leave_address(tmp_path, served.address)), interval=0.1, json=True)
    stepping.join()
    out, err = capsys.readouterr()
    looks = [msgspec.json.decode(line) for line in out.splitlines()]
    versions = [look["scenes"][0]["version"] for look in looks]
    assert len(versions) >= 3
    assert versions == sorted(versions)
    assert versions[-1] == 120
    assert re.fullmatch(r"The job has ended\. When last seen it had made 120 updates in .* s\.\n", err)
    assert time.monotonic() - began_s < 15


def test_the_end_is_noticed_between_two_looks(served: Served) -> None:
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        assert looker.look(10.0) == ()
        threading.Timer(0.2, served.end).start()
        began_s = time.monotonic()
        looker.rest(30.0)
        with pytest.raises(JobEnded):
            looker.look(10.0)
        assert time.monotonic() - began_s < 10


async def drop(served: Served) -> None:
    """The server gives up its onlookers, as if they had been stopped for too long."""
    for link in served.listener.links:
        if link.role == "onlooker":
            link.fail(NetworkError("nothing was heard of it"))


def test_who_was_given_up_comes_again(served: Served) -> None:
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        looker.look(10.0)
        served.loop.run(drop(served))
        looker.rest(10.0)
        assert looker.look(10.0) == ()


def test_workers_do_not_notice_that_one_is_given_up(served: Served) -> None:
    workers = served.workers(2)
    step_all(workers, 2)
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        looker.look(10.0)
        served.loop.run(drop(served))
        step_all(workers, 2)
        scenes = looker.look(10.0)
        assert scenes is not None
        assert (scenes[0].version, len(scenes[0].present)) == (8, 2)
    assert not served.ended.is_set()


def test_a_server_that_is_lost(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_address, "_DIAL", job_address._DIAL / 10)
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        looker.look(10.0)
        served.loop.call(served.listener.close)
        served.loop.run(drop(served))
        looker.rest(10.0)
        with pytest.raises(NetworkError, match=r"Lost the server at .*, and nobody answers there any more: it was k"):
            looker.look(10.0)


class Busy:
    """A server that answers late, and at length."""

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.asked: list[int] = []

    def received(self, metadata: bytes, body: memoryview) -> None:
        self.asked.append(msgspec.msgpack.decode(metadata)["number"])

    def answer(self) -> None:
        for number in (self.asked[-1] - 1, self.asked[-1]):
            metadata = messages.pack(StatusReply(number))
            self.link.send(metadata, msgspec.msgpack.encode([a_scene(version=number)]))

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        raise PeerError("not expected")

    def lost(self, error: Exception | None) -> None:
        pass


@pytest.mark.parametrize("served", [{"accept": Busy}], indirect=True)
def test_a_server_without_time_is_asked_once(served: Served) -> None:
    """However often one looks: an onlooker's questions do not pile up, and each gets its own answer."""
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        assert [looker.look(0.05) for _ in range(4)] == [None] * 4
        (link,) = served.listener.links
        busy: Any = link._session.receiver
        assert len(busy.asked) == 1
        served.loop.call(busy.answer)
        assert looker.look(10.0) == (a_scene(version=busy.asked[0]),)
        assert looker.look(0.05) is None
        assert len(busy.asked) == 2


def test_there_is_an_end_to_waiting(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("offbeat.cli.top._PATIENCE_S", 0.2)
    monkeypatch.setattr(served.shard, "hear", lambda *_: None)
    with pytest.raises(NetworkError, match=r"it has not answered for 0\.2 s\. Try again\."):
        top(job=str(leave_address(tmp_path, served.address)))


def test_as_many_workers_as_there_may_be(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = tuple(WorkerStatus(worker=rank, phase="computing", waited_s=rank / 7) for rank in range(4096))
    scene = ModelStatus(model=0, policy="BSP()", version=1, started=True, running_s=1.0, workers=workers)
    monkeypatch.setattr(served.shard._coordinator, "status", lambda at_s: (scene,))
    with StatusClient(JobAddress(address=served.address, job=JOB, token=SECRET)) as looker:
        scenes = looker.look(10.0)
        assert scenes is not None
        assert [seen.waited_s for seen in scenes[0].workers] == [seen.waited_s for seen in workers]


@pytest.mark.parametrize("served", [{"coordinates": False}], indirect=True)
def test_another_shard_than_the_first(served: Served, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"another\..* Give the address of the job's first shard\."):
        top(job=str(leave_address(tmp_path, served.address)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token": SECRET + "?"}, "another token, certificate or job?"),
        ({"job": "cifar"}, "another token, certificate or job?"),
        ({"token": "short"}, "Cannot use a token of 5 bytes"),
        ({"certificate": "c.pem"}, "name certificate, key and authority"),
    ],
)
def test_who_may_not_look(served: Served, tmp_path: Path, changes: dict[str, str], says: str) -> None:
    with pytest.raises((NetworkError, PeerError), match=re.escape(says)):
        top(job=str(leave_address(tmp_path, served.address, **changes)))
    if "another" in says:
        with pytest.raises(PeerError, match=r"\(--token-file or OFFBEAT_TOKEN\), and its name .* now it is 'mn?"):
            StatusClient(
                JobAddress(
                    address=served.address, job=changes.get("job", "mnist").replace("cifar", "mn"), token="y" * 16
                )
            )


def test_over_tls(encrypted: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key, authority = (tmp_path / name for name in ("worker.pem", "worker.key", "authority.pem"))
    top(job=encrypted.address, job_name=JOB, certificate=certificate, key=key, authority=authority)
    assert "no worker has joined yet" in capsys.readouterr().out
    leave_address(tmp_path, encrypted.address, token="", certificate=str(certificate), key=str(key))
    top(job=str(tmp_path), authority=authority)
    assert "no worker has joined yet" in capsys.readouterr().out


def test_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_address, "_DIAL", job_address._DIAL / 10)
    folder = leave_address(tmp_path, "127.0.0.1:1")
    with pytest.raises(NetworkError, match=r"Cannot reach 127\.0\.0\.1:1 .* has probably ended: `offbeat report "):
        top(job=str(folder))
    with pytest.raises(NetworkError, match="Is the server running, and is this its address") as caught:
        top(job="127.0.0.1:1", job_name="x")
    assert "offbeat report" not in str(caught.value)
    with pytest.raises(NetworkError, match="an address is host:port"):
        top(job="127.0.0.1:x")


def test_refusals_are_one_sentence_and_code_2(tmp_path: Path) -> None:
    code, output = offbeat("top", "--job", tmp_path, folder=tmp_path)
    assert (code, len(output.splitlines())) == (2, 1), output
    assert "it has neither server.json nor hub.json" in output


def test_a_folder_may_be_an_argument_as_in_report(tmp_path: Path) -> None:
    code, output = offbeat("top", tmp_path, folder=tmp_path)
    assert (code, "it has neither server.json nor hub.json" in output) == (2, True), output
    with pytest.raises(NetworkError, match=r"no job is named\. Give its run folder once"):
        top()
    with pytest.raises(NetworkError, match="two jobs are named"):
        top(str(tmp_path), job=str(tmp_path))


# -- for Prometheus ----------------------------------------------------------------------------------------------------


def test_figures_for_prometheus(served: Served, tmp_path: Path) -> None:
    step_all(served.workers(2), 3)
    leave_address(tmp_path, served.address)
    with start("top", "--job", tmp_path, "--prometheus", 0, folder=tmp_path) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(
            r"serving figures at (http://127\.0\.0\.1:\d+/metrics) until the job ends, or Ctrl-C\n", said
        )
        assert found, said
        with urllib.request.urlopen(found[1], timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            text = answer.read().decode()
        assert 'offbeat_updates_total{model="0"} 6.0' in text
        assert 'offbeat_worker_contributions_total{model="0",outcome="applied",worker="1"} 3.0' in text
        assert SECRET not in text
        assert "python_info" not in text, "of the job, not of who looks"
        served.end()
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert rest == f"The job has ended. When last seen it had made 6 updates in {rest.split(' in ')[1]}"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NetworkError, match=r"prometheus-client is not installed\. .* 'offbeat\[dashboard\]'"):
        top(job="127.0.0.1:7000", prometheus=0)


def test_what_prometheus_cannot_have(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(leave_address(tmp_path, served.address))
    with pytest.raises(NetworkError, match="Leave out --once and --json"):
        top(job=where, prometheus=0, json=True)
    taken = int(served.address.rpartition(":")[2])
    with pytest.raises(NetworkError, match=rf"Cannot serve figures on 127\.0\.0\.1, port {taken}: .* Choose another"):
        top(job=where, prometheus=taken)
    with pytest.raises(NetworkError, match=r"on 0\.0\.0\.0 without certificates: anybody could read them\. Use"):
        top(job=where, prometheus=0, bind="0.0.0.0")
    with pytest.raises(NetworkError, match="'here': it is no IP address"):
        top(job=where, prometheus=0, bind="here")


def test_beyond_this_machine_figures_are_for_those_with_a_certificate(encrypted: Served, tmp_path: Path) -> None:
    certificate, key, authority = (tmp_path / name for name in ("worker.pem", "worker.key", "authority.pem"))
    tls = ("--certificate", tmp_path / "server.pem", "--key", tmp_path / "server.key", "--authority", authority)
    arguments = ("--job", encrypted.address, "--job-name", JOB, "--prometheus", 0, "--bind", "0.0.0.0", *tls)
    with start("top", *arguments, folder=tmp_path) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"https://0\.0\.0\.0:(\d+)/metrics", said)
            assert found, said
            url = f"https://127.0.0.1:{found[1]}/metrics"
            context = ssl.create_default_context(cafile=str(authority))
            context.check_hostname = False
            with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|EOF"):
                urllib.request.urlopen(url, timeout=10, context=context).read()
            context.load_cert_chain(certificate, key)
            with urllib.request.urlopen(url, timeout=10, context=context) as answer:
                assert "offbeat_" in answer.read().decode()
        finally:
            process.terminate()


# -- on a terminal -----------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: object, folder: Path) -> tuple[int, int]:
    """Process and terminal; 80 columns and 24 lines."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = {name: value for name, value in clean_environment().items() if name != "COLUMNS"}
        os.execve(COMMAND[0], [*COMMAND, *map(str, arguments)], {**environment, "TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return pid, terminal


def read(terminal: int, until: Callable[[str], bool], timeout_s: float = 20.0) -> str:
    """What is written to a terminal; all of it if `until` is never satisfied."""
    text, deadline_s = b"", time.monotonic() + timeout_s
    while not until(text.decode(errors="replace")) and time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # Linux's way of saying that nobody writes there any more
                break
            text += data
    return text.decode(errors="replace")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_live_view_is_left_quietly(served: Served, tmp_path: Path, number: signal.Signals, code: int) -> None:
    workers = served.workers(2)
    pid, terminal = on_a_terminal("top", "--job", leave_address(tmp_path, served.address), folder=tmp_path)
    try:
        step_all(workers, 5)
        text = read(terminal, lambda text: text.count("10 updates") >= 2)
        assert text.count("10 updates") >= 2, "it is drawn again and again"
        assert "\x1b[?25l" in text
        os.kill(pid, number)
        rest = read(terminal, lambda _: False)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert "\x1b[?25h" in rest, "the cursor is back"
    assert not re.search("Traceback|Abort|Error", rest)
    step_all(workers, 5)
    deadline_s = time.monotonic() + 5
    while len(served.listener.links) > 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(served.listener.links) == 2, "it said good-bye"


# -- nobody is disturbed -----------------------------------------------------------------------------------------------

WAITS = """
import os, time, torch, offbeat
run = offbeat.init(offbeat.Plan(sync=offbeat.sync.ASP(), fabric=offbeat.fabric.ParameterServer()))
model = torch.nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(40):
    while step == 10 and not os.path.exists("somebody looks"):
        time.sleep(0.05)
    time.sleep(0.03)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def look_from_outside(where: object, folder: Path) -> subprocess.Popen[str]:
    """An onlooker that has seen something."""
    process = start("top", "--job", where, "--interval", 0.1, "--json", folder=folder)
    assert process.stdout is not None
    assert '"scenes"' in process.stdout.readline()
    return process


@pytest.mark.slow
def test_a_job_goes_on_while_onlookers_are_stopped_and_killed(tmp_path: Path) -> None:
    with start("run", "--run-dir", "out", script(tmp_path, WAITS), folder=tmp_path) as job, ExitStack() as onlookers:
        left = tmp_path / "out/server.json"
        while not (left.exists() and left.read_bytes()):
            assert job.poll() is None
            time.sleep(0.1)
        with ThreadPoolExecutor(3) as pool:
            coming = [pool.submit(look_from_outside, tmp_path / "out", tmp_path) for _ in range(3)]
        stopped, killed, looking = (onlookers.enter_context(one.result()) for one in coming)
        for process in (stopped, killed, looking):
            onlookers.callback(process.kill)
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        (tmp_path / "somebody looks").touch()
        output, _ = job.communicate(timeout=40)
        assert job.returncode == 0, output
        assert "All 2 workers ended well after 40 steps." in output
        rest, _ = looking.communicate(timeout=20)
        assert looking.returncode == 0
        *looks, last = rest.splitlines()
        assert last.startswith("The job has ended. When last seen it had made ")
        (scene,) = msgspec.json.decode(looks[-1])["scenes"]
        assert scene["version"] > 20, "it was there to the end"
        assert [w["worker"] for w in scene["workers"]] == [0, 1], "an onlooker is no worker"
        assert sum(w["lost"] + w["dropped"] for w in scene["workers"]) == 0


def test_a_server_ends_with_its_last_worker_though_somebody_looks(tmp_path: Path) -> None:
    plan = "[sync]\nkind = 'ASP'\n[fabric]\nkind = 'ParameterServer'\n"
    process, address = start_shard(ShardSettings(job=JOB, token=SECRET))
    with process, LoopThread() as loop:
        client = Client(loop, rank=0, world=1)
        token = Token(SECRET.encode())
        loop.run(connect(address, accept=client.accept, job=JOB, rank=0, credentials=token))
        opening = client.open
        client.open = lambda model, **about: opening(model, **{**about, "plan": plan})  # type: ignore[method-assign]
        worker = Worker(client)
        with look_from_outside(leave_address(tmp_path, address), tmp_path) as looking:
            step_all([worker], 5)
            client.close()
            assert process.wait(10) == 0
            rest, _ = looking.communicate(timeout=20)
            assert "The job has ended." in rest
            assert looking.returncode == 0
