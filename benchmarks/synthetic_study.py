"""Studies made of arithmetic, for what shows studies: as many trials as wanted, in no time.

The records go through the product's own summary, study directory and MLflow records. Their figures
follow simple laws of tensor, pipeline and data parallelism and mean nothing for real machines.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tuner.candidate import Candidate
from tuner.measurement import Measurement, RankMeasurement, write_json_atomically
from tuner.search.records import TrialRecord
from tuner.study_dir import StudyDirectory, create_study_directory
from tuner.summary import summarize

GIB = 2**30
WORLD_SIZE = 64
METRIC = "tflops_per_gpu"
LIMIT_GIB = 72.0
_LAYOUTS = [(tp, pp, vpp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for vpp in (None, 2, 5)]
_RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    *(
        {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": layers,
        }
        for method in ("uniform", "block")
        for layers in (1, 2, 4, 5)
    ),
]


def make_records(count: int, seed: int = 0) -> list[TrialRecord]:
    """`count` trials of distinct candidates: completed, out of memory, crashed, timed out."""
    draw = random.Random(seed)
    records: list[TrialRecord] = []
    seen: set[str] = set()
    while len(records) < count:
        tp, pp, vpp = draw.choice(_LAYOUTS)
        flat = {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp if pp > 1 else None,
            "micro_batch_size": draw.choice((1, 2, 4)),
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": draw.random() < 0.5,
            "tp_comm_overlap": tp > 1 and draw.random() < 0.5,
            **draw.choice(_RECOMPUTE),
        }
        candidate = Candidate.from_flat(flat)
        if candidate.key not in seen:
            seen.add(candidate.key)
            records.append(_record(len(records), candidate, draw))
    return records


def _record(number: int, candidate: Candidate, draw: random.Random) -> TrialRecord:
    step_s, peak_gib = _laws(candidate)
    expected = {
        "step_time_s": step_s * draw.uniform(0.9, 1.1),
        "peak_bytes": int(peak_gib * GIB * draw.uniform(0.95, 1.05)),
    }
    end = draw.random()
    if peak_gib > LIMIT_GIB:
        reason = f"rank 0 peaked at {peak_gib:.1f} GiB, above the limit of {LIMIT_GIB:g} GiB"
        return TrialRecord(number, candidate, "oom", reason, 60.0, None, expected)
    if end < 0.03:
        reason = "rank 3: RuntimeError: <script>alert('no markup')</script>"
        return TrialRecord(number, candidate, "crashed", reason, 45.0, None, expected)
    if end < 0.05:
        return TrialRecord(number, candidate, "timeout", "no step in 600 s", 600.0, None, expected)
    measured = _measurement(step_s, peak_gib, draw)
    return TrialRecord(number, candidate, "completed", "", 90.0, measured, expected)


def _laws(candidate: Candidate) -> tuple[float, float]:
    """Seconds of a step and GiB of the fullest rank."""
    tp, pp = candidate.tensor_model_parallel_size, candidate.pipeline_model_parallel_size
    flat = candidate.to_flat()
    micro = candidate.micro_batch_size
    microbatches = max(1, 128 * tp * pp // (WORLD_SIZE * micro))
    bubble = (pp - 1) / (microbatches * (flat.get("virtual_pipeline_model_parallel_size") or 1))
    granularity = flat.get("recompute_granularity")
    again = {"full": 1.3, "selective": 1.05}.get(str(granularity), 1.0)
    held = {"full": 0.15, "selective": 0.6}.get(str(granularity), 1.0)
    step_s = 8.0 * again * (1 + bubble) * (1 + 0.04 * tp) * (1 - 0.03 * (micro > 1))
    return step_s, 16.0 + 240.0 / (tp * pp) + 30.0 * held * micro / tp


def _measurement(step_s: float, peak_gib: float, draw: random.Random) -> Measurement:
    times = tuple(step_s * draw.uniform(0.99, 1.02) for _ in range(5))
    ranks = tuple(
        RankMeasurement(rank, step_s, int(peak_gib * GIB * (1 - rank / 800)))
        for rank in range(WORLD_SIZE)
    )
    return Measurement(
        step_s,
        max(times) - min(times),
        128 * 8192 / step_s / WORLD_SIZE,
        4.6e3 / step_s,
        ranks[0].peak_memory_allocated_bytes,
        int(peak_gib * GIB * 1.05),
        tuple(10.0 - 0.3 * i + draw.uniform(-0.05, 0.05) for i in range(7)),
        times,
        ranks,
    )


def make_summary(records: list[TrialRecord]) -> dict[str, Any]:
    """The summary document of these trials."""
    return summarize(
        records,
        name="synthetic",
        metric=METRIC,
        rejected={"P10": 412, "R03": 55},
        ended_because="budget spent",
    )


def make_study(folder: Path, records: list[TrialRecord]) -> StudyDirectory:
    """A finished study directory, without trial logs and Optuna storage."""
    job = folder.parent / f"{folder.name}.job.yaml"
    document = {
        "name": "synthetic",
        "model": "llama3-70b",
        "cluster": {"device": "cpu", "gpus_per_node": WORLD_SIZE, "memory_limit_gib": LIMIT_GIB},
        "workload": {"seq_length": 8192, "global_batch_size": 128},
        "space": {"includes": ["dense"]},
        "search": {"start": [records[0].candidate.to_flat()]},
    }
    job.write_text(yaml.safe_dump(document, sort_keys=False))
    directory = create_study_directory(folder, job)
    summary = make_summary(records)
    write_json_atomically(directory.summary_path, json.loads(json.dumps(summary)))
    return directory
