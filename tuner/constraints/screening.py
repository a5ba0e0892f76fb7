"""Many candidates at once: truth tables of the rules, looked up by integer codes.

A candidate of an array is a row of integer codes into short lists of distinct values.  Every rule
is run once per distinct combination of the values it really reads (found by running it), which
gives a small table; a row's verdict is then a look-up.  The rules themselves are those of `check`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from tuner.constraints.checker import build_view, field_problem
from tuner.constraints.fields import REQUIRED
from tuner.constraints.registry import Rule, resolve_version, rules_for
from tuner.constraints.result import Capabilities, InputError
from tuner.constraints.view import UNSET, ByAttention, View, given_class, model_view

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Column = tuple[Sequence[object], "NDArray[np.integer[Any]]"]
# Tables larger than this are split: rows are then decided in groups of equal values.
_MAX_TABLE = 4_000_000


class _NeedFieldError(Exception):
    """A rule read a varying field that has no value yet."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Slot:
    """Class attribute of a traced view for one varying field."""

    def __init__(self, name: str, default: object) -> None:
        self.name = name
        self._default = default

    def __get__(self, view: View, owner: type | None = None) -> object:
        try:
            value = view.__dict__["_assigned"][self.name]
        except KeyError:
            raise _NeedFieldError(self.name) from None
        if value is not UNSET:
            return value
        default = self._default
        return default.__get__(view) if isinstance(default, ByAttention) else default

    def __set__(self, view: View, value: object) -> None:
        raise AttributeError(self.name)


@dataclass(frozen=True, slots=True)
class Table:
    """The verdicts of one rule (or several) over the fields it reads; True is a violation."""

    rule_ids: tuple[str, ...]
    fields: tuple[str, ...]
    broken: NDArray[np.bool_]

    def take(self, codes: Mapping[str, NDArray[np.integer[Any]]], rows: int) -> NDArray[np.bool_]:
        """The verdict of each row."""
        import numpy as np

        if not self.fields:
            return np.full(rows, bool(self.broken))
        index: Any = None
        for name, size in zip(self.fields, self.broken.shape, strict=True):
            code = codes[name]
            index = code if index is None else index * size + code
        return self.broken.ravel().take(index)


@dataclass(frozen=True, slots=True)
class ScreenResult:
    """Verdicts on arrays of candidates."""

    valid: NDArray[np.bool_]
    """Shape (rows,): True where no error rule fires."""
    first_rule: NDArray[np.int32] | None
    """Shape (rows,): index into `rule_ids` of the first rule that fires, -1 for valid rows."""
    rule_ids: tuple[str, ...]
    counts: Mapping[str, int] | None
    """Rows that break each rule (a row may break several)."""


class Tables:
    """The truth tables of one space: build once, then screen any rows drawn from it.

    Args:
        values: the distinct values of each varying field; `UNSET` leaves the field out.
        fixed: the fields that do not vary.
        mcore, frontend, capabilities: as for `check`.
        doomed: screen by the advice on runs that fail after upstream's checks, too.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[object]],
        fixed: Mapping[str, object],
        *,
        mcore: str = "0.16.1",
        frontend: str = "mcore",
        capabilities: Capabilities | None = None,
        doomed: bool = False,
    ) -> None:
        overlap = values.keys() & fixed.keys()
        if overlap:
            raise InputError(f"fields both fixed and varying: {', '.join(sorted(overlap))}")
        self.values = {name: list(choices) for name, choices in values.items()}
        self._version = resolve_version(mcore)
        self._frontend = frontend
        self._capabilities = capabilities
        self._fixed = dict(fixed)
        type_tables = list(self._type_tables())
        self._given_class = self._traced_class()
        self.tables: list[Table] = type_tables
        for rule in rules_for(self._version, frontend):
            if rule.kind != "error" and not (doomed and rule.doomed):
                continue
            table = self._rule_table(rule)
            if table is not None:
                self.tables.append(table)
        self._merged: list[Table] | None = None

    def _type_tables(self) -> Iterator[Table]:
        """Unknown fields and ill-typed values; what remains is safe for the rules to read."""
        import numpy as np

        context = dict(self._fixed)
        if "multi_latent_attention" in self.values:
            context["multi_latent_attention"] = any(self.values["multi_latent_attention"])
        for name in list(self._fixed):
            problem = field_problem(name, self._fixed[name], context, self._version, self._frontend)
            if problem is not None:
                del self._fixed[name]
                yield Table((problem.rule,), (), np.array(True))
        for name in REQUIRED:
            if name not in self._fixed and name not in self.values:
                yield Table(("T02",), (), np.array(True))
        for name, choices in list(self.values.items()):
            problems = [
                None
                if value is UNSET
                else field_problem(name, value, context, self._version, self._frontend)
                for value in choices
            ]
            self.values[name] = [
                UNSET if problem is not None else value
                for value, problem in zip(choices, problems, strict=True)
            ]
            if any(problems):
                ids = dict.fromkeys(p.rule for p in problems if p is not None)
                broken = np.array([p is not None for p in problems])
                yield Table(tuple(ids), (name,), broken)

    def _traced_class(self) -> type[View]:
        base = given_class(self._version, self._frontend)
        example = build_view(self._fixed, self._version, self._frontend, self._capabilities)
        attributes: dict[str, object] = dict(example.__dict__)
        for name in self.values:
            attributes[name] = _Slot(name, getattr_static(base, name, None))
        return type("TracedView", (base,), attributes)

    def _evaluate(self, rule: Rule, assigned: Mapping[str, object]) -> bool:
        given = self._given_class()
        given.__dict__["_assigned"] = assigned
        view = given if rule.layer == "given" else model_view(given)
        try:
            return bool(rule.check(view))
        except _NeedFieldError:
            raise
        except Exception:  # as in `check`: what cannot be decided is refused
            return True

    def _leaves(
        self, rule: Rule, codes: dict[str, int]
    ) -> Iterator[tuple[Mapping[str, int], bool]]:
        """Every path through the rule: the values it read on the way and its verdict."""
        assigned = {name: self.values[name][code] for name, code in codes.items()}
        try:
            broken = self._evaluate(rule, assigned)
        except _NeedFieldError as need:
            for code in range(len(self.values[need.name])):
                yield from self._leaves(rule, {**codes, need.name: code})
        else:
            yield codes, broken

    def _rule_table(self, rule: Rule) -> Table | None:
        """The table of a rule, None when no combination breaks it."""
        import numpy as np

        broken_paths = [codes for codes, broken in self._leaves(rule, {}) if broken]
        if not broken_paths:
            return None
        read: dict[str, None] = {}
        for codes in broken_paths:
            read.update(dict.fromkeys(codes))
        fields = tuple(name for name in self.values if name in read)
        shape = tuple(len(self.values[name]) for name in fields)
        if math.prod(shape) > _MAX_TABLE:
            raise InputError(
                f"rule {rule.id} reads {', '.join(fields)}, which take {math.prod(shape)} "
                "combinations of values; list fewer values"
            )
        table = np.zeros(shape, dtype=np.bool_)
        for codes in broken_paths:
            table[tuple(codes.get(name, slice(None)) for name in fields)] = True
        return Table((rule.id,), fields, table)

    @property
    def merged(self) -> list[Table]:
        """Tables whose fields another table also has, joined into that table."""
        if self._merged is None:
            self._merged = merge(self.tables, list(self.values))
        return self._merged

    def screen(
        self, codes: Mapping[str, NDArray[np.integer[Any]]], *, explain: bool = False
    ) -> ScreenResult:
        """Decide rows given by one array of codes per varying field (all of one length).

        With `explain` the first rule that fires and counts per rule are returned too (slower).
        """
        import numpy as np

        rows = len(next(iter(codes.values()))) if codes else 1
        compact = {name: np.asarray(code, dtype=np.int32) for name, code in codes.items()}
        ids = tuple(dict.fromkeys(i for table in self.tables for i in table.rule_ids))
        if not explain:
            return ScreenResult(self._fast(compact, rows), None, ids, None)
        first = np.full(rows, -1, dtype=np.int32)
        counts: dict[str, int] = {}
        seen: dict[str, NDArray[np.bool_]] = {}
        for table in self.tables:
            broken = table.take(compact, rows)
            number = ids.index(table.rule_ids[0])
            first[(first < 0) & broken] = number
            name = table.rule_ids[0]
            seen[name] = broken | seen[name] if name in seen else broken
        counts = {name: int(broken.sum()) for name, broken in seen.items()}
        return ScreenResult(first < 0, first, ids, counts)

    def _fast(self, codes: Mapping[str, Any], rows: int) -> NDArray[np.bool_]:
        """Verdicts in blocks that stay in the processor's cache."""
        import numpy as np

        valid = np.ones(rows, dtype=np.bool_)
        block = 1 << 16
        for start in range(0, rows, block):
            part = {name: code[start : start + block] for name, code in codes.items()}
            size = min(block, rows - start)
            broken = np.zeros(size, dtype=np.bool_)
            for table in self.merged:
                broken |= table.take(part, size)
            valid[start : start + block] = ~broken
        return valid


def merge(tables: Sequence[Table], order: Sequence[str], limit: int = 1 << 18) -> list[Table]:
    """Join tables over nested or small unions of fields; verdicts are joined by `or`."""
    import numpy as np

    joined: list[Table] = []
    for table in sorted(tables, key=lambda t: -len(t.fields)):
        for position, other in enumerate(joined):
            union = tuple(n for n in order if n in other.fields or n in table.fields)
            sizes = dict(zip(other.fields, other.broken.shape, strict=True))
            sizes |= dict(zip(table.fields, table.broken.shape, strict=True))
            nested = set(table.fields) <= set(other.fields)
            if nested or math.prod(sizes[n] for n in union) <= limit // 8:
                shape = tuple(sizes[n] for n in union)
                broken = _spread(other, union, shape) | _spread(table, union, shape)
                ids = other.rule_ids + table.rule_ids
                joined[position] = Table(ids, union, np.ascontiguousarray(broken))
                break
        else:
            joined.append(table)
    return joined


def _spread(table: Table, union: Sequence[str], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    import numpy as np

    index = tuple(slice(None) if name in table.fields else None for name in union)
    return np.broadcast_to(table.broken[index], shape)


def screen(
    columns: Mapping[str, object],
    *,
    mcore: str = "0.16.1",
    frontend: str = "mcore",
    capabilities: Capabilities | None = None,
    explain: bool = False,
) -> ScreenResult:
    """Decide arrays of candidates.

    Args:
        columns: per field either a constant or a pair (distinct values, integer codes of shape
            (rows,)).
        mcore, frontend, capabilities: as for `check`.
        explain: also return the first failing rule per row and counts per rule.

    Raises:
        InputError: columns of different lengths, or codes outside their values.
    """
    values: dict[str, Sequence[object]] = {}
    codes: dict[str, Any] = {}
    fixed: dict[str, object] = {}
    for name, column in columns.items():
        if is_column(column):
            values[name], codes[name] = column  # type: ignore[misc]
        else:
            fixed[name] = column
    _require_codes(values, codes)
    tables = Tables(values, fixed, mcore=mcore, frontend=frontend, capabilities=capabilities)
    return tables.screen(codes, explain=explain)


def is_column(column: object) -> bool:
    """Whether a column is a pair (values, codes) rather than a constant."""
    return isinstance(column, tuple) and len(column) == 2 and hasattr(column[1], "dtype")


def _require_codes(values: Mapping[str, Sequence[object]], codes: Mapping[str, Any]) -> None:
    lengths = {len(code) for code in codes.values()}
    if len(lengths) > 1:
        raise InputError(f"columns of different lengths: {sorted(lengths)}")
    for name, code in codes.items():
        if len(code) and (code.min() < 0 or code.max() >= len(values[name])):
            raise InputError(f"codes of {name} lie outside its {len(values[name])} values")
