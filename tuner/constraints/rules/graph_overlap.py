"""CUDA graphs together with offload, expert-parallel overlap and inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC
from tuner.constraints.rules.cuda_graphs import OFF, captures, no_recompute_of
from tuner.constraints.rules.cuda_graphs import without as without_graph
from tuner.constraints.rules.offload import EXPERT_PARTS, FINE_OFF
from tuner.constraints.rules.offload import without as without_offload

SCOPES: Mapping[str, tuple[str, ...]] = {
    "none": ("none",),
    "local": ("layer", "block"),
    "transformer_engine": ("none",),
    "full_iteration": ("none",),
}


@rule("O04", TC, fix=[OFF, {"cpu_offloading": False}])
def layer_offload_excludes_graphs(c: Any) -> str | None:
    """cpu_offloading with CUDA graphs (from 0.18 a full-iteration graph is let through)."""
    impl = c.effective_cuda_graph_impl
    if not c.cpu_offloading or impl == "none" or (c.minor >= 18 and impl == "full_iteration"):
        return None
    return "layer-level CPU offload does not work with CUDA graphs"


def _fine_offload_graph(c: Any) -> bool:
    return c.fine_grained_activation_offloading and c.effective_cuda_graph_impl != "none"


@rule(
    "O15",
    TC,
    fix=[{"cuda_graph_impl": "transformer_engine"}, OFF, FINE_OFF],
    since="0.18.0",
    until="0.18.0",
)
def fine_offload_excludes_local_graphs(c: Any) -> str | None:
    """Fine-grained offload with local per-layer graphs."""
    if _fine_offload_graph(c) and c.effective_cuda_graph_impl == "local":
        return "fine-grained offload works with transformer_engine or full-iteration graphs only"
    return None


def _only_expert_parts(c: Any) -> Mapping[str, object]:
    rest = [m for m in c.offloaded if m not in EXPERT_PARTS]
    changes: Mapping[str, object] = without_offload(*rest)(c)
    return changes


@rule(
    "O15",
    TC,
    fix=[{"cuda_graph_impl": "transformer_engine"}, _only_expert_parts, OFF],
    since="0.19.2",
)
def local_graphs_offload_only_expert_parts(c: Any) -> str | None:
    """Local graphs with offload of anything but parts of the experts."""
    if not _fine_offload_graph(c) or c.effective_cuda_graph_impl != "local":
        return None
    others = [m for m in c.offloaded if m not in EXPERT_PARTS]
    if others:
        return f"local CUDA graphs cannot be combined with offload of {', '.join(others)}"
    if not c.effective_graph_modules:
        return "local CUDA graphs of whole layers cannot be combined with fine-grained offload"
    return None


@rule("O16", TC, fix=[without_graph("moe"), OFF, FINE_OFF], since="0.18.0")
def fine_offload_excludes_moe_graph(c: Any) -> str | None:
    """Fine-grained offload with moe captured."""
    if _fine_offload_graph(c) and "moe" in c.effective_graph_modules:
        return "fine-grained offload does not work with a captured moe"
    return None


@rule("O17", TC, fix=[{"cuda_graph_warmup_steps": 3}], since="0.18.0")
def fine_offload_needs_graph_warmup(c: Any) -> str | None:
    """Fine-grained offload with CUDA graphs and no warm-up steps."""
    if _fine_offload_graph(c) and c.cuda_graph_warmup_steps <= 0:
        return "offload learns its plan in the warm-up, so cuda_graph_warmup_steps must be positive"
    return None


@rule("O18", TC, fix=[{"fine_grained_offloading_max_inflight_offloads": 2}, OFF], since="0.18.0")
def full_iteration_offload_limits_inflight(c: Any) -> str | None:
    """Fine-grained offload with a full-iteration graph and no limit of offloads in flight."""
    limit = c.fine_grained_offloading_max_inflight_offloads
    if not _fine_offload_graph(c) or c.effective_cuda_graph_impl != "full_iteration":
        return None
    if limit is None or limit < 0:
        return "a full-iteration graph needs fine_grained_offloading_max_inflight_offloads >= 0"
    return None


@rule("G25", TC, fix=[OFF, without_graph("moe", "mlp")])
def expert_overlap_excludes_moe_graphs(c: Any) -> str | None:
    """Overlap of expert communication with graphs of moe or mlp (before 0.18: any but
    transformer_engine graphs)."""
    impl = c.effective_cuda_graph_impl
    if not c.overlap_moe_expert_parallel_comm or impl == "none":
        return None
    if impl != "transformer_engine":
        return None if c.minor >= 18 else "expert overlap works with transformer_engine graphs only"
    if {"moe", "mlp"} & set(c.effective_graph_modules):
        return "expert overlap does not work with captured moe or mlp"
    return None


@rule("G26", TC, fix=[no_recompute_of("shared_experts"), OFF], since="0.19.2")
def graphed_shared_experts_are_not_recomputed(c: Any) -> str | None:
    """Weight re-materialisation, local graphs, low precision and recomputed shared experts."""
    if c.weight_remat_size <= 1 or c.effective_cuda_graph_impl != "local":
        return None
    if c.effective_recompute_granularity != "selective" or (c.fp8 is None and c.fp4 is None):
        return None
    if c.moe_shared_expert_intermediate_size is None or c.moe_shared_expert_overlap:
        return None
    graphed = captures(c, "moe") or "moe_router" in c.effective_graph_modules
    if graphed and "shared_experts" in c.effective_recompute_modules:
        return "captured shared experts cannot be recomputed in low precision here"
    return None


@rule("G27", TC, fix=[{"inference_cuda_graph_scope": None}], since="0.18.0")
def inference_scope_fits_implementation(c: Any) -> str | None:
    """inference_cuda_graph_scope is not allowed for this cuda_graph_impl."""
    allowed = SCOPES.get(c.effective_cuda_graph_impl)
    if allowed is not None and c.effective_inference_scope not in allowed:
        return (
            f"inference_cuda_graph_scope {c.effective_inference_scope} does not go with "
            f"cuda_graph_impl {c.effective_cuda_graph_impl}"
        )
    return None


@rewrite("G27", "inference_cuda_graph_scope", TC, since="0.18.0")
def inference_scope_follows_implementation(c: Any) -> object:
    """An unset inference_cuda_graph_scope becomes layer with local graphs, none otherwise."""
    return c.effective_inference_scope


@rule("G33", "transformer/cuda_graphs.py: TECudaGraphHelper.__init__", fix=[OFF])
def te_graphs_need_te(c: Any) -> str | None:
    """transformer_engine graphs without Transformer Engine."""
    if c.effective_cuda_graph_impl == "transformer_engine" and c.te_missing:
        return "transformer_engine graphs need Transformer Engine, which is not installed"
    return None
