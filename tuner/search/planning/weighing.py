"""One configuration and the levers it has: what each would save and cost, by composed estimates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.composition import MEMORY_PARTS
from tuner.search.levers import SAVES, Lever, levers
from tuner.search.planning.estimator import TIME_PARTS, SpaceEstimator
from tuner.search.planning.prior import listed
from tuner.search.validity import ValidityChecker

_LEAST_SAVED = 0.001  # of the peak: what is less is noise of profiles
_MOST_COMBINED = 3  # levers that are tried in every combination
_OF_EACH_AIM = 10  # levers of an aim that are combined
_COMBINATIONS_ESTIMATED = 8
_MOST_IN_TURN = 6
_MOST_COMPANIONS = 3
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Figures:
    """Estimates of one candidate: bytes on the fullest rank, seconds of a step, and their parts."""

    memory_bytes: float
    limit_bytes: float
    step_time_s: float
    memory_parts: Mapping[str, float]
    time_parts: Mapping[str, float]

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class Weighed:
    """A lever that rules allow, and the configuration after it."""

    lever: Lever
    candidate: Candidate
    figures: Figures
    saved_bytes: float
    added_s: float

    @property
    def seconds_per_gib(self) -> float | None:
        """Seconds of a step for each GiB saved; None where nothing is saved."""
        if self.saved_bytes <= _LEAST_SAVED * self.figures.memory_bytes:
            return None
        return self.added_s / (self.saved_bytes / _GIB)


@dataclass(frozen=True, slots=True)
class Better:
    """Levers by name, and the configuration after all of them."""

    names: tuple[str, ...]
    candidate: Candidate
    figures: Figures


@dataclass(frozen=True, slots=True)
class Blocked:
    """A lever that a rule refuses here, or that cannot be estimated."""

    lever: Lever
    rule: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Weighing:
    """What a configuration needs, and its levers.

    `savers` come in order of their cost per GiB, `faster` fastest first. `better` is the fastest
    change that fits, of one lever or several: faster than the configuration, or fitting where it
    does not.
    """

    candidate: Candidate
    figures: Figures
    savers: tuple[Weighed, ...]
    faster: tuple[Weighed, ...]
    without_effect: tuple[Weighed, ...]
    blocked: tuple[Blocked, ...]
    better: Better | None


def permitted(
    lever: Lever, candidate: Candidate, checker: ValidityChecker, known: Collection[str]
) -> Lever | Blocked:
    """The lever as the rules allow it, with the companions they ask for; or what blocks it.

    Companions are variables of the environment and switches that no lever moves. Rules in `known`
    are broken by the candidate itself.
    """
    for _ in range(_MOST_COMPANIONS + 1):
        changed = lever.applied(candidate)
        broken = [v for v in checker.errors(changed) if v.rule not in known]
        if not broken:
            return lever
        fixes = {v.rule: v.fix for v in checker.errors(changed, fixes=True)}
        companions = fixes.get(broken[0].rule)
        if not companions or not _are_companions(companions, lever, checker):
            break
        lever = lever.along_with(companions)
    return Blocked(lever, broken[0].rule, broken[0].message)


def _are_companions(changes: Mapping[str, object], lever: Lever, checker: ValidityChecker) -> bool:
    taken = {field.name for field in fields(Candidate)} | set(checker.fixed) | set(lever.changes)
    return all(name == "env" or name not in taken for name in changes)


class Scales:
    """Weighs configurations for one workplace, under the rules."""

    def __init__(self, estimator: SpaceEstimator, checker: ValidityChecker) -> None:
        self._estimator, self.checker = estimator, checker

    def weigh(self, candidate: Candidate) -> Weighing:
        """A configuration and its levers. Raises InputError where it cannot be estimated."""
        allowed: list[tuple[Lever, Candidate]] = []
        blocked: list[Blocked] = []
        known = {violation.rule for violation in self.checker.errors(candidate)}
        for lever in levers(candidate, self._estimator.place.model):
            found = permitted(lever, candidate, self.checker, known)
            if isinstance(found, Blocked):
                blocked.append(found)
            else:
                allowed.append((found, found.applied(candidate)))
        own, *others = self.figures([candidate, *(changed for _, changed in allowed)])
        if isinstance(own, str):
            raise InputError(f"cannot be estimated: {own}")
        weighed = []
        for (lever, changed), figures in zip(allowed, others, strict=True):
            if isinstance(figures, str):
                blocked.append(Blocked(lever, None, figures))
            else:
                weighed.append(_weighed(lever, changed, figures, own))
        savers = [w for w in weighed if w.seconds_per_gib is not None and w.lever.aim == SAVES]
        savers.sort(key=lambda w: (w.seconds_per_gib or 0.0, -w.saved_bytes))
        faster = [w for w in weighed if w not in savers and w.added_s < 0]
        faster.sort(key=lambda w: w.added_s)
        return Weighing(
            candidate,
            own,
            tuple(savers),
            tuple(faster),
            tuple(w for w in weighed if w not in savers and w not in faster),
            tuple(blocked),
            self._better(candidate, own, savers, faster),
        )

    def _better(
        self,
        candidate: Candidate,
        own: Figures,
        savers: Sequence[Weighed],
        faster: Sequence[Weighed],
    ) -> Better | None:
        found = [Better((w.lever.name,), w.candidate, w.figures) for w in (*savers, *faster)]
        fitting = [one for one in found if one.figures.fits]
        goal = own.step_time_s if own.fits else float("inf")
        goal = min([goal, *(one.figures.step_time_s for one in fitting)])
        fitting += self._combined(candidate, own, savers, faster, goal)
        if not own.fits and not fitting:
            fitting += self._in_turn(candidate, own, savers)
        best = min(fitting, key=lambda one: one.figures.step_time_s, default=None)
        if best is None or (own.fits and best.figures.step_time_s >= own.step_time_s):
            return None
        return best

    def _combined(
        self,
        candidate: Candidate,
        own: Figures,
        savers: Sequence[Weighed],
        faster: Sequence[Weighed],
        goal_s: float,
    ) -> list[Better]:
        """Few levers at once that fit and should be faster than `goal_s`.

        What single levers save and cost, added up, says which combinations are estimated.
        """
        choices = [*savers[:_OF_EACH_AIM], *faster[:_OF_EACH_AIM]]
        promising: list[tuple[float, tuple[str, ...]]] = []
        for size in range(2, _MOST_COMBINED + 1):
            for chosen in combinations(choices, size):
                memory_bytes = own.memory_bytes - sum(one.saved_bytes for one in chosen)
                seconds = own.step_time_s + sum(one.added_s for one in chosen)
                if memory_bytes <= own.limit_bytes and 0 < seconds < goal_s:
                    promising.append((seconds, tuple(one.lever.name for one in chosen)))
        paths: dict[Candidate, tuple[str, ...]] = {}
        for _, names in sorted(promising):
            changed = self._applied(candidate, names)
            if changed is not None:
                paths.setdefault(changed, names)
            if len(paths) == _COMBINATIONS_ESTIMATED:
                break
        estimated = self.figures(list(paths)) if paths else []
        return [
            Better(names, changed, figures)
            for (changed, names), figures in zip(paths.items(), estimated, strict=True)
            if not isinstance(figures, str) and figures.fits
        ]

    def _in_turn(
        self, candidate: Candidate, own: Figures, savers: Sequence[Weighed]
    ) -> list[Better]:
        """Savers one after the other, cheapest first, until the configuration fits."""
        names: tuple[str, ...] = ()
        figures = own
        for one in savers:
            changed = self._applied(candidate, (*names, one.lever.name))
            if changed is None:
                continue
            (found,) = self.figures([changed])
            if isinstance(found, str) or found.memory_bytes >= figures.memory_bytes:
                continue
            names, figures = (*names, one.lever.name), found
            if figures.fits:
                return [Better(names, changed, figures)]
            if len(names) == _MOST_IN_TURN:
                break
        return []

    def _applied(self, candidate: Candidate, names: Sequence[str]) -> Candidate | None:
        """The candidate after levers of these names; None where one has gone or rules refuse it.

        What a lever changes depends on those before it: modules add up.
        """
        known = {violation.rule for violation in self.checker.errors(candidate)}
        for name in names:
            offered = levers(candidate, self._estimator.place.model)
            lever = next((one for one in offered if one.name == name), None)
            if lever is None:
                return None
            found = permitted(lever, candidate, self.checker, known)
            if isinstance(found, Blocked):
                return None
            candidate = found.applied(candidate)
        return candidate

    def figures(self, candidates: Sequence[Candidate]) -> list[Figures | str]:
        """Estimates of candidates, or why there are none."""
        import numpy as np

        block = listed(candidates)
        self._estimator.measure(self._estimator.needed(block, exact=True))
        found = self._estimator.estimate(block, beyond_bytes=float("inf"))
        result: list[Figures | str] = []
        for row in range(len(candidates)):
            if not np.isfinite(found.memory_bytes[row]):
                reasons = self._estimator.estimate(block.take(np.array([row]))).problems
                result.append(next(iter(reasons), "its memory cannot be composed"))
            elif not np.isfinite(found.step_time_s[row]):
                result.append("its step cannot be timed")
            else:
                memory = dict(zip(MEMORY_PARTS, found.memory_parts[row].tolist(), strict=True))
                spent = dict(zip(TIME_PARTS, found.time_parts[row].tolist(), strict=True))
                result.append(
                    Figures(
                        float(found.memory_bytes[row]),
                        float(found.limit_bytes[row]),
                        float(found.step_time_s[row]),
                        memory,
                        spent,
                    )
                )
        return result


def _weighed(lever: Lever, candidate: Candidate, figures: Figures, own: Figures) -> Weighed:
    return Weighed(
        lever,
        candidate,
        figures,
        own.memory_bytes - figures.memory_bytes,
        figures.step_time_s - own.step_time_s,
    )
