"""Megatron-LM: what the command line changes before Megatron-Core sees it."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import (
    FRONTEND_DEFAULTS,
    UNCHANGED,
    derived,
    handed_over,
    rewrite,
)

VALIDATE = "megatron/training/arguments.py: validate_args"
TO_CONFIG = "megatron/training/arguments.py: core_transformer_config_from_args"
LM = "megatron-lm"
_LM = (LM,)

FRONTEND_DEFAULTS[LM].update(
    {
        "ckpt_format": "torch_dist",
        "check_for_nan_in_loss": True,
        "cuda_graph_modules": [],
        "gradient_accumulation_fusion": True,
        "overlap_p2p_comm": True,
        "share_embeddings_and_output_weights": True,
    }
)


@handed_over(LM, "sequence_parallel")
def sequence_parallel_after_arguments(c: Any) -> bool:
    """Turned off with one tensor rank."""
    return bool(c.sequence_parallel and c.tensor_model_parallel_size > 1)


@rewrite("S01", "sequence_parallel", VALIDATE, frontends=_LM, layer="given")
def sequence_parallel_is_turned_off(c: Any) -> object:
    """With one tensor-parallel rank it is silently turned off."""
    return False if c.sequence_parallel and c.tensor_model_parallel_size == 1 else UNCHANGED


@derived
def argument_dtype(c: Any) -> str:
    """The parameter type the command line derives from --bf16 and --fp16."""
    return "fp16" if c.fp16 else "bf16" if c.bf16 else "fp32"


@handed_over(LM, "params_dtype", "pipeline_dtype")
def dtypes_after_arguments(c: Any, name: str) -> str:
    """Parameters and pipeline exchanges take the type of --bf16 or --fp16."""
    return str(c.argument_dtype)


@derived
def argument_layout_size(c: Any) -> int | None:
    """Virtual stages per rank of a layout, None without one or when it does not divide."""
    if c.layout_grid is None:
        return None
    return len(c.layout_grid) // int(c.pipeline_model_parallel_size)


@handed_over(LM, "virtual_pipeline_model_parallel_size")
def virtual_size_after_arguments(c: Any) -> int | None:
    """Taken from the layout; 1 means none."""
    size: int | None = c.virtual_pipeline_model_parallel_size
    if c.pipeline_model_parallel_layout is not None:
        size = c.argument_layout_size
    return None if size == 1 else size


@derived
def argument_virtual_size(c: Any) -> int | None:
    """The virtual pipeline size the command line arrives at."""
    return virtual_size_after_arguments(c)


@handed_over(LM, "overlap_p2p_comm", "align_param_gather")
def overlap_after_arguments(c: Any, name: str) -> bool:
    """Off without virtual stages."""
    return bool(getattr(c, name) and c.argument_virtual_size is not None)


@handed_over(LM, "batch_p2p_comm")
def batching_after_arguments(c: Any) -> bool:
    """The opposite of overlap."""
    return not overlap_after_arguments(c, "overlap_p2p_comm")


@rewrite("S05", "overlap_p2p_comm", VALIDATE, frontends=_LM, layer="given")
def exchange_overlap_needs_virtual_stages(c: Any) -> object:
    """Off without virtual pipeline stages."""
    return False if c.overlap_p2p_comm and c.argument_virtual_size is None else UNCHANGED


@rewrite("S05", "align_param_gather", VALIDATE, frontends=_LM, layer="given")
def aligned_gather_needs_virtual_stages(c: Any) -> object:
    """Off without virtual pipeline stages."""
    return False if c.align_param_gather and c.argument_virtual_size is None else UNCHANGED


@handed_over(LM, "num_moe_experts")
def experts_after_arguments(c: Any) -> int | None:
    """0 experts mean none."""
    return c.num_moe_experts or None


@derived
def swiglu(c: Any) -> bool:
    """Whether the command line has --swiglu."""
    return bool(c.gated_linear_unit and c.activation_func in ("silu", "swiglu"))


@handed_over(LM, "ffn_hidden_size")
def ffn_after_arguments(c: Any) -> int:
    """Without a size, 8/3 of the hidden size in steps of 64 with SwiGLU, else four times."""
    if c.ffn_hidden_size is not None:
        return int(c.ffn_hidden_size)
    return int(8 * c.hidden_size / 3 / 64) * 64 if c.swiglu else 4 * int(c.hidden_size)


@rewrite("A01", "ffn_hidden_size", VALIDATE, frontends=_LM, layer="given")
def dense_width_is_filled_in(c: Any) -> object:
    """An unset ffn_hidden_size becomes 8/3 of hidden_size with SwiGLU, else four times."""
    return ffn_after_arguments(c) if c.ffn_hidden_size is None else UNCHANGED


@handed_over(LM, "bias_activation_fusion")
def fusion_after_arguments(c: Any) -> bool:
    """Without bias only the SwiGLU fusion stays."""
    return bool(c.bias_activation_fusion and (c.swiglu or c.add_bias_linear))


@handed_over(LM, "activation_func")
def activation_after_arguments(c: Any) -> str:
    """quick_gelu is the fusable function here; there is no argument for relu."""
    if c.activation_func == "quick_gelu":
        return "quick_geglu"
    return "gelu" if c.activation_func == "relu" else str(c.activation_func)


@handed_over(LM, "cpu_offloading")
def offload_after_arguments(c: Any) -> bool:
    """There is no argument for the switch: it is on when the number of layers is positive."""
    return bool(c.cpu_offloading and (c.cpu_offloading_num_layers or 0) > 0)


@handed_over(LM, "cpu_offloading_activations")
def offloaded_activations_after_arguments(c: Any) -> bool:
    """Said on the command line only together with the number of layers."""
    return bool(c.cpu_offloading_activations or not c.cpu_offloading)


@rewrite("O26", "cpu_offloading", VALIDATE, frontends=_LM, layer="given")
def layer_count_switches_offload(c: Any) -> object:
    """Without a positive cpu_offloading_num_layers nothing is offloaded: the command line has no
    other switch."""
    return offload_after_arguments(c)


@handed_over(LM, "fp8_param", "fp8_param_gather")
def fp8_parameters_after_arguments(c: Any, name: str) -> bool:
    """--fp8-param-gather is both."""
    return bool(c.fp8_param or c.fp8_param_gather)


@derived
def argument_fp8_gather(c: Any) -> bool:
    """Whether --fp8-param-gather is given."""
    return bool(c.fp8_param or c.fp8_param_gather)


@handed_over(LM, "variable_seq_lengths")
def lengths_after_arguments(c: Any) -> bool:
    """Always fixed."""
    return False


@handed_over(LM, "apply_rope_fusion")
def rope_fusion_after_arguments(c: Any) -> bool:
    """Off unless the position embedding is rope."""
    return bool(c.apply_rope_fusion and c.position_embedding_type == "rope")


@rewrite("S12", "apply_rope_fusion", VALIDATE, frontends=_LM, layer="given")
def rope_fusion_needs_rope(c: Any) -> object:
    """Turned off unless position_embedding_type is rope."""
    return False if c.apply_rope_fusion and c.position_embedding_type != "rope" else UNCHANGED


@handed_over(LM, "add_qkv_bias")
def attention_bias_after_arguments(c: Any) -> bool:
    """On with add_bias_linear."""
    return bool(c.add_bias_linear or c.add_qkv_bias)


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


@handed_over(LM, "moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type")
def single_entries_after_arguments(c: Any, name: str) -> Any:
    """A list of one entry becomes the entry."""
    return _single(getattr(c, name))


@rewrite("S13", "moe_router_load_balancing_type", VALIDATE, frontends=_LM, layer="given")
def single_balancing_type_is_unpacked(c: Any) -> object:
    """A list of one entry becomes the entry."""
    return _single(c.moe_router_load_balancing_type)


@rewrite("S13", "moe_aux_loss_coeff", VALIDATE, frontends=_LM, layer="given")
def single_coefficient_is_unpacked(c: Any) -> object:
    """A list of one entry becomes the entry."""
    return _single(c.moe_aux_loss_coeff)


@handed_over(LM, "enable_cuda_graph", "external_cuda_graph")
def old_graph_switch_after_arguments(c: Any, name: str) -> bool:
    """The old switches are dropped after they have set the implementation."""
    return False


@handed_over(LM, "cuda_graph_impl")
def graph_impl_after_arguments(c: Any) -> str:
    """Set by the old switches."""
    return str(c.migrated_graph_impl)


@rewrite("G12", "enable_cuda_graph", VALIDATE, frontends=_LM, layer="given")
def old_local_switch_is_dropped(c: Any) -> object:
    """The deprecated switch is dropped after it has set cuda_graph_impl."""
    return None if c.enable_cuda_graph else UNCHANGED


@rewrite("G12", "external_cuda_graph", VALIDATE, frontends=_LM, layer="given")
def old_external_switch_is_dropped(c: Any) -> object:
    """The deprecated switch is dropped after it has set cuda_graph_impl."""
    return None if c.external_cuda_graph else UNCHANGED


@rewrite("G30", "use_te_rng_tracker", VALIDATE, frontends=_LM)
def graphs_turn_random_tracker_on(c: Any) -> object:
    """CUDA graphs turn Transformer Engine's random-number tracker on."""
    if c.effective_cuda_graph_impl == "none" or c.use_te_rng_tracker:
        return UNCHANGED
    engines = (c.transformer_impl, c.effective_cuda_graph_impl)
    return True if "transformer_engine" in engines else UNCHANGED


@rewrite("S11", "use_distributed_optimizer", VALIDATE, since="0.18.0", frontends=_LM, layer="given")
def fsdp_turns_distributed_optimizer_on(c: Any) -> object:
    """Megatron FSDP turns it on."""
    return True if c.use_megatron_fsdp else UNCHANGED


@handed_over(LM, "reuse_grad_buf_for_mxfp8_param_ag")
def buffer_reuse_after_arguments(c: Any) -> bool:
    """Off with Megatron FSDP (before 0.18: with its manual registration)."""
    off = c.use_megatron_fsdp and (c.minor >= 18 or c.fsdp_manual_registration)
    return bool(c.reuse_grad_buf_for_mxfp8_param_ag and not off)


@rewrite("S11", "reuse_grad_buf_for_mxfp8_param_ag", VALIDATE, frontends=_LM, layer="given")
def fsdp_turns_buffer_reuse_off(c: Any) -> object:
    """Megatron FSDP turns it off."""
    return buffer_reuse_after_arguments(c)
