"""Composed memory against full dry runs, and the speed of composing.

    python benchmarks/composition.py --n 300 --seed 0 [--speed]

Draws random valid candidates of small models of many kinds, makes a full dry run of every pipeline
stage that may hold the peak, and compares the largest with the composed one. Prints one JSON
summary. `--speed` adds candidates per second over a large space and the time of its profiles.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.configuration import PRECISION_FIELDS, rule_fields
from tuner.constraints import check
from tuner.errors import InputError
from tuner.memory import dry_run
from tuner.memory.composition import ProfileSource, stage_memories
from tuner.memory.worker_pool import DryRunError
from tuner.models import ModelSpec

_LLAMA = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 5632,
    "vocab_size": 32000,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_EXPERTS = {"num_moe_experts": 16, "moe_ffn_hidden_size": 1024, "moe_router_topk": 4}
_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "num_query_groups": 16,
    "rope_type": "rope",
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "num_layers": 8,
        "hidden_size": 1536,
        "num_attention_heads": 16,
        "vocab_size": 50000,
        "max_position_embeddings": 4096,
    },
    "gqa": {**_LLAMA, "num_layers": 8},
    "tied": {
        **_LLAMA,
        "num_layers": 8,
        "qk_layernorm": True,
        "share_embeddings_and_output_weights": True,
        "vocab_size": 120000,
    },
    "windowed": {
        **_LLAMA,
        "num_layers": 8,
        "window_size": [1023, 0],
        "window_attn_skip_freq": 4,
        "activation_func": "gelu",
    },
    "mla": {**_LLAMA, **_LATENT, "num_layers": 8},
    "moe": {**_LLAMA, **_EXPERTS, "num_layers": 8},
    "moe-alternating": {
        **_LLAMA,
        **_EXPERTS,
        "num_layers": 8,
        "moe_layer_freq": 2,
        "moe_shared_expert_intermediate_size": 2048,
    },
    "mla-moe": {
        **_LLAMA,
        **_LATENT,
        **_EXPERTS,
        "num_layers": 8,
        "moe_layer_freq": [0, *[1] * 7],
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "mla-moe-mtp": {
        **_LLAMA,
        **_LATENT,
        **_EXPERTS,
        "num_layers": 8,
        "moe_layer_freq": [0, *[1] * 7],
        "moe_shared_expert_intermediate_size": 2048,
        "mtp_num_layers": 1,
    },
}
MODELS["hybrid"] = {
    **_LLAMA,
    **_EXPERTS,
    "hybrid_layer_pattern": "M*-MEM*E",
    "num_layers": 8,
    "activation_func": "squared_relu",
    "gated_linear_unit": False,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 4,
    "position_embedding_type": "none",
    "moe_shared_expert_intermediate_size": 2048,
}
WORLD_SIZE = 32
SEQ_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One drawn candidate."""

    name: str
    model: ModelSpec
    candidate: Candidate
    global_batch_size: int


def draw_cases(seed: int, count: int, models: list[str] | None = None) -> list[Case]:
    """`count` valid candidates, drawn over the models in turn."""
    rng = random.Random(seed)
    names = models or list(MODELS)
    cases: list[Case] = []
    while len(cases) < count:
        name = names[len(cases) % len(names)]
        model = ModelSpec.from_flat(MODELS[name], name)
        case = _drawn(rng, name, model)
        if case is not None:
            cases.append(case)
    return cases


def _drawn(rng: random.Random, name: str, model: ModelSpec) -> Case | None:
    flat = _draw(rng, model)
    ranks = flat["tensor_model_parallel_size"] * flat["pipeline_model_parallel_size"]
    ranks *= flat["context_parallel_size"]
    if WORLD_SIZE % ranks:
        return None
    replicas = WORLD_SIZE // ranks
    stages = flat["pipeline_model_parallel_size"]
    microbatches = rng.choice([stages, stages, 2 * stages, 3 * stages, 2 * stages + 2])
    batch = replicas * flat["micro_batch_size"] * microbatches
    candidate = Candidate.from_flat(flat)
    document = {
        **rule_fields(model, "0.16.1"),
        **PRECISION_FIELDS["bf16"],
        "world_size": WORLD_SIZE,
        "seq_length": SEQ_LENGTH,
        "global_batch_size": batch,
        **flat,
    }
    if not check(document, mcore="0.16.1", frontend="mcore").valid:
        return None
    return Case(name, model, candidate, batch)


def _draw(rng: random.Random, model: ModelSpec) -> dict[str, Any]:
    """A random flat candidate, not necessarily valid."""
    pick = rng.choice
    tensor = pick([1, 2, 4])
    flat: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": pick([1, 2, 4]),
        "context_parallel_size": pick([1, 1, 2]),
        "micro_batch_size": pick([1, 1, 2]),
        "use_distributed_optimizer": pick([True, True, False]),
        "grad_reduce_in_fp32": pick([True, False]),
    }
    flat |= _draw_pipeline(rng, model, flat["pipeline_model_parallel_size"])
    if model.num_moe_experts:
        flat["expert_model_parallel_size"] = pick([1, 2, 4, 8])
        flat["expert_tensor_parallel_size"] = pick([None, 1])
        if pick([True, False]):
            flat["moe_permute_fusion"] = True
    if flat["use_distributed_optimizer"] and pick([True, False]):
        flat["overlap_grad_reduce"] = True
        flat["overlap_param_gather"] = pick([True, False])
    if flat["use_distributed_optimizer"] and pick([True, False, False]):
        flat |= {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        }
    if pick([True, False]):
        flat |= {
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": pick(["native", "te"]),
        }
    flat |= _draw_recompute(rng, model)
    flat |= _draw_precision(rng)
    flat |= _draw_offload(rng, model, flat)
    if rng.random() < 0.15:
        flat |= {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True}
    return flat


def _draw_pipeline(rng: random.Random, model: ModelSpec, stages: int) -> dict[str, Any]:
    pick = rng.choice
    if stages == 1:
        return {}
    layers = model.num_layers
    form = pick(["even", "even", "virtual", "virtual", "ends", "accounted", "layout"])
    if form == "virtual":
        flat = {"virtual_pipeline_model_parallel_size": pick([2, 4])}
        if pick([True, False]):
            flat["microbatch_group_size_per_vp_stage"] = stages + pick([0, 1, 2])
        if pick([True, False]):
            flat |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        return flat
    if form == "ends":
        return {"num_layers_in_first_pipeline_stage": pick([1, 2, 3])}
    if form == "accounted":
        return {
            "account_for_loss_in_pipeline_split": True,
            "account_for_embedding_in_pipeline_split": True,
        }
    if form == "layout":
        chunks = stages * pick([1, 2])
        cuts = sorted(rng.sample(range(1, layers), chunks - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        parts = ["t" * size for size in sizes]
        tail = "m" * (model.mtp_num_layers or 0) + "L"
        return {"pipeline_model_parallel_layout": "E" + "|".join(parts) + tail}
    return {}


def _draw_recompute(rng: random.Random, model: ModelSpec) -> dict[str, Any]:
    pick = rng.choice
    kind = pick(["none", "selective", "selective", "full"])
    if kind == "none":
        return {}
    if kind == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": pick(["uniform", "block"]),
            "recompute_num_layers": pick([1, 1, 2, 3]),
            "distribute_saved_activations": pick([True, False, False]),
        }
    modules = ["core_attn", "layernorm"]
    if not model.add_bias_linear:  # a recomputed MLP cannot return its bias
        modules.append("mlp")
    if model.num_moe_experts:
        modules += ["moe_act", "moe"]
        if model.moe_shared_expert_intermediate_size:
            modules.append("shared_experts")
    if model.multi_latent_attention:
        modules.append("mla_up_proj")
    chosen = rng.sample(modules, min(len(modules), pick([1, 1, 2, 2, 3])))
    return {"recompute_granularity": "selective", "recompute_modules": chosen}


def _draw_precision(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.7:
        return {}
    recipe = rng.choice(["delayed", "tensorwise", "blockwise"])
    flat: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "tensorwise" and rng.random() < 0.5:
        flat |= {"first_last_layers_bf16": True}
    return flat


def _draw_offload(rng: random.Random, model: ModelSpec, flat: dict[str, Any]) -> dict[str, Any]:
    kind = rng.choice(["none"] * 4 + ["optimizer", "modules"])
    if flat["pipeline_model_parallel_size"] == 1 and rng.random() < 0.25:
        return {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": rng.choice([1, 2, 4, 7]),
            "cpu_offloading_double_buffering": rng.choice([True, False]),
        }
    if kind == "optimizer":
        return {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": rng.choice([0.25, 0.5, 1.0]),
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    if kind == "modules":
        modules = ["attn_norm", "core_attn", "attn_proj", "mlp_norm", "qkv_linear"]
        if model.num_moe_experts:
            modules += ["expert_fc1", "moe_act"]
        return {
            "fine_grained_activation_offloading": True,
            "offload_modules": rng.sample(modules, rng.choice([1, 2])),
        }
    return {}


def compare(case: Case) -> dict[str, Any]:
    """Composed and dry-run peak of one candidate, over all its stages."""
    record: dict[str, Any] = {
        "model": case.name,
        "batch": case.global_batch_size,
        "candidate": case.candidate.to_flat(),
    }
    start = time.perf_counter()
    try:
        memories = stage_memories(
            case.model,
            case.candidate,
            ProfileSource(SEQ_LENGTH),
            world_size=WORLD_SIZE,
            global_batch_size=case.global_batch_size,
        )
        record["compose_s"] = time.perf_counter() - start
        record["stages"] = [
            _stage(case, stage, int(memory.peak[0]), memory)
            for stage, memory in enumerate(memories)
        ]
    except (InputError, DryRunError) as error:
        record["skipped"] = str(error)[:300]
        return record
    record["seconds"] = time.perf_counter() - start
    dry = max(stage["dry"] for stage in record["stages"])
    composed = max(stage["composed"] for stage in record["stages"])
    record |= {"dry": dry, "composed": composed, "error": composed / dry - 1}
    return record


def _stage(case: Case, stage: int, composed: int, memory: Any) -> dict[str, Any]:
    ranks = WORLD_SIZE // case.candidate.pipeline_model_parallel_size
    replicas = range(0, ranks, case.candidate.tensor_model_parallel_size)
    runs = [
        dry_run(
            case.model,
            case.candidate,
            world_size=WORLD_SIZE,
            seq_length=SEQ_LENGTH,
            global_batch_size=case.global_batch_size,
            rank=stage * ranks + replica,
        )
        for replica in (replicas if case.candidate.splits_optimizer else replicas[:1])
    ]
    run = max(runs, key=lambda run: run.peak_allocated_bytes)
    static = sum(
        int(getattr(memory, name)[0]) for name in ("weights", "gradients", "optimizer", "other")
    )
    return {
        "stage": stage,
        "dry": run.peak_allocated_bytes,
        "composed": composed,
        "dry_static": run.static_bytes,
        "composed_static": static,
        "phase": run.trace.phase_names[run.trace.phase[run.peak_event]],
    }


def settings_of(case: dict[str, Any]) -> list[str]:
    """Names under which a case's error is filed."""
    flat = case["candidate"]
    names = [f"model {case['model']}"]
    names += [
        f"TP{flat['tensor_model_parallel_size']}",
        f"PP{flat['pipeline_model_parallel_size']}",
    ]
    for field in (
        "virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "account_for_loss_in_pipeline_split",
        "microbatch_group_size_per_vp_stage",
        "distribute_saved_activations",
        "optimizer_cpu_offload",
        "fine_grained_activation_offloading",
        "cpu_offloading",
        "expert_tensor_parallel_size",
        "use_precision_aware_optimizer",
        "cross_entropy_loss_fusion",
        "first_last_layers_bf16",
    ):
        if flat.get(field):
            names.append(field)
    if flat["context_parallel_size"] > 1:
        names.append("context_parallel_size")
    if flat.get("expert_model_parallel_size", 1) > 1:
        names.append("expert_model_parallel_size")
    if flat.get("cuda_graph_impl", "none") != "none":
        names.append(f"cuda_graph_impl {flat['cuda_graph_impl']}")
    if flat.get("fp8_recipe"):
        names.append(f"fp8 {flat['fp8_recipe']}")
    recompute = flat.get("recompute_granularity")
    names.append(f"recompute {recompute} {flat.get('recompute_method', '')}".strip())
    names += [f"recompute {name}" for name in flat.get("recompute_modules", ())]
    return names


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors over all cases, by setting, and the worst cases."""
    done = [record for record in records if "error" in record]
    by_setting: dict[str, list[float]] = defaultdict(list)
    for record in done:
        for name in settings_of(record):
            by_setting[name].append(abs(record["error"]))
    errors = [abs(record["error"]) for record in done]
    skipped: dict[str, int] = defaultdict(int)
    for record in records:
        if "skipped" in record:
            skipped[record["skipped"]] += 1
    worst = sorted(done, key=lambda record: -abs(record["error"]))[:10]
    return {
        "n": len(done),
        "mean_abs_error": sum(errors) / max(1, len(errors)),
        "max_abs_error": max(errors, default=0.0),
        "by_setting": {
            name: {"n": len(found), "mean": sum(found) / len(found), "max": max(found)}
            for name, found in sorted(by_setting.items())
        },
        "worst": [
            {name: record[name] for name in ("error", "model", "batch", "candidate", "stages")}
            for record in worst
        ],
        "skipped": dict(skipped),
    }


def speed(rows: int = 1_000_000) -> dict[str, Any]:
    """Candidates per second of one core over a space of Llama-3 70B on 1,024 GPUs."""
    import numpy as np

    from tuner.constraints.view import UNSET
    from tuner.memory.composition import compose_index, gather_profiles, index_candidates
    from tuner.models import get_model

    rng = np.random.default_rng(0)
    model = get_model("llama3-70b")
    values: dict[str, list[Any]] = {
        "tensor_model_parallel_size": [4, 8],
        "pipeline_model_parallel_size": [1, 2, 4, 8, 16],
        "virtual_pipeline_model_parallel_size": [UNSET, 5],
        "context_parallel_size": [1, 2],
        "micro_batch_size": [1, 2],
        "recompute_granularity": ["selective", "full"],
        "recompute_modules": [["core_attn"], ["mlp"]],
        "recompute_method": ["uniform", "block"],
        "recompute_num_layers": [1, 2, 4],
        "env.PYTORCH_CUDA_ALLOC_CONF": [UNSET, "expandable_segments:True"],
    }
    columns: dict[str, Any] = {
        name: (found, rng.integers(0, len(found), rows).astype(np.int32))
        for name, found in values.items()
    }
    columns["sequence_parallel"] = True
    columns["use_distributed_optimizer"] = True
    start = time.process_time()
    index = index_candidates(model, columns, world_size=1024, global_batch_size=1024)
    indexed = time.process_time() - start
    began = time.perf_counter()
    profiles = gather_profiles(model, index, ProfileSource(8192))
    profiled = time.perf_counter() - began
    start = time.process_time()
    found = compose_index(model, index, profiles, world_size=1024)
    composed = time.process_time() - start
    return {
        "rows": rows,
        "settings": len(index.settings),
        "pipelines": len(index.pipelines),
        "composed": int((found.problem < 0).sum()),
        "profiles_s": profiled,
        "candidates_per_core_second": rows / (indexed + composed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--records", type=Path, help="also write every case, one JSON a line")
    parser.add_argument("--speed", action="store_true", help="also time a large space")
    args = parser.parse_args()
    records = []
    cases = draw_cases(args.seed, args.n, args.models)
    with ThreadPoolExecutor(args.workers) as pool:
        for record in pool.map(compare, cases):
            records.append(record)
            shown = record.get("skipped") or f"{record['error']:+.3%}"
            print(f"{len(records)}/{args.n} {record['model']}: {shown}", file=sys.stderr)
            if args.records:
                with args.records.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    command = " ".join(["python", "benchmarks/composition.py", *sys.argv[1:]])
    answer = {"command": command, **summary(records)}
    if args.speed:
        answer["speed"] = speed()
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
