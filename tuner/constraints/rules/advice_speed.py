"""Advice on layout, communication and numerics."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC
from tuner.constraints.rules.advice_memory import MEMORY

GRAPHS = "transformer/cuda_graphs.py: CudaGraphManager.__init__"


@rule("N20", MEMORY, kind="advice")
def more_tensor_parallel_is_no_memory_fix(c: Any) -> str | None:
    """Eight or more tensor-parallel ranks on a dense model."""
    if c.tensor_model_parallel_size < 8 or c.builds_experts:
        return None
    return (
        "doubling tensor parallelism to 8 to save memory cost 28 % of speed on Llama-3 70B "
        "(709.9 to 508.7 TFLOP/s/GPU); try pipeline parallelism first"
    )


@rule("N21", MEMORY, kind="advice")
def virtual_pipeline_is_no_memory_fix(c: Any) -> str | None:
    """Eight or more virtual pipeline stages per rank."""
    if (c.effective_virtual_pipeline_size or 1) < 8:
        return None
    return (
        "virtual stages shorten bubbles, they do not save memory: 10 instead of 5 raised the peak "
        "from 58.8 to 60.2 GB on Llama-3 70B"
    )


@rule(
    "N22",
    "Megatron-LM, docs/user-guide/features/megatron_fsdp.md",
    kind="advice",
    fix=[{"nccl_ub": False}],
)
def user_buffers_conflict_with_expandable_segments(c: Any) -> str | None:
    """nccl_ub with expandable segments where the package lets it through."""
    if c.nccl_ub and c.expandable_segments:
        return "NCCL user buffers are not meant to be used with expandable segments"
    return None


@rule("M20", TC, kind="advice", fix=[{"moe_router_dtype": "fp32"}])
def many_experts_route_in_fp32(c: Any) -> str | None:
    """32 or more experts without moe_router_dtype."""
    if (c.num_moe_experts or 0) >= 32 and not c.moe_router_dtype:
        return "with 32 or more experts route in fp32 (moe_router_dtype) for stable training"
    return None


@rule(
    "F13",
    "optimizer/optimizer_config.py: OptimizerConfig.__post_init__",
    kind="advice",
    fix=[{"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}],
)
def mxfp8_keeps_a_second_copy(c: Any) -> str | None:
    """mxfp8 without reuse_grad_buf_for_mxfp8_param_ag."""
    if c.fp8 and c.fp8_recipe == "mxfp8" and not c.reuse_grad_buf_for_mxfp8_param_ag:
        return "mxfp8 without reuse_grad_buf_for_mxfp8_param_ag takes much more memory"
    return None


@rule(
    "L25",
    "transformer/transformer_layer.py: get_transformer_layer_offset",
    kind="advice",
    fix=[{"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}],
)
def one_uneven_end_shifts_layer_numbers(c: Any) -> str | None:
    """Virtual stages with only one of the two end-stage layer counts."""
    ends = (c.num_layers_in_first_pipeline_stage, c.num_layers_in_last_pipeline_stage)
    one = (ends[0] is None) != (ends[1] is None)
    if one and c.pipeline_model_parallel_layout is None and c.interleaved:
        return (
            "with virtual stages and one uneven end, layer numbers (checkpoint names, per-layer "
            "patterns) have been computed wrongly; set both ends or use a layout"
        )
    return None


@rule("G38", TC, kind="advice", doomed=True, fix=[{"cuda_graph_impl": "none"}])
def expert_overlap_with_whole_layer_graph(c: Any) -> str | None:
    """Expert overlap with transformer_engine graphs of whole layers."""
    whole = c.effective_cuda_graph_impl == "transformer_engine" and not c.effective_graph_modules
    if c.overlap_moe_expert_parallel_comm and whole:
        return "a whole-layer graph captures the experts too, and the layer asserts at replay"
    return None


@rule("G29", GRAPHS, kind="advice", fix=[{"use_te_rng_tracker": True}], frontends=("mcore",))
def local_graphs_need_graph_safe_random_numbers(c: Any) -> str | None:
    """Local graphs without a random-number tracker that graphs can replay."""
    if c.effective_cuda_graph_impl == "local" and not c.use_te_rng_tracker:
        return "seed with the Transformer Engine tracker, or the graph manager refuses to start"
    return None


@rule(
    "G39",
    "pipeline_parallel/schedules.py: deallocate_output_tensor",
    kind="advice",
    doomed=True,
    fix=[{"cuda_graph_impl": "transformer_engine"}, {"deallocate_pipeline_outputs": False}],
)
def local_graphs_hand_views_to_the_pipeline(c: Any) -> str | None:
    """Local graphs of layers in a pipeline whose stage outputs are freed once sent."""
    freed = c.deallocate_pipeline_outputs or c.frontend == "megatron-lm"
    layers = c.effective_cuda_graph_impl == "local" and not c.full_iteration
    if layers and freed and c.pipeline_model_parallel_size > 1:
        return (
            "while local graphs are recorded, the output of a stage is a view, which "
            "deallocate_pipeline_outputs refuses to free: the first step asserts"
        )
    return None


@rule(
    "G40",
    "megatron/core/transformer/moe/README.md, CUDA Graph",
    kind="advice",
    doomed=True,
    fix=[{"cuda_graph_impl": "none"}],
)
def whole_graph_needs_fixed_expert_shapes(c: Any) -> str | None:
    """A full-iteration graph over experts that take as many tokens as come."""
    if not c.full_iteration or (c.num_moe_experts or 0) <= 1:
        return None
    if c.drops_and_pads or c.moe_paged_stash:
        return None
    return (
        "experts that take as many tokens as come have no fixed shapes to capture: give a capacity "
        "factor and padding to it, from 0.18 the paged stash, or capture attention alone"
    )


@rule(
    "C18",
    "model_parallel_config.py: ModelParallelConfig.__post_init__",
    kind="advice",
    since="0.19.2",
    frontends=("mcore", "bridge"),
    fix=[{"cross_entropy_fusion_impl": "native"}],
)
def te_loss_fusion_is_unstable(c: Any) -> str | None:
    """cross_entropy_loss_fusion with Transformer Engine's implementation."""
    if c.cross_entropy_loss_fusion and c.cross_entropy_fusion_impl == "te":
        return "Transformer Engine's fused cross entropy is known to be unstable"
    return None


@rule(
    "E02",
    "megatron/training/arguments.py: validate_args",
    kind="advice",
    frontends=("megatron-lm",),
)
def connection_limits_conflict(c: Any) -> str | None:
    """Tensor or context parallelism before Blackwell with expert overlap or FSDP."""
    split = c.tensor_model_parallel_size > 1 or c.context_parallel_size > 1
    others = c.overlap_moe_expert_parallel_comm or c.use_megatron_fsdp or c.use_torch_fsdp2
    if split and others and c.compute_capability < 10:
        return (
            "tensor and context parallelism want CUDA_DEVICE_MAX_CONNECTIONS=1, expert overlap and "
            "FSDP want more: measure both"
        )
    return None


@rule("P24", "num_microbatches_calculator.py", kind="advice")
def batch_is_rounded_down(c: Any) -> str | None:
    """decrease_batch_size_if_needed with a global batch that does not divide."""
    if not c.decrease_batch_size_if_needed or not c.num_microbatches:
        return None
    running = c.num_microbatches * c.micro_batch_size * c.batch_ranks
    if running != c.global_batch_size:
        return f"the running global batch is {running}, not {c.global_batch_size}"
    return None
