"""The documents exchanged with trainables survive their JSON form."""

import json
import os
from pathlib import Path

import pytest

from tuner.measurement import (
    Measurement,
    Outcome,
    RankMeasurement,
    TrialResult,
    TrialSpec,
    write_json_atomically,
)


def test_a_result_comes_back_from_json_as_it_was():
    measurement = Measurement(
        0.5, 0.1, 100.0, 2.0, 2**33, None, (3.0, 2.5), (0.5, 0.6), (RankMeasurement(0, 0.5, 7),)
    )
    result = TrialResult(Outcome.OOM, "peak above limit", measurement, 12.0)
    assert TrialResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_a_spec_comes_back_from_json_as_it_was():
    spec = TrialSpec({"num_layers": 2}, {"micro_batch_size": 1}, 4, 128, 8, memory_limit_bytes=5)
    assert TrialSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "x.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomically(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]
