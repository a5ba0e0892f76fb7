"""Megatron-LM's command line in Megatron-Core's field names.

Options, their defaults and what they imply are those of `megatron/training/arguments.py`
(`parse_args`, `validate_args`, `core_transformer_config_from_args`) of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tuner.validation.launch import UnmodelledError

GPT2_VOCABULARY = 50257
_TOKENIZER_VOCABULARIES = {
    # rows of the embedding before padding, by what the tokenizer option names
    "nemotron_2_256k": 256000,
    "Llama2Tokenizer": 32000,
}

_MODEL_OPTIONS = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads",
    "kv-channels": "kv_channels",
    "normalization": "normalization",
    "norm-epsilon": "layernorm_epsilon",
    "hidden-dropout": "hidden_dropout",
    "attention-dropout": "attention_dropout",
    "qk-layernorm": "qk_layernorm",
    "max-position-embeddings": "max_position_embeddings",
    "position-embedding-type": "position_embedding_type",
    "rotary-base": "rotary_base",
    "rotary-percent": "rotary_percent",
    "rotary-interleaved": "rotary_interleaved",
    "make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
    "num-experts": "num_moe_experts",
    "moe-router-topk": "moe_router_topk",
    "moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "moe-router-score-function": "moe_router_score_function",
    "moe-router-pre-softmax": "moe_router_pre_softmax",
    "moe-router-num-groups": "moe_router_num_groups",
    "moe-router-group-topk": "moe_router_group_topk",
    "moe-router-topk-scaling-factor": "moe_router_topk_scaling_factor",
    "moe-router-enable-expert-bias": "moe_router_enable_expert_bias",
    "multi-latent-attention": "multi_latent_attention",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_head_dim",
    "qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "v-head-dim": "v_head_dim",
    "rotary-scaling-factor": "rotary_scaling_factor",
    "mscale": "mscale",
    "mscale-all-dim": "mscale_all_dim",
    "mtp-num-layers": "mtp_num_layers",
    "mtp-use-repeated-layer": "mtp_use_repeated_layer",
    "moe-latent-size": "moe_latent_size",
    "hybrid-layer-pattern": "hybrid_layer_pattern",
    "hybrid-override-pattern": "hybrid_override_pattern",
    "mamba-state-dim": "mamba_state_dim",
    "mamba-head-dim": "mamba_head_dim",
    "mamba-num-groups": "mamba_num_groups",
    "mamba-num-heads": "mamba_num_heads",
}
_CONFIG_OPTIONS = {
    option.replace("_", "-"): option
    for option in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "micro_batch_size",
        "sequence_parallel",
        "use_distributed_optimizer",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "fine_grained_activation_offloading",
        "offload_modules",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
        "tp_comm_overlap",
        "attention_backend",
        "deterministic_mode",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_router_load_balancing_type",
        "moe_router_dtype",
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_shared_expert_overlap",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "microbatch_group_size_per_vp_stage",
        "calculate_per_token_loss",
        "num_distributed_optimizer_instances",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "fp8_recipe",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer",
        "transformer_impl",
        "overlap_p2p_communication_warmup_flush",
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
    )
} | {
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "fp8-format": "fp8",
    "ddp-average-in-collective": "average_in_collective",
}
_NEGATIVE_OPTIONS = {
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-bias-gelu-fusion": "bias_activation_fusion",
    "no-bias-swiglu-fusion": "bias_activation_fusion",
    "no-rope-fusion": "apply_rope_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-persist-layer-norm": "persist_layer_norm",
    "no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
}
_POSITIVE_DEFAULTS = {
    # Options that are on unless a `--no-` option turns them off.
    "gradient_accumulation_fusion": True,
    "bias_dropout_fusion": True,
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "masked_softmax_fusion": True,
    "create_attention_mask_in_dataloader": True,
    "transformer_impl": "transformer_engine",
    "optimizer": "adam",
}
_KNOWN_SPECIFICATIONS = ("hybrid_stack_spec", "mamba_stack_spec")
"""What `--spec` may name: the layers that hybrid models have anyway."""


def model_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Architecture fields of Megatron-LM options (without dashes in front).

    Raises UnmodelledError for architectures that `ModelSpec` does not describe.
    """
    specification = str(options.get("spec") or "")
    if specification and not specification.rstrip("]").endswith(_KNOWN_SPECIFICATIONS):
        raise UnmodelledError(f"layers of one's own (--spec {specification}) are not modelled")
    fields = {
        field: _number(options[option])
        for option, field in _MODEL_OPTIONS.items()
        if options.get(option) is not None
    }
    if not fields.get("mtp_num_layers"):
        fields.pop("mtp_num_layers", None)
    if options.get("group-query-attention") and options.get("num-query-groups"):
        fields["num_query_groups"] = options["num-query-groups"]
    fields["gated_linear_unit"] = bool(options.get("swiglu"))
    if options.get("swiglu") and "ffn_hidden_size" not in fields:
        fields["ffn_hidden_size"] = int(8 * fields["hidden_size"] / 3 / 64) * 64  # validate_args
    fields["activation_func"] = _activation(options)
    fields["add_bias_linear"] = not options.get("disable-bias-linear", False)
    fields["share_embeddings_and_output_weights"] = not options.get(
        "untie-embeddings-and-output-weights", False
    )
    if fields.get("hybrid_layer_pattern") or fields.get("hybrid_override_pattern"):
        fields.pop("num_layers", None)  # validate_args counts the letters
    fields.setdefault("position_embedding_type", "learned_absolute")
    if fields["position_embedding_type"] == "rope":
        fields.pop("max_position_embeddings", None)
    if options.get("apply-layernorm-1p"):
        fields["layernorm_zero_centered_gamma"] = True
    if "moe-layer-freq" in options and options["moe-layer-freq"] is not None:
        fields["moe_layer_freq"] = layer_frequency(options["moe-layer-freq"])
    fields["vocab_size"] = _vocabulary(options)
    if fields.get("num_moe_experts") is None:
        fields = {name: value for name, value in fields.items() if not name.startswith("moe_")}
    if fields.get("multi_latent_attention"):
        fields.pop("num_query_groups", None)
        fields.pop("rotary_percent", None)
        if options.get("rope-type"):
            fields["rope_type"] = options["rope-type"]
    return fields


def config_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Candidate fields of Megatron-LM options, defaults that differ from the library's included."""
    fields: dict[str, Any] = dict(_POSITIVE_DEFAULTS)
    for option, field in _CONFIG_OPTIONS.items():
        if options.get(option) is not None:
            fields[field] = _words(field, options[option])
    for option, field in _NEGATIVE_OPTIONS.items():
        if options.get(option):
            fields[field] = False
    if options.get("squared-relu") or options.get("disable-bias-linear", False):
        fields["bias_activation_fusion"] = bool(options.get("swiglu"))  # validate_args
    if "hierarchical_context_parallel_sizes" in fields:
        sizes = str(fields["hierarchical_context_parallel_sizes"]).split()
        fields["hierarchical_context_parallel_sizes"] = [int(size) for size in sizes]
    if fields.get("tensor_model_parallel_size", 1) == 1:
        fields["sequence_parallel"] = False  # validate_args turns it off
    fields.setdefault("use_distributed_optimizer", False)
    fields["virtual_pipeline_model_parallel_size"] = _model_chunks(options)
    fields["grad_reduce_in_fp32"] = not options.get("grad-reduce-in-bf16", False)
    if options.get("fp16"):
        fields["grad_reduce_in_fp32"] = bool(options.get("accumulate-allreduce-grads-in-fp32"))
    if "fp8" in fields:
        fields.setdefault("fp8_recipe", "delayed")
    return fields


def precision_of(options: Mapping[str, Any]) -> str:
    """The type of weights and activations."""
    return "bf16" if options.get("bf16") else "fp16" if options.get("fp16") else "fp32"


def layer_frequency(value: object) -> int | tuple[int, ...]:
    """The pattern that `--moe-layer-freq` describes, e.g. "([0]*3+[1]*58)"."""
    if isinstance(value, int):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(int(flag) for flag in value)
    text = re.sub(r"[\s()]", "", str(value)).removesuffix("*1")
    if text.isdigit():
        return int(text)
    pattern: list[int] = []
    for term in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise UnmodelledError(f"cannot read the layer pattern {value!r}")
        pattern += [int(flag) for flag in match[1].split(",")] * int(match[2] or 1)
    return tuple(pattern)


def _number(value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-6, as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _activation(options: Mapping[str, Any]) -> str:
    if options.get("swiglu"):
        return "silu"
    return "squared_relu" if options.get("squared-relu") else "gelu"


def _vocabulary(options: Mapping[str, Any]) -> int:
    if options.get("vocab-size"):
        return int(options["vocab-size"])
    named = f"{options.get('tokenizer-type', '')} {options.get('tokenizer-model', '')}"
    for name, size in _TOKENIZER_VOCABULARIES.items():
        if name in named:
            return size
    if "GPT2BPETokenizer" in named or options.get("merge-file"):
        return GPT2_VOCABULARY
    raise UnmodelledError("the vocabulary is not published")


def _model_chunks(options: Mapping[str, Any]) -> int | None:
    """Model chunks per pipeline rank."""
    stages = int(options.get("pipeline-model-parallel-size") or 1)
    layers = options.get("num-layers-per-virtual-pipeline-stage")
    if options.get("num-virtual-stages-per-pipeline-rank"):
        return int(options["num-virtual-stages-per-pipeline-rank"])
    if layers is None or stages == 1:
        return None
    total = int(options["num-layers"]) // stages
    chunks = total // int(layers)
    return chunks if chunks > 1 else None


def _words(field: str, value: Any) -> Any:
    """Lists that the command line writes as "[a b]"."""
    if field in ("recompute_modules", "offload_modules", "cuda_graph_scope", "cuda_graph_modules"):
        if isinstance(value, str):
            return value.strip("[]").replace(",", " ").split()
        return list(value)
    return value
