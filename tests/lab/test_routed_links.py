"""Networks in which hosts and switches forward: each direction carries its own rate, along the ways of the topology."""

from __future__ import annotations

import functools
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat.errors import NetworkError
from offbeat.fault_spec import Fault, Fired
from offbeat.lab import goodput, lab_registry
from offbeat.lab.arc_counters import ArcCounters
from offbeat.lab.fault_injection import FaultRun
from offbeat.lab.jobs import jobs
from offbeat.lab.launch import places
from offbeat.lab.namespace import inside
from offbeat.lab.network import Network
from offbeat.lab.routed_links import STUB
from offbeat.scenario import Scenario
from offbeat.topology import Host, Link, Topology
from offbeat.wire.interfaces import interface_addresses
from tests.lab.permissions import namespaces_of, needs_root
from tests.patience import soon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.topology import Arc

pytestmark = needs_root

PORT, DATAGRAM_BYTES = 9, 1000


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Six hosts; between the first two there is less, and least on the way back."""
    like = Topology.mesh(2, 3, rate_mbps=20)
    links = tuple(Link("h0", "h1", 10, 5) if {one.a, one.b} == {"h0", "h1"} else one for one in like.links)
    made = Topology(like.hosts, links, (), like.routing)
    with Network(made, directory=tmp_path_factory.mktemp("lab")) as net:
        yield net


def send(net: Network, source: str, target: str, count: int) -> None:
    """Send datagrams that nobody answers but by saying that nobody listens."""

    def go() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
            for _ in range(count):
                ours.sendto(bytes(DATAGRAM_BYTES), (net.address(target), PORT))

    inside(net.namespace(source), go)


def connects(net: Network, source: str, target: str, timeout_s: float = 5.0) -> bool:
    """Whether a host is there: it answers that nobody listens."""
    address = net.address(target), PORT
    try:
        inside(net.namespace(source), functools.partial(socket.create_connection, address, timeout=timeout_s))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    raise AssertionError("somebody listens there")


@pytest.mark.slow
def test_each_direction_carries_its_rate(mesh: Network) -> None:
    """All of them at the same time; and behind that the longest way."""
    rates = {f"{arc.source}>{arc.target}": arc.rate_mbps for arc in mesh.topology.arcs}
    assert rates["h0>h1"] == 10
    assert rates["h1>h0"] == 5
    for _ in range(8):
        measured = goodput.measure(mesh, seconds=1.5)
        shares = {name: measured[name] / rate for name, rate in rates.items() if rate is not None}
        if min(shares.values()) >= 0.85 and max(shares.values()) <= 0.97:
            break
    assert set(measured) == {*rates, "h0>h5"}
    assert min(shares.values()) >= 0.85, shares
    assert max(shares.values()) <= 0.97, shares
    goodput.check(measured, mesh)
    assert 8.5 <= measured["h0>h5"] <= 9.7, "as the slowest link on its way"


@pytest.mark.parametrize(("source", "target"), [("h0", "h5"), ("h5", "h0"), ("h3", "h4")])
def test_packets_go_along_the_ways_of_the_topology(mesh: Network, source: str, target: str) -> None:
    count = 100
    assert connects(mesh, source, target)  # who is asked for the first time is asked for its hardware address as well
    with ArcCounters(mesh, interval_s=0.02) as counters:
        begin_s = time.perf_counter()
        time.sleep(0.1)
        send(mesh, source, target, count)
        time.sleep(1.0)
        end_s = time.perf_counter()
    carried = counters.between({}, (begin_s, end_s))
    assert counters.between({source: (begin_s, begin_s)}, (begin_s, end_s))[mesh.topology.route(source, target)[0]] == (
        0,
        0,
    )
    least_bytes = count * DATAGRAM_BYTES
    full = {arc for arc, one in carried.items() if one.sent_bytes >= least_bytes}
    assert full == set(mesh.topology.route(source, target))
    assert all(carried[arc].sent_bytes < least_bytes * 1.06 for arc in full), "each packet once, and its headers"
    assert all(count <= carried[arc].packets <= count + 5 for arc in full)


def test_a_host_has_one_address_and_nothing_of_this_machine(mesh: Network) -> None:
    for place in places(mesh):
        assert place.interface == STUB
        assert place.port is None
        assert len(place.interfaces) == sum(place.host in (link.a, link.b) for link in mesh.topology.links)

        def seen() -> tuple[str, str, dict[str, str]]:
            devices, sixth = (Path(f"/proc/thread-self/net/{name}").read_text() for name in ("dev", "if_inet6"))
            return devices, sixth, interface_addresses()

        devices, sixth, addresses = inside(mesh.namespace(place.host), seen)
        own = {"lo", STUB, "stub-end", *place.interfaces}
        assert {line.split(":")[0].strip() for line in devices.splitlines()[2:]} == own
        assert sixth == ""
        assert {name: address for name, address in addresses.items() if address} == {
            "lo": "127.0.0.1",
            STUB: place.address,
        }


@pytest.mark.slow
def test_one_direction_changes_and_the_other_stays(mesh: Network) -> None:
    (there,) = mesh.topology.route("h1", "h2")
    (back,) = mesh.topology.route("h2", "h1")
    mesh.shape_arc(there, 4)
    try:
        assert soon(lambda: 3.4 <= (now := rates(mesh))[there] <= 3.9 and 17 <= now[back] <= 19.5, 60)
    finally:
        mesh.shape_arc(there, 20)


def rates(net: Network) -> dict[Arc, float]:
    """What streams between neighbours reach now."""
    measured = goodput.measure(net, seconds=1.5)
    return {arc: measured[f"{arc.source}>{arc.target}"] for arc in net.topology.arcs}


def test_a_link_is_cut_and_mended(mesh: Network) -> None:
    """Ways do not change: what would go over it does not arrive, whoever sends it."""
    arcs = [*mesh.topology.route("h1", "h2"), *mesh.topology.route("h2", "h1")]
    assert connects(mesh, "h0", "h2")
    for arc in arcs:
        mesh.shape_arc(arc, 20, is_cut=True)
    try:
        assert not connects(mesh, "h1", "h2", 0.5)
        assert not connects(mesh, "h0", "h2", 0.5), "its way leads over that link"
        assert connects(mesh, "h0", "h4")
    finally:
        for arc in arcs:
            mesh.shape_arc(arc, 20)
    assert soon(lambda: connects(mesh, "h0", "h2"))


SCENARIO = """
[scenario]
name = "mesh"
[topology]
kind = "mesh"
dims = [2, 3]
rate_mbps = 20
[[link]]
a = "h0"
b = "h1"
rate_mbps = 10
back_mbps = 5
[workload]
kind = "replay"
profile = "resnet50"
[[row]]
name = "ddp"
system = "ddp"
"""


def fault_run(net: Network, folder: Path, **fault: object) -> FaultRun:
    """The faults of a run in that network; they are asked for by hand."""
    made = Scenario.from_toml(SCENARIO)
    assert made.topology == net.topology
    made = msgspec.structs.replace(made, fault=[Fault(worker=0, step=0, **fault)])  # type: ignore[arg-type]
    made.fault[0].check()
    return FaultRun(jobs(made, folder)[0], folder, net)


def ask(run: FaultRun, folder: Path) -> None:
    fired = Fired(number=0, fault=run.faults[0], time_s=time.time())
    (folder / "faults.asked").write_bytes(msgspec.json.encode(fired) + b"\n")
    assert soon(lambda: len(run.fired) == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lost", "kept"),
    [
        ({"kind": "partition", "link": ["h1", "h2"]}, ("h1", "h2"), ("h1", "h4")),
        ({"kind": "partition"}, ("h1", "h0"), ("h1", "h2")),
        ({"kind": "mute"}, ("h0", "h1"), ("h1", "h2")),
        ({"kind": "deaf"}, ("h1", "h0"), ("h1", "h2")),
    ],
)
def test_faults_cut_links_for_a_while(
    mesh: Network, tmp_path: Path, fault: dict[str, object], lost: tuple[str, str], kept: tuple[str, str]
) -> None:
    assert connects(mesh, *lost)
    with fault_run(mesh, tmp_path, seconds=3.0, **fault) as run:
        began_s = time.monotonic()
        ask(run, tmp_path)
        assert not connects(mesh, *lost, 0.5)
        assert connects(mesh, *kept)
        assert soon(lambda: connects(mesh, *lost, 0.5))
        assert time.monotonic() - began_s >= 2.5


def test_who_is_mute_still_hears(mesh: Network, tmp_path: Path) -> None:
    heard: list[bytes] = []
    with inside(mesh.namespace("h0"), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as ours:
        ours.bind(("", PORT))
        ours.settimeout(5)
        with fault_run(mesh, tmp_path, kind="mute", seconds=60.0) as run:
            ask(run, tmp_path)
            send(mesh, "h1", "h0", 1)
            heard.append(ours.recv(2000))
        assert connects(mesh, "h0", "h1"), "behind a run all links are as they were"
        with fault_run(mesh, tmp_path, kind="deaf", seconds=60.0) as run:
            (tmp_path / "faults.log").unlink()
            ask(run, tmp_path)
            send(mesh, "h1", "h0", 1)
            ours.settimeout(0.5)
            with pytest.raises(TimeoutError):
                ours.recv(2000)
    assert heard == [bytes(DATAGRAM_BYTES)]


@pytest.mark.slow
def test_a_link_is_slow_for_a_while_at_the_rate_that_holds(mesh: Network, tmp_path: Path) -> None:
    with fault_run(mesh, tmp_path, kind="slow-link", link=["h4", "h5"], factor=8.0, seconds=60.0) as run:
        ask(run, tmp_path)
        assert soon(lambda: 1.9 <= rates(mesh)[mesh.topology.route("h5", "h4")[0]] <= 2.5, 60)
    assert soon(lambda: 17 <= rates(mesh)[mesh.topology.route("h5", "h4")[0]] <= 19.5, 60)


def test_switches_forward_as_well(tmp_path: Path) -> None:
    """A fat tree; who ends it removes the switches with the hosts."""
    with Network(Topology.fat_tree(2, 2, rate_mbps=10), directory=tmp_path) as net:
        assert len(namespaces_of(net.lab)) == 8
        (claim,) = lab_registry.leftovers(tmp_path)
        assert {net.namespace("s0-0"), net.namespace("s1-1")} <= set(claim.namespaces)
        assert all(connects(net, a, b) for a in ("h0", "h3") for b in ("h1", "h2"))
        lab = net.lab
    assert namespaces_of(lab) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_star_with_another_rate_back_is_routed(tmp_path: Path) -> None:
    hosts = tuple(map(Host, "abc"))
    links = (Link("a", "switch", 20, 5), Link("b", "switch", 20), Link("c", "switch", 20))
    with Network(Topology(hosts, links), directory=tmp_path) as net:

        def is_right() -> bool:
            measured = goodput.measure(net, seconds=1.0)
            return 4.2 <= measured["switch>a"] <= 4.9 and 17 <= measured["a>switch"] <= 19.5

        assert soon(is_right, 40)
        with pytest.raises(NetworkError, match="the link from a to switch: it needs one"):
            net.shape("a", None)
