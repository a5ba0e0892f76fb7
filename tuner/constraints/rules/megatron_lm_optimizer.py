"""Megatron-LM: checks of the command line on optimizer, FSDP and checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import rule
from tuner.constraints.rules.megatron_lm_rewrites import VALIDATE

_LM = ("megatron-lm",)
_NO_GATHER_OVERLAP: Mapping[str, object] = {"overlap_param_gather": False}
_NO_STEP_OVERLAP: Mapping[str, object] = {"overlap_param_gather_with_optimizer_step": False}
_NO_FSDP2: Mapping[str, object] = {"use_torch_fsdp2": False}


@rule(
    "C15",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"overlap_grad_reduce": True}, _NO_GATHER_OVERLAP],
)
def gather_overlap_needs_reduce_overlap(c: Any) -> str | None:
    """overlap_param_gather without overlap_grad_reduce."""
    if c.overlap_param_gather and not c.overlap_grad_reduce:
        return "overlap_param_gather needs overlap_grad_reduce"
    return None


@rule("C16", VALIDATE, frontends=_LM, layer="given", fix=[_NO_STEP_OVERLAP])
def step_overlap_needs_everything(c: Any) -> str | None:
    """overlap_param_gather_with_optimizer_step without distributed optimizer, gather overlap,
    virtual stages, or with a distributed checkpoint format (the default)."""
    if not c.overlap_param_gather_with_optimizer_step:
        return None
    if not c.use_distributed_optimizer or not c.overlap_param_gather:
        return "gathering during the optimizer step needs the distributed optimizer and overlap"
    if c.argument_virtual_size is None:
        return "gathering during the optimizer step needs virtual pipeline stages"
    if c.ckpt_format != "torch":
        return "gathering during the optimizer step needs ckpt_format torch"
    return None


@rule(
    "O23",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"use_precision_aware_optimizer": True}, {"optimizer_cpu_offload": False}],
)
def offloaded_optimizer_is_precision_aware(c: Any) -> str | None:
    """optimizer_cpu_offload without use_precision_aware_optimizer."""
    if c.optimizer_cpu_offload and not c.use_precision_aware_optimizer:
        return "the offloaded optimizer needs use_precision_aware_optimizer"
    return None


@rule(
    "F11",
    VALIDATE,
    frontends=_LM,
    layer="given",
    fix=[{"fp8_param_gather": False, "fp8_param": False}, {"use_distributed_optimizer": True}],
)
def fp8_gather_needs_sharded_parameters(c: Any) -> str | None:
    """fp8_param_gather without distributed optimizer or FSDP."""
    sharded = c.use_distributed_optimizer or c.use_torch_fsdp2 or c.use_megatron_fsdp
    if c.argument_fp8_gather and not sharded:
        return "gathering parameters in fp8 needs the distributed optimizer or FSDP"
    return None


@rule("D11", VALIDATE, frontends=_LM, layer="given", fix=[_NO_FSDP2])
def torch_fsdp_stands_alone(c: Any) -> str | None:
    """torch FSDP2 with pipeline or expert parallelism, the distributed optimizer, accumulation
    fusion, fp16, tied embeddings or another checkpoint format."""
    if not c.use_torch_fsdp2:
        return None
    if c.pipeline_model_parallel_size != 1 or c.expert_model_parallel_size != 1:
        return "torch FSDP2 works neither with pipeline nor with expert parallelism"
    if c.use_distributed_optimizer or c.gradient_accumulation_fusion:
        return "torch FSDP2 works neither with the distributed optimizer nor accumulation fusion"
    if c.ckpt_format not in ("torch_dist", "torch_dcp"):
        return "torch FSDP2 needs ckpt_format torch_dist or torch_dcp"
    if c.share_embeddings_and_output_weights or c.fp16:
        return "torch FSDP2 needs untied embeddings and no fp16"
    return None


def _without_connections(c: Any) -> Mapping[str, object]:
    env = {k: v for k, v in c.env.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    return {"env": env}


@rule("D12", VALIDATE, frontends=_LM, layer="given", fix=[_without_connections])
def fsdp_needs_more_connections(c: Any) -> str | None:
    """FSDP with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    sharded = c.use_megatron_fsdp or c.use_torch_fsdp2
    if sharded and str(c.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")) == "1":
        return "FSDP needs CUDA_DEVICE_MAX_CONNECTIONS above 1 or unset"
    return None


@rule("D13", VALIDATE, frontends=_LM, layer="given", fix=[{"ckpt_format": "fsdp_dtensor"}])
def fsdp_saves_its_own_format(c: Any) -> str | None:
    """Megatron FSDP with a checkpoint format other than fsdp_dtensor."""
    if c.use_megatron_fsdp and c.ckpt_format != "fsdp_dtensor":
        return "Megatron FSDP needs ckpt_format fsdp_dtensor"
    return None


@rule("D21", VALIDATE, frontends=_LM, layer="given", fix=[{"ckpt_format": "torch_dist"}])
def checkpoint_format_fits_sharding(c: Any) -> str | None:
    """ckpt_format fsdp_dtensor without Megatron FSDP, or torch_dcp without FSDP2 or with tensor
    or pipeline parallelism."""
    if c.ckpt_format == "fsdp_dtensor" and not c.use_megatron_fsdp:
        return "fsdp_dtensor checkpoints are those of Megatron FSDP"
    if c.ckpt_format != "torch_dcp":
        return None
    split = c.tensor_model_parallel_size > 1 or c.pipeline_model_parallel_size > 1
    if not c.use_torch_fsdp2 or split:
        return "torch_dcp checkpoints need torch FSDP2 without tensor or pipeline parallelism"
    return None


@rule("D22", VALIDATE, frontends=_LM, layer="given", fix=[{"fsdp_manual_registration": False}])
def fsdp_registration_needs_user_buffers(c: Any) -> str | None:
    """fsdp_manual_registration without Megatron FSDP and nccl_ub."""
    if c.fsdp_manual_registration and not (c.use_megatron_fsdp and c.nccl_ub):
        return "registering buffers by hand needs Megatron FSDP and nccl_ub"
    return None


@rule("D23", VALIDATE, since="0.18.0", frontends=_LM, layer="given", fix=[{"optimizer": "adam"}])
def fsdp_supports_common_optimizers(c: Any) -> str | None:
    """Megatron FSDP with an optimizer other than sgd or adam."""
    if c.use_megatron_fsdp and c.optimizer not in ("sgd", "adam"):
        return f"Megatron FSDP supports sgd and adam, not {c.optimizer}"
    return None


@rule(
    "D24",
    VALIDATE,
    since="0.19.2",
    frontends=_LM,
    layer="given",
    fix=[{"moe_single_grouped_weight": False, "moe_single_grouped_bias": False}],
)
def fsdp_excludes_single_grouped_parameters(c: Any) -> str | None:
    """Megatron FSDP with one parameter for all experts."""
    if c.use_megatron_fsdp and (c.moe_single_grouped_weight or c.moe_single_grouped_bias):
        return "Megatron FSDP cannot hold one parameter for all experts"
    return None


_NO_REMAT: Mapping[str, object] = {
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
}


@rule("P27", VALIDATE, since="0.19.2", frontends=_LM, fix=[_NO_REMAT])
def weight_shards_need_plain_settings(c: Any) -> str | None:
    """More weight shards than tensor ranks with collective averages, fp4 or mxfp8 without
    parameter gather, another checkpoint format, or graphs on Blackwell without node priority."""
    if c.weight_remat_size <= 1 and c.expert_weight_remat_size <= 1:
        return None
    if c.fp4 and not (c.fp4_param or c.fp4_param_gather):
        return "weight shards with fp4 need fp4_param_gather"
    priority = str(c.env.get("CUDA_GRAPHS_USE_NODE_PRIORITY", ""))
    if c.compute_capability >= 10 and c.effective_cuda_graph_impl != "none" and priority != "1":
        return "weight shards under graphs on Blackwell need CUDA_GRAPHS_USE_NODE_PRIORITY=1"
    if c.average_in_collective:
        return "weight shards exclude average_in_collective"
    if c.ckpt_format not in ("torch", "torch_dist"):
        return "weight shards need ckpt_format torch or torch_dist"
    reused = c.fp8_param_gather and c.reuse_grad_buf_for_mxfp8_param_ag
    if c.fp8_recipe == "mxfp8" and not reused:
        return "weight shards with mxfp8 need parameter gather in the gradient buffer"
    return None


@rule("V02", VALIDATE, until="0.17.0", frontends=_LM, layer="given", fix=[{"cuda_graph_scope": []}])
def local_graph_region_is_a_list(c: Any) -> str | None:
    """Local graphs with cuda_graph_scope null: the argument check itself crashes."""
    if c.migrated_graph_impl == "local" and c.cuda_graph_scope is None:
        return "cuda_graph_scope must be a list on the command line"
    return None


@rule("C14", VALIDATE, frontends=_LM, layer="given", fix=[_NO_GATHER_OVERLAP])
def gather_overlap_needs_sharded_parameters(c: Any) -> str | None:
    """overlap_param_gather without the distributed optimizer or Megatron FSDP."""
    if c.overlap_param_gather and not (c.use_distributed_optimizer or c.use_megatron_fsdp):
        return "overlap_param_gather needs the distributed optimizer or Megatron FSDP"
    return None
