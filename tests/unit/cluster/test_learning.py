"""A study's trials refine what is believed of its machine, and with it later proposals."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.cluster.prepared import prepare
from tuner.cluster.proposals import proposals_of
from tuner.job import parse_job
from tuner.measurement import Measurement, Outcome
from tuner.search.records import TrialRecord

JOB = {
    "name": "learning",
    "model": "tiny-dense",
    "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": 4},
    "workload": {"seq_length": 256, "global_batch_size": 16},
    "trainable": {"name": "simulated"},
    "space": {"axes": {"micro_batch_size": [1, 2], "pipeline_model_parallel_size": [1, 2]}},
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_TUNER_CACHE", str(tmp_path_factory.mktemp("profiles")))
        yield


def test_completed_trials_refine_estimates_once_and_a_resumed_study_takes_them_up(
    tmp_path: Path,
) -> None:
    prepared = prepare(parse_job(JOB, where="here"), where="here", base_folder=tmp_path)
    proposals = proposals_of(prepared, tmp_path)
    engine = proposals.engine
    assert engine is not None
    assert proposals.calibration is None
    before = engine.pool.estimates.step_time_s.copy()
    slower = 1.5 * float(before[0])
    measured = Measurement(slower, 0.0, 1.0, 1.0, 10**9, None, (), (slower,), ())
    candidate = engine.pool.table.candidates[0]
    trial = TrialRecord(0, candidate, Outcome.COMPLETED.value, "", 1.0, measured)

    proposals.learn([trial])
    after = engine.pool.estimates.step_time_s.copy()
    proposals.learn([trial])

    assert (after > before).all()
    assert abs(float(after[0]) - slower) < abs(float(before[0]) - slower)
    assert (engine.pool.estimates.step_time_s == after).all()
    resumed = proposals_of(prepared, tmp_path)
    assert resumed.calibration == tmp_path / "calibration.json"
    assert resumed.engine is not None
    assert resumed.engine.pool.estimates.step_time_s == pytest.approx(after)
