"""Every valid candidate of a space as columns, screened by the rules while it grows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.constraints.enumeration import enumerate_factored, enumerate_valid
from tuner.constraints.view import UNSET
from tuner.search.space import Axis, SearchSpace, collect_env
from tuner.search.spelling import Spelling, spell_axes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuner.search.validity import ValidityChecker


@dataclass(frozen=True, slots=True)
class ValidCandidates:
    """Valid candidates of a space, as codes into the values of each axis.

    `codes` are arrays `[row]`; a value is `UNSET` where the axis does not exist in a row. `fixed`
    holds what the space fixes. `enumerated` counts every combination, valid or not.
    """

    values: Mapping[str, Sequence[Any]]
    codes: Mapping[str, NDArray[np.int32]]
    fixed: Mapping[str, Any]
    enumerated: int

    def __len__(self) -> int:
        return len(next(iter(self.codes.values()))) if self.codes else 1

    def flat(self, row: int) -> dict[str, Any]:
        """One candidate as a flat mapping."""
        chosen = dict(self.fixed)
        for name, codes in self.codes.items():
            value = self.values[name][codes[row]]
            if value is not UNSET:
                chosen[name] = value
        return collect_env(chosen)

    def candidate(self, row: int) -> Candidate:
        return Candidate.from_flat(self.flat(row))

    def columns(self) -> dict[str, object]:
        """Per field a constant or (values, codes), environment variables as `env.NAME`."""
        fixed = {name: value for name, value in self.fixed.items() if name != "env"}
        fixed |= {f"env.{name}": v for name, v in (self.fixed.get("env") or {}).items()}
        varying = {n: (list(self.values[n]), codes) for n, codes in self.codes.items()}
        return {**fixed, **varying}

    def take(self, rows: NDArray[np.int64]) -> ValidCandidates:
        """These rows only."""
        codes = {name: column[rows] for name, column in self.codes.items()}
        return ValidCandidates(self.values, codes, self.fixed, self.enumerated)


def enumerate_space(space: SearchSpace, checker: ValidityChecker) -> ValidCandidates:
    """Every valid candidate of the space at once. Raises InputError as `spell_axes` does."""
    spelt = spell_axes(space, checker.mcore)
    found = enumerate_valid(spelt.axes, _fixed(spelt, checker), **_rules(spelt, checker))
    values, codes = spelt.read(dict(found.values), dict(found.codes))
    return ValidCandidates(values, codes, _kept(space, spelt, codes), space.combinations())


def _fixed(spelt: Spelling, checker: ValidityChecker) -> dict[str, object]:
    """The fields that rules read and no axis has."""
    axes = {name for name, _, _ in spelt.axes}
    fixed = {**checker.fixed, "world_size": checker.world_size, **spelt.fixed}
    return {name: value for name, value in fixed.items() if name not in axes}


def _rules(spelt: Spelling, checker: ValidityChecker) -> dict[str, Any]:
    """Which rules enumeration applies."""
    return {
        "mcore": checker.mcore,
        "frontend": checker.frontend,
        "capabilities": checker.capabilities,
        "exclude": spelt.exclude,
    }


def _kept(space: SearchSpace, spelt: Spelling, codes: Mapping[str, Any]) -> dict[str, Any]:
    """The space's fixed fields that no axis has replaced."""
    return {
        name: value
        for name, value in space.fixed.items()
        if name not in codes and not (name == "env" and spelt.environments)
    }


@dataclass(frozen=True, slots=True)
class FactoredSpace:
    """Every valid candidate of a space as a head row and a tail row of the same group.

    Groups are numbers: `head_group` `[head row]`, `tail_group` `[tail row]`.
    """

    head: ValidCandidates
    head_group: NDArray[np.int64]
    tail: ValidCandidates
    tail_group: NDArray[np.int64]

    def __len__(self) -> int:
        """Valid candidates."""
        import numpy as np

        groups = max(self.head_group.max(initial=-1), self.tail_group.max(initial=-1)) + 1
        heads, tails = (
            np.bincount(g, minlength=groups) for g in (self.head_group, self.tail_group)
        )
        return int((heads * tails).sum())

    def candidate(self, head: int, tail: int) -> Candidate:
        """The candidate of two rows of one group."""
        chosen = {**self.head.flat(head), **self.tail.flat(tail)}
        env = {**self.head.flat(head).get("env", {}), **self.tail.flat(tail).get("env", {})}
        return Candidate.from_flat({**chosen, "env": env} if env else chosen)


def factor_space(
    space: SearchSpace, checker: ValidityChecker, tail_fields: Collection[str]
) -> FactoredSpace:
    """The valid candidates of a space, with axes of `tail_fields` and of the environment apart.

    Where another axis depends on one of them, only the environment is. Raises InputError as
    `spell_axes` does.
    """
    first, last = _divided(space, tail_fields)
    spelt = spell_axes(replace(space, axes=(*first, *last)), checker.mcore)
    apart = [name for name, _, _ in spelt.axes if name == "env" or name in {a.field for a in last}]
    found = enumerate_factored(
        spelt.axes, _fixed(spelt, checker), len(apart), **_rules(spelt, checker)
    )
    count = space.combinations()
    values = {name: list(found.values[name]) for name, _, _ in spelt.axes}
    ours = {name: values.pop(name) for name in apart}
    head = replace(spelt, environments=()).read(values, dict(found.head))
    tail = replace(spelt, pairs={}).read(ours, dict(found.tail))
    return FactoredSpace(
        ValidCandidates(*head, _kept(space, spelt, head[1]), count),
        found.head_group,
        ValidCandidates(*tail, {}, count),
        found.tail_group,
    )


def _divided(space: SearchSpace, tail: Collection[str]) -> tuple[list[Axis], list[Axis]]:
    """Axes of the head and of the tail; those of the environment are in the tail's last."""
    variables = [a for a in space.axes if a.field.startswith("env.")]
    others = [a for a in space.axes if not a.field.startswith("env.")]
    first = [a for a in others if a.field not in tail]
    last = [a for a in others if a.field in tail]
    if any(name in tail for axis in first for name, _ in axis.when):
        first, last = others, []
    return first, [*last, *variables]
