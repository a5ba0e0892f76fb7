"""Fields of models with other layers beside attention, from their `config.json`.

Field names follow Megatron Bridge (models/nemotronh/nemotron_h_bridge.py,
models/qwen/qwen3_next_bridge.py); keys that a file leaves out take the defaults of the
configuration class (configuration_nemotron_h.py of the model repositories,
models/qwen3_next/configuration_qwen3_next.py of `transformers`).
"""

from __future__ import annotations

from typing import Any

from tuner.models.hf_document import HFDocument

_MIXTURE = "E"


def nemotron_h(hf: HFDocument) -> dict[str, Any]:
    """A stack of Mamba, attention, dense and expert layers."""
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        if hf.flag(key, False):
            hf.refuse(key, "is a bias that Megatron-Core's hybrid models lack; set it to false")
    if hf.text("mlp_hidden_act", "relu2") != "relu2":
        hf.refuse("mlp_hidden_act", "must be relu2, as in every model of this family")
    pattern = hf.text("hybrid_override_pattern", "")
    layers = hf.layers("num_hidden_layers")
    if len(pattern) != layers:
        hf.refuse("hybrid_override_pattern", f"must have a letter for each of {layers} layers")
    heads = hf.size("num_attention_heads")
    absent = heads if hf.has("num_key_value_heads") else 8
    fields: dict[str, Any] = {
        "hybrid_layer_pattern": pattern,
        "hidden_size": hf.size("hidden_size"),
        "ffn_hidden_size": hf.size("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": hf.size("num_key_value_heads", absent),
        "kv_channels": hf.size("head_dim", hf.size("attention_head_dim", 128)),
        "mamba_num_heads": hf.size("mamba_num_heads", 128),
        "mamba_head_dim": hf.size("mamba_head_dim", 64),
        "mamba_state_dim": hf.size("ssm_state_size", 128),
        "mamba_num_groups": hf.size("n_groups", 8),
        "activation_func": "squared_relu",
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": hf.number("hidden_dropout", 0.0),
        "attention_dropout": hf.number("attention_dropout", 0.0),
        "vocab_size": hf.size("vocab_size"),
        "share_embeddings_and_output_weights": hf.flag("tie_word_embeddings", False),
        "max_position_embeddings": hf.optional_size("max_position_embeddings"),
        "position_embedding_type": "none",
    }
    return fields | (_nemotron_experts(hf) if _MIXTURE in pattern else {})


def _nemotron_experts(hf: HFDocument) -> dict[str, Any]:
    scaling = hf.number("routed_scaling_factor", 1.0)
    fields: dict[str, Any] = {
        "num_moe_experts": hf.size("n_routed_experts"),
        "moe_ffn_hidden_size": hf.size("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": hf.optional_size(
            "moe_shared_expert_intermediate_size"
        ),
        "moe_latent_size": hf.optional_size("moe_latent_size"),
        "moe_router_topk": hf.size("num_experts_per_tok", 2),
        "moe_router_topk_scaling_factor": scaling if scaling != 1.0 else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    groups = hf.size("n_group", 1)
    if groups > 1:
        fields |= {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": hf.size("topk_group", 1),
        }
    return fields


def gated_delta_net(hf: HFDocument) -> dict[str, Any]:
    """What Qwen3-Next adds to Qwen3's mixtures: linear attention, output gates, shared experts."""
    layers = hf.layers("num_hidden_layers")
    step = hf.size("full_attention_interval", 4)
    kinds = hf.items("layer_types", str)
    regular = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    if kinds is not None and (
        len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}
    ):
        hf.refuse(
            "layer_types",
            f"must name linear_attention or full_attention for each of {layers} layers",
        )
    frequency: int | list[int] = step
    if kinds is not None and kinds != regular:
        frequency = [int(kind == "linear_attention") for kind in kinds]
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": frequency,
        "linear_conv_kernel_dim": hf.size("linear_conv_kernel_dim", 4),
        "linear_key_head_dim": hf.size("linear_key_head_dim", 128),
        "linear_value_head_dim": hf.size("linear_value_head_dim", 128),
        "linear_num_key_heads": hf.size("linear_num_key_heads", 16),
        "linear_num_value_heads": hf.size("linear_num_value_heads", 32),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": hf.number("partial_rotary_factor", 0.25),
        "moe_shared_expert_intermediate_size": hf.size("shared_expert_intermediate_size", 512),
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": not hf.flag("norm_topk_prob", True),
    }
