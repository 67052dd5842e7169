"""A worker that goes mad in the middle of training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.protocol.messages import pack
from offbeat.protocol.status import GetStatus
from offbeat.protocol.training import AskAllWorkers, InitBlock, OpenModel, PullDone, PullOrder, Refused, ReleaseWorker
from tests.rejected_peers.job import (
    BAD,
    HYPER,
    Heard,
    Job,
    announce,
    details,
    in_log,
    join,
    own_address,
    part,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable


MAD: dict[str, tuple[Callable[[int], list[tuple[Any, bytes]]], str]] = {
    "a future push": (
        lambda n: [(announce(n), b""), (part(n + 2), bytes(56))],
        "contribution {n+2} of rank 0: what is left of number {n} is next",
    ),
    "an ancient push": (
        lambda n: [(part(n - 2), bytes(56))],
        "contribution {n-2} of rank 0: what is left of number {n} is",
    ),
    "a future contribution": (lambda n: [(announce(n + 9), b"")], "contribution {n+9} of rank 0: it is computing, and"),
    "an ancient contribution": (
        lambda n: [(announce(0), b"")],
        "contribution 0 of rank 0: it is computing, and number {n}",
    ),
    "a contribution twice": (
        lambda n: [(announce(n), b""), (announce(n), b"")],
        "Cannot accept contribution {n} of rank 0: it is pushing, and number {n} is next",
    ),
    "a wrong dtype": (
        lambda n: [(announce(n), b""), (part(n, dtype="int64"), bytes(56))],
        "Cannot take a gradient of type 'int64': a server adds up float32",
    ),
    "another dtype than it has": (
        lambda n: [(announce(n), b""), (part(n, dtype="float64"), bytes(56))],
        "Cannot take 56 bytes as block 0: it has 112",
    ),
    "a wrong shape": (
        lambda n: [(announce(n), b""), (part(n), bytes(52))],
        "Cannot take 52 bytes as block 0: it has 56",
    ),
    "a wrong block": (
        lambda n: [(announce(n), b""), (part(n, 99), bytes(56))],
        "Block 99 of model 0 is not held here",
    ),
    "a block twice": (
        lambda n: [(announce(n), b""), *2 * [(part(n), bytes(56))]],
        "block 0 of contribution {n} of rank 0: what is left of number {n} is next",
    ),
    "a block without a body": (
        lambda n: [(announce(n), b""), (part(n), b"")],
        "Rank 0 sends block 0 without a body",
    ),
    "too few groups": (
        lambda n: [(announce(n, hyper=()), b"")],
        "Cannot take hyper-parameters of 0 groups from rank 0: the optimizer has 1",
    ),
    "another flag": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "nesterov": None},)), b"")],
        "Cannot continue with nesterov=None in group 0 of SGD, as rank 0 has it: it was False",
    ),
    "no number": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "lr": (1.0, 2.0)},)), b"")],
        "Cannot continue with lr=(1.0, 2.0) in group 0 of SGD, as rank 0 has it: it was 0.5",
    ),
    "a number out of range": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "momentum": -1.0},)), b"")],
        "Cannot continue in group 0 of SGD, as rank 0 has it: Invalid momentum value: -1.0",
    ),
    "a rate that is none": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "lr": float("nan")},)), b"")],
        "Cannot continue in group 0 of SGD, as rank 0 has it: lr=nan is not finite.",
    ),
    "a rate without end": (
        lambda n: [(announce(n, hyper=({**HYPER[0], "lr": float("inf")},)), b"")],
        "Cannot continue in group 0 of SGD, as rank 0 has it: lr=inf is not finite.",
    ),
    "no rate": (
        lambda n: [(announce(n, hyper=({k: v for k, v in HYPER[0].items() if k != "lr"},)), b"")],
        "Cannot continue without lr in group 0 of SGD, as rank 0 has it: it was 0.5.",
    ),
    "a weight that is none": (lambda n: [(announce(n, weight=float("nan")), b"")], "Expected `float` >= 0.0"),
    "a step it was not let go for": (
        lambda n: [(PullDone(0, n + 9), b"")],
        "it has pulled step {n+9}, but is at step {n}",
    ),
    "an order without a block": (
        lambda n: [(PullOrder(0, ()), b"")],
        "Cannot send rank 0 the blocks of model 0 in this order: each of the ",
    ),
    "an order with a block twice": (
        lambda n: [(PullOrder(0, (0, 0)), b"")],
        "Cannot send rank 0 the blocks of model 0 in this order: each of the ",
    ),
    "an order with a block that is not there": (
        lambda n: [(PullOrder(0, (0, 99)), b"")],
        "Cannot send rank 0 the blocks of model 0 in this order: each of the ",
    ),
    "an order of another model": (lambda n: [(PullOrder(7, (0,)), b"")], "Rank 0 does not take part in model 7"),
    "a model twice": (lambda n: [(OpenModel(0), pack(details()))], "Rank 0 opens model 0 for a second time"),
    "values again": (lambda n: [(InitBlock(0, 0), bytes(56))], "Rank 0 was not asked for the values of block 0"),
    "two questions at once": (
        lambda n: [(AskAllWorkers(5, "one"), b""), (AskAllWorkers(6, "two"), b"")],
        "Rank 0 asks 'two' before its last question is answered",
    ),
}


# What is wrong with these is in what it brings: it is told, since who came back would bring it again.
TOLD = {
    "a model twice",
    "a wrong dtype",
    "another dtype than it has",
    "a wrong shape",
    "too few groups",
    "another flag",
    "no number",
    "a number out of range",
    "a rate that is none",
    "a rate without end",
    "no rate",
}


@pytest.mark.parametrize("name", MAD)
def test_a_worker_that_goes_mad(job: Job, name: str) -> None:
    story, says = MAD[name]
    link, heard, number = join(job)
    says = re.sub(r"\{n([+-]\d+)?\}", lambda found: str(number + int(found[1] or 0)), says)
    address = own_address(link)
    for message, body in story(number):
        job.loop.call(link.send, pack(message), body)
    assert heard.over.wait(10), "it is not closed"
    assert says in str(heard.error)
    refused = [message.reason for message in heard.messages if isinstance(message, Refused)]
    assert [says in reason for reason in refused] == [True] * (name in TOLD)
    in_log(job, address, f"Rank 0 is gone: Lost the link of rank 0 with {address}: ")
    in_log(job, address, "The others continue; each keeps its batch")
    job.goes_on()


def test_hyper_parameters_that_no_optimizer_reads_do_no_harm(job: Job) -> None:
    """Schedulers keep numbers of their own there; "params" would replace what is trained."""
    link, heard, number = join(job)
    strange = {**HYPER[0], "params": 3, "max_lr": 1.0, "foreach": True, "fused": True, "differentiable": True}
    job.loop.call(link.send, pack(announce(number, hyper=(strange,))))
    for index, one in enumerate(details().blocks):
        ones = torch.ones(sum(piece.numel for piece in one.pieces)).numpy().tobytes()
        job.loop.call(link.send, pack(part(number, index)), ones)
    job.step(1)
    wait_for(
        lambda: any(isinstance(m, ReleaseWorker) and m.step == number + 1 for m in heard.messages), "it is not let go"
    )
    job.loop.call(link.abort)
    job.goes_on()


def test_who_asks_and_does_not_listen(job: Job) -> None:
    """Answers that nobody takes in would fill the server's memory."""
    heard = Heard()
    link = job.dial(lambda link: heard, BAD, role="onlooker")
    address = own_address(link)

    def ask_and_ask() -> None:
        link.pause_reading()
        for number in range(1000):
            link.send(pack(GetStatus(number)))

    job.loop.call(ask_and_ask)
    in_log(job, address, "it asks for more than it reads")
    job.loop.call(link.abort)
    job.goes_on()
