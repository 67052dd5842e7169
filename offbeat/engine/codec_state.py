"""The codec's state of one model on this worker, such as residuals: in steps, across swaps, in checkpoints.

It belongs to the model, not to the way that gradients take: a plan swap or a fabric migration leaves it where it is, so
that updates and residuals add up to the gradients. It belongs to one worker: nobody else's can stand for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.codec import ErrorFeedback, ErrorReset, Rescales
from offbeat.codec.error_feedback import RESIDUAL
from offbeat.engine import state_checks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from offbeat.codec import Codec, Purpose, State
    from offbeat.layout import Bucket, Layout

_KINDS: dict[Purpose, str] = {"gradient": "gradients", "change": "deltas", "reset": "resets"}


class CodecState:
    """The codec's state of one model, by parameter name: of gradients, of the deltas of local steps, and of resets.

    These are kept apart: a delta has a learning rate in it, a gradient has not, and a reset is of many steps.

    Attributes:
        scale: by what gradients and deltas are multiplied before they are encoded; 1/N without a server.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._states: dict[str, State] = {kind: {} for kind in _KINDS.values()}
        self._has_residuals = False  # one of gradients; without it nobody has to look for it, at each bucket

    def of(self, codec: Codec, bucket: Bucket, purpose: Purpose = "gradient") -> State:
        """The state of a bucket's parameters: what was kept, and that of a first exchange for the others.

        Args:
            purpose: of the exchange.
        """
        kept = self._states[_KINDS[purpose]]
        if not all(kept.get(slot.name) for slot in bucket.slots):
            first = codec.init(bucket)
            if not first and not any(kept.get(slot.name) for slot in bucket.slots):
                return {}  # it keeps nothing, as most
            for name, tensors in first.items():
                if not kept.get(name):  # another codec may have kept nothing
                    kept[name] = tensors
                    self._has_residuals = self._has_residuals or RESIDUAL in tensors
        return {slot.name: kept.setdefault(slot.name, {}) for slot in bucket.slots}

    def working(self, codec: Codec) -> Codec:
        """The codec, wrapped if it keeps no residual and there is one: of an earlier policy, which is sent along."""
        if not self._has_residuals or isinstance(codec, Rescales):
            return codec
        kept = [one for one in self._states["gradients"].values() if RESIDUAL in one]
        if any(bool(one[RESIDUAL].any()) for one in kept):
            return ErrorFeedback(codec)
        for one in kept:
            del one[RESIDUAL]
        self._has_residuals = False
        return codec

    def rescale_(self, codec: Codec, scale: float) -> None:
        """Go on with gradients that are multiplied by `scale` before they are encoded."""
        codec = self.working(codec)
        if isinstance(codec, Rescales) and scale != self.scale:
            for state in self._states.values():
                codec.rescale_(state, scale / self.scale)
        self.scale = scale

    def residuals(self) -> list[torch.Tensor]:
        """List the residuals, of all parameters and purposes."""
        kept = [tensors for state in self._states.values() for tensors in state.values()]
        return [tensors[RESIDUAL] for tensors in kept if RESIDUAL in tensors]

    def state_dict(self) -> dict[str, Any]:
        """The state, for this worker's own part of a checkpoint; empty if the codec keeps nothing."""
        kept = {kind: {n: dict(tensors) for n, tensors in s.items() if tensors} for kind, s in self._states.items()}
        return {"scale": self.scale, **kept} if any(kept.values()) else {}

    def load_state_dict(self, codec: Codec, layout: Layout, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; what is not in it begins anew.

        Args:
            layout: of the parameters.

        Raises:
            ModelError: if it is damaged, or of another model.
        """
        whole = codec
        scale, self.scale = self.scale, state_checks.number(state.get("scale", self.scale), "scale of a codec's state")
        for purpose, kind in _KINDS.items():
            self._states[kind] = {}
            saved = state.get(kind, {})
            codec = whole.of(purpose) if isinstance(whole, ErrorReset) else whole
            if not isinstance(codec, Rescales) and any(RESIDUAL in one for one in saved.values()):
                codec = ErrorFeedback(codec)  # of an earlier policy, which is sent along
            for bucket in layout.buckets if saved else ():
                for name, tensors in self.of(codec, bucket, purpose).items():
                    for key, tensor in tensors.items() if name in saved else ():
                        state_checks.copy_(tensor, saved[name], name, key)
        self.rescale_(whole, scale)
