"""Calibrations: what measurements do to rates, and their file."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.errors import InputError
from tuner.timing.calibration import NAMES, Calibration, starting_rates
from tuner.timing.fitting import fit, prediction_spread, refine
from tuner.timing.rates import spreads

WORK = np.random.default_rng(1).uniform(0.2, 2.0, (40, 2))


def _predict(rates, work=WORK):
    """Steps of products and of memory traffic, and a fixed time."""
    return work[:, 0] / rates.half_gemm + work[:, 1] / rates.memory + rates.step_s


def _prior():
    return Calibration.prior("h100", "bf16", starting_rates())


def _truth():
    return starting_rates().with_values({"half_gemm": 0.6, "memory": 0.95})


def test_measurements_move_the_rates_they_speak_of():
    measured = _predict(_truth()) * np.exp(np.random.default_rng(2).normal(0, 0.01, 40))
    found = fit(_prior(), _predict, measured).calibration
    assert found.rates.half_gemm == pytest.approx(0.6, rel=0.03)
    assert found.rates.memory == pytest.approx(0.95, rel=0.05)
    assert found.rates.link == starting_rates().link
    spreads, before = found.spreads(), _prior().spreads()
    assert spreads["half_gemm"] < before["half_gemm"] / 3
    assert spreads["link"] == pytest.approx(before["link"])
    assert found.residual_spread < 0.03
    assert found.measurements == 40


def test_shares_stay_below_one():
    found = fit(_prior(), _predict, _predict(starting_rates()) / 10).calibration
    assert found.rates.half_gemm <= 1.0
    assert found.rates.memory <= 1.0


def test_one_failed_run_does_not_move_the_fit():
    measured = _predict(_truth())
    with_outlier = measured.copy()
    with_outlier[7] *= 5
    clean, dirty = (fit(_prior(), _predict, m).calibration.rates for m in (measured, with_outlier))
    assert dirty.half_gemm == pytest.approx(clean.half_gemm, rel=0.03)


def test_refining_trial_by_trial_comes_to_where_one_fit_does():
    measured = _predict(_truth())
    step = _prior()
    errors = []
    for row in range(12):
        work = WORK[row : row + 1]
        unseen = np.log(_predict(step.rates) / measured)
        errors.append(np.abs(unseen).mean())
        step = refine(step, lambda rates, work=work: _predict(rates, work), measured[[row]])
    assert errors[-1] < errors[0] / 4
    assert step.measurements == 12
    whole = fit(_prior(), lambda rates: _predict(rates, WORK[:12]), measured[:12]).calibration
    assert step.rates.half_gemm == pytest.approx(whole.rates.half_gemm, rel=0.05)


def test_error_bars_shrink_with_measurements_and_cover_the_truth():
    found = fit(_prior(), _predict, _predict(_truth())).calibration
    before, after = (prediction_spread(c, _predict) for c in (_prior(), found))
    assert (after < before).all()
    off = np.abs(np.log(_predict(_truth()) / _predict(found.rates)))
    assert (off < 2 * after).all()


def test_files_keep_rates_spreads_and_correlations(tmp_path):
    found = fit(_prior(), _predict, _predict(_truth())).calibration
    found.save(tmp_path / "h100.json")
    again = Calibration.load(tmp_path / "h100.json")
    assert again.rates == found.rates
    assert again.covariance == pytest.approx(found.covariance, abs=1e-5)
    i, j = NAMES.index("half_gemm"), NAMES.index("memory")
    assert found.covariance[i, j] < 0
    assert again.residual_spread == found.residual_spread


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"format": "tuner-calibration/1"}'])
def test_other_files_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.json"):
        Calibration.load(path)


def test_a_file_whose_correlations_contradict_each_other_gives_no_negative_variance() -> None:
    document = Calibration.prior("h100", "bf16", starting_rates()).to_json()
    document["correlations"] = {
        "gemm half_gemm": 0.9,
        "gemm memory": 0.9,
        "half_gemm memory": -0.9,
    }
    covariance = Calibration.from_json(document).covariance
    assert np.linalg.eigvalsh(covariance).min() > -1e-12
    np.testing.assert_allclose(np.diag(covariance), np.array(list(spreads().values())) ** 2)
