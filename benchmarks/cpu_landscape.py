"""The landscape of the quickstart model on a CPU: every candidate of a small space, run for real.

    python benchmarks/cpu_landscape.py --out benchmarks/data/cpu_landscape.json

Runs a study over all valid candidates of `JOB` (real Megatron-Core steps, four ranks) and keeps
what each gave, with the calibration of the machine. `benchmarks/search.py` replays the file. Takes
some twenty minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from sweeps import Landscape

DATA = Path(__file__).parent / "data" / "cpu_landscape.json"
JOB: Mapping[str, Any] = {
    "name": "cpu-landscape",
    "model": "quickstart-gpt",
    "cluster": {"device": "cpu", "nodes": 1, "gpus_per_node": 4, "memory_limit_gib": 0.1},
    "workload": {"seq_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "space": {
        "includes": ["cpu"],
        "axes": {
            "recompute_modules": {
                "values": [["mlp"]],
                "when": {"recompute_granularity": "selective"},
            },
            "recompute_method": {"values": ["uniform"], "when": {"recompute_granularity": "full"}},
            "recompute_num_layers": {"values": [1], "when": {"recompute_granularity": "full"}},
        },
    },
    "search": {"seed": 1, "race": False},
    "budget": {"trials": 1000, "stop_when_unlikely": False},
    "trainable": {"warmup_steps": 1, "measure_steps": 4, "timeout_s": 120},
}


def record(out: Path) -> None:
    """Run every candidate and write the file."""
    from tuner.search.planning.machine import this_cpu

    with tempfile.TemporaryDirectory() as folder:
        job, study = Path(folder) / "job.yaml", Path(folder) / "study"
        job.write_text(yaml.safe_dump(dict(JOB)))
        command = [sys.executable, "-m", "tuner", "tune", str(job), "--study", str(study)]
        subprocess.run(command, check=True)
        summary = json.loads((study / "summary.json").read_text())
    document = {
        "job": JOB,
        "cores": len(os.sched_getaffinity(0)),
        "versions": summary["versions"],
        "calibration": this_cpu().to_json(),
        "runs": [_run(trial) for trial in summary["trials"]],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


def _run(trial: Mapping[str, Any]) -> dict[str, Any]:
    measured = trial["measured"] or {}
    return {
        "config": trial["config"],
        "outcome": trial["outcome"],
        "step_time_s": measured.get("step_time_s"),
        "peak_memory_allocated_bytes": measured.get("peak_memory_allocated_bytes"),
    }


def read_cpu_landscape(path: Path = DATA) -> Landscape:
    """The recorded candidates with the estimates that a study of them starts from; trials refine
    these as they do in a study."""
    from tuner.candidate import Candidate
    from tuner.cluster.learning import StudyRates
    from tuner.cluster.prepared import prepare
    from tuner.cluster.proposals import Proposals
    from tuner.job import load_job
    from tuner.search.engine import Engine, TrialCosts
    from tuner.search.planning.machine import workplace_of
    from tuner.search.planning.prior import ComposedEstimator
    from tuner.timing.calibration import Calibration

    document = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(yaml.safe_dump(document["job"]))
        prepared = prepare(load_job(job), where=str(path), base_folder=Path(folder))
    calibration = Calibration.from_json(document["calibration"], str(path))
    place = replace(workplace_of(prepared, calibration), cores=document["cores"])
    runs = document["runs"]
    candidates = tuple(Candidate.from_flat(run["config"]) for run in runs)
    limit_bytes = float(place.allocatable_bytes(candidates[0]))
    estimates = ComposedEstimator(place)(candidates)

    def proposals(folder: Path) -> Proposals:
        estimator = ComposedEstimator(place)
        costs = TrialCosts(prepared.world_size_of)
        engine = Engine(candidates, estimator, limit_bytes=limit_bytes, costs=costs)
        return Proposals(engine, (StudyRates(prepared, calibration, folder), estimator))

    return Landscape(
        name=f"{document['job']['model']}, {prepared.job.cluster.world_size} CPU ranks",
        space=prepared.space,
        candidates=candidates,
        step_times_s=tuple(
            run["step_time_s"] if run["outcome"] == "completed" else None for run in runs
        ),
        estimates=estimates,
        limit_bytes=limit_bytes,
        gpus=prepared.job.cluster.world_size,
        proposals=proposals,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA)
    record(parser.parse_args(arguments).out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
