"""What the workers must have in common before the first step.

Layouts that differ between ranks end a Gloo process through C++ terminate, or sum one layer into another in silence.
So the descriptions are compared first, as texts, and the first difference is named.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from offbeat.engine.waiting import Awaited, Waiter
from offbeat.errors import DisagreementError
from offbeat.payload import Contribution, Gather

if TYPE_CHECKING:
    from offbeat.fabric import Fabric

_MAX_TEXT_BYTES = 64 << 20


def gather_texts(fabric: Fabric, waiter: Waiter, text: str, what: str) -> list[str]:
    """Every rank's `text`, in rank order. Collective: every rank calls it.

    Raises:
        DisagreementError: if a rank's text is not what this function sends.
    """
    data = torch.frombuffer(bytearray(zlib.compress(text.encode())), dtype=torch.uint8)
    reply = waiter.wait(fabric.start(Gather((data,))), Awaited(what))
    assert isinstance(reply, list)
    return [_unpack(contribution) for contribution in reply]


def _unpack(contribution: Contribution) -> str:
    inflate = zlib.decompressobj()
    data = contribution.tensors[0].numpy().tobytes()
    try:
        text = inflate.decompress(data, _MAX_TEXT_BYTES)
        return text.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise DisagreementError(
            f"Rank {contribution.worker} sent something unreadable ({error}): do all workers run the same offbeat?"
        ) from error


def agree_on(fabric: Fabric, waiter: Waiter, what: str, text: str, advice: str) -> None:
    """Compare `text` between all ranks, line by line. Collective.

    Args:
        what: the thing compared, such as "model".
        text: lines; equal on all ranks if all is well.
        advice: what to do when they differ.

    Raises:
        DisagreementError: naming the ranks that differ from the majority and the first line in which they do.
    """
    texts = gather_texts(fabric, waiter, text, f"the comparison of the {what}")
    if len(set(texts)) == 1:
        return
    majority = max(texts, key=texts.count)
    odd = [rank for rank, other in enumerate(texts) if other != majority]
    here = next(rank for rank, other in enumerate(texts) if other == majority)
    theirs, ours = _first_difference(texts[odd[0]], majority)
    ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    raise DisagreementError(
        f"The {what} differs between workers: {ranks} against rank {here}. First difference: "
        f"rank {odd[0]} has {theirs!r}, rank {here} has {ours!r}. {advice}"
    )


def _first_difference(theirs: str, ours: str) -> tuple[str, str]:
    left, right = theirs.splitlines(), ours.splitlines()
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    longer = min(len(left), len(right))
    return (left[longer] if len(left) > longer else "nothing"), (right[longer] if len(right) > longer else "nothing")
