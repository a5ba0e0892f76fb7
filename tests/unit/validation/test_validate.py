"""Comparing rows with estimates, with estimates given."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tuner.validation import validate
from tuner.validation.conversion import launch_of
from tuner.validation.published import measured_memory, read_rows
from tuner.validation.step_times import TimedRow, TimeValidation
from tuner.validation.validate import ranks_of

validate_memory = partial(validate, compare_times=lambda rows: TimeValidation((), ()))

DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "published_memory.jsonl.gz"


def rows(*prefixes: str, limit: int = 3) -> list[dict]:
    chosen: list[dict] = []
    for prefix in prefixes:
        chosen += [row for row in read_rows(DATA) if row["id"].startswith(prefix)][:limit]
    return chosen


def written(path: Path, chosen: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return path


class Estimates:
    """Ten per cent above what the row measured; remembers what it was asked."""

    def __init__(self, chosen: list[dict], fits: bool = True) -> None:
        self.fits = fits
        self.asked: list[tuple[str, list[int]]] = []
        self.peaks = {}
        for row in chosen:
            measured = measured_memory(row)
            assert measured is not None
            self.peaks[json.dumps(launch_of(row).to_json(), default=str)] = measured.allocated_bytes

    def __call__(self, launch, ranks):
        key = json.dumps(launch.to_json(), default=str)
        self.asked.append((key, ranks))
        peak = round(1.1 * (self.peaks[key] or 1))
        return {
            "fits": self.fits,
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": peak,
            "ranks": [{"static_bytes": peak // 2}],
            "memory_fit": {"cause": None if self.fits else "capacity"},
        }


def test_errors_are_summarised_by_source(tmp_path):
    chosen = rows("mcore-golden", "simumax")
    document = validate_memory(
        written(tmp_path / "rows.jsonl", chosen), estimator=Estimates(chosen)
    )
    assert document["memory"]["n"] == 6
    assert set(document["memory"]["by_source"]) == {"mcore-golden", "simumax"}
    assert document["time"]["n"] == 0
    assert {row["id"] for row in document["rows"]} == {row["id"] for row in chosen}
    assert all(row["err"] > 0 for row in document["rows"])
    assert document["oom"]["balanced_accuracy"] == 1.0


def test_rows_that_ran_but_are_called_out_of_memory_are_listed(tmp_path):
    chosen = rows("simumax")
    estimates = Estimates(chosen, fits=False)
    document = validate_memory(written(tmp_path / "rows.jsonl", chosen), estimator=estimates)
    assert document["oom"]["false_oom"] == [row["id"] for row in chosen]
    assert document["rows"][0]["cause"] == "capacity"


def test_rows_that_cannot_be_modelled_are_listed_with_the_reason(tmp_path):
    chosen = rows("titan", limit=1)
    document = validate_memory(written(tmp_path / "rows.jsonl", chosen), estimator=Estimates([]))
    assert document["rows"] == []
    assert document["skipped"][0]["id"] == chosen[0]["id"]
    assert "torchtitan" in document["skipped"][0]["reason"]


def test_equal_launches_are_estimated_once(tmp_path):
    row = rows("simumax", limit=1)[0]
    estimates = Estimates([row])
    twice = [row, row | {"id": "simumax-9999"}]
    document = validate_memory(written(tmp_path / "rows.jsonl", twice), estimator=estimates)
    assert len(estimates.asked) == 1
    assert document["memory"]["n"] == 2


def test_compared_rows_are_written_one_a_line(tmp_path):
    chosen = rows("simumax")
    out = tmp_path / "out.jsonl"
    document = validate_memory(
        written(tmp_path / "rows.jsonl", chosen), jsonl_out=out, estimator=Estimates(chosen)
    )
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines == json.loads(json.dumps(document["rows"]))


def test_the_last_rank_answers_for_functional_tests():
    row = next(r for r in rows("mcore-golden", limit=300) if "memory_speed" in r["source"])
    measured = measured_memory(row)
    assert measured is not None
    assert ranks_of(launch_of(row), measured) == [7]


def test_every_stage_that_can_hold_the_peak_answers_for_the_largest_rank():
    row = next(r for r in rows("simumax", limit=30) if "pp2" in r["source"])
    measured = measured_memory(row)
    assert measured is not None
    assert ranks_of(launch_of(row), measured) == [0, 7]


def test_times_join_the_rows_of_memory_and_have_a_summary_of_their_own(tmp_path):
    chosen = rows("simumax", limit=2)
    times = TimeValidation(
        (TimedRow(chosen[0]["id"], "simumax", 2.0, 2.2), TimedRow("card-1", "card", 1.0, 0.9)),
        (("card-2", "too little is published"),),
    )
    document = validate(
        written(tmp_path / "rows.jsonl", chosen),
        estimator=Estimates(chosen),
        compare_times=lambda rows: times,
    )
    assert document["time"]["n"] == 2
    assert round(document["time"]["by_source"]["card"]["max_abs_err"], 6) == 0.1
    by_id = {row["id"]: row for row in document["rows"]}
    assert by_id[chosen[0]["id"]]["figure"] == "peak_allocated_bytes"
    assert round(by_id[chosen[0]["id"]]["errors"]["step_time_s"], 6) == 0.1
    assert "step_time_s" not in by_id[chosen[1]["id"]]["errors"]
    assert round(by_id["card-1"]["err"], 6) == -0.1
    assert {"id": "card-2", "reason": "too little is published"} in document["skipped"]
