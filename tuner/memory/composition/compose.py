"""Memory of arrays of candidates: index them, profile their settings, put the peaks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory.composition.arrays import Composer, ProfileTable, StageMemory
from tuner.memory.composition.index import Index, Pipeline, index_candidates
from tuner.memory.composition.measure import ProfileSource, profile_task, profiles_of
from tuner.memory.composition.profile import StepProfile
from tuner.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ComposedMemory:
    """Peaks of candidates, arrays `[row]`.

    `peak_allocated_bytes` is that of the fullest stage, `stage`; -1 where a row cannot be
    composed, with the reason in `problems` under the number in `problem` (-1 for none).
    `peak_reserved_bytes` adds what PyTorch's allocator loses to fragmentation under the row's
    setting of it. `parts` are the bytes of that stage by kind, which sum to the peak; of its
    "activations" `step_bytes` are there in the optimizer's step, whatever passes hold.
    """

    peak_allocated_bytes: NDArray[np.int64]
    peak_reserved_bytes: NDArray[np.int64]
    stage: NDArray[np.int32]
    parts: Mapping[str, NDArray[np.int64]]
    step_bytes: NDArray[np.int64]
    problem: NDArray[np.int32]
    problems: tuple[str, ...]
    index: Index

    def __len__(self) -> int:
        return len(self.peak_allocated_bytes)


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles by setting; None in `plain` where no full recompute needs them.

    A setting that cannot be profiled has the reason in place of its profile.
    """

    profiles: Mapping[Candidate, StepProfile | InputError]
    plain: Mapping[Candidate, StepProfile | InputError]


def gather_profiles(
    model: ModelSpec, index: Index, source: ProfileSource, *, workers: int | None = None
) -> Profiles:
    """The profiles that the rows of an index need; those not on disk are measured in parallel."""
    tasks: list[Any] = []
    places: list[tuple[Candidate, bool]] = []
    found: dict[bool, dict[Candidate, StepProfile | InputError]] = {False: {}, True: {}}
    groups = _needs_plain(index)
    for number, setting in enumerate(index.settings):
        for plain in (False, True) if number in groups else (False,):
            try:
                tasks.append(profile_task(model, setting, source, recompute=not plain))
                places.append((setting, plain))
            except InputError as error:
                found[plain][setting] = error
    for (setting, plain), profile in zip(places, profiles_of(tasks, workers=workers), strict=True):
        found[plain][setting] = profile
    return Profiles(found[False], found[True])


def _needs_plain(index: Index) -> set[int]:
    """Settings of which layers are recomputed in groups, or only some."""
    import numpy as np

    pipelines = [
        number
        for number, pipeline in enumerate(index.pipelines)
        if pipeline.recompute is not None and pipeline.recompute != ("uniform", 1)
    ]
    return set(index.setting[np.isin(index.pipeline, pipelines)].tolist())


def compose_arrays(
    model: ModelSpec,
    columns: Mapping[str, object],
    source: ProfileSource,
    *,
    world_size: int,
    global_batch_size: int,
    profiles: Profiles | None = None,
    workers: int | None = None,
) -> ComposedMemory:
    """Peak memory of every row of `columns`.

    Args:
        columns: per field a constant or (distinct values, codes of shape (rows,)), as
            `tuner.constraints.screen` takes them; rows should be valid candidates.
        profiles: those of the rows' settings, from `gather_profiles`; by default they are read
            from disk, and what is missing is measured, `workers` at a time.
    """
    index = index_candidates(
        model, columns, world_size=world_size, global_batch_size=global_batch_size
    )
    profiles = profiles or gather_profiles(model, index, source, workers=workers)
    return compose_index(model, index, profiles, world_size=world_size)


def compose_index(
    model: ModelSpec, index: Index, profiles: Profiles, *, world_size: int
) -> ComposedMemory:
    """`compose_arrays` for rows that are indexed already."""
    import numpy as np

    usable, failed, reasons = _usable(index, profiles)
    problems = [*index.problems, *reasons]
    problem = np.where(
        index.problem >= 0, index.problem, failed[index.setting] + len(index.problems)
    )
    problem = np.where((index.problem < 0) & (failed[index.setting] < 0), -1, problem)
    table, places = _table(model, index, profiles, usable, world_size)

    pairs = index.setting.astype(np.int64) * max(1, len(index.pipelines)) + index.pipeline
    pairs[problem >= 0] = -1
    distinct, inverse = np.unique(pairs, return_inverse=True)
    count = len(distinct)
    peak, stage = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int32)
    parts = {name: np.zeros(count, dtype=np.int64) for name in (*MEMORY_PARTS, *_LOST, _STEP)}
    settings, pipelines = np.divmod(distinct, max(1, len(index.pipelines)))
    pipelines[distinct < 0] = -1
    order = np.argsort(pipelines, kind="stable")
    bounds = np.searchsorted(pipelines[order], np.arange(len(index.pipelines) + 1))
    for number, pipeline in enumerate(index.pipelines):
        chosen = order[bounds[number] : bounds[number + 1]]
        if not len(chosen):
            continue
        fullest, memory = _fullest(table, places[settings[chosen]], pipeline)
        peak[chosen] = memory.peak.astype(np.int64)
        stage[chosen] = fullest
        for name in parts:
            parts[name][chosen] = getattr(memory, name).astype(np.int64)
    lost = np.where(index.expandable, *(parts[name][inverse] for name in reversed(_LOST)))
    return ComposedMemory(
        peak[inverse],
        peak[inverse] + lost,
        stage[inverse],
        {name: parts[name][inverse] for name in MEMORY_PARTS},
        parts[_STEP][inverse],
        problem.astype(np.int32),
        tuple(problems),
        index,
    )


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "other")
"""What the bytes of a stage are counted as; together they are its peak."""
_LOST = ("fragmented", "fragmented_expandable")
_STEP = "step"


def _usable(index: Index, profiles: Profiles) -> tuple[list[int], Any, list[str]]:
    """Settings with profiles; for the others the number of the reason, by setting."""
    import numpy as np

    usable, reasons = [], []
    failed = np.full(len(index.settings), -1, dtype=np.int64)
    for number, setting in enumerate(index.settings):
        found = [profiles.profiles[setting], profiles.plain.get(setting)]
        errors = [str(item) for item in found if isinstance(item, InputError)]
        if errors:
            if errors[0] not in reasons:
                reasons.append(errors[0])
            failed[number] = reasons.index(errors[0])
        else:
            usable.append(number)
    return usable, failed, reasons


def _table(
    model: ModelSpec, index: Index, profiles: Profiles, usable: Sequence[int], world_size: int
) -> tuple[ProfileTable, Any]:
    """The usable settings as a table, and the place of each setting in it."""
    import numpy as np

    settings = [index.settings[number] for number in usable]
    places = np.full(len(index.settings), -1, dtype=np.int64)
    places[list(usable)] = np.arange(len(usable))
    found: list[Any] = [profiles.profiles[setting] for setting in settings]
    plain: list[Any] = [profiles.plain.get(setting) for setting in settings]
    return ProfileTable(model, settings, found, plain, world_size), places


def _fullest(table: ProfileTable, rows: Any, pipeline: Pipeline) -> tuple[Any, StageMemory]:
    """The stage with the largest peak, `[setting]`, and its memory."""
    import numpy as np

    composer = Composer(table, rows, pipeline)
    stages = composer.distinct_stages()
    found = [composer.stage(stage) for stage in stages]
    best = np.stack([memory.peak for memory in found]).argmax(axis=0)
    chosen = {
        name: np.choose(best, [getattr(memory, name) for memory in found])
        if len(found) <= 32
        else np.stack([getattr(memory, name) for memory in found])[best, np.arange(len(best))]
        for name in ("peak", *_LOST, _STEP, "weights", "gradients", "optimizer", "other")
    }
    return np.array(stages, dtype=np.int32)[best], StageMemory(**chosen)


def compose(
    model: ModelSpec,
    candidates: Sequence[Candidate],
    source: ProfileSource,
    *,
    world_size: int,
    global_batch_size: int,
    workers: int | None = None,
) -> ComposedMemory:
    """`compose_arrays` for a list of candidates."""
    return compose_arrays(
        model,
        as_columns(candidates),
        source,
        world_size=world_size,
        global_batch_size=global_batch_size,
        workers=workers,
    )


def as_columns(candidates: Sequence[Candidate]) -> dict[str, object]:
    """Candidates as columns of values and codes."""
    import numpy as np

    from tuner.constraints.view import UNSET

    flats = [_spread(candidate) for candidate in candidates]
    columns: dict[str, object] = {}
    for name in dict.fromkeys(name for flat in flats for name in flat):
        values: dict[Any, Any] = {}
        codes = np.empty(len(flats), dtype=np.int32)
        for row, flat in enumerate(flats):
            value = flat.get(name, UNSET)
            label = repr(value)
            if label not in values:
                values[label] = (len(values), value)
            codes[row] = values[label][0]
        columns[name] = ([value for _, value in values.values()], codes)
    return columns


def _spread(candidate: Candidate) -> dict[str, Any]:
    flat = candidate.to_flat()
    environment = flat.pop("env", {})
    return flat | {f"env.{name}": value for name, value in environment.items()}


def stage_memories(
    model: ModelSpec,
    candidate: Candidate,
    source: ProfileSource,
    *,
    world_size: int,
    global_batch_size: int,
) -> list[StageMemory]:
    """The memory of every pipeline stage of one candidate, as arrays of one entry.

    Raises UnsupportedError or InputError where it cannot be composed.
    """
    import numpy as np

    index = index_candidates(
        model, as_columns([candidate]), world_size=world_size, global_batch_size=global_batch_size
    )
    profiles = gather_profiles(model, index, source, workers=1)
    if index.problem[0] >= 0:
        raise InputError(index.problems[int(index.problem[0])])
    for found in (profiles.profiles, profiles.plain):
        error = found.get(index.settings[0])
        if isinstance(error, InputError):
            raise error
    table, _ = _table(model, index, profiles, [0], world_size)
    composer = Composer(table, np.zeros(1, dtype=np.int64), index.pipelines[0])
    return [composer.stage(stage) for stage in range(len(index.pipelines[0].split))]
