"""Pipeline schedules: which layers a stage holds, and how many micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tuner.candidate import Candidate
from tuner.memory.errors import UnsupportedError
from tuner.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """A state of one rank in which a pass runs.

    `in_flight` counts, for each model chunk of the rank, the micro-batches whose forward pass has
    ended and whose backward pass has not; in a backward pass that of the running one is counted.
    """

    forward: bool
    chunk: int
    in_flight: tuple[int, ...]


@lru_cache(maxsize=4096)
def moments(stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Moment, ...]:
    """The states of a rank over a step that no other state of the same kind exceeds.

    megatron/core/pipeline_parallel/schedules.py: 1F1B for one chunk per rank, interleaved 1F1B for
    more (`get_pp_rank_microbatches`, `get_schedule_table`).
    """
    seen: dict[tuple[bool, int], set[tuple[int, ...]]] = {}
    in_flight = [0] * chunks
    for forward, chunk in _passes(stages, chunks, microbatches, stage):
        seen.setdefault((forward, chunk), set()).add(tuple(in_flight))
        in_flight[chunk] += 1 if forward else -1
    return tuple(
        Moment(forward, chunk, counts)
        for (forward, chunk), found in sorted(seen.items())
        for counts in _largest(found)
    )


def _largest(found: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tuples that no other one reaches or exceeds in every place."""
    return sorted(
        counts
        for counts in found
        if not any(
            other != counts and all(a >= b for a, b in zip(other, counts, strict=True))
            for other in found
        )
    )


def _passes(stages: int, chunks: int, microbatches: int, stage: int) -> Iterator[tuple[bool, int]]:
    """(forward, chunk) in the order in which a rank runs them."""
    # A long run repeats its steady state: more rounds add no new state.
    microbatches = min(microbatches, steady_microbatches(stages, chunks))
    order = _order(stages, chunks, microbatches)
    total = len(order)
    if stages == 1:
        warmup = 0
    elif chunks == 1:
        warmup = min(stages - stage - 1, total)
    else:
        warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    for chunk in order[:warmup]:
        yield True, chunk
    for step in range(warmup, total):
        yield True, order[step]
        yield False, chunks - 1 - order[step - warmup]
    for step in range(total - warmup, total):
        yield False, chunks - 1 - order[step]


def steady_microbatches(stages: int, chunks: int) -> int:
    """Micro-batches after which a schedule repeats itself."""
    return 3 * stages if chunks > 1 else stages + 1


def _order(stages: int, chunks: int, microbatches: int) -> list[int]:
    """The chunk of each forward pass: groups of `stages` micro-batches, chunk by chunk."""
    order = []
    for first in range(0, microbatches, stages):
        group = min(stages, microbatches - first)
        for chunk in range(chunks):
            order += [chunk] * group
    return order


@lru_cache(maxsize=4096)
def layer_split(
    layers: int,
    stages: int,
    chunks: int,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layer numbers of each chunk of each stage: `[stage][chunk]`.

    transformer/transformer_block.py `get_num_layers_to_build`. Raises UnsupportedError for splits
    that do not divide.
    """
    sizes = _stage_sizes(layers, stages, first, last, embedding_counts, loss_counts)
    per_chunk = [_divided(size, chunks, "virtual_pipeline_model_parallel_size") for size in sizes]
    split: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
    number = 0
    for chunk in range(chunks):
        for stage in range(stages):
            size = per_chunk[stage]
            size -= embedding_counts and stage == 0 and chunk == 0
            size -= loss_counts and stage == stages - 1 and chunk == chunks - 1
            split[stage].append(tuple(range(number, number + size)))
            number += size
    return tuple(tuple(chunks_of) for chunks_of in split)


def _stage_sizes(
    layers: int,
    stages: int,
    first: int | None,
    last: int | None,
    embedding_counts: bool,
    loss_counts: bool,
) -> list[int]:
    total = layers + embedding_counts + loss_counts
    ends = (first is not None) + (last is not None)
    if not ends:
        return [_divided(total, stages, "pipeline_model_parallel_size")] * stages
    middle = total - (first or 0) - (last or 0)
    size = _divided(middle, stages - ends, "num_layers_in_first_pipeline_stage")
    return (
        ([first] if first is not None else [])
        + [size] * (stages - ends)
        + ([last] if last is not None else [])
    )


def _divided(total: int, parts: int, field: str) -> int:
    if parts < 1 or total % parts:
        raise UnsupportedError(f"{total} layers do not divide into {parts}", field=field)
    return total // parts


def split_of(model: ModelSpec, candidate: Candidate) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`layer_split` of a candidate."""
    extra = dict(candidate.extra)
    return layer_split(
        model.num_layers,
        candidate.pipeline_model_parallel_size,
        candidate.virtual_pipeline_model_parallel_size or 1,
        extra.get("num_layers_in_first_pipeline_stage"),
        extra.get("num_layers_in_last_pipeline_stage"),
        bool(extra.get("account_for_embedding_in_pipeline_split")),
        bool(extra.get("account_for_loss_in_pipeline_split")),
    )
