"""Every candidate of a space estimated, and the best of them found.

A space is a head (layout, recomputation, CUDA graphs) and tails (offload, environment) that go
with it. The memory of heads is composed; tails change it by arithmetic, for all pairs of both.
Heads are timed, fastest first by what they take without recomputation, until those left can be
neither among the best nor leaner than what is faster.
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
    with_offload,
)
from tuner.search.planning.front import Ranked, pareto
from tuner.search.planning.offload import Offload, Passes
from tuner.search.planning.plain import PlainBlock
from tuner.search.planning.workplace import Workplace
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
_FIRST_BATCH, _LARGEST_BATCH = 1 << 12, 1 << 16  # heads timed before it is asked which others to

Progress = Callable[[str, int, int], None]
"""Told a stage of planning (such as "profiles"), how much of it is done, and of how much."""


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
        least = self._least_bytes(plain, sizes, own, offload, tails)
        rows = np.flatnonzero(heads & (least <= limits + BEYOND_BYTES))
        progress("candidates", 0, len(rows))
        least_s = plain.least_seconds(rows)
        order = np.argsort(least_s, kind="stable")
        rows, least_s = rows[order], least_s[order]
        found = _Best(kept)
        for start, end in _batches(len(rows)):
            batch = rows[start:end]
            worth = found.may_have(least_s[start:end], least[batch])
            timed, left = batch[worth], batch[~worth]
            passes = plain.passes(timed)
            for size, group, places in self._portions(timed, sizes, tails):
                portion = _Portion(plain, limits, own, offload[size], tails[group])
                found.add(*portion.pairs(timed[places], passes.at(places), estimator, counts))
            for size, group, places in self._portions(left, sizes, tails):
                portion = _Portion(plain, limits, own, offload[size], tails[group])
                portion.count(left[places], counts)
            progress("candidates", end, len(rows))
        counts.oom = counts.valid - counts.not_required - counts.not_estimated - counts.feasible
        told = _Teller(self.space, plain, limits, own, offload, sizes, estimator.place)
        return told.ranked(found.fitting), next(iter(told.ranked(found.beyond)), None), counts

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

    def _least_bytes(
        self,
        plain: PlainBlock,
        sizes: Rows,
        own: Offload,
        offload: dict[int, Offload],
        tails: Sequence[_Tails],
    ) -> Values:
        """What each head needs with the tail that leaves least on the device."""
        import numpy as np

        group, every = self.space.head_group, slice(None)
        result = np.full(len(sizes), np.nan)
        for size, moved in offload.items():
            share, fraction = (
                np.array([_most(value[tail.rows]) for tail in tails])[group]
                for value in (moved.share, moved.fraction)
            )
            most = replace(Offload.nothing(len(sizes)), share=share, fraction=fraction)
            most = own.and_also(most).where(plain.keeps)
            least = plain.held(every, most).sum(axis=1)
            result = np.where(sizes == size, least, result)
        return result

    def _portions(
        self, rows: Rows, sizes: Rows, tails: Sequence[_Tails]
    ) -> Iterator[tuple[int, int, Rows]]:
        """Places in `rows` of one tensor-parallel size and one group of heads, not too many."""
        import numpy as np

        keys = sizes[rows] * len(tails) + self.space.head_group[rows]
        order = np.argsort(keys, kind="stable")
        distinct, starts = np.unique(keys[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)][: len(distinct)]
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


def _batches(count: int) -> Iterator[tuple[int, int]]:
    """Stretches of a sequence, each twice as long as the one before, up to a limit."""
    start, size = 0, _FIRST_BATCH
    while start < count:
        end = min(count, start + size)
        yield start, end
        start, size = end, min(2 * size, _LARGEST_BATCH)


class _Best:
    """The best of the pairs added: `fitting` (`_Found.best`), and the fastest too large ones."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self.fitting, self.beyond = _joined([]), _joined([])

    def add(self, near: _Found, fitting: _Found) -> None:
        self.fitting = _joined([self.fitting, fitting]).best(self._kept)
        self.beyond = _joined([self.beyond, near]).best(1)

    def may_have(self, least_s: Values, least_bytes: Values) -> Flags:
        """Whether a head may make a pair that belongs here, given the least it takes and needs."""
        import numpy as np

        step, memory = self.fitting.step_s, self.fitting.memory
        if len(step) < self._kept:
            return np.ones(len(least_s), dtype=bool)
        slowest = np.partition(step, self._kept - 1)[self._kept - 1]
        order = np.argsort(step, kind="stable")
        leanest = np.concatenate([[np.inf], np.minimum.accumulate(memory[order])])
        faster = np.searchsorted(step[order], least_s, side="right")
        result: Flags = (least_s <= slowest) | (least_bytes < leanest[faster])
        return result


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
    own: Offload
    offload: Offload
    tails: _Tails

    def pairs(
        self, heads: Rows, passes: Passes, estimator: SpaceEstimator, counts: Counts
    ) -> tuple[_Found, _Found]:
        """The fastest pair just above the limit, and all that fit; both are counted."""
        import numpy as np

        at, tail = self._both(heads)
        memory, moved = self._memory(heads[at], tail)
        limit = self.limits[heads][at]
        updated = self.plain.updated[self.plain.pair[heads]][at]
        step = passes.step_s[at] + sum(moved.added(passes.at(at), updated, estimator.place))
        pairs = _Found(heads[at], self.tails.rows[tail], step, memory)
        fits, timed = memory <= limit, np.isfinite(step)
        self._count(tail, fits & timed, (fits & ~timed) | ~np.isfinite(memory), counts)
        near = np.flatnonzero(~fits & timed & (memory <= limit + BEYOND_BYTES))
        fastest = near[np.argmin(step[near])][None] if len(near) else near
        return pairs.at(fastest), pairs.at(np.flatnonzero(fits & timed))

    def count(self, heads: Rows, counts: Counts) -> None:
        """Count the pairs of heads that have step times, without working these out."""
        import numpy as np

        at, tail = self._both(heads)
        memory, _ = self._memory(heads[at], tail)
        self._count(tail, memory <= self.limits[heads][at], ~np.isfinite(memory), counts)

    def _both(self, heads: Rows) -> tuple[Rows, Rows]:
        """Every pair, as places in `heads` and in the tails."""
        import numpy as np

        many = len(self.tails.rows)
        return np.repeat(np.arange(len(heads)), many), np.tile(np.arange(many), len(heads))

    def _memory(self, heads: Rows, tail: Rows) -> tuple[Values, Offload]:
        """Bytes of each pair, and what it moves."""
        moved = self.own.at(heads).and_also(self.offload.at(self.tails.rows[tail]))
        moved = moved.where(self.plain.keeps[heads])
        return self.plain.held(heads, moved).sum(axis=1), moved

    def _count(self, tail: Rows, feasible: Flags, unknown: Flags, counts: Counts) -> None:
        count = self.tails.count[tail]
        counts.feasible += int(count[feasible].sum())
        counts.not_estimated += int(count[unknown].sum())


@dataclass(frozen=True, slots=True)
class _Teller:
    """Pairs of heads and tails as candidates with their estimates."""

    space: FactoredSpace
    plain: PlainBlock
    limits: Values
    own: Offload
    offload: dict[int, Offload]
    sizes: Rows
    place: Workplace

    def ranked(self, found: _Found) -> list[Ranked]:
        """These pairs, fastest first."""
        import numpy as np

        result = []
        heads = np.unique(found.head)
        passes = self.plain.passes(heads)
        for place in np.argsort(found.step_s, kind="stable").tolist():
            head, tail = int(found.head[place]), int(found.tail[place])
            moved = self.offload[int(self.sizes[head])].at([tail])
            moved = self.own.at([head]).and_also(moved)
            moved = moved.where(self.plain.keeps[[head]])
            pair = int(self.plain.pair[head])
            own = passes.at([int(np.searchsorted(heads, head))])
            updated = self.plain.updated[[pair]]
            spent = with_offload(own.spent, moved.added(own, updated, self.place))[0].tolist()
            parts = self.plain.held([head], moved)[0].tolist()
            result.append(
                Ranked(
                    candidate=self.space.candidate(head, tail),
                    step_time_s=float(found.step_s[place]),
                    memory_bytes=float(found.memory[place]),
                    limit_bytes=float(self.limits[head]),
                    time_parts=dict(zip(TIME_PARTS, spent, strict=True)),
                    memory_parts=dict(zip(MEMORY_PARTS, parts, strict=True)),
                    exact=bool(self.plain.exact[pair]),
                )
            )
        return result
