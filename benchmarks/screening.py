"""How fast the rules decide: candidates screened per second, a whole space, one candidate.

The space is the dense one of a 70B model on 1,024 GPUs: layout, micro-batch, recompute, CUDA
graphs and offload.  Prints one JSON document.

    python benchmarks/screening.py
"""

from __future__ import annotations

import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from tuner.constraints import Tables, check, enumerate_valid, load_rules
from tuner.constraints.view import UNSET

MODEL = {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "ffn_hidden_size": 28672,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bf16": True,
    "params_dtype": "bf16",
    "pipeline_dtype": "bf16",
}
RUN = {
    "world_size": 1024,
    "global_batch_size": 1024,
    "seq_length": 8192,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "batch_p2p_comm": False,
    "env": {},
}
SELECTIONS = [
    [],
    ["core_attn"],
    ["mlp"],
    ["layernorm"],
    ["core_attn", "mlp"],
    ["core_attn", "layernorm"],
    ["layernorm", "mlp"],
    ["core_attn", "layernorm", "mlp"],
]
STAGED = {"pipeline_model_parallel_size": [2, 4, 5, 8, 10, 16, 20, 40, 80]}
AXES = [
    ("tensor_model_parallel_size", [1, 2, 4, 8], None),
    ("pipeline_model_parallel_size", [1, 2, 4, 5, 8, 10, 16, 20, 40, 80], None),
    ("virtual_pipeline_model_parallel_size", [None, 2, 4, 5, 8, 10, 16, 20, 40], STAGED),
    ("context_parallel_size", [1, 2, 4, 8, 16], None),
    ("micro_batch_size", [1, 2, 4, 8], None),
    ("sequence_parallel", [False, True], None),
    ("recompute_granularity", [None, "selective", "full"], None),
    ("recompute_modules", SELECTIONS, {"recompute_granularity": ["selective"]}),
    ("recompute_method", ["uniform", "block"], {"recompute_granularity": ["full"]}),
    ("recompute_num_layers", [1, 2, 4, 5, 10], {"recompute_granularity": ["full"]}),
    ("cuda_graph_impl", ["none", "local", "transformer_engine"], None),
    (
        "cuda_graph_scope",
        [[], ["attn"], ["mlp"], ["attn", "mlp"], ["full_iteration"]],
        {"cuda_graph_impl": ["local", "transformer_engine"]},
    ),
    ("cpu_offloading", [False, True], None),
    ("cpu_offloading_num_layers", [8, 16, 40, 79], {"cpu_offloading": [True]}),
    ("fine_grained_activation_offloading", [False, True], None),
    (
        "offload_modules",
        [["core_attn"], ["core_attn", "attn_proj"], ["qkv_linear"], ["attn_norm"]],
        {"fine_grained_activation_offloading": [True]},
    ),
]
ROWS = 2_000_000


def screened_per_second() -> dict[str, float]:
    """Random rows of the space, tables built beforehand and reported apart."""
    values = {n: [*v, UNSET] if condition else list(v) for n, v, condition in AXES}
    start = time.perf_counter()
    tables = Tables(values, {**MODEL, **RUN})
    merged = tables.merged
    built_s = time.perf_counter() - start
    generator = np.random.default_rng(0)
    codes = {n: generator.integers(0, len(v), ROWS).astype(np.int32) for n, v in values.items()}
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = tables.screen(codes)
        times.append(time.perf_counter() - start)
    return {
        "rows": ROWS,
        "valid_rows": int(result.valid.sum()),
        "tables": len(merged),
        "build_tables_s": round(built_s, 4),
        "candidates_per_s": round(ROWS / statistics.median(times)),
    }


def whole_space() -> dict[str, float]:
    """Enumerate and screen the whole space, tables included."""
    start = time.perf_counter()
    found = enumerate_valid(AXES, {**MODEL, **RUN})
    return {
        "combinations": found.enumerated,
        "built": found.expanded,
        "valid": len(found),
        "seconds": round(time.perf_counter() - start, 3),
    }


def one_candidate() -> dict[str, float]:
    """The scalar check of one valid candidate, without looking for fixes or advice texts."""
    candidate = {**MODEL, **RUN, "tensor_model_parallel_size": 8, "sequence_parallel": True}
    assert check(candidate).valid
    times = []
    for _ in range(300):
        start = time.perf_counter()
        check(candidate)
        times.append(time.perf_counter() - start)
    return {"median_s": round(statistics.median(times), 7)}


def main() -> None:
    summary = {
        "rules": len(load_rules()),
        "screening": screened_per_second(),
        "space": whole_space(),
        "check": one_candidate(),
        "threads": 1,
        "command": "python benchmarks/screening.py",
    }
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
