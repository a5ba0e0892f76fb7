"""What the machine and its environment variables allow."""

from __future__ import annotations

import re
from typing import Any

from tuner.constraints.registry import derived, rule

GRAPHS = "transformer/cuda_graphs.py: CudaGraphManager, TECudaGraphHelper"
UNKNOWN_VERSION = (99,)
_CAPABILITY = {
    "v100": 7,
    "a100": 8,
    "l40s": 8,
    "h100": 9,
    "h200": 9,
    "b200": 10,
    "b300": 10,
    "gb200": 10,
    "gb300": 10,
}


def parse_version(text: str | None) -> tuple[int, ...]:
    """Numbers of a version; `none` is older than any, an unknown one newer than any."""
    if text is None:
        return UNKNOWN_VERSION
    if text.strip().lower() == "none":
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3]) or UNKNOWN_VERSION


@derived
def te(c: Any) -> tuple[int, ...]:
    """Version of Transformer Engine: () when it is missing, very new when it is not said."""
    return parse_version(c.te_version)


@derived
def machine_te(c: Any) -> tuple[int, ...]:
    """Version installed on this machine; very new when the machine is unknown."""
    return parse_version(c.capabilities.transformer_engine if c.capabilities is not None else None)


@derived
def te_missing(c: Any) -> bool:
    """True only when this machine is known to lack Transformer Engine."""
    return c.machine_te == ()


@derived
def compute_capability(c: Any) -> int:
    """Major compute capability of the GPU: of the run, else of the machine, else Hopper's."""
    if c.gpu is not None:
        return _CAPABILITY.get(str(c.gpu).lower().split("-")[0], 9)
    known = c.capabilities
    if known is not None and known.compute_capability is not None:
        return int(known.compute_capability[0])
    return 9


@derived
def torch_version(c: Any) -> tuple[int, ...]:
    """Version of torch, very new when it is not said."""
    return parse_version(c.capabilities.torch if c.capabilities is not None else None)


@derived
def expandable_segments(c: Any) -> bool:
    """Whether the CUDA allocator grows segments in place."""
    return "expandable_segments:True" in str(c.env.get("PYTORCH_CUDA_ALLOC_CONF", ""))


@rule(
    "G28",
    GRAPHS,
    fix=[lambda c: {"env": {**c.env, "NCCL_GRAPH_REGISTER": "0"}}],
)
def graphs_with_expandable_segments_unregister(c: Any) -> str | None:
    """local or transformer_engine graphs, expandable segments and NCCL_GRAPH_REGISTER not 0."""
    if not c.per_layer_graph:
        return None
    if c.effective_cuda_graph_impl == "local" and c.compute_capability >= 10:
        return None
    if c.expandable_segments and str(c.env.get("NCCL_GRAPH_REGISTER", "")) != "0":
        return (
            "CUDA graphs with expandable allocator segments need NCCL_GRAPH_REGISTER=0, or NCCL "
            "reads memory that has moved"
        )
    return None


@rule(
    "E03",
    "parallel_state.py: initialize_model_parallel",
    fix=[{"pipeline_model_parallel_comm_backend": "nccl"}],
)
def ucc_needs_more_connections(c: Any) -> str | None:
    """UCC pipeline groups with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    if c.pipeline_model_parallel_comm_backend != "ucc":
        return None
    if str(c.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "")) == "1":
        return "UCC pipeline communication hangs with CUDA_DEVICE_MAX_CONNECTIONS=1"
    return None


@rule(
    "P20",
    "transformer/dot_product_attention.py: DotProductAttention.__init__",
    fix=[{"context_parallel_size": 1}, {"transformer_impl": "transformer_engine"}],
    frontends=("mcore", "megatron-lm"),
)
def local_attention_excludes_context_parallel(c: Any) -> str | None:
    """Context parallelism with local (not Transformer Engine) attention; Megatron Bridge builds
    Transformer Engine layers whatever transformer_impl says."""
    if c.transformer_impl == "local" and c.context_parallel_size > 1:
        return "context parallelism needs the attention of Transformer Engine"
    return None


def _no_cuda(c: Any) -> bool:
    return c.capabilities is not None and c.capabilities.cuda is False


@rule("K01", "capability of the machine", fix={"cuda_graph_impl": "none"})
def graphs_need_cuda(c: Any) -> str | None:
    """CUDA graphs on a machine without CUDA."""
    if _no_cuda(c) and c.effective_cuda_graph_impl != "none":
        return "CUDA graphs need a GPU, and this machine has none"
    return None


@rule("K02", "capability of the machine", fix={"cpu_offloading": False})
def layer_offload_needs_cuda(c: Any) -> str | None:
    """cpu_offloading on a machine without CUDA."""
    if _no_cuda(c) and c.cpu_offloading:
        return "there is no GPU to offload layers from"
    return None


@rule("K02", "capability of the machine", fix={"fine_grained_activation_offloading": False})
def fine_offload_needs_cuda(c: Any) -> str | None:
    """fine_grained_activation_offloading on a machine without CUDA."""
    if _no_cuda(c) and c.fine_grained_activation_offloading:
        return "there is no GPU to offload activations from"
    return None


@rule("K02", "capability of the machine", fix={"optimizer_cpu_offload": False})
def optimizer_offload_needs_cuda(c: Any) -> str | None:
    """optimizer_cpu_offload on a machine without CUDA."""
    if _no_cuda(c) and c.optimizer_cpu_offload:
        return "there is no GPU to offload the optimizer from"
    return None


@rule("K03", "capability of the machine", fix={"fp8": None, "fp4": None})
def low_precision_needs_cuda(c: Any) -> str | None:
    """fp8 or fp4 on a machine without CUDA."""
    if _no_cuda(c) and (c.fp8 or c.fp4):
        return "fp8 and fp4 need a GPU, and this machine has none"
    return None


@rule(
    "K06",
    "transformer_engine/pytorch/quantization.py: check_fp8_support",
    kind="advice",
    doomed=True,
    fix=[{"fp8_recipe": "tensorwise"}, {"fp8": None, "fp4": None}],
)
def low_precision_suits_the_gpu(c: Any) -> str | None:
    """fp8 or fp4 on a GPU named for the run that has no products of that kind."""
    gpu = str(c.gpu or "").lower().split("-")[0]
    if gpu not in _CAPABILITY:
        return None
    if gpu == "a100" and (c.fp8 or c.fp4):
        return "Transformer Engine refuses fp8 below compute capability 8.9; A100 has 8.0"
    if c.compute_capability < 10 and (c.fp4 or (c.fp8 and c.fp8_recipe == "mxfp8")):
        return "Transformer Engine refuses mxfp8 and fp4 below compute capability 10 (Blackwell)"
    return None


@rule("K04", "capability of the machine", fix={"fp8": None, "fp4": None})
def low_precision_needs_te(c: Any) -> str | None:
    """fp8 or fp4 when the machine is known to lack Transformer Engine."""
    if c.te_missing and (c.fp8 or c.fp4):
        return "fp8 and fp4 are done by Transformer Engine, which is not installed"
    return None


@rule("K04", "capability of the machine", fix={"fine_grained_activation_offloading": False})
def fine_offload_needs_te(c: Any) -> str | None:
    """Fine-grained offload when the machine is known to lack Transformer Engine."""
    if c.te_missing and c.fine_grained_activation_offloading:
        return "fine-grained offload needs the Transformer Engine layers, which are not installed"
    return None


@rule("K05", "capability of the machine", fix={"gradient_accumulation_fusion": False})
def accumulation_fusion_needs_cuda(c: Any) -> str | None:
    """gradient_accumulation_fusion on a machine without CUDA."""
    if _no_cuda(c) and c.gradient_accumulation_fusion:
        return "fused gradient accumulation is a CUDA kernel, and this machine has no GPU"
    return None
