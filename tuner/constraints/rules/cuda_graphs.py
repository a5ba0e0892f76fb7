"""CUDA graphs: spellings, modules and what a captured region excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

SPELLING = "transformer/cuda_graph_config.py: normalize_cuda_graph_modules"
GRAPHS = "transformer/cuda_graphs.py: TECudaGraphHelper.__init__"

MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
RENAMED = ("full_iteration", "full_iteration_inference")
OFF: Mapping[str, object] = {"cuda_graph_impl": "none"}


def allowed_modules(minor: int) -> tuple[str, ...]:
    """Names the region field may hold in one version, translated old names included."""
    return MODULES + (RENAMED[:1] if minor == 16 else RENAMED)


def region_field(minor: int) -> str:
    """The field that names captured modules in one version."""
    return "cuda_graph_scope" if minor < 18 else "cuda_graph_modules"


def _as_list(value: Any, minor: int) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return value.split(",") if value or minor < 18 else []
    return list(value)


@derived
def migrated_graph_impl(c: Any) -> str:
    """cuda_graph_impl after the two deprecated switches."""
    if c.external_cuda_graph:
        return "transformer_engine"
    return "local" if c.enable_cuda_graph else str(c.cuda_graph_impl)


@derived
def listed_graph_modules(c: Any) -> list[str]:
    """Names in the region field, whichever of the two spellings is used."""
    if c.minor < 18 or c.cuda_graph_scope is not None:
        return _as_list(c.cuda_graph_scope, c.minor)
    return _as_list(c.cuda_graph_modules, c.minor)


@derived
def renamed_graph_modules(c: Any) -> list[str]:
    """Old names of 0.16 and 0.17 that 0.18 and later translate into other fields."""
    if c.minor < 18 or "full" in c.listed_graph_modules:
        return []
    return [name for name in c.listed_graph_modules if name in RENAMED]


@derived
def effective_cuda_graph_impl(c: Any) -> str:
    """cuda_graph_impl as the checks see it."""
    return (
        "full_iteration" if "full_iteration" in c.renamed_graph_modules else c.migrated_graph_impl
    )


@derived
def effective_graph_modules(c: Any) -> list[str]:
    """Captured modules as the checks see them; empty means the whole layer."""
    if "full" in c.listed_graph_modules:
        return []
    modules = [m for m in c.listed_graph_modules if m not in c.renamed_graph_modules]
    if c.effective_cuda_graph_impl == "local" and (
        "moe_router" in modules or "moe_preprocess" in modules
    ):
        modules += [m for m in ("moe_router", "moe_preprocess") if m not in modules]
    return modules


@derived
def per_layer_graph(c: Any) -> bool:
    """Whether graphs of layers or of parts of layers are captured."""
    return c.effective_cuda_graph_impl in ("local", "transformer_engine")


@derived
def full_iteration(c: Any) -> bool:
    """Whether one graph holds the whole iteration."""
    if c.minor >= 18:
        return c.effective_cuda_graph_impl == "full_iteration"
    return c.effective_cuda_graph_impl != "none" and "full_iteration" in c.effective_graph_modules


@derived
def whole_layer_captured(c: Any) -> bool:
    """Whether a graph holds everything in a layer."""
    return c.full_iteration or not c.effective_graph_modules


def captures(c: Any, module: str) -> bool:
    """Whether a graph holds one module, through its name or through the whole layer."""
    return c.whole_layer_captured or module in c.effective_graph_modules


@derived
def effective_inference_scope(c: Any) -> str:
    """inference_cuda_graph_scope with its default and the translated old name."""
    impl = c.effective_cuda_graph_impl
    if "full_iteration_inference" in c.renamed_graph_modules and c.migrated_graph_impl != "none":
        return "block"
    if c.inference_cuda_graph_scope is None:
        return "layer" if impl == "local" else "none"
    return str(c.inference_cuda_graph_scope)


def without(*names: str) -> Any:
    """A fix that drops modules from the captured region, or the graphs when none stays."""

    def fix(c: Any) -> Mapping[str, object]:
        rest = [m for m in c.effective_graph_modules if m not in names]
        return {region_field(c.minor): rest} if rest else OFF

    return fix


@rule("G01", TC, fix=[OFF, {"cuda_graph_impl": "transformer_engine"}])
def graph_implementation_is_known(c: Any) -> str | None:
    """cuda_graph_impl is unknown to this version."""
    allowed = ["none", "local", "transformer_engine"] + ["full_iteration"] * (c.minor >= 18)
    if c.migrated_graph_impl in allowed:
        return None
    if c.minor >= 18 and c.effective_cuda_graph_impl == "full_iteration":
        return None
    return f"cuda_graph_impl {c.cuda_graph_impl!r} is not one of {', '.join(allowed)}"


def _known_modules(c: Any) -> Mapping[str, object]:
    known = [m for m in c.listed_graph_modules if m in allowed_modules(c.minor)]
    return {region_field(c.minor): known} if known else OFF


@rule("G02", SPELLING, fix=[_known_modules, {"cuda_graph_scope": None}])
def graph_modules_are_known(c: Any) -> str | None:
    """The captured region names a module this version does not know (a bare KeyError)."""
    if "full" in c.listed_graph_modules:
        return None
    unknown = [m for m in c.listed_graph_modules if m not in allowed_modules(c.minor)]
    if unknown:
        known = ", ".join(allowed_modules(c.minor))
        return f"unknown graph modules {', '.join(map(repr, unknown))}; choose from {known}"
    return None


@rule("G03", SPELLING, fix=[lambda c: {region_field(c.minor): []}])
def full_scope_stands_alone(c: Any) -> str | None:
    """The deprecated name full together with other modules."""
    if "full" in c.listed_graph_modules and len(c.listed_graph_modules) > 1:
        return "full means the whole layer and cannot be combined with parts of it"
    return None


@derived
def region_is_dropped(c: Any) -> bool:
    """Megatron Bridge from 0.4 on clears the region of a run without graphs (rule G35)."""
    return bool(c.frontend == "bridge" and c.minor >= 17 and c.effective_cuda_graph_impl == "none")


def _region_after(c: Any, field: str) -> object:
    """The value of the region field after upstream has normalised it."""
    given = getattr(c, field)
    if c.region_is_dropped or list(c.effective_graph_modules) == given:
        return UNCHANGED
    return list(c.effective_graph_modules)


@rewrite("G04", "cuda_graph_scope", TC, until="0.17.0")
def region_is_normalised_before_18(c: Any) -> object:
    """The region becomes a list: full is the empty list, and local graphs take router and
    preprocess together."""
    return _region_after(c, "cuda_graph_scope")


@rewrite("G04", "cuda_graph_modules", TC, since="0.18.0")
def region_is_normalised(c: Any) -> object:
    """The region becomes a list: full is the empty list, names of 0.16 move to other fields, and
    local graphs take router and preprocess together."""
    return _region_after(c, "cuda_graph_modules")


@rule("G05", TC, fix=[{"cuda_graph_scope": None}], since="0.18.0")
def one_spelling_of_the_region(c: Any) -> str | None:
    """cuda_graph_scope (deprecated) together with cuda_graph_modules."""
    modules = c.cuda_graph_modules
    if c.cuda_graph_scope is not None and not (modules in ("full", None) or modules == []):
        return "cuda_graph_scope is the old name of cuda_graph_modules; set only the new one"
    return None


@rewrite("G06", "cuda_graph_scope", TC, since="0.18.0")
def old_region_moves_to_new_field(c: Any) -> object:
    """cuda_graph_scope (deprecated) moves to cuda_graph_modules."""
    return None


@rewrite("G07", "cuda_graph_impl", TC, since="0.18.0")
def old_full_iteration_becomes_an_implementation(c: Any) -> object:
    """The old module name full_iteration becomes cuda_graph_impl full_iteration."""
    return c.effective_cuda_graph_impl if c.renamed_graph_modules else UNCHANGED


@rewrite("G12", "cuda_graph_impl", TC)
def old_switches_become_an_implementation(c: Any) -> object:
    """enable_cuda_graph and external_cuda_graph (deprecated) set cuda_graph_impl."""
    old = c.enable_cuda_graph or c.external_cuda_graph
    return c.effective_cuda_graph_impl if old else UNCHANGED


@rule("G08", SPELLING, fix=[lambda c: {"cuda_graph_modules": []}], since="0.18.0")
def old_names_are_not_mixed(c: Any) -> str | None:
    """Both old names at once, or an old name with a field that contradicts it."""
    names = set(c.renamed_graph_modules)
    if not names:
        return None
    if len(names) > 1:
        return "full_iteration and full_iteration_inference cannot be combined"
    scope, impl = c.inference_cuda_graph_scope, c.migrated_graph_impl
    iteration = names == {"full_iteration"}
    allowed = ["none", "local"] + ["full_iteration"] * iteration
    scopes = (None, "none" if iteration else "block")
    if impl not in allowed:
        return f"{names.pop()} cannot be combined with cuda_graph_impl {impl}"
    if scope not in scopes:
        return f"{names.pop()} cannot be combined with inference_cuda_graph_scope {scope}"
    return None


@rule(
    "G09",
    TC,
    fix=[{"cuda_graph_impl": "local"}, without("full_iteration")],
    until="0.17.0",
)
def full_iteration_is_local(c: Any) -> str | None:
    """full_iteration with cuda_graph_impl transformer_engine."""
    if c.effective_cuda_graph_impl == "transformer_engine" and c.full_iteration:
        return "a full-iteration graph needs cuda_graph_impl local"
    return None


@rule("G10", TC, fix=[{"cuda_graph_modules": [], "cuda_graph_scope": None}], since="0.18.0")
def full_iteration_names_no_modules(c: Any) -> str | None:
    """A full-iteration graph with modules."""
    if c.effective_cuda_graph_impl == "full_iteration" and c.effective_graph_modules:
        return "a full-iteration graph captures everything, so no modules may be listed"
    return None


@rule(
    "G11",
    TC,
    layer="given",
    fix=[{"enable_cuda_graph": False, "external_cuda_graph": False}],
)
def old_switches_are_not_mixed(c: Any) -> str | None:
    """enable_cuda_graph or external_cuda_graph with cuda_graph_impl, or both."""
    if not (c.enable_cuda_graph or c.external_cuda_graph):
        return None
    if c.cuda_graph_impl != "none":
        return "the deprecated switches cannot be combined with cuda_graph_impl"
    if c.enable_cuda_graph and c.external_cuda_graph:
        return "enable_cuda_graph and external_cuda_graph exclude each other"
    return None


@derived
def graph_checks_apply(c: Any) -> bool:
    """Whether upstream looks at the modules at all."""
    if c.minor < 18:
        return c.effective_cuda_graph_impl != "none"
    return c.per_layer_graph


@rule("G14", TC, fix=[without("moe_router", "moe_preprocess"), without("moe")])
def whole_moe_excludes_router(c: Any) -> str | None:
    """moe and moe_router both captured."""
    if c.graph_checks_apply and {"moe", "moe_router"} <= set(c.effective_graph_modules):
        return "moe already holds the router"
    return None


def _add_router(c: Any) -> Mapping[str, object]:
    return {region_field(c.minor): [*c.effective_graph_modules, "moe_router"]}


@rule("G15", TC, fix=[_add_router, without("moe_preprocess")])
def preprocess_needs_router(c: Any) -> str | None:
    """moe_preprocess captured without moe_router."""
    modules = c.effective_graph_modules
    if c.graph_checks_apply and "moe_preprocess" in modules and "moe_router" not in modules:
        return "moe_preprocess can be captured only together with moe_router"
    return None


@rule("G16", TC, fix=[without("moe", "moe_router", "moe_preprocess")])
def moe_graph_needs_experts(c: Any) -> str | None:
    """moe or moe_router captured on a model with at most one expert."""
    if not c.graph_checks_apply or (c.num_moe_experts or 0) > 1:
        return None
    if {"moe", "moe_router"} & set(c.effective_graph_modules):
        return "the model has no experts to capture"
    return None


@derived
def every_layer_is_moe(c: Any) -> bool:
    """Whether moe_layer_freq leaves no dense layer."""
    freq = c.moe_layer_freq
    return 0 not in freq if isinstance(freq, (list, tuple)) else freq == 1


@rule("G17", TC, fix=[without("mlp")])
def mlp_graph_needs_dense_layers(c: Any) -> str | None:
    """mlp captured on a model whose every layer is MoE."""
    if not c.graph_checks_apply or (c.num_moe_experts or 0) <= 1:
        return None
    if c.every_layer_is_moe and "mlp" in c.effective_graph_modules:
        return "every layer is MoE, so there is no dense mlp to capture"
    return None


@derived
def drops_and_pads(c: Any) -> bool:
    """Whether every expert gets the same number of tokens."""
    return bool(c.effective_capacity_factor is not None and c.moe_pad_expert_input_to_capacity)


@rule(
    "G18",
    TC,
    fix=[
        without("moe"),
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ],
)
def moe_graph_needs_fixed_shapes(c: Any) -> str | None:
    """moe captured without a capacity factor and padding to it."""
    if not c.graph_checks_apply or (c.num_moe_experts or 0) <= 1 or c.drops_and_pads:
        return None
    if "moe" in c.effective_graph_modules:
        return "capturing moe needs fixed shapes: a capacity factor and padding to it"
    return None


@rule("G19", TC, fix=[without("moe_preprocess"), {"moe_token_dispatcher_type": "flex"}])
def preprocess_graph_has_no_host_sync(c: Any) -> str | None:
    """moe_preprocess captured where the alltoall dispatcher must ask the host."""
    if not c.graph_checks_apply or (c.num_moe_experts or 0) <= 1 or c.drops_and_pads:
        return None
    asks_host = c.effective_capacity_factor is not None or c.moe_router_padding_for_fp8
    if c.moe_token_dispatcher_type != "alltoall" or not asks_host:
        return None
    if "moe_preprocess" in c.effective_graph_modules:
        return "the alltoall preprocess copies to the host here and cannot be captured"
    return None


def _full_iteration_graph(c: Any) -> Mapping[str, object]:
    if c.minor < 18:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
    return {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}


@rule("G20", TC, fix=[OFF, _full_iteration_graph, {"recompute_granularity": None}])
def full_recompute_needs_full_iteration_graph(c: Any) -> str | None:
    """Full recompute with graphs of layers or parts of layers."""
    if c.effective_recompute_granularity in (None, "selective"):
        return None
    if c.effective_cuda_graph_impl == "none":
        return None
    modules = c.effective_graph_modules
    alone = c.full_iteration if c.minor >= 18 else modules == ["full_iteration"]
    if not alone:
        return "full recompute works only with a full-iteration CUDA graph"
    return None


def _selective(c: Any, module: str) -> bool:
    return (
        c.effective_cuda_graph_impl != "none"
        and c.effective_recompute_granularity == "selective"
        and module in c.effective_recompute_modules
    )


def no_recompute_of(module: str) -> Any:
    """A fix that drops a module from recompute_modules."""

    def fix(c: Any) -> Mapping[str, object]:
        rest = [m for m in c.effective_recompute_modules if m != module]
        changes: dict[str, object] = {"recompute_modules": rest}
        if c.moe_layer_recompute and module == "moe":
            changes["moe_layer_recompute"] = False
        return changes

    return fix


@rule("G21", TC, fix=[no_recompute_of("moe"), without("moe_router", "moe_preprocess")])
def recomputed_moe_covers_no_graph(c: Any) -> str | None:
    """Recompute of the whole moe around a captured moe_router (transformer_engine graphs)."""
    if c.effective_cuda_graph_impl != "transformer_engine":
        return None
    if _selective(c, "moe") and "moe_router" in c.effective_graph_modules:
        return "a recomputed moe may not contain a captured router: both in or both out"
    return None


@rule("G22", TC, fix=[no_recompute_of("core_attn"), {"attention_dropout": 0.0}])
def graphed_attention_recompute_has_no_dropout(c: Any) -> str | None:
    """Recompute of core_attn inside a graph with attention_dropout."""
    if _selective(c, "core_attn") and c.attention_dropout != 0.0 and captures(c, "attn"):
        return "recompute inside a graph cannot repeat random numbers; attention_dropout must be 0"
    return None


@rule("G23", TC, fix=[no_recompute_of("mlp"), {"hidden_dropout": 0.0}])
def graphed_mlp_recompute_has_no_dropout(c: Any) -> str | None:
    """Recompute of mlp inside a graph with hidden_dropout."""
    if _selective(c, "mlp") and c.hidden_dropout != 0.0 and captures(c, "mlp"):
        return "recompute inside a graph cannot repeat random numbers; hidden_dropout must be 0"
    return None


@rule("G23", TC, fix=[no_recompute_of("moe"), {"hidden_dropout": 0.0}])
def graphed_moe_recompute_has_no_dropout(c: Any) -> str | None:
    """Recompute of moe inside a graph with hidden_dropout."""
    if _selective(c, "moe") and c.hidden_dropout != 0.0 and captures(c, "moe"):
        return "recompute inside a graph cannot repeat random numbers; hidden_dropout must be 0"
    return None


@rule("G24", TC, fix=[no_recompute_of("moe"), {"moe_input_jitter_eps": None}])
def graphed_moe_recompute_has_no_jitter(c: Any) -> str | None:
    """Recompute of moe inside a graph with moe_input_jitter_eps."""
    if _selective(c, "moe") and c.moe_input_jitter_eps is not None and captures(c, "moe"):
        return "recompute inside a graph cannot repeat random jitter"
    return None
