"""Published rows as launches: what was published, joined with the launch facts of its source.

`launch_of` knows the sources by the kind in a row's id. Facts that a source's rows leave out stand
as data in `tuner/validation/data/`, with their origin; what nobody published is filled in and
named in `Launch.assumptions`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.errors import InputError
from tuner.hardware import get_gpu
from tuner.validation.bridge import bridge_launch
from tuner.validation.hagemann import hagemann_launch
from tuner.validation.launch import Launch, UnmodelledError
from tuner.validation.megatron_lm import (
    GPT2_VOCABULARY,
    config_fields,
    model_fields,
    precision_of,
)
from tuner.validation.published import source_of

_ROW_OPTIONS = {
    # a row's field: the Megatron-LM option it was published as
    "seq_length": "seq-length",
    "mbs": "micro-batch-size",
    "gbs": "global-batch-size",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "sequence_parallel": "sequence-parallel",
    "distributed_optimizer": "use-distributed-optimizer",
    "recompute_granularity": "recompute-granularity",
    "recompute_modules": "recompute-modules",
    "recompute_method": "recompute-method",
    "recompute_num_layers": "recompute-num-layers",
    "cuda_graph_impl": "cuda-graph-impl",
    "cuda_graph_scope": "cuda-graph-scope",
    "pp_layout": "pipeline-model-parallel-layout",
}
_ARCH_OPTIONS = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "kv_channels": "kv-channels",
    "vocab_size": "vocab-size",
    "num_moe_experts": "num-experts",
    "moe_router_topk": "moe-router-topk",
    "moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "moe-shared-expert-intermediate-size",
    "moe_layer_freq": "moe-layer-freq",
    "moe_latent_size": "moe-latent-size",
    "multi_latent_attention": "multi-latent-attention",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_head_dim": "qk-head-dim",
    "qk_pos_emb_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
    "mtp_layers": "mtp-num-layers",
    "hybrid_pattern": "hybrid-layer-pattern",
}
_POSSIBLE_UTILISATION = {"ampere": 0.67, "hopper": 0.48, "blackwell": 0.4}
"""Largest share of the bf16 peak that published runs reached; bounds unpublished GPU counts."""

_LTS_TRANSFORMER_ENGINE = "2.2.0"
"""Megatron-LM's long-term-support container: before dummy weight gradients were cached."""


def launch_of(row: Mapping[str, Any]) -> Launch:
    """The launch that a row describes. Raises UnmodelledError with the reason where it cannot."""
    convert = _CONVERTERS.get(source_of(row))
    if convert is None:
        raise UnmodelledError(_why_unknown(row))
    try:
        return convert(row)
    except InputError as error:
        raise UnmodelledError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise UnmodelledError(f"not enough of the configuration is published ({error})") from error


def _why_unknown(row: Mapping[str, Any]) -> str:
    framework = row.get("framework") or "unknown"
    return f"no launch facts for this kind of source (framework: {framework})"


def _golden_launch(row: Mapping[str, Any]) -> Launch:
    """A functional test of Megatron-LM: its options from the test's own file where known."""
    match = re.search(r"test_cases/(.+)/golden", row["source"])
    test = _tests().get(match[1]) if match else None
    if test is not None:
        options, environment = dict(test["options"]), dict(test["environment"])
        if not _is_of_old_container(row, options):
            return _megatron_lm_launch(row, options, environment)
        launch = _megatron_lm_launch(row, options | {"attention-backend": "unfused"}, environment)
        return _with_assumptions(launch, "unfused attention (container of its time)")
    options = _options_of_row(row)
    environment = {k: str(v) for k, v in options.pop("ENV", {}).items()}
    launch = _megatron_lm_launch(row, options, environment)
    note = "unpublished options at Megatron-LM's defaults"
    return _with_assumptions(launch, note)


def _is_of_old_container(row: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a deterministic run had unfused attention only.

    Tests that no longer run (their GPU count is in no recipe) keep the values of the container of
    their time; the long-term-support one had no deterministic fused or flash attention then.
    """
    retired = row.get("num_gpus") is None and _is_lts(row)
    return retired and bool(options.get("deterministic-mode"))


def _is_lts(row: Mapping[str, Any]) -> bool:
    return str(row.get("source_version")).endswith("lts")


def _simumax_launch(row: Mapping[str, Any]) -> Launch:
    facts = _yaml("simumax_launch.yaml")
    options = dict(facts["common"])
    if row["arch"].get("multi_latent_attention"):
        options |= facts["latent_attention"]
    if row["arch"].get("num_moe_experts"):
        options |= facts["experts"]
    published = _options_of_row(row)
    if not (row.get("extra_config") or {}).get("cross_entropy_fusion"):
        del options["cross-entropy-loss-fusion"]
    options |= {name: value for name, value in published.items() if value is not None}
    options["moe-router-group-topk"] = options["moe-router-num-groups"] = None
    if row.get("cp", 1) > 1:
        options["cp-comm-type"] = row["extra_config"].get("cp_comm_type") or "a2a"
    return _megatron_lm_launch(row, options, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, te="2.11.0")


def _options_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM options of a row's own fields."""
    arch = row["arch"]
    options = {option: row.get(field) for field, option in _ROW_OPTIONS.items()}
    options |= {option: arch.get(field) for field, option in _ARCH_OPTIONS.items()}
    options = {option: value for option, value in options.items() if value is not None}
    if arch.get("num_query_groups"):
        options |= {"group-query-attention": True, "num-query-groups": arch["num_query_groups"]}
    options["swiglu"] = bool(arch.get("gated_linear_unit"))
    options["squared-relu"] = arch.get("activation") == "squared_relu"
    options["disable-bias-linear"] = arch.get("add_bias_linear") is False
    shared = arch.get("share_embeddings_and_output_weights")
    options["untie-embeddings-and-output-weights"] = shared is False
    options.setdefault("max-position-embeddings", row.get("seq_length"))
    precision = str(row.get("precision") or "bf16")
    options["fp16" if precision == "fp16" else "bf16"] = True
    options |= _PRECISIONS.get(precision, {})
    fsdp = row.get("fsdp") or {}
    if fsdp.get("use_megatron_fsdp"):
        options["use-megatron-fsdp"] = True
        options["data-parallel-sharding-strategy"] = fsdp.get("sharding_strategy")
    if row.get("fine_grained_offload_modules"):
        options["fine-grained-activation-offloading"] = True
        options["offload-modules"] = list(row["fine_grained_offload_modules"])
    dispatcher = row.get("dispatcher") or {}
    options["moe-token-dispatcher-type"] = dispatcher.get("type")
    if dispatcher.get("flex_backend"):
        options["moe-flex-dispatcher-backend"] = dispatcher["flex_backend"]
    options |= row.get("overlap") or {}
    options |= row.get("extra_config") or {}
    chunks = row.get("vpp") or 1
    if chunks > 1:
        options["num-virtual-stages-per-pipeline-rank"] = chunks
    return options


_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8_cs": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "fp8_ds": {"fp8-format": "hybrid", "fp8-recipe": "delayed"},
    "fp8_blockwise": {"fp8-format": "e4m3", "fp8-recipe": "blockwise"},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
}


def _megatron_lm_launch(
    row: Mapping[str, Any],
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    te: str | None = None,
) -> Launch:
    options = dict(options)
    if options.get("vocab-size") is None and row["arch"].get("vocab_size"):
        options["vocab-size"] = row["arch"]["vocab_size"]
    options.setdefault("merge-file", "gpt2" if row["arch"].get("vocab_size") is None else None)
    assumptions = []
    if options.get("vocab-size") is None and "tokenizer-model" not in options:
        assumptions.append(f"vocabulary of {GPT2_VOCABULARY} (GPT-2)")
    model, config = model_fields(options), config_fields(options)
    world_size, note = _world_size(row, config)
    if note:
        assumptions.append(note)
    batch = options.get("global-batch-size") or row.get("gbs") or _first_batch(options)
    return Launch(
        model=model,
        config=config,
        world_size=world_size,
        seq_length=int(options["seq-length"]),
        global_batch_size=int(batch),
        gpu=row["gpu"],
        precision=precision_of(options),
        gpus_per_node=row.get("gpus_per_node") or 8,
        link_domain_gpus=row.get("nvlink_domain"),
        environment=dict(environment),
        te_version=te or (_LTS_TRANSFORMER_ENGINE if _is_lts(row) else None),
        assumptions=tuple(assumptions),
    )


def _first_batch(options: Mapping[str, Any]) -> int:
    """The first global batch of `--step-batch-size-schedule`, e.g. "0:384 200B:768"."""
    return int(str(options["step-batch-size-schedule"]).split()[0].split(":")[1])


def _world_size(row: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, str | None]:
    """GPUs of the run. Where unpublished: the fewest whole nodes that the step time allows."""
    if row.get("num_gpus"):
        return int(row["num_gpus"]), None
    parts = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    size = 1
    for part in parts:
        size *= int(config.get(part) or 1)
    experts = int(config.get("expert_model_parallel_size") or 1)
    expert_ranks = experts * int(
        config.get("expert_tensor_parallel_size") or config.get("tensor_model_parallel_size") or 1
    )
    stages = int(config.get("pipeline_model_parallel_size") or 1)
    needed = max(size, expert_ranks * stages, row.get("gpus_per_node") or 8, _busy_gpus(row))
    most = _most_gpus(row, config, size)
    world = size
    while world < min(needed, most) or world % (expert_ranks * stages):
        world *= 2
    return world, f"{world} GPUs (not published: the fewest that the step time allows)"


def _most_gpus(row: Mapping[str, Any], config: Mapping[str, Any], size: int) -> float:
    """GPUs that the global batch can keep busy with one micro-batch each."""
    if not row.get("gbs"):
        return math.inf
    return size * row["gbs"] // int(config["micro_batch_size"])


def _busy_gpus(row: Mapping[str, Any]) -> int:
    """GPUs that the published step time needs at a possible utilisation."""
    arch, seconds = row["arch"], (row["measured"].get("step_time_ms") or 0) / 1e3
    batch = row.get("gbs") or 384
    if not seconds or not arch.get("hidden_size"):
        return 1
    width = arch.get("ffn_hidden_size") or 4 * arch["hidden_size"]
    matrices = 3 if arch.get("gated_linear_unit") else 2
    active = arch.get("moe_router_topk") or 1
    weights = arch["num_layers"] * (
        matrices * width * arch["hidden_size"] * active + 3 * arch["hidden_size"] ** 2
    )
    work = 6 * weights * batch * row["seq_length"]
    gpu = get_gpu(row["gpu"])
    rate = _POSSIBLE_UTILISATION.get(gpu.architecture, 0.5) * gpu.peak_flops["bf16"]
    return int(work / seconds / rate)


def _with_assumptions(launch: Launch, *notes: str) -> Launch:
    return dataclasses.replace(launch, assumptions=(*launch.assumptions, *notes))


_CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Launch]] = {
    "mcore-golden": _golden_launch,
    "simumax": _simumax_launch,
    "mbridge-card": bridge_launch,
    "mbridge-skill": bridge_launch,
    "mbridge-perf": bridge_launch,
    "aleph": hagemann_launch,
}


@cache
def _tests() -> dict[str, Any]:
    path = resources.files("tuner.validation") / "data" / "megatron_lm_tests.json.gz"
    tests: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))["tests"]
    return tests


@cache
def _yaml(name: str) -> dict[str, Any]:
    text = (resources.files("tuner.validation") / "data" / name).read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data
