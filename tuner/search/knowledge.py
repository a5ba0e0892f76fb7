"""What is known of every candidate after some trials: step time, memory, the chance to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tuner.search.kernel import MEMORY_ERRORS, TIME_ERRORS, ErrorKernel, ErrorSizes, shares_of
from tuner.search.pool import Pool
from tuner.search.residual import Evidence, Posterior, fit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Matrix = NDArray[np.float64]
    Rows = NDArray[np.int64]

LEARN_FROM = 256
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
    """Covariances of one estimate's errors over a pool, with columns kept between choices."""

    def __init__(self, pool: Pool, sizes: ErrorSizes, shares: Matrix) -> None:
        import numpy as np

        self._kernel = ErrorKernel(pool.table, shares, sizes)
        self._all = np.arange(len(pool), dtype=np.int64)
        self.noise = sizes.noise
        self._columns: dict[int, NDArray[np.float32]] = {}

    def cross(self, observed: Rows) -> Matrix:
        """Covariances of every row of the pool with the observed rows, `[row, observation]`."""
        import numpy as np

        wanted = [int(row) for row in observed]
        missing = [row for row in dict.fromkeys(wanted) if row not in self._columns]
        for row in missing:
            column = self._kernel.between(self._all, np.array([row], dtype=np.int64))
            self._columns[row] = column[:, 0].astype(np.float32)
        if len(self._columns) > 4 * LEARN_FROM:
            self._columns = {row: self._columns[row] for row in wanted}
        if not wanted:
            return np.zeros((len(self._all), 0))
        return np.stack([self._columns[row] for row in wanted], axis=1)

    def variances(self, rows: Rows) -> Vector:
        return self._kernel.variances(rows)

    def among(self, rows: Rows) -> Matrix:
        return self._kernel.between(rows, rows)


@dataclass(frozen=True)
class ErrorModels:
    """The two error models of a pool."""

    time: ErrorModel
    memory: ErrorModel

    @classmethod
    def of(cls, pool: Pool) -> ErrorModels:
        estimates, rows = pool.estimates, len(pool)
        return cls(
            ErrorModel(
                pool, TIME_ERRORS, shares_of(estimates.time_parts, estimates.step_time_s, rows)
            ),
            ErrorModel(
                pool,
                MEMORY_ERRORS,
                shares_of(estimates.memory_parts, estimates.memory_bytes, rows),
            ),
        )


class _Learned:
    """Errors of one estimate after its observations."""

    def __init__(
        self, model: ErrorModel, prior: Vector, rows: Sequence[int], evidence: Evidence
    ) -> None:
        import numpy as np

        self._model, self._prior = model, prior
        self._rows = np.array(rows, dtype=np.int64)
        self._cross = model.cross(self._rows)
        self.posterior: Posterior | None = None
        if len(rows):
            self.posterior = fit(self._cross[self._rows], evidence)

    def mean(self, rows: Rows) -> Vector:
        """Log figures expected of these rows."""
        if self.posterior is None:
            return self._prior[rows]
        result: Vector = self._prior[rows] + self.posterior.mean(self._cross[rows])
        return result

    def spread(self, rows: Rows) -> Vector:
        """Standard deviations of the log figures."""
        import numpy as np

        variances = self._model.variances(rows)
        if self.posterior is not None:
            variances = self.posterior.variance(self._cross[rows], variances)
        return np.sqrt(variances)

    def covariance(self, rows: Rows) -> Matrix:
        prior = self._model.among(rows)
        if self.posterior is None:
            return prior
        return self.posterior.covariance(self._cross[rows], prior)


class Knowledge:
    """The pool after the trials in `seen`, with those in `running` under way.

    Running trials count as if they would give what is expected of them, so that others are
    proposed beside them.
    """

    def __init__(
        self, pool: Pool, models: ErrorModels, seen: Sequence[Seen], running: Sequence[int]
    ) -> None:
        self.pool, self._models = pool, models
        self.seen, self.running = tuple(seen), tuple(running)

    @cached_property
    def measured(self) -> _Learned:
        """Step times learned from finished trials alone."""
        return self._learn_time(())

    @cached_property
    def time(self) -> _Learned:
        """Step times, running trials counted as done."""
        return self._learn_time(self.running[-LEARN_FROM // 4 :]) if self.running else self.measured

    def _learn_time(self, running: Sequence[int]) -> _Learned:
        import numpy as np

        prior = self.pool.log_time
        told = _kept([(s.row, s.step_time_s) for s in self.seen if s.step_time_s], LEARN_FROM)
        rows = [row for row, _ in told]
        values = [np.log(time * self.pool.gpus[row]) - prior[row] for row, time in told]
        if running:
            guessed = np.array(running, dtype=np.int64)
            values += list(self.measured.mean(guessed) - prior[guessed])
            rows += [int(row) for row in guessed]
        evidence = Evidence(
            np.array(values), np.zeros(len(rows), dtype=np.int64), self._models.time.noise
        )
        return _Learned(self._models.time, prior, rows, evidence)

    @cached_property
    def memory(self) -> _Learned:
        """Log of peak memory over the limit."""
        import numpy as np

        prior = self.pool.log_fill
        limit = self.pool.limit_bytes
        told: list[tuple[int, tuple[float, int]]] = []
        for one in self.seen:
            if one.memory_bytes:
                value = float(np.log(one.memory_bytes / limit) - prior[one.row])
                told.append((one.row, (value, 0)))
            elif one.fits is not None:
                told.append((one.row, (float(-prior[one.row]), -1 if one.fits else 1)))
        told = told[-LEARN_FROM:]
        evidence = Evidence(
            np.array([value for _, (value, _) in told]),
            np.array([sign for _, (_, sign) in told], dtype=np.int64),
            self._models.memory.noise,
        )
        return _Learned(self._models.memory, prior, [row for row, _ in told], evidence)

    def fit_probability(self, rows: Rows) -> Vector:
        """The chance that each row stays below the memory limit."""
        from scipy.special import ndtr

        memory = self.memory
        result: Vector = ndtr(-memory.mean(rows) / memory.spread(rows))
        return result

    @cached_property
    def incumbent(self) -> float | None:
        """Log GPU-seconds a step of the best run that fitted; None before one has."""
        import numpy as np

        done = [s for s in self.seen if s.fits and s.step_time_s]
        if not done:
            return None
        return float(min(np.log(s.step_time_s * self.pool.gpus[s.row]) for s in done))

    @cached_property
    def best_row(self) -> int | None:
        """The row of the best run that fitted."""
        done = [s for s in self.seen if s.fits and s.step_time_s]
        if not done:
            return None
        return min(done, key=lambda s: (s.step_time_s or 0.0) * self.pool.gpus[s.row]).row


def _kept(known: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """At most `count` observations: three quarters the best, the rest evenly over time."""
    if len(known) <= count:
        return known
    best = sorted(range(len(known)), key=lambda i: known[i][1])[: count * 3 // 4]
    chosen = set(best)
    others = [i for i in range(len(known)) if i not in chosen]
    step = max(1, len(others) // (count - len(best)))
    chosen.update(others[::step][: count - len(best)])
    return [known[i] for i in sorted(chosen)]
