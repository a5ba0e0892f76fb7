"""Advice on recompute, offload and the allocator, from measurements upstream has published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import derived, rule
from tuner.constraints.rules.recompute import without_module

MEMORY = (
    "Megatron Bridge, skills/nemo-mbridge-perf-memory-tuning: Llama-3 70B SFT, 32 H100, fp8, "
    "TP 4 PP 4 VPP 5"
)
RECOMPUTE = (
    "Megatron Bridge, skills/nemo-mbridge-perf-activation-recompute: Llama-3 70B SFT, 32 H100"
)
MOONLIGHT = (
    "Megatron Bridge, skills/nemo-mbridge-perf-activation-recompute: Moonlight 16B, 8 H100, bf16"
)
OFFLOAD = "Megatron Bridge, skills/nemo-mbridge-perf-cpu-offloading: Qwen3-30B-A3B"
FINE_GRAINED = (
    "pipeline_parallel/fine_grained_activation_offload.py: "
    "ChunkOffloadHandler.on_group_commit_backward"
)
TE_OFFLOAD = "transformer_engine/pytorch/cpu_offload.py: get_cpu_offload_context"


@derived
def selective_modules(c: Any) -> frozenset[str]:
    """Modules that are really recomputed under selective granularity; empty otherwise."""
    if c.effective_recompute_granularity != "selective":
        return frozenset()
    return frozenset(c.effective_recompute_modules)


@derived
def saves_memory(c: Any) -> bool:
    """Whether the candidate pays time for memory."""
    recompute = c.effective_recompute_granularity == "full" or bool(c.selective_modules)
    offload = c.cpu_offloading or c.fine_grained_activation_offloading or c.optimizer_cpu_offload
    return bool(recompute or offload)


def _expandable(c: Any) -> Mapping[str, object]:
    env = {**c.env, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if c.effective_cuda_graph_impl != "none":
        env["NCCL_GRAPH_REGISTER"] = "0"
    return {"env": env}


@rule("N01", MEMORY, kind="advice", fix=[_expandable])
def expandable_segments_come_first(c: Any) -> str | None:
    """Recompute or offload while the allocator still has fixed segments."""
    on_gpu = c.capabilities is None or c.capabilities.cuda is not False
    if not on_gpu or not c.saves_memory or c.expandable_segments or c.nccl_ub:
        return None
    return (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before paying time for memory: on "
        "Llama-3 70B it alone cured an out-of-memory error (58.8 GB peak) at no cost in speed"
    )


@rule(
    "N02",
    "Megatron Bridge, docs/training/cuda-graphs.md",
    kind="advice",
    fix=[lambda c: {"env": {**c.env, "NCCL_GRAPH_REGISTER": "0"}}],
)
def full_iteration_graph_unregisters(c: Any) -> str | None:
    """A full-iteration graph with expandable segments before Blackwell and NCCL_GRAPH_REGISTER
    not 0."""
    if not c.full_iteration or c.per_layer_graph or c.compute_capability >= 10:
        return None
    if c.expandable_segments and str(c.env.get("NCCL_GRAPH_REGISTER", "")) != "0":
        return "set NCCL_GRAPH_REGISTER=0 with CUDA graphs and expandable segments before Blackwell"
    return None


@rule(
    "R40",
    "megatron/core/transformer/transformer_layer.py: _forward_mlp; tensor_parallel/random.py: "
    "CheckpointFunction",
    kind="advice",
    doomed=True,
    fix=[without_module("mlp")],
)
def recomputed_mlp_returns_its_bias(c: Any) -> str | None:
    """mlp recompute with add_bias_linear in a model with dense layers."""
    if "mlp" not in c.selective_modules or not c.add_bias_linear or not c.has_dense_layers:
        return None
    return (
        "the checkpoint around the MLP returns the bias parameter itself, so its backward pass "
        "enters it again without end: the first step exhausts memory or crashes"
    )


@rule("R13", MOONLIGHT, kind="advice", fix=[without_module("core_attn")])
def fused_attention_recomputes_itself(c: Any) -> str | None:
    """core_attn recompute with fused or flash attention."""
    if "core_attn" not in c.selective_modules or c.transformer_impl != "transformer_engine":
        return None
    if c.attention_backend in ("unfused", "local"):
        return None
    return (
        "fused attention already recomputes its internals: core_attn saves next to nothing (0.01 % "
        "of memory for 3.9 % more time on Moonlight 16B), and can cost memory"
    )


@rule("N03", RECOMPUTE, kind="advice", fix=[without_module("mlp")])
def mlp_recompute_is_expensive(c: Any) -> str | None:
    """mlp recompute on dense layers."""
    if "mlp" not in c.selective_modules or not c.has_dense_layers:
        return None
    return (
        "recomputing mlp cost about 16 % of speed (709.9 to 593.6 TFLOP/s/GPU) for about 3 GB on "
        "Llama-3 70B; try the allocator first"
    )


@rule("N04", RECOMPUTE, kind="advice", fix=[without_module("core_attn")])
def mlp_with_core_attention_is_worse(c: Any) -> str | None:
    """mlp and core_attn recompute together."""
    if not {"mlp", "core_attn"} <= c.selective_modules:
        return None
    return (
        "mlp with core_attn was slower than mlp alone on Llama-3 70B (586.8 against 593.6 "
        "TFLOP/s/GPU) at the same 55.6 GB peak"
    )


@rule("N05", RECOMPUTE, kind="advice", fix=[without_module("layernorm")])
def layernorm_alone_saves_nothing(c: Any) -> str | None:
    """layernorm recompute without a broader module."""
    if "layernorm" not in c.selective_modules:
        return None
    if not c.selective_modules <= {"layernorm", "core_attn"}:
        return None
    return (
        "layernorm saved next to nothing: with core_attn the peak was 59.6 GB against 58.8 GB "
        "without it on Llama-3 70B"
    )


@rule("N06", RECOMPUTE, kind="advice", fix=[without_module("mlp")])
def mlp_recompute_needs_dense_layers(c: Any) -> str | None:
    """mlp recompute on a model whose every layer is MoE."""
    if "mlp" in c.selective_modules and not c.has_dense_layers:
        return "recomputing mlp does nothing on MoE layers; use moe_act, or moe for the whole layer"
    return None


@rule(
    "N07",
    "Megatron Bridge, docs/training/activation-recomputation.md",
    kind="advice",
    fix=[{"recompute_granularity": None, "recompute_modules": None}],
)
def empty_selection_recomputes_nothing(c: Any) -> str | None:
    """Selective recompute with an empty module list."""
    if c.effective_recompute_granularity == "selective" and not c.selective_modules:
        return "an empty list is accepted and recomputes nothing: a control, not a saving"
    return None


@rule(
    "N08",
    "Megatron-LM pull request 7538",
    kind="advice",
    fix=[without_module("core_attn")],
)
def fp8_attention_recompute_leaves_fp8(c: Any) -> str | None:
    """core_attn recompute with fp8."""
    if "core_attn" in c.selective_modules and c.fp8:
        return (
            "the recomputed attention runs outside the fp8 context: with fp8 parameters it fails, "
            "with bf16 parameters it silently recomputes in bf16"
        )
    return None


@rule("N09", OFFLOAD, kind="advice", fix=[{"overlap_cpu_optimizer_d2h_h2d": True}])
def offloaded_optimizer_is_slow(c: Any) -> str | None:
    """optimizer_cpu_offload without overlap of its copies."""
    if not c.optimizer_cpu_offload or c.overlap_cpu_optimizer_d2h_h2d:
        return None
    return (
        "an offloaded optimizer made steps about 1.9 times as long at a quarter and 4.2 times at "
        "the whole on Qwen3-30B-A3B; overlapping its copies won back about 7 %"
    )


@rule("O29", TE_OFFLOAD, kind="advice", fix=[{"cpu_offloading_weights": False}])
def weight_offload_does_nothing(c: Any) -> str | None:
    """cpu_offloading_weights."""
    if c.cpu_offloading and c.cpu_offloading_weights:
        return "Transformer Engine ignores cpu_offloading_weights (it prints a deprecation warning)"
    return None


@rule("O30", TE_OFFLOAD, kind="advice", fix=[{"cpu_offloading_double_buffering": False}])
def double_buffering_does_nothing(c: Any) -> str | None:
    """cpu_offloading_double_buffering with Transformer Engine 2.10 and its new offload code."""
    if c.cpu_offloading and c.cpu_offloading_double_buffering and not c.offload_v1:
        return "from Transformer Engine 2.10 double buffering works only with NVTE_CPU_OFFLOAD_V1=1"
    return None


@rule("O31", TE_OFFLOAD, kind="advice")
def last_layer_offload_leaves_no_overlap(c: Any) -> str | None:
    """cpu_offloading_num_layers is one less than num_layers with Transformer Engine 2.10."""
    if not c.cpu_offloading or c.te < (2, 10) or c.num_layers < 2:
        return None
    if c.cpu_offloading_num_layers == c.num_layers - 1:
        return "with all but one layer offloaded no computation is left to hide the copies"
    return None


@rule(
    "O32",
    FINE_GRAINED,
    kind="advice",
    doomed=True,
    fix=[
        {"recompute_granularity": "selective"},
        {"fine_grained_activation_offloading": False},
    ],
)
def full_recompute_confuses_offload_of_pipelines(c: Any) -> str | None:
    """Fine-grained offload with full recompute in a pipeline: replayed layers join the micro-batch
    whose forward pass ran last."""
    full = c.effective_recompute_granularity == "full"
    stages = c.pipeline_model_parallel_size
    if not c.fine_grained_activation_offloading or not full or stages < 2:
        return None
    # Two stages whose last layers are not recomputed get through (dry runs of 0.16.1).
    spared = c.recompute_method == "block" and (c.recompute_num_layers or 0) * stages < c.num_layers
    if stages == 2 and spared and (c.virtual_pipeline_model_parallel_size or 1) == 1:
        return None
    return (
        "layers replayed in the backward pass offload into the micro-batch that went forward last: "
        "the first step asserts (Chunk mismatch)"
    )


@rule(
    "O33",
    FINE_GRAINED,
    kind="advice",
    doomed=True,
    fix=[
        {"cuda_graph_impl": "transformer_engine"},
        {"fine_grained_activation_offloading": False},
    ],
)
def local_graphs_confuse_fine_grained_offload(c: Any) -> str | None:
    """Fine-grained offload with local graphs of layers, which are recorded out of turn."""
    layers = c.effective_cuda_graph_impl == "local" and not c.full_iteration
    if c.fine_grained_activation_offloading and layers:
        return "recording graphs of layers one by one breaks offload: it asserts (Chunk mismatch)"
    return None
