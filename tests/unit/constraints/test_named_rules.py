"""Rules that the recorded cases do not reach, each with the smallest candidate that breaks it."""

from __future__ import annotations

import pytest

from tuner.constraints import Capabilities, check, load_rules

BASE = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4096,
    "bf16": True,
    "params_dtype": "bf16",
    "pipeline_dtype": "bf16",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "env": {"NVTE_CPU_OFFLOAD_V1": "1"},
}
MOE = {
    "num_moe_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_pre_softmax": True,
}
OVERLAP = {**MOE, "overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
NO_CUDA = Capabilities(cuda=False)
NO_TE = Capabilities(transformer_engine="none")
LM, BRIDGE = "megatron-lm", "bridge"
GDN = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
INFERENCE = {"transformer_impl": "inference_optimized", "normalization": "RMSNorm"}

DEFAULT_ASK = ("0.16.1", "mcore", None)

# rule, changes to BASE, version, front end, capabilities
HYBRID = {"is_hybrid_model": True, "pipeline_model_parallel_size": 2}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = [
    ("Y01", {**HYBRID, "virtual_pipeline_model_parallel_size": 2}),
    ("Y02", {**HYBRID, "pipeline_model_parallel_layout": "Et*4|t*4L"}, "0.19.2"),
    ("Y03", {**HYBRID, **FULL}, "0.17.0"),
    ("E07", {"apply_rope_fusion": True, "rotary_interleaved": True, "te_version": "2.2"}),
    ("E07", {"apply_rope_fusion": True}, "0.16.1", "mcore", NO_TE),
    (
        "E07",
        {"multi_latent_attention": True, "apply_rope_fusion": True, "rope_type": "rope"},
    ),
    ("E07", {"fused_single_qkv_rope": True, "attention_output_gate": True}),
    ("E09", {**GDN, "linear_conv_kernel_dim": None}),
    ("E09", {**GDN, "linear_num_value_heads": 24}),
    ("E09", {**GDN, "context_parallel_size": 2}),
    ("E09", {**GDN, "tensor_model_parallel_size": 8, "context_parallel_size": 4}, "0.19.2"),
    ("E10", {"experimental_attention_variant": "dsa", "context_parallel_size": 2}),
    (
        "E10",
        {
            "experimental_attention_variant": "dsa",
            "context_parallel_size": 2,
            "cp_comm_type": "p2p",
        },
        "0.19.2",
    ),
    ("E11", {"batch_invariant_mode": True}),
    ("E11", {"batch_invariant_mode": True, "attention_backend": "flash"}, "0.19.2"),
    ("E11", {"flash_attention_version": 5}, "0.19.2"),
    (
        "G39",
        {
            "pipeline_model_parallel_size": 2,
            "cuda_graph_impl": "local",
            "deallocate_pipeline_outputs": True,
        },
    ),
    ("G39", {"pipeline_model_parallel_size": 2, "cuda_graph_impl": "local"}, "0.17.0", LM),
    ("K06", {"gpu": "A100-SXM-80GB", "fp8": "hybrid"}),
    ("K06", {"gpu": "h100", "fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ("B13", {"mixed_precision": "bf16_mixt"}, "0.16.1", BRIDGE),
    ("F20", {"mixed_precision": "bf16_with_nvfp4_mixed", "te_version": "2.5"}, "0.19.2", BRIDGE),
    (
        "B05",
        {
            "deterministic_mode": True,
            "attention_backend": "flash",
            "cross_entropy_loss_fusion": False,
            "env": {"NCCL_ALGO": "Ring"},
        },
        "0.16.1",
        BRIDGE,
    ),
    (
        "O20",
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
            "transformer_impl": "local",
        },
        "0.19.2",
        BRIDGE,
    ),
    (
        "O20",
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
            "transformer_impl": "local",
        },
        "0.19.2",
        LM,
    ),
    (
        "M48",
        {**MOE, "moe_token_dispatcher_type": "flex", "gpu": "gb200", "world_size": 2},
        "0.18.0",
        BRIDGE,
    ),
    (
        "D22",
        {"use_megatron_fsdp": True, "fsdp_manual_registration": True},
        "0.18.0",
        BRIDGE,
    ),
    ("D22", {"fsdp_manual_registration": True}, "0.16.1", LM),
    (
        "E03",
        {
            "pipeline_model_parallel_comm_backend": "ucc",
            "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        },
    ),
    ("P20", {"transformer_impl": "local", "context_parallel_size": 2}),
    ("K01", {"cuda_graph_impl": "local"}, "0.16.1", "mcore", NO_CUDA),
    ("K02", {"cpu_offloading": True}, "0.16.1", "mcore", NO_CUDA),
    ("K02", {"optimizer_cpu_offload": True}, "0.16.1", "mcore", NO_CUDA),
    (
        "K02",
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        "0.16.1",
        "mcore",
        NO_CUDA,
    ),
    ("K03", {"fp8": "hybrid"}, "0.16.1", "mcore", NO_CUDA),
    ("K04", {"fp8": "hybrid"}, "0.16.1", "mcore", NO_TE),
    (
        "K04",
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        "0.16.1",
        "mcore",
        NO_TE,
    ),
    ("K05", {"gradient_accumulation_fusion": True}, "0.16.1", "mcore", NO_CUDA),
    ("M29", OVERLAP, "0.16.1", "mcore", Capabilities(torch="2.5.1")),
    (
        "M32",
        {**OVERLAP, "delay_wgrad_compute": True, "moe_use_legacy_grouped_gemm": True},
    ),
    (
        "M33",
        {
            **OVERLAP,
            "delay_wgrad_compute": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_scope": ["attn"],
            "te_version": "2.9",
        },
    ),
    (
        "M49",
        {
            **OVERLAP,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "ncclep",
            "fine_grained_activation_offloading": True,
            "offload_modules": ["expert_fc1"],
        },
        "0.19.2",
    ),
    (
        "O12",
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
            "delta_offload_bytes_across_pp_ranks": -1,
        },
        "0.19.2",
    ),
    (
        "G26",
        {
            **MOE,
            "tensor_parallel_num_weight_shards": 2,
            "cuda_graph_impl": "local",
            "cuda_graph_modules": ["moe_router"],
            "fp8": "hybrid",
            "fp8_recipe": "tensorwise",
            "moe_shared_expert_intermediate_size": 1024,
            "recompute_granularity": "selective",
            "recompute_modules": ["shared_experts"],
        },
        "0.19.2",
    ),
    ("G33", {"cuda_graph_impl": "transformer_engine"}, "0.16.1", "mcore", NO_TE),
    ("E14", {"transformer_impl": "inference_optimized"}),
    ("E14", {**INFERENCE, **MOE}, "0.17.0"),
    ("E14", {"inference_fuse_tp_communication": True}),
    ("E14", {"inference_disable_triton_nvls_kernels": True}, "0.18.0"),
    ("E19", {"symmetric_ar_type": "one_shot"}, "0.16.1", "mcore", Capabilities(torch="2.6")),
    (
        "L21",
        {"pipeline_model_parallel_layout": [["embedding", "encoder", "loss"]]},
    ),
    (
        "L27",
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 4,
            "num_layers_in_last_pipeline_stage": 4,
        },
    ),
    ("E04", {**MOE, "moe_grouped_gemm": True, "gpu": "v100"}, "0.16.1", LM),
    ("F21", {"bf16": False, "fp32_residual_connection": True}, "0.16.1", LM),
    (
        "G37",
        {"fp8": "hybrid", "cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"},
        "0.18.0",
        LM,
    ),
    (
        "D23",
        {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor", "optimizer": "muon"},
        "0.18.0",
        LM,
    ),
    (
        "D24",
        {
            **MOE,
            "use_megatron_fsdp": True,
            "ckpt_format": "fsdp_dtensor",
            "moe_single_grouped_bias": True,
        },
        "0.19.2",
        LM,
    ),
    (
        "P27",
        {"tensor_parallel_num_weight_shards": 2, "average_in_collective": True},
        "0.19.2",
        LM,
    ),
    (
        "P27",
        {"tensor_parallel_num_weight_shards": 2, "num_distributed_optimizer_instances": 2},
        "0.19.2",
    ),
    *(
        (
            "F09",
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ["core_attn"],
                "te_version": "none",
            },
            "0.16.1",
            frontend,
        )
        for frontend in (BRIDGE, LM)
    ),
    ("B05", {"deterministic_mode": True, "cross_entropy_loss_fusion": True}, "0.18.0", LM),
    ("B05", {"deterministic_mode": True}, "0.16.1", LM),
    ("P29", {"hybrid_context_parallel": True}, "0.16.1", LM),
    ("E20", {"qk_clip": True, "te_version": "2.8"}, "0.16.1", LM),
    ("E20", {"moe_latent_size": 512}, "0.17.0", LM),
    ("V02", {"cuda_graph_impl": "local", "cuda_graph_scope": None}, "0.16.1", LM),
    ("M19", {**MOE, "moe_permute_fusion": True}, "0.16.1", "mcore", NO_TE),
    (
        "M42",
        {**MOE, "moe_grouped_gemm": True, "add_bias_linear": True, "bias_dropout_fusion": True},
    ),
    (
        "D02",
        {
            "grad_reduce_in_fp32": True,
            "param_name_patterns_for_fp32_local_accumulation": ["router"],
        },
        "0.18.0",
    ),
    (
        "N21",
        {
            "num_layers": 64,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 16,
        },
    ),
]


def case_name(case: tuple) -> str:
    return f"{case[0]}-{'-'.join(map(str, case[2:4]))}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_candidate_breaks_the_rule_and_the_base_does_not(case):
    rule, changes, *rest = case
    version, frontend, capabilities = [*rest, *DEFAULT_ASK[len(rest) :]]
    ask = {"mcore": version, "frontend": frontend, "capabilities": capabilities}
    assert rule in {v.rule for v in check({**BASE, **changes}, **ask).violations}
    assert rule not in {v.rule for v in check(BASE, **ask).violations}


def test_every_rule_says_what_it_is_about():
    for rule in load_rules():
        assert rule.what.endswith("."), rule.name
        assert rule.reference, rule.name
        assert rule.versions, rule.name


def test_every_error_rule_proposes_a_fix_or_describes_the_model():
    without = {rule.id for rule in load_rules() if rule.kind == "error" and not rule.fixes}
    assert without <= {"E09", "E10"}
