"""A fabric that cannot be is refused when it is described, with the value and its place in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("addresses", None, "Cannot reach shards at None"),
        ("addresses", "host:7070", "Cannot reach shards at 'host:7070': write a tuple"),
        ("addresses", ["host:7070"], r"Cannot reach shards at \['host:7070'\]"),
        ("addresses", (7070,), "Cannot reach 7070: write host:port"),
        ("addresses", ("host",), "Cannot reach 'host'"),
        ("addresses", ("host:²",), "Cannot reach 'host:²'"),
        ("addresses", ("host:65536",), "Cannot reach 'host:65536'"),
        ("addresses", ("host:" + "9" * 5000,), "Cannot reach 'host:999"),
        ("addresses", ("host:1", "host:1"), "Cannot use one shard twice"),
        *(
            ("block_bytes", value, f"blocks of {value!r} bytes")
            for value in (None, True, "8192", 8192.0, -1, 4095, NAN)
        ),
        *(("patience_s", value, f"Cannot wait {value!r} s") for value in (None, True, "60", -1, NAN, float("inf"))),
        *(("collocated", value, f"collocated={value!r}: choose True") for value in (None, 1, "no", 0.0)),
    ],
)
def test_a_parameter_server_that_cannot_be(name: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=rf"{said}.* - at `plan\.fabric\.{name}`\.$"):
        ParameterServer(**{name: value})


def test_one_that_can() -> None:
    spec = ParameterServer(addresses=("[::1]:7070", "host:1"), block_bytes=4096, patience_s=0)
    assert eval(repr(spec)) == spec
