"""The path between this machine and a switch: what works, and for what does not the reason and the remedy.

It is found out by doing it: a job of its own, of one worker, is joined and sums. What is measured is put into words by
functions that take the measurements, so that each bad case can be tried on a good path.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from offbeat.diagnosis.finding import Finding
from offbeat.errors import NetworkError, OffbeatError, PeerError, PlanError
from offbeat.switch.control_client import ControlClient
from offbeat.switch.offloads import interface_towards, offloads_of
from offbeat.switch.packet import HEADERS_BYTES, Reason
from offbeat.switch.sending_rate import sending_rate
from offbeat.switch.trial_job import TrialJob
from offbeat.switch.udp_socket import BUFFER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from offbeat.protocol.switch_control import SwitchJobStatus, SwitchStatus
    from offbeat.switch.offloads import Offloads
    from offbeat.switch.sending_rate import SendingRate
    from offbeat.switch.trial_job import LossCount
    from offbeat.wire.credentials import Credentials

_DIAL = timedelta(seconds=3)
_SOON = timedelta(seconds=1.5)  # for a few packets
_IN_ALL = timedelta(seconds=10)  # for thousands of them
SIZES = (64, 256, 352, 2048)  # int32 in a packet
_USUAL = 256
_ROUND_TRIPS, _PACKETS = 300, 4000
_LONG_SILENCE_S = 5.0
_ENOUGH_BYTES = 64 * 16384  # for a window of the largest packets, as the kernel counts them
_WORTH_A_NOTE = 0.001  # part of the packets that may be lost without one


class SizeOutcome(NamedTuple):
    """The outcome of a trial with packets of one size; `why` is "" if the sum came back."""

    values: int
    why: str = ""


def examine_switch(
    address: str, credentials: Credentials | None, tell: Callable[[str], None] = lambda what: None
) -> Iterator[Finding]:
    """Test the path from this machine to a switch; takes a few seconds.

    Args:
        address: "host:port" of its control.
        credentials: as for workers.
        tell: called with what is tested next.

    Raises:
        NetworkError: if the switch is lost meanwhile.
    """
    host = address.rpartition(":")[0].strip("[]")
    tell("looking for the switch's control")
    began_s = time.monotonic()
    try:
        control = ControlClient(address, credentials=credentials, patience=_DIAL, timeout=_DIAL)
    except OffbeatError as error:
        yield no_control(address, error)
        yield from check_interface(host)
        return
    with contextlib.closing(control):
        status = control.status()
        yield word_control(address, status.target, credentials is not None, time.monotonic() - began_s)
        yield from check_packets(address, credentials, tell)
        tell("measuring how fast this machine sends")
        yield word_sending(sending_rate(_USUAL))
        yield from check_interface(host)
        yield from word_status(control.status())


# -- control ---------------------------------------------------------------------------------------------------------


def no_control(address: str, error: OffbeatError) -> Finding:
    """Say why control was not reached."""
    why = str(error).removesuffix(" Is the server running, and is this its address?").rstrip(".")
    if isinstance(error, PeerError):
        remedy = (
            "give this command the token that the switch was given (--token-file, or OFFBEAT_TOKEN), and certificates "
            "of the same authority if it has any (--certificate, --key, --authority)"
        )
        return Finding("control", f"{address} does not let this machine in", "bad", why, remedy)
    remedy = "start the switch with `offbeat switch serve`, or name the address that it says"
    return Finding("control", f"{address} is not reached", "bad", why, remedy)


def word_control(address: str, target: str, has_credentials: bool, waited_s: float) -> Finding:
    """Say who answers."""
    proved = "the credentials are accepted" if has_credentials else "no credentials"
    return Finding("control", f"{address}, which sums by {target}, answers after {1000 * waited_s:.0f} ms; {proved}")


# -- packets ---------------------------------------------------------------------------------------------------------


def check_packets(
    address: str, credentials: Credentials | None, tell: Callable[[str], None] = lambda what: None
) -> Iterator[Finding]:
    """Sum in jobs of one worker: do packets come through, which sizes, how fast, how many are lost?"""
    tell("joining a job of its own")
    try:
        with TrialJob(address, credentials, SIZES[0], patience=_SOON) as job:
            before = job.damaged()
            has_joined, port = job.join(), job.port
            damaged = job.damaged() - before
            buffers, frame_bytes = job.buffer_bytes, job.frame_bytes
    except OffbeatError as error:
        yield Finding("job", "none", "bad", str(error).rstrip("."), "see `offbeat switch ctl`, which lists its jobs")
        return
    yield word_packets(port, has_joined, damaged)
    yield word_buffers(*buffers)
    if not has_joined:
        return
    outcomes = []
    for values in SIZES:
        tell(f"summing packets of {values} values")
        outcomes.append(try_size(address, credentials, values))
    yield word_sizes(outcomes, frame_bytes)
    largest = max((one.values for one in outcomes if not one.why), default=0)
    if not largest:
        return
    tell("measuring round trips")
    # What ends this one early is said of the next.
    with (
        contextlib.suppress(OffbeatError),
        TrialJob(address, credentials, min(_USUAL, largest), patience=_IN_ALL, window=1) as job,
    ):
        job.join()
        yield word_round_trips(job.round_trips_s(_ROUND_TRIPS))
    tell("counting what is lost")
    try:
        with TrialJob(address, credentials, min(_USUAL, largest), patience=_IN_ALL) as job:
            job.join()
            yield from word_loss(job.loss(_PACKETS), job.client.window)
    except OffbeatError as error:
        yield Finding("loss", "not known", "bad", str(error).rstrip("."), "try again")


def try_size(address: str, credentials: Credentials | None, values: int) -> SizeOutcome:
    """Sum a few packets of so many values."""
    try:
        with TrialJob(address, credentials, values, patience=_SOON) as job:
            if not job.join():
                return SizeOutcome(values, "the switch does not answer any more")
            if not job.is_summed(8):
                held_up = job.client.held_up_by is not None
                return SizeOutcome(values, "the sum does not come back" + held_up * f": {Reason.HELD_UP.text}")
            return SizeOutcome(values)
    except (NetworkError, PlanError) as error:
        return SizeOutcome(values, str(error).rstrip("."))


def word_packets(port: int, has_joined: bool, damaged: int) -> Finding:
    """Say whether packets reach the switch and answers come back.

    Args:
        damaged: datagrams that came with a wrong checksum meanwhile, and which the kernel has thrown away.
    """
    if has_joined:
        return Finding("packets", f"UDP port {port} of the switch answers")
    if damaged:
        return Finding(
            "packets", f"UDP port {port} of the switch answers, with wrong checksums", "bad",
            f"{damaged} datagrams came with one and were thrown away: workers send theirs without a checksum, so "
            "something between here and the switch writes one into them, and not anew where the switch changes them",
            "have no address translation, tunnel or proxy between the workers and the switch",
        )  # fmt: skip
    return Finding(
        "packets", f"UDP port {port} of the switch does not answer", "bad",
        f"packets have been sent there for {_SOON.total_seconds():g} s, and none was answered",
        "let UDP pass between this machine and that port, both ways; with --target ebpf the port where this machine's "
        "link ends has to be among its --interfaces",
    )  # fmt: skip


def word_sizes(outcomes: Sequence[SizeOutcome], frame_bytes: int) -> Finding:
    """Say which is the largest packet whose sum comes back."""
    good = [one.values for one in outcomes if not one.why]
    frames = f"frames of this machine carry {frame_bytes:,} bytes"
    if not good:
        return Finding(
            "packet size", "none works", "bad", f"with {outcomes[0].values} values {outcomes[0].why}",
            "look at the switch's own output, and for a firewall between",
        )  # fmt: skip
    value = f"{max(good)} values ({HEADERS_BYTES + 4 * max(good):,} bytes); {frames}"
    bad = next((one for one in outcomes if one.why and one.values > max(good)), None)
    between = next((one for one in outcomes if one.why and one.values < max(good)), None)
    if between is not None:
        return Finding("packet size", value, "note", f"but {between.values} values: {between.why}", "test it again")
    if bad is None:
        return Finding("packet size", value)
    if max(good) < _USUAL:
        return Finding(
            "packet size", value, "note", f"{bad.values} values: {bad.why}",
            f"use Switch(values={max(good)}), or give every link on the way frames of 1,500 bytes (MTU)",
        )  # fmt: skip
    return Finding(
        "packet size", value, "ok", f"{bad.values} values: {bad.why}",
        f"Switch(values={max(good)}) is the most here; {bad.values} take frames of "
        f"{HEADERS_BYTES + 4 * bad.values:,} bytes (MTU) on every link",
    )  # fmt: skip


def word_round_trips(seconds: Sequence[float]) -> Finding:
    """Say how long a packet and its answer take."""
    if not seconds:
        return Finding("round trip", "none measured", "note", "each packet was lost or late", "see the loss below")
    ordered = sorted(1e6 * one for one in seconds)
    p99 = ordered[int(0.99 * len(ordered))]
    value = f"median {statistics.median(ordered):,.0f} us, p99 {p99:,.0f} us over {len(ordered)} packets, one by one"
    return Finding("round trip", value)


def word_loss(count: LossCount, window: int) -> Iterator[Finding]:
    """Say how many packets are lost in which direction, and how many pass per second."""
    up, down = max(0, count.sent - count.counted), max(0, count.counted - count.answered)
    value = f"{up} of {count.sent:,} on the way to the switch, {down} of {count.counted:,} on the way back"
    if not count.is_right:
        yield Finding(
            "loss", value, "bad", f"after {count.seconds:.1f} s the sum was not here, or was wrong",
            "find out which link or queue loses packets, or use ParameterServer()",
        )  # fmt: skip
        return
    if up + down <= _WORTH_A_NOTE * (count.sent + count.counted):
        yield Finding("loss", value)
    elif count.overflowed > down / 2:
        why = f"{count.overflowed} of them had arrived, and found the socket's buffer full"
        yield Finding("loss", value, "note", why, "raise net.core.rmem_max, or leave the worker more of a processor")
    else:
        why = f"they are sent again, which takes time; {window} were under way at once"
        remedy = f"use a smaller Switch(window=...), such as {window // 2}, or give queues on the way more room"
        yield Finding("loss", value, "note", why, remedy)
    rate = count.answered / count.seconds
    each = f"{1e6 / rate:.1f} us per packet, there and back"
    yield Finding("through the switch", f"{rate:,.0f} packets/s of this machine alone: {each}")


def word_sending(rate: SendingRate) -> Finding:
    """Say how fast this machine is by itself."""
    ours, answers = 1e6 * rate.seconds / rate.packets, 1e6 * rate.answer_seconds / rate.packets
    value = f"{rate.per_second:,.0f} packets/s to nobody: {ours:.1f} us to make and send one, {answers:.1f} us for its "
    return Finding("this machine", f"{value}answer")


# -- this machine ----------------------------------------------------------------------------------------------------


def word_buffers(receive_bytes: int, send_bytes: int) -> Finding:
    """Say whether sockets get the buffers that they ask for."""
    value = f"{receive_bytes:,} bytes to receive, {send_bytes:,} to send, of {BUFFER_BYTES:,} asked for"
    short = {"rmem_max": receive_bytes, "wmem_max": send_bytes}
    lacking = [name for name, size in short.items() if size < _ENOUGH_BYTES]
    if not lacking:
        return Finding("socket buffers", value)
    settings = " ".join(f"net.core.{name}={BUFFER_BYTES}" for name in lacking)
    why = "the kernel allows no more; bursts that find a buffer full are lost"
    return Finding("socket buffers", value, "note", why, f"sysctl -w {settings}")


def check_interface(host: str) -> Iterator[Finding]:
    """Look at the interface that leads to the switch."""
    name = interface_towards(host)
    if not name:
        yield Finding(
            "interface", "not known", "note", f"no interface leads to {host}", "check the route: ip route get"
        )
        return
    yield word_offloads(offloads_of(name))


def word_offloads(offloads: Offloads) -> Finding:
    """Say what the interface does with packets."""

    def word(is_on: bool | None) -> str:
        return "not readable" if is_on is None else ("on" if is_on else "off")

    xdp = "not readable" if offloads.xdp is None else offloads.xdp
    return Finding(
        "interface",
        f"{offloads.interface}: UDP checksums by the device {word(offloads.sends_checksums)} (out), "
        f"{word(offloads.checks_checksums)} (in); GRO {word(offloads.gro)}; XDP {xdp}",
    )


# -- the switch's own view -------------------------------------------------------------------------------------------


def word_status(status: SwitchStatus) -> Iterator[Finding]:
    """Say what the switch has dropped, and for each job what it has refused and who is behind."""
    dropped = {why: count for why, count in status.dropped.items() if count}
    counts = ", ".join(f"{count:,} {why}" for why, count in dropped.items())
    yield Finding("dropped by the switch", counts or "nothing")
    for job in status.jobs:
        yield word_job(job)


def word_job(job: SwitchJobStatus) -> Finding:
    """Say who is behind in a job, and what was refused."""
    name, refused = f"job {job.job}", refusals(job.refused)
    last = max(job.members, key=lambda one: one.lag, default=None)
    value = f"{len(job.members)} of {job.workers} workers"
    if last is not None and last.lag:
        value += f"; rank {last.worker} is {last.lag} {'steps' if job.strategy.path == 'table' else 'chunks'} behind"
    value += f"; refused: {refused}" if refused else ""
    missing = [rank for rank in range(job.workers) if rank not in {one.worker for one in job.members}]
    silent = [one.worker for one in job.members if one.silent_s is None or one.silent_s > _LONG_SILENCE_S]
    if silent and len(silent) < len(job.members):
        who = ", ".join(map(str, silent))
        why = f"nothing has come from rank {who} for {_LONG_SILENCE_S:g} s or more, and the others send"
        remedy = f"look at it; `offbeat switch ctl --evict {job.job}:{silent[0]}` has the job go on without it"
        return Finding(name, value, "note", why, remedy)
    if missing:
        why = f"rank {', '.join(map(str, missing))} has not joined, or is gone"
        return Finding(name, value, "note", why, "start it if the job waits for it")
    return Finding(name, value)


def refusals(counts: Mapping[str, int]) -> str:
    """The refusals of a job in words.

    >>> refusals({"HELD_UP": 2})
    "2 (another worker still lacks the result in the chunk's slot)"
    """
    return ", ".join(f"{count:,} ({Reason[name].text})" for name, count in counts.items() if count)
