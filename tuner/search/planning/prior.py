"""Estimates of listed candidates, as the proposals of a study take them."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.candidate import Candidate
from tuner.memory.composition import MEMORY_PARTS
from tuner.search.enumeration import ValidCandidates
from tuner.search.estimates import Estimates
from tuner.search.planning.estimator import TIME_PARTS, SpaceEstimator
from tuner.search.planning.workplace import Workplace
from tuner.timing.rates import Rates


def listed(candidates: Sequence[Candidate]) -> ValidCandidates:
    """Candidates as columns."""
    from tuner.memory.composition import as_columns

    columns = as_columns(candidates)
    values = {name: list(column[0]) for name, column in columns.items()}  # type: ignore[index]
    codes = {name: column[1] for name, column in columns.items()}  # type: ignore[index]
    return ValidCandidates(values, codes, {}, len(candidates))


class ComposedEstimator:
    """An `Estimator` that composes profiles; what is missing of them is measured first."""

    def __init__(self, place: Workplace, *, workers: int | None = None) -> None:
        self._estimator = SpaceEstimator(place, workers=workers)

    def __call__(self, candidates: Sequence[Candidate]) -> Estimates:
        block = listed(candidates)
        self._estimator.measure(self._estimator.needed(block))
        found = self._estimator.estimate(block, beyond_bytes=float("inf"))
        # The limit is a figure of the study; what a candidate's own communicators take is not.
        return Estimates(
            found.step_time_s,
            found.memory_bytes + (found.limit_bytes.max() - found.limit_bytes),
            {name: found.time_parts[:, i] for i, name in enumerate(TIME_PARTS)},
            {name: found.memory_parts[:, i] for i, name in enumerate(MEMORY_PARTS)},
        )

    def sustain(self, rates: Rates) -> None:
        """Time candidates with these rates from now on."""
        self._estimator.sustain(rates)

    def limit_bytes(self, candidates: Sequence[Candidate]) -> float:
        """What PyTorch may allocate on a GPU beside the smallest fixed costs."""
        return float(self._estimator.limits(listed(candidates)).max())
