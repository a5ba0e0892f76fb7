"""Layers over pipeline stages: plain, uneven, accounted and custom layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

LAYOUT = "transformer/pipeline_parallel_layer_layout.py: PipelineParallelLayerLayout"
BUILD = "transformer/transformer_block.py: get_num_layers_to_build"

LAYER_TYPES = ("embedding", "loss", "encoder", "decoder", "mtp")
_LETTERS = {"E": "embedding", "L": "loss", "t": "decoder", "m": "mtp"}
_MAX_UNROLLED = 200_000
_UNEVEN_OFF: Mapping[str, object] = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}
_ACCOUNT_OFF: Mapping[str, object] = {
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
_LAYOUT_OFF: Mapping[str, object] = {"pipeline_model_parallel_layout": None}

Stages = tuple[tuple[str, ...], ...]


class LayoutError(ValueError):
    """A layout that upstream refuses to parse."""


def parse_layout(layout: Any) -> Stages:
    """Stages of a layout in virtual-stage order, each a tuple of layer types.

    Raises:
        LayoutError: an unknown letter or name.
    """
    if isinstance(layout, str):
        return _parse_text(layout)
    return tuple(tuple(_layer_type(name) for name in stage) for stage in layout)


def _layer_type(name: str) -> str:
    text = name.strip().lower()
    if text not in LAYER_TYPES:
        raise LayoutError(f"{text!r} is no layer type; use one of {', '.join(LAYER_TYPES)}")
    return text


@lru_cache(maxsize=4096)
def _parse_text(text: str) -> Stages:
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(pattern, _repeat, unrolled)
        if len(unrolled) > _MAX_UNROLLED:
            raise LayoutError("the layout unrolls to far more layers than any model has")
    stages = []
    for stage in unrolled.split("|"):
        for letter in stage:
            if letter not in _LETTERS:
                raise LayoutError(f"{letter!r} is no layer letter; use one of E, t, m, L")
        stages.append(tuple(_LETTERS[letter] for letter in stage))
    return tuple(stages)


def _repeat(match: re.Match[str]) -> str:
    count = int(match.group(2)) if len(match.group(2)) < 7 else _MAX_UNROLLED + 1
    if count * len(match.group(1)) > _MAX_UNROLLED:
        raise LayoutError("the layout unrolls to far more layers than any model has")
    return match.group(1) * count


@derived
def layout_stages(c: Any) -> Stages | str | None:
    """Parsed stages; the reason as a string when upstream refuses to parse; None without one."""
    if c.pipeline_model_parallel_layout is None:
        return None
    try:
        stages = parse_layout(c.pipeline_model_parallel_layout)
    except LayoutError as error:
        return str(error)
    return stages


@derived
def layout_grid(c: Any) -> Stages | None:
    """Stages of a layout that parses and whose count the pipeline size divides."""
    stages = c.layout_stages
    if not isinstance(stages, tuple) or len(stages) % c.pipeline_model_parallel_size:
        return None
    return stages


@derived
def effective_virtual_pipeline_size(c: Any) -> int | None:
    """The virtual pipeline size after a layout has set it."""
    given = c.virtual_pipeline_model_parallel_size
    if given is not None or c.layout_grid is None:
        return given
    detected = len(c.layout_grid) // c.pipeline_model_parallel_size
    return detected if detected > 1 else None


@derived
def has_uneven_ends(c: Any) -> bool:
    """Whether the first or last stage has its own number of layers."""
    return (
        c.num_layers_in_first_pipeline_stage is not None
        or c.num_layers_in_last_pipeline_stage is not None
    )


@derived
def accounted_layers(c: Any) -> int:
    """Layers to split, with embedding and loss counted as layers where asked."""
    return int(
        c.num_layers
        + bool(c.account_for_embedding_in_pipeline_split)
        + bool(c.account_for_loss_in_pipeline_split)
    )


@derived
def accounts(c: Any) -> bool:
    """Whether embedding or loss count as a layer."""
    return c.accounted_layers > c.num_layers


@derived
def middle(c: Any) -> tuple[int, int]:
    """Layers and stages left after the uneven first and last stages."""
    layers, stages = c.num_layers, c.pipeline_model_parallel_size
    for own in (c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage):
        if own is not None:
            layers, stages = layers - own, stages - 1
    return layers, stages


@derived
def stage_layers(c: Any) -> tuple[int, ...] | None:
    """Layers per pipeline rank at the first, middle and last ranks (without a layout).

    None when the split does not divide; the values a rank gets before VPP and account_for_*.
    """
    size = c.pipeline_model_parallel_size
    if not c.has_uneven_ends:
        per_rank, rest = divmod(c.accounted_layers, size)
        return None if rest else (per_rank,) * min(size, 3)
    layers, stages = c.middle
    per_rank = 0
    if stages > 0:
        per_rank, rest = divmod(layers, stages)
        if rest:
            return None
    ranks = [per_rank] * min(size, 3)
    if c.num_layers_in_first_pipeline_stage is not None:
        ranks[0] = c.num_layers_in_first_pipeline_stage
    if c.num_layers_in_last_pipeline_stage is not None:
        ranks[-1] = c.num_layers_in_last_pipeline_stage
    return tuple(ranks)


@derived
def chunk_layers(c: Any) -> frozenset[int] | None:
    """The distinct layer counts of the model chunks; None when the split is refused."""
    if c.pipeline_model_parallel_layout is not None:
        grid = c.layout_grid
        return None if grid is None else frozenset(stage.count("decoder") for stage in grid)
    ranks = c.stage_layers
    if ranks is None:
        return None
    vpp = c.effective_virtual_pipeline_size or 1
    if c.pipeline_model_parallel_size == 1:
        vpp = 1
    if any(layers % vpp for layers in ranks):
        return None
    chunks = {layers // vpp for layers in ranks}
    if c.accounts:
        per_chunk = ranks[0] // vpp
        first = per_chunk - bool(c.account_for_embedding_in_pipeline_split)
        last = per_chunk - bool(c.account_for_loss_in_pipeline_split)
        count = c.pipeline_model_parallel_size * vpp
        ends = {first + last - per_chunk} if count == 1 else {first, last}
        chunks = ends if count <= 2 else chunks | ends
    return frozenset(chunks)


@rule("L01", TC, fix=[_ACCOUNT_OFF, _UNEVEN_OFF])
def uneven_ends_exclude_accounting(c: Any) -> str | None:
    """First/last stage layer counts together with account_for_embedding/loss."""
    if c.has_uneven_ends and c.accounts:
        return "layers of the first or last stage are set, so embedding and loss cannot count too"
    return None


@rule("L02", TC, fix=[{**_UNEVEN_OFF, **_ACCOUNT_OFF}, _LAYOUT_OFF])
def layout_excludes_other_splits(c: Any) -> str | None:
    """pipeline_model_parallel_layout together with any other way to split layers."""
    if c.pipeline_model_parallel_layout is not None and (c.has_uneven_ends or c.accounts):
        return "a pipeline layout already says where every layer goes"
    return None


@rule("L03", TC, fix=[{"virtual_pipeline_model_parallel_size": None}, _LAYOUT_OFF])
def virtual_size_agrees_with_layout(c: Any) -> str | None:
    """virtual_pipeline_model_parallel_size differs from the layout's."""
    given, grid = c.virtual_pipeline_model_parallel_size, c.layout_grid
    if given is None or grid is None:
        return None
    detected = len(grid) // c.pipeline_model_parallel_size
    if given != detected:
        return f"the layout has {detected} virtual stages per rank, the field says {given}"
    return None


@rewrite("L04", "virtual_pipeline_model_parallel_size", TC)
def layout_sets_virtual_size(c: Any) -> object:
    """A layout with several stages per rank sets virtual_pipeline_model_parallel_size."""
    if c.virtual_pipeline_model_parallel_size is None:
        return c.effective_virtual_pipeline_size
    return UNCHANGED


def _uneven_active(c: Any) -> bool:
    return c.pipeline_model_parallel_layout is None and c.has_uneven_ends


@rule("L05", TC, fix={"num_layers_in_first_pipeline_stage": None})
def first_stage_has_layers(c: Any) -> str | None:
    """num_layers_in_first_pipeline_stage is 0 or negative."""
    own = c.num_layers_in_first_pipeline_stage
    if _uneven_active(c) and own is not None and own <= 0:
        return "the first pipeline stage must have at least one layer"
    return None


@rule("L06", TC, fix={"num_layers_in_last_pipeline_stage": None})
def last_stage_has_layers(c: Any) -> str | None:
    """num_layers_in_last_pipeline_stage is 0 or negative."""
    own = c.num_layers_in_last_pipeline_stage
    if _uneven_active(c) and own is not None and own <= 0:
        return "the last pipeline stage must have at least one layer"
    return None


@rule("L07", TC, fix=[_UNEVEN_OFF, {"virtual_pipeline_model_parallel_size": None}])
def uneven_ends_divide_into_virtual_stages(c: Any) -> str | None:
    """Layers of the first or last stage are no multiple of the virtual pipeline size."""
    vpp = c.virtual_pipeline_model_parallel_size
    if vpp is None or not _uneven_active(c):
        return None
    for own in (c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage):
        if own is not None and own % vpp:
            return f"{own} layers of an end stage cannot form {vpp} virtual stages"
    return None


@rule("L08", TC, fix=[_UNEVEN_OFF])
def middle_stages_and_layers_come_together(c: Any) -> str | None:
    """After the end stages, layers are left but no stage, or a stage but no layers."""
    if not _uneven_active(c):
        return None
    layers, stages = c.middle
    if bool(layers) != bool(stages):
        return f"{layers} layers are left for {stages} middle pipeline stages"
    return None


@rule("L09", TC, fix=[_UNEVEN_OFF])
def middle_layers_divide_over_middle_stages(c: Any) -> str | None:
    """Layers left after the end stages are no multiple of the middle stages."""
    if not _uneven_active(c):
        return None
    layers, stages = c.middle
    if stages and layers % stages:
        return f"{layers} layers cannot be split over {stages} middle pipeline stages"
    return None


@rule("L10", TC, fix=[{"virtual_pipeline_model_parallel_size": None}, _UNEVEN_OFF])
def middle_layers_divide_into_virtual_stages(c: Any) -> str | None:
    """Layers of a middle stage are no multiple of the virtual pipeline size."""
    vpp = c.virtual_pipeline_model_parallel_size
    if vpp is None or not _uneven_active(c):
        return None
    layers, stages = c.middle
    if stages and layers // stages % vpp:
        return f"{layers // stages} layers of a middle stage cannot form {vpp} virtual stages"
    return None


def _accounting_active(c: Any) -> bool:
    return c.pipeline_model_parallel_layout is None and not c.has_uneven_ends and c.accounts


@rule("L11", TC, fix=[_ACCOUNT_OFF])
def accounted_layers_divide_over_stages(c: Any) -> str | None:
    """Layers plus embedding and loss are no multiple of the pipeline size."""
    if _accounting_active(c) and c.accounted_layers % c.pipeline_model_parallel_size:
        return (
            f"{c.accounted_layers} layers, embedding and loss counted, cannot be split over "
            f"{c.pipeline_model_parallel_size} stages"
        )
    return None


@rule("L12", TC, fix=[{"virtual_pipeline_model_parallel_size": None}, _ACCOUNT_OFF])
def accounted_layers_divide_into_virtual_stages(c: Any) -> str | None:
    """Layers per rank, embedding and loss counted, are no multiple of the VPP size."""
    vpp = c.virtual_pipeline_model_parallel_size
    if vpp is None or not _accounting_active(c):
        return None
    per_rank, rest = divmod(c.accounted_layers, c.pipeline_model_parallel_size)
    if not rest and per_rank % vpp:
        return f"{per_rank} layers per rank cannot form {vpp} virtual stages"
    return None


def _fewer_stages(c: Any) -> Mapping[str, object]:
    sizes = range(c.pipeline_model_parallel_size, 0, -1)
    return pipeline_change(c, next(s for s in sizes if c.num_layers % s == 0))


def pipeline_change(c: Any, size: int) -> Mapping[str, object]:
    """Change the pipeline size and, when it becomes 1, what cannot stay."""
    changes: dict[str, object] = {"pipeline_model_parallel_size": size}
    if size == 1 and c.virtual_pipeline_model_parallel_size is not None:
        changes["virtual_pipeline_model_parallel_size"] = None
    return changes


@rule("L13", BUILD, fix=[_fewer_stages])
def layers_divide_over_stages(c: Any) -> str | None:
    """A plain split: num_layers is no multiple of pipeline_model_parallel_size."""
    if c.pipeline_model_parallel_layout is not None or c.has_uneven_ends or c.accounts:
        return None
    if c.num_layers % c.pipeline_model_parallel_size:
        return (
            f"{c.num_layers} layers cannot be split over {c.pipeline_model_parallel_size} "
            "pipeline stages; use a divisor, uneven end stages or a layout"
        )
    return None


def _divisor_virtual_size(c: Any) -> Mapping[str, object]:
    per_rank = c.num_layers // c.pipeline_model_parallel_size
    sizes = range(min(c.virtual_pipeline_model_parallel_size, per_rank), 0, -1)
    fitting = next(s for s in sizes if per_rank % s == 0)
    return {"virtual_pipeline_model_parallel_size": fitting if fitting > 1 else None}


@rule("L14", BUILD, fix=[_divisor_virtual_size])
def layers_divide_into_virtual_stages(c: Any) -> str | None:
    """A plain split: layers per rank are no multiple of the virtual pipeline size."""
    if c.pipeline_model_parallel_layout is not None or c.has_uneven_ends or c.accounts:
        return None
    vpp, size = c.virtual_pipeline_model_parallel_size, c.pipeline_model_parallel_size
    per_rank, rest = divmod(c.num_layers, size)
    if vpp is not None and size > 1 and not rest and per_rank % vpp:
        return (
            f"{per_rank} layers per pipeline rank ({c.num_layers} over {size}) cannot form "
            f"{vpp} virtual stages"
        )
    return None


@rule("L16", LAYOUT, fix=[_LAYOUT_OFF])
def layout_stages_divide_over_ranks(c: Any) -> str | None:
    """The number of stages in the layout is no multiple of the pipeline size."""
    stages = c.layout_stages
    if isinstance(stages, tuple) and len(stages) % c.pipeline_model_parallel_size:
        return (
            f"the layout has {len(stages)} stages, which {c.pipeline_model_parallel_size} "
            "pipeline ranks cannot share evenly"
        )
    return None


@rule("L17", LAYOUT, fix=[_LAYOUT_OFF])
def layout_names_layers(c: Any) -> str | None:
    """The layout has an unknown layer name or letter."""
    stages = c.layout_stages
    return stages if isinstance(stages, str) else None


@derived
def layout_order(c: Any) -> tuple[str, ...] | None:
    """All layers of a well-formed layout in execution order."""
    if c.layout_grid is None:
        return None
    return tuple(layer for stage in c.layout_grid for layer in stage)


@rule("L18", LAYOUT, fix=[_LAYOUT_OFF])
def layout_starts_with_embedding_and_ends_with_loss(c: Any) -> str | None:
    """The layout does not have exactly one embedding first and one loss last."""
    order = c.layout_order
    if order is None:
        return None
    if not order or order[0] != "embedding" or order[-1] != "loss":
        return "the layout must begin with the embedding and end with the loss"
    if order.count("embedding") != 1 or order.count("loss") != 1:
        return "the layout must name the embedding and the loss exactly once"
    return None


@rule("L19", LAYOUT, fix=[_LAYOUT_OFF])
def layout_counts_match_model(c: Any) -> str | None:
    """Decoder or MTP layers in the layout differ from the model's."""
    order = c.layout_order
    if order is None:
        return None
    if order.count("decoder") != c.num_layers:
        return f"the layout has {order.count('decoder')} layers, the model {c.num_layers}"
    if order.count("mtp") != (c.mtp_num_layers or 0):
        return f"the layout has {order.count('mtp')} MTP layers, the model {c.mtp_num_layers or 0}"
    return None


@rule("L20", LAYOUT, fix=[_LAYOUT_OFF])
def layout_places_mtp_last(c: Any) -> str | None:
    """MTP layers before decoders, split over stages, or not in a last virtual stage."""
    order, grid = c.layout_order, c.layout_grid
    if order is None or "mtp" not in order:
        return None
    if "decoder" in order[order.index("mtp") :]:
        return "MTP layers must come after all decoder layers"
    last_row = len(grid) - c.pipeline_model_parallel_size
    if any("mtp" in stage for stage in grid[:last_row]):
        return "MTP layers must be in the last virtual stage of a rank"
    if any(stage.count("mtp") not in (0, c.mtp_num_layers) for stage in grid):
        return "all MTP layers must be in one stage"
    return None


@rule("L21", LAYOUT, fix=[_LAYOUT_OFF])
def layout_has_no_encoder(c: Any) -> str | None:
    """The layout names encoder layers."""
    if c.layout_order is not None and "encoder" in c.layout_order:
        return "encoder layers are not supported in a pipeline layout"
    return None


@rule("L24", "transformer/transformer_block.py: get_num_layers_to_build", fix=[_UNEVEN_OFF])
def end_stages_hold_no_more_than_the_model(c: Any) -> str | None:
    """First and last stage together have more layers than the model (middle stages negative)."""
    if not _uneven_active(c):
        return None
    layers, stages = c.middle
    if stages > 0 and layers < 0:
        return (
            f"the end stages hold {-layers} layers more than the model has; every version accepts "
            "this and silently builds a larger model"
        )
    return None


@rule("L26", "transformer/transformer_block.py: get_num_layers_to_build", fix=[_UNEVEN_OFF])
def single_stage_has_no_ends(c: Any) -> str | None:
    """Both end-stage layer counts with one pipeline stage: a silently smaller model."""
    if not _uneven_active(c) or c.middle[1] >= 0:
        return None
    if c.num_layers_in_last_pipeline_stage != c.num_layers:
        return (
            "with one pipeline stage both end-stage counts are accepted, and the model silently "
            f"gets {c.num_layers_in_last_pipeline_stage} layers"
        )
    return None


@rule(
    "L27",
    "transformer/transformer_layer.py: get_transformer_layer_offset",
    fix=[_UNEVEN_OFF, {"virtual_pipeline_model_parallel_size": None}],
)
def uneven_ends_with_virtual_stages_have_a_middle(c: Any) -> str | None:
    """Both end-stage counts with two pipeline stages and virtual stages: division by zero."""
    ends = (c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage)
    if not _uneven_active(c) or None in ends or c.effective_virtual_pipeline_size is None:
        return None
    if c.pipeline_model_parallel_size == 2:
        return "the layer offsets divide by the number of middle stages, and there is none"
    return None
