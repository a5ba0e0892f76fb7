"""Every valid candidate of a space as columns, screened by the rules while it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.constraints.enumeration import enumerate_blocks
from tuner.constraints.view import UNSET
from tuner.search.space import SearchSpace, collect_env
from tuner.search.spelling import spell_axes

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
    (whole,) = space_blocks(space, checker, block_rows=None)
    return whole


def space_blocks(
    space: SearchSpace, checker: ValidityChecker, *, block_rows: int | None = 1 << 18
) -> Iterator[ValidCandidates]:
    """The valid candidates of the space in blocks, each grown from at most `block_rows` rows.

    Raises InputError as `spell_axes` does.
    """
    spelt = spell_axes(space, checker.mcore)
    names = {name for name, _, _ in spelt.axes}
    fixed = {**checker.fixed, "world_size": checker.world_size, **spelt.fixed}
    combinations = space.combinations()
    blocks = enumerate_blocks(
        spelt.axes,
        {name: value for name, value in fixed.items() if name not in names},
        mcore=checker.mcore,
        frontend=checker.frontend,
        capabilities=checker.capabilities,
        exclude=spelt.exclude,
        block_rows=block_rows,
    )
    for block in blocks:
        values, codes = spelt.read(dict(block.values), dict(block.codes))
        kept = {
            name: value
            for name, value in space.fixed.items()
            if name not in codes and not (name == "env" and spelt.environments)
        }
        yield ValidCandidates(values, codes, kept, combinations)
