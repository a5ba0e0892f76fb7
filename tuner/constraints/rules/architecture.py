"""The model itself: activation, rotary embeddings, attention variants."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import UNCHANGED, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

# The fused kernel compares with the function of fusions/fused_bias_geglu.py, called quick_geglu
# here; the function called quick_gelu is the one of activations.py, which it does not know.
FUSABLE = ("gelu", "silu", "quick_geglu")
TE_FUNCTIONS = ("gelu", "silu", "relu")
_FUSION_OFF = {"bias_activation_fusion": False}


@rule("E05", TC, fix=[_FUSION_OFF])
def fused_activation_is_supported(c: Any) -> str | None:
    """bias_activation_fusion with an activation that has no fused kernel."""
    if not c.bias_activation_fusion:
        return None
    function = c.activation_func
    if function not in FUSABLE:
        return f"no fused kernel for activation {function}"
    if function == "gelu" and not c.gated_linear_unit and not c.add_bias_linear:
        return "fused plain GELU needs add_bias_linear"
    if function == "quick_geglu" and not c.gated_linear_unit:
        return "fused quick GELU needs gated_linear_unit"
    if c.glu_linear_offset != 0.0 and function != "quick_geglu":
        return "a fused activation with glu_linear_offset must be quick_geglu"
    return None


@rule("E06", TC, fix=[{"use_te_activation_func": False}])
def te_activation_is_supported(c: Any) -> str | None:
    """use_te_activation_func with bias_activation_fusion or an activation it lacks."""
    if not c.use_te_activation_func:
        return None
    if c.bias_activation_fusion:
        return "bias_activation_fusion and use_te_activation_func exclude each other"
    if c.activation_func not in TE_FUNCTIONS:
        return f"Transformer Engine has no activation {c.activation_func}"
    return None


@rule("E07", TC, fix=[{"apply_rope_fusion": False}])
def fused_rope_needs_te(c: Any) -> str | None:
    """apply_rope_fusion without Transformer Engine, or interleaved with an old one."""
    if not c.apply_rope_fusion or c.multi_latent_attention:
        return None
    if c.rotary_interleaved and c.te < (2, 3):
        return "fused interleaved rotary embeddings need Transformer Engine 2.3"
    if c.machine_te < (1, 4):
        return "fused rotary embeddings need Transformer Engine 1.4"
    return None


@rule("E07", TC, fix=[{"rotary_interleaved": False}])
def interleaved_rope_excludes_mla(c: Any) -> str | None:
    """rotary_interleaved with multi-latent attention."""
    if c.rotary_interleaved and c.multi_latent_attention:
        return "multi-latent attention does not interleave rotary embeddings"
    return None


@rule(
    "E07",
    "transformer/transformer_config.py: MLATransformerConfig.__post_init__",
    fix=[{"apply_rope_fusion": False}],
)
def fused_mla_rope_is_yarn(c: Any) -> str | None:
    """apply_rope_fusion with multi-latent attention and a rope_type other than yarn."""
    if c.multi_latent_attention and c.apply_rope_fusion and c.rope_type != "yarn":
        return "fused rotary embeddings of multi-latent attention need rope_type yarn"
    return None


@rule("E07", TC, fix=[{"fused_single_qkv_rope": False}])
def single_rope_excludes_gated_attention(c: Any) -> str | None:
    """fused_single_qkv_rope with attention_output_gate."""
    if c.fused_single_qkv_rope and c.attention_output_gate:
        return "the single fused rotary kernel does not support gated attention"
    return None


@rule("E08", TC, fix=[{"no_rope_freq": None}])
def rope_pattern_covers_layers(c: Any) -> str | None:
    """no_rope_freq does not divide num_layers, or its list is not as long."""
    freq = c.no_rope_freq
    if not freq:
        return None
    if c.flash_decode:
        return "flash_decode cannot be used with no_rope_freq"
    if isinstance(freq, (list, tuple)):
        wrong = len(freq) != c.num_layers
        return f"no_rope_freq lists {len(freq)} of {c.num_layers} layers" if wrong else None
    if c.num_layers % freq:
        return f"no_rope_freq {freq} does not divide {c.num_layers} layers"
    return None


@rewrite("E08", "no_rope_freq", TC)
def rope_frequency_becomes_a_pattern(c: Any) -> object:
    """A frequency becomes a list with one entry per layer."""
    freq = c.no_rope_freq
    if not freq or isinstance(freq, (list, tuple)) or c.num_layers % freq:
        return UNCHANGED
    return ([0] * (freq - 1) + [1]) * (c.num_layers // freq)


@rule("E09", TC)
def gated_delta_net_is_described(c: Any) -> str | None:
    """gated_delta_net without its sizes, or heads that the ranks cannot share."""
    if c.experimental_attention_variant != "gated_delta_net":
        return None
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    sizes = (c.linear_conv_kernel_dim, c.linear_key_head_dim, c.linear_value_head_dim)
    if c.linear_attention_freq is None or None in sizes or not keys or values is None:
        return "gated_delta_net needs linear_attention_freq and the linear_* sizes"
    if values % keys:
        return f"{values} value heads are no multiple of {keys} key heads"
    ranks = c.tensor_model_parallel_size
    if c.minor >= 18:
        ranks *= c.context_parallel_size
    elif c.context_parallel_size != 1:
        return "gated_delta_net does not support context parallelism in this version"
    if keys % ranks or values % ranks:
        return f"linear key ({keys}) and value ({values}) heads must be multiples of {ranks} ranks"
    return None


@rule("E10", TC)
def sparse_attention_is_supported(c: Any) -> str | None:
    """dsa with context parallelism (0.19: other than allgather), bias or fused rotary embedding."""
    if c.experimental_attention_variant != "dsa":
        return None
    if c.apply_rope_fusion:
        return "dsa does not support fused rotary embeddings"
    if c.minor < 19:
        return "dsa does not support context parallelism" if c.context_parallel_size > 1 else None
    if c.add_bias_linear:
        return "dsa needs add_bias_linear false"
    if c.dsa_indexer_topk_freq < 1 or c.dsa_indexer_skip_topk_offset < 0:
        return (
            "dsa_indexer_topk_freq must be positive and dsa_indexer_skip_topk_offset not negative"
        )
    kinds = c.cp_comm_type
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    gathered = all(k is not None and k.replace("_", "").lower() == "allgather" for k in kinds)
    if c.context_parallel_size > 1 and not gathered:
        return "dsa supports context parallelism only with cp_comm_type allgather"
    return None


@rule("E11", TC, fix=[{"batch_invariant_mode": False}])
def batch_invariance_needs_flash(c: Any) -> str | None:
    """batch_invariant_mode without flash attention (0.19: version 3 or 4, no context parallelism,
    no attention dropout)."""
    if not c.batch_invariant_mode:
        return None
    if c.attention_backend != "flash":
        return "batch-invariant mode needs attention_backend flash"
    if c.minor < 19:
        return None
    if c.flash_attention_version not in (3, 4):
        return "batch-invariant mode needs flash_attention_version 3 or 4"
    if c.context_parallel_size != 1 or c.attention_dropout != 0.0:
        return "batch-invariant mode excludes context parallelism and attention dropout"
    return None


@rule("E11", TC, fix=[{"flash_attention_version": None}], since="0.19.2")
def flash_version_is_known(c: Any) -> str | None:
    """flash_attention_version is not 2, 3 or 4."""
    if c.flash_attention_version not in (None, 2, 3, 4):
        return f"flash_attention_version must be 2, 3 or 4, got {c.flash_attention_version}"
    return None


@rule("E13", TC, fix=[{"fused_residual_rmsnorm": False}], since="0.17.0")
def fused_residual_norm_is_rmsnorm(c: Any) -> str | None:
    """fused_residual_rmsnorm with a norm other than RMSNorm."""
    if c.fused_residual_rmsnorm and c.normalization != "RMSNorm":
        return "fused_residual_rmsnorm needs normalization RMSNorm"
    return None


@rewrite("E17", "attention_softmax_in_fp32", TC)
def layer_scaling_sets_softmax_precision(c: Any) -> object:
    """apply_query_key_layer_scaling computes the softmax in fp32."""
    return True if c.apply_query_key_layer_scaling else UNCHANGED
