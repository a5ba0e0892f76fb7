"""Candidates as columns: the form in which thousands are estimated and compared at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import DEFAULTS, Candidate
from tuner.search.space import label_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Column:
    """One varying field: its distinct values, and a code into them for each row."""

    values: tuple[Any, ...]
    codes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CandidateTable:
    """Distinct candidates and, for every field in which they differ, a column.

    Environment variables are fields named `env.NAME`. `rows` maps a candidate's key to its row.
    """

    candidates: tuple[Candidate, ...]
    columns: Mapping[str, Column]
    rows: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.candidates)

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateTable:
        """The table of these candidates, repeats left out, in their order."""
        import numpy as np

        distinct = {candidate.key: candidate for candidate in candidates}
        spread = [fields_of(candidate) for candidate in distinct.values()]
        names = sorted({name for fields in spread for name in fields})
        columns = {}
        for name in names:
            codes, values = _encoded(fields.get(name, DEFAULTS.get(name)) for fields in spread)
            if len(values) > 1:
                columns[name] = Column(values, np.array(codes, dtype=np.int64))
        rows = {key: row for row, key in enumerate(distinct)}
        return cls(tuple(distinct.values()), columns, rows)


def fields_of(candidate: Candidate) -> dict[str, Any]:
    """A candidate's fields with environment variables as `env.NAME`."""
    flat = candidate.to_flat()
    env = flat.pop("env", {})
    return {**flat, **{f"env.{name}": value for name, value in env.items()}}


def _encoded(values: Iterable[Any]) -> tuple[list[int], tuple[Any, ...]]:
    """Codes of values in the order in which their labels sort."""
    labels: dict[str, Any] = {}
    order: list[str] = []
    for value in values:
        label = label_of(value)
        labels.setdefault(label, value)
        order.append(label)
    known = {label: code for code, label in enumerate(sorted(labels))}
    return [known[label] for label in order], tuple(labels[label] for label in sorted(labels))


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values are numbers; None, a field left at its default, may be among them."""
    numbers = [v for v in values if v is not None]
    return bool(numbers) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers
    )
