"""Dry runs against measured GPUs: a few published rows of different kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.validation import validate
from tuner.validation.published import read_rows

DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "published_memory.jsonl.gz"

ROWS = {
    # 7B GPT, PP4 VPP8, last rank, with static bytes; Llama 70B (12 layers) TP8, largest rank
    "mcore-golden-0009": 0.01,
    "simumax-0027": 0.01,
}


@pytest.mark.slow
@pytest.mark.parametrize("identity", sorted(ROWS))
def test_the_estimate_meets_the_measurement(identity, tmp_path):
    path = tmp_path / "row.jsonl"
    row = next(row for row in read_rows(DATA) if row["id"] == identity)
    path.write_text(json.dumps(row), encoding="utf-8")
    document = validate(path)
    assert document["skipped"] == []
    errors = document["rows"][0]["errors"]
    assert abs(errors["peak_allocated_bytes"]) < ROWS[identity]
    assert abs(errors.get("static_bytes", 0.0)) < 0.01
    assert abs(errors.get("peak_reserved_bytes", 0.0)) < 0.05
    assert document["oom"]["false_oom"] == []
