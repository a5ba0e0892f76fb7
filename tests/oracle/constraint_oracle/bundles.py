"""Sets of fields that only together reach a check deep inside the packages.

Each may be laid over any candidate; ``cuda_graph_modules`` is respelled for versions before 0.18.
Most are one step past or short of a refusal, so that both sides of a condition are drawn.
"""

from __future__ import annotations

from typing import Any

Bundle = dict[str, Any]

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXPERTS: Bundle = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 1024,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
FLEX: Bundle = EXPERTS | {"moe_token_dispatcher_type": "flex"}
DROP_PADDING: Bundle = EXPERTS | {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
MOE_GRAPH: Bundle = DROP_PADDING | {
    "cuda_graph_impl": "transformer_engine",
    "use_te_rng_tracker": True,
    "cuda_graph_modules": ["moe"],
}
MOE_RECOMPUTE: Bundle = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
OVERLAP: Bundle = EXPERTS | {
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "overlap_moe_expert_parallel_comm": True,
    "moe_shared_expert_overlap": False,
}
OP_FUSER_EXPERTS: Bundle = FLEX | {
    "moe_flex_dispatcher_backend": "hybridep",
    "use_transformer_engine_op_fuser": True,
    "moe_expert_rank_capacity_factor": 1.5,
}
FINE_GRAINED: Bundle = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
    "env": {"NVTE_CPU_OFFLOAD_V1": "1"},
}
GATED_DELTA_NET: Bundle = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
PRECISION_AWARE: Bundle = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
GROUPED_WEIGHT: Bundle = EXPERTS | {
    "moe_single_grouped_weight": True,
    "use_transformer_engine_op_fuser": True,
}

#: Without fields that some versions lack.
COMMON: list[Bundle] = [
    {
        "defer_embedding_wgrad_compute": True,
        "gradient_accumulation_fusion": True,
        "wgrad_deferral_limit": -1,
    },
    {
        "defer_embedding_wgrad_compute": True,
        "gradient_accumulation_fusion": True,
        "wgrad_deferral_limit": 22,
    },
    {
        "overlap_param_gather_with_optimizer_step": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
        "fp8_param_gather": True,
    },
    {"nccl_ub": True, "env": EXPANDABLE},
    {"calculate_per_token_loss": True, "average_in_collective": True},
    {"calculate_per_token_loss": True, "average_in_collective": False},
    {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": False},
    {
        "pipeline_model_parallel_comm_backend": "ucc",
        "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    },
    {"pipeline_model_parallel_comm_backend": "nccl"},
    MOE_GRAPH | MOE_RECOMPUTE | {"moe_input_jitter_eps": 0.01},
    MOE_GRAPH | MOE_RECOMPUTE | {"hidden_dropout": 0.1},
    MOE_GRAPH | {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    MOE_GRAPH | {"cuda_graph_modules": []} | MOE_RECOMPUTE,
    MOE_GRAPH | MOE_RECOMPUTE | {"cuda_graph_modules": ["moe_router"]},
    MOE_GRAPH | {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_preprocess"]},
    MOE_GRAPH | {"cuda_graph_modules": ["moe_preprocess"]},
    MOE_GRAPH | {"cuda_graph_modules": ["mlp"]},
    MOE_GRAPH | {"cuda_graph_modules": ["mlp"], "moe_layer_freq": 2},
    MOE_GRAPH | {"cuda_graph_modules": ["moe", "moe_router"]},
    EXPERTS
    | {
        "cuda_graph_impl": "transformer_engine",
        "use_te_rng_tracker": True,
        "cuda_graph_modules": ["moe_router", "moe_preprocess"],
        "moe_expert_capacity_factor": 1.0,
    },
    EXPERTS
    | {
        "cuda_graph_impl": "transformer_engine",
        "use_te_rng_tracker": True,
        "cuda_graph_modules": ["moe_router", "moe_preprocess"],
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "moe_router_padding_for_fp8": True,
    },
    {
        "cuda_graph_impl": "transformer_engine",
        "use_te_rng_tracker": True,
        "cuda_graph_modules": ["attn"],
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "attention_dropout": 0.1,
    },
    {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
    {"enable_cuda_graph": True, "external_cuda_graph": True},
    {"enable_cuda_graph": True, "use_te_rng_tracker": True},
    {"external_cuda_graph": True, "cuda_graph_modules": ["attn"], "use_te_rng_tracker": True},
    OVERLAP,
    OVERLAP | {"recompute_modules": ["moe"]},
    OVERLAP | {"recompute_method": "uniform"},
    OVERLAP | {"recompute_num_layers": 1},
    OVERLAP | {"recompute_granularity": "full", "recompute_method": "block"},
    OVERLAP | {"moe_shared_expert_overlap": True},
    OVERLAP | {"mtp_num_layers": 1},
    OVERLAP | {"mtp_num_layers": 2},
    OVERLAP | {"bf16": False, "params_dtype": "fp32"},
    OVERLAP | {"moe_token_dispatcher_type": "allgather"},
    OVERLAP | {"expert_model_parallel_size": 1},
    OVERLAP | {"delay_wgrad_compute": True, "ep_overlap_early_attn_memory_release": True},
    OVERLAP
    | {"delay_wgrad_compute": True, "cuda_graph_impl": "transformer_engine", "te_version": "2.9.0"}
    | {"cuda_graph_modules": ["attn"]},
    OVERLAP | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
    OVERLAP | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]},
    OVERLAP | {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 0},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": -1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0},
    {"recompute_granularity": "full", "recompute_method": None, "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": None},
    {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "mtp_num_layers": 1,
    },
    {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "distribute_saved_activations": True,
    },
    {"moe_layer_recompute": True, "recompute_num_layers": 2},
    EXPERTS | MOE_RECOMPUTE | {"recompute_modules": ["shared_experts", "moe_act"]},
    EXPERTS
    | MOE_RECOMPUTE
    | {
        "recompute_modules": ["shared_experts"],
        "moe_shared_expert_intermediate_size": 2048,
        "moe_shared_expert_overlap": True,
    },
    {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
        "fp8": "e4m3",
        "fp8_recipe": "tensorwise",
        "te_version": "2.5.0",
    },
    {
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
        "multi_latent_attention": True,
    },
    FINE_GRAINED | {"offload_modules": None},
    FINE_GRAINED | {"cpu_offloading": True, "cpu_offloading_num_layers": 0},
    FINE_GRAINED | {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    FINE_GRAINED
    | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    | {"cuda_graph_warmup_steps": 0},
    {"cpu_offloading": True, "cpu_offloading_num_layers": 1, "cpu_offloading_activations": False},
    {"cpu_offloading_activations": False, "te_version": "2.5.0"},
    {"cpu_offloading": True, "te_version": "none"},
    {"optimizer_cpu_offload": True, "decoupled_weight_decay": False},
    PRECISION_AWARE | {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "bf16"},
    PRECISION_AWARE | {"te_version": "none"},
    PRECISION_AWARE | {"te_version": "none", "optimizer_cpu_offload": True},
    PRECISION_AWARE | {"te_version": "2.0.0"},
    PRECISION_AWARE | {"optimizer": "sgd"},
    {"use_distributed_optimizer": False, "overlap_param_gather": True},
    EXPERTS | {"fp8": "e4m3", "fp8_recipe": "delayed", "te_version": "1.6.0"},
    EXPERTS | {"fp8": "hybrid", "fp8_recipe": "delayed", "te_version": "1.8.0"},
    EXPERTS | {"fp8": "hybrid", "fp8_recipe": "mxfp8", "te_version": "none"},
    EXPERTS | {"add_bias_linear": True, "expert_tensor_parallel_size": 1},
    EXPERTS | {"add_bias_linear": True, "expert_tensor_parallel_size": 2},
    EXPERTS | {"add_bias_linear": True, "bias_dropout_fusion": True},
    EXPERTS | {"tensor_model_parallel_size": 2, "sequence_parallel": False},
    EXPERTS | {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
    EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    EXPERTS | {"moe_router_num_groups": 2, "moe_router_group_topk": 4},
    EXPERTS | {"moe_router_topk_limited_devices": 2, "expert_model_parallel_size": 4},
    EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    EXPERTS | {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    EXPERTS | {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    EXPERTS | {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
    EXPERTS | {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"},
    EXPERTS
    | {"moe_expert_capacity_factor": -1.0, "moe_router_load_balancing_type": ["sinkhorn"]}
    | {"moe_aux_loss_coeff": [0.1]},
    EXPERTS
    | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
    | {"moe_aux_loss_coeff": [0.1, 0.1], "moe_expert_capacity_factor": 1.0},
    EXPERTS | {"moe_router_padding_for_quantization": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    FLEX
    | {"moe_flex_dispatcher_backend": "deepep", "moe_pad_expert_input_to_capacity": True}
    | {"moe_expert_capacity_factor": 1.0},
    FLEX | {"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "hybridep"},
    FLEX | {"moe_enable_deepep": True},
    FLEX | {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
    FLEX | {"gpu": "gb200", "moe_flex_dispatcher_backend": "deepep"},
    EXPERTS | {"moe_token_dispatcher_type": "alltoall_seq"},
    EXPERTS | {"num_moe_experts": 6, "expert_model_parallel_size": 4},
    EXPERTS | {"num_moe_experts": 33, "moe_router_dtype": "fp32"},
    EXPERTS | {"moe_layer_freq": [1, 0], "num_layers": 2, "ffn_hidden_size": 8191},
    {"moe_router_group_topk": 2, "moe_router_num_groups": 2},
    {"num_moe_experts": None, "moe_ffn_hidden_size": 2048, "moe_layer_freq": [0, 1]},
    {"first_last_layers_bf16": True, "fp8": "e4m3", "fp8_recipe": "tensorwise"}
    | {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2},
    {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0}
    | {"num_layers_at_end_in_bf16": 0, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    {"fp4": "e2m1", "fp8": "e4m3"},
    {"fp4": "e2m1", "fp4_recipe": "custom"},
    {"fp8": "e4m3", "fp8_recipe": "custom"},
    {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
    | {"reuse_grad_buf_for_mxfp8_param_ag": True},
    {"fp32_residual_connection": True, "pipeline_dtype": "bf16"},
    {"activation_func_fp8_input_store": True, "activation_func": "silu"},
    {"activation_func_fp8_input_store": True, "activation_func": "gelu"},
    {"bias_activation_fusion": True, "activation_func": "gelu", "gated_linear_unit": False},
    {"bias_activation_fusion": True, "activation_func": "gelu", "add_bias_linear": True}
    | {"gated_linear_unit": False},
    {"bias_activation_fusion": True, "activation_func": "quick_gelu", "glu_linear_offset": 1.0},
    {"bias_activation_fusion": True, "activation_func": "quick_gelu", "gated_linear_unit": False},
    {"use_te_activation_func": True, "bias_activation_fusion": False},
    {"use_te_activation_func": True, "bias_activation_fusion": False, "activation_func": "relu"},
    {
        "use_te_activation_func": True,
        "bias_activation_fusion": False,
        "activation_func": "squared_relu",
    },
    {"multi_latent_attention": True, "apply_rope_fusion": True},
    {"multi_latent_attention": True, "rope_type": "rope", "apply_rope_fusion": True},
    {"multi_latent_attention": True, "rotary_interleaved": True},
    {"apply_rope_fusion": True, "rotary_interleaved": True, "te_version": "2.0.0"},
    {"apply_rope_fusion": True, "rotary_interleaved": True},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]}
    | {"cp_comm_type": "a2a+p2p"},
    {"context_parallel_size": 2, "cp_comm_type": ["p2p", "p2p"], "num_layers": 2},
    {"context_parallel_size": 2, "cp_comm_type": ["p2p"], "num_layers": 2},
    {"no_rope_freq": [1, 0], "num_layers": 2},
    {"no_rope_freq": [1, 0, 1], "num_layers": 2},
    {"pipeline_model_parallel_size": 0},
    {"pipeline_model_parallel_size": -2},
    {"account_for_embedding_in_pipeline_split": True, "num_layers": 3}
    | {"account_for_loss_in_pipeline_split": True, "pipeline_model_parallel_size": 5}
    | {"pipeline_dtype": "bf16"},
    {"account_for_embedding_in_pipeline_split": True, "num_layers": -1},
    {"account_for_loss_in_pipeline_split": True, "num_layers": -1},
    {"num_layers": 24, "pipeline_model_parallel_size": 4, "pipeline_dtype": "bf16"}
    | {"num_layers_in_first_pipeline_stage": 26, "num_layers_in_last_pipeline_stage": 2},
    {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3},
    {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": True},
    {"order": "tp-cp-ep-pp-dp", "context_parallel_size": 2},
    {"batch_invariant_mode": True, "attention_backend": "flash"},
    {"transformer_impl": "inference_optimized", "normalization": "RMSNorm"},
    GATED_DELTA_NET,
    GATED_DELTA_NET | {"linear_num_key_heads": 3},
    GATED_DELTA_NET | {"linear_num_value_heads": 24},
    GATED_DELTA_NET | {"context_parallel_size": 2},
    GATED_DELTA_NET | {"linear_key_head_dim": None},
    GATED_DELTA_NET | {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
    {"experimental_attention_variant": "dsa", "context_parallel_size": 2},
    {"experimental_attention_variant": "dsa", "apply_rope_fusion": False},
    {
        "experimental_attention_variant": "dsa",
        "context_parallel_size": 2,
        "cp_comm_type": "allgather",
    },
]

#: Fields that appear with 0.17 or later; before, the whole candidate is refused.
NEWER: list[Bundle] = [
    {"fused_residual_rmsnorm": True, "normalization": "LayerNorm"},
    {"fused_residual_rmsnorm": True, "normalization": "RMSNorm"},
    {
        "param_name_patterns_for_fp32_local_accumulation": ["word_embeddings"],
        "grad_reduce_in_fp32": True,
    },
    {
        "param_name_patterns_for_fp32_local_accumulation": ["word_embeddings"],
        "grad_reduce_in_fp32": False,
    },
    {"cuda_graph_impl": "full_iteration", "recompute_granularity": "full"}
    | {"recompute_method": "uniform", "recompute_num_layers": 1},
    {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    {"cuda_graph_impl": "none", "cuda_graph_scope": ["full_iteration"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration_inference"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
    | {"inference_cuda_graph_scope": "block"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration_inference"]}
    | {"inference_cuda_graph_scope": "layer"},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["full_iteration"]},
    FINE_GRAINED | {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 3},
    FINE_GRAINED
    | {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 3}
    | {"fine_grained_offloading_max_inflight_offloads": 1},
    FINE_GRAINED | MOE_GRAPH | {"cuda_graph_warmup_steps": 3, "cuda_graph_modules": ["attn"]},
    FINE_GRAINED | MOE_GRAPH | {"cuda_graph_warmup_steps": 3},
    FINE_GRAINED
    | EXPERTS
    | {"offload_modules": ["expert_fc1"], "cuda_graph_impl": "local"}
    | {"cuda_graph_modules": ["attn"]},
    FINE_GRAINED
    | EXPERTS
    | {"offload_modules": ["moe_act"], "cuda_graph_impl": "local", "cuda_graph_modules": []},
    FINE_GRAINED | DROP_PADDING,
    FINE_GRAINED | {"delta_offload_bytes_across_pp_ranks": -1},
    FINE_GRAINED | {"activation_offload_fraction": 1.5},
    FINE_GRAINED | {"min_offloaded_tensor_size": -1},
    FINE_GRAINED
    | {"offload_modules": ["fused_group_mlp"], "use_transformer_engine_op_fuser": True},
    FINE_GRAINED | {"offload_modules": ["fused_group_mlp"]},
    FINE_GRAINED
    | {"offload_modules": ["fused_group_mlp", "moe_act"], "use_transformer_engine_op_fuser": True},
    FINE_GRAINED | EXPERTS | MOE_RECOMPUTE | {"offload_modules": ["expert_fc1"]},
    OP_FUSER_EXPERTS,
    OP_FUSER_EXPERTS | {"moe_flex_dispatcher_backend": "deepep"},
    OP_FUSER_EXPERTS | {"use_transformer_engine_op_fuser": False},
    OP_FUSER_EXPERTS | {"moe_flex_dispatcher_backend": "ncclep"},
    OP_FUSER_EXPERTS | {"moe_paged_stash": True},
    OP_FUSER_EXPERTS | {"moe_paged_stash": True, "cpu_offloading": True},
    OP_FUSER_EXPERTS | {"moe_paged_stash": True, "offload_modules": None},
    OP_FUSER_EXPERTS | {"moe_paged_stash": True, "offload_modules": ["moe_act"]},
    OP_FUSER_EXPERTS | FINE_GRAINED | {"moe_paged_stash": True},
    OVERLAP
    | FINE_GRAINED
    | {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}
    | {"offload_modules": ["expert_fc1"]},
    GROUPED_WEIGHT,
    GROUPED_WEIGHT | {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    GROUPED_WEIGHT | {"fp8": "e4m3", "fp8_recipe": "mxfp8", "te_version": "2.12.0"},
    GROUPED_WEIGHT | {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True},
    GROUPED_WEIGHT | {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    GROUPED_WEIGHT | {"fp8": "e4m3", "fp8_recipe": "delayed"},
    GROUPED_WEIGHT | {"moe_single_grouped_bias": True, "add_bias_linear": True},
    EXPERTS
    | {"moe_single_grouped_bias": True, "add_bias_linear": True}
    | {"expert_tensor_parallel_size": 1},
    EXPERTS | {"overlap_dispatch_backward_with_experts_wgrad": True},
    EXPERTS | {"overlap_dispatch_backward_with_experts_wgrad": True, "te_version": "2.0.0"},
    EXPERTS | {"overlap_dispatch_backward_with_experts_wgrad": True, "delay_wgrad_compute": True},
    OVERLAP | {"overlap_dispatch_backward_with_experts_wgrad": True},
    FLEX | {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16},
    FLEX | {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16, "moe_flex_dispatcher_num_sms": 8},
    FLEX | {"moe_deepep_num_sms": 20},
    FLEX
    | {"moe_flex_dispatcher_backend": "ncclep", "expert_model_parallel_size": 1}
    | {"expert_tensor_parallel_size": 1},
    {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True},
    {"tensor_parallel_num_weight_shards": 4, "tensor_model_parallel_size": 2},
    {"tensor_parallel_num_weight_shards": 2, "num_distributed_optimizer_instances": 2}
    | {"tensor_model_parallel_size": 1},
    EXPERTS
    | {
        "tensor_parallel_num_weight_shards": 2,
        "tensor_model_parallel_size": 1,
        "cuda_graph_impl": "local",
        "cuda_graph_modules": ["moe_router"],
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts"],
        "moe_shared_expert_intermediate_size": 2048,
    },
    {"num_buckets": 4, "bucket_size": 1000000},
    {"num_buckets": 4, "bucket_size": None},
    {"megatron_fsdp_max_pool_double_buffer": True, "fsdp_double_buffer": False},
]
