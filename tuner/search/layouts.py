"""Pipeline layouts for models whose layers do not divide evenly, or whose ends weigh as layers do.

A space offers `balanced:N` as a value of `pipeline_model_parallel_layout`: the layers over `N`
chunks, so that the heaviest chunk is as light as can be. `N` chunks suit every pipeline size that
divides `N`; what is left over makes the virtual stages.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from tuner.errors import InputError
from tuner.models import ModelSpec
from tuner.models.flops import unit_flops
from tuner.search.space import SearchSpace

FIELD = "pipeline_model_parallel_layout"
_BALANCED = "balanced:"


def with_layouts(space: SearchSpace, model: ModelSpec, seq_length: int) -> SearchSpace:
    """The space with `balanced:N` replaced by layouts of this model; what has none is left out.

    Raises InputError where no value of the axis is left, or `N` is no number.
    """
    axes = []
    for axis in space.axes:
        if axis.field == FIELD:
            found = (_value(value, model, seq_length) for value in axis.values)
            values = tuple(dict.fromkeys(value for value in found if value != ""))
            if not values:
                raise InputError("the model has fewer layers than chunks", field=f"axes.{FIELD}")
            axis = replace(axis, values=values)
        axes.append(axis)
    return replace(space, axes=tuple(axes))


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
