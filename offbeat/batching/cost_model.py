"""A worker's time for a batch: ``t(b) = a + s b``, learnt from its steps.

`a` is what a step costs whatever the batch (launching kernels, the optimizer), `s` what each sample adds. The fit is a
recursive least squares with forgetting, over about the last 50 steps, held as weighted means and centred sums: what the
data say about the level ``t`` at the usual batch, and what about the slope. Four things are added, because steps of
real machines are not what textbooks assume:

* *One batch size says nothing about the slope.* A prior stands in: a = 0.1 t, give or take 0.3 t. And what was once
  learnt about the slope is forgotten only as fast as other batch sizes come in, so that months of equal batches do not
  wear it out (directional forgetting; with the same forgetting everywhere the fit would drift off).
* *Single steps are late for their own reasons* (a garbage collection, a page fault, a neighbour). Residuals are
  relative, taken as logarithms, and cut off at 3 standard deviations. These are measured from one residual to the
  next, so that a fit that is wrong by the same factor at each step does not take that for noise.
* *Machines change speed for good.* Five residuals in a row on one side, all beyond 1 standard deviation and most
  beyond 2: the fit is scaled by their median at once. A machine that became slower did so in `a` and `s` alike, so
  their ratio is kept; the same where the level drifts while batches stay equal.
* *A fit can be absurd.* `a` is never negative, and `s` at least a hundredth of what all of the time would make it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import median

_PRIOR_FIXED, _PRIOR_DEVIATION = 0.1, 0.3  # of the time of a step
_LEAST_SLOPE = 0.01  # of the time per sample if all of it were due to samples
_UNCOUNTED = 2  # the first steps pay for what later ones do not
_NOISE = 0.05  # relative standard deviation, before it is known
_LEAST_NOISE = 0.02
_CUT, _STEP_CUT = 3.0, 2.0  # standard deviations: of residuals, and of what is between two of them
_RUN, _EACH, _MOST = 5, 1.0, 2.0  # residuals in a row; standard deviations for each and for most of them
_KNOWN_AFTER_CHANGE = 3.0  # as if so many steps had been seen
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
# What was observed stays within these, by far.
_LARGEST, _LEAST_S, _LARGEST_RESIDUAL, _MOST_STEPS = 1e30, 1e-12, 100.0, 1 << 61


@dataclass(frozen=True)
class CostFit:
    """The fit of one worker's steps; immutable.

    Args:
        steps: so far.
        weight: steps that count, older ones less.
        batch, seconds: weighted means.
        spread, together: weighted sums of squares of the batch, and of products with seconds, about the means.
        variance: of the relative residuals.
        recent: the last relative residuals, not cut.
    """

    steps: int = 0
    weight: float = 0.0
    batch: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0
    together: float = 0.0
    variance: float = _NOISE**2
    recent: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """Whether a step has been counted."""
        return self.weight > 0

    @property
    def sound(self) -> bool:
        """Whether this can have been observed; for one that was read from a file."""
        numbers = (self.weight, self.batch, self.seconds, self.spread, self.variance)
        small = all(abs(residual) < _LARGEST_RESIDUAL for residual in self.recent)
        bounded = small and abs(self.together) < _LARGEST and 0 <= self.steps < _MOST_STEPS
        if not bounded or not all(0 <= number < _LARGEST for number in numbers):
            return False
        return not self.known or (self.weight >= 1 and self.batch >= 1 and _LEAST_S < self.seconds < 1 / _LEAST_S)

    @property
    def per_sample_s(self) -> float:
        """`s`: how much longer a step takes with each sample."""
        mean = self.seconds / self.batch
        data, prior = self._information()
        slope = (prior * (1 - _PRIOR_FIXED) * mean + data[1]) / (prior + data[0])
        return min(mean, max(_LEAST_SLOPE * mean, slope))

    @property
    def fixed_s(self) -> float:
        """`a`: how long a step takes whatever the batch."""
        return max(0.0, self.seconds - self.per_sample_s * self.batch)

    @property
    def noise(self) -> float:
        """Relative standard deviation of single steps."""
        return max(_LEAST_NOISE, math.sqrt(self.variance))

    @property
    def fixed_error(self) -> float:
        """Standard error of the fixed part, as a part of a usual step."""
        data, prior = self._information()
        return self.batch / self.seconds / math.sqrt(data[0] + prior)

    def predict(self, batch: float) -> float:
        """Seconds that a step with `batch` samples takes."""
        return self.fixed_s + self.per_sample_s * batch

    def error(self, batch: float) -> float:
        """Relative standard error of `predict`."""
        off = self.fixed_error * (batch / self.batch - 1) * self.seconds / self.predict(batch)
        return math.hypot(self.noise / math.sqrt(self.weight), off)

    def observe(self, batch: int, seconds: float, *, memory: int = 50) -> CostFit:
        """The fit after another step.

        Args:
            batch: samples in it, at least 1.
            seconds: how long it took; what is not a number from 0 is not looked at.
            memory: steps that it is to be about.
        """
        if not 0 <= seconds < math.inf or batch < 1:
            return self
        seconds = min(_LONGEST_S, max(_SHORTEST_S, seconds))
        counted = dataclasses.replace(self, steps=self.steps + 1)
        if self.steps < _UNCOUNTED:
            return counted
        if not self.known:
            return dataclasses.replace(counted, weight=1.0, batch=float(batch), seconds=seconds)
        return counted._follow(batch, seconds, memory)

    def _follow(self, batch: int, seconds: float, memory: int) -> CostFit:
        expected = self.predict(batch)
        residual = math.log(seconds / expected)
        deviation = math.hypot(self.noise, self.error(batch))
        recent = (*self.recent, residual)[-_RUN:]
        if len(recent) == _RUN and (min(recent) > _EACH * deviation or max(recent) < -_EACH * deviation):
            level = median(recent)
            if abs(level) > _MOST * deviation:
                return self._scaled(math.exp(level))
        cut = min(_CUT * deviation, max(-_CUT * deviation, residual))
        weight = self.weight * (1 - 1 / memory) + 1
        variance = self.variance
        if self.recent:
            # What is cut counts as much as is left of it: if it is common, the noise grows until nothing is cut.
            square = min((residual - self.recent[-1]) ** 2 / 2, _STEP_CUT**2 * max(variance, _LEAST_NOISE**2))
            variance += (square - variance) / min(memory, weight + 4)
        fit = dataclasses.replace(self, weight=weight, variance=variance, recent=recent)
        return fit._moved(batch, expected * math.exp(cut), memory)

    def _moved(self, batch: int, seconds: float, memory: int) -> CostFit:
        """Means and sums with one more point; what is known of the slope fades as far as the point tells about it."""
        off_batch, off_seconds = batch - self.batch, seconds - self.seconds
        mean_batch = self.batch + off_batch / self.weight
        mean_seconds = self.seconds + off_seconds / self.weight
        tells = min(1.0, (off_batch / (0.1 * self.batch)) ** 2)
        keep = 1 - tells / memory
        pace = (mean_seconds / self.seconds) ** (1 - tells)
        return dataclasses.replace(
            self,
            batch=mean_batch,
            seconds=mean_seconds,
            spread=self.spread * keep + off_batch * (batch - mean_batch),
            together=self.together * keep * pace + off_batch * (seconds - mean_seconds),
        )

    def _scaled(self, factor: float) -> CostFit:
        """The machine runs at another speed from now on."""
        return dataclasses.replace(
            self,
            weight=min(self.weight, _KNOWN_AFTER_CHANGE),
            seconds=self.seconds * factor,
            together=self.together * factor,
            recent=(),
        )

    def _information(self) -> tuple[tuple[float, float], float]:
        """The information about the slope, as the inverse of its variance: (from the data, times what they say), from
        the prior.
        """
        variance = (self.noise * self.seconds) ** 2
        prior = (_PRIOR_DEVIATION * self.seconds / self.batch) ** -2
        return (self.spread / variance, self.together / variance), prior
