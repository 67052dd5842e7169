"""`offbeat doctor`: each bad case, tried on a good machine."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.cli import doctor
from offbeat.diagnosis.finding import Finding
from offbeat.wire import interfaces
from tests.cli.commands import offbeat

if TYPE_CHECKING:
    from pathlib import Path

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "wlan0": ""}


def test_this_machine_can_train(tmp_path: Path) -> None:
    code, output = offbeat("doctor", "--json", folder=tmp_path)
    assert code == 0, output
    found = {finding["name"]: finding for finding in msgspec.json.decode(output)}
    assert {"cores", "torch", "backends", "interfaces", "gloo would use", "loopback", "lab"} <= set(found)
    assert float(found["loopback"]["value"].split()[0]) > 0.1
    assert "gloo" in found["backends"]["value"]
    for finding in found.values():
        assert finding["level"] == "ok" or (finding["reason"] and finding["remedy"])
    assert ("tbf work" in found["lab"]["value"]) == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("environment", "hostname", "level", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "", "ok", "eth0 (GLOO_SOCKET_IFNAME)"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "", "bad", "set it to one of lo, eth0"),
        ({"GLOO_SOCKET_IFNAME": "wlan0"}, "", "bad", "has no address"),
        ({}, "10.0.0.5", "ok", "eth0 10.0.0.5"),
        ({}, "127.0.1.1", "note", "GLOO_SOCKET_IFNAME=eth0"),
        ({}, "", "note", "does not resolve"),
        ({}, "192.168.7.7", "note", "which no interface has"),
    ],
)
def test_the_interface_of_gloo(environment: dict[str, str], hostname: str, level: str, says: str) -> None:
    finding = doctor.check_gloo(environment, ADDRESSES, lambda: hostname)
    assert finding.level == level
    assert says in f"{finding.value} {finding.reason} {finding.remedy}"


def test_whether_strangers_reach_the_ports_of_gloo() -> None:
    assert doctor.check_strangers({}, doctor.try_to_drop).level == "ok"
    later = doctor.check_strangers({"TORCH_GLOO_LAZY_INIT": "1"}, doctor.try_to_drop)
    assert later.level == "note"
    assert "unset it" in later.remedy

    def refuses() -> None:
        raise OSError(92, "Protocol not available")

    without = doctor.check_strangers({"TORCH_GLOO_LAZY_INIT": "0"}, refuses)
    assert without.level == "note"
    assert "Protocol not available" in without.reason
    assert "firewall" in without.remedy


def test_no_network_at_all() -> None:
    assert doctor.check_interfaces({"lo": ""}).level == "bad"
    assert doctor.check_gloo({}, {"lo": "127.0.0.1"}, lambda: "127.0.0.1").level == "ok"


def test_interfaces_are_listed_with_the_rates_that_they_say_they_have(tmp_path: Path) -> None:
    for name, speed in (("eth0", "25000"), ("wlan0", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed + "\n")
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "wlan0": "10.0.1.1"}
    found = doctor.check_interfaces(addresses, lambda name: interfaces.nominal_mbps(name, tmp_path))
    assert found.value == "lo 127.0.0.1, eth0 10.0.0.1 (25,000 Mbit/s), wlan0 10.0.1.1"


def test_loopback_that_is_slow_or_broken() -> None:
    def broken() -> float:
        raise OSError("Network is unreachable")

    assert doctor.check_loopback(broken).level == "bad"
    assert doctor.check_loopback(lambda: 0.2).level == "note"
    assert doctor.check_loopback(lambda: 20.0).level == "ok"


def test_few_files_and_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_files(256).level == "note"
    assert doctor.check_files(65536).level == "ok"
    assert doctor.check_slow_start(tmp_path / "not linux").level == "ok"
    setting = tmp_path / "tcp_slow_start_after_idle"
    for value, level in (("0\n", "ok"), ("1\n", "note")):
        setting.write_text(value)
        assert doctor.check_slow_start(setting).level == level
    assert doctor.check_shared_memory(tmp_path / "none").level == "note"

    class Usage:
        free = 64_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage())
    assert doctor.check_shared_memory(tmp_path).level == "note"


def test_missing_packages() -> None:
    found = list(doctor.check_packages(lambda name: None))
    assert [finding.level for finding in found] == ["note"] * 4
    assert "pip install 'offbeat[lab]'" in found[0].remedy


def test_the_lab_without_root_or_kernel() -> None:
    def refused() -> None:
        raise OSError(95, "Operation not supported")

    def missing() -> None:
        raise ImportError

    ran: list[Any] = []
    assert "need root" in doctor.check_lab(1000, lambda: ran.append(1)).reason
    assert not ran
    assert "Operation not supported" in doctor.check_lab(0, refused).reason
    assert "pyroute2" in doctor.check_lab(0, missing).reason


def test_a_bad_finding_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding("torch", "missing", "bad", "why", "how")]))
    with pytest.raises(typer.Exit) as stop:
        doctor.doctor(json=False)
    assert stop.value.exit_code == 1
    assert "why: how" in capsys.readouterr().out


def test_loopback_that_swallows_packets_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops: nobody ever arrives, and the doctor must not wait for ever."""
    monkeypatch.setattr(doctor, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(doctor, "_send", lambda port: None)
    assert doctor.check_loopback(doctor.measure_loopback_gbps).level == "bad"


def test_the_address_gloo_takes_may_be_of_either_family(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    strange = (socket.AF_INET, *stream, ("203.0.113.9", 0))  # of no machine: cannot be bound
    own = (socket.AF_INET6, *stream, ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [strange, own])
    assert interfaces.resolve_hostname() in ("::1", "")  # "" where IPv6 is off
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [strange])
    assert interfaces.resolve_hostname() == ""
    finding = doctor.check_gloo({}, {"lo": "127.0.0.1", "eth0": "192.0.2.7"}, lambda: "::1")
    assert (finding.level, finding.value) == ("note", "lo")
    assert doctor.check_gloo({}, {"lo": "127.0.0.1"}, lambda: "2001:db8::7").level == "ok"
