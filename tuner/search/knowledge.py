"""What is known of every candidate after some trials: step time, memory, the chance to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tuner.search.kernel import (
    MEMORY_ERRORS,
    TIME_ERRORS,
    UNKNOWN,
    ErrorKernel,
    ErrorSizes,
    shares_of,
)
from tuner.search.pool import Pool
from tuner.search.residual import Evidence, Posterior, fit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Matrix = NDArray[np.float64]
    Rows = NDArray[np.int64]

_COLUMNS_KEPT = 600
LEARN_FROM = 192
"""Observations kept for learning: the best ones and the rest evenly over the study's life."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one finished trial told: step time and peak bytes where known, and whether it fitted.

    `fits` is None where the trial says nothing about memory (a crash, a lost node).
    """

    row: int
    step_time_s: float | None
    memory_bytes: float | None
    fits: bool | None


class ErrorModel:
    """Covariances of one estimate's errors over a pool.

    Columns `[row, observation]` are computed once per observed row and kept side by side, so that
    the mean over the whole pool is one product.
    """

    def __init__(self, pool: Pool, sizes: ErrorSizes, shares: Matrix) -> None:
        import numpy as np

        self._kernel = ErrorKernel(pool.table, shares, sizes)
        self._all = np.arange(len(pool), dtype=np.int64)
        self.noise = sizes.noise
        self._slots: dict[int, int] = {}
        self._columns = np.zeros((len(pool), 16), dtype=np.float32, order="F")

    def slots(self, observed: Rows) -> NDArray[np.intp]:
        """Where the columns of these rows stand; they stay there until other rows are asked for."""
        import numpy as np

        wanted = [int(row) for row in observed]
        if len(self._slots) + len(wanted) > _COLUMNS_KEPT:
            kept = [row for row in dict.fromkeys(wanted) if row in self._slots]
            self._columns[:, : len(kept)] = self._columns[:, [self._slots[row] for row in kept]]
            self._slots = {row: slot for slot, row in enumerate(kept)}
        for row in wanted:
            if row not in self._slots:
                self._add(row)
        return np.array([self._slots[row] for row in wanted], dtype=np.intp)

    def _add(self, row: int) -> None:
        import numpy as np

        slot = len(self._slots)
        if slot == self._columns.shape[1]:
            wider = np.zeros((len(self._all), 2 * slot), dtype=np.float32, order="F")
            wider[:, :slot] = self._columns
            self._columns = wider
        column = self._kernel.between(self._all, np.array([row], dtype=np.int64))
        self._columns[:, slot] = column[:, 0]
        self._slots[row] = slot

    def weighted(self, slots: NDArray[np.intp], weights: Vector) -> Vector:
        """Sum of columns times weights, over the whole pool."""
        import numpy as np

        spread = np.zeros(len(self._slots), dtype=np.float32)
        np.add.at(spread, slots, weights.astype(np.float32))
        result: Vector = (self._columns[:, : len(spread)] @ spread).astype(np.float64)
        return result

    def cross(self, rows: Rows, slots: NDArray[np.intp]) -> Matrix:
        """Covariances of some rows with the observations, `[row, observation]`."""
        import numpy as np

        return self._columns[np.ix_(rows, slots)].astype(np.float64)

    def between(self, first: Rows, second: Rows) -> Matrix:
        return self._kernel.between(first, second)

    def variances(self, rows: Rows) -> Vector:
        return self._kernel.variances(rows)


@dataclass(frozen=True)
class ErrorModels:
    """The two error models of a pool."""

    time: ErrorModel
    memory: ErrorModel

    @classmethod
    def of(cls, pool: Pool) -> ErrorModels:
        import numpy as np

        known, rows = pool.estimates, len(pool)
        time, memory = known.step_time_s, known.memory_bytes
        return cls(
            ErrorModel(
                pool,
                TIME_ERRORS if np.isfinite(time).any() else UNKNOWN,
                shares_of(known.time_parts, time, rows),
            ),
            ErrorModel(
                pool,
                MEMORY_ERRORS if np.isfinite(memory).any() else UNKNOWN,
                shares_of(known.memory_parts, memory, rows),
            ),
        )


class Learned:
    """Log figures of every row of the pool: the estimate's, corrected by what was observed."""

    def __init__(
        self, model: ErrorModel, prior: Vector, rows: Sequence[int], evidence: Evidence
    ) -> None:
        import numpy as np

        self._model = model
        observed = np.array(rows, dtype=np.int64)
        self.posterior: Posterior | None = None
        self.means = prior
        if len(rows):
            self._slots = model.slots(observed)
            self.posterior = fit(model.between(observed, observed), evidence)
            self.means = prior + self.posterior.scale**2 * model.weighted(
                self._slots, self.posterior.weights
            )

    def spread(self, rows: Rows) -> Vector:
        """Standard deviations of the log figures of these rows."""
        import numpy as np

        variances = self._model.variances(rows)
        if self.posterior is not None:
            cross = self._model.cross(rows, self._slots)
            variances = self.posterior.variance(cross, variances)
        return np.sqrt(variances)

    def covariance(self, rows: Rows) -> Matrix:
        """Covariances of the log figures among these rows."""
        prior = self._model.between(rows, rows)
        if self.posterior is None:
            return prior
        return self.posterior.covariance(self._model.cross(rows, self._slots), prior)


class Knowledge:
    """The pool after the trials in `seen`, with those in `running` under way.

    Running trials count as if they would give what is expected of them, so that others are
    proposed beside them. `finished` is what is known without them, where that is at hand.
    """

    def __init__(
        self,
        pool: Pool,
        models: ErrorModels,
        seen: Sequence[Seen],
        running: Sequence[int] = (),
        finished: Knowledge | None = None,
    ) -> None:
        self.pool, self._models = pool, models
        self.seen, self.running = tuple(seen), tuple(running)
        self._finished = finished

    @cached_property
    def measured(self) -> Learned:
        """Log GPU-seconds of a step, from finished trials alone."""
        return self._finished.measured if self._finished is not None else self._learn_time(())

    @cached_property
    def time(self) -> Learned:
        """Log GPU-seconds of a step, running trials counted as done."""
        if not self.running:
            return self.measured
        return self._learn_time(self.running[-LEARN_FROM // 4 :])

    def _learn_time(self, running: Sequence[int]) -> Learned:
        import numpy as np

        prior = self.pool.log_time
        told = self._told_times
        rows = [row for row, _ in told]
        values = [np.log(time * self.pool.gpus[row]) - prior[row] for row, time in told]
        if running:
            guessed = np.array(running, dtype=np.int64)
            values += list((self.measured.means - prior)[guessed])
            rows += [int(row) for row in guessed]
        evidence = Evidence(
            np.array(values), np.zeros(len(rows), dtype=np.int64), self._models.time.noise
        )
        return Learned(self._models.time, prior, rows, evidence)

    @cached_property
    def _told_times(self) -> list[tuple[int, float]]:
        """Rows and step times to learn from."""
        if self._finished is not None:
            return self._finished._told_times
        return _kept([(s.row, s.step_time_s) for s in self.seen if s.step_time_s], LEARN_FROM)

    @cached_property
    def memory(self) -> Learned:
        """Log of peak memory over the limit."""
        import numpy as np

        if self._finished is not None:
            return self._finished.memory

        prior = self.pool.log_fill
        limit = self.pool.limit_bytes
        told: list[tuple[int, tuple[float, int]]] = []
        for one in reversed(self.seen):
            if one.memory_bytes:
                value = float(np.log(one.memory_bytes / limit) - prior[one.row])
                told.append((one.row, (value, 0)))
            elif one.fits is not None:
                told.append((one.row, (float(-prior[one.row]), -1 if one.fits else 1)))
            if len(told) == LEARN_FROM:
                break
        told.reverse()
        evidence = Evidence(
            np.array([value for _, (value, _) in told]),
            np.array([sign for _, (_, sign) in told], dtype=np.int64),
            self._models.memory.noise,
        )
        return Learned(self._models.memory, prior, [row for row, _ in told], evidence)

    def fit_probability(self, rows: Rows) -> Vector:
        """The chance that each row stays below the memory limit."""
        from scipy.special import ndtr

        memory = self.memory
        result: Vector = ndtr(-memory.means[rows] / memory.spread(rows))
        return result

    @cached_property
    def incumbent(self) -> float | None:
        """Log GPU-seconds a step of the best run that fitted; None before one has."""
        import numpy as np

        if self.best_row is None:
            return None
        return float(np.log(self._best[0]))

    @cached_property
    def best_row(self) -> int | None:
        """The row of the best run that fitted."""
        return self._best[1]

    @cached_property
    def _best(self) -> tuple[float, int | None]:
        """GPU-seconds of a step and row of the best run that fitted."""
        if self._finished is not None:
            return self._finished._best
        gpus = self.pool.gpus.tolist()
        best: tuple[float, int | None] = float("inf"), None
        for one in self.seen:
            if one.fits and one.step_time_s and one.step_time_s * gpus[one.row] < best[0]:
                best = one.step_time_s * gpus[one.row], one.row
        return best


def _kept(known: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """At most `count` observations: three quarters the best, the rest evenly over time.

    The rest changes little as trials are added: every second of it goes when it grows too large.
    """
    if len(known) <= count:
        return known
    best = count * 3 // 4
    step = 1
    while len(known) > step * (count - best):
        step *= 2
    chosen = set(sorted(range(len(known)), key=lambda i: known[i][1])[:best])
    chosen.update(range(0, len(known), step))
    return [known[i] for i in sorted(chosen)]
