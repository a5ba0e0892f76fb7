"""The residual engine behind a study, and Optuna's samplers behind the same checker."""

from pathlib import Path

import optuna
import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult
from tuner.search.engine import Engine, TrialCosts
from tuner.search.estimates import no_estimates
from tuner.search.records import Rejection
from tuner.search.samplers import sampler_names
from tuner.search.space import parse_space
from tuner.search.study import TuningStudy, open_study

SPACE = parse_space(
    {
        "axes": {
            "tensor_model_parallel_size": [1, 2, 3, 4],
            "micro_batch_size": [1, 2, 4],
            "recompute_granularity": [None, "selective"],
            "recompute_modules": {
                "values": [["mlp"]],
                "when": {"recompute_granularity": "selective"},
            },
        }
    },
    where="space",
)
POINTS = [Candidate.from_flat(flat) for flat in SPACE.enumerate()]
VALID = [c for c in POINTS if c.tensor_model_parallel_size != 3]


def no_three(candidate: Candidate) -> Rejection | None:
    if candidate.tensor_model_parallel_size == 3:
        return Rejection("P10", "4 ranks are no multiple of TP 3")
    return None


def result_of(candidate: Candidate) -> TrialResult:
    time = 1.0 + 0.3 * (candidate.recompute_granularity is not None)
    time += 0.2 * candidate.tensor_model_parallel_size + 0.5 / candidate.micro_batch_size
    peak = 500 * candidate.micro_batch_size // candidate.tensor_model_parallel_size
    figures = Measurement(
        step_time_s=time,
        step_time_spread_s=0.0,
        tokens_per_s_per_gpu=10 / time,
        tflops_per_gpu=1 / time,
        peak_memory_allocated_bytes=peak,
        peak_memory_reserved_bytes=None,
        losses=(2.0,),
        step_times_s=(time,),
        ranks=(RankMeasurement(0, time, peak),),
    )
    fits = peak <= 1000
    return TrialResult(Outcome.COMPLETED if fits else Outcome.OOM, "", figures, 1.0)


def opened(url: str, sampler: str = "residual", candidates=tuple(POINTS)) -> TuningStudy:
    engine = Engine(
        candidates, no_estimates, limit_bytes=1000, costs=TrialCosts(lambda candidate: 4)
    )
    return open_study(
        url,
        "test",
        SPACE,
        no_three,
        metric="tflops_per_gpu",
        memory_limit_bytes=1000,
        sampler=sampler,
        engine=engine if sampler == "residual" else None,
    )


def run(study: TuningStudy, trials: int) -> list[str]:
    keys = []
    for _ in range(trials):
        proposal = study.ask()
        if proposal is None:
            break
        keys.append(proposal.candidate.key)
        study.tell(proposal.number, result_of(proposal.candidate))
    return keys


def test_the_engine_proposes_every_valid_candidate_once_and_only_proved_ones_are_left(tmp_path):
    study = opened(f"sqlite:///{tmp_path}/study.db")
    keys = run(study, 100)
    left = {c.key for c in VALID} - set(keys)
    assert len(keys) == len(set(keys))
    by_key = {c.key: c for c in VALID}
    # Only what provably needs more than an out-of-memory run is never launched.
    too_large = {k for k in left if result_of(by_key[k]).outcome is Outcome.OOM}
    assert left == too_large
    assert study.rejected() == {"P10": sum(c.tensor_model_parallel_size == 3 for c in POINTS)}


def test_the_same_data_give_the_same_proposals_and_a_reopened_study_goes_on(tmp_path: Path):
    whole = run(opened(f"sqlite:///{tmp_path}/a.db"), 8)
    first = run(opened(f"sqlite:///{tmp_path}/b.db"), 4)
    assert first + run(opened(f"sqlite:///{tmp_path}/b.db"), 4) == whole


@pytest.mark.parametrize("url", ["sqlite:///{}/study.db", "{}/study.journal"])
def test_two_drivers_of_one_study_never_run_one_candidate_twice(tmp_path: Path, url: str):
    url = url.format(tmp_path)
    drivers = [opened(url, candidates=VALID), opened(url, candidates=VALID)]
    proposals = [(driver, driver.ask()) for _ in range(4) for driver in drivers]
    keys = [proposal.candidate.key for _, proposal in proposals]
    assert len(set(keys)) == 8
    for driver, proposal in proposals:
        driver.tell(proposal.number, result_of(proposal.candidate))
    shown = [[(r.number, r.outcome) for r in driver.records()] for driver in drivers]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 8


def test_what_is_expected_of_a_trial_stands_in_its_record(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/study.db"
    proposal = opened(url).ask()
    record = opened(url).records()[0]
    assert record.expected == proposal.expected
    assert 0 <= record.expected["fit_probability"] <= 1


@pytest.mark.parametrize("name", [n for n in sampler_names() if n not in ("residual", "cmaes")])
def test_optuna_samplers_run_behind_the_checker(tmp_path: Path, name: str):
    study = opened("sqlite://", name)
    keys = run(study, 7)
    assert len(keys) == len(set(keys)) == 7
    assert set(keys) <= {c.key for c in VALID}


def test_numbers_are_offered_to_samplers_that_model_only_numbers(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/study.db"
    study = opened(url, "qmc")
    study.enqueue({"tensor_model_parallel_size": 4, "micro_batch_size": 2})
    assert study.ask().candidate.tensor_model_parallel_size == 4
    trial = optuna.load_study(study_name="test", storage=url).trials[0]
    assert trial.params["tensor_model_parallel_size#"] == 3


def test_an_unknown_sampler_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="nsga"):
        opened("sqlite://", "nsgaii")
