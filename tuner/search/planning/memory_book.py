"""Profiles of every setting of a space: measured anchors, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.composition import Profiles, ProfileSource, StepProfile
from tuner.memory.composition.index import Index
from tuner.memory.composition.measure import (
    ProfileTask,
    profile_task,
    profiles_of,
    without_recompute,
)
from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace
from tuner.models import ModelSpec
from tuner.search.planning.anchors import Recipe, combine, needed_anchors, recipes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCALED = ("forward_change", "forward_peak", "backward_change", "backward_peak")
"""Bytes of a unit that grow with the micro-batch and shrink with recomputation."""


Watcher = Callable[[Candidate, DryRunRequest, Trace, Mapping[str, str]], None]
"""Told a setting, the dry run made for its profile, its trace, and what it stated."""


class MemoryBook:
    """Profiles by setting. `exact` ones are measured for the setting itself."""

    def __init__(self, model: ModelSpec, source: ProfileSource, workers: int | None = None) -> None:
        self._model, self._source, self._workers = model, source, workers
        self._measured: dict[Candidate, StepProfile | InputError] = {}
        self._derived: dict[Candidate, StepProfile | InputError] = {}
        self.recipes: dict[Candidate, Recipe] = {}

    def measure(self, settings: Sequence[Candidate], watcher: Watcher | None = None) -> None:
        """Profile these settings themselves; those that cannot be keep the reason.

        `watcher` is told each setting whose dry run was made, with the run.
        """
        tasks, places = [], []
        for setting in dict.fromkeys(settings):
            self._derived.pop(setting, None)
            if setting in self._measured:
                continue
            try:
                tasks.append(profile_task(self._model, setting, self._source))
                places.append(setting)
            except InputError as error:
                self._measured[setting] = error
        told = None
        if watcher is not None:
            of_task = {id(task): place for task, place in zip(tasks, places, strict=True)}

            def told(task: ProfileTask, *run: Any) -> None:
                watcher(of_task[id(task)], task.request, *run)

        self._measured.update(zip(places, self._profiles(tasks, told), strict=True))

    def _profiles(self, tasks: Sequence[ProfileTask], told: Any) -> list[StepProfile | InputError]:
        """Profiles of tasks; one whose dry run breaks costs its own setting, not the others."""
        from tuner.memory.worker_pool import DryRunError

        try:
            return profiles_of(tasks, workers=self._workers, watcher=told)
        except DryRunError as error:
            if len(tasks) == 1:
                return [InputError(f"its dry run failed: {' '.join(str(error).split())[-200:]}")]
        return [found for task in tasks for found in self._profiles([task], told)]

    def prepare(self, settings: Sequence[Candidate]) -> list[Candidate]:
        """The anchors of these settings and of the same without recomputation, unmeasured ones."""
        found = recipes([*settings, *map(without_recompute, settings)])
        self.recipes |= found  # what was prepared before is still asked for
        return [a for a in needed_anchors(found.values()) if a not in self._measured]

    def profiles(self, index: Index) -> Profiles:
        """The profiles of an index's settings, and of the same without recomputation."""
        return Profiles(
            {setting: self.profile(setting) for setting in index.settings},
            {setting: self.profile(without_recompute(setting)) for setting in index.settings},
        )

    def profile(self, setting: Candidate) -> StepProfile | InputError:
        """The profile of a setting, or why there is none."""
        found = self._measured.get(setting) or self._derived.get(setting)
        if found is None:
            found = self._derived[setting] = self._derive(self.recipes[setting])
        return found

    def is_exact(self, setting: Candidate) -> bool:
        """Whether the setting was profiled itself."""
        return setting in self._measured

    def _derive(self, recipe: Recipe) -> StepProfile | InputError:
        profiles: dict[Candidate, StepProfile] = {}
        for anchor in recipe.anchors():
            profile = self._measured[anchor]
            if isinstance(profile, InputError):
                return profile
            profiles[anchor] = profile
        return _derived(recipe, profiles)


def _derived(recipe: Recipe, profiles: Mapping[Candidate, StepProfile]) -> StepProfile:
    import numpy as np

    once = profiles[recipe.once]
    names = list(once.units)

    def value(anchor: Candidate) -> NDArray[np.float64]:
        units = profiles[anchor].units
        return np.array([[getattr(units[n], q) for q in _SCALED] for n in names], dtype=float)

    figures = combine(recipe, value)
    units = {
        name: replace(
            once.units[name],
            **{q: int(v) for q, v in zip(_SCALED, row, strict=True)},
        )
        for name, row in zip(names, figures, strict=True)
    }
    return replace(once, units=units, hidden_bytes=once.hidden_bytes * recipe.batch)


def layer_bytes(profile: StepProfile, kinds: Iterable[str]) -> float:
    """Bytes that the layers of a model keep for one micro-batch, on average over the layers."""
    kept = [profile.units[kind].forward_change for kind in kinds if kind in profile.units]
    return sum(kept) / max(1, len(kept))
