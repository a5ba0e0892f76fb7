"""A space made to fit the model and the front end, so that it need not say what both decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.models import ModelSpec
from tuner.search.space import Axis, SearchSpace

_GRAPHS, _NAN_CHECK = "cuda_graph_impl", "check_for_nan_in_loss"
_WHOLE_STEP = "full_iteration"
_RECOMPUTED = "recompute_modules"


def for_frontend(space: SearchSpace, frontend: str) -> SearchSpace:
    """The space with switches that Megatron-LM and Megatron Bridge want beside its settings.

    Graphs of the whole step cannot look at the loss, which both check for NaN by default: without
    the switch each such candidate would be invalid (rule G31).
    """
    fields = [axis.field for axis in space.axes]
    if frontend == "mcore" or _GRAPHS not in fields or _NAN_CHECK in {*fields, *space.fixed}:
        return space
    if _WHOLE_STEP not in space.axes[fields.index(_GRAPHS)].values:
        return space
    switch = Axis(_NAN_CHECK, (False,), ((_GRAPHS, (_WHOLE_STEP,)),))
    return replace(space, axes=(*space.axes, switch))


def for_model(
    space: SearchSpace, model: ModelSpec, start: Sequence[Mapping[str, Any]] = ()
) -> SearchSpace:
    """The space without recomputation of modules that the model does not have.

    Each such choice would be the same run as one without the module. Those of the starting
    candidates stay.
    """
    missing = missing_modules(model)
    kept = [frozenset(flat.get(_RECOMPUTED) or ()) for flat in start]
    axes = []
    for axis in space.axes:
        if axis.field == _RECOMPUTED:
            values = tuple(
                value
                for value in axis.values
                if not isinstance(value, tuple)
                or not missing.intersection(value)
                or frozenset(value) in kept
            )
            axis = replace(axis, values=values or axis.values)
        axes.append(axis)
    return replace(space, axes=tuple(axes))


def missing_modules(model: ModelSpec) -> frozenset[str]:
    """Names of `recompute_modules` that no layer of the model has."""
    missing = set()
    experts = model.num_moe_experts is not None
    if not experts:
        missing |= {"moe", "moe_act"}
    if not experts or not model.moe_shared_expert_intermediate_size:
        missing.add("shared_experts")
    if not model.multi_latent_attention:
        missing.add("mla_up_proj")
    if model.hybrid_pattern is None and all(model.moe_layer_pattern):
        missing.add("mlp")
    return frozenset(missing)
