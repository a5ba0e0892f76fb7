"""Which settings of a space are profiled, and how the profiles of all others follow from them.

A profile is a dry run of some tenths of a second, and a space has thousands of settings. What a
setting does to the units of a model is nearly separable: bytes and seconds grow linearly with the
micro-batch, and what recomputing a module saves is the same share on every grid of ranks. So each
grid (tensor, context, expert ranks) is profiled plain for two micro-batch sizes, and each way of
recomputing once for each tensor-parallel size. Settings that are themselves profiled are exact;
what a plan shows at the top is profiled itself.
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

Grid = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a setting follows from profiled ones.

    Its figures are those of `once` and `twice` (micro-batches of one and of two), continued to
    `batch`; and what each of `changed` differs by from `unchanged`, in proportion.
    """

    batch: int
    once: Candidate
    twice: Candidate
    unchanged: Candidate
    changed: tuple[Candidate, ...]

    def anchors(self) -> tuple[Candidate, ...]:
        """Every setting it needs."""
        needed = (self.once,) if self.batch == 1 else (self.once, self.twice)
        return needed if not self.changed else (*needed, self.unchanged, *self.changed)


def recipes(settings: Sequence[Candidate]) -> dict[Candidate, Recipe]:
    """A recipe for each setting, chosen so that few anchors serve all of them."""
    home = _homes(settings)
    return {setting: _recipe(setting, home) for setting in settings}


def needed_anchors(found: Iterable[Recipe]) -> list[Candidate]:
    """The settings to profile, each once."""
    return list(dict.fromkeys(anchor for recipe in found for anchor in recipe.anchors()))


def combine(recipe: Recipe, value: Callable[[Candidate], Values]) -> Values:
    """The figures of a setting, given those of its anchors, where changes are shares.

    `value` gives the figures of an anchor, arrays of one shape.
    """
    import numpy as np

    once = value(recipe.once)
    figures = once
    if recipe.batch > 1:
        figures = once + (recipe.batch - 1) * (value(recipe.twice) - once)
    if not recipe.changed:
        return figures
    plain = value(recipe.unchanged)
    safe = np.where(plain == 0, 1.0, plain)
    share = np.ones_like(plain)
    for anchor in recipe.changed:
        share = share + np.where(plain == 0, 0.0, value(anchor) / safe - 1.0)
    result: Values = figures * np.clip(share, 0.0, None)
    return result


def _recipe(setting: Candidate, home: Mapping[tuple[int, int | None], Candidate]) -> Recipe:
    plain = without_recompute(setting)
    once, twice = (replace(plain, micro_batch_size=size) for size in (1, 2))
    reference = home[_family(setting)]
    changed = tuple(_changes(setting, reference))
    return Recipe(setting.micro_batch_size, once, twice, reference, changed)


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


def _homes(settings: Sequence[Candidate]) -> dict[tuple[int, int | None], Candidate]:
    """For each family the setting on which changes are measured: plain, on its smallest grid."""
    homes: dict[tuple[int, int | None], Candidate] = {}
    for setting in settings:
        family = _family(setting)
        plain = replace(without_recompute(setting), micro_batch_size=1)
        if family not in homes or _size(plain) < _size(homes[family]):
            homes[family] = plain
    return homes


def _family(setting: Candidate) -> tuple[int, int | None]:
    return setting.tensor_model_parallel_size, setting.expert_tensor_parallel_size


def _size(setting: Candidate) -> tuple[int, int, str]:
    return (
        setting.context_parallel_size,
        abs(setting.expert_model_parallel_size - 8),
        setting.key,
    )
