"""The P4 program, what control sees of it, and the rules that it is given. It is compiled and run elsewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import PlanError
from offbeat.protocol.switch_control import JoinSwitchJob, Strategy, SwitchJobJoined
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.p4 import p4runtime, rules
from offbeat.switch.p4.p4runtime import P4INFO
from offbeat.switch.p4.rules import MulticastGroup, P4Job, create_job, place_jobs
from offbeat.switch.p4.shown_rules import commands_for
from offbeat.switch.packet import HEADER_BYTES, MAGIC, VERSION, ZERO_EXPONENT, Flag, Packet, PacketKind, Reason, encode
from tests.switch.local_switch import served_switch
from tests.switch.p4_golden import DATA, GOLDEN, SHAPE, life, status, text_of
from tests.switch.p4_program import PROGRAM, expanded, number_of, read_program

if TYPE_CHECKING:
    from pathlib import Path

# What p4include/v1model.p4 and core.p4 declare.
V1MODEL = set(
    re.findall(
        r"\w+",
        """
        standard_metadata_t CounterType MeterType counter direct_counter meter direct_meter register action_profile
        random digest mark_to_drop hash action_selector HashAlgorithm Checksum16 verify_checksum update_checksum
        verify_checksum_with_payload update_checksum_with_payload clone resubmit recirculate CloneType
        clone_preserving_field_list resubmit_preserving_field_list recirculate_preserving_field_list truncate assert
        assume log_msg Parser VerifyChecksum Ingress Egress ComputeChecksum Deparser V1Switch PORTNUM packet_in
        packet_out error match_kind NoAction verify
        """,
    )
)
needs_p4runtime = pytest.mark.skipif(
    importlib.util.find_spec("p4") is None, reason="needs the package p4runtime: pip install 'offbeat[p4]'"
)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_what_is_kept_is_what_comes_out(path: Path) -> None:
    if path.name == "requests.txtpb" and importlib.util.find_spec("p4") is None:
        pytest.skip("needs the package p4runtime: pip install 'offbeat[p4]'")
    assert path.read_text() == GOLDEN[path](), "run `python -m tests.switch.p4_golden`"


def test_numbers_are_those_that_the_compiler_gives() -> None:
    """They are from the compiler's own samples."""
    assert number_of("action", "NoAction") == 21257015
    assert number_of("table", "ingress.ecmp_group") == 38446407
    assert number_of("counter", "ingress.stats") == 304134966
    assert number_of("direct_counter", "ingress.c") == 330698586
    assert number_of("register", "ingress.flowlet_id") == 384519412


def test_rules_name_what_the_program_has() -> None:
    program = read_program()
    entries = [rule.entry for _, some in life() for rule in some if not isinstance(rule.entry, MulticastGroup)]
    assert {entry.table for entry in entries} == set(program.tables) - {"Ingress.forward"}
    for entry in entries:
        table = program.tables[entry.table]
        assert list(entry.keys) == list(table.keys)
        assert entry.action in table.actions
        widths = program.actions[entry.action]
        assert list(entry.parameters) == list(widths)
        for name, width in [*table.keys.items(), *widths.items()]:
            value = (entry.keys | entry.parameters)[name]  # type: ignore[operator]
            assert isinstance(value, int)
            assert 0 <= value < 1 << width, (entry, name)


def test_sizes_are_those_of_the_program() -> None:
    program = read_program()
    assert program.tables["Ingress.job"].size == rules.MOST_JOBS
    assert program.tables["Ingress.member"].size == rules.MOST_JOBS * rules.MOST_WORKERS
    assert program.registers["Ingress.finished"] == (32, rules.MOST_JOBS * rules.MOST_WORKERS)
    assert program.registers["Ingress.added"] == (32, rules.MOST_CELLS * rules.MOST_WORKERS)
    assert [program.registers[f"Ingress.sum{i}"] for i in range(rules.VALUES)] == [(32, rules.MOST_CELLS)] * 32


def test_the_program_speaks_our_wire_format() -> None:
    text = expanded(PROGRAM.read_text())
    numbers = {name: int(value, 0) for name, value in re.findall(r"const bit<\d+> (\w+) = (\w+);", text)}
    assert numbers["MAGIC"] == int.from_bytes(MAGIC.to_bytes(2, "little"), "big")
    assert numbers["VERSION"] == VERSION
    assert numbers["BARE"] == 8 + HEADER_BYTES
    assert numbers["WHOLE"] == numbers["BARE"] + 4 * rules.VALUES
    assert f"NO_EXPONENT 8w{ZERO_EXPONENT % 256:#x}" in PROGRAM.read_text()
    for one in [*PacketKind, *Reason, *Flag]:
        assert one.name is not None
        if one not in (PacketKind.LEAVE, PacketKind.LEAVE_OK):
            assert numbers[one.name] == one
    header = re.findall(r"header message_t \{(.*?)\}", text, re.DOTALL)[0]
    assert sum(map(int, re.findall(r"bit<(\d+)>", header))) == 8 * HEADER_BYTES


def test_no_control_has_a_name_of_v1model() -> None:
    """The compiler refuses a second declaration of a name of the architecture's."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", PROGRAM.read_text(), flags=re.DOTALL)
    declared = re.findall(r"\b(?:control|parser|struct|header|extern|package)\s+(\w+)\s*[({]", text)
    assert {"Parse", "Verify", "Compute", "Deparse", "headers_t"} <= set(declared)
    assert not set(declared) & V1MODEL
    assert not set(re.findall(r"\bconst\s+bit<\d+>\s+(\w+)", text)) & V1MODEL


def test_the_program_sums_the_words_of_a_packet_in_their_order() -> None:
    """Its macros are carried out here: what it takes, word by word, is the checksum of the same packet."""
    text = PROGRAM.read_text()
    numbers = dict(re.findall(r"const bit<32> (SEED|FACTOR) = (\w+);", text))
    header = re.findall(r"header message_t \{(.*?)\}", text, re.DOTALL)[0]
    widths = {name: int(width) for width, name in re.findall(r"bit<(\d+)> (\w+);", header)}
    values = tuple(range(-16, 16))
    datagram = encode(Packet(PacketKind.RESULT, 0x1234, 3, 0xC0FFEE, 7, 8, 9, 10, 11, -3, 12, 13, Flag.PRIME, values))
    fields, at = {}, 0
    whole = int.from_bytes(datagram[:HEADER_BYTES], "big")
    for name, width in widths.items():
        at += width
        fields[name] = whole >> (8 * HEADER_BYTES - at) & ((1 << width) - 1)
    taken = re.findall(r"^ +TAKE\((hdr.*)\)$", text, re.MULTILINE)
    words = []
    for one in taken:
        word, bits = 0, 0
        for name in re.findall(r"hdr\.message\.(\w+)", one):
            word, bits = word << widths[name] | fields[name], bits + widths[name]
        assert bits == 32, one
        words.append(int.from_bytes(word.to_bytes(4, "big"), "little"))
    assert "#define TAKE(x) word = x; word = SWAP32(word); sum = (sum + (word ^ (word >> 16))) * FACTOR;" in text
    found = int(numbers["SEED"], 0)
    for word in [*words, *(value % (1 << 32) for value in values)]:
        found = (found + (word ^ word >> 16)) * int(numbers["FACTOR"], 0) % (1 << 32)
    assert found == int.from_bytes(datagram[32:36], "little")


def test_every_table_says_its_first_default_action() -> None:
    text = P4INFO.read_text()
    program = read_program()
    for table in program.tables.values():
        (entry,) = [one for one in text.split("\ntables {")[1:] if f'name: "{table.name}"' in one]
        assert f"initial_default_action {{\n    action_id: {number_of('action', table.default)}\n" in entry


@pytest.mark.skipif(shutil.which("cpp") is None, reason="needs the C preprocessor, cpp")
def test_the_preprocessor_takes_the_program() -> None:
    """It is called as the compiler calls it; headers of P4 are left out, which are not here."""
    text = re.sub("#include.*", "", PROGRAM.read_text())
    command = ["cpp", "-undef", "-nostdinc", "-x", "assembler-with-cpp", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert not done.stderr
    code = re.sub(r"(?m)^#.*", "", re.sub(r"/\*.*?\*/|//[^\n]*", "", done.stdout, flags=re.DOTALL))
    assert "##" not in code
    assert code.count("sum31.write") == 1
    for left, right in ("()", "{}", "[]"):
        assert code.count(left) == code.count(right)


@pytest.mark.parametrize(
    ("shape", "says"),
    [(JobShape(1, 2), "256 values"), (JobShape(1, 40, 32), "40 workers"), (JobShape(1, 2, 32, 8192), "4096 cells")],
)
def test_a_job_that_does_not_fit_is_refused(shape: JobShape, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        place_jobs([shape])


def test_jobs_have_cells_of_their_own() -> None:
    assert place_jobs([SHAPE, SHAPE]) == [(0, 0, 64), (1, 164, 228)]
    with pytest.raises(PlanError, match="8 jobs"):
        place_jobs([JobShape(1, 2, 32, 4)] * 9)


def test_a_window_beyond_the_ring_is_refused() -> None:
    with pytest.raises(PlanError, match="15 steps ahead"):
        create_job(P4Job(SHAPE, Strategy("table", window=15)))


def test_shown_rules_keep_to_one_line_what_workers_chose() -> None:
    text = commands_for(status())
    assert "# job 'wide\\nreset_state' (number 8) is left out. Cannot sum packets of 256 values" in text
    assert {line.split()[0] for line in text.splitlines()} == {
        "#", "table_add", "mc_mgrp_create", "mc_node_create", "mc_node_associate",
    }  # fmt: skip


def test_the_rules_of_a_live_switch_show_no_cookie() -> None:
    with served_switch() as address:
        control = ControlClient(address, rank=1)
        joined = control.ask(
            lambda number: JoinSwitchJob(
                request=number, job="a", worker=1, workers=2, values=32, slots=64, ring=8, rows=5
            )
        )
        assert isinstance(joined, SwitchJobJoined)
        text = commands_for(control.status())
        control.close()
    assert f"Ingress.set_job {joined.number} => 0 2 2 0 64 64 5 8 0 0 1" in text
    assert f"=> 2 COOKIE_{joined.number}_1 PORT_{joined.number}_1 IP_{joined.number}_1 0 0" in text
    assert str(joined.cookie) not in text
    assert f"{joined.cookie:x}" not in text


@needs_p4runtime
def test_requests_hold_the_rules() -> None:
    info = p4runtime.read_p4info()
    (request,) = [
        p4runtime.write_request(some, device=3, election=9) for what, some in life() if what == "set_strategy"
    ]
    assert (request.device_id, request.election_id.low) == (3, 9)
    (update,) = request.updates
    (policy,) = [one for one in info.tables if one.preamble.alias == "policy"]
    assert update.entity.table_entry.table_id == policy.preamble.id
    values = [int.from_bytes(one.value, "big") for one in update.entity.table_entry.action.action.params]
    assert values == [2, 8, 1, 0]  # the window, the slack of the strategy before, the epoch, no quorum
    assert "MODIFY" in text_of(request)


@needs_p4runtime
def test_what_is_not_known_is_not_written() -> None:
    rule = rules.serve_at("SWITCH_IP", 7100)
    with pytest.raises(PlanError, match="fill in SWITCH_IP"):
        p4runtime.write_request([rule])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "p4.v1.p4runtime_pb2", None)
    with pytest.raises(PlanError, match=r"offbeat\[p4\]"):
        p4runtime.write_request([])


def test_golden_files_are_all_there() -> None:
    assert {path.name for path in DATA.iterdir()} == {path.name for path in GOLDEN if path.parent == DATA}
