"""Every candidate of a space estimated, and the best of them found.

A space is a head (layout, recomputation, CUDA graphs) and tails (offload, environment) that go
with it. Heads are composed and timed; tails change them by arithmetic, for all pairs of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tuner.memory.composition import MEMORY_PARTS
from tuner.search.enumeration import FactoredSpace, factor_space
from tuner.search.guide import guide_steps
from tuner.search.planning.estimator import (
    OFFLOAD_FIELDS,
    TIME_PARTS,
    SpaceEstimator,
)
from tuner.search.planning.front import Ranked, pareto
from tuner.search.planning.offload import Offload, Passes
from tuner.search.planning.plain import PlainBlock
from tuner.search.requirements import Requirements
from tuner.search.space import SearchSpace
from tuner.search.validity import ValidityChecker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Rows = NDArray[np.int64]
    Flags = NDArray[np.bool_]

BEYOND_BYTES = 10 * 2**30
_PAIRS = 1 << 19  # of heads and tails looked at together

Progress = Callable[[str, int, int], None]
"""Told a stage of planning ("profiles", "candidates"), how much of it is done, and of how much."""


@dataclass(slots=True)
class Counts:
    """Candidates of a space by what became of them."""

    enumerated: int = 0
    valid: int = 0
    not_required: int = 0
    not_estimated: int = 0
    oom: int = 0
    feasible: int = 0
    problems: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Tails:
    """The distinct tails of a group of heads: a row of each, candidates that share its estimate."""

    rows: Rows
    count: Rows


@dataclass(frozen=True, slots=True)
class _Found:
    """Pairs of a head and a tail with their figures, arrays `[pair]`."""

    head: Rows
    tail: Rows
    step_s: Values
    memory: Values

    def at(self, rows: Rows) -> _Found:
        return _Found(*(getattr(self, name)[rows] for name in self.__slots__))

    def best(self, count: int) -> _Found:
        """The `count` fastest, and those of the Pareto front."""
        import numpy as np

        rows = np.arange(len(self.head))
        fastest = rows
        if len(rows) > count:
            fastest = np.argpartition(self.step_s, count)[:count]
        return self.at(np.union1d(fastest, pareto(self.step_s, self.memory)))


class WholeSpace:
    """Estimates a space: `best` after the settings of `heads` are measured."""

    def __init__(
        self, space: SearchSpace, checker: ValidityChecker, requirements: Requirements
    ) -> None:
        self._requirements = requirements
        self.space: FactoredSpace = factor_space(space, checker, OFFLOAD_FIELDS)

    def best(
        self, estimator: SpaceEstimator, kept: int, progress: Progress
    ) -> tuple[list[Ranked], Ranked | None, Counts]:
        """The `kept` fastest candidates that fit and those of the Pareto front; the fastest that
        would fit with `BEYOND_BYTES` more; and counts."""
        import numpy as np

        tails = self._tails(estimator.place.world_size)
        heads = self._heads(estimator.place.world_size)
        plain = PlainBlock(estimator, self.space.head)
        limits = plain.limits[plain.pair] - self._requirements.min_free_bytes
        sizes = plain.tensor_sizes[plain.index.setting]
        own = estimator.offload_of(self.space.head, sizes)
        offload = {
            int(size): estimator.offload_of(
                self.space.tail, np.full(len(self.space.tail), size, dtype=np.int64)
            )
            for size in np.unique(sizes)
        }
        counts = self._counts(plain, tails, heads)
        rows = self._worth_timing(plain, limits + BEYOND_BYTES, sizes, own, offload, tails, heads)
        progress("candidates", 0, len(rows))
        passes = plain.passes(rows)
        found: list[_Found] = []
        larger: list[_Found] = []
        done = 0
        for size, group, places in self._portions(rows, sizes, tails):
            ends = tails[group]
            moved = offload[size].at(ends.rows)
            portion = _Portion(plain, limits, passes, own, moved, estimator)
            near, fitting = portion.pairs(rows, places, ends, counts)
            found.append(fitting.best(kept))
            larger.append(near)
            done += len(places)
            progress("candidates", done, len(rows))
        counts.oom = counts.valid - counts.not_required - counts.not_estimated - counts.feasible
        best, beyond = _joined(found).best(kept), _joined(larger).best(1)
        position = np.full(len(self.space.head), -1, dtype=np.int64)
        position[rows] = np.arange(len(rows))
        told = _Teller(self.space, plain, limits, passes, position, own, offload, sizes)
        return told.ranked(best), next(iter(told.ranked(beyond)), None), counts

    def _tails(self, world_size: int) -> list[_Tails]:
        """By group of heads its tails; of those alike in estimates the one tried first."""
        import numpy as np

        space = self.space
        names = set(space.tail.codes)
        forbid = {n: v for n, v in self._requirements.forbid.items() if n in names}
        only = replace(self._requirements, forbid=forbid, min_data_parallel_size=1)
        allowed = only.met(space.tail, world_size)
        code = np.zeros(len(space.tail), dtype=np.int64)
        for name in OFFLOAD_FIELDS:
            if name in space.tail.codes:
                code = code * len(space.tail.values[name]) + space.tail.codes[name]
        order = np.array([guide_steps(space.tail.candidate(row)) for row in range(len(space.tail))])
        found = []
        for group in range(int(space.head_group.max(initial=-1)) + 1):
            rows = np.flatnonzero((space.tail_group == group) & allowed)
            rows = rows[np.argsort(order[rows], kind="stable")]
            _, first, count = np.unique(code[rows], return_index=True, return_counts=True)
            found.append(_Tails(rows[first], count.astype(np.int64)))
        return found

    def _heads(self, world_size: int) -> Flags:
        """Heads that meet what the job asks of them."""
        names = set(self.space.tail.codes)
        forbid = {n: v for n, v in self._requirements.forbid.items() if n not in names}
        return replace(self._requirements, forbid=forbid).met(self.space.head, world_size)

    def _counts(self, plain: PlainBlock, tails: Sequence[_Tails], heads: Flags) -> Counts:
        import numpy as np

        space = self.space
        each = np.array([tail.count.sum() for tail in tails], dtype=np.int64)
        weight = each[space.head_group] * heads if len(each) else np.zeros(0, dtype=np.int64)
        problems = plain.problems(weight)
        valid = len(space)
        return Counts(
            enumerated=space.head.enumerated,
            valid=valid,
            not_required=valid - int(weight.sum()),
            not_estimated=sum(problems.values()),
            problems=Counter(problems),
        )

    def _worth_timing(
        self,
        plain: PlainBlock,
        limits: Values,
        sizes: Rows,
        own: Offload,
        offload: dict[int, Offload],
        tails: Sequence[_Tails],
        heads: Flags,
    ) -> Rows:
        """Heads that some tail may bring below the limits."""
        import numpy as np

        parts, step = plain.parts[plain.pair], plain.step_bytes[plain.pair]
        group = self.space.head_group
        result = heads.copy()
        for size, moved in offload.items():
            share, fraction = (
                np.array([_most(value[tail.rows]) for tail in tails])[group]
                for value in (moved.share, moved.fraction)
            )
            least = own.and_also(Offload(share, fraction)).remaining(parts, step).sum(axis=1)
            result &= (sizes != size) | (least + plain.graph_bytes <= limits)
        return np.flatnonzero(result)

    def _portions(
        self, rows: Rows, sizes: Rows, tails: Sequence[_Tails]
    ) -> Iterator[tuple[int, int, Rows]]:
        """Places in `rows` of one tensor-parallel size and one group of heads, not too many."""
        import numpy as np

        keys = sizes[rows] * len(tails) + self.space.head_group[rows]
        order = np.argsort(keys, kind="stable")
        distinct, starts = np.unique(keys[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        for key, start, end in zip(distinct.tolist(), starts.tolist(), ends, strict=True):
            size, group = divmod(key, len(tails))
            most = max(1, _PAIRS // max(1, len(tails[group].rows)))
            for first in range(start, end, most):
                yield size, group, order[first : min(first + most, end)]


def _most(values: Values) -> float:
    """The largest number; 0 where there is none."""
    import numpy as np

    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else 0.0


def _joined(found: Sequence[_Found]) -> _Found:
    import numpy as np

    if not found:
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return _Found(none, none, nothing, nothing)
    return _Found(
        *(np.concatenate([getattr(one, name) for one in found]) for name in _Found.__slots__)
    )


@dataclass(frozen=True, slots=True)
class _Portion:
    """Heads of one group and one tensor-parallel size with each of their tails."""

    plain: PlainBlock
    limits: Values
    passes: Passes
    own: Offload
    offload: Offload
    estimator: SpaceEstimator

    def pairs(
        self, rows: Rows, places: Rows, tails: _Tails, counts: Counts
    ) -> tuple[_Found, _Found]:
        """The fastest pair just above the limit, and all that fit; both are counted."""
        import numpy as np

        heads, many = rows[places], len(tails.rows)
        at = np.repeat(np.arange(len(heads)), many)
        tail = np.tile(np.arange(many), len(heads))
        pair = self.plain.pair[heads][at]
        parts = self.plain.parts[pair]
        moved = self.own.at(heads[at]).and_also(self.offload.at(tail))
        memory = moved.remaining(parts, self.plain.step_bytes[pair]).sum(axis=1)
        memory += self.plain.graph_bytes[heads][at]
        limit = self.limits[heads][at]
        added = moved.added(self.passes.at(places[at]), parts[:, 2], self.estimator.place)
        step = self.passes.step_s[places[at]] + added
        pairs = _Found(heads[at], tails.rows[tail], step, memory)
        fits, timed = memory <= limit, np.isfinite(step)
        count = tails.count[tail]
        unknown = (fits & ~timed) | ~np.isfinite(memory)
        counts.feasible += int(count[fits & timed].sum())
        counts.not_estimated += int(count[unknown].sum())
        near = np.flatnonzero(~fits & timed & (memory <= limit + BEYOND_BYTES))
        fastest = near[np.argmin(step[near])][None] if len(near) else near
        return pairs.at(fastest), pairs.at(np.flatnonzero(fits & timed))


@dataclass(frozen=True, slots=True)
class _Teller:
    """Pairs of heads and tails as candidates with their estimates."""

    space: FactoredSpace
    plain: PlainBlock
    limits: Values
    passes: Passes
    position: Rows
    own: Offload
    offload: dict[int, Offload]
    sizes: Rows

    def ranked(self, found: _Found) -> list[Ranked]:
        """These pairs, fastest first."""
        import numpy as np

        result = []
        for place in np.argsort(found.step_s, kind="stable").tolist():
            head, tail = int(found.head[place]), int(found.tail[place])
            moved = self.offload[int(self.sizes[head])].at([tail])
            moved = self.own.at([head]).and_also(moved)
            pair = int(self.plain.pair[head])
            spent = self.passes.spent[self.position[head]].tolist()
            step = float(found.step_s[place])
            spent.append(step - float(self.passes.step_s[self.position[head]]))
            held = self.plain.parts[[pair]], self.plain.step_bytes[[pair]]
            parts = moved.remaining(*held)[0].tolist()
            parts[MEMORY_PARTS.index("other")] += float(self.plain.graph_bytes[head])
            result.append(
                Ranked(
                    candidate=self.space.candidate(head, tail),
                    step_time_s=step,
                    memory_bytes=float(found.memory[place]),
                    limit_bytes=float(self.limits[head]),
                    time_parts=dict(zip(TIME_PARTS, spent, strict=True)),
                    memory_parts=dict(zip(MEMORY_PARTS, parts, strict=True)),
                    exact=bool(self.plain.exact[pair]),
                )
            )
        return result
