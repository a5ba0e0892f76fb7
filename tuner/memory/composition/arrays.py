"""Peaks of many candidates, put together from profiles over the pipeline schedule.

Candidates that share a pipeline are computed together, as arrays over settings: bytes of a chunk
are sums over its units, and the peak of a stage is the largest over the moments of its schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.memory.composition.index import Pipeline
from tuner.memory.composition.offload import buffers_stay, journey
from tuner.memory.composition.profile import StepProfile, UnitProfile, placeholder_bytes
from tuner.memory.composition.schedule import moments
from tuner.memory.composition.shards import on_device
from tuner.memory.composition.split import EMBEDDING, HEAD, MTP, Chunk
from tuner.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.float64]

_QUANTITIES = tuple(UnitProfile.__dataclass_fields__)
_PER_PASS = ("forward_change", "forward_peak", "backward_change", "backward_peak", "left")
_WHOLE = (
    "hidden_bytes",
    "chunk_bytes",
    "constant_bytes",
    "gradient_bytes_per_parameter",
    "state_bytes_per_parameter",
    "step_bytes_per_parameter",
    "group_bytes_per_parameter",
    "fragmentation",
    "fragmentation_expandable",
)


class ProfileTable:
    """Settings and their profiles as arrays `[setting]`, so that many are looked up at once.

    `plain` are the profiles of the settings without recompute, where full recompute needs them.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: Sequence[Candidate],
        profiles: Sequence[StepProfile],
        plain: Sequence[StepProfile | None],
        world_size: int,
    ) -> None:
        import numpy as np

        self.model, self.world_size = model, world_size
        self._profiles = profiles
        self._units = {
            "last": _unit_arrays([p.units for p in profiles]),
            "first": _unit_arrays([p.first or p.units for p in profiles]),
            "plain": _unit_arrays([None if p is None else p.units for p in plain]),
        }
        self._whole = {
            name: np.array([getattr(p, name) for p in profiles], dtype=np.float64)
            for name in _WHOLE
        }
        self.tensor = np.array([c.tensor_model_parallel_size for c in settings])
        expert_tensor = [
            c.expert_tensor_parallel_size or c.tensor_model_parallel_size for c in settings
        ]
        self.experts = np.array(expert_tensor) * np.array(
            [c.expert_model_parallel_size for c in settings]
        )
        self.sequence = np.array([c.sequence_parallel for c in settings])
        self.sharded = np.array([c.use_distributed_optimizer for c in settings])
        self._bucketed = [bool(dict(c.extra).get("overlap_grad_reduce")) for c in settings]
        self._equal_shapes: dict[str, Mapping[str, Any]] = {}
        self.te_version = profiles[0].versions.get("transformer_engine", "0") if profiles else ""
        self._placeholders: dict[frozenset[str], Bytes] = {}

    def unit(self, unit: str, quantity: str, rows: Any, of: str = "last") -> Bytes:
        """A quantity of a unit for the last or the first micro-batch of a step, or without
        recompute (`of` is "last", "first" or "plain")."""
        return self._units[of][unit, quantity][rows]

    def whole(self, name: str, rows: Any) -> Bytes:
        return self._whole[name][rows]

    def shapes(self, row: int) -> tuple[Mapping[str, Any], bool]:
        """Parameters of each unit of a setting (one object for equal ones), and whether gradient
        buffers have buckets."""
        shapes = self._profiles[row].shapes
        return self._equal_shapes.setdefault(repr(shapes), shapes), self._bucketed[row]

    def placeholders(self, units: frozenset[str], rows: Any) -> Bytes:
        """Bytes of the placeholder gradients of a rank that holds these units."""
        import numpy as np

        if units not in self._placeholders:
            self._placeholders[units] = np.array(
                [placeholder_bytes(profile.placeholders, units) for profile in self._profiles],
                dtype=np.float64,
            )
        return self._placeholders[units][rows]


def _unit_arrays(
    profiles: Sequence[Mapping[str, UnitProfile] | None],
) -> dict[tuple[str, str], Bytes]:
    import numpy as np

    units = {unit for profile in profiles if profile is not None for unit in profile}
    arrays = {}
    for unit in units:
        values = [None if p is None else p.get(unit) for p in profiles]
        for quantity in _QUANTITIES:
            arrays[unit, quantity] = np.array(
                [np.nan if v is None else getattr(v, quantity) for v in values], dtype=np.float64
            )
    return arrays


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one pipeline stage, arrays `[setting]`; the parts make up the peak.

    `step` is what the optimizer's step holds beyond what stays, whatever passes hold. `fragmented`
    and `fragmented_expandable` are reserved beyond the peak, by PyTorch's allocator with fixed and
    with expandable segments.
    """

    peak: Bytes
    fragmented: Bytes
    fragmented_expandable: Bytes
    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    other: Bytes
    step: Bytes

    @property
    def activations(self) -> Bytes:
        """What passes and the optimizer's step hold at the peak."""
        return self.peak - self.weights - self.gradients - self.optimizer - self.other


@dataclass(frozen=True)
class Composer:
    """Settings with one pipeline; `rows` (`[setting]`) number them in the table."""

    table: ProfileTable
    rows: NDArray[np.int64]
    pipeline: Pipeline
    _chunks: dict[Chunk, _ChunkBytes] = field(default_factory=dict)

    @cached_property
    def hidden(self) -> Bytes:
        return self.table.whole("hidden_bytes", self.rows)

    def distinct_stages(self) -> list[int]:
        """Stages one of which has the largest peak: of equal ones the first holds most."""
        first: dict[Any, int] = {}
        for stage, chunks in enumerate(self.pipeline.split):
            first.setdefault(chunks, stage)
        return list(first.values())

    def stage(self, stage: int) -> StageMemory:
        """The bytes of a stage when it holds most."""
        import numpy as np

        weights, gradients, optimizer, (share, group), other = self._static(stage)
        passes = self._passes(stage)
        step = self.table.whole("step_bytes_per_parameter", self.rows) * share
        step = step + self.table.whole("group_bytes_per_parameter", self.rows) * group
        step = step + sum(self._lingering(chunk) for chunk in self.pipeline.split[stage])
        static = weights + gradients + optimizer + other
        dynamic: Bytes = np.maximum(passes, step)
        return StageMemory(
            static + dynamic,
            passes * self.table.whole("fragmentation", self.rows),
            passes * self.table.whole("fragmentation_expandable", self.rows),
            weights,
            gradients,
            optimizer,
            other,
            step,
        )

    def _lingering(self, chunk: Chunk) -> Bytes:
        """What a chunk holds after its last backward pass: what its units leave, and its input with
        the gradient (`Moment`), which its first unit may hold as well."""
        import numpy as np

        left = self._chunk(chunk).left
        if EMBEDDING in chunk:
            return left
        first: Bytes = self._unit(chunk[0]).left
        result: Bytes = left + np.maximum(0.0, 2 * self.hidden - first)
        return result

    def _passes(self, stage: int) -> Bytes:
        """The most that passes hold beyond what stays."""
        import numpy as np

        chunks = self.pipeline.split[stage]
        parts = [self._chunk(units) for units in chunks]
        with_left = any(part.left.any() for part in parts)
        found = moments(self.pipeline.shape, stage, with_left)
        counts = np.array([(*m.in_flight, m.buffers, *m.left) for m in found], dtype=np.float64)
        sizes = [*(part.retained for part in parts), self.hidden]
        if with_left:
            sizes += [part.left for part in parts]
        held = counts @ np.stack(sizes)
        for row, moment in enumerate(found):
            part = parts[moment.chunk]
            if moment.forward:
                held[row] += part.forward_peak
                if with_left and not moment.left[moment.chunk]:
                    held[row] += part.left  # not there to be freed, as it was when measured
            elif moment.forward is not None:
                again = with_left and moment.left[moment.chunk]
                held[row] += part.backward_again if again else part.backward_peak
        result: Bytes = held.max(axis=0)
        if self.pipeline.deferred and HEAD in chunks[-1]:
            return result + self.pipeline.deferred * self._deferred()
        return result

    def _deferred(self) -> Bytes:
        """What a micro-batch keeps until the pipeline's flush where the gradient of the output
        layer's weight is computed then: that layer's input, and the gradient of the logits. Of one
        micro-batch its passes held the same, so that peaks may be high by as much."""
        import numpy as np

        table, size = self.table, self.table.model.hidden_size
        vocabulary = table.unit(HEAD, "dense_parameters", self.rows) / size  # of one rank
        gathered = np.where(table.sequence[self.rows], table.tensor[self.rows], 1)
        result: Bytes = self.hidden * (1.0 + vocabulary * gathered / size)
        return result

    def _chunk(self, names: Chunk) -> _ChunkBytes:
        if names not in self._chunks:
            self._chunks[names] = self._added_up(names)
        return self._chunks[names]

    def _added_up(self, names: Chunk) -> _ChunkBytes:
        import numpy as np

        units = self._units(names)
        left = sum((unit.left for unit in units), np.zeros_like(self.hidden))
        gone, back = self._moves(names)
        forward, change = _in_turn(
            (unit.forward_peak, unit.forward_change - gone.get(number, 0.0))
            for number, unit in enumerate(units)
        )
        takes = EMBEDDING not in names
        gives = HEAD not in names
        passed = int(takes) - int(gives and self.pipeline.shape.freed)
        retained = change + left + self.hidden * passed
        returning = [
            (unit, back.get(number, 0.0)) for number, unit in reversed(list(enumerate(units)))
        ]
        backward, _ = _in_turn(
            (came + unit.backward_peak, came + unit.backward_change) for unit, came in returning
        )
        again, _ = _in_turn(  # the replay of a unit frees what it had left
            (came + unit.backward_peak - unit.left, came + unit.backward_change - unit.left)
            for unit, came in returning
        )
        return _ChunkBytes(retained, forward, backward, again, left)

    def _moves(self, names: Chunk) -> tuple[dict[int, Bytes], dict[int, Bytes]]:
        """Bytes that leave for the host after units, and come back before them, by unit."""
        if not self.pipeline.offloaded:
            return {}, {}
        first = names[0] == EMBEDDING
        layers = [name for name in names if name not in (EMBEDDING, MTP, HEAD)]
        offloaded = min(self.pipeline.offloaded, len(layers))
        way = journey(len(layers), offloaded, self.table.te_version)
        moved = [self.table.unit(name, "offloaded", self.rows) for name in layers]
        gone = {at + first: moved[layer] for at, layer in way.gone_after.items()}
        back = {at + first: moved[layer] for at, layer in way.back_before.items()}
        return gone, back

    def _units(self, names: Chunk) -> list[_Unit]:
        """The units of a chunk in order; layers recomputed together are one."""
        if self.pipeline.recompute is None:
            return [self._unit(name) for name in names]
        method, count = self.pipeline.recompute
        ends = (EMBEDDING, MTP, HEAD)
        layers = [name for name in names if name not in ends]
        if method == "block":
            middle = [
                self._unit(name, plain=position >= count) for position, name in enumerate(layers)
            ]
        else:
            starts = range(0, len(layers), count)
            middle = [self._recomputed(layers[start : start + count]) for start in starts]
        before = [self._unit(name) for name in names if name == EMBEDDING]
        # transformer/multi_token_prediction.py recomputes under the method "uniform" only.
        after = [
            self._unit(name, plain=name == MTP and method == "block")
            for name in names
            if name in (MTP, HEAD)
        ]
        return [*before, *middle, *after]

    def _recomputed(self, names: Sequence[str]) -> _Unit:
        """Layers recomputed together: the last one's own, and the others' activations at once.

        Where a stack ignores full recompute (Mamba's up to Megatron-Core 0.17), one after another.
        """
        import numpy as np

        own = self._unit(names[-1])
        if len(names) == 1:
            return own
        others = [self._unit(name, plain=True) for name in names[:-1]]
        backward = own.backward_peak
        for unit in others:
            backward = backward + unit.forward_change
        masks = sum(self.table.unit(name, "grouped", self.rows) for name in names[:-1])
        grouped = replace(own, forward_peak=own.forward_peak + masks, backward_peak=backward)
        ignored = own.forward_change == self._unit(names[-1], plain=True).forward_change
        if not ignored.any():
            return grouped
        apart = _in_a_row([*others, own])
        return _Unit(
            *(np.where(ignored, getattr(apart, name), getattr(grouped, name)) for name in _PER_PASS)
        )

    def _unit(self, name: str, plain: bool = False) -> _Unit:
        of = "plain" if plain else "first" if self.pipeline.shape.microbatches == 1 else "last"
        return _Unit(*(self.table.unit(name, quantity, self.rows, of) for quantity in _PER_PASS))

    def _static(self, stage: int) -> tuple[Bytes, Bytes, Bytes, tuple[Bytes, Bytes], Bytes]:
        """Weights, gradients, optimizer state, share of parameters (all, and in the larger group
        that is updated at once), and what else stays."""
        import numpy as np

        table, rows, chunks = self.table, self.rows, self.pipeline.split[stage]
        names = [name for chunk in chunks for name in chunk]
        dense, experts, kept, weights = (np.zeros(len(rows)) for _ in range(4))
        for name in names:
            dense = dense + table.unit(name, "dense_parameters", rows)
            experts = experts + table.unit(name, "expert_parameters", rows)
            kept = kept + table.unit(name, "kept", rows)
            weights = weights + table.unit(name, "weight_bytes", rows)
        if EMBEDDING not in names:
            copied = self._copied_embedding(names)
            each = table.unit(EMBEDDING, "weight_bytes", rows)
            each = each / table.unit(EMBEDDING, "dense_parameters", rows)
            dense, weights = dense + copied, weights + copied * each
        share, group = self._share(dense, experts)
        if self.pipeline.host_fraction:
            share = group = self._on_device(stage)
        other = (
            kept
            + table.whole("constant_bytes", rows)
            + table.whole("chunk_bytes", rows) * len(chunks)
            + table.placeholders(frozenset(names), rows)
        )
        if self.pipeline.buffered and buffers_stay(table.te_version):
            first = next(name for name in names if name != EMBEDDING)
            other = other + 2 * table.unit(first, "offloaded", rows)
        return (
            weights,
            table.whole("gradient_bytes_per_parameter", rows) * (dense + experts),
            table.whole("state_bytes_per_parameter", rows) * share,
            (share, group),
            other,
        )

    def _copied_embedding(self, names: Sequence[str]) -> Bytes:
        """Parameters of the embedding that a stage repeats for multi-token prediction."""
        import numpy as np

        if MTP in names:
            return self.table.unit(EMBEDDING, "dense_parameters", self.rows)
        return np.zeros(len(self.rows))

    def _share(self, dense: Bytes, experts: Bytes) -> tuple[Bytes, Bytes]:
        """Parameters whose optimizer state a rank of the stage holds: all, and the more numerous of
        the dense and the expert ones."""
        import numpy as np

        dense_shards, expert_shards = self._shards()
        sharded = self.table.sharded[self.rows]
        dense = np.where(sharded, dense / dense_shards, dense)
        experts = np.where(sharded, experts / expert_shards, experts)
        return dense + experts, np.maximum(dense, experts)

    def _shards(self) -> tuple[Bytes, Bytes]:
        """Ranks that share the optimizer state of dense and of expert parameters."""
        import numpy as np

        table, rows = self.table, self.rows
        ranks = table.world_size // len(self.pipeline.split)
        dense = ranks // table.tensor[rows] / self.pipeline.instances
        expert = np.maximum(1, ranks // table.experts[rows]) / self.pipeline.instances
        return np.maximum(1, dense), np.maximum(1, expert)

    def _on_device(self, stage: int) -> Bytes:
        """Parameters whose optimizer state stays on the device, on the rank with the most."""
        import numpy as np

        chunks = self.pipeline.split[stage]
        shards = np.stack(self._shards(), axis=1).astype(int)
        known: dict[Any, int] = {}
        found = []
        for row, (dense, expert) in zip(self.rows.tolist(), shards.tolist(), strict=True):
            shapes, bucketed = self.table.shapes(row)
            sharded = bool(self.table.sharded[row])
            key = (id(shapes), dense, expert, sharded, bucketed)
            if key not in known:
                parameters = [
                    [parameter for unit in _with_copies(chunk) for parameter in shapes[unit]]
                    for chunk in chunks
                ]
                known[key] = on_device(
                    parameters,
                    (dense, expert),
                    self.pipeline.host_fraction,
                    sharded=sharded,
                    bucketed=bucketed and stage == 0,
                    shared=self.table.model.share_embeddings_and_output_weights
                    and len(self.pipeline.split) > 1,
                )
            found.append(known[key])
        return np.array(found, dtype=np.float64)


def _with_copies(chunk: Chunk) -> Chunk:
    """Units whose parameters a chunk holds: multi-token prediction repeats the embedding."""
    return (EMBEDDING, *chunk) if MTP in chunk and EMBEDDING not in chunk else chunk


@dataclass(frozen=True, slots=True)
class _Unit:
    forward_change: Bytes
    forward_peak: Bytes
    backward_change: Bytes
    backward_peak: Bytes
    left: Bytes


def _in_a_row(units: Sequence[_Unit]) -> _Unit:
    """Units that run one after another, as one."""
    forward, forward_change = _in_turn((u.forward_peak, u.forward_change) for u in units)
    backward, backward_change = _in_turn(
        (u.backward_peak, u.backward_change) for u in reversed(units)
    )
    left: Bytes = sum((u.left for u in units[1:]), units[0].left)
    return _Unit(forward_change, forward, backward_change, backward, left)


def _in_turn(passes: Iterable[tuple[Bytes, Bytes]]) -> tuple[Bytes, Bytes]:
    """The most that passes add, one after another, and what they add in all.

    Of each: the most it adds while it runs, and what it leaves more than it found.
    """
    import numpy as np

    change: Any = 0.0
    peak: Any = 0.0
    for most, added in passes:
        peak = np.maximum(peak, change + most)
        change = change + added
    return peak, change


@dataclass(frozen=True, slots=True)
class _ChunkBytes:
    """One model chunk: kept for each micro-batch in flight, most added by a running pass, and left
    by a backward pass for the next forward pass, or replay, to free. `backward_again` is the most
    that a backward pass adds which follows another one."""

    retained: Bytes
    forward_peak: Bytes
    backward_peak: Bytes
    backward_again: Bytes
    left: Bytes


def breakdown(memory: StageMemory, row: int) -> Mapping[str, int]:
    """The parts of one setting's peak, as categories of a dry run name them."""
    return {
        "weights": int(memory.weights[row]),
        "gradients": int(memory.gradients[row]),
        "optimizer state": int(memory.optimizer[row]),
        "activations": int(memory.activations[row]),
        "library workspaces": int(memory.other[row]),
    }
