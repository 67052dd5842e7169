"""Rules as requests of P4Runtime, for any switch that speaks it.

Tables, actions and their fields have numbers there, which `switch.p4info.txtpb` says. BMv2 is one such switch
(simple_switch_grpc). Who sends the requests opens the stream and loads the program; that is the same for all programs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import PlanError
from offbeat.switch.p4.rules import MulticastGroup, TableEntry, TableRule, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

P4INFO = Path(__file__).with_name("switch.p4info.txtpb")
_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def read_p4info(path: Path = P4INFO) -> Any:
    """Read what control sees of the program: a message `P4Info`.

    Raises:
        PlanError: if the package p4runtime is missing.
    """
    _load()
    from google.protobuf import text_format
    from p4.config.v1 import p4info_pb2

    return text_format.Parse(path.read_text(), p4info_pb2.P4Info())


def write_request(rules: Iterable[TableRule], *, device: int = 0, election: int = 1, p4info: Any = None) -> Any:
    """The message `WriteRequest` that writes rules, in their order.

    Args:
        device: the switch's number.
        election: the lower half of the sender's number among those that may write.
        p4info: of the program as it was compiled; the one beside it if left out.

    Raises:
        PlanError: if the package p4runtime is missing, or a rule has something left to be filled in.
    """
    _load()
    from p4.v1 import p4runtime_pb2

    writer = _EntryWriter(p4info or read_p4info())
    request = p4runtime_pb2.WriteRequest(device_id=device)
    request.election_id.low = election
    for rule in rules:
        update = request.updates.add(type=p4runtime_pb2.Update.Type.Value(rule.verb.upper()))
        if isinstance(rule.entry, MulticastGroup):
            group = update.entity.packet_replication_engine_entry.multicast_group_entry
            group.multicast_group_id = rule.entry.number
            if rule.verb != "delete":
                for worker, port in rule.entry.ports.items():
                    group.replicas.add(egress_port=_number("port", port), instance=worker)
        else:
            writer.write(update.entity.table_entry, rule.entry, says_which_alone=rule.verb == "delete")
    return request


class _EntryWriter:
    """Writes entries of tables by the numbers that a program's P4Info has for their names."""

    def __init__(self, p4info: Any) -> None:
        self._tables = {one.preamble.name: one for one in p4info.tables}
        self._actions = {one.preamble.name: one for one in p4info.actions}

    def write(self, message: Any, entry: TableEntry, *, says_which_alone: bool) -> None:
        table = self._tables[entry.table]
        message.table_id = table.preamble.id
        for field in table.match_fields:
            match = message.match.add(field_id=field.id)
            match.exact.value = _bytes(entry.keys, field.name, field.bitwidth)
        if says_which_alone:
            return
        action = self._actions[entry.action]
        message.action.action.action_id = action.preamble.id
        for param in action.params:
            value = _bytes(entry.parameters, param.name, param.bitwidth)
            message.action.action.params.add(param_id=param.id, value=value)


def _number(name: str, value: Value) -> int:
    if isinstance(value, str):
        raise PlanError(f"Cannot write a rule whose {name} is not known: fill in {value}.")
    return value


def _bytes(values: Mapping[str, Value], name: str, width: int) -> bytes:
    """A number as P4Runtime wants it: most significant byte first, as few as it needs."""
    number = _number(name, values[name])
    assert 0 <= number < 1 << width, f"{name} = {number} does not fit {width} bits"
    return number.to_bytes(max(1, (number.bit_length() + 7) // 8), "big")


def _load() -> None:
    """Load the package's messages. They are written in an old way, which protobuf reads in its slow variant alone."""
    if "google.protobuf" not in sys.modules:
        os.environ.setdefault(_PROTOBUF, "python")
    try:
        import p4.v1.p4runtime_pb2  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "Cannot write P4Runtime requests: the package p4runtime is not installed. Install it with pip install "
            "'offbeat[p4]', or use simple_switch_CLI's commands."
        ) from error
    except TypeError as error:
        raise PlanError(
            "Cannot write P4Runtime requests: protobuf was loaded in a variant that p4runtime does not fit. Start with "
            f"{_PROTOBUF}=python in the environment."
        ) from error
