"""What stores, directories and clients read from the network: any bytes are a message or a refusal, in any order."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.objects.directory import Directory
from offbeat.protocol import object_calls, object_lanes, objects
from offbeat.protocol.objects import ObjectMeta, ObjectName, UsedSource
from offbeat.testing.object_stores import LINKS, descendants

if TYPE_CHECKING:
    from collections.abc import Callable

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "from_store_of": objects.from_store_of,
    "from_directory_of": objects.from_directory_of,
    "from_reader_of": object_lanes.from_reader_of,
    "from_feeder_of": object_lanes.from_feeder_of,
    "from_client_of": object_calls.from_client_of,
    "to_client_of": object_calls.to_client_of,
}
STRUCTS = [
    kind
    for module in (objects, object_lanes, object_calls)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
]
TYPES = sorted({kind.__name__ for kind in STRUCTS if kind.__struct_config__.tag})
FIELDS = sorted({name for kind in STRUCTS for name in kind.__struct_fields__})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 63) | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NEARLY = st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"type": kind, **fields}),
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
)


@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.one_of(st.binary(max_size=100), NEARLY))
@settings(max_examples=100)
def test_any_bytes_are_a_message_or_a_refusal(decoder: str, data: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(DECODERS[decoder](data), msgspec.Struct)


W = ["w", 0]
META = {"dtype": "float32", "shape": [3], "size_bytes": 12}


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "PutObject", "name": W, "meta": META | {"size_bytes": 13}, "generations": [1]},
        {"type": "PutObject", "name": W, "meta": META | {"dtype": "load"}, "generations": [1]},
        {"type": "PutObject", "name": W, "meta": META | {"shape": [1 << 39] * 16}, "generations": [1]},
        {"type": "PutObject", "name": W, "meta": META, "generations": [1], "inline": b"12345"},
        {"type": "PutObject", "name": ["", 0], "meta": META, "generations": [1]},
        {"type": "PutObject", "name": W, "meta": META, "generations": [1, 2]},
        {"type": "PutObject", "name": W, "meta": META, "generations": [1], "whole": True},
        {"type": "ReduceObjects", "name": W, "sources": [], "op": "sum", "count": 1, "least": 1},
        {"type": "ReduceObjects", "name": W, "sources": [W], "op": "xor", "count": 1, "least": 1},
        {"type": "ReduceObjects", "name": W, "sources": [W], "op": "sum", "count": 1, "least": 1, "most_stripes": 0},
        {"type": "ReduceObjects", "name": W, "sources": [W], "op": "sum", "count": 1, "least": 1, "wire": "float64"},
        {"type": "DeleteObject", "name": W, "after": 0},
        {"type": "StripeArrived", "name": W, "generation": -1, "stripe": 0},
        {"type": "ReaderRate", "name": W, "generation": 1, "stripe": 0, "reader": "x", "bytes_per_s": float("nan")},
    ],
    ids=str,
)
def test_what_cannot_be_is_not_read(wrong: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="Cannot understand this store of objects"):
        objects.from_store_of(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "ForgetObject", "name": W, "reason": "it is gone", "generations": [-1]},
        {"type": "ForgetObject", "name": W, "reason": "it is gone", "generations": [1] * 257},
        {"type": "ForgetObject", "name": W, "reason": "it is gone", "generations": "1"},
        {"type": "ObjectDeleted", "name": W, "reason": "it is gone"},
        {"type": "ObjectInline", "name": W, "meta": META, "generations": [1, 2], "data": bytes(12)},
        {"type": "ObjectInline", "name": W, "meta": META, "generations": [1], "data": bytes(13)},
    ],
    ids=str,
)
def test_what_no_directory_says_is_not_read(wrong: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="Cannot understand this directory of objects"):
        objects.from_directory_of(msgspec.msgpack.encode(wrong))


def some(kind: Any, dice: random.Random) -> Any:
    """A message of this kind, of things that a directory may know."""
    names = [ObjectName(name) for name in "abcd"]
    meta = dice.choice(
        [ObjectMeta("float32", (3,), 12), ObjectMeta("float32", (1 << 17,), 1 << 19, dice.choice((1, 3)))]
    )
    whole = dice.random() < 0.5
    values: dict[str, Any] = {
        "name": dice.choice(names),
        "meta": meta,
        "generations": tuple(dice.randrange(12) for _ in range(meta.stripes)),
        "whole": whole,
        "digest": dice.choice(("1", "2")) if whole else "",
        "inline": bytes(12) if meta.size_bytes == 12 else None,
        "used": tuple(UsedSource(name) for name in dice.sample(names, dice.randrange(3))),
        "splices": dice.random() < 0.3,
        "start": dice.randrange(1 << 18),
        "have_bytes": dice.randrange(100),
        "generation": dice.randrange(12),
        "stripe": dice.randrange(4),
        "bytes_per_s": dice.choice((1e3, 1e6, 1e9)),
        "feeder": dice.choice("xyz"),
        "reason": "there is no room",
        "reader": dice.choice("xyz"),
        "sources": tuple(dice.sample(names, dice.randrange(1, 5))),
        "op": "sum",
        "count": dice.randrange(1, 5),
        "least": dice.randrange(1, 5),
        "patience_s": None,
        "in_order": dice.random() < 0.3,
        "striped": dice.random() < 0.3,
        "most_stripes": dice.randrange(1, 5),
        "slot": dice.randrange(-1, 4),
        "attempt": dice.randrange(12),
        "child": dice.randrange(3),
        "store": dice.choice("xyz"),
        "source": dice.choice((*names, None)),
        "children": dice.randrange(4),
        "positions": 4,
        "degree": dice.randrange(1, 4),
        "taken": dice.choice((None, None, 2)),
        "divisor": 1,
        "wire": dice.choice(("", "", "bfloat16", "float16")),
        "child_slot": dice.randrange(-1, 4),
        "child_attempt": dice.randrange(12),
        "arrived": dice.random() < 0.5,
        "again": dice.random() < 0.3,
        "after": dice.randrange(-1, 3),
        "waits": dice.random() < 0.5,
        "when_read": dice.random() < 0.5,
    }
    if kind is objects.DeleteObject:
        values["after"] = dice.randrange(1, 4)
    if kind is objects.ObjectWhole:
        values["digest"] = "1"
    if kind is objects.StageRuns:
        values["stripe"] = dice.randrange(meta.stripes)
        values["order"] = order = make(objects.RunStage, values)
        values["name"] = order.name
    if kind is objects.StageFed:
        values["feed"] = make(objects.FeedStage, values)
    return make(kind, values)


def make(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{name: values[name] for name in kind.__struct_fields__})


@pytest.mark.parametrize("seed", range(300))
def test_a_directory_outlives_stores_that_say_anything(seed: int) -> None:
    dice = random.Random(seed)
    directory = Directory(LINKS[dice.choice(sorted(LINKS))], first_attempt=100)
    kinds = get_args(objects.FromStore)
    directory.rebuild([(dice.choice("xyz"), some(dice.choice(kinds), dice)) for _ in range(seed % 40)])
    for _ in range(200):
        what = dice.random()
        if what < 0.05:
            directory.lost(dice.choice("xyz"))
        elif what < 0.1:
            directory.expire(ObjectName(dice.choice("abcd")))
        else:
            directory.handle(dice.choice("xyz"), some(dice.choice(kinds), dice))
        for entry in directory.entries():
            for chains in entry.chains:
                assert not any(store in descendants(store, chains.feeders) for store in chains.feeders)
