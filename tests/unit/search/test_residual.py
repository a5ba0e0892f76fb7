"""The error model against direct computation of the posterior."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from tuner.search import residual
from tuner.search.residual import Evidence, fit


def test_figures_alone_give_the_exact_gaussian_posterior(monkeypatch):
    monkeypatch.setattr(residual, "_SCALES", (1.0,))
    generator = np.random.default_rng(0)
    points = generator.normal(size=(12, 2))
    covariance = np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1))
    seen, new = slice(0, 9), slice(9, 12)
    values = generator.normal(size=9)
    evidence = Evidence(values, np.zeros(9, dtype=np.int64), 0.1)
    posterior = fit(covariance[seen, seen], evidence)
    inverse = np.linalg.inv(covariance[seen, seen] + 0.01 * np.eye(9))
    cross = covariance[new, seen]
    np.testing.assert_allclose(posterior.mean(cross), cross @ inverse @ values, rtol=1e-6)
    exact = covariance[new, new] - cross @ inverse @ cross.T
    np.testing.assert_allclose(posterior.covariance(cross, covariance[new, new]), exact, atol=1e-9)
    np.testing.assert_allclose(
        posterior.variance(cross, np.diag(covariance)[new]), np.diag(exact), atol=1e-9
    )


@pytest.mark.parametrize(("bound", "sign"), [(0.3, 1), (0.3, -1), (-1.5, -1)])
def test_a_bound_gives_the_mode_and_curvature_of_the_true_posterior(monkeypatch, bound, sign):
    monkeypatch.setattr(residual, "_SCALES", (1.0,))
    posterior = fit(np.array([[1.0]]), Evidence(np.array([bound]), np.array([sign]), 0.5))

    def loss(x: float) -> float:
        return -norm.logpdf(x) - norm.logcdf(sign * (x - bound) / 0.5)

    mode = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).x
    step = 1e-4
    curvature = (loss(mode + step) - 2 * loss(mode) + loss(mode - step)) / step**2
    assert posterior.mean(np.array([[1.0]]))[0] == pytest.approx(mode, abs=1e-6)
    variance = posterior.variance(np.array([[1.0]]), np.array([1.0]))[0]
    assert variance == pytest.approx(1 / curvature, rel=1e-4)


def test_larger_errors_than_believed_widen_the_prior():
    covariance = np.eye(6)
    signs = np.zeros(6, dtype=np.int64)
    small = fit(covariance, Evidence(np.full(6, 0.2), signs, 0.01))
    large = fit(covariance, Evidence(np.full(6, 4.0), signs, 0.01))
    assert small.scale < 1 < large.scale
