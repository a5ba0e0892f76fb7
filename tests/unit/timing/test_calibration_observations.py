"""Measured steps from files and studies, and the command that fits rates to them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tuner.commands.calibrate import run_fit
from tuner.errors import InputError
from tuner.job import find_job
from tuner.measurement import Measurement, Outcome, TrialResult, TrialSpec
from tuner.models import get_model
from tuner.study_dir import create_study_directory
from tuner.timing.calibration import Calibration, starting_rates
from tuner.timing.observations import Observation, predictor, read_observations, step_time_of
from tuner.timing.refine import refined
from tuner.timing.shipped import shipped_calibration
from tuner.timing.software import age_years


def _spec(**config) -> TrialSpec:
    model = get_model("tiny-gqa").to_flat()
    return TrialSpec(model, {"micro_batch_size": 1} | config, 2, 64, 4, precision="bf16")


def _study(path: Path) -> Path:
    directory = create_study_directory(path / "study", find_job(Path("cpu_quickstart")))
    step = Measurement(0.5, 0.0, 1.0, 1.0, 1, None, (), (0.5,), ())
    for number, result in enumerate(
        [TrialResult(Outcome.COMPLETED, "", step), TrialResult(Outcome.OOM, "too large", None)]
    ):
        folder = directory.trial_path(number)
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(_spec().to_json()))
        (folder / "result.json").write_text(json.dumps(result.to_json()))
    return directory.path


def test_completed_trials_of_a_study_are_observations(tmp_path):
    found = read_observations(_study(tmp_path))
    assert [(one.gpu, one.precision, one.step_time_s) for one in found.usable] == [
        ("cpu", "bf16", 0.5)
    ]
    assert found.skipped == (("0001", "ended as oom"),)


def test_step_times_of_rows_are_stated_or_follow_from_token_rates():
    sizes = {"gbs": 128, "seq_length": 4096, "num_gpus": 64}
    assert step_time_of({"measured": {"step_time_ms": 1500.0}}) == 1.5
    rate = {"measured": {"tokens_per_s_per_gpu": 4096.0}} | sizes
    assert step_time_of(rate) == pytest.approx(2.0)
    assert step_time_of({"measured": {}} | sizes) is None


def test_steps_of_a_cpu_need_its_figures(tmp_path):
    with pytest.raises(InputError, match="calibrate measure"):
        run_fit(_study(tmp_path), None, None, None, None, as_json=True)


def test_a_fit_needs_one_gpu_and_precision(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    assert run_fit(rows, None, None, None, None, as_json=True) == 1


def test_predictions_follow_the_rates():
    document = dict(Observation.of_trial(_spec(), 1.0, gpu="h100").document)
    document["config"] = {"tensor_model_parallel_size": 2, "micro_batch_size": 1}
    prior = Calibration.prior("H100-SXM-80GB", "bf16", starting_rates())
    predict = predictor([Observation("one", document, 1.0)], prior)
    before = predict(prior.rates)
    slower = predict(prior.rates.with_values({"host_kernel_s": prior.rates.host_kernel_s * 4}))
    assert np.isfinite(before).all()
    assert slower[0] > 1.5 * before[0] - prior.rates.step_s


def test_a_finished_trial_moves_the_next_prediction_towards_it():
    document = dict(Observation.of_trial(_spec(), 1.0, gpu="h100").document)
    prior = Calibration.prior("H100-SXM-80GB", "bf16", starting_rates())
    before = float(predictor([Observation("one", document, 1.0)], prior)(prior.rates)[0])
    trial = Observation("one", document, 1.5 * before)
    unsupported = Observation("two", document | {"world_size": 0}, 1.0)
    after = refined(prior, [trial, unsupported])
    now = float(predictor([trial], after)(after.rates)[0])
    assert before * 1.2 < now < trial.step_time_s * 1.05
    assert after.measurements == 1
    assert refined(prior, [unsupported]) is prior


@pytest.mark.parametrize(
    ("version", "age"),
    [
        ("commit 067f987df; container 26.08; release v0.6.0", 0.0),
        ("container 26.02.01; release v0.3.1", 5 / 12),
        ("commit 2b8806b94; container 25.11; release v0.2.0", 9 / 12),
        ("repo HEAD 067f987df", 0.0),
        ("None", 0.0),
    ],
)
def test_the_age_of_software_is_that_of_its_container(version, age):
    assert age_years(version) == pytest.approx(age)


def test_older_software_takes_as_much_longer_as_the_rates_say():
    document = {
        "model": get_model("llama3-8b").to_flat(),
        "config": {"micro_batch_size": 1},
        "world_size": 8,
        "seq_length": 4096,
        "global_batch_size": 8,
        "gpu": "h100",
    }
    known = shipped_calibration("h100")
    rates = known.rates.with_values({"older_software": 1.2})
    ages = (0.0, 0.5, 1.0)
    steps = [Observation(str(age), document, 1.0, age) for age in ages]
    new, half, old = predictor(steps, known)(rates)
    assert half / new == pytest.approx(1.2**0.5)
    assert old / new == pytest.approx(1.2)
