"""Where Megatron Bridge's `ConfigContainer` keeps each field, and what must be set beside it.

A recipe has settings of its own. For the result to be the candidate and not a mixture, every
tunable field is written, also at its default, and the two parts of the container that rewrite
others when a job starts (`comm_overlap`, `mixed_precision`) are switched off where the candidate
says what they would decide (megatron/bridge/training/config.py: runtime_config_update).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.candidate import DEFAULTS
from tuner.constraints.fields import Field, catalogue
from tuner.formats.megatron_fields import NOT_ARGUMENTS
from tuner.formats.result import CannotExpressError, Settings

OVERLAP_FIELDS = frozenset(
    (
        *("tp_comm_overlap", "tp_comm_bootstrap_backend", "overlap_p2p_comm", "batch_p2p_comm"),
        *("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"),
        *("overlap_param_gather_with_optimizer_step", "defer_embedding_wgrad_compute"),
        *("wgrad_deferral_limit", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    )
)
"""Fields that `CommOverlapConfig.setup` decides (megatron/bridge/training/comm_overlap.py)."""

PRECISION_FIELDS = frozenset(
    (
        *("fp32", "fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"),
        *("autocast_enabled", "grad_reduce_in_fp32", "fp8", "fp8_recipe", "fp8_param"),
        *("fp8_param_gather", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
        *("fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "fp4"),
        *("fp4_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
        *("num_layers_at_end_in_bf16", "reuse_grad_buf_for_mxfp8_param_ag"),
    )
)
"""Fields that `MixedPrecisionConfig.setup` decides (bridge/training/mixed_precision.py)."""

_RUN_PATHS: Mapping[str, tuple[str, ...]] = {
    "micro_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "decrease_batch_size_if_needed": ("train.decrease_batch_size_if_needed",),
    "seq_length": ("model.seq_length", "dataset.seq_length"),
    "vocab_size": ("model.vocab_size",),
    "use_torch_fsdp2": ("dist.use_torch_fsdp2",),
    "te_rng_tracker": ("rng.te_rng_tracker",),
    "check_for_nan_in_loss": ("rerun_state_machine.check_for_nan_in_loss",),
    "ckpt_format": ("checkpoint.ckpt_format",),
    "comm_overlap": ("comm_overlap",),
    "mixed_precision": ("mixed_precision",),
    "order": ("dist.use_tp_pp_dp_mapping",),
}
_SECTIONS = {"mla": "model", "gpt_model": "model", "provider": "model"}
_SPLIT_FIELDS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""How layers fall on stages: a recipe's own split does not fit another pipeline size."""

OVERLAP_CLASS = "megatron.bridge.training.comm_overlap.CommOverlapConfig"


def assignments(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """`{path in the container: value}` in a fixed order, and what has no place in it.

    Values are JSON-like; dtypes, backends and activations are names (see `object_of`).
    """
    fields = dict(_recipe_resets(settings)) | dict(settings.fields)
    placed: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in fields.items():
        if name in NOT_ARGUMENTS:
            continue
        try:
            for path in paths_of(name, settings.mcore):
                placed[path] = _value(name, value)
        except CannotExpressError as reason:
            left_out[name] = reason.message
    return placed, left_out


def paths_of(name: str, mcore: str) -> tuple[str, ...]:
    """The places of a field. Raises CannotExpressError where Bridge has none."""
    if name in _RUN_PATHS:
        return _RUN_PATHS[name]
    field = catalogue().get(name)
    if field is None or not _exists(field, mcore):
        raise CannotExpressError(f"Megatron Bridge for Megatron-Core {mcore} has no such field")
    sections = dict.fromkeys(_SECTIONS.get(section, section) for section in field.sections)
    return tuple(f"{section}.{name}" for section in sections)


def _exists(field: Field, mcore: str) -> bool:
    return mcore in field.default or mcore in field.also.get("bridge", ())


def _value(name: str, value: Any) -> Any:
    if name == "order":
        known = {"tp-cp-ep-dp-pp": False, "tp-cp-ep-pp-dp": True}
        if value not in known:
            raise CannotExpressError(f"Megatron Bridge knows the orders {', '.join(known)}")
        return known[value]
    return value


def _recipe_resets(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Tunable fields at their defaults, and what a recipe sets that would change the candidate."""
    given = settings.fields
    mcore = settings.mcore
    for name, default in DEFAULTS.items():
        if name in ("env", "extra", "micro_batch_size", "cuda_graph_modules"):
            continue
        yield name, _core_default(name, mcore, default)
    graph_field = "cuda_graph_modules" if mcore >= "0.18" else "cuda_graph_scope"
    yield graph_field, _core_default(graph_field, mcore, [])
    if graph_field != "cuda_graph_scope":
        yield "cuda_graph_scope", None  # recipes still set it, and both may not be set
    for name in _SPLIT_FIELDS:
        yield name, _core_default(name, mcore, None)
    if "comm_overlap" not in given and OVERLAP_FIELDS & set(given):
        yield "comm_overlap", None
    if "mixed_precision" not in given and PRECISION_FIELDS & set(given):
        yield "mixed_precision", None
        yield from _base_precision(settings)


def _base_precision(settings: Settings) -> Iterator[tuple[str, Any]]:
    """The types that the recipe's mixed precision would have set, where the candidate has none."""
    if {"fp32", "fp16", "bf16", "params_dtype"} & set(settings.fields):
        return
    precision = settings.precision or "bf16"
    yield "bf16", precision == "bf16"
    yield "fp16", precision == "fp16"
    yield "params_dtype", precision
    yield "pipeline_dtype", precision


def _core_default(name: str, mcore: str, otherwise: Any) -> Any:
    """Megatron-Core's default of a field that the candidate leaves unread."""
    field = catalogue().get(name)
    return field.default.get(mcore, otherwise) if field is not None else otherwise


def object_of(path: str, value: Any) -> str | None:
    """The dotted name of the Python object that a name stands for; None for plain values."""
    field = path.rpartition(".")[2]
    if field.endswith("_dtype") and value in DTYPES:
        return f"torch.{DTYPES[value]}"
    if field == "attention_backend" and isinstance(value, str):
        return f"megatron.core.transformer.enums.AttnBackend.{value}"
    if field == "activation_func" and value in ACTIVATIONS:
        return ACTIVATIONS[value]
    return None


DTYPES: Mapping[Any, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "uint8": "uint8",
    "fp64": "float64",
}
ACTIVATIONS: Mapping[Any, str] = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "relu": "torch.nn.functional.relu",
    "squared_relu": "megatron.core.activations.squared_relu",
    "quick_gelu": "megatron.core.activations.quick_gelu",
}
