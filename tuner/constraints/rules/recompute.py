"""Activation recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

LOOP = "transformer/transformer_block.py: TransformerBlock._checkpointed_forward"
MTP = "transformer/multi_token_prediction.py: MultiTokenPredictionLayer._checkpointed_forward"

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
OFF: Mapping[str, object] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}


def allowed_modules(minor: int) -> tuple[str, ...]:
    """Names recompute_modules may hold in one version."""
    return MODULES + (("gdn_norm_out",) if minor >= 19 else ())


@derived
def listed_modules(c: Any) -> Sequence[str]:
    """recompute_modules with its default, before moe_layer_recompute adds to it."""
    modules = c.recompute_modules
    return ("core_attn",) if modules is None else tuple(modules)


@derived
def effective_recompute_granularity(c: Any) -> str | None:
    """moe_layer_recompute turns selective recompute on, after the other recompute checks."""
    return "selective" if c.moe_layer_recompute else c.recompute_granularity


@derived
def effective_recompute_modules(c: Any) -> Sequence[str]:
    """recompute_modules as every later check sees it."""
    if c.moe_layer_recompute and "moe" not in c.listed_modules:
        return (*c.listed_modules, "moe")
    return c.listed_modules


def without_module(*names: str) -> Any:
    """A fix that drops modules from recompute_modules."""

    def fix(c: Any) -> Mapping[str, object]:
        return {"recompute_modules": [m for m in c.listed_modules if m not in names]}

    return fix


def _selective_has(c: Any, *names: str) -> bool:
    if c.recompute_granularity != "selective":
        return False
    return any(name in c.listed_modules for name in names)


@rule("R01", TC, fix=[{"recompute_granularity": "selective"}, OFF])
def granularity_is_known(c: Any) -> str | None:
    """recompute_granularity is neither full nor selective."""
    if c.recompute_granularity not in (None, "full", "selective"):
        return f"recompute_granularity {c.recompute_granularity!r} is neither full nor selective"
    return None


@rule("R02", TC, fix=[{"recompute_method": "uniform"}, {"recompute_method": None}])
def method_is_known(c: Any) -> str | None:
    """recompute_method is neither uniform nor block, with recompute on."""
    if c.recompute_granularity is None or c.recompute_method in (None, "block", "uniform"):
        return None
    return f"recompute_method {c.recompute_method!r} is neither uniform nor block"


def _whole_chunks(c: Any) -> Mapping[str, object]:
    changes: dict[str, object] = {"recompute_method": c.recompute_method or "uniform"}
    if c.recompute_num_layers is None:
        changes["recompute_num_layers"] = 1
    return changes


@rule("R03", TC, fix=[_whole_chunks, OFF])
def full_recompute_needs_method(c: Any) -> str | None:
    """Full recompute without recompute_method."""
    if c.recompute_granularity in (None, "selective") or c.recompute_method is not None:
        return None
    return "full recompute needs recompute_method uniform or block"


@rule("R04", TC, fix=[{"recompute_num_layers": 1}, OFF])
def full_recompute_needs_layer_count(c: Any) -> str | None:
    """Full recompute without recompute_num_layers."""
    if c.recompute_granularity in (None, "selective") or c.recompute_num_layers is not None:
        return None
    return "full recompute needs recompute_num_layers"


@rule("R05", TC, fix={"recompute_num_layers": None})
def selective_recompute_has_no_layer_count(c: Any) -> str | None:
    """Selective recompute with recompute_num_layers."""
    if c.recompute_granularity == "selective" and c.recompute_num_layers is not None:
        return "selective recompute acts on every layer, so recompute_num_layers must not be set"
    return None


@rule(
    "R07",
    TC,
    fix=[{"distribute_saved_activations": False}, {"sequence_parallel": False}],
)
def distributed_activations_exclude_sequence_parallel(c: Any) -> str | None:
    """distribute_saved_activations with sequence_parallel, with recompute on."""
    if c.recompute_granularity and c.distribute_saved_activations and c.sequence_parallel:
        return "sequence parallelism already splits saved activations over tensor ranks"
    return None


@rewrite("R09", "recompute_modules", TC)
def unset_modules_become_core_attention(c: Any) -> object:
    """Unset recompute_modules become [core_attn], even when recompute is off."""
    return UNCHANGED if c.recompute_modules else list(c.effective_recompute_modules)


def _known_modules(c: Any) -> Mapping[str, object]:
    allowed = allowed_modules(c.minor)
    return {"recompute_modules": [m for m in c.listed_modules if m in allowed]}


@rule("R10", TC, fix=[_known_modules])
def modules_are_known(c: Any) -> str | None:
    """Selective recompute names a module this version does not know."""
    if c.recompute_granularity != "selective":
        return None
    unknown = [m for m in c.listed_modules if m not in allowed_modules(c.minor)]
    if unknown:
        known = ", ".join(allowed_modules(c.minor))
        return f"unknown recompute modules {', '.join(unknown)}; choose from {known}"
    return None


@rule("R11", TC, fix=[without_module("moe_act"), {"moe_grouped_gemm": True}])
def expert_activation_needs_grouped_gemm(c: Any) -> str | None:
    """Selective recompute of moe_act without moe_grouped_gemm."""
    if _selective_has(c, "moe_act") and not c.moe_grouped_gemm:
        return "recomputing moe_act works only with moe_grouped_gemm (and experts)"
    return None


@rule("R12", TC, fix=[without_module("mla_up_proj")])
def mla_projection_needs_mla(c: Any) -> str | None:
    """Selective recompute of mla_up_proj without multi-latent attention."""
    if _selective_has(c, "mla_up_proj") and not c.multi_latent_attention:
        return "mla_up_proj exists only with multi_latent_attention"
    return None


@rule(
    "R14",
    TC,
    fix=[without_module("shared_experts"), {"moe_shared_expert_overlap": False}],
)
def shared_experts_are_not_overlapped(c: Any) -> str | None:
    """Selective recompute of shared_experts with moe_shared_expert_overlap."""
    shared = c.moe_shared_expert_intermediate_size is not None and c.moe_shared_expert_overlap
    if _selective_has(c, "shared_experts") and shared:
        return "shared experts that overlap with communication cannot be recomputed"
    return None


@rule("R15", TC, fix=[{"fp8_recipe": "tensorwise"}, without_module("moe_act", "layernorm")])
def delayed_scaling_excludes_output_recompute(c: Any) -> str | None:
    """Selective moe_act or layernorm with fp8 and the delayed recipe (the default)."""
    if _selective_has(c, "moe_act", "layernorm") and c.fp8 and c.fp8_recipe == "delayed":
        return "fp8 delayed scaling cannot recompute moe_act or layernorm"
    return None


@rule("R16", TC, fix=[without_module("moe_act", "layernorm")])
def fp8_output_recompute_needs_new_te(c: Any) -> str | None:
    """Selective moe_act or layernorm with fp8 and Transformer Engine before 2.6."""
    if _selective_has(c, "moe_act", "layernorm") and c.fp8 and c.te < (2, 6):
        return "recomputing moe_act or layernorm in fp8 needs Transformer Engine 2.6"
    return None


@rule("R17", TC, fix={"moe_layer_recompute": False})
def old_moe_switch_excludes_full(c: Any) -> str | None:
    """moe_layer_recompute with full recompute."""
    if c.moe_layer_recompute and c.recompute_granularity == "full":
        return "moe_layer_recompute (deprecated) cannot be used with full recompute"
    return None


@rewrite("R18", "recompute_modules", TC)
def old_moe_switch_adds_module(c: Any) -> object:
    """moe_layer_recompute (deprecated) adds moe to recompute_modules."""
    return list(c.effective_recompute_modules) if c.moe_layer_recompute else UNCHANGED


@rewrite("R18", "recompute_granularity", TC)
def old_moe_switch_turns_selective_on(c: Any) -> object:
    """moe_layer_recompute (deprecated) sets recompute_granularity to selective."""
    return "selective" if c.moe_layer_recompute else UNCHANGED


@rule("R19", TC, fix=[without_module("gdn_norm_out")], since="0.19.2")
def gated_norm_needs_gated_delta_net(c: Any) -> str | None:
    """Selective recompute of gdn_norm_out on a model without gated delta net."""
    variant = c.experimental_attention_variant
    if _selective_has(c, "gdn_norm_out") and variant != "gated_delta_net":
        return "gdn_norm_out exists only with experimental_attention_variant gated_delta_net"
    return None


def _full_uniform(c: Any) -> bool:
    return (
        c.effective_recompute_granularity == "full"
        and c.recompute_method == "uniform"
        and c.recompute_num_layers is not None
    )


def _fitting_chunk(c: Any) -> Mapping[str, object]:
    chunks = [layers for layers in c.chunk_layers if layers > 0]
    limit = min(c.recompute_num_layers, *chunks)
    sizes = range(limit, 0, -1)
    return {"recompute_num_layers": next(s for s in sizes if all(n % s == 0 for n in chunks))}


@rule("R24", LOOP, fix=[_fitting_chunk, {"recompute_method": "block"}], until="0.16.1")
def uniform_chunk_divides_stage(c: Any) -> str | None:
    """Uniform recompute: layers of a (virtual) stage are no multiple of the chunk."""
    if not _full_uniform(c) or c.recompute_num_layers <= 0 or not c.chunk_layers:
        return None
    chunk = c.recompute_num_layers
    odd = [layers for layers in sorted(c.chunk_layers) if layers > 0 and layers % chunk]
    if odd:
        return (
            f"chunks of {chunk} layers run past the last of {odd[0]} layers in a stage: the first "
            "forward pass ends in an IndexError"
        )
    return None


@rule("R25", LOOP, fix={"recompute_num_layers": 1})
def uniform_chunk_is_positive(c: Any) -> str | None:
    """Uniform recompute in chunks of 0 or fewer layers: the loop never ends."""
    if not _full_uniform(c) or c.recompute_num_layers > 0:
        return None
    if c.chunk_layers and max(c.chunk_layers) > 0:
        return "uniform recompute in chunks of no layers never ends: every version hangs"
    return None


@rule("R26", MTP, fix=[{"recompute_num_layers": 1}, {"recompute_method": "block"}])
def uniform_chunk_is_one_with_mtp(c: Any) -> str | None:
    """Multi-token prediction with uniform recompute in chunks other than one layer."""
    if c.mtp_num_layers and _full_uniform(c) and c.recompute_num_layers != 1:
        return "multi-token prediction layers can be recomputed only in chunks of one layer"
    return None
