"""Megatron-LM: checks of the command line on layout, batch, recompute and graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import rule
from tuner.constraints.rules.megatron_lm_rewrites import VALIDATE

_LM = ("megatron-lm",)


@rule(
    "A02",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[lambda c: {"kv_channels": c.hidden_size // c.num_attention_heads}],
)
def head_size_is_whole(c: Any) -> str | None:
    """hidden_size is no multiple of num_attention_heads and kv_channels is not set."""
    if c.kv_channels is None and c.hidden_size % c.num_attention_heads:
        return f"hidden size {c.hidden_size} is no multiple of {c.num_attention_heads} heads"
    return None


@rule(
    "L22",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[
        {"virtual_pipeline_model_parallel_size": None},
        {"pipeline_model_parallel_layout": None},
    ],
)
def layout_excludes_virtual_size(c: Any) -> str | None:
    """A layout together with a virtual pipeline size, even one that agrees."""
    vpp = c.virtual_pipeline_model_parallel_size
    if c.pipeline_model_parallel_layout is not None and vpp is not None:
        return "the command line takes a layout or a number of virtual stages, not both"
    return None


@rule(
    "L23",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"overlap_p2p_comm": True}, {"virtual_pipeline_model_parallel_size": None}],
)
def two_stage_interleaving_needs_overlap(c: Any) -> str | None:
    """Virtual stages with at most two pipeline stages and no overlap_p2p_comm."""
    least = 1 if c.overlap_p2p_comm else 2
    if c.argument_virtual_size is not None and c.pipeline_model_parallel_size <= least:
        return f"virtual stages need more than {least} pipeline stages here"
    return None


@rule("P08", VALIDATE, frontends=_LM, layer="given", fix=[{"expert_model_parallel_size": 1}])
def expert_parallel_needs_divisible_experts(c: Any) -> str | None:
    """Expert parallelism without experts, or experts it does not divide."""
    ranks, experts = c.expert_model_parallel_size, c.num_moe_experts
    if ranks > 1 and (not experts or experts % ranks):
        return f"{experts or 0} experts cannot be split over {ranks} expert-parallel ranks"
    return None


@rule("P16", VALIDATE, frontends=_LM, layer="given", fix=[{"cp_comm_type": "p2p"}])
def hierarchical_communication_needs_sizes(c: Any) -> str | None:
    """cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes (P17)."""
    kinds = c.cp_comm_type
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    if "a2a+p2p" in kinds and c.hierarchical_context_parallel_sizes is None:
        return "cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes"
    return None


@rule("P19", VALIDATE, frontends=_LM, layer="given", fix=[{"context_parallel_size": 1}])
def sequence_divides_into_context_chunks(c: Any) -> str | None:
    """With context parallelism seq_length is no multiple of twice its size."""
    size, length = c.context_parallel_size, c.seq_length
    if size > 1 and length is not None and length % (2 * size):
        return f"sequence length {length} must be a multiple of 2 x {size} context ranks"
    return None


@rule(
    "P22",
    VALIDATE,
    since="0.18.0",
    frontends=_LM,
    fix=[{"decrease_batch_size_if_needed": False}],
)
def evaluation_batch_divides_over_data_ranks(c: Any) -> str | None:
    """The evaluation batch (by default the global batch) is no multiple of micro-batch x DP."""
    if None in (c.global_batch_size, c.micro_batch_size, c.data_parallel_size):
        return None
    if c.global_batch_size % (c.micro_batch_size * c.data_parallel_size):
        return (
            f"evaluation batch {c.global_batch_size} is no multiple of micro-batch "
            f"{c.micro_batch_size} x {c.data_parallel_size} data-parallel ranks"
        )
    return None


@rule("R06", VALIDATE, frontends=_LM, layer="given", fix=[{"recompute_method": None}])
def selective_recompute_has_no_method(c: Any) -> str | None:
    """Selective recompute with recompute_method (Megatron-Core ignores it)."""
    if c.recompute_granularity == "selective" and c.recompute_method is not None:
        return "the command line refuses recompute_method with selective recompute"
    return None


@rule(
    "R08",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"distribute_saved_activations": False}],
)
def distributed_activations_need_full_recompute(c: Any) -> str | None:
    """distribute_saved_activations without tensor parallelism, full recompute and a method."""
    if not c.distribute_saved_activations:
        return None
    full = c.recompute_granularity == "full" and c.recompute_method is not None
    if c.tensor_model_parallel_size <= 1 or not full:
        return "distributing saved activations needs tensor ranks and full recompute with a method"
    return None


@rule(
    "C10",
    VALIDATE,
    frontends=_LM,
    fix=[{"tp_comm_overlap": False}, {"sequence_parallel": True}],
)
def tensor_overlap_needs_sequence_parallel(c: Any) -> str | None:
    """tp_comm_overlap without sequence_parallel."""
    if c.tp_comm_overlap and not c.sequence_parallel:
        return "overlap of tensor-parallel communication needs sequence_parallel"
    return None


@rule(
    "E01",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[lambda c: {"env": {**c.env, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}],
)
def tensor_and_context_parallel_need_one_connection(c: Any) -> str | None:
    """Tensor or context parallelism before Blackwell with CUDA_DEVICE_MAX_CONNECTIONS not 1."""
    split = c.tensor_model_parallel_size > 1 or c.context_parallel_size > 1
    if not split or c.compute_capability >= 10:
        return None
    excused = c.use_torch_fsdp2 or c.use_megatron_fsdp or c.overlap_moe_expert_parallel_comm
    if not excused and str(c.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")) != "1":
        return "set CUDA_DEVICE_MAX_CONNECTIONS=1 so that communication is launched in order"
    return None


@rule("E04", VALIDATE, frontends=_LM, layer="given", fix=[{"moe_grouped_gemm": False}])
def grouped_gemm_needs_ampere(c: Any) -> str | None:
    """moe_grouped_gemm before compute capability 8."""
    if c.moe_grouped_gemm and c.compute_capability < 8:
        return "grouped gemm needs compute capability 8"
    return None


@rule(
    "E15",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"position_embedding_type": "rope"}, {"mtp_num_layers": None}],
)
def mtp_needs_rope(c: Any) -> str | None:
    """Multi-token prediction with a position embedding other than rope or none (the default is
    learned_absolute)."""
    if c.mtp_num_layers and c.position_embedding_type not in ("rope", "none"):
        return f"multi-token prediction does not work with {c.position_embedding_type} positions"
    return None


@rule("E15", VALIDATE, frontends=_LM, layer="given", fix=[{"num_query_groups": None}])
def mla_excludes_query_groups(c: Any) -> str | None:
    """Multi-latent attention with num_query_groups."""
    if c.multi_latent_attention and c.num_query_groups is not None:
        return "multi-latent attention has no query groups; leave num_query_groups out"
    return None


@rule("F20", VALIDATE, frontends=_LM, layer="given", fix=[{"fp4": None}])
def fp4_needs_te(c: Any) -> str | None:
    """fp4 with Transformer Engine before 2.7."""
    if c.fp4 and c.te < (2, 7):
        return "fp4 needs Transformer Engine 2.7"
    return None


@rule("F21", VALIDATE, frontends=_LM, layer="given", fix=[{"fp32_residual_connection": False}])
def fp32_residual_needs_half_precision(c: Any) -> str | None:
    """fp32_residual_connection in fp32 training."""
    if c.fp32_residual_connection and not (c.fp16 or c.bf16):
        return "an fp32 residual connection is for bf16 or fp16 training"
    return None


@rule("G31", VALIDATE, frontends=_LM, fix=[{"check_for_nan_in_loss": False}])
def full_iteration_excludes_nan_check(c: Any) -> str | None:
    """A full-iteration graph with the NaN check (on by default, off with fp16)."""
    local = c.minor >= 18 or c.effective_cuda_graph_impl == "local"
    if c.full_iteration and local and c.check_for_nan_in_loss and not c.fp16:
        return "a full-iteration graph cannot check the loss for NaN; set check_for_nan_in_loss off"
    return None


_INFERENCE_GRAPH: Mapping[str, object] = {"cuda_graph_impl": "none"}


@rule("G37", VALIDATE, frontends=_LM, since="0.17.0", fix=[_INFERENCE_GRAPH])
def block_inference_graph_needs_inference_layers(c: Any) -> str | None:
    """A full-iteration inference graph in fp8 without inference-optimized layers and mxfp8."""
    if c.fp8 is None:
        return None
    if c.minor >= 18:
        block = c.effective_inference_scope == "block"
    else:
        named = "full_iteration_inference" in c.effective_graph_modules
        block = c.effective_cuda_graph_impl == "local" and named
    fits = c.transformer_impl == "inference_optimized" and c.fp8_recipe == "mxfp8"
    if block and not fits:
        return "a full-iteration inference graph in fp8 needs inference-optimized mxfp8 layers"
    return None


@rule(
    "G32",
    VALIDATE,
    until="0.17.0",
    frontends=_LM,
    fix=[
        lambda c: (
            {"moe_pad_experts_for_cuda_graph_inference": True}
            if c.minor >= 17
            else {"cuda_graph_impl": "none"}
        ),
        {"cuda_graph_impl": "none"},
    ],
)
def local_graphs_with_expert_parallel_pad_experts(c: Any) -> str | None:
    """Local graphs with expert parallelism without moe_pad_experts_for_cuda_graph_inference."""
    if c.effective_cuda_graph_impl != "local" or c.expert_model_parallel_size <= 1:
        return None
    if c.minor >= 17 and c.transformer_impl == "inference_optimized":
        return None
    if not c.moe_pad_experts_for_cuda_graph_inference:
        return "the command line wants moe_pad_experts_for_cuda_graph_inference here"
    return None


@rule(
    "O21",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[lambda c: {"env": {**c.env, "NVTE_CPU_OFFLOAD_V1": "1"}}],
)
def fine_offload_needs_first_offload_code(c: Any) -> str | None:
    """Fine-grained offload with Transformer Engine 2.10 and NVTE_CPU_OFFLOAD_V1 not 1."""
    if not c.fine_grained_activation_offloading or c.te < (2, 10):
        return None
    if str(c.env.get("NVTE_CPU_OFFLOAD_V1", "0")) != "1":
        return "set NVTE_CPU_OFFLOAD_V1=1, or Transformer Engine offloads weights too"
    return None


@rule(
    "O20",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"fine_grained_activation_offloading": False}],
)
def fine_offload_needs_te_layers(c: Any) -> str | None:
    """Fine-grained offload with layers that are not Transformer Engine's."""
    if c.fine_grained_activation_offloading and c.transformer_impl != "transformer_engine":
        return "fine-grained offload needs transformer_impl transformer_engine"
    return None


@rule(
    "C18",
    VALIDATE,
    since="0.19.2",
    frontends=_LM,
    layer="given",
    fix=[{"cross_entropy_fusion_impl": "native"}],
)
def te_loss_fusion_is_refused(c: Any) -> str | None:
    """cross_entropy_loss_fusion with Transformer Engine's implementation."""
    if c.cross_entropy_loss_fusion and c.cross_entropy_fusion_impl == "te":
        return "Transformer Engine's fused cross entropy is unstable and refused"
    return None


@rule("E16", VALIDATE, frontends=_LM, fix=[{"delay_wgrad_compute": False}])
def delayed_weight_gradient_is_supported(c: Any) -> str | None:
    """delay_wgrad_compute with other layers, an old Transformer Engine or (from 0.17) inside a
    graph without accumulation fusion or with attention bias."""
    if not c.delay_wgrad_compute:
        return None
    if c.transformer_impl != "transformer_engine":
        return "delaying weight gradients needs transformer_impl transformer_engine"
    if c.overlap_grad_reduce and c.te < (2, 8):
        return "delaying weight gradients with overlap_grad_reduce needs Transformer Engine 2.8"
    if not c.gradient_accumulation_fusion and c.te < (2, 7):
        return "delaying weight gradients without fusion needs Transformer Engine 2.7"
    if c.minor >= 17 and c.overlap_grad_reduce:
        return _graphed_gradient_problem(c)
    return None


def _graphed_gradient_problem(c: Any) -> str | None:
    modules = c.effective_graph_modules
    shared = c.moe_shared_expert_intermediate_size is not None and not c.moe_shared_expert_overlap
    if "attn" not in modules and not ("moe_router" in modules and shared):
        return None
    if c.te < (2, 12):
        return "delaying weight gradients inside a graph needs Transformer Engine 2.12"
    if not c.gradient_accumulation_fusion:
        return "delaying weight gradients inside a graph needs gradient_accumulation_fusion"
    if "attn" in modules and (c.add_bias_linear or c.add_qkv_bias):
        return "delaying weight gradients inside a graph excludes attention bias"
    return None


@rule(
    "B05",
    VALIDATE,
    until="0.18.0",
    frontends=_LM,
    layer="given",
    fix=[{"deterministic_mode": False}],
)
def deterministic_mode_is_consistent(c: Any) -> str | None:
    """deterministic_mode with cross_entropy_loss_fusion or without a fixed NCCL_ALGO."""
    if not c.deterministic_mode:
        return None
    if c.cross_entropy_loss_fusion:
        return "fused cross entropy is not deterministic"
    if c.env.get("NCCL_ALGO") not in ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"):
        return "deterministic mode needs a fixed NCCL_ALGO such as Ring"
    return None


@rule("P29", VALIDATE, frontends=_LM, layer="given", fix=[{"hybrid_context_parallel": False}])
def hybrid_context_parallel_stands_alone(c: Any) -> str | None:
    """hybrid_context_parallel with a pipeline, graphs or FSDP, or without per-token loss."""
    if not c.hybrid_context_parallel:
        return None
    if c.pipeline_model_parallel_size > 1 or c.use_megatron_fsdp:
        return "hybrid context parallelism works neither with a pipeline nor with FSDP"
    if not c.calculate_per_token_loss:
        return "hybrid context parallelism needs calculate_per_token_loss"
    return None


@rule(
    "E20",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"qk_clip": False, "log_max_attention_logit": False}],
)
def attention_clipping_is_supported(c: Any) -> str | None:
    """qk_clip or log_max_attention_logit with Transformer Engine before 2.9, or clipping values
    out of range."""
    if (c.qk_clip or c.log_max_attention_logit) and c.te < (2, 9):
        return "clipping or logging attention logits needs Transformer Engine 2.9"
    if c.qk_clip and not (0.0 < c.qk_clip_alpha < 1.0 and c.qk_clip_threshold > 0):
        return "qk_clip_alpha must lie between 0 and 1, and qk_clip_threshold above 0"
    return None


@rule("E20", VALIDATE, frontends=_LM, layer="given", fix=[{"moe_latent_size": None}])
def latent_experts_need_experts(c: Any) -> str | None:
    """moe_latent_size that is not positive, or on a model without experts."""
    size = c.moe_latent_size
    if size is not None and (size <= 0 or not c.num_moe_experts):
        return "moe_latent_size must be positive and needs experts"
    return None
