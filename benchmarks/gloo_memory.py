"""How near the dry run comes to real Megatron-Core steps over gloo, rank by rank.

    python benchmarks/gloo_memory.py --candidates 80 --seed 0

Draws random valid candidates over dense, expert and latent-attention models, runs two steps of each
for real (one process per rank, every tensor tracked from birth to death), dry-runs every rank with
the same layers, and prints one JSON summary: the error of peak and static bytes over all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TARGET = 0.005
SEQ_LENGTH = 64

DENSE = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
CLASSIC = DENSE | {
    "num_query_groups": 4,
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "normalization": "LayerNorm",
    "hidden_dropout": 0.1,
    "share_embeddings_and_output_weights": True,
}
# Padding every expert to the same capacity makes routing as even as the dry run takes it to be.
EXPERTS = DENSE | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
}
EVEN = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}
LATENT = EXPERTS | {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "rope_type": "rope",
    "num_query_groups": 4,
    "moe_layer_freq": [0, 1, 1, 1],
}
PREDICTING = EXPERTS | {"mtp_num_layers": 1}
MODELS = {
    "dense": DENSE,
    "classic": CLASSIC,
    "experts": EXPERTS,
    "latent": LATENT,
    "predicting": PREDICTING,
}
SPLITS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"num_layers_in_first_pipeline_stage": 1},
    {"num_layers_in_last_pipeline_stage": 1},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
)
MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary; 0 when every rank of every candidate is within the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    trials = list(random_trials(options.candidates, options.seed))
    real = measure(trials)
    document = summarise(trials, real, [dry_ranks(trial) for trial in trials])
    print(json.dumps(document, indent=1))
    return int(document["largest_error"] > TARGET or bool(document["failed"]))


def random_trials(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Valid trials in the JSON form of `TrialSpec`, models in turn."""
    import tuner

    draw = random.Random(seed)
    names = sorted(MODELS)
    while count:
        name = names[count % len(names)]
        model = MODELS[name]
        world_size = draw.choice([1, 2, 2, 4, 4, 8])
        config = _random_config(model, world_size, draw)
        batch = world_size * config["micro_batch_size"] * draw.choice([2, 4])
        document = {"model": model, "world_size": world_size, "config": config}
        run = {"seq_length": SEQ_LENGTH, "global_batch_size": batch}
        verdict = tuner.check({**document, "config": {**config, **run}})
        if verdict.valid and not verdict.rewrites:
            count -= 1
            yield {**document, **run, "precision": draw.choice(["bf16", "bf16", "fp32"])}


def _random_config(
    model: Mapping[str, Any], world_size: int, draw: random.Random
) -> dict[str, Any]:
    tensor = draw.choice([1, 2])
    config: dict[str, Any] = {
        "micro_batch_size": draw.choice([1, 2]),
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1 and draw.random() < 0.7,
        "pipeline_model_parallel_size": draw.choice([1, 2, 4]),
        "use_distributed_optimizer": draw.random() < 0.7,
    }
    if config["pipeline_model_parallel_size"] > 1 and draw.random() < 0.5:
        config["virtual_pipeline_model_parallel_size"] = 2
    if config["pipeline_model_parallel_size"] == 2:
        config |= draw.choice(SPLITS)
    if "num_moe_experts" in model:
        config |= EVEN
        config["expert_model_parallel_size"] = draw.choice([1, 2])
        config["expert_tensor_parallel_size"] = draw.choice([1, tensor])
    return config | _random_recompute(model, draw)


def _random_recompute(model: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    granularity = draw.choice([None, "full", "selective", "selective"])
    if granularity is None:
        return {"recompute_granularity": None}
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": draw.choice(["uniform", "block"]),
            "recompute_num_layers": draw.choice([1, 2]),
            "distribute_saved_activations": draw.random() < 0.3,
        }
    modules = [module for module in MODULES if draw.random() < 0.35] or ["core_attn"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def dry_ranks(trial: Mapping[str, Any]) -> list[dict[str, int]] | str:
    """Peak and static bytes of every rank by dry run, or why there is none."""
    from tuner.memory.dryrun import run_request
    from tuner.memory.request import LOCAL, DryRunRequest

    try:
        runs = [
            run_request(DryRunRequest(rank=rank, layers=LOCAL, **trial))
            for rank in range(trial["world_size"])
        ]
    except (ValueError, RuntimeError) as error:
        return str(error)[-500:]
    return [{"peak_bytes": r.peak_allocated_bytes, "static_bytes": r.static_bytes} for r in runs]


def summarise(
    trials: Sequence[Mapping[str, Any]], real: Sequence[Any], dry: Sequence[Any]
) -> dict[str, Any]:
    """Errors of all ranks; candidates that did not run on either side are listed."""
    errors: list[float] = []
    static: list[float] = []
    worst: list[tuple[float, Mapping[str, Any]]] = []
    failed = []
    for trial, measured, estimated in zip(trials, real, dry, strict=True):
        if isinstance(measured, str) or isinstance(estimated, str):
            failed.append({"trial": trial, "real": measured, "dry": estimated})
            continue
        pairs = list(zip(measured, estimated, strict=True))
        peaks = [e["peak_bytes"] / m["peak_bytes"] - 1.0 for m, e in pairs]
        errors += peaks
        static += [e["static_bytes"] / m["static_bytes"] - 1.0 for m, e in pairs]
        worst.append((max(peaks, key=abs), trial))
    worst.sort(key=lambda item: -abs(item[0]))
    return {
        "candidates": len(worst),
        "ranks": len(errors),
        "equal_to_the_byte": sum(error == 0.0 for error in errors),
        "mean_error": sum(map(abs, errors)) / max(1, len(errors)),
        "largest_error": max(map(abs, errors), default=0.0),
        "largest_static_error": max(map(abs, static), default=0.0),
        "target": TARGET,
        "worst": [
            {"error": error, "model": _name(trial), "config": trial["config"]}
            for error, trial in worst[:3]
        ],
        "failed": failed,
    }


def _name(trial: Mapping[str, Any]) -> str:
    return next(name for name, model in MODELS.items() if model is trial["model"])


def measure(trials: Sequence[Mapping[str, Any]], timeout_s: float = 3000.0) -> list[Any]:
    """Bytes of every rank of each trial, run for real; the error's text where it failed."""
    with tempfile.TemporaryDirectory(prefix="gloo-memory-") as name:
        folder = Path(name)
        (folder / "trials.json").write_text(json.dumps(list(trials)))
        environment = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
            PYTHONPATH=str(Path(__file__).parents[1]),
        )
        command = [sys.executable, __file__, "--measure-in", str(folder)]
        subprocess.run(command, env=environment, timeout=timeout_s, check=True, stdout=sys.stderr)
        results: list[Any] = json.loads((folder / "results.json").read_text())
        return results


def _measure_in(folder: Path) -> None:
    """Run the trials of a folder one after another in forks of this process."""
    from trainables.megatron_core.cpu_device import cpu_device, without_compilation

    trials = json.loads((folder / "trials.json").read_text())
    with without_compilation():
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer  # noqa: F401

        import trainables.megatron_core.plan
    with cpu_device():
        import trainables.megatron_core.model
        import trainables.megatron_core.schedule  # noqa: F401
    results = []
    from trainables.processes import free_port

    for number, trial in enumerate(trials):
        port = str(free_port("127.0.0.1"))
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            GLOO_SOCKET_IFNAME="lo",
        )
        files = [folder / f"{number}-{rank}.json" for rank in range(trial["world_size"])]
        children = []
        for rank, file in enumerate(files):
            child = os.fork()
            if not child:
                _become_rank(rank, trial, file)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found = [json.loads(file.read_text()) if file.exists() else "died" for file in files]
        broken = [entry for entry in found if isinstance(entry, str)]
        results.append(broken[0] if broken else found)
        print(f"real {number + 1}/{len(trials)}", file=sys.stderr, flush=True)
    (folder / "results.json").write_text(json.dumps(results))


def _become_rank(rank: int, trial: Mapping[str, Any], file: Path) -> None:
    """Be one rank of a trial, write its bytes, and end this process."""
    import signal

    signal.alarm(240)
    world_size = str(trial["world_size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size)
    try:
        file.write_text(json.dumps(_bytes_of_two_steps(trial)))
    except Exception:
        file.write_text(json.dumps(traceback.format_exc()[-1500:]))
    finally:
        os._exit(0)


def _bytes_of_two_steps(trial: Mapping[str, Any]) -> dict[str, int]:
    """Static bytes after the second step and the peak over it."""
    from trainables.megatron_core.cpu_device import cpu_device
    from trainables.megatron_core.memory import StorageTracker
    from trainables.megatron_core.model import build_training_state
    from trainables.megatron_core.plan import build_plan
    from trainables.megatron_core.processes import joined_process_groups
    from trainables.megatron_core.schedule import TrainingStep
    from tuner.measurement import TrialSpec

    plan = build_plan(TrialSpec.from_json(trial), use_transformer_engine=False)
    tracker = StorageTracker()
    with cpu_device(), joined_process_groups(plan, timeout_s=120.0):
        with tracker.tracking():
            step = TrainingStep(plan, build_training_state(plan, initialize=True))
            step(1)
            tracker.reset_peak()
            step(2)
        return {"static_bytes": tracker.current_bytes, "peak_bytes": tracker.peak_bytes}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure-in"]:
        _measure_in(Path(sys.argv[2]))
    else:
        sys.exit(main())
