"""Errors of estimates against measurements, and how well an outcome was foreseen.

Errors are fractions, positive where the estimate is too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def relative_error(estimated: float, measured: float) -> float:
    """(estimated - measured) / measured."""
    return estimated / measured - 1.0


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """Count, median, 90th percentile (nearest rank), mean and maximum of the absolute errors."""
    if not errors:
        return {"n": 0, "median_abs_err": None, "p90_abs_err": None, "max_abs_err": None}
    ordered = sorted(abs(error) for error in errors)
    count = len(ordered)
    middle = ordered[(count - 1) // 2], ordered[count // 2]
    return {
        "n": count,
        "median_abs_err": sum(middle) / 2,
        "mean_abs_err": math.fsum(ordered) / count,
        "p90_abs_err": ordered[math.ceil(0.9 * count) - 1],
        "max_abs_err": ordered[-1],
    }


def summary_by(errors: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """`summary` over everything, and under `by_source` of each name."""
    groups: dict[str, list[float]] = {}
    for name, error in errors:
        groups.setdefault(name, []).append(error)
    everything = [error for group in groups.values() for error in group]
    by_source = {name: summary(group) for name, group in sorted(groups.items())}
    return summary(everything) | {"by_source": by_source}


def outcome_summary(outcomes: Mapping[str, tuple[bool, bool]]) -> dict[str, Any]:
    """Balanced accuracy of out-of-memory calls: id to (measured, foreseen), true is OOM.

    `false_oom` ran but were called OOM, `missed_oom` the other way round. The balanced accuracy is
    the mean of the shares of either outcome that were foreseen; with one outcome only, its share.
    """
    false_oom = [name for name, (real, said) in outcomes.items() if said and not real]
    missed = [name for name, (real, said) in outcomes.items() if real and not said]
    failed = sum(real for real, _ in outcomes.values())
    ran = len(outcomes) - failed
    shares = []
    if failed:
        shares.append(1 - len(missed) / failed)
    if ran:
        shares.append(1 - len(false_oom) / ran)
    return {
        "n": len(outcomes),
        "balanced_accuracy": sum(shares) / len(shares) if shares else None,
        "false_oom": false_oom,
        "missed_oom": missed,
    }


def ordered_pairs(
    measured: Mapping[str, float], estimated: Mapping[str, float], *, at_least: float = 0.01
) -> tuple[int, int]:
    """Pairs whose measurements differ by more than `at_least` of the smaller: (right, all)."""
    names = sorted(measured)
    right = total = 0
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            gap = measured[first] - measured[second]
            if abs(gap) <= at_least * min(measured[first], measured[second]):
                continue
            total += 1
            right += (estimated[first] - estimated[second]) * gap > 0
    return right, total
