"""The MLflow metrics of a trial: what was measured, what was expected, and how far apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.search.records import TrialRecord

_GIB = 2**30


def expected_metrics(record: TrialRecord) -> dict[str, float]:
    """What the search expected of a trial, and its error where the trial was measured.

    Errors are fractions, positive where the estimate was too high.
    """
    expected: Mapping[str, Any] = record.expected or {}
    step_s, peak = expected.get("step_time_s"), expected.get("peak_bytes")
    measured = record.measurement
    found: dict[str, float] = {}
    if step_s is not None:
        found["expected_step_time_s"] = float(step_s)
        if measured is not None:
            found["step_time_error"] = float(step_s) / measured.step_time_s - 1.0
    if peak is not None:
        found["expected_peak_memory_gib"] = float(peak) / _GIB
        if measured is not None and measured.peak_memory_allocated_bytes:
            allocated = measured.peak_memory_allocated_bytes
            found["peak_memory_error"] = float(peak) / allocated - 1.0
    return found


def rank_series(record: TrialRecord) -> dict[str, list[float]]:
    """Figures by rank, in order of ranks: each is a metric whose step is the rank."""
    if record.measurement is None:
        return {}
    ranks = sorted(record.measurement.ranks, key=lambda one: one.rank)
    return {
        "rank_peak_memory_allocated_gib": [r.peak_memory_allocated_bytes / _GIB for r in ranks],
        "rank_step_time_s": [r.step_time_s for r in ranks],
    }
