"""The switch's doctor: a good path, and each bad case tried on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.errors import NetworkError
from offbeat.protocol.switch_control import JoinSwitchJob, Strategy, SwitchJobStatus, SwitchMemberStatus, SwitchStatus
from offbeat.switch import switch_doctor
from offbeat.switch.control_client import ControlClient
from offbeat.switch.offloads import Offloads, interface_towards, offloads_of
from offbeat.switch.packet import Reason
from offbeat.switch.sending_rate import SendingRate, sending_rate
from offbeat.switch.switch_doctor import SizeOutcome, examine_switch
from offbeat.switch.trial_job import LossCount, TrialJob
from offbeat.wire.credentials import Token
from tests.cli.commands import offbeat
from tests.switch.local_switch import served_switch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_good_path() -> None:
    told: list[str] = []
    with served_switch() as address:
        other = ControlClient(address)
        other.ask(
            lambda request: JoinSwitchJob(
                request=request, job="theirs", worker=0, workers=2, values=64, slots=64, ring=64
            )
        )
        found = {one.name: one for one in examine_switch(address, None, told.append)}
        left = [job.job for job in other.status().jobs]
        other.close()
    assert left == ["theirs"], "its own jobs are gone, and the other is as it was"
    assert not [one for one in found.values() if one.level == "bad"]
    assert "sums by udp" in found["control"].value
    assert found["packet size"].value.startswith("2048 values (8,256 bytes)")
    assert "median" in found["round trip"].value
    assert "0 of " in found["loss"].value
    assert found["job theirs"].reason == "rank 1 has not joined, or is gone"
    assert len(told) >= 6


@pytest.mark.slow
def test_nobody_is_there_and_the_exit_code_says_so(tmp_path: Path) -> None:
    code, output = offbeat("switch", "doctor", "127.0.0.1:9", "--json", folder=tmp_path)
    assert code == 1, output
    found = msgspec.json.decode(output.strip().splitlines()[-1])
    assert found[0]["level"] == "bad"
    assert "Cannot reach 127.0.0.1:9 in" in found[0]["reason"]


def test_another_token() -> None:
    with served_switch(Token(b"a" * 32)) as address:
        found = list(examine_switch(address, Token(b"b" * 32)))
    assert [(one.name, one.level) for one in found] == [("control", "bad"), ("interface", "ok")]
    assert "--token-file" in found[0].remedy


def test_a_refusal_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(job: TrialJob) -> bool:
        job.client.refusal = Reason.WRONG_PORT
        raise NetworkError(f"the switch refuses a packet: {job.client.refusal.text}")

    monkeypatch.setattr(TrialJob, "join", refused)
    with served_switch() as address:
        found = {one.name: one for one in examine_switch(address, None)}
    assert found["job"].level == "bad"
    assert Reason.WRONG_PORT.text in found["job"].reason


def test_packets_that_do_not_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialJob, "join", lambda job: False)
    with served_switch() as address:
        found = {one.name: one for one in examine_switch(address, None)}
    assert found["packets"].level == "bad"
    assert "--interfaces" in found["packets"].remedy
    assert "loss" not in found


def test_checksums_that_are_wrong() -> None:
    found = switch_doctor.word_packets(7000, False, 12)
    assert found.level == "bad"
    assert "12 datagrams" in found.reason
    assert "address translation" in found.remedy
    assert switch_doctor.word_packets(7000, True, 12).level == "ok", "others may be damaged"


@pytest.mark.parametrize(
    ("bad", "level", "says"),
    [
        ({}, "ok", "2048 values"),
        ({2048: "too large"}, "ok", "Switch(values=352) is the most here"),
        ({352: "too large", 2048: "too large"}, "ok", "256 values"),
        ({256: "gone", 352: "gone", 2048: "gone"}, "note", "Switch(values=64)"),
        ({64: "gone", 256: "gone", 352: "gone", 2048: "gone"}, "bad", "none works"),
        ({256: "gone"}, "note", "but 256 values: gone"),
    ],
)
def test_packet_sizes(bad: dict[int, str], level: str, says: str) -> None:
    outcomes = [SizeOutcome(values, bad.get(values, "")) for values in switch_doctor.SIZES]
    found = switch_doctor.word_sizes(outcomes, 1500)
    assert found.level == level
    assert says in f"{found.value} {found.reason} {found.remedy}"


@pytest.mark.parametrize(
    ("count", "level", "says"),
    [
        (LossCount(1000, 1000, 1000, 0, 1.0, True), "ok", "0 of 1,000"),
        (LossCount(1000, 950, 940, 0, 1.0, True), "note", "50 of 1,000 on the way to the switch, 10 of 950"),
        (LossCount(1000, 1000, 900, 99, 1.0, True), "note", "net.core.rmem_max"),
        (LossCount(1000, 10, 5, 0, 10.0, False), "bad", "was not here, or was wrong"),
    ],
)
def test_loss_by_direction(count: LossCount, level: str, says: str) -> None:
    found = next(iter(switch_doctor.word_loss(count, 64)))
    assert found.level == level
    assert says in f"{found.value} {found.reason} {found.remedy}"


def test_buffers_that_are_small() -> None:
    assert switch_doctor.word_buffers(8 << 20, 8 << 20).level == "ok"
    found = switch_doctor.word_buffers(212_992, 8 << 20)
    assert (found.level, found.remedy) == ("note", "sysctl -w net.core.rmem_max=8388608")


def test_who_is_behind_and_what_was_refused() -> None:
    members: tuple[Any, ...] = (
        SwitchMemberStatus(0, 0, 0, 0.1, {"DATA": 9}),
        SwitchMemberStatus(1, 0, 40, 60.0, {"DATA": 3}),
    )
    job = SwitchJobStatus(
        job="j", number=1, workers=2, values=64, slots=64, ring=64, rows=0, strategy=Strategy(), low=0, high=0,
        window_old=0, window_new=0, effective=0, epoch=0, members=members, refused={"HELD_UP": 7},
    )  # fmt: skip
    dropped, found = switch_doctor.word_status(SwitchStatus(1, "udp", (job,), {"foreign": 3, "refused": 0}))
    assert dropped.value == "3 foreign"
    assert found.level == "note"
    assert "rank 1 is 40 chunks behind" in found.value
    assert "7 (another worker still lacks" in found.value
    assert "--evict j:1" in found.remedy


def test_the_interface() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert "lo: UDP checksums" in switch_doctor.word_offloads(offloads_of("lo")).value
    unknown = offloads_of("none0")
    assert unknown == Offloads("none0", None, None, None, None)
    assert "GRO not readable; XDP not readable" in switch_doctor.word_offloads(unknown).value


def test_sending_to_nobody() -> None:
    rate = sending_rate(64, seconds=0.05)
    assert rate.packets > 0
    assert rate.seconds > 0
    assert rate.answer_seconds > 0
    assert SendingRate(10, 2.0, 1.0).per_second == 5
