"""What control sees of `switch.p4`, read from its text; and that as P4Info, which the compiler would write.

The text is run through the C preprocessor's part of the work here: `EACH` of a macro, and numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import offbeat

PROGRAM = Path(offbeat.__file__).parent / "switch" / "p4" / "switch.p4"
_STANDARD = {"standard_metadata.egress_rid": 16}
_PREFIX = {"table": 2, "action": 1, "counter": 18, "direct_counter": 19, "register": 22}
_OPEN = re.compile(r'(?:@name\("(\w+)"\)\s+)?\b(?:control|struct|header)\s+(\w+)[^{;]*\{')


@dataclass(frozen=True)
class P4Table:
    """One table: its keys and their widths, the names of its actions, its entries, and the counter of each."""

    name: str
    keys: dict[str, int]
    actions: list[str]
    default: str
    size: int
    counter: str | None


@dataclass(frozen=True)
class P4Program:
    """All of the program that control may name, in the order of the text. Names begin with that of the control.

    Args:
        tables: by name.
        actions: the parameters of each, with their widths.
        counters, registers: how many; a register has a width, too.
    """

    tables: dict[str, P4Table]
    actions: dict[str, dict[str, int]]
    counters: dict[str, int]
    registers: dict[str, tuple[int, int]]


def read_program(path: Path = PROGRAM) -> P4Program:
    """Read the program."""
    text = expanded(path.read_text())
    widths = dict(_STANDARD)
    fields = {name: _fields(body) for name, body in _blocks(text)}
    for member, kind in re.findall(r"(\w+_t) (\w+);", dict(_blocks(text))["headers_t"]):
        widths |= {f"hdr.{kind}.{name}": width for name, width in fields[member].items()}
    widths |= {f"meta.{name}": width for name, width in fields["metadata_t"].items()}
    program = P4Program({}, {}, {}, {})
    for control in ("Ingress", "Egress"):
        body = dict(_blocks(text))[control]
        for name, parameters in re.findall(r"\baction (\w+)\(([^)]*)\)", body):
            program.actions[f"{control}.{name}"] = {
                one: int(width) for width, one in re.findall(r"bit<(\d+)> (\w+)", parameters)
            }
        for name, table in re.findall(r"\btable (\w+) \{(.*?)\n    \}", body, re.DOTALL):
            program.tables[f"{control}.{name}"] = _table(control, name, table, widths)
        for size, name in re.findall(r"\bcounter\((\d+), CounterType.packets\) (\w+);", body):
            program.counters[f"{control}.{name}"] = int(size)
        for width, size, name in re.findall(r"\bregister<bit<(\d+)>>\((\d+)\) (\w+);", body):
            program.registers[f"{control}.{name}"] = (int(width), int(size))
    return program


def expanded(text: str) -> str:
    """The text without comments and with its macros in place, as far as declarations need them."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL).replace("\\\n", " ")
    macros = {name: body.strip() for name, body in re.findall(r"#define (\w+)\(\w+\) (.*)", text)}
    numbers = dict(re.findall(r"#define (\w+) (\d+)\b", text))
    text = re.sub(r"#.*", "", text)

    def each(match: re.Match[str]) -> str:
        return " ".join(re.sub(r"##i\b", str(index), macros[match[1]]) for index in range(32))

    text = re.sub(r"\bEACH\((FIELD|SUM)\)", each, text)
    return re.sub(r"\b[A-Z]+\b", lambda match: numbers.get(match[0], match[0]), text)


def _blocks(text: str) -> list[tuple[str, str]]:
    """The names, as control knows them, and bodies of controls, structs and headers."""
    found = []
    for match in _OPEN.finditer(text):
        depth, at = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        found.append((match[1] or match[2], text[match.end() : at - 1]))
    return found


def _fields(body: str) -> dict[str, int]:
    return {name: int(width) for width, name in re.findall(r"bit<(\d+)> (\w+);", body)}


def _table(control: str, name: str, text: str, widths: dict[str, int]) -> P4Table:
    def in_full(action: str) -> str:
        return action if action == "NoAction" else f"{control}.{action}"

    keys = {one: widths[field] for field, one in re.findall(r'([\w.]+): exact @name\("(\w+)"\);', text)}
    actions = re.findall(r"\w+", text.split("actions = {")[1].split("}")[0])
    (size,) = re.findall(r"size = (\d+);", text)
    (default,) = re.findall(r"default_action = (\w+)\(\);", text)
    counter = re.findall(r"counters = (\w+);", text)
    return P4Table(
        f"{control}.{name}", keys, [in_full(one) for one in actions], in_full(default), int(size),
        f"{control}.{counter[0]}" if counter else None,
    )  # fmt: skip


def number_of(kind: str, name: str) -> int:
    """The number that the compiler gives a thing: a hash of its name (Jenkins, one at a time), and its kind."""
    hashed = 0
    for byte in name.encode():
        hashed = (hashed + byte) * 1025 % (1 << 32)
        hashed ^= hashed >> 6
    hashed = hashed * 9 % (1 << 32)
    hashed ^= hashed >> 11
    hashed = hashed * 32769 % (1 << 32)
    return _PREFIX[kind] << 24 | hashed & 0xFFFFFF


def p4info(program: P4Program) -> str:
    """The program's P4Info as text."""
    lines = ["# proto-file: p4/config/v1/p4info.proto", "# proto-message: p4.config.v1.P4Info", ""]
    lines += ["pkg_info {", '  arch: "v1model"', "}"]

    def add(section: str, kind: str, name: str, *more: str) -> None:
        preamble = [f"id: {number_of(kind, name)}", f'name: "{name}"', f'alias: "{name.rpartition(".")[2]}"']
        lines.extend([f"{section} {{", "  preamble {", *(f"    {one}" for one in preamble), "  }"])
        lines.extend([*(f"  {one}" for one in more), "}"])

    for table in program.tables.values():
        more = []
        for index, (key, width) in enumerate(table.keys.items(), 1):
            more += _message(
                "match_fields", f"id: {index}", f'name: "{key}"', f"bitwidth: {width}", "match_type: EXACT"
            )
        for action in table.actions:
            more += _message("action_refs", f"id: {number_of('action', action)}")
        more += _message("initial_default_action", f"action_id: {number_of('action', table.default)}")
        if table.counter:
            more.append(f"direct_resource_ids: {number_of('direct_counter', table.counter)}")
        add("tables", "table", table.name, *more, f"size: {table.size}")
    for action, parameters in {"NoAction": dict[str, int](), **program.actions}.items():
        more = []
        for index, (name, width) in enumerate(parameters.items(), 1):
            more += _message("params", f"id: {index}", f'name: "{name}"', f"bitwidth: {width}")
        add("actions", "action", action, *more)
    for name, size in program.counters.items():
        add("counters", "counter", name, *_message("spec", "unit: PACKETS"), f"size: {size}")
    for table in program.tables.values():
        if table.counter:
            where = f"direct_table_id: {number_of('table', table.name)}"
            add("direct_counters", "direct_counter", table.counter, *_message("spec", "unit: PACKETS"), where)
    for name, (width, size) in program.registers.items():
        bits = _message("bitstring", *_message("bit", f"bitwidth: {width}"))
        add("registers", "register", name, *_message("type_spec", *bits), f"size: {size}")
    return "\n".join([*lines, "type_info {", "}"]) + "\n"


def _message(name: str, *lines: str) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]
