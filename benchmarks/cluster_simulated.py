"""A study of simulated trials of many sizes on 64 nodes of 8 fake GPUs."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

NODES, GPUS_PER_NODE = 64, 8
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
SPEEDUP = 1.0
_MIB = 2**20


class Observer:
    """A display that shows nothing; it notes when the first trial starts."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.ends: dict[int, float] = {}

    def started(self, proposal: Any) -> None:
        self.first = time.monotonic() if self.first is None else self.first

    def ended(self, record: Any) -> None:
        self.last = self.ends[record.number] = time.monotonic()


def measure(folder: Path, trials: int) -> dict[str, Any]:
    """Run the study; occupancy, waits, dispatch latency and the driver's memory."""
    import ray
    from ray.cluster_utils import Cluster

    from tuner.cluster.fleet import RayNode
    from tuner.cluster.prepared import prepare
    from tuner.cluster.tuning import run_tuning
    from tuner.job import load_job
    from tuner.study_dir import create_study_directory

    job_path = folder / "job.yaml"
    job_path.write_text(yaml.safe_dump(_job(trials)))
    prepared = prepare(load_job(job_path), where=str(job_path), base_folder=folder)
    directory = create_study_directory(folder / "study", job_path)
    head = {"num_cpus": 4, "num_gpus": NODES * GPUS_PER_NODE, "include_dashboard": False}
    head["object_store_memory"] = 200 * _MIB
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def find_nodes() -> list[RayNode]:
        node = ray.nodes()[0]
        names = [f"node{number:02d}" for number in range(NODES)]
        return [RayNode(node["NodeID"], name, node["NodeManagerAddress"], name) for name in names]

    observer = Observer()
    try:
        run_tuning(prepared, directory, observer, address=cluster.address, find_nodes=find_nodes)
    finally:
        cluster.shutdown()
    return _summary(directory.path, observer)


def _job(trials: int) -> dict[str, Any]:
    return {
        "name": "simulated",
        "model": "llama3-8b",
        "cluster": {
            "gpu": "h100",
            "nodes": NODES,
            "gpus_per_node": GPUS_PER_NODE,
            "health_check": False,
        },
        "workload": {"seq_length": 4096, "global_batch_size": 128},
        "space": {
            "axes": {
                "world_size": SIZES,
                "tensor_model_parallel_size": [1, 2, 4, 8],
                "pipeline_model_parallel_size": [1, 2, 4],
                "micro_batch_size": [1, 2, 4],
                "distribute_saved_activations": [False],
                "recompute_granularity": [None, "full"],
                "recompute_method": {
                    "values": ["uniform", "block"],
                    "when": {"recompute_granularity": "full"},
                },
                "recompute_num_layers": {
                    "values": [1, 2, 4, 8],
                    "when": {"recompute_granularity": "full"},
                },
            },
            "fixed": {"env": {"SIMULATED_SPEEDUP": str(SPEEDUP)}},
        },
        "search": {"sampler": "random", "race": False},
        "budget": {"trials": trials, "stop_when_unlikely": False},
        "trainable": {
            "name": "simulated",
            "warmup_steps": 1,
            "measure_steps": 2,
            "timeout_s": 3600,
        },
    }


def _summary(study: Path, observer: Observer) -> dict[str, Any]:
    import optuna

    from tuner.measurement import TrialResult, TrialSpec
    from tuner.search.store import TrialStore, open_storage

    storage = open_storage(f"sqlite:///{study}/study.db")
    records = TrialStore(optuna.load_study(study_name="tuner", storage=storage), storage).records()
    work = longest = 0.0
    runs = []
    for record in records:
        folder = study / "trials" / f"{record.number:04d}"
        spec = TrialSpec.from_json(json.loads((folder / "spec.json").read_text()))
        ran = TrialResult.from_json(json.loads((folder / "result.json").read_text()))
        work += spec.world_size * ran.duration_s
        ended = observer.ends[record.number]
        runs.append((ended - ran.duration_s, ended, spec.world_size))
        longest = max(longest, ran.duration_s)
    assert observer.first is not None
    makespan = observer.last - observer.first
    ideal = max(work / (NODES * GPUS_PER_NODE), longest)
    dispatch = [record.evidence["dispatch_s"] for record in records]
    waited = [record.evidence["waited_s"] for record in records]
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {r.outcome for r in records}
    return {
        "nodes": NODES,
        "gpus": NODES * GPUS_PER_NODE,
        "trials": len(records),
        "outcomes": {name: sum(r.outcome == name for r in records) for name in sorted(outcomes)},
        "makespan_s": round(makespan, 1),
        "ideal_makespan_s": round(ideal, 1),
        "occupancy_of_ideal": round(ideal / makespan, 4),
        "occupancy_by_tenth": _by_tenth(runs, observer.first, observer.last),
        "mean_trial_s": round(statistics.fmean(r.duration_s for r in records), 2),
        "dispatch_median_s": round(statistics.median(dispatch), 3),
        "dispatch_p90_s": round(statistics.quantiles(dispatch, n=10)[-1], 3),
        "longest_wait_s": round(max(waited), 1),
        "driver_peak_memory_mib": round(peak_kib / 1024, 1),
    }


def _by_tenth(runs: Sequence[tuple[float, float, int]], first: float, last: float) -> list[float]:
    """The share of the GPUs that trials (start, end, GPUs) held in each tenth of the study."""
    width = (last - first) / 10
    shares = []
    for tenth in range(10):
        low, high = first + tenth * width, first + (tenth + 1) * width
        held = sum(max(0.0, min(end, high) - max(start, low)) * gpus for start, end, gpus in runs)
        shares.append(round(held / width / (NODES * GPUS_PER_NODE), 3))
    return shares
