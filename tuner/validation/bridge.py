"""Rows of Megatron Bridge's pages, cards and skills as launches.

The recipe's settings that a row leaves out stand in `data/bridge_recipes.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.models import ModelSpecError, get_model
from tuner.precision import PRECISION_AWARE_FIELDS
from tuner.validation.launch import Launch, UnmodelledError

_NEEDED = ("num_gpus", "seq_length", "mbs", "gbs", "tp", "pp", "precision")
_ROW_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "distributed_optimizer": "use_distributed_optimizer",
    "recompute_granularity": "recompute_granularity",
    "recompute_modules": "recompute_modules",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "cuda_graph_impl": "cuda_graph_impl",
    "cuda_graph_scope": "cuda_graph_scope",
    "pp_layout": "pipeline_model_parallel_layout",
}
_ARCH_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "gated_linear_unit",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "share_embeddings_and_output_weights",
    "add_bias_linear",
    "moe_latent_size",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
)
_FAMILY_DEFAULTS = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_HYBRID_DEFAULTS = {"position_embedding_type": "none", "add_bias_linear": False}
"""Of Bridge's `HybridModelProvider`."""
_EXTRA_PREFIXES = ("mixed_precision.", "optimizer.", "ddp.", "model.", "comm_overlap.")
_OVERLAP = "comm_overlap."
_NOT_FIELDS = ("attention", "expert_dp", "grouped_gemm", "recipe", "mtp_num_layers", "nccl_ub")
_ENVIRONMENT = re.compile(r"^[A-Z][A-Z0-9_]+$")


def bridge_launch(row: Mapping[str, Any]) -> Launch:
    """The launch of a Megatron Bridge row. Raises UnmodelledError where too little is published."""
    missing = [name for name in _NEEDED if row.get(name) is None]
    if missing:
        raise UnmodelledError(f"not published: {', '.join(missing)}")
    if row.get("task") == "lora":
        raise UnmodelledError("LoRA adapters are not modelled")
    facts = _facts()
    recipe = _recipe(row)
    config = dict(facts["defaults"])
    config |= facts.get(str(row["precision"]), {})
    config |= recipe.get("config", {})
    config |= recipe.get("tasks", {}).get(str(row.get("task")), {})
    config |= {field: row[name] for name, field in _ROW_FIELDS.items() if row.get(name) is not None}
    if (row.get("vpp") or 1) > 1:
        config["virtual_pipeline_model_parallel_size"] = row["vpp"]
    extra, environment = _extra(row)
    config |= extra | _data_overlap(row)
    config |= _offload(row) | _dispatcher(row)
    config |= _provided(config)
    if not config.get("use_precision_aware_optimizer"):
        config = {
            name: value for name, value in config.items() if name not in PRECISION_AWARE_FIELDS
        }
    notes = [f"recipe settings of {recipe['source']}" if recipe else "recipe settings at defaults"]
    if _read_before_capture(row, config):
        config["cuda_graph_impl"] = "none"
        notes.append("memory was read before layers were captured in CUDA graphs")
    return Launch(
        model=_model(row, recipe),
        config=config,
        world_size=row["num_gpus"],
        seq_length=row["seq_length"],
        global_batch_size=row["gbs"],
        gpu=row["gpu"],
        precision="bf16",
        gpus_per_node=row.get("gpus_per_node") or 8,
        link_domain_gpus=row.get("nvlink_domain"),
        environment=recipe.get("environment", {}) | environment,
        te_version=_transformer_engine(row),
        assumptions=tuple(notes),
    )


_READ_AT = re.compile(r"(?:after|in) iteration (\d+)")
_WARMUP_STEPS = 3
"""`cuda_graph_warmup_steps` of TransformerConfig: eager steps before layers are captured."""


def _read_before_capture(row: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the published peak is that of an iteration without CUDA graphs yet.

    A run that ended out of memory has no peak to compare, and is judged as it was configured.
    """
    published = row.get("measured") or {}
    if config.get("cuda_graph_impl") != "transformer_engine" or published.get("oom"):
        return False
    told = f"{published.get('mem_definition')} {published.get('notes')}"
    steps = [int(step) for step in _READ_AT.findall(told)]
    return bool(steps) and max(steps) <= config.get("cuda_graph_warmup_steps", _WARMUP_STEPS)


def _transformer_engine(row: Mapping[str, Any]) -> str | None:
    """The version that the row's commit of Bridge is locked to, where known."""
    named = str(row.get("source_version"))
    for commit, version in _facts()["transformer_engine"].items():
        if commit in named:
            return str(version)
    return None


def _recipe(row: Mapping[str, Any]) -> dict[str, Any]:
    name = str(row["model"]).lower().replace("_", "-").replace(" ", "-")
    for recipe in _facts()["recipes"]:
        if recipe["match"] in name:
            return dict(recipe)
    return {}


def _model(row: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    arch = {name: value for name, value in row["arch"].items() if value is not None}
    model = _catalogue_model(recipe.get("catalogue") or str(row["model"]))
    if not arch and not model:
        raise UnmodelledError("the architecture is not published")
    if not model:
        model = dict(_FAMILY_DEFAULTS)
        if "activation" in arch:
            model["activation_func"] = arch["activation"]
    model |= {name: arch[name] for name in _ARCH_FIELDS if name in arch}
    if arch.get("hybrid_pattern"):
        model |= {"hybrid_layer_pattern": arch["hybrid_pattern"], **_HYBRID_DEFAULTS}
        model.pop("moe_layer_freq", None)
    if arch.get("mtp_layers"):
        model["mtp_num_layers"] = arch["mtp_layers"]
    if not model.get("multi_latent_attention"):
        model.pop("multi_latent_attention", None)
    return model


def _catalogue_model(name: str) -> dict[str, Any]:
    """The fields of a model of the catalogue; empty where it has no such name."""
    try:
        return get_model(name).to_flat()
    except ModelSpecError:
        return {}


def _extra(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Further settings of a row: Megatron-Core fields, and variables of the environment."""
    fields: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for name, value in {**(row.get("overlap") or {}), **(row.get("extra_config") or {})}.items():
        for prefix in _EXTRA_PREFIXES:
            name = name.removeprefix(prefix)
        if value is None or name in _NOT_FIELDS:
            continue
        if _ENVIRONMENT.match(name):
            environment[name] = str(value)
        else:
            fields[name] = value
    if not fields.get("fp8"):
        for name in ("fp8_recipe", "fp8_param_gather", "fp8_param", "fp4_recipe"):
            fields.pop(name, None)
    return fields, environment


def _data_overlap(row: Mapping[str, Any]) -> dict[str, Any]:
    """Whether gradients are reduced and weights gathered beside passes.

    src/megatron/bridge/training/comm_overlap.py, `CommOverlapConfig.setup`: where a recipe has such
    a config and ranks share parameters, both overlap unless that config itself says otherwise; what
    the recipe's DDP config said is overwritten.
    """
    said = {**(row.get("overlap") or {}), **(row.get("extra_config") or {})}
    own = {
        name.removeprefix(_OVERLAP): value
        for name, value in said.items()
        if name.startswith(_OVERLAP)
    }
    ranks = row["num_gpus"] // (row["tp"] * row["pp"] * (row.get("cp") or 1))
    if not own or ranks < 2 or row.get("distributed_optimizer") is False:
        return {}
    wanted = {name: own.get(name) for name in ("overlap_grad_reduce", "overlap_param_gather")}
    return {name: True if value is None else value for name, value in wanted.items()}


def _offload(row: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if row.get("cpu_offloading_num_layers"):
        fields["cpu_offloading"] = True
        fields["cpu_offloading_num_layers"] = row["cpu_offloading_num_layers"]
    if row.get("fine_grained_offload_modules"):
        fields["fine_grained_activation_offloading"] = True
        fields["offload_modules"] = list(row["fine_grained_offload_modules"])
    if row.get("optimizer_offload"):
        fields["optimizer_cpu_offload"] = True
        fields["optimizer_offload_fraction"] = row["optimizer_offload"]
    fsdp = row.get("fsdp") or {}
    if fsdp.get("use_megatron_fsdp"):
        fields["use_megatron_fsdp"] = True
        fields["data_parallel_sharding_strategy"] = fsdp.get("sharding_strategy")
    return fields


def _dispatcher(row: Mapping[str, Any]) -> dict[str, Any]:
    published = row.get("dispatcher") or {}
    fields = {}
    if published.get("type"):
        fields["moe_token_dispatcher_type"] = published["type"]
    if published.get("flex_backend"):
        fields["moe_flex_dispatcher_backend"] = published["flex_backend"]
    return fields


def _provided(config: Mapping[str, Any]) -> dict[str, Any]:
    """What model providers set where a row shows the default of Megatron-Core's dataclass.

    src/megatron/bridge/models/*/*_bridge.py: every model with experts is given the all-to-all
    dispatcher and fused permutation; recipes change the dispatcher to "flex" or not at all.
    scripts/performance/utils/overrides.py: with CUDA graphs goes Transformer Engine's generator of
    random numbers. perf_recipes/*/common.py: the paged stash comes with room for half as many
    tokens again as a rank's share.
    """
    fields: dict[str, Any] = {}
    if config.get("moe_paged_stash") and not config.get("moe_expert_rank_capacity_factor"):
        fields["moe_expert_rank_capacity_factor"] = 1.5
    if config.get("moe_token_dispatcher_type") == "allgather":
        fields["moe_token_dispatcher_type"] = "alltoall"
    if config.get("moe_permute_fusion") is False:
        fields["moe_permute_fusion"] = True
    if config.get("cuda_graph_impl") not in (None, "none"):
        fields["use_te_rng_tracker"] = True
    return fields


@cache
def _facts() -> dict[str, Any]:
    path = resources.files("tuner.validation") / "data" / "bridge_recipes.yaml"
    facts: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return facts
