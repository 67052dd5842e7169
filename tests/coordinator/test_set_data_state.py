"""Whatever a worker says where the data is: the coordinator goes on there, or says why not, and stays as it was."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.batching import BatchTuning, Leases
from offbeat.coordinator.coordinator import Coordinator
from offbeat.errors import ModelError, PeerError
from offbeat.protocol.data_leases import LeaseGrants, lease_grants
from offbeat.server.optimizers import check_hyper
from tests.coordinator.test_data_leases import SAMPLES, Class

if TYPE_CHECKING:
    from offbeat.coordinator.data_leases import LeaseManager

_ODD = [
    -1,
    1,
    1 << 31,
    1 << 62,
    1 << 64,
    10**40,
    -0.5,
    1e-300,
    1e308,
    "",
    "x",
    None,
    True,
    [],
    {},
    [[0, 0, 1]],
    {"0": 1},
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def trained(tuning: BatchTuning | None) -> Class:
    """Three workers in their third epoch, with batches that differ where they are tuned."""
    one = begun(tuning)
    for number in range(30):
        worker = number % 3
        push, _ = one.announce(worker, one.draw(worker), computing_s=0.1 * (worker + 1))
        if number < 28:
            one.dealer.applied(0, push)
            one.dealer.whole(0, push)
        one.dealer.stepped(worker, 0.01, 0.0)
        one.release(worker)
    return one


def begun(tuning: BatchTuning | None) -> Class:
    one = Class(3, tuning, ahead=2)
    for worker in range(3):
        one.enrol(worker)
    return one


TUNINGS: tuple[BatchTuning | None, ...] = (None, BatchTuning())
PLACES: list[Any] = [msgspec.json.decode(msgspec.json.encode(trained(t).dealer.to_plain())) for t in TUNINGS]


def places_in(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [path, *(place for key, value in items for place in places_in(value, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, plain: Any) -> Any:
    """A true one with a few values exchanged, left out, or under other keys."""
    plain = msgspec.json.decode(msgspec.json.encode(plain))
    for _ in range(draw(st.integers(1, 3))):
        if not (places := places_in(plain)[1:]):
            break
        *path, last = draw(st.sampled_from(places))
        at = plain
        for key in path:
            at = at[key]
        value = at.pop(last) if isinstance(at, dict) else at[last]
        how = draw(st.sampled_from(["exchange", "shift", "rename", "remove"]))
        if how == "shift" and isinstance(value, (int, float)):
            at[last] = value + draw(st.sampled_from([-1, 1, 1 << 40]))
        elif how == "rename" and isinstance(at, dict):
            at[draw(st.sampled_from(["", "x", "7", "-1", str(1 << 70), "1.5"]))] = value
        elif how != "remove" or isinstance(at, list):
            at[last] = copy.deepcopy(draw(st.sampled_from(_ODD) | anything))
    return plain


def go_on(dealer: LeaseManager) -> None:
    """Deal out, take back and save, as for any other data."""
    for _ in range(10):
        for worker in range(3):
            for deal in dealer.take(worker, 0):
                message = lease_grants(0, deal)
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=LeaseGrants) == message
    (pool,) = dealer.epochs().values()
    for clock, number in enumerate([n for n, held in pool.held.items() if held.worker == 0]):
        assert dealer.announce(0, (0, clock), [(0, number)], 0.1)
        dealer.stepped(0, 0.01, 0.0)
        dealer.applied(0, (0, clock))
        dealer.whole(0, (0, clock))
    dealer.lose(1)
    dealer.explain()
    assert msgspec.json.decode(msgspec.json.encode(dealer.to_plain()))


@pytest.mark.parametrize("which", [0, 1])
@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_place_is_refused_or_goes_on(which: int, data: st.DataObject) -> None:
    plain, dealer = data.draw(damaged(PLACES[which])), begun(TUNINGS[which]).dealer
    before = dealer.to_plain()
    try:
        dealer.load(plain)
    except PeerError:
        assert dealer.to_plain() == before
    go_on(dealer)


@settings(max_examples=100)
@given(plain=anything | anything.map(lambda inner: {"0": inner}))
def test_any_json_is_refused_in_a_sentence(plain: Any) -> None:
    dealer = begun(None).dealer
    with pytest.raises(PeerError, match="Cannot resume the data"):
        dealer.load(plain)
    go_on(dealer)


@settings(max_examples=100)
@given(plain=anything | damaged(PLACES[0]["0"]["leases"]))
def test_any_json_is_a_pool_or_a_refusal(plain: Any) -> None:
    leases = Leases(SAMPLES, seed=3)
    try:
        pool = leases.from_plain(plain)
    except ModelError:
        return
    assert leases.from_plain(leases.to_plain(pool)) == pool


@settings(max_examples=100)
@given(place=st.binary(max_size=40) | st.sampled_from([b"[" * 100_000, b"\xff", b"{}", b"null", b"{}{}", b'{"0":']))
def test_any_bytes_are_answered_with_a_sentence(place: bytes) -> None:
    coordinator = Coordinator(lambda plan: pytest.fail(plan), check_hyper=check_hyper)
    assert coordinator._data.load(place) or place == b"{}"


@pytest.mark.parametrize("which", [0, 1])
def test_a_true_place_is_gone_on_from(which: int) -> None:
    dealer = begun(TUNINGS[which]).dealer
    assert set(dealer.load(PLACES[which])[0]) == {0, 1, 2}
    go_on(dealer)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("tuning", "tuning", "machines", "0", "every"), 1 << 62),
        (("tuning", "tuning", "machines", "0", "compute", "variance"), 1e308),
        (("leases", "pool", "number"), 10**40),
        (("leases", "pool", "open", "-5"), {"used": 37}),
    ],
)
def test_what_would_stop_the_coordinator_later_is_refused(path: tuple[str, ...], value: Any) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(PLACES[1]))
    at = plain["0"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(PeerError, match="Cannot resume"):
        begun(BatchTuning()).dealer.load(plain)
