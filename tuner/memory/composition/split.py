"""Which units of a model each chunk of each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tuner.constraints.rules.layer_split import LayoutError, parse_layout
from tuner.errors import InputError
from tuner.memory.errors import UnsupportedError

EMBEDDING, MTP, HEAD = "embedding", "mtp", "head"
"""Units besides the layers; the head is final norm, output layer and loss."""

HYBRID_KINDS = frozenset(("hybrid", "mamba", "attention", "mlp"))
"""First words of the kinds of layer that only hybrid models have."""

Chunk = tuple[str, ...]
Split = tuple[tuple[Chunk, ...], ...]
"""Unit names by `[stage][chunk]`, in the order they run."""

SPLIT_FIELDS = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""The fields that `split_units` reads."""


def split_units(kinds: tuple[str, ...], mtp: bool, config: Mapping[str, Any]) -> Split:
    """The units of each chunk; `kinds` names the kind of every decoder layer.

    megatron/core/transformer/transformer_block.py `get_num_layers_to_build` and
    pipeline_parallel_layer_layout.py. Raises UnsupportedError for a split that does not divide.
    """
    stages = int(config.get("pipeline_model_parallel_size") or 1)
    chunks = int(config.get("virtual_pipeline_model_parallel_size") or 1)
    layout = config.get("pipeline_model_parallel_layout")
    hybrid = not HYBRID_KINDS.isdisjoint(kind.split()[0] for kind in kinds)
    if layout is not None and not hybrid:  # the stack of a hybrid model takes no notice of it
        text = layout if isinstance(layout, str) else tuple(tuple(row) for row in layout)
        return _laid_out(kinds, mtp, stages, text)
    counts = layer_counts(
        len(kinds),
        stages,
        chunks,
        config.get("num_layers_in_first_pipeline_stage"),
        config.get("num_layers_in_last_pipeline_stage"),
        bool(config.get("account_for_embedding_in_pipeline_split")),
        bool(config.get("account_for_loss_in_pipeline_split")),
    )
    result: list[list[Chunk]] = [[] for _ in range(stages)]
    position = 0
    for chunk in range(chunks):
        for stage in range(stages):
            size = counts[stage][chunk]
            units = kinds[position : position + size]
            position += size
            if stage == 0 and chunk == 0:
                units = (EMBEDDING, *units)
            if stage == stages - 1 and chunk == chunks - 1:
                units = (*units, *((MTP,) if mtp else ()), HEAD)
            result[stage].append(units)
    return tuple(tuple(stage) for stage in result)


@lru_cache(maxsize=1024)
def _laid_out(kinds: tuple[str, ...], mtp: bool, stages: int, layout: Any) -> Split:
    try:
        parsed = parse_layout(layout)
    except LayoutError as error:
        raise UnsupportedError(str(error), field="pipeline_model_parallel_layout") from None
    if len(parsed) % stages:
        raise UnsupportedError(
            f"a layout of {len(parsed)} chunks does not divide into {stages} stages",
            field="pipeline_model_parallel_layout",
        )
    named = sum(name not in ("embedding", "loss", "mtp") for names in parsed for name in names)
    if named != len(kinds):
        raise InputError(
            f"the layout names {named} decoder layers and the model has {len(kinds)}",
            field="pipeline_model_parallel_layout",
        )
    result: list[list[Chunk]] = [[] for _ in range(stages)]
    layers = iter(kinds)
    for number, names in enumerate(parsed):
        units: list[str] = []
        for name in names:
            if name == "embedding":
                units.append(EMBEDDING)
            elif name == "loss":
                units.append(HEAD)
            elif name == "mtp":
                units += [MTP] if MTP not in units and mtp else []
            else:
                units.append(next(layers))
        result[number % stages].append(tuple(units))
    return tuple(tuple(stage) for stage in result)


@lru_cache(maxsize=4096)
def layer_counts(
    layers: int,
    stages: int,
    chunks: int,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Layers of each chunk of each stage, `[stage][chunk]`, without a layout."""
    sizes = _stage_sizes(layers, stages, first, last, embedding_counts, loss_counts)
    result = []
    for stage, size in enumerate(sizes):
        each = _divided(size, chunks, "virtual_pipeline_model_parallel_size")
        counts = [each] * chunks
        counts[0] -= embedding_counts and stage == 0
        counts[-1] -= loss_counts and stage == stages - 1
        result.append(tuple(counts))
    return tuple(result)


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
    inner = stages - ends
    size = _divided(middle, inner, "num_layers_in_first_pipeline_stage") if inner > 0 else 0
    return (
        ([first] if first is not None else [])
        + [size] * inner
        + ([last] if last is not None else [])
    )


def _divided(total: int, parts: int, field: str) -> int:
    if parts < 1 or total % parts:
        raise UnsupportedError(f"{total} layers do not divide into {parts}", field=field)
    return total // parts
