"""Layer-level CPU offload, fine-grained activation offload and paged stash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import derived, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

TE_OFFLOAD = "transformer_engine/pytorch/cpu_offload.py: get_cpu_offload_context"
MODULES = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
)
EXPERT_PARTS = frozenset(("expert_fc1", "moe_act", "fused_group_mlp"))
LAYERS_OFF: Mapping[str, object] = {"cpu_offloading": False}
FINE_OFF: Mapping[str, object] = {"fine_grained_activation_offloading": False}


def allowed_modules(minor: int) -> tuple[str, ...]:
    """Names offload_modules may hold in one version."""
    return MODULES + (("fused_group_mlp",) if minor >= 19 else ())


@derived
def offloaded(c: Any) -> tuple[str, ...]:
    """Modules of fine-grained offload; empty when it is off."""
    if not c.fine_grained_activation_offloading:
        return ()
    return tuple(c.offload_modules or ())


def without(*names: str) -> Any:
    """A fix that drops modules from offload_modules, or turns the offload off when none stays."""

    def fix(c: Any) -> Mapping[str, object]:
        rest = [m for m in c.offloaded if m not in names]
        if "core_attn" not in rest:
            rest = [m for m in rest if m != "attn_proj"]
        return {"offload_modules": rest} if rest else FINE_OFF

    return fix


@rule(
    "O01",
    TC,
    fix=[
        lambda c: {"cpu_offloading_num_layers": c.num_layers - 1 if c.num_layers > 1 else 0},
        LAYERS_OFF,
    ],
)
def offloaded_layers_are_fewer_than_all(c: Any) -> str | None:
    """cpu_offloading_num_layers is negative or not below num_layers."""
    count = c.cpu_offloading_num_layers
    if c.cpu_offloading and (count < 0 or count >= c.num_layers):
        return f"0 to {c.num_layers - 1} of {c.num_layers} layers can be offloaded, got {count}"
    return None


@rule("O02", TC, fix=[LAYERS_OFF])
def layer_offload_excludes_pipeline(c: Any) -> str | None:
    """cpu_offloading with more than one pipeline stage."""
    if c.cpu_offloading and c.pipeline_model_parallel_size > 1:
        return "layer-level CPU offload does not work with pipeline parallelism"
    return None


@rule("O03", TC, fix=[LAYERS_OFF, {"recompute_granularity": None}])
def layer_offload_excludes_recompute(c: Any) -> str | None:
    """cpu_offloading with any recompute, even when only weights are offloaded."""
    if c.cpu_offloading and c.recompute_granularity is not None:
        return "layer-level CPU offload does not work with activation recompute"
    return None


@rule("O05", TC, fix=[LAYERS_OFF, FINE_OFF])
def fine_offload_excludes_layer_offload(c: Any) -> str | None:
    """fine_grained_activation_offloading with cpu_offloading."""
    if c.fine_grained_activation_offloading and c.cpu_offloading:
        return "choose either fine-grained offload or layer-level CPU offload"
    return None


@rule("O06", TC, fix=[FINE_OFF, {"offload_modules": ["core_attn"]}])
def fine_offload_names_modules(c: Any) -> str | None:
    """fine_grained_activation_offloading without offload_modules."""
    if c.fine_grained_activation_offloading and not c.offload_modules:
        return "fine-grained offload needs at least one module in offload_modules"
    return None


def _known_only(c: Any) -> Mapping[str, object]:
    unknown = [m for m in c.offloaded if m not in allowed_modules(c.minor)]
    changes: Mapping[str, object] = without(*unknown)(c)
    return changes


@rule("O07", TC, fix=[_known_only])
def offload_modules_are_known(c: Any) -> str | None:
    """offload_modules names a module this version does not know."""
    unknown = [m for m in c.offloaded if m not in allowed_modules(c.minor)]
    if unknown:
        known = ", ".join(allowed_modules(c.minor))
        return f"unknown offload modules {', '.join(unknown)}; choose from {known}"
    return None


@rule(
    "O08",
    TC,
    fix=[
        lambda c: {"offload_modules": [*c.offloaded, "core_attn"]},
        without("attn_proj"),
    ],
)
def projection_offload_needs_core_attention(c: Any) -> str | None:
    """offload_modules has attn_proj but not core_attn."""
    if "attn_proj" in c.offloaded and "core_attn" not in c.offloaded:
        return "the input of attn_proj is the output of core_attn, so core_attn must be listed too"
    return None


@rule("O09", TC, fix=[without(*EXPERT_PARTS)], since="0.19.2")
def expert_parts_are_not_recomputed(c: Any) -> str | None:
    """Offloading a part of the experts while the whole MoE layer is recomputed."""
    if c.effective_recompute_granularity != "selective":
        return None
    parts = EXPERT_PARTS.intersection(c.offloaded)
    if parts and "moe" in c.effective_recompute_modules:
        return (
            f"the whole MoE layer is recomputed, so {', '.join(sorted(parts))} cannot be offloaded"
        )
    return None


@rule("O10", TC, fix={"min_offloaded_tensor_size": 1048576}, since="0.19.2")
def smallest_offloaded_tensor_is_not_negative(c: Any) -> str | None:
    """A negative min_offloaded_tensor_size with fine-grained offload."""
    if c.fine_grained_activation_offloading and c.min_offloaded_tensor_size < 0:
        return "min_offloaded_tensor_size must not be negative"
    return None


@rule("O11", TC, fix={"activation_offload_fraction": 1.0}, since="0.19.2")
def offload_fraction_is_a_fraction(c: Any) -> str | None:
    """activation_offload_fraction outside 0 to 1 with fine-grained offload."""
    if c.fine_grained_activation_offloading and not 0 <= c.activation_offload_fraction <= 1:
        return "activation_offload_fraction must lie between 0 and 1"
    return None


@rule("O12", TC, fix={"delta_offload_bytes_across_pp_ranks": 0}, since="0.19.2")
def offload_delta_is_not_negative(c: Any) -> str | None:
    """A negative delta_offload_bytes_across_pp_ranks with fine-grained offload."""
    if c.fine_grained_activation_offloading and c.delta_offload_bytes_across_pp_ranks < 0:
        return "delta_offload_bytes_across_pp_ranks must not be negative"
    return None


@rule("O13", TC, fix=[without("fused_group_mlp")], since="0.19.2")
def fused_experts_need_op_fuser(c: Any) -> str | None:
    """Offload of fused_group_mlp without the op fuser."""
    if "fused_group_mlp" in c.offloaded and not c.use_transformer_engine_op_fuser:
        return "fused_group_mlp exists only with use_transformer_engine_op_fuser"
    return None


@rule("O13", TC, fix=[without("expert_fc1", "moe_act")], since="0.19.2")
def fused_experts_are_offloaded_whole(c: Any) -> str | None:
    """Offload of fused_group_mlp together with its parts."""
    parts = {"expert_fc1", "moe_act"}.intersection(c.offloaded)
    if "fused_group_mlp" in c.offloaded and parts:
        return f"fused_group_mlp already holds {', '.join(sorted(parts))}"
    return None


_STASH_OFF: Mapping[str, object] = {"moe_paged_stash": False}


@rule("O14", TC, fix=[_STASH_OFF, LAYERS_OFF], since="0.18.0")
def paged_stash_excludes_layer_offload(c: Any) -> str | None:
    """moe_paged_stash with cpu_offloading."""
    if c.moe_paged_stash and c.cpu_offloading:
        return "the paged stash does not work with layer-level CPU offload"
    return None


@rule("O14", TC, fix=[_STASH_OFF], since="0.18.0")
def paged_stash_needs_rank_capacity(c: Any) -> str | None:
    """moe_paged_stash without moe_expert_rank_capacity_factor."""
    if c.moe_paged_stash and c.moe_expert_rank_capacity_factor is None:
        return "the paged stash needs moe_expert_rank_capacity_factor"
    return None


@rule("O14", TC, fix=[_STASH_OFF], since="0.18.0")
def paged_stash_covers_expert_offload(c: Any) -> str | None:
    """moe_paged_stash with offload of the expert parts it already covers."""
    if not c.moe_paged_stash or c.offload_modules is None:
        return None
    parts = EXPERT_PARTS if c.minor >= 19 else EXPERT_PARTS - {"fused_group_mlp"}
    both = parts.intersection(c.offload_modules)
    if both:
        return f"the paged stash already covers {', '.join(sorted(both))}"
    return None


@rule("V02", TC, fix=[{"offload_modules": []}, _STASH_OFF], since="0.18.0")
def paged_stash_needs_a_module_list(c: Any) -> str | None:
    """moe_paged_stash with offload_modules None: upstream crashes in its own check."""
    if c.moe_paged_stash and c.offload_modules is None:
        return "with the paged stash offload_modules must be a list (it may be empty)"
    return None


@derived
def offload_v1(c: Any) -> bool:
    """Whether Transformer Engine uses its first offload implementation."""
    return c.te < (2, 10) or str(c.env.get("NVTE_CPU_OFFLOAD_V1", "")) == "1"


@rule(
    "O28",
    TE_OFFLOAD,
    fix=[{"cpu_offloading_activations": True}, {"cpu_offloading": False}],
)
def layer_offload_names_what(c: Any) -> str | None:
    """Neither activations nor weights to offload (with the first offload code, even when off)."""
    if c.cpu_offloading_activations or c.cpu_offloading_weights:
        return None
    if c.cpu_offloading or (c.offload_v1 and c.te != ()):
        return "Transformer Engine refuses an offload of neither activations nor weights"
    return None


@rule("O22", "transformer/transformer_block.py: TransformerBlock.__init__", fix=[LAYERS_OFF])
def layer_offload_needs_te(c: Any) -> str | None:
    """cpu_offloading without Transformer Engine."""
    if c.cpu_offloading and (c.te_missing or c.te == ()):
        return "layer-level CPU offload is done by Transformer Engine, which is not installed"
    return None
