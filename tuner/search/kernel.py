"""How alike two candidates are, as the covariance of the errors made in estimating them.

Estimates err in few ways: by one factor for all candidates, by a factor on one cause (tensor
parallel communication twice as slow as thought: the error then grows with its share), by a factor
for one choice of one setting (an attention kernel worse than its data), and by the rest, alike for
neighbouring layouts. The covariance of log errors is the sum of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.search.table import CandidateTable, Column, is_numeric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Rows = NDArray[np.int64]

_LENGTH = 1.0
"""Doublings of a size over which a correlation falls to `exp(-1/2)`: log errors of recorded layout
sweeps (`benchmarks/search.py`) change by 0.01 to 0.15 with a doubling of one parallel size."""

_APART = 0.25
"""How far two choices without an order are from alike. Log errors of the attention kernels in the
same sweeps lie 0.06 apart."""


@dataclass(frozen=True, slots=True)
class ErrorSizes:
    """Standard deviations of log errors, each for one way in which estimates err."""

    common: float
    share: float
    choice: float
    rest: float
    noise: float


TIME_ERRORS = ErrorSizes(common=0.3, share=0.3, choice=0.1, rest=0.07, noise=0.01)
"""Beliefs about step times before any is measured: tens of per cent in all, most of it shared."""

MEMORY_ERRORS = ErrorSizes(common=0.05, share=0.05, choice=0.03, rest=0.03, noise=0.01)
"""Beliefs about peak memory: a few per cent from each cause."""


UNKNOWN = ErrorSizes(common=1.0, share=0.0, choice=0.3, rest=0.2, noise=0.01)
"""Beliefs about a figure that nothing predicts: settings change it by tens of per cent each."""


class ErrorKernel:
    """Covariances between rows of a table.

    `shares` are the parts of each row's estimate, `[row, part]`, summing to at most 1.
    """

    def __init__(self, table: CandidateTable, shares: Matrix, sizes: ErrorSizes) -> None:
        self._columns = [column.codes for column in table.columns.values()]
        self._alike = [_likeness(column) for column in table.columns.values()]
        self._shares = shares
        self._sizes = sizes

    def between(self, first: Rows, second: Rows) -> Matrix:
        """Covariance of the log errors of each row of `first` with each of `second`."""
        import numpy as np

        sizes = self._sizes
        near = np.ones((len(first), len(second)))
        choices = np.zeros_like(near)
        for codes, alike in zip(self._columns, self._alike, strict=True):
            pair = alike[np.ix_(codes[first], codes[second])]
            choices += pair
            near *= 0.25 + 0.75 * pair
        shares = self._shares[first] @ self._shares[second].T
        result: Matrix = (
            sizes.common**2
            + sizes.share**2 * shares
            + sizes.choice**2 * choices
            + sizes.rest**2 * near
        )
        return result

    def variances(self, rows: Rows) -> Matrix:
        """The diagonal of `between(rows, rows)`."""
        sizes = self._sizes
        result: Matrix = (
            sizes.common**2
            + sizes.share**2 * (self._shares[rows] ** 2).sum(axis=1)
            + sizes.choice**2 * len(self._columns)
            + sizes.rest**2
        )
        return result


def _likeness(column: Column) -> Matrix:
    """Likeness of a field's values in [0, 1], `[value, value]`."""
    import numpy as np

    values = column.values
    if is_numeric(values):
        sizes = np.array([max(0.0, float(1 if v is None else v)) for v in values])
        logs = np.log2(sizes if sizes.min() >= 1.0 else sizes + 1.0)
        distance = np.abs(logs[:, None] - logs[None, :]) / _LENGTH
        numeric: Matrix = np.exp(-0.5 * distance**2)
        return numeric
    return np.array([[1.0 - _APART * (1.0 - _common_part(a, b)) for b in values] for a in values])


def _common_part(first: Any, second: Any) -> float:
    """1 for equal values, for lists of modules the share of modules in both."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        union = set(first) | set(second)
        return len(set(first) & set(second)) / len(union) if union else 1.0
    return float(type(first) is type(second) and first == second)


def shares_of(parts: Mapping[str, Matrix], total: Matrix, rows: int) -> Matrix:
    """Parts of an estimate as shares of its total, `[row, part]`; zero where it is unknown."""
    import numpy as np

    if not parts:
        return np.zeros((rows, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.stack([parts[name] / total for name in sorted(parts)], axis=1)
    return np.nan_to_num(shares, nan=0.0, posinf=0.0, neginf=0.0)


def distinct(rows: Sequence[int]) -> Rows:
    """Row numbers as an index array."""
    import numpy as np

    return np.array(list(rows), dtype=np.int64)
