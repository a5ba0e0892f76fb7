"""Conditions that only a running job meets and that no package function can be called for here.

Each function names the upstream function that raises; the text is the upstream one.
"""

from __future__ import annotations

from constraint_oracle import stubs
from constraint_oracle.candidate import Candidate


def runtime_modelled(candidate: Candidate) -> None:
    """Conditions met only by a running job; each quotes the function that raises."""
    for check in (
        _token_prediction,
        _dispatcher,
        _graph_memory,
        _te_cpu_offload,
        _optimizer_offload,
        _data_parallel,
    ):
        check(candidate)


def _token_prediction(candidate: Candidate) -> None:
    """MultiTokenPredictionLayer._checkpointed_forward."""
    model = candidate.model
    uniform = model.recompute_granularity == "full" and model.recompute_method == "uniform"
    if model.mtp_num_layers and uniform and model.recompute_num_layers != 1:
        raise AssertionError("recompute_num_layers must be 1 for MTP recompute")


def _dispatcher(candidate: Candidate) -> None:
    """MoELayer.__init__ and the managers of MoEFlexTokenDispatcher."""
    from megatron.core.transformer.moe import token_dispatcher

    model = candidate.model
    if model.num_moe_experts is None:
        return
    kind = model.moe_token_dispatcher_type
    if kind not in ("allgather", "alltoall", "flex"):
        raise ValueError(f"Unsupported token dispatcher type: {kind}")
    backend = getattr(model, "moe_flex_dispatcher_backend", "deepep")
    ranks = model.expert_tensor_parallel_size * model.expert_model_parallel_size
    needing_ranks = ["deepep"]
    if hasattr(token_dispatcher, "_NCCLEPManager"):
        needing_ranks.append("ncclep")
    if kind == "flex" and backend in needing_ranks and ranks <= 1:
        raise AssertionError("DeepEP dispatcher requires TPxEP > 1")


def _graph_memory(candidate: Candidate) -> None:
    """CudaGraphManager.__init__ and TECudaGraphHelper.__init__."""
    implementation = candidate.model.cuda_graph_impl
    capability = stubs.CAPABILITY[candidate.get("gpu", stubs.DEFAULT_GPU)]
    graphed = implementation == "transformer_engine" or (
        implementation == "local" and capability[0] < 10
    )
    segments = "expandable_segments:True" in candidate.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if graphed and segments and candidate.env.get("NCCL_GRAPH_REGISTER") != "0":
        raise AssertionError(
            "Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access when using CUDA Graph "
            "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )


def _te_cpu_offload(candidate: Candidate) -> None:
    """get_cpu_offload_context of Transformer Engine, called when a TransformerBlock is built."""
    from packaging.version import Version

    model = candidate.model
    version = candidate.get("te_version", stubs.DEFAULT_TE_VERSION)
    if version == stubs.NO_TE:
        if model.cpu_offloading:
            raise AssertionError("CPU Offloading is enabled when TE is not present")
        return
    old_path = Version(version) < Version("2.10") or candidate.env.get("NVTE_CPU_OFFLOAD_V1") == "1"
    nothing = not (model.cpu_offloading_activations or model.cpu_offloading_weights)
    if nothing and (model.cpu_offloading or old_path):
        raise ValueError(
            "CPU Offloading is enabled while it is not mentioned what to offload "
            "(weights/activations)"
        )


def _optimizer_offload(candidate: Candidate) -> None:
    """get_megatron_optimizer."""
    decoupled = candidate.config.get("decoupled_weight_decay", True)
    if candidate.optimizer.optimizer_cpu_offload and decoupled is False:
        raise AssertionError(
            "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode)."
        )


def _data_parallel(candidate: Candidate) -> None:
    """DistributedDataParallel.__init__ and the first parameter synchronisation."""
    ddp, model = candidate.ddp, candidate.model
    instances = candidate.get("num_distributed_optimizer_instances", 1)
    if instances > 1 and not ddp.use_distributed_optimizer:
        raise AssertionError("Partial DistOpt cannot be used without DistOpt")
    if model.calculate_per_token_loss and ddp.average_in_collective:
        raise AssertionError("Cannot average in collective when calculating per-token loss!")
    if ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
        raise AssertionError("overlap_param_gather without use_distributed_optimizer (bare assert)")
