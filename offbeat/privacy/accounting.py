"""The accounting of Gaussian mechanisms: exact, since they compose to one of them.

A Gaussian mechanism whose noise has `noise` times the standard deviation of what it hides is mu-GDP, mu = 1 / noise; T
of them, each chosen after seeing the others, are sqrt(T) mu-GDP (Dong, Roth, Su, "Gaussian differential privacy", J. R.
Stat. Soc. B 84(1), 2022, theorem 2.7 and corollary 3.3). And mu-GDP is (epsilon, delta)-differentially private exactly
for (Balle & Wang, "Improving the Gaussian mechanism", ICML 2018, theorem 8)

    delta(epsilon) = Phi(-epsilon / mu + mu / 2) - exp(epsilon) Phi(-epsilon / mu - mu / 2)
"""

from __future__ import annotations

import math

_HALVINGS = 200  # after which two floats have nothing between them
_LARGE = 25.0  # from where on the series is exact to the last bits


def delta_of(mu: float, epsilon: float) -> float:
    """The least delta with which a mechanism that is mu-GDP is (epsilon, delta)-differentially private.

    >>> round(delta_of(1.0, 1.0), 6)
    0.126937
    """
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    # exp(epsilon) would overflow: exp(epsilon) Phi(-high) = exp(-low^2 / 2) erfcx(high / sqrt 2) / 2.
    if low < 0:
        first = math.erfc(low / math.sqrt(2))
        return max(0.0, first - math.exp(-low * low / 2) * _erfcx(high / math.sqrt(2))) / 2
    scaled = _erfcx(low / math.sqrt(2)) - _erfcx(high / math.sqrt(2))
    return max(0.0, math.exp(-low * low / 2) * scaled) / 2


def epsilon_of(mu: float, delta: float) -> float:
    """The least epsilon with which a mechanism that is mu-GDP is (epsilon, delta)-differentially private.

    >>> round(epsilon_of(1.0, 1e-5), 3)
    4.377
    >>> epsilon_of(0.0, 1e-5)
    0.0
    """
    if not mu or delta_of(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, max(1.0, mu * mu)
    while delta_of(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if delta_of(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high  # never less than it is


def _erfcx(x: float) -> float:
    """exp(x^2) erfc(x), for x of 0 or more."""
    if x < _LARGE:
        return math.exp(x * x) * math.erfc(x)
    square = 1 / (2 * x * x)
    return (1 - square * (1 - 3 * square * (1 - 5 * square))) / (x * math.sqrt(math.pi))
