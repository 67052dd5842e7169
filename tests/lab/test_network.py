"""Networks: links carry what they promise in each direction, nobody outside notices, and nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError, ScenarioError
from offbeat.lab import command_lines, goodput, lab_registry
from offbeat.lab.bridged_links import INTERFACE, BridgedLinks
from offbeat.lab.link_shaping import bucket_bytes
from offbeat.lab.namespace import DIRECTORY, inside
from offbeat.lab.network import MAX_HOSTS, Network
from offbeat.topology import Host, Link, Topology
from tests.cli.commands import alive
from tests.lab.permissions import Owner, namespaces_of, needs_root
from tests.patience import soon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = needs_root


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """A lab of another process, whatever becomes of it."""
    owner = Owner(tmp_path)
    yield owner
    owner.end()
    assert soon(lambda: not alive({owner.reaper}))
    lab_registry.clean(force=True, directory=tmp_path)


def carried(net: Network, least_mbps: Mapping[str, float], *, seconds: float = 1.5) -> dict[str, float]:
    """Measured until each link carries so much, eight times at most: other programs may have had the machine."""
    for _ in range(8):
        measured = goodput.measure(net, seconds=seconds)
        if all(measured[host] >= least for host, least in least_mbps.items()):
            break
    return measured


@pytest.mark.parametrize("rate_mbps", [20, 200])
def test_links_carry_their_rate(tmp_path: Path, rate_mbps: float) -> None:
    """Three hosts, all sending and receiving at once: headers and acknowledgements take 3 to 10 %."""
    with Network(Topology.star(["a", "b", "c"], rate_mbps=rate_mbps), directory=tmp_path) as net:
        measured = carried(net, dict.fromkeys("abc", 0.9 * rate_mbps))
    assert set(measured) == {"a", "b", "c"}
    for share in (stream / rate_mbps for stream in measured.values()):
        assert 0.90 <= share <= 0.97, measured


def test_each_direction_is_shaped_where_it_starts(tmp_path: Path) -> None:
    """To the slow host (shaped at the switch) and from it (shaped at the host) its rate holds."""
    hosts = (Host("fast"), Host("other"), Host("slow"))
    links = (Link("fast", "switch", 100), Link("other", "switch", 100), Link("slow", "switch", 10))
    with Network(Topology(hosts, links), directory=tmp_path) as net:
        measured = carried(net, {"fast": 90, "other": 9, "slow": 9})
        goodput.check(measured, net)
        # The same streams on a network that promised more.
        net.topology = Topology.star(["fast", "other", "slow"], rate_mbps=100)
        with pytest.raises(ScenarioError, match=r"Cannot shape the link of other to 100 Mbit/s on this machine"):
            goodput.check(measured, net)
    assert 90 <= measured["fast"] <= 97, "fast to other"
    assert 9 <= measured["other"] <= 9.7, "other to slow"
    assert 9 <= measured["slow"] <= 9.7, "slow to fast"


@pytest.mark.parametrize("busy", [2, 3])
def test_a_busy_second_is_not_taken_for_a_bad_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy: int) -> None:
    streams = [{"a": 20.0, "b": 95.0}] * busy + [{"a": 95.0, "b": 95.0}]
    monkeypatch.setattr(goodput, "measure", lambda network: streams.pop(0))
    with Network(Topology.star(["a", "b"], rate_mbps=100), directory=tmp_path) as net:
        if busy < goodput.ATTEMPTS:
            assert goodput.ensure(net)["a"] == 95
        else:
            with pytest.raises(ScenarioError, match="Cannot shape the link of a"):
                goodput.ensure(net)


def test_links_without_a_rate_are_not_shaped(tmp_path: Path) -> None:
    with Network(Topology.star(["a", "b"]), directory=tmp_path) as net:
        assert min(goodput.measure(net, seconds=0.3).values()) > 500
        with pytest.raises(NetworkError, match="Cannot change the rate of the link from a to switch: it has none"):
            net.shape("a", 10)


@pytest.mark.slow
def test_a_rate_changes_and_the_others_stay(tmp_path: Path) -> None:
    """In both directions of that link, down and up, beyond what it was built with."""
    with Network(Topology.star(["a", "b", "c"], rate_mbps=50), directory=tmp_path) as net:
        net.shape("b", 10)
        measured = carried(net, {"a": 9, "b": 9, "c": 45}, seconds=4)  # streams settle for as long as at 50 alone
        assert 9 <= measured["a"] <= 9.9, "to the slow one"
        assert 9 <= measured["b"] <= 9.9, "from it"
        assert 45 <= measured["c"] <= 48.5
        for host in "abc":
            net.shape(host, 100)
        assert all(90 <= stream <= 97 for stream in carried(net, dict.fromkeys("abc", 90.0)).values())
        with pytest.raises(NetworkError, match="it needs one"):
            net.shape("a", None)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_stream_goes_on_at_another_rate(tmp_path: Path) -> None:
    """What was packed for a fast link, and what waits in its queue, passes the slow one: nothing is stuck."""
    with Network(Topology.star(["a", "b"], rate_mbps=200), directory=tmp_path) as net:
        port, received, over = 29_500, [0], threading.Event()
        listener = inside(net.namespace("b"), lambda: socket.create_server(("0.0.0.0", port)))
        sender = inside(
            net.namespace("a"), functools.partial(socket.create_connection, (net.address("b"), port), timeout=10)
        )
        receiver, _ = listener.accept()

        def send() -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    sender.sendall(bytes(1 << 16))

        def receive() -> None:
            with contextlib.suppress(OSError):
                while got := receiver.recv(1 << 16):
                    received[0] += len(got)

        threads = [threading.Thread(target=one, daemon=True) for one in (send, receive)]
        for thread in threads:
            thread.start()

        def mbps(settle_s: float, seconds: float) -> float:
            time.sleep(settle_s)
            before, began_s = received[0], time.perf_counter()
            time.sleep(seconds)
            return (received[0] - before) * 8 / 1e6 / (time.perf_counter() - began_s)

        def becomes(least: float, most: float) -> bool:
            return any(least <= mbps(1.0, 1.5) <= most for _ in range(6))

        assert becomes(170, 195)
        net.shape("a", 4)
        assert becomes(3.4, 4.0)
        net.shape("a", 50)
        assert becomes(42, 49)
        over.set()
        for end in (sender, receiver, listener):
            end.close()
        for thread in threads:
            thread.join(10)


def test_hosts_are_alone(tmp_path: Path) -> None:
    """A host sees its own two interfaces, no IPv6, no service of this machine; this machine sees no new interface."""
    before = set(os.listdir("/sys/class/net"))
    with socket.create_server(("0.0.0.0", 0)) as service, Network(Topology.star(["a", "b"]), directory=tmp_path) as net:
        assert set(os.listdir("/sys/class/net")) == before
        name = net.namespace("a")
        seen = inside(name, lambda: Path("/proc/thread-self/net/dev").read_text().splitlines()[2:])
        assert {line.split(":")[0].strip() for line in seen} == {"lo", INTERFACE}
        assert inside(name, lambda: Path("/proc/thread-self/net/if_inet6").read_text()) == ""
        port = service.getsockname()[1]
        for address in ("127.0.0.1", net.address("b")):
            with pytest.raises(ConnectionRefusedError):
                inside(name, functools.partial(socket.create_connection, (address, port), timeout=5))
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_closing_removes_everything(tmp_path: Path) -> None:
    net = Network(Topology.star(["a", "b"], rate_mbps=100), directory=tmp_path)
    assert len(namespaces_of(net.lab)) == 3
    assert [claim.lab for claim in lab_registry.leftovers(tmp_path)] == [net.lab]
    inhabitant = subprocess.Popen(
        command_lines.entered(net.namespace("a"), [sys.executable, "-S", "-c", "import time; time.sleep(300)"]),
        env=net.mark(),
    )
    inode = os.stat(DIRECTORY / net.namespace("a")).st_ino
    assert soon(lambda: os.stat(f"/proc/{inhabitant.pid}/ns/net").st_ino == inode)
    net.close()
    assert inhabitant.wait(5) == -signal.SIGKILL
    assert namespaces_of(net.lab) == set()
    assert list(tmp_path.iterdir()) == []
    net.close()


def test_a_lab_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def fail(self: BridgedLinks, host: str) -> None:
        built.append(self.namespace(host).split("-")[1])
        raise OSError("no such qdisc")

    monkeypatch.setattr(BridgedLinks, "_build_host", fail)
    with pytest.raises(NetworkError, match=r"the kernel refused a part of it \(no such qdisc\)"):
        Network(Topology.star(["a", "b"], rate_mbps=100), directory=tmp_path)
    assert len(built) == 1
    assert namespaces_of(built[0]) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_lab_that_is_ended_leaves_nothing(owner: Owner, number: signal.Signals) -> None:
    assert len(namespaces_of(owner.lab)) == 3
    assert alive(set(owner.workers)) == set(owner.workers)
    owner.process.send_signal(number)
    owner.process.wait(10)
    assert soon(lambda: not namespaces_of(owner.lab) and not alive({*owner.workers, owner.reaper}))
    assert not lab_registry.path_of(owner.lab, owner.folder).exists()


def test_what_a_dead_lab_left_is_cleaned(owner: Owner) -> None:
    """Lab and reaper die together, as when the machine runs out of memory."""
    os.kill(owner.reaper, signal.SIGKILL)
    owner.process.kill()
    owner.process.wait(10)
    assert len(namespaces_of(owner.lab)) == 3, "the fault did not fire"
    removed, kept = lab_registry.clean(directory=owner.folder)
    assert ([claim.lab for claim in removed], kept) == ([owner.lab], [])
    assert namespaces_of(owner.lab) == set()
    assert not lab_registry.path_of(owner.lab, owner.folder).exists()


def test_cleaning_spares_the_living(owner: Owner) -> None:
    removed, kept = lab_registry.clean(directory=owner.folder)
    assert (removed, [claim.lab for claim in kept]) == ([], [owner.lab])
    assert len(namespaces_of(owner.lab)) == 3
    assert alive(set(owner.workers)) == set(owner.workers)
    removed, kept = lab_registry.clean(force=True, directory=owner.folder)
    assert ([claim.lab for claim in removed], kept) == ([owner.lab], [])
    assert namespaces_of(owner.lab) == set()
    assert soon(lambda: not alive(set(owner.workers)))


def test_cleaning_spares_what_no_lab_made(tmp_path: Path) -> None:
    """A namespace of somebody else, though its name looks like ours."""
    from pyroute2 import netns

    name = f"offbeat-theirs-{os.getpid()}"
    netns.create(name)
    try:
        lab_registry.clean(force=True, directory=tmp_path)
        assert (DIRECTORY / name).exists()
    finally:
        netns.remove(name)


def test_two_labs_do_not_meet(owner: Owner) -> None:
    """The second has the same addresses and rates, and cannot reach the first; ending it leaves the first alone."""
    with Network(Topology.star(["a", "b"], rate_mbps=50), directory=owner.folder) as second:
        assert second.lab != owner.lab
        listening = inside(f"offbeat-{owner.lab}-h1", lambda: socket.create_server((second.address("b"), 4000)))
        with listening:
            with pytest.raises(ConnectionRefusedError):
                inside(second.namespace("a"), lambda: socket.create_connection((second.address("b"), 4000), timeout=5))
            address = (second.address("b"), 4000)
            with inside(f"offbeat-{owner.lab}-h0", lambda: socket.create_connection(address, timeout=5)):
                pass
        measured = carried(second, {"a": 45, "b": 45})
        assert all(45 <= stream <= 48.5 for stream in measured.values()), measured
    assert len(namespaces_of(owner.lab)) == 3
    assert alive(set(owner.workers)) == set(owner.workers)


def test_building_is_quick(tmp_path: Path) -> None:
    start_s = time.perf_counter()
    with Network(Topology.star([f"h{index}" for index in range(8)], rate_mbps=100), directory=tmp_path):
        pass
    assert time.perf_counter() - start_s < 15


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (
            Topology.ring(3, latency_ms=5),
            r"add 5 ms of latency to the link between h0 and h1: .*\(topology\.latency_ms\)",
        ),
        (Topology.torus(2, 2, parallel=True), r"Cannot build several links between h1 and h0: .*\(link\)"),
        (Topology.star([f"h{index}" for index in range(MAX_HOSTS + 1)]), r"Cannot build 251 hosts: .*\(hosts\)"),
        (Topology.fat_tree(2, 7), r"Cannot build 448 switches: a lab has at most 250"),
    ],
)
def test_what_no_lab_can_be_built_of(tmp_path: Path, topology: Topology, says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        Network(topology, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_bucket_holds_the_largest_packet() -> None:
    """A packet larger than the bucket would never pass."""
    for rate_mbps in (0.1, 1, 10, 200, 1000, 10_000):
        packet_bytes, burst_bytes = bucket_bytes(rate_mbps)
        assert 1514 < packet_bytes <= 65536
        assert burst_bytes >= 2 * packet_bytes
