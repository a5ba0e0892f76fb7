"""Megatron Bridge: checks and rewrites of ConfigContainer.validate and of the model provider."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import (
    FRONTEND_DEFAULTS,
    UNCHANGED,
    DenseDefault,
    derived,
    handed_over,
    rewrite,
    rule,
)
from tuner.constraints.rules.bridge_precision import after_recipe

VALIDATE = "bridge/training/config.py: ConfigContainer.validate"
FINALIZE = "bridge/models/transformer_config.py: TransformerConfig.finalize"
PROVIDE = "bridge/models/gpt_provider.py: GPTModelProvider.provide"
FLEX = "bridge/training/flex_dispatcher_backend.py: validate_flex_dispatcher_backend"
GRAPHS = "bridge/utils/cuda_graph.py: validate_cuda_graph_configuration"
_BRIDGE = ("bridge",)

# The provider of models with multi-latent attention inherits Megatron-Core's own defaults first.
FRONTEND_DEFAULTS["bridge"].update(
    {
        "attention_softmax_in_fp32": DenseDefault(False),
        "average_in_collective": True,
        "check_for_nan_in_loss": True,
        "cross_entropy_loss_fusion": DenseDefault(True),
        "deallocate_pipeline_outputs": DenseDefault(True),
        "gradient_accumulation_fusion": None,
        "grad_reduce_in_fp32": True,
        "masked_softmax_fusion": DenseDefault(True),
    }
)
_NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


@derived
def bridge_accumulation_fusion(c: Any) -> bool:
    """gradient_accumulation_fusion, which Bridge turns on where it finds the kernels: Bridge 0.3
    looks for an Apex extension only, later versions accept Transformer Engine."""
    if c.gradient_accumulation_fusion is not None:
        return bool(c.gradient_accumulation_fusion)
    return bool(c.minor >= 17 and not c.multi_latent_attention and c.te)


@handed_over("bridge", "gradient_accumulation_fusion")
def accumulation_fusion_after_bridge(c: Any) -> bool:
    """What the provider starts with."""
    return bool(c.bridge_accumulation_fusion)


@handed_over("bridge", "sequence_parallel")
def sequence_parallel_after_bridge(c: Any) -> bool:
    """From Bridge 0.4 it is turned off with one tensor rank."""
    off = c.minor >= 17 and c.tensor_model_parallel_size <= 1
    return bool(c.sequence_parallel and not off)


@rewrite("S02", "sequence_parallel", FINALIZE, since="0.17.0", frontends=_BRIDGE, layer="given")
def sequence_parallel_is_turned_off(c: Any) -> object:
    """With one tensor-parallel rank it is silently turned off."""
    return False if c.sequence_parallel and c.tensor_model_parallel_size <= 1 else UNCHANGED


@handed_over("bridge", "pipeline_dtype")
def pipeline_dtype_after_bridge(c: Any) -> str | None:
    """Filled in from params_dtype when stages exchange activations."""
    given = after_recipe(c, "pipeline_dtype")
    if given is None and c.pipeline_model_parallel_size > 1:
        return str(after_recipe(c, "params_dtype"))
    return None if given is None else str(given)


@rewrite("S03", "pipeline_dtype", FINALIZE, frontends=_BRIDGE, layer="given")
def pipeline_dtype_is_filled_in(c: Any) -> object:
    """A missing pipeline_dtype becomes params_dtype; a mixed_precision recipe overwrites it."""
    if c.minor >= 17 and c.fp32_residual_connection:
        return UNCHANGED
    return pipeline_dtype_after_bridge(c)


@handed_over("bridge", "expert_tensor_parallel_size")
def expert_tensor_size_after_bridge(c: Any) -> int | None:
    """From Bridge 0.6 experts are not split over tensor ranks unless asked."""
    given: int | None = c.expert_tensor_parallel_size
    if given is None and c.minor >= 19 and c.expert_model_parallel_size > 1:
        return 1
    return given


@rewrite(
    "S04",
    "expert_tensor_parallel_size",
    FINALIZE,
    since="0.19.2",
    frontends=_BRIDGE,
    layer="given",
)
def expert_tensor_size_becomes_one(c: Any) -> object:
    """With expert parallelism an unset expert_tensor_parallel_size becomes 1 (Megatron-Core
    alone would take the tensor-parallel size)."""
    unset = c.expert_tensor_parallel_size is None
    return 1 if unset and c.expert_model_parallel_size > 1 else UNCHANGED


@derived
def asks_for_graphs(c: Any) -> bool:
    """Whether any spelling asks for CUDA graphs."""
    switches = c.enable_cuda_graph or c.external_cuda_graph
    return bool(c.cuda_graph_impl != "none" or switches or "full_iteration" in c.graph_names)


@rewrite(
    "S09",
    "moe_hybridep_pad_uneven_dispatch_inputs",
    FINALIZE,
    since="0.19.2",
    frontends=_BRIDGE,
    layer="given",
)
def hybridep_pads_uneven_inputs(c: Any) -> object:
    """hybridep without graphs gets padding of uneven inputs."""
    flex = c.moe_token_dispatcher_type == "flex" and c.moe_flex_dispatcher_backend == "hybridep"
    return True if flex and not c.asks_for_graphs else UNCHANGED


@derived
def clears_regions_first(c: Any) -> bool:
    """From Bridge 0.6 the captured region is dropped before Megatron-Core sees it."""
    return bool(c.minor >= 19 and c.cuda_graph_impl == "none")


@handed_over("bridge", "cuda_graph_modules")
def graph_modules_after_bridge(c: Any) -> Any:
    """Dropped without graphs from Bridge 0.6 on."""
    return [] if c.clears_regions_first else c.cuda_graph_modules


@handed_over("bridge", "cuda_graph_scope")
def graph_scope_after_bridge(c: Any) -> Any:
    """Dropped without graphs from Bridge 0.6 on."""
    return None if c.clears_regions_first else c.cuda_graph_scope


def _cleared_region(c: Any) -> object:
    cleared = c.clears_regions_first or c.effective_cuda_graph_impl == "none"
    return [] if cleared else UNCHANGED


@rewrite("G35", "cuda_graph_scope", VALIDATE, since="0.17.0", until="0.17.0", frontends=_BRIDGE)
def scope_is_cleared_without_graphs(c: Any) -> object:
    """Without graphs the captured region is cleared."""
    return _cleared_region(c)


@rewrite("G35", "cuda_graph_modules", VALIDATE, since="0.18.0", frontends=_BRIDGE)
def modules_are_cleared_without_graphs(c: Any) -> object:
    """Without graphs the captured region is cleared."""
    return _cleared_region(c)


@rule(
    "G34",
    GRAPHS,
    since="0.19.2",
    frontends=_BRIDGE,
    layer="given",
    fix=[{"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_impl": "none"}],
)
def local_graphs_are_full_iteration(c: Any) -> str | None:
    """Local graphs of layers: Bridge 0.6 takes only full-iteration or local inference graphs."""
    if c.cuda_graph_impl != "local" or "full_iteration" in c.graph_names:
        return None
    parts = c.graph_names - {"full_iteration", "full_iteration_inference", "full"}
    inference = c.inference_cuda_graph_scope in ("layer", "block")
    if inference and not parts:
        return None
    return "Bridge 0.6 supports cuda_graph_impl local for full-iteration graphs only"


@derived
def bridge_full_iteration(c: Any) -> bool:
    """Whether Bridge sees a full-iteration graph once Megatron-Core has read the fields."""
    if c.minor >= 18:
        return bool(c.effective_cuda_graph_impl == "full_iteration")
    return bool(c.effective_cuda_graph_impl == "local" and c.full_iteration)


@rule("G31", VALIDATE, frontends=_BRIDGE, fix=[{"check_for_nan_in_loss": False}])
def full_iteration_excludes_nan_check(c: Any) -> str | None:
    """A full-iteration graph with check_for_nan_in_loss (on by default)."""
    if c.bridge_full_iteration and c.check_for_nan_in_loss:
        return "a full-iteration graph cannot check the loss for NaN; set check_for_nan_in_loss off"
    return None


@rule(
    "B08",
    PROVIDE,
    frontends=_BRIDGE,
    fix=[{"use_te_rng_tracker": True}, {"cuda_graph_impl": "none"}],
)
def graphs_need_te_random_tracker(c: Any) -> str | None:
    """CUDA graphs without use_te_rng_tracker: the model cannot be built."""
    tracked = c.use_te_rng_tracker or c.te_rng_tracker
    if c.effective_cuda_graph_impl != "none" and not tracked:
        return "CUDA graphs need Transformer Engine's random-number tracker: use_te_rng_tracker"
    return None


@rewrite("S08", "use_te_rng_tracker", VALIDATE, frontends=_BRIDGE, layer="given")
def tracker_is_on_in_both_places(c: Any) -> object:
    """Set on the model or on rng, it is turned on in both."""
    return True if c.te_rng_tracker else UNCHANGED


@rewrite("S08", "te_rng_tracker", VALIDATE, frontends=_BRIDGE, layer="given")
def rng_tracker_is_on_in_both_places(c: Any) -> object:
    """Set on the model or on rng, it is turned on in both."""
    return True if c.use_te_rng_tracker else UNCHANGED


@rewrite("S12", "apply_rope_fusion", PROVIDE, frontends=_BRIDGE, layer="given")
def rope_fusion_needs_rope(c: Any) -> object:
    """Turned off unless position_embedding_type is rope."""
    return False if c.apply_rope_fusion and c.position_embedding_type != "rope" else UNCHANGED


@rule("B09", PROVIDE, frontends=_BRIDGE, fix=[{"virtual_pipeline_model_parallel_size": None}])
def chunks_are_equal_across_stages(c: Any) -> str | None:
    """A plain split whose layers per rank (rounded down) are no multiple of the VPP size."""
    vpp = c.virtual_pipeline_model_parallel_size
    flexible = c.pipeline_model_parallel_layout is not None or c.has_uneven_ends or c.accounts
    if vpp and not flexible and c.num_layers // c.pipeline_model_parallel_size % vpp:
        return f"{c.num_layers // c.pipeline_model_parallel_size} layers cannot form {vpp} chunks"
    return None


@rule("B05", VALIDATE, frontends=_BRIDGE, fix=[{"cross_entropy_loss_fusion": False}])
def deterministic_mode_excludes_loss_fusion(c: Any) -> str | None:
    """deterministic_mode with cross_entropy_loss_fusion (on by default in Bridge)."""
    if c.deterministic_mode and c.cross_entropy_loss_fusion:
        return "fused cross entropy is not deterministic"
    return None


@rule("B05", VALIDATE, until="0.17.0", frontends=_BRIDGE, fix=[{"attention_backend": "auto"}])
def deterministic_mode_excludes_flash(c: Any) -> str | None:
    """deterministic_mode with flash attention."""
    if c.deterministic_mode and c.attention_backend == "flash":
        return "flash attention is not deterministic"
    return None


@rule(
    "B05",
    VALIDATE,
    frontends=_BRIDGE,
    fix=[lambda c: {"env": {**c.env, "NCCL_ALGO": "Ring"}}, {"deterministic_mode": False}],
)
def deterministic_mode_fixes_reduction_order(c: Any) -> str | None:
    """deterministic_mode without a fixed NCCL_ALGO."""
    if c.deterministic_mode and c.env.get("NCCL_ALGO") not in _NCCL_ALGORITHMS:
        return f"deterministic mode needs NCCL_ALGO to be one of {', '.join(_NCCL_ALGORITHMS)}"
    return None


@rule(
    "O20",
    VALIDATE,
    frontends=_BRIDGE,
    fix=[{"fine_grained_activation_offloading": False}],
)
def fine_offload_needs_te_layers(c: Any) -> str | None:
    """Fine-grained offload with layers that are not Transformer Engine's."""
    if c.fine_grained_activation_offloading and c.transformer_impl != "transformer_engine":
        return "fine-grained offload needs transformer_impl transformer_engine"
    return None


@rule(
    "O21",
    VALIDATE,
    frontends=_BRIDGE,
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
    "F09",
    VALIDATE,
    until="0.16.1",
    frontends=("bridge", "megatron-lm"),
    fix=[{"fine_grained_activation_offloading": False}],
)
def fine_offload_asks_for_the_te_version(c: Any) -> str | None:
    """Fine-grained offload without Transformer Engine: 0.16 compares a missing version."""
    if c.fine_grained_activation_offloading and not c.te:
        return "fine-grained offload needs Transformer Engine"
    return None


@rule(
    "P19",
    VALIDATE,
    frontends=_BRIDGE,
    fix=[{"context_parallel_size": 1}],
)
def sequence_divides_into_context_chunks(c: Any) -> str | None:
    """With context parallelism seq_length is no multiple of twice its size."""
    size, length = c.context_parallel_size, c.seq_length
    if size > 1 and length is not None and length % (2 * size):
        return f"sequence length {length} must be a multiple of 2 x {size} context ranks"
    return None


def _context_kinds(c: Any) -> list[str]:
    kinds = c.cp_comm_type
    return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds or "p2p"]


@rule(
    "P17",
    "bridge/training/config.py: ConfigContainer._validate_cp_comm_type",
    since="0.17.0",
    frontends=_BRIDGE,
    fix=[{"cp_comm_type": "p2p"}],
)
def hierarchical_communication_needs_sizes(c: Any) -> str | None:
    """cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes."""
    two_level = any("a2a+p2p" in kind for kind in _context_kinds(c))
    if two_level and c.hierarchical_context_parallel_sizes is None:
        return "a2a+p2p without its sizes silently attends to the local chunk only"
    return None


@rule(
    "P22",
    VALIDATE,
    since="0.18.0",
    frontends=_BRIDGE,
    fix=[{"decrease_batch_size_if_needed": False}],
)
def evaluation_batch_divides_over_data_ranks(c: Any) -> str | None:
    """The evaluation batch (by default the global batch) is no multiple of micro-batch x DP, even
    with decrease_batch_size_if_needed."""
    ranks = c.bridge_data_parallel_size
    if None in (c.global_batch_size, c.micro_batch_size, ranks):
        return None
    if c.global_batch_size % (c.micro_batch_size * ranks):
        return (
            f"evaluation batch {c.global_batch_size} is no multiple of micro-batch "
            f"{c.micro_batch_size} x {ranks} data-parallel ranks"
        )
    return None


@rule("M48", FLEX, frontends=_BRIDGE, fix=[{"moe_token_dispatcher_type": "alltoall"}])
def flex_backend_supports_gpu(c: Any) -> str | None:
    """deepep or hybridep on a GPU it does not support."""
    if c.moe_token_dispatcher_type != "flex":
        return None
    major, backend = c.compute_capability, c.effective_flex_backend
    single_board = str(c.gpu or "").lower() in ("b200", "b300")
    if backend == "deepep" and major not in (8, 9) and not single_board:
        return "deepep supports Ampere, Hopper, B200 and B300"
    if backend == "hybridep" and major not in (8, 9, 10):
        return "hybridep supports Ampere, Hopper and Blackwell"
    return None
