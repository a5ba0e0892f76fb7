"""Which settings of a space are profiled, and how the profiles of all others follow from them.

A profile is a dry run of some tenths of a second, and a space has thousands of settings. What a
setting does to the units of a model is nearly separable: bytes and the sizes of kernels grow evenly
with the micro-batch, and what recomputing a module saves is the same share on every grid of ranks.
So each grid (tensor, context, expert ranks) is profiled plain, of those that differ in expert ranks
one with a micro-batch of two, and for each tensor-parallel size one grid with each way of
recomputing. Settings that are themselves profiled are exact; what a plan shows at the top is
profiled itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tuner.candidate import Candidate
from tuner.memory.composition.measure import without_recompute

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

Family = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a setting follows from profiled ones.

    Its figures are those of `once`, a micro-batch of one on its grid; what `twice` (a micro-batch
    of two) differs by from `single` (of one), in proportion, for each sequence more than one up to
    `batch`; and what each of `changed` differs by from `unchanged`, in proportion.
    """

    batch: int
    once: Candidate
    single: Candidate
    twice: Candidate
    unchanged: Candidate
    changed: tuple[Candidate, ...]

    def anchors(self) -> tuple[Candidate, ...]:
        """Every setting it needs."""
        larger = (self.single, self.twice) if self.batch > 1 else ()
        other = (self.unchanged, *self.changed) if self.changed else ()
        return (self.once, *larger, *other)


def recipes(settings: Sequence[Candidate]) -> dict[Candidate, Recipe]:
    """A recipe for each setting, chosen so that few anchors serve all of them."""
    homes = _homes(settings)
    return {setting: _recipe(setting, homes) for setting in settings}


def needed_anchors(found: Iterable[Recipe]) -> list[Candidate]:
    """The settings to profile, each once."""
    return list(dict.fromkeys(anchor for recipe in found for anchor in recipe.anchors()))


def combine(recipe: Recipe, value: Callable[[Candidate], Values]) -> Values:
    """The figures of a setting, given those of its anchors, where changes are shares.

    `value` gives the figures of an anchor, arrays of one shape.
    """
    import numpy as np

    figures = value(recipe.once)
    if recipe.batch > 1:
        more = added_share(value(recipe.single), value(recipe.twice))
        figures = figures * (1.0 + (recipe.batch - 1) * more)
    if not recipe.changed:
        return figures
    plain = value(recipe.unchanged)
    share = np.ones_like(plain)
    for anchor in recipe.changed:
        share = share + _added(plain, value(anchor), to_nothing=0.0)
    result: Values = figures * np.clip(share, 0.0, None)
    return result


def added_share(once: Values, twice: Values) -> Values:
    """What a sequence more adds to figures of one, as a share of them: all of it where they are
    zero."""
    return _added(once, twice, to_nothing=1.0)


def _added(before: Values, after: Values, *, to_nothing: float) -> Values:
    """The change from one to the other as a share of the first; `to_nothing` where that is zero."""
    import numpy as np

    nothing = before == 0
    return np.where(nothing, to_nothing, after / np.where(nothing, 1.0, before) - 1.0)


def _recipe(setting: Candidate, homes: _Homes) -> Recipe:
    once = replace(without_recompute(setting), micro_batch_size=1)
    single, reference = homes.of_batches[_grid(setting)], homes.of_changes[_family(setting)]
    changed = tuple(_changes(setting, reference))
    twice = replace(single, micro_batch_size=2)
    return Recipe(setting.micro_batch_size, once, single, twice, reference, changed)


def _changes(setting: Candidate, reference: Candidate) -> Iterable[Candidate]:
    """The reference with each single change of recomputation that makes the setting's."""
    granularity = setting.recompute_granularity
    if granularity == "full":
        yield replace(
            reference,
            recompute_granularity="full",
            recompute_method=setting.recompute_method,
            recompute_num_layers=setting.recompute_num_layers,
            distribute_saved_activations=setting.distribute_saved_activations,
        )
    elif granularity == "selective":
        for module in setting.recompute_modules:
            yield replace(reference, recompute_granularity="selective", recompute_modules=(module,))


@dataclass(frozen=True, slots=True)
class _Homes:
    """Plain settings with micro-batches of one: on which larger ones are measured, and changes."""

    of_batches: Mapping[Family, Candidate]
    of_changes: Mapping[Family, Candidate]


def _homes(settings: Sequence[Candidate]) -> _Homes:
    """The smallest grid of each family."""
    batches: dict[Family, Candidate] = {}
    changes: dict[Family, Candidate] = {}
    for setting in settings:
        plain = replace(without_recompute(setting), micro_batch_size=1)
        for homes, family in ((batches, _grid(plain)), (changes, _family(plain))):
            if family not in homes or _size(plain) < _size(homes[family]):
                homes[family] = plain
    return _Homes(batches, changes)


def _family(setting: Candidate) -> Family:
    return setting.tensor_model_parallel_size, setting.expert_tensor_parallel_size


def _grid(setting: Candidate) -> Family:
    return *_family(setting), setting.context_parallel_size


def _size(setting: Candidate) -> tuple[int, int, str]:
    return (
        setting.context_parallel_size,
        abs(setting.expert_model_parallel_size - 8),
        setting.key,
    )
