"""The valid candidates of a space, expanded axis by axis and pruned on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.constraints.result import Capabilities, InputError
from tuner.constraints.screening import Table, Tables, merge
from tuner.constraints.view import UNSET

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_GROUP = ""  # a column that no axis can name

Condition = Mapping[str, Sequence[object]]
Axis = tuple[str, Sequence[object], "Condition | None"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Valid candidates as codes into the values of each axis."""

    values: Mapping[str, Sequence[object]]
    """Distinct values of each axis; `UNSET` where the axis does not exist."""
    codes: Mapping[str, NDArray[np.int32]]
    """Per axis an array of shape (rows,)."""
    fixed: Mapping[str, object]
    enumerated: int
    """Combinations of the axes that exist under their conditions."""
    expanded: int
    """Partial and whole combinations that were really built."""

    def __len__(self) -> int:
        return len(next(iter(self.codes.values()))) if self.codes else 0

    def row(self, index: int) -> dict[str, object]:
        """One candidate as a flat mapping, fields of axes that do not exist left out."""
        row = dict(self.fixed)
        for name, codes in self.codes.items():
            value = self.values[name][codes[index]]
            if value is not UNSET:
                row[name] = value
        return row


def enumerate_valid(
    axes: Sequence[Axis],
    fixed: Mapping[str, object],
    *,
    mcore: str = "0.16.1",
    frontend: str = "mcore",
    capabilities: Capabilities | None = None,
    limit: int | None = None,
    exclude: Sequence[Table] = (),
) -> Candidates:
    """Build every valid candidate of a space.

    Args:
        axes: ordered (field, values, condition); a condition maps earlier axes or fixed fields to
            allowed values, and where it does not hold the field is left out of the candidate.
        fixed: the fields that do not vary.
        mcore, frontend, capabilities: as for `check`.
        limit: most rows to build at any point; None for no limit.
        exclude: combinations that are no part of the space, besides those the rules refuse.

    Raises:
        InputError: an axis without values, a repeated axis, a condition on a later field, or more
            rows than `limit`.
    """
    _require_axes(axes, fixed)
    growth = _Growth(axes, fixed, mcore, frontend, capabilities, exclude)
    return growth.candidates(growth.whole(limit))


@dataclass(frozen=True, slots=True)
class Factored:
    """Valid candidates as a head and the tails that go with each of its rows.

    Head row `h` goes with every tail row `t` where `head_group[h] == tail_group[t]`; both are
    numbers of groups of head rows that rules on the tail cannot tell apart. Codes are as in
    `Candidates`.
    """

    values: Mapping[str, Sequence[object]]
    head: Mapping[str, NDArray[np.int32]]
    head_group: NDArray[np.int64]
    tail: Mapping[str, NDArray[np.int32]]
    tail_group: NDArray[np.int64]


def enumerate_factored(
    axes: Sequence[Axis],
    fixed: Mapping[str, object],
    tail: int,
    *,
    mcore: str = "0.16.1",
    frontend: str = "mcore",
    capabilities: Capabilities | None = None,
    exclude: Sequence[Table] = (),
) -> Factored:
    """`enumerate_valid` with the last `tail` axes grown once for all that they combine with.

    Rules tie the last axes to few fields of the others, so that the tails of millions of
    candidates are a few. Raises InputError as `enumerate_valid` does.
    """
    _require_axes(axes, fixed)
    growth = _Growth(axes, fixed, mcore, frontend, capabilities, exclude)
    return growth.factored(tail)


class _Growth:
    """A space growing axis by axis, each screened by the tables that it completes."""

    def __init__(
        self,
        axes: Sequence[Axis],
        fixed: Mapping[str, object],
        mcore: str,
        frontend: str,
        capabilities: Capabilities | None,
        exclude: Sequence[Table],
    ) -> None:
        self._axes, self._fixed = axes, fixed
        self._values = {name: _values(name, choices, when) for name, choices, when in axes}
        tables = Tables(
            self._values,
            fixed,
            mcore=mcore,
            frontend=frontend,
            capabilities=capabilities,
            doomed=True,
        )
        self._stages = _stages([*tables.tables, *exclude], [name for name, _, _ in axes])
        self._total = _count(axes, self._values, fixed)
        self._expanded = 0

    def whole(self, limit: int | None) -> dict[str, Any]:
        """Codes of all valid candidates."""
        return self._grow(len(self._axes), limit)[0]

    def _grow(self, axes: int, limit: int | None = None) -> tuple[dict[str, Any], int]:
        """Codes of the first `axes` axes, and how many rows there are."""
        codes: dict[str, Any] = {}
        rows = 0 if any(bool(table.broken) for table in self._stages[""]) else 1
        for place in range(axes):
            codes, rows = self._grown(codes, rows, place, limit)
        return codes, rows

    def _grown(
        self, codes: dict[str, Any], rows: int, place: int, limit: int | None = None
    ) -> tuple[dict[str, Any], int]:
        """These rows with the values of one more axis, screened."""
        name, choices, condition = self._axes[place]
        codes, rows = _expand(codes, rows, name, len(choices), condition, self._values, self._fixed)
        self._expanded += rows
        if limit is not None and rows > limit:
            raise InputError(f"axis {name} grows the space to {rows} rows, above {limit}")
        keep = _keep(self._stages[name], codes, rows)
        if keep is None:
            return codes, rows
        return {n: code[keep] for n, code in codes.items()}, int(keep.sum())

    def factored(self, tail: int) -> Factored:
        """Head and tails of the candidates."""
        import numpy as np

        first = len(self._axes) - tail
        codes, rows = self._grow(first)
        read: set[str] = set()
        for name, _, condition in self._axes[first:]:
            read |= {*(condition or ()), *(f for t in self._stages[name] for f in t.fields)}
        key = np.zeros(rows, dtype=np.int64)
        for name in sorted(read & codes.keys()):
            _, key = np.unique(key * len(self._values[name]) + codes[name], return_inverse=True)
        _, examples, group = np.unique(key, return_index=True, return_inverse=True)
        few = {name: codes[name][examples] for name in read & codes.keys()}
        few[_GROUP], count = np.arange(len(examples)), len(examples)
        for place in range(first, len(self._axes)):
            few, count = self._grown(few, count, place)
        head = {name: np.asarray(code, dtype=np.int32) for name, code in codes.items()}
        names = [name for name, _, _ in self._axes[first:]]
        ends = {name: np.asarray(few[name], dtype=np.int32) for name in names}
        return Factored(self._values, head, group.astype(np.int64), ends, few[_GROUP])

    def candidates(self, codes: Mapping[str, Any]) -> Candidates:
        """Codes of whole candidates as such."""
        import numpy as np

        final = {name: np.asarray(code, dtype=np.int32) for name, code in codes.items()}
        return Candidates(self._values, final, dict(self._fixed), self._total, self._expanded)


def _require_axes(axes: Sequence[Axis], fixed: Mapping[str, object]) -> None:
    seen: set[str] = set()
    for name, choices, condition in axes:
        if name in seen or name in fixed:
            raise InputError(f"axis {name} is given twice")
        if not len(choices):
            raise InputError(f"axis {name} has no values")
        for other in condition or ():
            if other not in seen and other not in fixed:
                raise InputError(f"the condition of axis {name} names {other}, which comes later")
        seen.add(name)


def _values(name: str, choices: Sequence[object], condition: Condition | None) -> list[object]:
    return [*choices, UNSET] if condition else list(choices)


def _stages(tables: Sequence[Table], order: Sequence[str]) -> dict[str, list[Table]]:
    """For each axis the merged tables that it completes; under "" those that read no axis."""
    position = {name: index for index, name in enumerate(order)}
    stages: dict[str, list[Table]] = {"": [], **{name: [] for name in order}}
    for table in tables:
        last = max((position[name] for name in table.fields), default=None)
        stages["" if last is None else order[last]].append(table)
    return {name: merge(group, order) for name, group in stages.items()}


def _allowed(
    condition: Condition,
    codes: Mapping[str, Any],
    rows: int,
    values: Mapping[str, Sequence[object]],
    fixed: Mapping[str, object],
) -> Any:
    """Which rows meet a condition."""
    import numpy as np

    holds = np.ones(rows, dtype=np.bool_)
    for other, allowed in condition.items():
        if other in fixed:
            holds &= _contains(allowed, fixed[other])
        else:
            table = np.array([_contains(allowed, value) for value in values[other]])
            holds &= table[codes[other]]
    return holds


def _contains(allowed: Sequence[object], value: object) -> bool:
    return any(type(a) is type(value) and a == value for a in allowed)


def _expand(
    codes: dict[str, Any],
    rows: int,
    name: str,
    size: int,
    condition: Condition | None,
    values: Mapping[str, Sequence[object]],
    fixed: Mapping[str, object],
) -> tuple[dict[str, Any], int]:
    """All rows times the values of one axis; rows that fail its condition stay single."""
    import numpy as np

    if condition is None:
        grown = {n: np.repeat(code, size) for n, code in codes.items()}
        grown[name] = np.tile(np.arange(size, dtype=np.int32), rows)
        return grown, rows * size
    holds = _allowed(condition, codes, rows, values, fixed)
    counts = np.where(holds, size, 1)
    grown = {n: np.repeat(code, counts) for n, code in codes.items()}
    total = int(counts.sum())
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    own = (np.arange(total) - starts).astype(np.int32)
    grown[name] = np.where(np.repeat(holds, counts), own, np.int32(size))
    return grown, total


def _keep(tables: Sequence[Table], codes: Mapping[str, Any], rows: int) -> Any:
    """Rows that break none of the tables; None when there is nothing to ask."""
    import numpy as np

    if not tables or not rows:
        return None
    broken = np.zeros(rows, dtype=np.bool_)
    for table in tables:
        broken |= table.take(codes, rows)
    return ~broken


def _count(
    axes: Sequence[Axis], values: Mapping[str, Sequence[object]], fixed: Mapping[str, object]
) -> int:
    """Combinations of the axes under their conditions, without building them."""
    conditioned = {
        other for _, _, condition in axes for other in condition or () if other not in fixed
    }
    states: dict[tuple[tuple[str, int], ...], int] = {(): 1}
    for name, choices, condition in axes:
        grown: dict[tuple[tuple[str, int], ...], int] = {}
        for state, number in states.items():
            here = dict(state)
            holds = all(
                _contains(allowed, fixed[other] if other in fixed else values[other][here[other]])
                for other, allowed in (condition or {}).items()
            )
            options = range(len(choices)) if holds else (len(choices),)
            if name not in conditioned:
                grown[state] = grown.get(state, 0) + number * len(options)
                continue
            for code in options:
                key = (*state, (name, code))
                grown[key] = grown.get(key, 0) + number
        states = grown
    return sum(states.values())
