"""The optimizer's state, out of the server and back into it.

Out of it at any time. Back into it, and with it other parameters, only when the first worker of the job wants to, and
all others wait for that in a question (`REPLACED_IN`): then all load one checkpoint together, or come to the server
together. What it may put ends with its `PutStateDone`, or when it takes part again, so that nobody can put something
there behind the backs of others that train.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Dtype, Model, Text

LOADING = "what a checkpoint holds"
DEALING = "the data to be leased by the server"
REPLACED_IN = frozenset({LOADING, DEALING})  # questions; who asks them waits for what the first worker brings


class FetchState(msgspec.Struct, tag=True, frozen=True):
    """Send the optimizer's state in all blocks of a model that are here."""

    model: Model
    number: Count


class StatePart(msgspec.Struct, tag=True, frozen=True):
    """A part of the optimizer's state; the body is its elements.

    Args:
        number: of the `FetchState`.
        name: of the parameter, as an index into `ModelInfo.names`.
        single: whether it is one number for all elements, such as a count of steps.
    """

    model: Model
    number: Count
    block: Count
    name: Count
    key: Annotated[str, msgspec.Meta(max_length=64)]
    dtype: Dtype
    single: bool


class RequestReplacement(msgspec.Struct, tag=True, frozen=True):
    """First worker to coordinator: it has loaded other parameters and another state for a model."""

    model: Model
    number: Count


class MayPut(msgspec.Struct, tag=True, frozen=True):
    """The answer to `RequestReplacement`: from each shard, once all others wait for it; or from the coordinator, if
    they never do.

    Args:
        refused: why it may not; "" if it may.
    """

    number: Count
    refused: Text = ""


class PutState(msgspec.Struct, tag=True, frozen=True):
    """Take over a part of the optimizer's state; or, without a key, the values of the whole block."""

    model: Model
    block: Count
    name: Count = 0
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""
    dtype: Dtype = ""
    single: bool = False


class PutStateDone(msgspec.Struct, tag=True, frozen=True):
    """The end of a replacement: everything was put."""

    model: Model
    number: Count


class TransferDone(msgspec.Struct, tag=True, frozen=True):
    """A `FetchState` or a `PutStateDone` is done."""

    number: Count
