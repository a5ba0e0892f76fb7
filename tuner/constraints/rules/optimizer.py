"""Distributed data parallel, optimizer and their offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule

DDP_CONFIG = "distributed/distributed_data_parallel_config.py: __post_init__"
DDP = "distributed/distributed_data_parallel.py: DistributedDataParallel.__init__"
CONFIG = "optimizer/optimizer_config.py: OptimizerConfig.__post_init__"
BUILD = "optimizer/__init__.py: _get_megatron_optimizer_based_on_param_groups"
BUFFER = "distributed/param_and_grad_buffer.py: start_param_sync"
_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_PRECISION_AWARE_OFF: Mapping[str, object] = {
    "use_precision_aware_optimizer": False,
    **dict.fromkeys(_DTYPES, "fp32"),
}


@rule("F12", DDP_CONFIG, fix=[{"reuse_grad_buf_for_mxfp8_param_ag": False}])
def reused_gradient_buffer_needs_fp8_gather(c: Any) -> str | None:
    """reuse_grad_buf_for_mxfp8_param_ag without fp8_param_gather."""
    if c.reuse_grad_buf_for_mxfp8_param_ag and not c.fp8_param_gather:
        return "the gradient buffer can be reused only when fp8_param_gather is on"
    return None


@rule("D01", DDP_CONFIG, fix=[{"nccl_ub": False}])
def user_buffers_need_fixed_segments(c: Any) -> str | None:
    """nccl_ub with expandable allocator segments (from 0.18 only with torch before 2.11)."""
    settings = str(c.env.get("PYTORCH_CUDA_ALLOC_CONF", "")).split(",")
    if not c.nccl_ub or "expandable_segments:True" not in settings:
        return None
    if c.minor >= 18 and c.torch_version >= (2, 11):
        return None
    return "NCCL user buffers do not work with expandable allocator segments"


@rule(
    "D02",
    DDP_CONFIG,
    fix=[{"param_name_patterns_for_fp32_local_accumulation": []}],
    since="0.17.0",
)
def local_fp32_patterns_need_half_gradients(c: Any) -> str | None:
    """param_name_patterns_for_fp32_local_accumulation with grad_reduce_in_fp32."""
    if c.param_name_patterns_for_fp32_local_accumulation and c.grad_reduce_in_fp32:
        return "all gradients are in fp32 already, so no patterns may be named"
    return None


@rule("D03", DDP_CONFIG, fix=[{"num_buckets": None}], since="0.18.0")
def buckets_by_count_or_size(c: Any) -> str | None:
    """num_buckets with bucket_size, or not positive."""
    if c.num_buckets is None:
        return None
    if c.bucket_size is not None:
        return "set either num_buckets or bucket_size"
    if c.num_buckets <= 0:
        return f"num_buckets must be positive, got {c.num_buckets}"
    return None


@rewrite("D04", "fsdp_double_buffer", DDP_CONFIG, since="0.19.2")
def pooled_double_buffer_turns_double_buffer_on(c: Any) -> object:
    """megatron_fsdp_max_pool_double_buffer turns fsdp_double_buffer on."""
    return True if c.megatron_fsdp_max_pool_double_buffer else UNCHANGED


@rule("D06", CONFIG, fix=[_PRECISION_AWARE_OFF, {"optimizer": "adam"}])
def precision_aware_optimizer_is_adam(c: Any) -> str | None:
    """use_precision_aware_optimizer with an optimizer other than adam."""
    if c.use_precision_aware_optimizer and c.optimizer != "adam":
        return f"the precision-aware optimizer is Adam, not {c.optimizer}"
    return None


@rule("D06", CONFIG, fix=[{"use_distributed_optimizer": True}, _PRECISION_AWARE_OFF])
def precision_aware_optimizer_is_distributed(c: Any) -> str | None:
    """use_precision_aware_optimizer without use_distributed_optimizer."""
    if c.use_precision_aware_optimizer and not c.use_distributed_optimizer:
        return "the precision-aware optimizer needs the distributed optimizer"
    return None


@rule(
    "D07",
    CONFIG,
    fix=[lambda c: {n: "fp32" for n in _DTYPES if getattr(c, n) != "fp32"}],
)
def optimizer_states_are_fp32(c: Any) -> str | None:
    """An optimizer state that is not fp32 without the precision-aware optimizer."""
    if c.use_precision_aware_optimizer:
        return None
    states = (c.main_grads_dtype, c.main_params_dtype, c.exp_avg_dtype, c.exp_avg_sq_dtype)
    odd = [name for name, dtype in zip(_DTYPES, states, strict=True) if dtype != "fp32"]
    if odd:
        return f"{', '.join(odd)} can be other than fp32 only with the precision-aware optimizer"
    return None


@rule("D08", CONFIG, fix=[_PRECISION_AWARE_OFF])
def precision_aware_optimizer_needs_te(c: Any) -> str | None:
    """use_precision_aware_optimizer without Transformer Engine's FusedAdam (0.16 compares its
    version even when the optimizer is offloaded)."""
    if not c.use_precision_aware_optimizer:
        return None
    missing = c.te_missing or c.te == ()
    if not missing or (c.optimizer_cpu_offload and c.minor >= 17):
        return None
    return "the precision-aware optimizer is Transformer Engine's, which is not installed"


@derived
def shards_parameters(c: Any) -> bool:
    """Whether something gathers sharded parameters (Bridge 0.5 and later: FSDP turns it on)."""
    turned_on = c.frontend == "bridge" and c.minor >= 18 and c.use_megatron_fsdp
    return bool(c.use_distributed_optimizer or turned_on)


@rule(
    "D09",
    DDP,
    fix=[{"use_distributed_optimizer": True}, {"num_distributed_optimizer_instances": 1}],
)
def optimizer_instances_need_distributed_optimizer(c: Any) -> str | None:
    """Several optimizer instances without use_distributed_optimizer."""
    if c.num_distributed_optimizer_instances > 1 and not c.shards_parameters:
        return "several optimizer instances need the distributed optimizer"
    return None


@rule("D10", DDP, fix=[{"average_in_collective": False}])
def per_token_loss_is_not_averaged_in_collectives(c: Any) -> str | None:
    """calculate_per_token_loss with average_in_collective."""
    if c.calculate_per_token_loss and c.average_in_collective:
        return "a per-token loss cannot be averaged in the collective"
    return None


@rule("O25", BUILD, fix=[{"decoupled_weight_decay": True}, {"optimizer_cpu_offload": False}])
def offloaded_optimizer_decouples_decay(c: Any) -> str | None:
    """optimizer_cpu_offload without decoupled_weight_decay."""
    if c.optimizer_cpu_offload and not c.decoupled_weight_decay:
        return "the offloaded optimizer is AdamW: decoupled_weight_decay must be on"
    return None


@rule("C14", BUFFER, fix=[{"use_distributed_optimizer": True}, {"overlap_param_gather": False}])
def gather_overlap_needs_distributed_optimizer(c: Any) -> str | None:
    """overlap_param_gather without use_distributed_optimizer."""
    if c.overlap_param_gather and not c.shards_parameters:
        return "without the distributed optimizer there is no parameter gather to overlap"
    return None


_FP8_GATHER_OFF: Mapping[str, object] = {
    "fp8_param": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}


def _offloads_scaled_fp8(c: Any) -> bool:
    return bool(c.optimizer_cpu_offload and c.fp8_param_gather and c.fp8_recipe != "delayed")


def _holds_fp8_parameters(c: Any) -> bool:
    return bool(c.fp8 and c.fp8_param and c.use_distributed_optimizer)


@rule("O24", BUILD, fix=[{"optimizer_cpu_offload": False}, _FP8_GATHER_OFF])
def offloaded_optimizer_excludes_scaled_fp8(c: Any) -> str | None:
    """optimizer_cpu_offload of fp8 parameters with a recipe other than delayed: the command line
    of Megatron-LM refuses it, the others crash while the optimizer is built."""
    asked = _holds_fp8_parameters(c) and not c.mixed_precision
    if _offloads_scaled_fp8(c) and (c.frontend == "megatron-lm" or asked):
        return "the offloaded optimizer can hold fp8 parameters only with the delayed recipe"
    return None


@rule(
    "O24",
    BUILD,
    kind="advice",
    doomed=True,
    fix=[{"optimizer_cpu_offload": False}],
    frontends=("bridge",),
)
def offloaded_optimizer_with_fp8_recipe_crashes(c: Any) -> str | None:
    """optimizer_cpu_offload under a mixed_precision recipe that keeps fp8 parameters: every check
    of Megatron Bridge passes, the optimizer build has been reported to crash."""
    if c.mixed_precision and _offloads_scaled_fp8(c) and _holds_fp8_parameters(c):
        return "the recipe keeps fp8 parameters, which the offloaded optimizer cannot hold"
    return None


@rule("C17", CONFIG, fix=[{"overlap_param_gather_with_optimizer_step": False}], since="0.19.2")
def step_overlap_excludes_reused_buffer(c: Any) -> str | None:
    """overlap_param_gather_with_optimizer_step with reuse_grad_buf_for_mxfp8_param_ag."""
    if c.overlap_param_gather_with_optimizer_step and c.reuse_grad_buf_for_mxfp8_param_ag:
        return "a reused gradient buffer cannot be gathered during the optimizer step"
    return None


FSDP = "distributed/fsdp/mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__"


@rule(
    "D25",
    "distributed/fsdp/mcore_fsdp_adapter.py: _get_dp_tp_mesh",
    kind="advice",
    doomed=True,
    fix=[{"pipeline_model_parallel_size": 1}, {"use_megatron_fsdp": False}],
)
def fsdp_excludes_pipelines(c: Any) -> str | None:
    """Megatron FSDP with more than one pipeline stage."""
    if c.use_megatron_fsdp and c.pipeline_model_parallel_size > 1:
        return (
            "the FSDP wrapper lays all ranks out without a pipeline, and fails when built with one"
        )
    return None


@rule(
    "D19",
    FSDP,
    kind="advice",
    doomed=True,
    fix=[{"gradient_accumulation_fusion": False}],
    since="0.17.0",
)
def fsdp_accumulation_fusion_needs_te(c: Any) -> str | None:
    """Megatron FSDP with gradient_accumulation_fusion and Transformer Engine before 2.10."""
    if c.use_megatron_fsdp and c.gradient_accumulation_fusion and c.te < (2, 10):
        return (
            "the FSDP wrapper asserts when built: fused accumulation needs Transformer Engine 2.10"
        )
    return None


@rule(
    "D19",
    FSDP,
    kind="advice",
    doomed=True,
    fix=[{"cuda_graph_impl": "none"}, {"overlap_moe_expert_parallel_comm": False}],
    since="0.18.0",
)
def fsdp_expert_overlap_excludes_layer_graphs(c: Any) -> str | None:
    """Megatron FSDP with expert overlap and double buffers or graphs of layers."""
    if not c.use_megatron_fsdp or not c.overlap_moe_expert_parallel_comm:
        return None
    if c.fsdp_double_buffer or c.megatron_fsdp_max_pool_double_buffer:
        return "the FSDP wrapper asserts when built: expert overlap excludes double buffers"
    if c.effective_cuda_graph_impl not in ("none", "full_iteration"):
        return "the FSDP wrapper asserts when built: expert overlap excludes graphs of layers"
    return None
