"""The best of a space, kept while blocks of it go by: fastest candidates and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.memory.composition import MEMORY_PARTS
from tuner.search.enumeration import ValidCandidates
from tuner.search.guide import guide_steps
from tuner.search.planning.estimator import TIME_PARTS, BlockEstimates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate that fits, with its estimate in seconds and bytes."""

    candidate: Candidate
    step_time_s: float
    memory_bytes: float
    limit_bytes: float
    time_parts: dict[str, float]
    memory_parts: dict[str, float]
    exact: bool


def pareto(time: Values, memory: Values) -> NDArray[np.int64]:
    """Places that no other beats in both time and memory, fastest first; one of equals."""
    import numpy as np

    order = np.lexsort((memory, time))
    lowest = np.minimum.accumulate(memory[order])
    before = np.concatenate([[np.inf], lowest[:-1]])
    result: NDArray[np.int64] = order[memory[order] < before]
    return result


def ranked(block: ValidCandidates, found: BlockEstimates, rows: Iterable[int]) -> list[Ranked]:
    """These rows as candidates with their estimates."""
    return [
        Ranked(
            candidate=block.candidate(row),
            step_time_s=float(found.step_time_s[row]),
            memory_bytes=float(found.memory_bytes[row]),
            limit_bytes=float(found.limit_bytes[row]),
            time_parts=dict(zip(TIME_PARTS, found.time_parts[row].tolist(), strict=True)),
            memory_parts=dict(zip(MEMORY_PARTS, found.memory_parts[row].tolist(), strict=True)),
            exact=bool(found.exact[row]),
        )
        for row in rows
    ]


def distinct(entries: Sequence[Ranked]) -> list[Ranked]:
    """Fastest first; of candidates that estimates do not tell apart the one that practitioners
    would try first (`guide`)."""
    best: dict[tuple[float, float], Ranked] = {}
    for entry in entries:
        key = (round(entry.step_time_s, 9), round(entry.memory_bytes, -3))
        kept = best.get(key)
        if kept is None or _order(entry) < _order(kept):
            best[key] = entry
    return sorted(best.values(), key=lambda e: (e.step_time_s, e.memory_bytes, e.candidate.key))


def _order(entry: Ranked) -> tuple[Any, ...]:
    return guide_steps(entry.candidate), entry.candidate.key


def front_of(entries: Sequence[Ranked]) -> list[Ranked]:
    """The entries that no other beats in both time and memory, leanest first."""
    import numpy as np

    if not entries:
        return []
    time = np.array([e.step_time_s for e in entries])
    memory = np.array([e.memory_bytes for e in entries])
    return [entries[place] for place in pareto(time, memory).tolist()][::-1]
