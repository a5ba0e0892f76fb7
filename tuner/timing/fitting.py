"""Fit the rates of a machine to measured times, starting from what is believed of them.

Least squares of log times with a prior on the logarithms of the rates, so that few measurements
move only the rates they speak of. One run that went wrong does not drag the rest along: residuals
follow Student's t distribution (Lange et al. 1989), under which those far out count little.
Uncertainties are those of the linearised posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.timing.calibration import NAMES, Calibration
from tuner.timing.rates import HIGHEST, Rates

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Values = NDArray[np.float64]

Predict = Callable[[Rates], "ArrayLike"]
"""Seconds of each measured thing by the model, `[measurement]`, under some rates."""

_STEP = 1e-3
"""Relative change of a rate that derivatives are taken over."""

_NEAR = 0.25
"""Change of a logarithm over which derivatives are taken to stay the same."""

_UNHEARD = 2e-4
"""Change of every measurement, by a rate's own spread, below which the rate is left alone."""

_ITERATIONS = 20
_SETTLED = 4e-3
_FREEDOM = 4.0
"""Degrees of freedom of residuals: the fewer, the less those far out count."""

_BELIEF = 4.0
"""How many measurements the believed residual spread is worth when it is estimated anew."""

_SMALLEST_SPREAD = 1e-3


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration and how it meets the measurements it was made from.

    `residuals` `[measurement]`: logarithm of measured over predicted time.
    """

    calibration: Calibration
    residuals: Values


def fit(
    prior: Calibration,
    predict: Predict,
    measured_s: ArrayLike,
    *,
    parameters: Sequence[str] = NAMES,
) -> Fit:
    """The calibration that measurements make of a prior.

    `parameters` are those that may move. Raises ValueError for times that are not positive.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    if not len(measured):
        return Fit(prior, measured)
    if not (measured > 0).all():
        raise ValueError("measured times must be positive")
    problem = _Problem(prior, predict, np.log(measured), parameters)
    start = prior.logarithms()
    position, spread = start.copy(), prior.residual_spread
    for _ in range(_ITERATIONS):
        moved, spread = problem.improved(position, spread)
        change = float(np.abs(moved - position).max())
        position = moved
        if change < _SETTLED:
            break
    residuals = problem.residuals(position)
    covariance = problem.posterior(position, spread)
    calibration = prior.moved(
        position,
        covariance,
        residual_spread=spread,
        measurements=prior.measurements + len(measured),
        source="fitted",
    )
    return Fit(calibration, residuals)


class _Problem:
    """Log times, their derivatives, and the prior."""

    def __init__(
        self,
        prior: Calibration,
        predict: Predict,
        measured: Values,
        parameters: Sequence[str],
    ) -> None:
        self.prior, self.predict, self.measured = prior, predict, measured
        self.free = np.array([NAMES.index(name) for name in parameters], dtype=int)
        self.start = prior.logarithms()
        self.precision = np.linalg.inv(prior.covariance[np.ix_(self.free, self.free)])
        self.highest = np.log([HIGHEST.get(name, np.inf) for name in NAMES])
        self._slopes: tuple[Values, Values] | None = None
        self._silent = np.zeros(len(self.free), dtype=bool)

    def predicted(self, position: Values) -> Values:
        values = dict(zip(NAMES, np.exp(position).tolist(), strict=True))
        unmoved = position == self.start
        for index in np.flatnonzero(unmoved):
            values[NAMES[index]] = getattr(self.prior.rates, NAMES[index])
        rates = self.prior.rates.with_values(values)
        logarithms: Values = np.log(np.asarray(self.predict(rates), dtype=np.float64))
        return logarithms

    def residuals(self, position: Values) -> Values:
        return self.measured - self.predicted(position)

    def slopes(self, position: Values, here: Values) -> Values:
        """Derivatives of log times by log rates, `[measurement, free parameter]`.

        They change slowly with the rates: those of a position near by are taken again.
        """
        if self._slopes is not None and np.abs(self._slopes[0] - position).max() < _NEAR:
            return self._slopes[1]
        columns = []
        for place, index in enumerate(self.free):
            if self._silent[place]:
                columns.append(np.zeros_like(here))
                continue
            aside = position.copy()
            step = -_STEP if position[index] + _STEP > self.highest[index] else _STEP
            aside[index] += step
            columns.append((self.predicted(aside) - here) / step)
        found = np.stack(columns, axis=1)
        spread = np.sqrt(np.diag(self.prior.covariance))[self.free]
        if self._slopes is None and len(here):
            self._silent = np.abs(found).max(axis=0) * spread < _UNHEARD
        self._slopes = position.copy(), found
        return found

    def improved(self, position: Values, spread: float) -> tuple[Values, float]:
        """One damped Gauss-Newton step, and the spread of residuals it starts from."""
        here = self.predicted(position)
        residuals = self.measured - here
        weights = _weights(residuals, spread)
        slopes = self.slopes(position, here)
        spread = self._spread(residuals, weights)
        pull = self.precision @ (self.start - position)[self.free]
        gradient = slopes.T @ (weights * residuals) / spread**2 + pull
        curvature = slopes.T @ (weights[:, None] * slopes) / spread**2 + self.precision
        direction = np.linalg.solve(curvature, gradient)
        best, cost = position, self._cost(position, residuals, spread)
        for scale in (1.0, 0.5, 0.25, 0.1):
            trial = position.copy()
            trial[self.free] += scale * direction
            trial = np.minimum(trial, self.highest)
            lower = self._cost(trial, self.residuals(trial), spread)
            if lower < cost:
                best = trial
                break
        return best, spread

    def posterior(self, position: Values, spread: float) -> Values:
        """Covariance of all rates after the measurements."""
        here = self.predicted(position)
        slopes = self.slopes(position, here)
        weights = _weights(self.measured - here, spread)
        curvature = slopes.T @ (weights[:, None] * slopes) / spread**2 + self.precision
        covariance = self.prior.covariance.copy()
        covariance[np.ix_(self.free, self.free)] = np.linalg.inv(curvature)
        return covariance

    def _spread(self, residuals: Values, weights: Values) -> float:
        believed = _BELIEF * self.prior.residual_spread**2
        found = float((weights * residuals**2).sum())
        return max(_SMALLEST_SPREAD, ((found + believed) / (len(residuals) + _BELIEF)) ** 0.5)

    def _cost(self, position: Values, residuals: Values, spread: float) -> float:
        losses = (_FREEDOM + 1) * np.log1p((residuals / spread) ** 2 / _FREEDOM)
        away = (position - self.start)[self.free]
        return float(losses.sum() + away @ self.precision @ away)


def _weights(residuals: Values, spread: float) -> Values:
    """How much each measurement counts."""
    weights: Values = (_FREEDOM + 1) / (_FREEDOM + (residuals / spread) ** 2)
    return weights


def prediction_spread(calibration: Calibration, predict: Predict) -> Values:
    """Relative uncertainty of predictions: one standard deviation of their logarithm.

    From the rates, as far as predictions depend on them, and from the residual spread.
    """
    nothing = np.zeros(0)
    problem = _Problem(calibration, predict, nothing, NAMES)
    position = calibration.logarithms()
    slopes = problem.slopes(position, problem.predicted(position))
    variance = np.einsum("mp,pq,mq->m", slopes, calibration.covariance, slopes)
    spread: Values = np.sqrt(variance + calibration.residual_spread**2)
    return spread


def refine(calibration: Calibration, predict: Predict, measured_s: ArrayLike) -> Calibration:
    """The calibration after further measurements: what it knew is the prior of a new fit."""
    found = fit(calibration, predict, measured_s).calibration
    return replace(found, source="refined")
