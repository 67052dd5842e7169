"""Interfaces: which address this machine has, and by which one a host is reached."""

from __future__ import annotations

import socket

import pytest

from offbeat.wire import interfaces


def test_loopback_has_its_address() -> None:
    assert interfaces.interface_addresses()["lo"] == interfaces.interface_address("lo") == "127.0.0.1"
    assert interfaces.interface_address("none") == ""


def test_a_host_is_reached_by_one_of_them() -> None:
    assert interfaces.address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces.address_towards("") == "127.0.0.1"


def test_a_host_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unresolved(socket.socket):
        def connect(self, address: object) -> None:
            raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "socket", Unresolved)
    assert interfaces.address_towards("node1") == ""


@pytest.mark.parametrize(("address", "own"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)])
def test_what_only_this_machine_reaches(address: str, own: bool) -> None:
    assert interfaces.is_loopback(address) is own
