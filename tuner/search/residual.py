"""A Gaussian process on log errors of estimates, told of figures and of bounds.

A measured figure tells the error itself. "Out of memory" only tells that memory was above the
limit, and a run that fits without a reported peak that it was below. Both kinds of knowledge enter
as likelihoods of one latent error (Gaussian, or a normal distribution function), and the posterior
is Laplace's approximation (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
algorithms 3.1 and 3.2). It is exact where every observation is a figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Matrix = NDArray[np.float64]

_SCALES = (0.35, 0.6, 1.0, 1.7, 3.0)
"""Factors on the standard deviations of the prior; the likeliest one is taken."""
_SCALE_SPREAD = 0.5  # of the log of that factor, as a normal prior on it
_SCALED_BY = 48
_ITERATIONS = 30
_CONVERGED = 1e-6


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of log errors, arrays `[observation]`.

    Where `sign` is 0 the error is `value`, up to `noise`. Where it is +1 (-1) the error is only
    known to be above (below) `value`, up to `noise`.
    """

    value: Vector
    sign: NDArray[np.int64]
    noise: float

    def __len__(self) -> int:
        return len(self.value)

    def log_likelihood(self, latent: Vector) -> tuple[float, Vector, Vector]:
        """Its value, gradient and negative curvature at `latent`."""
        import numpy as np
        from scipy.special import log_ndtr

        scaled = (latent - self.value) / self.noise
        exact = self.sign == 0
        side = np.where(exact, 1.0, self.sign)
        inside = side * scaled
        log_mass = log_ndtr(inside)
        ratio = np.exp(-0.5 * inside**2 - 0.5 * math.log(2 * math.pi) - log_mass)
        gradient = np.where(exact, -scaled, side * ratio) / self.noise
        curvature = np.where(exact, 1.0, ratio * (ratio + inside)) / self.noise**2
        gaussian = -0.5 * scaled**2 - math.log(self.noise * math.sqrt(2 * math.pi))
        return float(np.where(exact, gaussian, log_mass).sum()), gradient, np.maximum(curvature, 0)


@dataclass(frozen=True, slots=True)
class Posterior:
    """The errors after the evidence.

    `weights` times the covariance with the observations is the mean; `factor` and `root` give the
    variance. `scale` multiplies the prior's standard deviations.
    """

    weights: Vector
    factor: Matrix
    root: Vector
    scale: float
    log_evidence: float

    def mean(self, cross: Matrix) -> Vector:
        """Mean errors of rows whose prior covariances with the observations are `cross`."""
        result: Vector = self.scale**2 * (cross @ self.weights)
        return result

    def variance(self, cross: Matrix, prior: Vector) -> Vector:
        """Variances of the errors of these rows; `prior` holds those without evidence."""
        import numpy as np

        reduced = self._whitened(cross)
        result: Vector = np.maximum(self.scale**2 * prior - (reduced**2).sum(axis=0), 1e-12)
        return result

    def covariance(self, cross: Matrix, prior: Matrix) -> Matrix:
        """Covariances of the errors among these rows; `prior` holds those without evidence."""
        reduced = self._whitened(cross)
        result: Matrix = self.scale**2 * prior - reduced.T @ reduced
        return result

    def _whitened(self, cross: Matrix) -> Matrix:
        from scipy.linalg import solve_triangular

        scaled = self.root[:, None] * (self.scale**2 * cross.T)
        result: Matrix = solve_triangular(self.factor, scaled, lower=True, check_finite=False)
        return result


def fit(covariance: Matrix, evidence: Evidence) -> Posterior:
    """The posterior given prior covariances between the observations.

    The scale of the prior is chosen by the evidence, weighed with a prior around 1; of many
    observations some, evenly taken, decide it.
    """
    import numpy as np

    few = np.unique(np.linspace(0, len(evidence) - 1, _SCALED_BY).astype(np.int64))
    some = Evidence(evidence.value[few], evidence.sign[few], evidence.noise)
    part = covariance[np.ix_(few, few)]
    fitted = [_laplace(part, some, scale) for scale in _SCALES]
    best = max(fitted, key=lambda posterior: posterior.log_evidence)
    return best if len(few) == len(evidence) else _laplace(covariance, evidence, best.scale)


def _laplace(covariance: Matrix, evidence: Evidence, scale: float) -> Posterior:
    import numpy as np
    from scipy.linalg import cho_solve

    count = len(evidence)
    prior = scale**2 * covariance
    latent, weights = np.zeros(count), np.zeros(count)
    value, gradient, curvature = evidence.log_likelihood(latent)
    reached, linear = -np.inf, not evidence.sign.any()
    root, factor = _factored(prior, curvature)
    for _ in range(_ITERATIONS):
        right = curvature * latent + gradient
        solved = cho_solve((factor, True), root * (prior @ right), check_finite=False)
        step = (right - root * solved) - weights
        weights, latent, reached, change = _line_search(
            prior, evidence, weights, step, float(reached)
        )
        value, gradient, curvature = evidence.log_likelihood(latent)
        if linear:  # its curvature is the same everywhere: the first step ends at the top
            break
        root, factor = _factored(prior, curvature)
        if change < _CONVERGED:
            break
    log_evidence = value - 0.5 * float(weights @ latent) - float(np.log(np.diag(factor)).sum())
    log_evidence -= 0.5 * (math.log(scale) / _SCALE_SPREAD) ** 2
    return Posterior(gradient, factor, root, scale, log_evidence)


def _factored(prior: Matrix, curvature: Vector) -> tuple[Vector, Matrix]:
    """The root of the curvature, and the Cholesky factor of the identity plus the prior between
    the two (algorithm 3.1)."""
    import numpy as np
    from scipy.linalg import cholesky

    root = np.sqrt(curvature)
    between = root[:, None] * prior * root[None, :]
    between.flat[:: len(root) + 1] += 1.0
    return root, cholesky(between, lower=True, overwrite_a=True, check_finite=False)


def _line_search(
    prior: Matrix, evidence: Evidence, weights: Vector, step: Vector, reached: float
) -> tuple[Vector, Vector, float, float]:
    """The longest of halved steps that does not lower the log posterior; how much it rose."""
    length = 1.0
    for _ in range(12):
        tried = weights + length * step
        latent = prior @ tried
        value = evidence.log_likelihood(latent)[0] - 0.5 * float(tried @ latent)
        if value >= reached:
            return tried, latent, value, value - reached
        length /= 2
    return weights, prior @ weights, reached, 0.0
