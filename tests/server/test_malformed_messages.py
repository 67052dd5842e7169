"""What a parameter server reads from the network: any bytes are a message or a refusal, and nobody else is harmed."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.protocol import messages
from offbeat.protocol.status import StatusReply
from tests.server.garbage_peer import DETAILS, torment

if TYPE_CHECKING:
    from collections.abc import Callable

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "from_peer": messages.from_peer,
    "details_of": messages.details_of,
    "from_coordinator": messages.from_coordinator,
    "to_worker": messages.to_worker,
    "statuses_of": messages.statuses_of,
    "status_reply_of": lambda data: messages.status_reply_of(data, memoryview(b"\x90")),
    "status_reply_of body": lambda data: messages.status_reply_of(messages.pack(StatusReply(1)), data),
}
TYPES = [
    kind.__name__
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 63) | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for kind in vars(messages).values() for name in getattr(kind, "__struct_fields__", ())})
NEARLY = st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"type": kind, **fields}),
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
)
# A list of as many things as can be written down in so few bytes, each of which is a Python object when it is read.
PIECES = [[0, 0, 1]] * 20_000
LONG = {
    "pieces": msgspec.msgpack.encode({**msgspec.to_builtins(DETAILS), "blocks": [[0, "float32", PIECES]]}),
    "blocks": msgspec.msgpack.encode({**msgspec.to_builtins(DETAILS), "blocks": [[0, "float32", PIECES[:1]]] * 9000}),
    "names": msgspec.msgpack.encode({**msgspec.to_builtins(DETAILS), "names": [""] * 50_000}),
    "deep": b"\x91" * 60_000,
    "announced": b"\xdd\xff\xff\xff\xff",
    "announced fields": b"\xdf\xff\xff\xff\xff",
    "announced text": b"\xdb\xff\xff\xff\xff",
}
MOST_PER_BYTE = 64  # of memory, for each byte that came


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.one_of(st.binary(max_size=100), NEARLY))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_refusal(decoder: str, data: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(DECODERS[decoder](data), (msgspec.Struct, tuple))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("long", LONG)
def test_what_is_read_takes_no_more_memory_than_its_length_allows(decoder: str, long: str) -> None:
    data = LONG[long]
    tracemalloc.start()
    try:
        with contextlib.suppress(PeerError):
            DECODERS[decoder](data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_PER_BYTE * len(data) + 20_000


@pytest.mark.slow
@given(st.binary(max_size=300))
# It comes first, with a model of no blocks, and goes on talking.
@example(b"\xf6\x01\x1a\x01\xb6\xe3\xf6p|F\xb5\x80\x92\xec\xc6l{\xd1\xb1C\xa1")
@settings(max_examples=400)
def test_a_worker_that_speaks_garbage_harms_nobody_else(data: bytes) -> None:
    torment(data)
