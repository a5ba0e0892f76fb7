"""Pipeline layouts for models whose layers do not divide evenly, or whose ends weigh as layers do.

A space offers `balanced:N` as a value of `pipeline_model_parallel_layout`: the layers over `N`
chunks, so that the heaviest chunk is as light as can be. `N` chunks suit every pipeline size that
divides `N`; what is left over makes the virtual stages. A space that says nothing of how layers are
split offers them for the pipeline sizes over which the model's layers do not divide.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from tuner.errors import InputError
from tuner.models import ModelSpec
from tuner.models.flops import unit_flops
from tuner.search.space import Axis, SearchSpace

FIELD = "pipeline_model_parallel_layout"
_BALANCED = "balanced:"
_STAGES, _CHUNKS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_SPLITS = (
    FIELD,
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
)
"""Fields that split layers over stages themselves; a hybrid model ignores layouts."""


def with_layouts(space: SearchSpace, model: ModelSpec, seq_length: int) -> SearchSpace:
    """The space with `balanced:N` replaced by layouts of this model; what has none is left out.

    Raises InputError where no value of the axis is left, or `N` is no number.
    """
    axes = []
    for axis in _uneven(space, model).axes:
        if axis.field == FIELD:
            found = (_value(value, model, seq_length) for value in axis.values)
            values = tuple(dict.fromkeys(value for value in found if value != ""))
            if not values:
                raise InputError("the model has fewer layers than chunks", field=f"axes.{FIELD}")
            axis = replace(axis, values=values)
        axes.append(axis)
    return replace(space, axes=tuple(axes))


def _uneven(space: SearchSpace, model: ModelSpec) -> SearchSpace:
    """The space with balanced layouts for pipelines over which the layers do not divide."""
    by_field = {axis.field: axis for axis in space.axes}
    stages = by_field.get(_STAGES)
    split = {*by_field, *space.fixed, *(name for name in _SPLITS if model.to_flat().get(name))}
    if stages is None or split & set(_SPLITS) or _CHUNKS in space.fixed:
        return space
    odd = tuple(
        int(size)
        for size in stages.values
        if isinstance(size, int) and 1 < size <= model.num_layers and model.num_layers % size
    )
    if not odd:
        return space
    virtual = by_field.get(_CHUNKS)
    chunks = {1, *(int(n) for n in (virtual.values if virtual else ()) if isinstance(n, int))}
    counts = sorted({size * n for size in odd for n in chunks if size * n <= model.num_layers})
    layouts = Axis(FIELD, tuple(f"{_BALANCED}{n}" for n in counts), ((_STAGES, odd),))
    axes: list[Axis] = []
    for axis in space.axes:
        axes.append(_only_even(axis, stages, odd) if axis.field == _CHUNKS else axis)
        if axis.field == _STAGES:
            axes.append(layouts)
    return replace(space, axes=tuple(axes))


def _only_even(axis: Axis, stages: Axis, odd: tuple[int, ...]) -> Axis:
    """The axis of virtual stages where no layout decides them."""
    when = dict(axis.when)
    asked = when.get(_STAGES, stages.values)
    when[_STAGES] = tuple(size for size in asked if size not in odd)
    return replace(axis, when=tuple(when.items()))


def _value(value: object, model: ModelSpec, seq_length: int) -> object:
    if not isinstance(value, str) or not value.startswith(_BALANCED):
        return value
    try:
        chunks = int(value.removeprefix(_BALANCED))
    except ValueError:
        raise InputError(f"{value!r} names no number of chunks", field=f"axes.{FIELD}") from None
    return balanced_layout(model, chunks, seq_length) or ""


def balanced_layout(model: ModelSpec, chunks: int, seq_length: int) -> str | None:
    """The layout of a model over `chunks`, as text that Megatron-Core parses; None where there are
    too few layers.

    Weights are forward FLOPs. The output layer and multi-token prediction stand at the end, beside
    as many layers as keep the heaviest chunk lightest, and all chunks as even as can be; later
    chunks take what is over, since earlier ones hold more activations.
    """
    layer, prediction, logits = unit_flops(model, seq_length)
    ends = [["L"]]
    if model.mtp_num_layers:
        letters = "m" * model.mtp_num_layers
        ends = [[f"{letters}L"], [letters, "L"]]
    weights = {"L": logits / layer, "m": prediction / layer / max(1, model.mtp_num_layers or 0)}
    best: tuple[tuple[float, float], list[str]] | None = None
    for end in ends:
        others = chunks - len(end)
        if others < 0:
            continue
        for beside in range(model.num_layers + 1):
            spread = _spread(model.num_layers - beside, others)
            if spread is None:
                continue
            first, *rest = ["t" * beside + end[0], *end[1:]]
            pieces = ["t" * count for count in spread] + [first, *rest]
            loads = [
                sum(1.0 if letter == "t" else weights[letter] for letter in piece)
                for piece in pieces
            ]
            balance = (round(max(loads), 6), sum(load**2 for load in loads))
            if best is None or balance < best[0]:
                best = balance, pieces
    if best is None:
        return None
    pieces = best[1]
    return _text(["E" + pieces[0], *pieces[1:]])


def _spread(layers: int, chunks: int) -> list[int] | None:
    """Layers of each chunk, at least one; None where that cannot be."""
    if chunks == 0:
        return [] if layers == 0 else None
    each, more = divmod(layers, chunks)
    return None if each == 0 else [each] * (chunks - more) + [each + 1] * more


def _text(pieces: list[str]) -> str:
    """Chunks in Megatron-Core's notation, equal neighbours and layers as multiples."""
    parts = []
    for piece, same in groupby(pieces):
        count = len(list(same))
        short = "".join(
            letter if run == 1 else f"{letter}*{run}"
            for letter, run in ((letter, len(list(run))) for letter, run in groupby(piece))
        )
        parts += [f"{short}|"] if count == 1 else [f"({short}|)*{count}"]
    return "".join(parts).removesuffix("|")
