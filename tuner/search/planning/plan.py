"""Plans a job: every valid candidate of its space estimated, the best ones told."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tuner.candidate import Candidate
from tuner.constraints.view import UNSET
from tuner.errors import InputError
from tuner.search.enumeration import ValidCandidates, enumerate_space
from tuner.search.planning.estimator import SpaceEstimator, effects
from tuner.search.planning.front import Ranked, distinct, front_of, ranked
from tuner.search.planning.prior import listed
from tuner.search.planning.whole import Counts, Progress, WholeSpace
from tuner.search.planning.workplace import Workplace
from tuner.search.requirements import Requirements
from tuner.search.space import SearchSpace
from tuner.search.validity import ValidityChecker

_KEPT = 3_000  # candidates that are estimated again when the settings of the best are profiled
_SHOWN = 20  # candidates whose settings are profiled before those of the front
_PROFILED_TOP = 16  # settings of the best candidates that are profiled themselves, in each round
_ROUNDS = 2
_TOGETHER = 8  # settings profiled between two signs of progress


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidates that fit, best first, those on the Pareto front, leanest first, and counts.

    `beyond` is the fastest of those that would fit with `BEYOND_BYTES` more, where it beats them.
    `seconds` is what planning took, `profiled` how many settings were dry-run.
    """

    best: tuple[Ranked, ...]
    pareto: tuple[Ranked, ...]
    beyond: Ranked | None
    counts: Counts
    seconds: float
    profiled: int


def plan_space(
    space: SearchSpace,
    checker: ValidityChecker,
    place: Workplace,
    requirements: Requirements,
    *,
    workers: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Plan:
    """Estimate every valid candidate of the space and keep the best.

    Settings are profiled where they are not on disk yet, `workers` at a time. The settings of the
    candidates that come out best are then profiled themselves, and these candidates estimated
    again. Raises InputError where the space cannot be enumerated.
    """
    started = time.perf_counter()
    estimator = SpaceEstimator(place, workers=workers, added=_effects_of(space))
    needed = estimator.needed(without_effects(space, checker))
    profiled = _measure(estimator, needed, progress)
    whole = WholeSpace(space, checker, requirements)
    entries, beyond, counts = whole.best(estimator, _KEPT, progress)
    for _ in range(_ROUNDS):
        entries, more = _exact(estimator, entries, progress)
        profiled += more
    entries = distinct(entries)
    return Plan(
        tuple(entries),
        tuple(front_of(entries)),
        _if_faster(beyond, entries),
        counts,
        time.perf_counter() - started,
        profiled,
    )


def without_effects(space: SearchSpace, checker: ValidityChecker) -> ValidCandidates:
    """The settings of the space, and the modules it may offload."""
    left_out = _with_conditions(space, _effects_of(space))
    kept = [a for a in space.axes if a.field not in left_out and not a.field.startswith("env.")]
    fixed = {k: v for k, v in space.fixed.items() if k not in left_out}
    found = enumerate_space(SearchSpace(tuple(kept), fixed), checker)
    offered = {a.field: list(a.values) for a in space.axes if a.field == "offload_modules"}
    if "offload_modules" in space.fixed:
        offered = {"offload_modules": [space.fixed["offload_modules"]]}
    return ValidCandidates({**found.values, **offered}, found.codes, found.fixed, found.enumerated)


def _effects_of(space: SearchSpace) -> frozenset[str]:
    """The fields of a space whose effect is added."""
    values = {a.field: (*a.values, *((UNSET,) if a.when else ())) for a in space.axes}
    return effects({**{name: (value,) for name, value in space.fixed.items()}, **values})


def _with_conditions(space: SearchSpace, left_out: Collection[str]) -> set[str]:
    """Those of `left_out` that no axis left in depends on."""
    left = set(left_out)
    while True:
        named = {name for a in space.axes if a.field not in left for name, _ in a.when}
        if not named & left:
            return left
        left -= named


def _measure(estimator: SpaceEstimator, settings: Sequence[Candidate], progress: Progress) -> int:
    for done in range(0, len(settings), _TOGETHER):
        progress("profiles", done, len(settings))
        estimator.measure(settings[done : done + _TOGETHER])
    progress("profiles", len(settings), len(settings))
    return len(settings)


def _if_faster(beyond: Ranked | None, entries: Sequence[Ranked]) -> Ranked | None:
    if beyond is None or (entries and entries[0].step_time_s <= beyond.step_time_s):
        return None
    return beyond


def _exact(
    estimator: SpaceEstimator, entries: list[Ranked], progress: Progress
) -> tuple[list[Ranked], int]:
    """The entries estimated again, the settings of the best ones and of the front profiled."""
    best = distinct(entries)
    wanted: dict[Candidate, None] = {}
    for entry in [*best[:_SHOWN], *front_of(best), *best[_SHOWN : 8 * _PROFILED_TOP]]:
        if not entry.exact and len(wanted) < _PROFILED_TOP:
            wanted.update(dict.fromkeys(estimator.settings(listed([entry.candidate]))))
    missing = [setting for setting in wanted if not estimator.memory.is_exact(setting)]
    if not missing:
        return entries, 0
    _measure(estimator, missing, progress)
    block = listed([entry.candidate for entry in entries])
    found = estimator.estimate(block)
    fitting = [r for r in range(len(block)) if found.fits[r] and found.step_time_s[r] > 0]
    return ranked(block, found, fitting), len(missing)


def require_gpu_space(space: SearchSpace) -> None:
    """Raise InputError where candidates choose their own number of GPUs."""
    if any(axis.field == "world_size" for axis in space.axes):
        raise InputError(
            "a plan is for one number of GPUs", field="space.axes.world_size", fix="use --gpus"
        )
