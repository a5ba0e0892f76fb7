"""Hybrid models: Mamba, attention, MLP and expert layers by the letters of a pattern.

Megatron-Core builds them with a class of their own: `MambaModel` up to 0.17, `HybridModel` from
0.18 on, which took the pattern as `hybrid_override_pattern` up to 0.16.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from trainables.errors import TrialSpecError

if TYPE_CHECKING:
    from trainables.megatron_core.plan import BuildPlan

PATTERN = "hybrid_layer_pattern"


def is_hybrid(plan: BuildPlan) -> bool:
    """Whether the plan's model is one of hybrid layers."""
    return bool(plan.model.get(PATTERN))


def build_hybrid_chunk(
    plan: BuildPlan, config: Any, *, stage: int | None, pre_process: bool, post_process: bool
) -> Any:
    """The bare hybrid model of one pipeline stage of this rank.

    Raises TrialSpecError for what this version's hybrid model cannot be: interleaved, or with
    multi-token prediction.
    """
    if plan.device == "cpu":
        raise TrialSpecError(
            "hybrid_layer_pattern needs the kernels of mamba_ssm and so a CUDA device; real runs "
            "on the CPU take transformer layers only"
        )
    model_class, stack, takes = _classes()
    arguments = {name: value for name, value in plan.model.items() if name in takes}
    pattern = plan.model[PATTERN]
    if PATTERN in takes:
        arguments[PATTERN] = pattern
    else:
        arguments["hybrid_override_pattern"] = _without_prediction(pattern)
    if "vp_stage" in takes:
        arguments["vp_stage"] = stage
    elif stage is not None:
        raise TrialSpecError(
            "virtual_pipeline_model_parallel_size: this Megatron-Core's hybrid model has no "
            "interleaved schedule; unset it"
        )
    return model_class(
        config,
        stack,
        vocab_size=plan.vocab_size,
        max_sequence_length=plan.max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        **arguments,
    )


def _classes() -> tuple[Any, Any, frozenset[str]]:
    """The model's class, the specification of its layers, and the names of its arguments."""
    try:
        layers = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
        model = importlib.import_module("megatron.core.models.hybrid.hybrid_model")
        model_class, stack = model.HybridModel, layers.hybrid_stack_spec
    except ModuleNotFoundError:
        layers = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs")
        model = importlib.import_module("megatron.core.models.mamba.mamba_model")
        model_class, stack = model.MambaModel, layers.mamba_stack_spec
    return model_class, stack, frozenset(inspect.signature(model_class.__init__).parameters)


def _without_prediction(pattern: str) -> str:
    """The pattern where "/" and "|" are unknown."""
    decoder, *prediction = pattern.split("/")
    if prediction:
        raise TrialSpecError(
            "hybrid_layer_pattern: this Megatron-Core's hybrid model has no multi-token "
            "prediction; leave out the layers after '/', or use Megatron-Core 0.17 or later"
        )
    return decoder.replace("|", "")
