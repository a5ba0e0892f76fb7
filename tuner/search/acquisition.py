"""What a trial of each candidate is worth, by the goal of the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.search.knowledge import Knowledge

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Rows = NDArray[np.int64]

THROUGHPUT, MEMORY, PARETO = "throughput", "memory", "pareto"

_AT_STAKE = 0.3  # log units: what a first run that fits is worth over none
_LIKELY = 0.5
_OPTIMISM = 0.5  # standard deviations by which a point of the trade-off is taken to be better


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched for: "throughput", "memory" or "pareto".

    For "memory", `slowest_s` is the most GPU-seconds a step may take.
    """

    kind: str = THROUGHPUT
    slowest_s: float = float("inf")


def gains(goal: Goal, known: Knowledge, rows: Rows, chance: Vector) -> Vector:
    """Expected gain of each row, were it to fit; `chance` is the chance that it does.

    Gains are logarithms: of throughput, of memory, or of both for the area that a point adds under
    the Pareto front.
    """
    if goal.kind == MEMORY:
        return _leaner(goal, known, rows)
    if goal.kind == PARETO:
        return _area_added(known, rows)
    time, spread = known.time.means[rows], known.time.spread(rows)
    if known.incumbent is None:
        return _first(time, chance)
    return expected_improvement(known.incumbent - time, spread)


def expected_improvement(ahead: Vector, spread: Vector) -> Vector:
    """Mean of what a normal variable with this mean and spread has above zero."""
    import numpy as np
    from scipy.special import ndtr

    scaled = ahead / spread
    density = np.exp(-0.5 * scaled**2) / np.sqrt(2 * np.pi)
    result: Vector = ahead * ndtr(scaled) + spread * density
    return result


def _first(time: Vector, chance: Vector) -> Vector:
    """Before any run fitted there is nothing to improve on: a first success counts for what is at
    stake, and the estimates' common error does not matter."""
    import numpy as np

    likely = time[chance >= _LIKELY]
    reference = float(likely.min() if len(likely) else time.min()) + _AT_STAKE
    result: Vector = np.maximum(reference - time, 0.0)
    return result


def _leaner(goal: Goal, known: Knowledge, rows: Rows) -> Vector:
    """Less memory than the leanest run that was fast enough."""
    import numpy as np
    from scipy.special import ndtr

    fill, time = known.memory.means[rows], known.time.means[rows]
    bound = np.log(goal.slowest_s)
    fast_enough: Vector = ndtr((bound - time) / known.time.spread(rows))
    pool = known.pool
    reached = [
        np.log(one.memory_bytes / pool.limit_bytes)
        for one in known.seen
        if one.fits and one.memory_bytes and one.step_time_s
        if one.step_time_s * pool.gpus[one.row] <= goal.slowest_s
    ]
    if not reached:
        result: Vector = fast_enough * np.maximum(fill.max() + _AT_STAKE - fill, 0.0)
        return result
    return fast_enough * expected_improvement(min(reached) - fill, known.memory.spread(rows))


def _area_added(known: Knowledge, rows: Rows) -> Vector:
    """Area between the front of runs so far and the front with each row's likely figures."""
    import numpy as np

    pool = known.pool
    points = [
        (np.log(s.step_time_s * pool.gpus[s.row]), np.log(s.memory_bytes / pool.limit_bytes))
        for s in known.seen
        if s.fits and s.step_time_s and s.memory_bytes
    ]
    points += [(known.time.means[row], known.memory.means[row]) for row in known.running]
    time = known.time.means[rows] - _OPTIMISM * known.time.spread(rows)
    fill = known.memory.means[rows] - _OPTIMISM * known.memory.spread(rows)
    corner = (float(known.time.means.max()), max(0.0, float(fill.max())))
    return area_added(np.array(points).reshape(-1, 2), time, fill, corner)


def area_added(
    points: NDArray[np.float64], first: Vector, second: Vector, corner: tuple[float, float]
) -> Vector:
    """By how much each further point (`first`, `second`) enlarges the `area` of these points."""
    import numpy as np

    inside = points[(points < np.array(corner)).all(axis=1)]
    front: list[tuple[float, float]] = []
    for one, other in inside[np.lexsort((inside[:, 1], inside[:, 0]))]:
        if not front or other < front[-1][1]:
            front.append((one, other))
    # Strips of the first objective, each with the second one's lowest value so far.
    left = np.array([-np.inf, *(one for one, _ in front)])
    right = np.array([*(one for one, _ in front), corner[0]])
    height = np.array([corner[1], *(other for _, other in front)])
    width = np.maximum(0.0, right - np.maximum(left, first[:, None]))
    result: Vector = (width * np.maximum(0.0, height - second[:, None])).sum(axis=1)
    return result


def area(points: NDArray[np.float64], corner: tuple[float, float]) -> float:
    """Area between points `[point, 2]` (both smaller is better) and a corner beyond them: the
    hypervolume of two objectives."""
    import numpy as np

    inside = points[(points < np.array(corner)).all(axis=1)]
    total, lowest = 0.0, corner[1]
    for first, second in inside[np.lexsort((inside[:, 1], inside[:, 0]))]:
        if second < lowest:
            total += (corner[0] - first) * (lowest - second)
            lowest = second
    return total
