"""Predicted against measured on the one GPU at hand: bytes and step time of a dozen candidates.

    python benchmarks/gpu/memory_and_time.py --gpu h100
    python benchmarks/gpu/memory_and_time.py --gpu h200 --seconds 480 --layers 8

Runs real Megatron-Core steps by the trainable `megatron_core` on one device (Transformer Engine
where installed) and estimates the same runs beside it. No candidate starts later than `--seconds`
after the start, so the whole ends in about eight minutes. Prints one JSON summary; exits 1 where
fewer than half of the candidates completed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}
_GRAPHED = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
CANDIDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two sequences": {"micro_batch_size": 2},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "norms and mlp": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "mlp"],
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "half of the layers": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 4,
    },
    "graphed attention": {**_GRAPHED, "cuda_graph_modules": ["attn"]},
    "graphed layers": {**_GRAPHED, "cuda_graph_modules": []},
    "whole iteration": {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True},
    "layers offloaded": {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
    "modules offloaded": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
    },
    "optimizer offloaded": {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "use_precision_aware_optimizer": True,
    },
    "fp8": {"fp8": "hybrid", "fp8_recipe": "delayed"},
}


def compare(
    name: str, changes: dict[str, Any], arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One candidate: its outcome, both figures, and the error of the estimate (0.05 is 5 %)."""
    import trainables
    from tuner.api import estimate
    from tuner.measurement import TrialSpec

    config = {"micro_batch_size": 1, "use_distributed_optimizer": True, **changes}
    model = {**MODEL, "num_layers": arguments.layers}
    spec = TrialSpec(
        model=model,
        config=config,
        world_size=1,
        seq_length=arguments.seq_length,
        global_batch_size=4,
        warmup_steps=3,
        measure_steps=5,
        device="cuda",
        timeout_s=90.0,
    )
    row: dict[str, Any] = {"name": name, "config": config}
    result = trainables.get("megatron_core").run_trial(spec, folder)
    row |= {"outcome": str(result.outcome), "reason": result.reason}
    document = {
        "model": model,
        "world_size": 1,
        "seq_length": spec.seq_length,
        "global_batch_size": spec.global_batch_size,
        "gpu": arguments.gpu,
        "config": config,
    }
    try:
        estimated = estimate(document)
    except ValueError as error:
        return {**row, "not_estimated": str(error)}
    row["estimated"] = {
        "bytes": estimated["peak_allocated_bytes"],
        "step_time_s": estimated.get("step_time_s"),
    }
    measured = result.measurement
    if measured is None:
        return row
    row["measured"] = {
        "bytes": measured.peak_memory_allocated_bytes,
        "reserved_bytes": measured.peak_memory_reserved_bytes,
        "device_bytes": measured.ranks[0].peak_device_bytes,
        "step_time_s": measured.step_time_s,
    }
    row["errors"] = {
        figure: row["estimated"][figure] / row["measured"][figure] - 1
        for figure in ("bytes", "step_time_s")
        if row["estimated"][figure] and row["measured"][figure]
    }
    return row


def summary(rows: list[dict[str, Any]], skipped: list[str], device: str) -> dict[str, Any]:
    """The JSON document of the benchmark; medians are of absolute errors."""
    document: dict[str, Any] = {
        "benchmark": "gpu/memory_and_time",
        "command": shlex.join(["python", "benchmarks/gpu/memory_and_time.py", *sys.argv[1:]]),
        "device": device,
        "candidates": len(rows),
        "completed": sum(row["outcome"] == "completed" for row in rows),
        "not_started": skipped,
        "rows": rows,
    }
    for figure in ("bytes", "step_time_s"):
        errors = [abs(row["errors"][figure]) for row in rows if figure in row.get("errors", {})]
        document[f"median_abs_err_{figure}"] = statistics.median(errors) if errors else None
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", required=True, help="the GPU's name in the tuner, e.g. h100")
    parser.add_argument("--seconds", type=float, default=400.0, help="no start later than this")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=4096)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device is visible: this benchmark needs one", file=sys.stderr)
        return 3
    started, rows, skipped = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, changes) in enumerate(CANDIDATES.items()):
            if time.monotonic() - started > arguments.seconds:
                skipped.append(name)
                continue
            rows.append(compare(name, changes, arguments, Path(folder) / f"{number:02d}"))
            print(f"{name}: {rows[-1]['outcome']} {rows[-1].get('errors', '')}", file=sys.stderr)
    document = summary(rows, skipped, torch.cuda.get_device_name(0))
    print(json.dumps(document, indent=1))
    return 0 if document["completed"] * 2 >= len(CANDIDATES) else 1


if __name__ == "__main__":
    sys.exit(main())
