"""Trust by the angle to a reference. Cao et al., "FLTrust: Byzantine-robust federated learning via trust bootstrapping"
(NDSS 2021), algorithm 2.

    trust_i = max(0, cos(x_i, v))        update = sum of trust_i x_i |v| / |x_i|  /  sum of trust_i
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.robust.reference_rule import ReferenceRule


@dataclass(frozen=True)
class FLTrust(ReferenceRule):
    """The mean of contributions as long as a reference on trusted data, weighted by the cosine of their angle to it.

    Args:
        calibrate: how long a contribution is made, in units of the reference's norm, see `ReferenceRule`.

    Raises:
        PlanError: if `calibrate` is not above 0 and finite.

    >>> import torch
    >>> FLTrust()(torch.tensor([[2.0], [-900.0]]), reference=torch.tensor([1.0]))
    tensor([1.])
    """

    calibrate: float = 1.0

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Trust each by its angle; nothing moves where none is trusted."""
        norms = gram.diagonal().sqrt()
        lengths = norms[:-1] * norms[-1]
        trust = torch.where(lengths > 0, gram[:-1, -1] / lengths, 0.0).clamp_(min=0)
        scales = torch.zeros(len(gram), dtype=torch.float64)
        if bool(trust.sum() > 0):
            scales[:-1] = torch.where(trust > 0, trust / trust.sum() * norms[-1] / norms[:-1], 0.0)
        return scales
