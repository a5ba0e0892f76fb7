"""Names of training precisions, and the Megatron-Core fields that each stands for.

The recipes in low precision are those of Megatron Bridge (src/megatron/bridge/training/
mixed_precision.py), under the short names of its performance scripts and under its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.errors import InputError

BASE_PRECISIONS = ("bf16", "fp16", "fp32")
"""Types of activations and, outside of low-precision layers, of weights."""

_RECIPES: dict[str, dict[str, Any]] = {
    "bf16_with_fp8_current_scaling_mixed": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
        "fp8_param_gather": True,
    },
    "bf16_with_fp8_delayed_scaling_mixed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_param_gather": True,
    },
    "bf16_with_mxfp8_mixed": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_nvfp4_mixed": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}

_SHORT = {
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8_blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
}

PRECISIONS = (*BASE_PRECISIONS, *_SHORT, *_RECIPES)
"""Every name that is understood."""


def expand_precision(name: object, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The base precision of `name`, and `config` with the fields of its recipe.

    Fields that `config` has win; where it turns low precision off or chooses another recipe, the
    fields of this one are left out. Raises InputError for an unknown name.
    """
    if name not in PRECISIONS:
        raise InputError(f"{name!r} must be one of {', '.join(PRECISIONS)}", field="precision")
    name = _SHORT.get(str(name), str(name))
    if name in BASE_PRECISIONS:
        return name, dict(config)
    recipe = _RECIPES[name]
    for field in ("fp8", "fp8_recipe", "fp4", "fp4_recipe"):
        if field in config and config[field] != recipe.get(field):
            return "bf16", dict(config)
    return "bf16", recipe | dict(config)


def of_frontend(frontend: object, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` (after `expand_precision`) with what `frontend` adds to it unasked.

    Megatron Bridge's mixed precision hands its `fp8_recipe`, "tensorwise" where nobody chose one,
    to the optimizer also without FP8. A precision-aware optimizer then keeps float32 main weights
    and makes float32 gradients in its step (bridge/training/mixed_precision.py:
    MixedPrecisionConfig.setup; core/optimizer/optimizer_config.py: OptimizerConfig.__post_init__).
    """
    if frontend != "bridge" or not config.get("use_precision_aware_optimizer"):
        return dict(config)
    return {"fp8_recipe": "tensorwise", **config}


PRECISION_AWARE_FIELDS = (
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Fields that only a precision-aware optimizer takes."""

_OF_RECIPE = {
    "delayed": "fp8_ds",
    "tensorwise": "fp8_cs",
    "blockwise": "fp8_blockwise",
    "mxfp8": "mxfp8",
}


def arithmetic(config: Mapping[str, Any], base: str = "bf16") -> str:
    """The short name of what products of `config` are computed in: a recipe's, or `base`."""
    if config.get("fp4"):
        return "nvfp4"
    if config.get("fp8"):
        recipe = str(config.get("fp8_recipe") or "delayed")
        return _OF_RECIPE.get(recipe, f"fp8_{recipe}")
    return base


def short_name(precision: str) -> str:
    """The one short name of a precision that has several; other names are given back."""
    recipe = _RECIPES.get(_SHORT.get(precision, precision))
    return precision if recipe is None else arithmetic(recipe)
