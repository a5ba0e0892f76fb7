"""When to end: a trial that cannot win, and a search that is unlikely to find better."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.search.knowledge import Seen
    from tuner.search.proposer import Proposer

IMPROVEMENT = 0.01
"""A gain in throughput worth going on for."""

UNLIKELY = 0.05
"""The chance of such a gain below which a search ends."""

_CONFIDENCE_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)
"""Student's t, two-sided 99 %, for 1, 2, ... degrees of freedom; later ones take the last."""
_DRAWS = 2_000
_CONTENDERS = 200


def cannot_beat(step_times_s: Sequence[float], bound_s: float) -> bool:
    """Whether these timed steps rule out that their mean is below `bound_s`.

    True once the 99 % confidence interval of the mean lies above it; at least two steps are needed.
    """
    count = len(step_times_s)
    if count < 2:
        return False
    t = _CONFIDENCE_T[min(count - 2, len(_CONFIDENCE_T) - 1)]
    half = t * statistics.stdev(step_times_s) / math.sqrt(count)
    return statistics.fmean(step_times_s) - half > bound_s


def chance_of_improvement(
    proposer: Proposer, seen: Sequence[Seen], running: Sequence[int] = ()
) -> float:
    """The probability that some candidate left fits and is better by `IMPROVEMENT` than the best.

    1 before any run has fitted. Step times of the likeliest contenders are drawn together, since
    neighbours share their errors; whether each fits is drawn apart.
    """
    import numpy as np
    from scipy.special import ndtr

    known = proposer.know(seen)
    if known.incumbent is None:
        return 1.0
    rows = proposer.open_rows(proposer.know(seen, running))
    if not len(rows):
        return 0.0
    bound = known.incumbent - math.log1p(IMPROVEMENT)
    time = known.measured.means[rows]
    rows = np.sort(rows[np.argsort(time - bound, kind="stable")[: 4 * _CONTENDERS]])
    time, spread = known.measured.means[rows], known.measured.spread(rows)
    fits = known.fit_probability(rows)
    alone = ndtr((bound - time) / spread) * fits
    likely = np.argsort(-alone, kind="stable")[:_CONTENDERS]
    rows, time, fits = rows[likely], time[likely], fits[likely]
    covariance = known.measured.covariance(rows)
    generator = np.random.default_rng(len(seen))
    draws = generator.multivariate_normal(time, covariance, _DRAWS, method="eigh")
    fitting = generator.random(draws.shape) < fits
    return float(((draws < bound) & fitting).any(axis=1).mean())
