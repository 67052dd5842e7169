"""What changed between two versions of tensors: bit by bit, in few bytes, and nothing else can be decoded."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ObjectError
from offbeat.objects import delta
from offbeat.objects.packed_tensors import TensorLayout, digest_of_parts
from offbeat.objects.tensor_writes import TensorWrites
from offbeat.protocol import object_versions
from offbeat.protocol.object_versions import ChangedTensor, DeltaHeader, pack_part
from offbeat.protocol.objects import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = sorted(ITEM_BYTES)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (70_001,)]


def of_bits(dtype: str, shape: tuple[int, ...], dice: random.Random) -> Tensor:
    """A tensor of any bits: NaNs with payloads, -0.0, infinities."""
    layout = TensorLayout.of(torch.empty(shape, dtype=getattr(torch, dtype)))
    data = bytearray(dice.randbytes(layout.meta.size_bytes))
    if dtype == "bool":
        data = bytearray(byte & 1 for byte in data)
    return next(iter(layout.tensors_in(memoryview(data)).values()))


def changed(tensor: Tensor, count: int, dice: random.Random) -> Tensor:
    """The same with so many elements of other bits."""
    made = tensor.clone()
    other = of_bits(str(tensor.dtype)[6:], tuple(tensor.shape), dice).flatten()
    for at in dice.sample(range(made.numel()), min(count, made.numel())):
        made.view(-1)[at] = other[at]
    return made


def packed(tensors: dict[str, Tensor]) -> tuple[TensorLayout, memoryview]:
    layout = TensorLayout.of(tensors)
    return layout, memoryview(bytearray(b"".join(layout.parts(tensors))))


def between(before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[TensorLayout, bytearray | None]:
    layout, old = packed(before)
    parts = delta.encode(layout, old, packed(after)[1])
    return layout, None if parts is None else bytearray(b"".join(parts))


def bits(tensors: dict[str, Tensor]) -> str:
    return digest_of_parts(TensorLayout.of(tensors).parts(tensors))


def apply(layout: TensorLayout, made: bytearray, tensors: dict[str, Tensor]) -> None:
    writes = TensorWrites(tensors)
    writes.change(delta.decode(layout, memoryview(made)))
    writes.write_()


@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 400)), max_size=4),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_what_is_decoded_has_the_bits_that_were_encoded(
    kinds: list[tuple[str, tuple[int, ...], int]], seed: int
) -> None:
    dice = random.Random(seed)
    before = {f"t{number}": of_bits(dtype, shape, dice) for number, (dtype, shape, _) in enumerate(kinds)}
    before["large"] = of_bits("uint8", (70_001,), dice)  # so that a delta pays
    after = {
        name: changed(tensor, count, dice)
        for (name, tensor), count in zip(before.items(), [*(count for *_, count in kinds), 3], strict=True)
    }
    layout, made = between(before, after)
    if made is None:  # most of all bytes have changed
        assert sum(len(part) for part in layout.parts(after)) < 300_000 * 16
        return
    here = {name: tensor.clone() for name, tensor in before.items()}
    apply(layout, made, here)
    assert bits(here) == bits(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (float("nan"), float("nan")), (1.0, float("nan"))],
    ids=["sign of zero", "same NaN", "NaN"],
)
def test_bits_are_compared_not_numbers(before: float, after: float) -> None:
    old, new = torch.full((1000,), before), torch.full((1000,), before)
    new[7] = after
    layout, made = between({"w": old}, {"w": new})
    assert made is not None
    words = [change.positions for change in delta.decode(layout, memoryview(made))]
    same = bits({"w": old}) == bits({"w": new})
    assert (words == []) if same else (words[0] is not None and words[0].tolist() == [7])


def test_nothing_changed_costs_a_header() -> None:
    tensors = {f"layer{number}": torch.randn(100_000) for number in range(100)}
    _, made = between(tensors, tensors)
    assert made is not None
    assert len(made) <= 32


@pytest.mark.parametrize(("fraction", "least"), [(0.02, 32.5), (0.002, 240)])
def test_the_bytes_of_a_delta_of_bfloat16(fraction: float, least: float) -> None:
    torch.manual_seed(0)
    numel = 4 << 20
    before = torch.randn(numel).bfloat16()
    after = before.clone()
    at = torch.randperm(numel)[: int(fraction * numel)]
    after.view(torch.int16)[at] += 1
    layout, made = between({"w": before}, {"w": after})
    assert made is not None
    assert layout.meta.size_bytes / len(made) > least


def test_one_change_in_a_large_tensor() -> None:
    before, after = torch.zeros(10 << 20, dtype=torch.int8), torch.zeros(10 << 20, dtype=torch.int8)
    after[-1] = 1
    layout, made = between({"w": before}, {"w": after})
    assert made is not None
    assert len(made) < 400
    apply(layout, made, {"w": before})
    assert torch.equal(before, after)


def test_a_tensor_of_which_all_changed_is_sent_whole_beside_others() -> None:
    before = {"a": torch.zeros(1000), "b": torch.zeros(100_000)}
    after = {"a": torch.ones(1000), "b": torch.zeros(100_000)}
    layout, made = between(before, after)
    assert made is not None
    assert [change.positions for change in delta.decode(layout, memoryview(made))] == [None]
    assert len(made) < 4100
    plain = TensorLayout.of(before["a"])
    wholes = [memoryview(bytearray(b"".join(plain.parts(one["a"])))) for one in (before, after)]
    assert delta.encode(plain, *wholes) is None, "no smaller than the whole"


def test_tensors_that_are_not_contiguous() -> None:
    before = {"w": torch.randn(64, 32).t(), "v": torch.randn(100, 2)[:, 1], "c": torch.randn(9, dtype=torch.cfloat)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w"][3, 5], after["v"][7] = 9.0, -9.0
    after["c"] *= 1j
    layout, made = between(before, after)
    assert made is not None
    apply(layout, made, before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_elements_that_share_memory_are_not_written() -> None:
    with pytest.raises(ObjectError, match="Cannot write into 'w': some of its elements are the same memory"):
        TensorWrites({"w": torch.zeros(1).expand(5)})


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ObjectError, match="has to be a dense tensor"):
        TensorLayout.of({"w": torch.eye(3).to_sparse()})
    with pytest.raises(ObjectError, match="its dtype is uint16"):
        TensorLayout.of({"w": torch.zeros(3, dtype=torch.uint16)})


LAYOUT, BASE = packed({"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.zeros(8, dtype=torch.bool)})


def made_of(*tensors: tuple[int, int, int, int], body: bytes = b"") -> memoryview:
    """A delta whose header says this, whether or not it can be."""
    header = pack_part(DeltaHeader(tuple(ChangedTensor(*one) for one in tensors)))  # type: ignore[arg-type]
    head = b"offbeat delta\0\0\x01" + len(header).to_bytes(4, "little") + header
    return memoryview(bytearray(head.ljust(-(-len(head) // 8) * 8, b"\0") + body))


PADDED = bytes(5)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (memoryview(b""), "does not begin with"),
        (memoryview(b"offbeat delta\0\0\x01\xff\xff\xff\x7f"), "its header would have"),
        (made_of((2, 1, 1, 1), body=bytes(16)), "it changes tensor 2 of 2"),
        (made_of((0, 1, 1, 1001), body=bytes(4096)), "it changes 1,001 of the 1,000 words of 'a'"),
        (made_of((0, 1, 1001, 1), body=bytes(4096)), "by 1,001 gaps"),
        (made_of((0, 0, 0, 999), body=bytes(4096)), "it changes 999 of the 1,000 words of 'a' by 0 gaps of 0 bytes"),
        (made_of((0, 1, 1, 1)), "its header describes"),
        (made_of((0, 1, 1, 1), body=bytes(24)), "and its header describes"),
        (made_of((0, 1, 2, 1), body=bytes(16)), "its 2 gaps are not those of 1 words of 'a'"),
        (made_of((0, 1, 1, 0), body=bytes(8)), "are not those of 0 words"),
        (made_of((0, 1, 2, 1), body=b"\x00\xff" + bytes(14)), "are not those of"),
        (made_of((0, 1, 5, 1), body=b"\xff\xff\xff\xfe\x00" + bytes(11)), "are not those of"),
        (made_of((0, 1, 4, 1), body=b"\xff\xff\xff\xeb" + bytes(12)), "it changes word 1,000 of 'a', which has 1,000"),
        (made_of((1, 1, 1, 1), body=bytes(8) + b"\x02" + bytes(7)), "'b' is bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_delta_is_refused(wrong: memoryview, says: str) -> None:
    with pytest.raises(ObjectError, match=says):
        delta.decode(LAYOUT, wrong)


def test_tensors_that_are_not_in_their_order() -> None:
    twice = msgpack_of([[0, 1, 1, 1], [0, 1, 1, 1]])
    with pytest.raises(ObjectError, match="tensors that changed are not in their order"):
        object_versions.delta_of(twice)


def msgpack_of(changed_tensors: list[list[int]]) -> bytes:
    import msgspec

    return msgspec.msgpack.encode([changed_tensors])


def try_anything(data: bytes) -> None:
    """What the fuzzer calls, too: any bytes are something that fits, or an `ObjectError`."""
    memory = memoryview(bytearray(data))
    with contextlib.suppress(ObjectError):
        for change in delta.decode(LAYOUT, memory):
            most = 1000 if change.number == 0 else 8
            assert len(change.words) <= most
            if change.positions is not None:
                assert len(change.positions) == len(change.words)
                assert 0 <= change.positions[0] <= change.positions[-1] < most
                assert (change.positions[1:] > change.positions[:-1]).all()
    with contextlib.suppress(ObjectError):
        meta = TensorLayout.of(torch.empty(len(data), dtype=torch.uint8)).meta
        layout = TensorLayout.read(meta, memory)
        assert sum(tensor.numel() * tensor.element_size() for tensor in layout.tensors_in(memory).values()) <= len(data)
    with contextlib.suppress(ObjectError):
        object_versions.description_of(data)


GOOD = [
    bytes(BASE),
    bytes(made_of((0, 1, 2, 2), (1, 0, 0, 8), body=bytes(16) + bytes(8))),
    pack_part(object_versions.VersionDescription((object_versions.VersionRecord(3, "abc", 10),))),
]


@given(data=st.binary(max_size=200), at=st.integers(0, 3000), what=st.sampled_from([b"", *GOOD]))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes, at: int, what: bytes) -> None:
    at %= len(what) + 1
    try_anything(what[:at] + data + what[at + len(data) :])
    try_anything(what[:at] + data)


def test_what_is_good_is_read() -> None:
    assert TensorLayout.read(LAYOUT.meta, BASE) == LAYOUT
    assert [change.number for change in delta.decode(LAYOUT, memoryview(bytearray(GOOD[1])))] == [0, 1]
    assert object_versions.description_of(GOOD[2]).records[0].version == 3
