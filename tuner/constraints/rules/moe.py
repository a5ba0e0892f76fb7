"""Mixture of experts: routing, capacity, dispatchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

LAYER = "transformer/moe/moe_layer.py: MoELayer"
DISPATCHER = "transformer/moe/token_dispatcher.py: MoEFlexTokenDispatcher.__init__"
LOSS_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_NO_CAPACITY: Mapping[str, object] = {"moe_expert_capacity_factor": None}


@derived
def effective_capacity_factor(c: Any) -> float | None:
    """A negative capacity factor means no limit."""
    factor = c.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


@derived
def effective_flex_backend(c: Any) -> str | None:
    """moe_enable_deepep (deprecated) chooses deepep."""
    backend = c.moe_flex_dispatcher_backend
    return "deepep" if c.moe_enable_deepep else backend


@derived
def mixed_layers(c: Any) -> bool:
    """Whether moe_layer_freq leaves some layers dense."""
    freq = c.moe_layer_freq
    return 0 in freq if isinstance(freq, (list, tuple)) else freq > 1


@derived
def effective_moe_ffn_hidden_size(c: Any) -> int | None:
    """Experts are as wide as the dense layers unless set."""
    size = c.moe_ffn_hidden_size
    if size is None and c.num_moe_experts is not None:
        return int(c.effective_ffn_hidden_size)
    return size


@rewrite("M02", "moe_ffn_hidden_size", TC)
def expert_width_defaults_to_dense_width(c: Any) -> object:
    """Experts without moe_ffn_hidden_size get ffn_hidden_size."""
    if c.moe_ffn_hidden_size is None and c.num_moe_experts is not None:
        return c.effective_moe_ffn_hidden_size
    return UNCHANGED


@rewrite("M03", "moe_ffn_hidden_size", TC, since="0.18.0")
def expert_width_is_dropped_on_dense_layers(c: Any) -> object:
    """moe_ffn_hidden_size without experts is dropped when moe_layer_freq mixes dense layers in."""
    if c.num_moe_experts is None and c.mixed_layers:
        return None
    return UNCHANGED


@rewrite("A01", "ffn_hidden_size", TC)
def dense_width_defaults_to_four_hidden(c: Any) -> object:
    """An unset ffn_hidden_size becomes four times hidden_size."""
    return c.effective_ffn_hidden_size if c.ffn_hidden_size is None else UNCHANGED


@rule("M01", TC, fix=[{"moe_ffn_hidden_size": None}])
def expert_width_needs_experts(c: Any) -> str | None:
    """moe_ffn_hidden_size without experts (from 0.18 let through for mixed layers)."""
    if c.num_moe_experts is not None or c.moe_ffn_hidden_size is None:
        return None
    if c.minor >= 18 and c.mixed_layers:
        return None
    return "moe_ffn_hidden_size is set but the model has no experts"


@rule("M04", TC, fix=[{"moe_enable_deepep": False}, {"moe_token_dispatcher_type": "flex"}])
def deepep_needs_flex(c: Any) -> str | None:
    """moe_enable_deepep with a dispatcher other than flex."""
    if c.moe_enable_deepep and c.moe_token_dispatcher_type != "flex":
        return "moe_enable_deepep works only with the flex dispatcher"
    return None


@rule("M04", TC, fix=[{"moe_enable_deepep": False}])
def one_flex_backend(c: Any) -> str | None:
    """moe_enable_deepep with the hybridep backend."""
    if not c.moe_enable_deepep or c.moe_token_dispatcher_type != "flex":
        return None
    if c.moe_flex_dispatcher_backend == "hybridep":
        return "choose one backend: moe_enable_deepep contradicts hybridep"
    return None


@rewrite("M05", "moe_flex_dispatcher_backend", TC)
def old_deepep_switch_sets_backend(c: Any) -> object:
    """moe_enable_deepep (deprecated) sets moe_flex_dispatcher_backend to deepep."""
    return "deepep" if c.moe_enable_deepep else UNCHANGED


@rule(
    "M06",
    TC,
    fix=[
        {"moe_pad_expert_input_to_capacity": False},
        {"moe_token_dispatcher_type": "alltoall", "moe_enable_deepep": False},
    ],
)
def deepep_does_not_pad(c: Any) -> str | None:
    """The flex dispatcher with deepep and moe_pad_expert_input_to_capacity."""
    if c.moe_token_dispatcher_type != "flex" or c.effective_flex_backend != "deepep":
        return None
    if c.moe_pad_expert_input_to_capacity:
        return "deepep cannot pad expert inputs to capacity"
    return None


@rule("M07", TC, fix=[{"moe_shared_expert_intermediate_size": None}])
def shared_experts_have_a_width(c: Any) -> str | None:
    """moe_shared_expert_intermediate_size is 0 or negative."""
    size = c.moe_shared_expert_intermediate_size
    if size is not None and size <= 0:
        return f"shared experts need a positive width, got {size}"
    return None


@rule(
    "M08",
    TC,
    fix=[{"moe_shared_expert_overlap": False}, {"moe_token_dispatcher_type": "alltoall"}],
)
def shared_expert_overlap_needs_alltoall(c: Any) -> str | None:
    """moe_shared_expert_overlap with a dispatcher other than alltoall (0.18 and later: or flex)."""
    if c.moe_shared_expert_intermediate_size is None or not c.moe_shared_expert_overlap:
        return None
    allowed = ("alltoall", "flex") if c.minor >= 18 else ("alltoall",)
    if c.moe_token_dispatcher_type not in allowed:
        return f"overlapping shared experts needs the {' or '.join(allowed)} dispatcher"
    return None


def _one_coefficient_each(c: Any) -> Mapping[str, object]:
    given = c.moe_aux_loss_coeff
    value = (given[0] if given else 0.0) if isinstance(given, (list, tuple)) else given
    return {"moe_aux_loss_coeff": [value] * len(c.moe_router_load_balancing_type)}


@rule("M09", TC, fix=[_one_coefficient_each])
def every_balancing_loss_has_a_coefficient(c: Any) -> str | None:
    """A list of balancing types without a list of as many coefficients."""
    kinds, given = c.moe_router_load_balancing_type, c.moe_aux_loss_coeff
    if not isinstance(kinds, (list, tuple)):
        return None
    if not isinstance(given, (list, tuple)) or len(given) != len(kinds):
        return f"{len(kinds)} balancing types need a list of as many moe_aux_loss_coeff"
    return None


@rule("M10", TC, fix=[_NO_CAPACITY, {"moe_router_load_balancing_type": "aux_loss"}])
def capacity_needs_loss_balancing(c: Any) -> str | None:
    """moe_expert_capacity_factor (even negative) with sinkhorn balancing."""
    if c.moe_expert_capacity_factor is None:
        return None
    kinds = c.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    odd = [kind for kind in kinds if kind not in LOSS_BALANCING]
    if odd:
        return f"a capacity factor does not work with {', '.join(odd)} balancing"
    return None


@rewrite("M11", "moe_expert_capacity_factor", TC)
def negative_capacity_means_no_limit(c: Any) -> object:
    """A negative moe_expert_capacity_factor becomes unset."""
    return c.effective_capacity_factor


@rule(
    "M12",
    TC,
    fix=[{"moe_pad_expert_input_to_capacity": False}, {"moe_expert_capacity_factor": 1.0}],
)
def padding_needs_capacity(c: Any) -> str | None:
    """moe_pad_expert_input_to_capacity without a capacity factor."""
    if c.moe_pad_expert_input_to_capacity and c.effective_capacity_factor is None:
        return "padding to capacity needs moe_expert_capacity_factor"
    return None


@rule("M13", TC, fix=[{"moe_router_pre_softmax": True}, {"moe_router_topk": 2}])
def top_one_needs_pre_softmax(c: Any) -> str | None:
    """moe_router_topk 1 with softmax after the choice (checked on dense models too)."""
    if c.moe_router_topk != 1 or c.moe_router_score_function != "softmax":
        return None
    if not c.moe_router_pre_softmax and c.moe_router_load_balancing_type != "sinkhorn":
        return "a softmax over one expert has no gradient; set moe_router_pre_softmax"
    return None


_NO_GROUPS: Mapping[str, object] = {"moe_router_group_topk": None, "moe_router_num_groups": None}


@rule("M14", TC, fix=[{"moe_router_topk_limited_devices": None}])
def one_group_limit(c: Any) -> str | None:
    """moe_router_group_topk with the deprecated moe_router_topk_limited_devices."""
    if c.moe_router_group_topk and c.moe_router_topk_limited_devices:
        return "moe_router_topk_limited_devices is the old name of moe_router_group_topk"
    return None


@rule("M14", TC, fix=[_NO_GROUPS])
def group_limited_routing_fits(c: Any) -> str | None:
    """moe_router_group_topk without groups, groups that do not divide the experts, or more chosen
    groups than there are."""
    chosen, groups = c.moe_router_group_topk, c.moe_router_num_groups
    if not chosen or c.moe_router_topk_limited_devices:
        return None
    if not groups:
        return "choosing groups of experts needs moe_router_num_groups"
    if c.num_moe_experts is not None and c.num_moe_experts % groups:
        return f"{c.num_moe_experts} experts cannot form {groups} groups"
    if chosen > groups:
        return f"{chosen} groups cannot be chosen out of {groups}"
    return None


@rule("V02", TC, fix=[_NO_GROUPS])
def group_limited_routing_needs_experts(c: Any) -> str | None:
    """moe_router_group_topk on a dense model: upstream crashes in its own check."""
    if c.num_moe_experts is None and c.moe_router_group_topk and c.moe_router_num_groups:
        return "choosing groups of experts needs experts"
    return None


@rewrite("M15", "moe_router_group_topk", TC)
def old_device_limit_becomes_group_limit(c: Any) -> object:
    """moe_router_topk_limited_devices (deprecated) sets moe_router_group_topk."""
    limit = c.moe_router_topk_limited_devices
    return limit if limit and not c.moe_router_group_topk else UNCHANGED


@rewrite("M15", "moe_router_num_groups", TC)
def old_device_limit_sets_groups(c: Any) -> object:
    """moe_router_topk_limited_devices (deprecated) makes one group per expert-parallel rank."""
    limit = c.moe_router_topk_limited_devices
    old = limit and not c.moe_router_group_topk
    return c.expert_model_parallel_size if old else UNCHANGED


@rule(
    "M16",
    TC,
    fix=[{"moe_router_score_function": "sigmoid"}, {"moe_router_enable_expert_bias": False}],
)
def expert_bias_needs_sigmoid(c: Any) -> str | None:
    """moe_router_enable_expert_bias with a score function other than sigmoid (or, from 0.18,
    sqrtsoftplus)."""
    allowed = ("sigmoid", "sqrtsoftplus") if c.minor >= 18 else ("sigmoid",)
    if c.moe_router_enable_expert_bias and c.moe_router_score_function not in allowed:
        return f"expert bias needs moe_router_score_function {' or '.join(allowed)}"
    return None


@rule("M17", TC, fix=[{"add_bias_linear": False}, {"expert_tensor_parallel_size": 1}])
def expert_bias_needs_whole_experts(c: Any) -> str | None:
    """Experts with add_bias_linear (the default) and expert tensor parallelism."""
    if c.num_moe_experts is None or not c.add_bias_linear:
        return None
    if c.effective_expert_tensor_parallel_size != 1:
        return "experts with bias cannot be split over tensor ranks; set add_bias_linear to false"
    return None


@rule("M18", TC, fix=[{"moe_token_dispatcher_type": "alltoall"}, {"variable_seq_lengths": False}])
def allgather_needs_fixed_lengths(c: Any) -> str | None:
    """The allgather dispatcher (the default) with variable_seq_lengths."""
    if c.moe_token_dispatcher_type == "allgather" and c.variable_seq_lengths:
        return "the allgather dispatcher cannot handle sequences of varying length"
    return None


@rule("M19", TC, fix=[{"moe_permute_fusion": False}])
def fused_permutation_needs_te(c: Any) -> str | None:
    """moe_permute_fusion on a machine without the kernels of Transformer Engine 2.1."""
    if c.moe_permute_fusion and c.machine_te < (2, 1):
        return "fused permutation needs Transformer Engine 2.1"
    return None


@rule("M30", LAYER + ".forward", fix=[{"sequence_parallel": True}])
def experts_with_tensor_parallel_need_sequence_parallel(c: Any) -> str | None:
    """Experts with tensor parallelism and without sequence_parallel: the first step fails."""
    if not c.num_moe_experts or c.tensor_model_parallel_size <= 1 or c.sequence_parallel:
        return None
    return (
        "MoE training with tensor parallelism raises in its first forward without sequence_parallel"
    )


_RANK_CAPACITY_OFF: Mapping[str, object] = {
    "moe_expert_rank_capacity_factor": None,
    "moe_paged_stash": False,
}


@rule("M36", TC, fix=[_RANK_CAPACITY_OFF], since="0.18.0")
def rank_capacity_needs_fused_dispatch(c: Any) -> str | None:
    """moe_expert_rank_capacity_factor without the op fuser or a fitting backend."""
    if c.moe_expert_rank_capacity_factor is None:
        return None
    backend = c.effective_flex_backend
    if c.minor >= 19 and backend not in ("hybridep", "ncclep"):
        return f"moe_expert_rank_capacity_factor needs backend hybridep or ncclep, not {backend}"
    if c.minor == 18 and backend != "hybridep":
        return f"moe_expert_rank_capacity_factor needs backend hybridep, not {backend}"
    if backend == "hybridep" and not c.use_transformer_engine_op_fuser:
        return "moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser"
    return None


_SINGLE_OFF: Mapping[str, object] = {
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
}


@rule("M37", TC, fix=[_SINGLE_OFF], since="0.18.0")
def single_grouped_parameters_need_grouped_gemm(c: Any) -> str | None:
    """One parameter for all experts without grouped gemm or Transformer Engine 2.14."""
    if not (c.moe_single_grouped_weight or c.moe_single_grouped_bias):
        return None
    if not c.moe_grouped_gemm:
        return "one parameter for all experts needs moe_grouped_gemm"
    if c.te < (2, 14):
        return "one parameter for all experts needs Transformer Engine 2.14"
    return None


@rule("M37", TC, fix=[{"moe_single_grouped_weight": False}], since="0.18.0")
def single_grouped_weight_needs_recipe(c: Any) -> str | None:
    """moe_single_grouped_weight with an unfit precision or (0.19) without the op fuser."""
    if not c.moe_single_grouped_weight:
        return None
    if c.minor == 18:
        fits = c.fp8 and not c.fp4 and c.fp8_recipe == "mxfp8"
        return None if fits else "moe_single_grouped_weight needs fp8 with recipe mxfp8"
    if (c.fp8 and c.fp8_recipe != "mxfp8") or (c.fp4 and c.fp4_recipe != "nvfp4"):
        return "moe_single_grouped_weight needs bf16, mxfp8 or nvfp4 weights"
    if not c.use_transformer_engine_op_fuser:
        return "moe_single_grouped_weight needs use_transformer_engine_op_fuser"
    return None


@rule("M37", TC, fix=[{"moe_single_grouped_bias": False}], since="0.18.0")
def single_grouped_bias_needs_bias(c: Any) -> str | None:
    """moe_single_grouped_bias without add_bias_linear."""
    if c.moe_single_grouped_bias and not c.add_bias_linear:
        return "moe_single_grouped_bias needs add_bias_linear"
    return None


@rule("M38", TC, fix=[{"moe_flex_dispatcher_backend": "deepep"}], since="0.19.2")
def ncclep_needs_flex(c: Any) -> str | None:
    """The ncclep backend with a dispatcher other than flex."""
    if c.effective_flex_backend == "ncclep" and c.moe_token_dispatcher_type != "flex":
        return "backend ncclep works only with the flex dispatcher"
    return None


@rule(
    "M39",
    TC,
    fix=[{"moe_deepep_num_sms": None, "moe_hybridep_num_sms": None}],
    since="0.19.2",
)
def old_sm_counts_agree(c: Any) -> str | None:
    """The two deprecated SM counts differ and the new one is not set."""
    old = {c.moe_deepep_num_sms, c.moe_hybridep_num_sms} - {None}
    if len(old) > 1 and c.moe_flex_dispatcher_num_sms is None:
        return "moe_deepep_num_sms and moe_hybridep_num_sms differ; set moe_flex_dispatcher_num_sms"
    return None


@rewrite("M39", "moe_flex_dispatcher_num_sms", TC, since="0.19.2")
def old_sm_count_moves(c: Any) -> object:
    """A deprecated SM count moves to moe_flex_dispatcher_num_sms."""
    if c.moe_flex_dispatcher_num_sms is not None:
        return UNCHANGED
    old = c.moe_deepep_num_sms if c.moe_deepep_num_sms is not None else c.moe_hybridep_num_sms
    return UNCHANGED if old is None else old


@derived
def builds_experts(c: Any) -> bool:
    """Whether any MoE layer is built."""
    return bool(c.num_moe_experts and c.num_moe_experts > 0)


@rule(
    "M40",
    DISPATCHER,
    fix=[{"moe_token_dispatcher_type": "alltoall"}, {"moe_flex_dispatcher_backend": "hybridep"}],
)
def deepep_needs_several_ranks(c: Any) -> str | None:
    """deepep (0.19: or ncclep) with one expert tensor x expert rank."""
    if not c.builds_experts or c.moe_token_dispatcher_type != "flex":
        return None
    backends = ("deepep", "ncclep") if c.minor >= 19 else ("deepep",)
    ranks = c.effective_expert_tensor_parallel_size * c.expert_model_parallel_size
    if c.effective_flex_backend in backends and ranks <= 1:
        return f"backend {c.effective_flex_backend} needs expert tensor x expert ranks above 1"
    return None


@rule(
    "M40",
    DISPATCHER,
    kind="advice",
    doomed=True,
    fix=[{"moe_token_dispatcher_type": "alltoall"}],
    until="0.17.0",
)
def early_flex_dispatcher_needs_several_ranks(c: Any) -> str | None:
    """Before 0.18 the flex dispatcher asserts more than one rank for every backend, when the model
    is built."""
    if not c.builds_experts or c.moe_token_dispatcher_type != "flex":
        return None
    ranks = c.effective_expert_tensor_parallel_size * c.expert_model_parallel_size
    if c.effective_flex_backend != "deepep" and ranks <= 1:
        return "the flex dispatcher of this version is built only with several expert ranks"
    return None


@rule("M41", LAYER + ".__init__", fix=[{"moe_token_dispatcher_type": "alltoall"}])
def dispatcher_is_known(c: Any) -> str | None:
    """moe_token_dispatcher_type is unknown (alltoall_seq is gone)."""
    if c.builds_experts and c.moe_token_dispatcher_type not in ("allgather", "alltoall", "flex"):
        return f"no dispatcher is called {c.moe_token_dispatcher_type!r}"
    return None


@rule(
    "M42",
    "transformer/moe/experts.py: TEGroupedMLP.__init__",
    fix=[{"bias_dropout_fusion": False}, {"add_bias_linear": False}],
)
def grouped_experts_with_bias_exclude_fused_dropout(c: Any) -> str | None:
    """Grouped experts of Transformer Engine with add_bias_linear and bias_dropout_fusion."""
    if not c.builds_experts or not c.moe_grouped_gemm:
        return None
    grouped = c.transformer_impl == "transformer_engine" and c.add_bias_linear
    if grouped and c.bias_dropout_fusion:
        return "grouped experts with bias do not support bias_dropout_fusion"
    return None
