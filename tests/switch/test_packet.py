"""Packets and batches of them: what is written is read, and what is not ours is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.switch.checksum import FACTOR, SEED
from offbeat.switch.packet import (
    HEADER_BYTES,
    Flag,
    Packet,
    PacketKind,
    decode,
    distance,
    encode,
    is_newer,
    sealed,
    wrapped,
)
from offbeat.switch.packet_batch import HEADER, PacketBatch

bytes_ = st.integers(0, 255)
shorts = st.integers(0, (1 << 16) - 1)
words = st.integers(0, (1 << 32) - 1)
signed = st.integers(-128, 127)
packets = st.builds(
    Packet,
    kind=st.sampled_from(PacketKind),
    job=shorts,
    worker=bytes_,
    cookie=words,
    clock=words,
    chunk=words,
    slot=shorts,
    epoch=shorts,
    bitmap=words,
    exponent=signed,
    window_old=bytes_,
    window_new=bytes_,
    flags=st.builds(Flag, st.integers(0, 15)),
    values=st.sampled_from([0, 16, 352]).flatmap(
        lambda count: st.tuples(*[st.integers(-(1 << 31), (1 << 31) - 1)] * min(count, 16)).map(
            lambda some: (some * count)[:count]
        )
    ),
)


@given(packets)
def test_what_is_written_is_read(packet: Packet) -> None:
    data = encode(packet)
    assert decode(data) == packet
    batch = PacketBatch.of([data], 352)
    assert batch.datagrams() == [data]
    header = batch.header[0]
    assert (header["clock"], header["exponent"], header["window_new"]) == (
        packet.clock, packet.exponent, packet.window_new,
    )  # fmt: skip
    assert batch.values[0, : len(packet.values)].tolist() == list(packet.values)


@given(st.binary(max_size=200))
def test_garbage_is_no_packet(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data)


@given(packets, st.integers(0, 31), bytes_)
def test_one_wrong_byte_is_read_or_refused(packet: Packet, at: int, byte: int) -> None:
    data = bytearray(encode(packet))
    data[at] = byte
    data = bytearray(sealed(data))
    batch = PacketBatch.of([bytes(data)], 2048)
    ours = bool(batch.are_ours(int(batch.header["job"][0]), from_workers=False)[0])
    try:
        decode(bytes(data))
    except PeerError:
        assert not ours
    else:
        assert ours


def flipped(datagram: bytes, *bits: int) -> bytes:
    data = bytearray(datagram)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_every_flipped_bit_is_found() -> None:
    numbers = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, 32)
    datagram = encode(Packet(PacketKind.RESULT, 7, 2, cookie=9, bitmap=3, values=tuple(numbers.tolist())))
    damaged = [flipped(datagram, bit) for bit in range(8 * len(datagram))]
    batch = PacketBatch.of([datagram, *damaged], 32)
    assert len(batch.intact().among(batch.intact().are_ours(7, from_workers=False))) == 1
    for one in damaged:
        with pytest.raises(PeerError):
            decode(one)


@pytest.mark.parametrize("distance", [1, 2, 64, 1024, 2047])
def test_the_same_bit_flipped_in_two_words_is_found(distance: int) -> None:
    """A plain sum of words finds half of these, and a weighted one none of the uppermost bit's."""
    numbers = np.random.default_rng(1).integers(-(1 << 31), 1 << 31, 2048)
    datagram = encode(Packet(PacketKind.DATA, 7, 2, values=tuple(numbers.tolist())))
    first = 8 * HEADER_BYTES
    damaged = [flipped(datagram, first + bit, first + bit + 32 * distance) for bit in range(32)]
    assert PacketBatch.of(damaged, 2048).are_damaged().all()


def test_the_checksum_is_what_its_module_says() -> None:
    datagram = encode(Packet(PacketKind.DATA, 7, 2, clock=5, values=tuple(range(-8, 8))))
    found = SEED
    for at in [at for at in range(0, len(datagram), 4) if at != 32]:
        word = int.from_bytes(datagram[at : at + 4], "little")
        found = (found + (word ^ word >> 16)) * FACTOR % (1 << 32)
    assert int.from_bytes(datagram[32:36], "little") == found


def test_a_packet_that_was_cut_short_by_its_row_is_not_ours() -> None:
    batch = PacketBatch.of([encode(Packet(PacketKind.DATA, 7, 0, values=(1,) * 64))], 16)
    assert batch.sizes.tolist() == [HEADER_BYTES + 256]
    assert not batch.are_ours(7, from_workers=True).any()


def test_only_workers_may_send_what_workers_send() -> None:
    batch = PacketBatch.of(
        [Packet(PacketKind.DATA, 7, 0), Packet(PacketKind.RESULT, 7, 0), Packet(PacketKind.DATA, 8, 0)], 16
    )
    assert batch.are_ours(7, from_workers=True).tolist() == [True, False, False]


def test_a_header_is_the_table_of_the_module() -> None:
    assert HEADER.itemsize == 36
    offsets = {name: field[1] for name, field in (HEADER.fields or {}).items()}
    assert [offsets[name] for name in ("cookie", "slot", "bitmap", "window_new", "checksum")] == [8, 20, 24, 31, 32]


@given(words, st.integers(0, (1 << 31) - 1))
def test_numbers_wrap_around(number: int, ahead: int) -> None:
    later = wrapped(number + ahead)
    assert distance(later, number) == ahead
    assert is_newer(later, number) == (ahead > 0)
    assert not is_newer(number, later)


def test_rows_may_be_narrowed_in_place() -> None:
    batch = PacketBatch.of([Packet(PacketKind.DATA, 7, 0, values=tuple(range(16)))], 64)
    narrow = batch.narrowed(16)
    assert narrow.values.tolist() == [list(range(16))]
    assert np.shares_memory(narrow.rows, batch.rows)
