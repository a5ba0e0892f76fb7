"""Megatron Bridge: what a mixed_precision recipe overwrites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import derived, handed_over, rewrite, rule

SETUP = "bridge/training/mixed_precision.py: MixedPrecisionConfig.setup"
_BASE: Mapping[str, object] = {
    "fp16": False,
    "bf16": False,
    "params_dtype": None,
    "pipeline_dtype": None,
    "autocast_dtype": None,
    "grad_reduce_in_fp32": True,
    "fp8": None,
    "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": False,
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_wgrad": True,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "fp8_param": False,
    "fp8_param_gather": False,
    "fp4": None,
    "fp4_recipe": "nvfp4",
    "fp4_param": False,
    "fp4_param_gather": False,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}
# Fields a recipe owns from Bridge 0.4 (Megatron-Core 0.17) on.
_SINCE_17 = ("fp4_param", "fp4_param_gather")
_HALF: Mapping[str, Mapping[str, object]] = {
    "bf16": {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16"},
    "fp16": {
        "fp16": True,
        "params_dtype": "fp16",
        "pipeline_dtype": "fp16",
        "grad_reduce_in_fp32": False,
    },
}
_DELAYED: Mapping[str, object] = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "fp8_param": True,
    "fp8_param_gather": True,
}
_MXFP8: Mapping[str, object] = {
    "fp8": "e4m3",
    "fp8_recipe": "mxfp8",
    "fp8_param": True,
    "fp8_param_gather": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
}
_SUBCHANNEL: Mapping[str, object] = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
_NVFP4: Mapping[str, object] = {
    "fp4": "e2m1",
    "fp4_recipe": "nvfp4",
    "fp4_param": True,
    "fp4_param_gather": True,
}


def _scaled(recipe: str, layers: int) -> Mapping[str, object]:
    """fp8 with the first and last layers in bf16."""
    return {
        "fp8": "hybrid",
        "fp8_recipe": recipe,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": layers,
        "num_layers_at_end_in_bf16": layers,
        "fp8_param": True,
        "fp8_param_gather": True,
    }


RECIPES: Mapping[str, Mapping[str, object]] = {
    f"{half}_{suffix}": {**_BASE, **_HALF[half], **extra}
    for half, suffix, extra in (
        ("bf16", "mixed", {}),
        ("fp16", "mixed", {}),
        ("bf16", "with_fp8_delayed_scaling_mixed", _DELAYED),
        ("fp16", "with_fp8_delayed_scaling_mixed", _DELAYED),
        ("bf16", "with_mxfp8_mixed", _MXFP8),
        ("fp16", "with_mxfp8_mixed", _MXFP8),
        ("bf16", "with_fp8_current_scaling_mixed", _scaled("tensorwise", 1)),
        ("fp16", "with_fp8_current_scaling_mixed", _scaled("tensorwise", 1)),
        ("bf16", "with_fp8_subchannel_scaling_mixed", _SUBCHANNEL),
        ("fp16", "with_fp8_subchannel_scaling_mixed", _SUBCHANNEL),
        ("bf16", "with_nvfp4_mixed", _NVFP4),
    )
} | {
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {
        **_BASE,
        **_HALF["bf16"],
        **_scaled("tensorwise", 2),
    },
    "nanov2_bf16_with_fp8_current_scaling_mixed": {
        **_BASE,
        **_HALF["bf16"],
        **_scaled("blockwise", 2),
    },
    "nemotron_3_super_bf16_with_nvfp4_mixed": {
        **_BASE,
        **_HALF["bf16"],
        **_NVFP4,
        "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 14,
    },
}


@derived
def precision_recipe(c: Any) -> Mapping[str, object]:
    """Fields the attached mixed_precision recipe overwrites; empty without one."""
    if c.mixed_precision is None:
        return {}
    recipe = RECIPES.get(c.mixed_precision.replace("-", "_"), {})
    if c.minor >= 17:
        return recipe
    return {name: value for name, value in recipe.items() if name not in _SINCE_17}


def after_recipe(c: Any, name: str) -> Any:
    """The value of a field after the recipe has been applied to the given view."""
    return c.precision_recipe.get(name, getattr(c, name))


@handed_over("bridge", *(name for name in _BASE if name != "pipeline_dtype"))
def precision_after_recipe(c: Any, name: str) -> Any:
    """A recipe owns every precision field, whatever the model says."""
    return after_recipe(c, name)


def _report(name: str) -> None:
    def overwrite(c: Any) -> object:
        return after_recipe(c, name)

    overwrite.__name__ = f"recipe_overwrites_{name}"
    overwrite.__doc__ = "The mixed_precision recipe overwrites it."
    rewrite("S07", name, SETUP, frontends=("bridge",), layer="given")(overwrite)


for _name in _BASE:
    if _name != "pipeline_dtype":
        _report(_name)


@rule(
    "B13",
    "bridge/training/mixed_precision.py: get_mixed_precision_config",
    fix=[{"mixed_precision": "bf16_mixed"}],
    frontends=("bridge",),
    layer="given",
)
def precision_recipe_is_known(c: Any) -> str | None:
    """mixed_precision names no recipe."""
    name = c.mixed_precision
    if name is None or name.replace("-", "_") in RECIPES:
        return None
    return f"no mixed-precision recipe is called {name!r}; choose from {', '.join(RECIPES)}"


@rule(
    "F20",
    "bridge/training/mixed_precision.py: MixedPrecisionConfig.finalize",
    fix=[{"mixed_precision": "bf16_mixed"}],
    frontends=("bridge",),
    layer="given",
)
def fp4_recipe_needs_te(c: Any) -> str | None:
    """An fp4 recipe with Transformer Engine before 2.7."""
    if c.precision_recipe.get("fp4") and c.te < (2, 7):
        return "fp4 needs Transformer Engine 2.7"
    return None
