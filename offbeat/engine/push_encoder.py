"""The encoding of what a worker pushes to a server: each block of a gradient or change by itself.

    whole    = grad + residual
    pushed   = encode(whole), block by block
    residual = whole - decode(pushed)      once the server says that the contribution is in an update
             = whole                       if it says that it is in none

So updates and residuals add up to the gradients also where a policy drops what comes late, or a server comes back from
a snapshot. One that holds NaN changes no residual, and leaves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from offbeat.codec import Dense
from offbeat.codec.error_feedback import RESIDUAL
from offbeat.server.encoded_block import BlockCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec import OneRoundCodec, Purpose, State
    from offbeat.engine.codec_state import CodecState
    from offbeat.layout import Bucket, Layout
    from offbeat.plan import Plan
    from offbeat.server.blocks import Block
    from offbeat.server.encoded_block import EncodedBlock


class Unbooked(NamedTuple):
    """A bucket's part in a contribution of which it is not known yet whether it counts; see above.

    Args:
        state: where the residual is.
        whole, sent: [D].
    """

    state: State
    whole: torch.Tensor
    sent: torch.Tensor


class PushEncoder:
    """The encoder of one model's contributions.

    Call order: `encode`; `book` once it is known whether that counts. `encode_block` for what is pushed before.

    Args:
        plan: whose codec it is.
        layout: of the buckets that are encoded.
        blocks: that are pushed.
        state: of the codec, by parameter name.
        rank, seed: of this worker and of the run.

    Attributes:
        left: [D] of each bucket, what was not sent of the last change, where that is kept in the worker's parameters;
            empty where nothing is.
    """

    def __init__(
        self, plan: Plan, layout: Layout, blocks: Sequence[Block], state: CodecState, *, rank: int, seed: int
    ) -> None:
        self._codec, self._layout, self._blocks, self._state, self._rank = plan.codec, layout, blocks, state, rank
        self._inner = plan.pushed_codec
        self._block_codec = BlockCodec(self._inner, blocks, seed)
        self._within = [[b for b in blocks if b.bucket == bucket.index] for bucket in layout.buckets]
        self._keeps_offset = bool(plan.codec.promises.offset)
        self._unbooked: list[Unbooked] = []
        self.left: list[torch.Tensor] = []

    def encode(
        self, grads: Sequence[torch.Tensor], *, step: int, purpose: Purpose, is_whole: bool = False
    ) -> list[torch.Tensor | EncodedBlock]:
        """Encode a contribution; one part for each block.

        Args:
            grads: [D] of each bucket; left as they are, and parts may share their memory.
            step: by which the codec's turn counts.
            purpose: whether it is a gradient or a change.
            is_whole: whether nothing is to be left of it, so that it is sent as it is.
        """
        self._unbooked, self.left = [], []
        codec = self._inner
        if is_whole or (self._keeps_offset and purpose == "gradient"):
            codec = Dense()
        keeps_offset = self._keeps_offset and codec is self._inner
        parts: list[torch.Tensor | EncodedBlock] = [torch.empty(0)] * len(self._blocks)
        for bucket, grad, blocks in zip(self._layout.buckets, grads, self._within, strict=True):
            state = self._state.of(self._codec, bucket, purpose)
            whole, sent = self._whole(state, bucket, grad), None
            if whole is not grad or keeps_offset:
                sent = torch.empty_like(whole)
                self._unbooked.append(Unbooked(state, whole, sent))
            for block in blocks:
                place = slice(block.offset, block.offset + block.numel)
                parts[block.index] = self._part(
                    codec, block, whole[place], step, purpose, sent=None if sent is None else sent[place]
                )
        return parts

    def encode_block(self, index: int, grad: torch.Tensor, *, step: int) -> torch.Tensor | EncodedBlock:
        """Encode the gradient [D] of one block, of a codec without a residual."""
        return self._part(self._inner, self._blocks[index], grad, step, "gradient")

    def book(self, *, counts: bool) -> None:
        """Write down what is left of the last contribution.

        Args:
            counts: whether it is in an update.
        """
        unbooked, self._unbooked = self._unbooked, []
        for state, whole, sent in unbooked:
            if self._keeps_offset:  # what was to be sent is the worker's own buffer
                self.left.append(torch.sub(whole, sent, out=sent) if counts else sent.copy_(whole))
                continue
            left = whole.sub_(sent) if counts else whole
            kept = [tensors[RESIDUAL] for tensors in state.values()]
            for residual, part in zip(kept, left.split([len(one) for one in kept]), strict=True):
                residual.copy_(part)

    def forget(self) -> None:
        """Keep nothing of the last contribution, which is not to be sent later either; residuals stay as they are."""
        self._unbooked = []

    def _whole(self, state: State, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        residuals = [tensors[RESIDUAL] for tensors in state.values() if RESIDUAL in tensors]
        if len(residuals) < len(bucket.slots):
            return grad
        return torch.cat(residuals).to(grad.device).add_(grad)

    def _part(
        self,
        codec: OneRoundCodec,
        block: Block,
        grad: torch.Tensor,
        step: int,
        purpose: Purpose,
        *,
        sent: torch.Tensor | None = None,
    ) -> torch.Tensor | EncodedBlock:
        turn = self._block_codec.turn(block.index, self._rank, step, change=purpose == "change")
        if codec.is_plain:
            (part,) = codec.encode(grad, turn)
            if sent is not None:
                sent.copy_(part)
            return part
        encoded = self._block_codec.encode(grad, turn)
        if sent is not None:
            sent.copy_(self._block_codec.decode(encoded.body, turn))
        return encoded
