"""Arrays of candidates as pairs of a setting, which is profiled, and a pipeline.

Candidates come as columns, as `tuner.constraints.screen` takes them: per field a constant or a
pair (distinct values, integer codes of shape (rows,)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.constraints.screening import is_column
from tuner.constraints.view import UNSET
from tuner.errors import InputError
from tuner.memory.composition.kinds import KIND_FIELDS, layer_kinds
from tuner.memory.composition.measure import PIPELINE_FIELDS
from tuner.memory.composition.schedule import Shape, steady_microbatches
from tuner.memory.composition.split import Split, split_units
from tuner.models import ModelSpec
from tuner.search.space import collect_env

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = NDArray[np.int64]

_PIPELINE_COLUMNS = (
    *PIPELINE_FIELDS,
    *KIND_FIELDS,
    "recompute_granularity",
    "recompute_method",
    "cpu_offloading",
    "optimizer_cpu_offload",
)
_STAGES = "pipeline_model_parallel_size"
_LOOKUP_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the pipeline does with the units of a model.

    `recompute` is the method and the number of layers of full recompute, `instances` the number of
    distributed optimizer instances, `offloaded` the number of layers whose activations go to the
    host, and `buffered` whether they come back into buffers that stay. `host_fraction` is the share
    of optimizer state that is to be on the host. `deferred` counts the micro-batches whose gradient
    of the output layer's weight waits for the pipeline's flush (`defer_embedding_wgrad_compute`).
    """

    split: Split
    shape: Shape
    recompute: tuple[str, int] | None
    instances: int
    offloaded: int = 0
    buffered: bool = False
    host_fraction: float = 0.0
    deferred: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """Rows of candidates: `setting` and `pipeline` (int32, `[row]`) number `settings` and
    `pipelines`; a row that cannot be split has pipeline -1 and its reason in `problems`, by code.
    `expandable` says where PyTorch's allocator has expandable segments.
    """

    setting: NDArray[np.int32]
    pipeline: NDArray[np.int32]
    settings: tuple[Candidate, ...]
    pipelines: tuple[Pipeline, ...]
    problem: NDArray[np.int32]
    problems: tuple[str, ...]
    expandable: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.setting)

    def at(self, rows: Any) -> Index:
        """The index of these rows alone."""
        return replace(
            self,
            setting=self.setting[rows],
            pipeline=self.pipeline[rows],
            problem=self.problem[rows],
            expandable=self.expandable[rows],
        )


def index_candidates(
    model: ModelSpec, columns: Mapping[str, object], *, world_size: int, global_batch_size: int
) -> Index:
    """Number the settings and pipelines of all rows; equal ones have one number."""
    import numpy as np

    table = _Columns(columns)
    names = [name for name in table.names if name not in PIPELINE_FIELDS and _matters(name)]
    if model.share_embeddings_and_output_weights and _STAGES in table.names:
        names.append(_STAGES)
    setting, examples = table.distinct(names)
    flats = [table.row(int(row)) for row in examples]
    settings, renumbered = _merged([_setting(model, flat) for flat in flats])
    setting = renumbered[setting]

    microbatches = _microbatches(table, world_size, global_batch_size)
    rounds, deferred = _rounds(table, microbatches), _deferred(table, microbatches)
    names = [name for name in table.names if name in _PIPELINE_COLUMNS]
    most = int(deferred.max(initial=0))
    pipeline, examples = table.distinct(names, rounds * (1 + most) + deferred)
    found: list[Any] = []
    for row in examples.tolist():
        found.append(_pipeline(model, table.row(row), int(rounds[row]), int(deferred[row])))
    problems = tuple(dict.fromkeys(item for item in found if isinstance(item, str)))
    pipelines, renumbered = _merged([None if isinstance(p, str) else p for p in found])
    reasons = np.array(
        [problems.index(p) if isinstance(p, str) else -1 for p in found], dtype=np.int32
    )
    numbers = {p: i for i, p in enumerate(p for p in pipelines if p is not None)}
    order = np.array([-1 if p is None else numbers[p] for p in pipelines], dtype=np.int32)
    return Index(
        setting.astype(np.int32),
        order[renumbered[pipeline]],
        tuple(settings),
        tuple(numbers),
        reasons[pipeline],
        problems,
        table.expandable(),
    )


def _merged(items: Sequence[Any]) -> tuple[list[Any], Codes]:
    """Distinct items, and the number of each given one among them."""
    import numpy as np

    numbers: dict[Any, int] = {}
    places = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), np.array(places, dtype=np.int64)


def _matters(name: str) -> bool:
    """Whether a field may change what is allocated; allocator settings change where."""
    return not name.startswith("env.PYTORCH") and not name.startswith("env.NCCL")


def _setting(model: ModelSpec, flat: dict[str, Any]) -> Candidate:
    """What is profiled; where weights are tied it differs with and without a pipeline."""
    piped = int(flat.get(_STAGES) or 1) > 1
    for name in PIPELINE_FIELDS:
        flat.pop(name, None)
    if piped and model.share_embeddings_and_output_weights:
        flat[_STAGES] = 2
    return Candidate.from_flat(collect_env(flat))


def _microbatches(table: _Columns, world_size: int, global_batch_size: int) -> Codes:
    """Micro-batches of a step, `[row]`."""
    import numpy as np

    ranks = table.numbers("tensor_model_parallel_size", 1) * table.numbers(_STAGES, 1)
    ranks = ranks * table.numbers("context_parallel_size", 1)
    sequences = table.numbers("micro_batch_size", 1) * np.maximum(1, world_size // ranks)
    return np.maximum(1, global_batch_size // sequences)


def _deferred(table: _Columns, microbatches: Codes) -> Codes:
    """Micro-batches whose gradient of the output layer waits at most, `[row]`."""
    import numpy as np

    limit = table.numbers("wgrad_deferral_limit", 0)
    waiting = np.where(limit > 0, np.minimum(limit, microbatches), microbatches)
    return np.where(table.numbers("defer_embedding_wgrad_compute", 0) > 0, waiting, 0)


def _rounds(table: _Columns, microbatches: Codes) -> Codes:
    """Micro-batches of each row that show every state of its schedule."""
    import numpy as np

    stages = table.numbers(_STAGES, 1)
    group = table.numbers("microbatch_group_size_per_vp_stage", 0)
    group = np.where(group > 0, group, stages)
    keys = (microbatches * 100_003 + stages) * 100_003 + group
    distinct, inverse = np.unique(keys, return_inverse=True)
    first = np.zeros(len(distinct), dtype=np.int64)
    first[inverse] = np.arange(len(keys))
    steady = [
        steady_microbatches(int(microbatches[row]), int(stages[row]), int(group[row]))
        for row in first
    ]
    return np.array(steady, dtype=np.int64)[inverse]


def _pipeline(
    model: ModelSpec, flat: Mapping[str, Any], rounds: int, deferred: int
) -> Pipeline | str:
    """The pipeline of a flat candidate, or why there is none."""
    stages = int(flat.get("pipeline_model_parallel_size") or 1)
    try:
        split = split_units(layer_kinds(model, flat), bool(model.mtp_num_layers), flat)
    except InputError as error:
        return str(error)
    chunks = len(split[0])
    overlapped = flat.get("overlap_p2p_comm")
    shape = Shape(
        stages=stages,
        chunks=chunks,
        microbatches=rounds,
        group=int(flat.get("microbatch_group_size_per_vp_stage") or stages),
        overlapped=chunks > 1 if overlapped is None else bool(overlapped),
        freed=flat.get("deallocate_pipeline_outputs", True) is not False,
    )
    recompute = None
    if flat.get("recompute_granularity") == "full":
        layers = int(flat.get("recompute_num_layers") or 1)
        recompute = (str(flat.get("recompute_method") or "uniform"), layers)
    instances = int(flat.get("num_distributed_optimizer_instances") or 1)
    offloaded = 0
    if flat.get("cpu_offloading"):
        offloaded = int(flat.get("cpu_offloading_num_layers") or 0)
    buffered = offloaded > 0 and bool(flat.get("cpu_offloading_double_buffering"))
    fraction = 0.0
    if flat.get("optimizer_cpu_offload"):
        fraction = float(flat.get("optimizer_offload_fraction") or 0.0)
    return Pipeline(split, shape, recompute, instances, offloaded, buffered, fraction, deferred)


class _Columns:
    """Columns of codes, and constants; all of one number of rows."""

    def __init__(self, columns: Mapping[str, object]) -> None:
        self._constants = {n: c for n, c in columns.items() if not is_column(c)}
        self._values: dict[str, Sequence[Any]] = {}
        self._codes: dict[str, Any] = {}
        for name, column in columns.items():
            if is_column(column):
                self._values[name], self._codes[name] = column  # type: ignore[misc]
        lengths = {len(codes) for codes in self._codes.values()} or {1}
        if len(lengths) > 1:
            raise InputError(f"columns of different lengths: {sorted(lengths)}")
        self.rows = lengths.pop()

    @property
    def names(self) -> list[str]:
        """The fields that vary."""
        return list(self._codes)

    def row(self, row: int) -> dict[str, Any]:
        """One candidate as a flat mapping, fields that do not exist left out."""
        flat = dict(self._constants)
        for name, codes in self._codes.items():
            value = self._values[name][codes[row]]
            if value is not UNSET:
                flat[name] = value
        return {name: value for name, value in flat.items() if value is not None}

    def numbers(self, name: str, default: int) -> Codes:
        """A field as numbers `[row]`; `default` where it is not set."""
        import numpy as np

        if name not in self._codes:
            constant: Any = self._constants.get(name)
            return np.full(self.rows, int(constant) if constant else default, dtype=np.int64)
        values = [
            default if value is None or value is UNSET else int(value)
            for value in self._values[name]
        ]
        return np.array(values, dtype=np.int64)[self._codes[name]]

    def expandable(self) -> NDArray[np.bool_]:
        """Where the environment gives PyTorch's allocator expandable segments, `[row]`."""
        import numpy as np

        environment: Any = self._constants.get("env") or {}
        found = np.full(self.rows, _expands(environment.get(_ALLOCATOR[0].removeprefix("env."))))
        for name in _ALLOCATOR:
            if name in self._codes:
                values = np.array([_expands(value) for value in self._values[name]])
                found |= values[self._codes[name]]
            else:
                found |= _expands(self._constants.get(name))
        return found

    def distinct(self, names: Sequence[str], extra: Codes | None = None) -> tuple[Codes, Codes]:
        """Number of each row among the distinct combinations of these fields, `[row]`, and a row
        that has each of them."""
        import numpy as np

        key = np.zeros(self.rows, dtype=np.int64) if extra is None else extra.astype(np.int64)
        size = 1 if extra is None else int(extra.max(initial=0)) + 1
        for name in names:
            choices = max(1, len(self._values[name]))
            if size > (1 << 62) // choices:
                key, size = _compact(key)
            key = key * choices + self._codes[name]
            size *= choices
        if size > _LOOKUP_LIMIT:
            key, size = _compact(key)
        last = np.full(size, -1, dtype=np.int64)
        last[key] = np.arange(self.rows)
        used = np.flatnonzero(last >= 0)
        number = np.zeros(size, dtype=np.int64)
        number[used] = np.arange(len(used))
        return number[key], last[used]


_ALLOCATOR = ("env.PYTORCH_CUDA_ALLOC_CONF", "env.PYTORCH_ALLOC_CONF")


def _expands(setting: object) -> bool:
    return isinstance(setting, str) and "expandable_segments:true" in setting.lower()


def _compact(key: Codes) -> tuple[Codes, int]:
    """The same distinctions with small numbers."""
    import numpy as np

    distinct, inverse = np.unique(key, return_inverse=True)
    return inverse.astype(np.int64), len(distinct)
