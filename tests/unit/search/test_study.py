"""The study on a real Optuna SQLite storage."""

from pathlib import Path

import optuna
import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult
from tuner.search.records import Rejection, pareto_front
from tuner.search.space import load_space, parse_space
from tuner.search.study import open_study

SPACE = parse_space(
    {
        "axes": {
            "tensor_model_parallel_size": [1, 2, 3, 4],
            "micro_batch_size": [1, 2],
            "recompute_granularity": [None, "selective"],
            "recompute_modules": {
                "values": [["mlp"]],
                "when": {"recompute_granularity": "selective"},
            },
        }
    },
    where="space",
)
VALID_POINTS = 3 * 2 * 2


def no_three(candidate: Candidate) -> Rejection | None:
    if candidate.tensor_model_parallel_size == 3:
        return Rejection("P10", "4 ranks are no multiple of TP 3")
    return None


def opened(folder: Path, **options):
    options.setdefault("sampler", "random")
    return open_study(
        f"sqlite:///{folder}/study.db",
        "test",
        options.pop("space", SPACE),
        options.pop("check", no_three),
        metric="tflops_per_gpu",
        memory_limit_bytes=1000,
        **options,
    )


def measured(tflops: float, peak: int) -> Measurement:
    return Measurement(
        step_time_s=1 / tflops,
        step_time_spread_s=0.0,
        tokens_per_s_per_gpu=tflops * 10,
        tflops_per_gpu=tflops,
        peak_memory_allocated_bytes=peak,
        peak_memory_reserved_bytes=None,
        losses=(2.0, 1.5),
        step_times_s=(1 / tflops,),
        ranks=(RankMeasurement(0, 1 / tflops, peak),),
    )


def run_all(study, budget=1000):
    """Tell every proposal a figure that depends on the candidate alone."""
    launched = []
    while len(launched) < budget and (proposal := study.ask()) is not None:
        launched.append(proposal)
        candidate = proposal.candidate
        peak = 900 if candidate.recompute_granularity else 1100 // candidate.micro_batch_size
        figures = measured(1.0 + candidate.tensor_model_parallel_size, peak)
        outcome = Outcome.COMPLETED if peak <= 1000 else Outcome.OOM
        study.tell(proposal.number, TrialResult(outcome, "", figures, 1.0))
    return launched


def test_every_valid_candidate_is_proposed_once_and_no_other(tmp_path: Path):
    study = opened(tmp_path)
    launched = run_all(study)
    keys = [p.candidate.key for p in launched]
    assert len(keys) == len(set(keys)) == VALID_POINTS
    assert all(p.candidate.tensor_model_parallel_size != 3 for p in launched)
    assert len(study.records()) == VALID_POINTS
    assert study.ask() is None


def test_rejected_candidates_are_recorded_as_pruned_with_their_rule(tmp_path: Path):
    study = opened(tmp_path)
    run_all(study)
    storage = optuna.load_study(study_name="test", storage=f"sqlite:///{tmp_path}/study.db")
    pruned = [t for t in storage.trials if t.state is optuna.trial.TrialState.PRUNED]
    assert pruned
    assert {t.user_attrs["trial"]["rule"] for t in pruned} == {"P10"}
    assert study.rejected() == {"P10": len(pruned)}


def test_best_is_the_best_feasible_trial(tmp_path: Path):
    study = opened(tmp_path)
    run_all(study)
    best = study.best()
    feasible = [r for r in study.records() if r.outcome == "completed"]
    assert best is not None
    assert best.measurement.tflops_per_gpu == max(r.measurement.tflops_per_gpu for r in feasible)
    assert best.measurement.peak_memory_allocated_bytes <= 1000


def test_out_of_memory_violates_the_constraint_by_the_excess(tmp_path: Path):
    study = opened(tmp_path)
    proposal = study.ask()
    study.tell(proposal.number, TrialResult(Outcome.OOM, "too big", measured(9.0, 1000 + 2**30)))
    trial = optuna.load_study(study_name="test", storage=f"sqlite:///{tmp_path}/study.db").trials[0]
    assert trial.state is optuna.trial.TrialState.COMPLETE
    assert trial.constraints == {"memory": pytest.approx(1.0)}
    assert study.best() is None


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.DIVERGED])
def test_a_trial_without_figures_keeps_its_reason_and_is_not_proposed_again(tmp_path, outcome):
    study = opened(tmp_path)
    first = study.ask()
    study.tell(first.number, TrialResult(outcome, "why"))
    assert [(r.outcome, r.reason) for r in study.records()] == [(str(outcome), "why")]
    assert first.candidate.key not in {p.candidate.key for p in run_all(study)}


def test_the_same_seed_gives_the_same_proposals(tmp_path: Path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(
            [p.candidate.key for p in run_all(opened(tmp_path / name, seed=7, sampler="tpe"), 8)]
        )
    assert runs[0] == runs[1]


def test_starting_candidates_come_first_and_must_lie_in_the_space(tmp_path: Path):
    study = opened(tmp_path)
    start = {"tensor_model_parallel_size": 4, "micro_batch_size": 2}
    study.enqueue(start)
    assert study.ask().candidate == Candidate.from_flat(start)
    with pytest.raises(InputError, match="not in the space"):
        study.enqueue({"tensor_model_parallel_size": 5})


def test_a_reopened_study_runs_interrupted_trials_again_and_finished_ones_never(tmp_path: Path):
    study = opened(tmp_path)
    finished = run_all(study, budget=5)
    cut_short = study.ask()
    del study

    again = opened(tmp_path)
    assert again.interrupt_running("killed", requeue=False) == [cut_short.number]
    assert again.requeue_interrupted() == 1
    rest = run_all(again)
    assert rest[0].candidate == cut_short.candidate
    keys = [p.candidate.key for p in finished + rest]
    assert len(keys) == len(set(keys)) == VALID_POINTS
    outcomes = [r.outcome for r in again.records()]
    assert outcomes.count("interrupted") == 1


def test_a_driver_killed_before_a_candidate_is_noted_loses_none_that_was_asked_for(tmp_path: Path):
    study = opened(tmp_path)
    asked_for = study.ask().candidate
    study.enqueue(asked_for.to_flat())  # as a candidate that has to run again
    study._store.ask()  # killed here: the trial runs, and what it is was not written yet
    again = opened(tmp_path)
    again.interrupt_running("killed", requeue=False)
    assert again.ask().candidate == asked_for
    assert {record.outcome for record in again.records()} == {"interrupted", "running"}

    third = opened(tmp_path)
    third._store.ask()  # of a sampler's: nothing was asked for
    fourth = opened(tmp_path)
    fourth.interrupt_running("killed", requeue=False)
    assert not fourth._store.queued
    assert len(fourth.records()) == 2


def test_telling_a_trial_twice_is_refused(tmp_path: Path):
    study = opened(tmp_path)
    proposal = study.ask()
    study.tell(proposal.number, TrialResult(Outcome.CRASHED, "x"))
    with pytest.raises(ValueError, match="not running"):
        study.tell(proposal.number, TrialResult(Outcome.CRASHED, "x"))


def test_an_invalid_space_ends_the_search_instead_of_going_on_for_ever(tmp_path: Path):
    study = opened(tmp_path, check=lambda candidate: Rejection("X", "no"))
    assert study.ask() is None
    assert study.records() == []


def test_results_read_back_from_the_storage_equal_what_was_told(tmp_path: Path):
    study = opened(tmp_path, space=load_space("cpu"))
    proposal = study.ask()
    result = TrialResult(Outcome.COMPLETED, "", measured(3.0, 12345), 4.5)
    study.tell(proposal.number, result)
    record = opened(tmp_path, space=load_space("cpu")).records()[0]
    assert record.measurement == result.measurement
    assert record.candidate == proposal.candidate
    assert record.duration_s == 4.5


def test_the_pareto_front_keeps_what_nothing_beats_in_both(tmp_path: Path):
    study = opened(tmp_path)
    figures = [(1.0, 100), (2.0, 200), (1.5, 300), (3.0, 900), (3.0, 950)]
    for tflops, peak in figures:
        proposal = study.ask()
        study.tell(proposal.number, TrialResult(Outcome.COMPLETED, "", measured(tflops, peak)))
    front = pareto_front(study.records(), "tflops_per_gpu")
    peaks = [r.measurement.peak_memory_allocated_bytes for r in front]
    assert peaks == [100, 200, 900]
