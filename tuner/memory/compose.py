"""Peaks of many candidates, put together from profiles over the pipeline schedule.

Candidates that share a pipeline (stages, chunks, micro-batches, split of layers) are computed
together, as arrays over candidates: bytes of a chunk are sums over its units, and the peak of a
stage is the largest over the moments of its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.memory.profile import (
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    StepProfile,
    check_composable,
    placeholder_bytes,
    profile_request,
    profiles_of,
    without_recompute,
)
from tuner.memory.schedule import Moment, moments, split_of, steady_microbatches
from tuner.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.float64]

_QUANTITIES = ("retained", "forward_peak", "backward_peak", "dense_parameters", "expert_parameters")


@dataclass(frozen=True, slots=True)
class ComposedMemory:
    """Peak allocated bytes, `[candidate]`, and the pipeline stage that has it, `[candidate]`."""

    peak_allocated_bytes: NDArray[np.int64]
    stage: NDArray[np.int64]


def compose(
    model: ModelSpec,
    candidates: Sequence[Candidate],
    *,
    world_size: int,
    seq_length: int,
    global_batch_size: int,
    precision: str = "bf16",
    mcore: Path | None = None,
    workers: int = 1,
    **run: Any,
) -> ComposedMemory:
    """Peaks of all candidates over all pipeline stages.

    Profiles that are not on disk yet are measured first, `workers` at a time. Raises
    UnsupportedError naming the field for candidates that only a full dry run covers.
    """
    settings = []
    for candidate in candidates:
        check_composable(candidate)
        settings.append(candidate)
        settings.append(without_recompute(candidate))
    requests = [
        profile_request(model, candidate, seq_length=seq_length, precision=precision, **run)
        for candidate in settings
    ]
    profiles = profiles_of(requests, mcore=mcore, workers=workers)
    table = ProfileTable(profiles)
    numbers = [(2 * i, 2 * i + 1) for i in range(len(candidates))]
    return compose_table(
        model,
        candidates,
        numbers,
        table,
        world_size=world_size,
        global_batch_size=global_batch_size,
    )


class ProfileTable:
    """Profiles as arrays `[profile]`, so that many candidates are looked up at once."""

    def __init__(self, profiles: Sequence[StepProfile]) -> None:
        import numpy as np

        self._units: dict[tuple[str, str], Bytes] = {}
        for unit in (EMBEDDING, DENSE, EXPERTS, HEAD):
            for quantity in _QUANTITIES:
                self._units[unit, quantity] = np.array(
                    [
                        getattr(profile.units[unit], quantity) if unit in profile.units else 0
                        for profile in profiles
                    ],
                    dtype=np.float64,
                )
        self._whole = {
            name: np.array([getattr(profile, name) for profile in profiles], dtype=np.float64)
            for name in (
                "hidden_bytes",
                "constant_bytes",
                "weight_bytes_per_parameter",
                "gradient_bytes_per_parameter",
                "state_bytes_per_parameter",
            )
        }

        self._placeholders: dict[frozenset[str], Bytes] = {}
        self._profiles = profiles

    def placeholders(self, units: frozenset[str], rows: NDArray[np.int64]) -> Bytes:
        """Bytes of the placeholder gradients of a rank that holds these units."""
        import numpy as np

        if units not in self._placeholders:
            self._placeholders[units] = np.array(
                [placeholder_bytes(profile.placeholders, units) for profile in self._profiles],
                dtype=np.float64,
            )
        return self._placeholders[units][rows]

    def unit(self, unit: str, quantity: str, rows: NDArray[np.int64]) -> Bytes:
        return self._units[unit, quantity][rows]

    def whole(self, name: str, rows: NDArray[np.int64]) -> Bytes:
        return self._whole[name][rows]


def compose_table(
    model: ModelSpec,
    candidates: Sequence[Candidate],
    numbers: Sequence[tuple[int, int]],
    table: ProfileTable,
    *,
    world_size: int,
    global_batch_size: int,
) -> ComposedMemory:
    """`compose` with the profiles at hand: `numbers` gives each candidate's row and the row of
    its setting without recompute."""
    import numpy as np

    groups: dict[Any, list[int]] = {}
    for index, candidate in enumerate(candidates):
        ranks = candidate.model_parallel_size()
        replicas = max(1, world_size // ranks)
        microbatches = max(1, global_batch_size // (replicas * candidate.micro_batch_size))
        stages = candidate.pipeline_model_parallel_size
        chunks = candidate.virtual_pipeline_model_parallel_size or 1
        rounds = min(microbatches, steady_microbatches(stages, chunks))
        recompute = (candidate.recompute_method, candidate.recompute_num_layers)
        key = (split_of(model, candidate), rounds, recompute)
        groups.setdefault(key, []).append(index)
    peak = np.zeros(len(candidates), dtype=np.int64)
    stage_of = np.zeros(len(candidates), dtype=np.int64)
    for (split, rounds, recompute), indices in groups.items():
        chosen = [candidates[i] for i in indices]
        group = _Group(
            model, table, np.array([numbers[i] for i in indices]), chosen, world_size, recompute
        )
        totals = np.stack([group.stage_peak(split, stage, rounds) for stage in range(len(split))])
        peak[indices] = totals.max(axis=0).astype(np.int64)
        stage_of[indices] = totals.argmax(axis=0)
    return ComposedMemory(peak, stage_of)


@dataclass(frozen=True)
class _Group:
    """Candidates with one pipeline and one way of full recompute, as arrays `[candidate]`."""

    model: ModelSpec
    table: ProfileTable
    rows: NDArray[np.int64]
    candidates: Sequence[Candidate]
    world_size: int
    recompute: tuple[str | None, int | None]

    @cached_property
    def hidden(self) -> Bytes:
        return self.table.whole("hidden_bytes", self.rows[:, 0])

    def stage_peak(self, split: Any, stage: int, microbatches: int) -> Bytes:
        """The largest sum of live bytes of a stage over a step."""
        import numpy as np

        stages, chunks = len(split), len(split[stage])
        parts = [self._chunk(split, stage, chunk) for chunk in range(chunks)]
        found = [self._at(moment, parts) for moment in moments(stages, chunks, microbatches, stage)]
        static: Bytes = self._static(split, stage)
        result: Bytes = static + np.max(found, axis=0)
        return result

    def _at(self, moment: Moment, parts: Sequence[_Chunk]) -> Bytes:
        held = sum(
            count * part.retained for count, part in zip(moment.in_flight, parts, strict=True)
        )
        part = parts[moment.chunk]
        result: Bytes = held + (part.forward_peak if moment.forward else part.backward_peak)
        return result

    def _chunk(self, split: Any, stage: int, chunk: int) -> _Chunk:
        import numpy as np

        stages, chunks = len(split), len(split[stage])
        units = self._units(split[stage][chunk])
        first = stage == 0 and chunk == 0
        last = stage == stages - 1 and chunk == chunks - 1
        retained = np.zeros_like(self.hidden)
        forward = np.zeros_like(self.hidden)
        if first:
            units = [self._unit(EMBEDDING), *units]
        else:
            retained = retained + self.hidden  # the input received
        if last:
            units = [*units, self._unit(HEAD)]
        for unit in units:
            forward = np.maximum(forward, retained + unit.forward_peak)
            retained = retained + unit.retained
        total = retained
        start = np.zeros_like(self.hidden)
        if not last:
            # The output is sent on and let go; its gradient comes in as large.
            start = start + self.hidden
            total = total - self.hidden
            forward = np.maximum(forward, retained + self.hidden)
        backward, change = start.copy(), start
        for unit in reversed(units):
            backward = np.maximum(backward, change + unit.backward_peak)
            change = change - unit.retained
        return _Chunk(total, forward, backward)

    def _units(self, layers: Sequence[int]) -> list[_Unit]:
        """The layers of a chunk in order; groups of recomputed layers are one unit."""
        pattern = self.model.moe_layer_pattern
        method, count = self.recompute
        kinds = [EXPERTS if pattern[layer] else DENSE for layer in layers]
        if method is None:
            return [self._unit(kind) for kind in kinds]
        count = count or 1
        if method == "block":
            return [
                self._unit(kind, plain=position >= count) for position, kind in enumerate(kinds)
            ]
        return [
            self._recomputed(kinds[start : start + count]) for start in range(0, len(kinds), count)
        ]

    def _recomputed(self, kinds: Sequence[str]) -> _Unit:
        """Layers recomputed together: the last one's own, and the others' activations at once."""
        own = self._unit(kinds[-1])
        for kind in kinds[:-1]:
            plain = self._unit(kind, plain=True)
            own = _Unit(own.retained, own.forward_peak, own.backward_peak + plain.retained)
        return own

    def _unit(self, name: str, plain: bool = False) -> _Unit:
        rows = self.rows[:, 1 if plain else 0]
        return _Unit(*(self.table.unit(name, quantity, rows) for quantity in _QUANTITIES[:3]))

    def _static(self, split: Any, stage: int) -> Bytes:
        """Weights, gradients, optimizer state and constants of a rank of the stage."""
        import numpy as np

        rows = self.rows[:, 0]
        dense, experts = np.zeros(len(rows)), np.zeros(len(rows))
        pattern = self.model.moe_layer_pattern
        names = [EXPERTS if pattern[layer] else DENSE for chunk in split[stage] for layer in chunk]
        stages = len(split)
        last = stage == stages - 1
        names += [EMBEDDING] * (stage == 0) + [HEAD] * last
        shared = self.model.share_embeddings_and_output_weights or self.model.mtp_num_layers
        names += [EMBEDDING] * bool(last and stages > 1 and shared)
        for name in names:
            dense = dense + self.table.unit(name, "dense_parameters", rows)
            experts = experts + self.table.unit(name, "expert_parameters", rows)
        weight = self.table.whole("weight_bytes_per_parameter", rows)
        gradient = self.table.whole("gradient_bytes_per_parameter", rows)
        state = self.table.whole("state_bytes_per_parameter", rows)
        dense_shards, expert_shards = self._shards(stages)
        result: Bytes = (
            self.table.whole("constant_bytes", rows)
            + self.table.placeholders(frozenset(names), rows)
            + (weight + gradient) * (dense + experts)
            + state * (dense / dense_shards + experts / expert_shards)
        )
        return result

    def _shards(self, stages: int) -> tuple[Bytes, Bytes]:
        """Ranks that share the optimizer state of dense and of expert parameters."""
        import numpy as np

        dense, experts = [], []
        for candidate in self.candidates:
            tensor = candidate.tensor_model_parallel_size
            expert_tensor = candidate.expert_tensor_parallel_size or tensor
            shards = candidate.use_distributed_optimizer
            replicas = self.world_size // stages
            dense.append(replicas // tensor if shards else 1)
            experts.append(
                max(1, replicas // (expert_tensor * candidate.expert_model_parallel_size))
                if shards
                else 1
            )
        return np.array(dense, dtype=np.float64), np.array(experts, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Unit:
    retained: Bytes
    forward_peak: Bytes
    backward_peak: Bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One model chunk: kept for each micro-batch in flight, and most added by a running pass."""

    retained: Bytes
    forward_peak: Bytes
    backward_peak: Bytes
