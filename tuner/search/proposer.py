"""Chooses the next candidate to run from estimates and from what has been measured.

Estimates are the prior mean; measurements teach their errors (`residual`). Each choice weighs the
expected improvement over the best run so far by the probability that the candidate fits, and by
what the trial costs. The choice is a function of the data alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.search.acquisition import MEMORY, Goal, gains
from tuner.search.dominance import needs_at_least
from tuner.search.guide import control_of
from tuner.search.knowledge import ErrorModels, Knowledge, Seen
from tuner.search.pool import Pool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Rows = NDArray[np.int64]

_CONSIDERED = 1_500  # candidates whose uncertainty is computed for one choice
_CONTROL_WITHIN = 3  # the control without recomputation is among the first so many trials
_LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class Choice:
    """A proposed row with what is expected of it.

    `spread` is the standard deviation of the log of its step time, `improvement` the expected gain
    (`acquisition`), not yet weighed by `fit_probability`.
    """

    row: int
    step_time_s: float
    spread: float
    memory_bytes: float
    fit_probability: float
    improvement: float
    reason: str


class Proposer:
    """Chooses rows of a pool."""

    def __init__(self, pool: Pool, goal: Goal | None = None) -> None:
        self.pool = pool
        self.goal = goal or Goal()
        self._models = ErrorModels.of(pool)
        self._ruled_out: dict[int, tuple[int, ...]] = {}
        self._finished: Knowledge | None = None

    def know(self, seen: Sequence[Seen], running: Sequence[int] = ()) -> Knowledge:
        """What is known after these trials."""
        finished = self._finished
        if finished is None or not _same(finished.seen, seen):
            finished = self._finished = Knowledge(self.pool, self._models, seen)
        if not running:
            return finished
        return Knowledge(self.pool, self._models, seen, running, finished)

    def choose(self, seen: Sequence[Seen], running: Sequence[int] = ()) -> Choice | None:
        """The next row to run given finished and running trials; None when none is left."""
        import numpy as np

        known = self.know(seen, running)
        rows = self.open_rows(known)
        if not len(rows):
            return None
        control = self._control(known, rows)
        if control is not None:
            return self._describe(known, control, "control without recomputation")
        rows = self._promising(known, rows)
        time = known.time.means[rows]
        chance = known.fit_probability(rows)
        gain = gains(self.goal, known, rows, chance)
        cost = self.pool.trial_cost(rows, time)
        score = gain * chance * (cost.min() / cost)
        best = int(np.lexsort((rows, time, -score))[0])
        reason = "best estimate" if known.incumbent is None else "expected improvement"
        return self._describe(known, int(rows[best]), reason)

    def open_rows(self, known: Knowledge) -> Rows:
        """Rows that have not run, do not run, and are not proved too large."""
        import numpy as np

        is_open = np.ones(len(self.pool), dtype=np.bool_)
        is_open[[one.row for one in known.seen]] = False
        for row in {one.row for one in known.seen if one.fits is False}:
            is_open[list(self.ruled_out_by(row))] = False
        is_open[list(known.running)] = False
        return np.flatnonzero(is_open)

    def ruled_out_by(self, row: int) -> tuple[int, ...]:
        """Rows that need at least the memory of `row`, by proof and by estimate."""
        import numpy as np

        if row not in self._ruled_out:
            candidates, fill = self.pool.table.candidates, self.pool.log_fill
            columns = self.pool.table.columns
            same = fill >= fill[row]
            for name in _UNPROVED:
                if name in columns:
                    same &= columns[name].codes == columns[name].codes[row]
            self._ruled_out[row] = tuple(
                int(other)
                for other in np.flatnonzero(same)
                if other != row and needs_at_least(candidates[other], candidates[row])
            )
        return self._ruled_out[row]

    def _promising(self, known: Knowledge, rows: Rows) -> Rows:
        """The rows worth a closer look: the fastest of those that may fit, else the leanest."""
        import numpy as np

        if len(rows) <= _CONSIDERED:
            return rows
        time, fill = known.time.means[rows], known.memory.means[rows]
        wanted = fill if self.goal.kind == MEMORY else time
        kept = np.argsort(wanted + 10 * np.maximum(fill, 0.0), kind="stable")[:_CONSIDERED]
        return np.sort(rows[kept])

    def _control(self, known: Knowledge, rows: Rows) -> int | None:
        """The best run so far without its recomputation, early on and where it likely fits."""
        import numpy as np

        best = known.best_row
        launched = sum(one.fits is not None for one in known.seen) + len(known.running)
        if best is None or launched >= _CONTROL_WITHIN:
            return None
        control = control_of(self.pool.table.candidates[best])
        row = None if control is None else self.pool.table.rows.get(control.key)
        if row is None or row not in rows:
            return None
        likely = known.fit_probability(np.array([row], dtype=np.int64))[0] >= _LIKELY
        return row if likely else None

    def _describe(self, known: Knowledge, row: int, reason: str) -> Choice:
        import numpy as np

        rows = np.array([row], dtype=np.int64)
        time, spread = known.time.means[rows], known.time.spread(rows)
        chance = known.fit_probability(rows)
        return Choice(
            row=row,
            step_time_s=float(np.exp(time[0]) / self.pool.gpus[row]),
            spread=float(spread[0]),
            memory_bytes=float(np.exp(known.memory.means[row]) * self.pool.limit_bytes),
            fit_probability=float(chance[0]),
            improvement=float(gains(self.goal, known, rows, chance)[0]),
            reason=reason,
        )


def _same(first: Sequence[Seen], second: Sequence[Seen]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


_UNPROVED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
)
