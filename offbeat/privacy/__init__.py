"""How little can be learnt about a worker from what it contributes?

Each contribution is clipped and noised at the worker, before anything else is made of it, so that nobody who sees it
has to be trusted (local differential privacy; Dwork & Roth, "The algorithmic foundations of differential privacy").

* `gaussian_mechanism` - the mechanism, as a part of a plan
* `accounting` - what contributions have spent, exactly
"""

from offbeat.privacy.accounting import delta_of, epsilon_of
from offbeat.privacy.gaussian_mechanism import GaussianMechanism

__all__ = ["GaussianMechanism", "delta_of", "epsilon_of"]
