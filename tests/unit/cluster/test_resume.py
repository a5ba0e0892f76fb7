"""What a driver that was killed at the wrong moment leaves, and how a study goes on from it."""

import json

import pytest

from tuner.cluster.attempts import finished_result, keep_attempt
from tuner.measurement import Measurement, Outcome, TrialResult
from tuner.search.space import parse_space
from tuner.search.study import open_study

MEASURED = Measurement(0.5, 0.1, 100.0, 2.0, 2**30, None, (3.0,), (0.5,), ())


def a_study(folder):
    space = parse_space({"axes": {"micro_batch_size": [1, 2]}}, where="space")
    url = f"sqlite:///{folder}/study.db"
    metric = {"metric": "tflops_per_gpu", "sampler": "random"}
    return open_study(url, "tuner", space, lambda candidate: None, **metric)


def test_a_trial_whose_end_was_noted_but_not_told_is_not_lost(tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    def die(*arguments, **named):
        raise KilledError

    study = a_study(tmp_path)
    number = study.ask().number
    running = study.ask().number
    monkeypatch.setattr("optuna.Study.tell", die)
    with pytest.raises(KilledError):
        study.tell(number, TrialResult(Outcome.COMPLETED, "", MEASURED, evidence={"node": "n"}))
    monkeypatch.undo()

    resumed = a_study(tmp_path)
    resumed.interrupt_running("the tuner ended", requeue=False)
    ends = {record.number: record for record in resumed.records()}
    assert ends[number].outcome == "completed"
    assert ends[number].measurement == MEASURED
    assert ends[number].evidence == {"node": "n"}
    assert ends[running].outcome == "interrupted"


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [(Outcome.COMPLETED, True), (Outcome.OOM, True), (Outcome.KILLED, False)],
)
def test_only_ends_that_another_run_would_reach_are_taken_over(tmp_path, outcome, kept):
    (tmp_path / "result.json").write_text(json.dumps(TrialResult(outcome).to_json()))
    assert (finished_result(tmp_path) is not None) is kept


def test_an_attempts_files_are_kept_apart_from_the_next_ones(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(TrialResult(Outcome.COMPLETED).to_json()))
    (tmp_path / "logs").mkdir()
    keep_attempt(tmp_path, 1)
    assert finished_result(tmp_path) is None
    assert (tmp_path / "attempt-1" / "logs").is_dir()
    keep_attempt(tmp_path, 2)
    assert (tmp_path / "attempt-1" / "result.json").exists()
