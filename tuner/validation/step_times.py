"""The time part of `tuner validate`: estimated against published step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import InputError
from tuner.validation.published import source_of
from tuner.validation.statistics import relative_error, summary_by

FIGURE = "step_time_s"


@dataclass(frozen=True, slots=True)
class TimedRow:
    """Seconds of a step, as published and as estimated with the packaged calibration."""

    id: str
    source: str
    measured_s: float
    estimated_s: float

    @property
    def error(self) -> float:
        """Positive where the estimate is too slow."""
        return relative_error(self.estimated_s, self.measured_s)

    def to_json(self) -> dict[str, Any]:
        """The row of the document where nothing else of it was published."""
        return {
            "id": self.id,
            "source": self.source,
            "figure": FIGURE,
            "measured": self.measured_s,
            "estimated": self.estimated_s,
            "err": self.error,
            "errors": {FIGURE: self.error},
        }


@dataclass(frozen=True, slots=True)
class TimeValidation:
    """Rows whose time was compared, and (id, reason) of those with a time that could not be."""

    rows: tuple[TimedRow, ...]
    skipped: tuple[tuple[str, str], ...]

    def summary(self) -> dict[str, Any]:
        """The errors over all rows and by source."""
        return summary_by((row.source, row.error) for row in self.rows)

    def joined(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows of other figures with the error of their time, and the rows that have only that."""
        timed = {row.id: row for row in self.rows}
        found: list[dict[str, Any]] = []
        for row in rows:
            mine = timed.pop(row["id"], None)
            errors = dict(row.get("errors", {})) | ({FIGURE: mine.error} if mine else {})
            only = mine.to_json() if mine is not None and "figure" not in row else {}
            found.append(only | dict(row) | ({"errors": errors} if errors else {}))
        return found + [row.to_json() for row in timed.values()]


def compare_times(rows: Iterable[Mapping[str, Any]]) -> TimeValidation:
    """Estimate the step time of every row that publishes one and can be modelled."""
    import numpy as np

    from tuner.memory.worker_pool import DryRunError
    from tuner.timing.observations import observation_of, predictor
    from tuner.timing.shipped import shipped_calibration

    timed: list[TimedRow] = []
    skipped: list[tuple[str, str]] = []
    for row in rows:
        if not any(row["measured"].get(name) for name in _TIMES):
            continue
        try:
            one = observation_of(row)
            calibration = shipped_calibration(one.gpu, one.precision)
            seconds = float(np.asarray(predictor([one], calibration)(calibration.rates))[0])
        except (InputError, DryRunError) as reason:
            skipped.append((row["id"], str(reason)))
            continue
        timed.append(TimedRow(row["id"], source_of(row), one.step_time_s, seconds))
    return TimeValidation(tuple(timed), tuple(skipped))


_TIMES = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu")
