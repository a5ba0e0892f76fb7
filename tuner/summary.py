"""What a study found, as the documents it leaves behind: `summary.json` and `best.yaml`."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from pathlib import Path
from typing import Any

from tuner.measurement import Measurement
from tuner.search.records import TrialRecord, best_of, pareto_front

_GIB = 2**30
_PACKAGES = ("megatron-tuner", "megatron-core", "torch", "ray", "optuna", "mlflow")


def measured_figures(measurement: Measurement) -> dict[str, Any]:
    """The figures of a measurement that summaries show; bytes and seconds."""
    return {
        "step_time_s": measurement.step_time_s,
        "step_time_spread_s": measurement.step_time_spread_s,
        "tokens_per_s_per_gpu": measurement.tokens_per_s_per_gpu,
        "tflops_per_gpu": measurement.tflops_per_gpu,
        "peak_memory_allocated_bytes": measurement.peak_memory_allocated_bytes,
        "peak_memory_reserved_bytes": measurement.peak_memory_reserved_bytes,
    }


def summarize(
    records: list[TrialRecord],
    *,
    name: str,
    metric: str,
    rejected: dict[str, int],
    ended_because: str,
) -> dict[str, Any]:
    """The summary document: counts, every trial, the best one and the Pareto front by number."""
    best = best_of(records, metric)
    outcomes = Counter(record.outcome for record in records)
    return {
        "study": name,
        "metric": metric,
        "ended_because": ended_because,
        "counts": {
            "trials": len(records),
            **dict(sorted(outcomes.items())),
            "rejected": sum(rejected.values()),
        },
        "rejected_by_rule": dict(sorted(rejected.items(), key=lambda item: -item[1])),
        "best": None if best is None else best.number,
        "best_run": None if best is None else _run(best),
        "pareto": [record.number for record in pareto_front(records, metric)],
        "trials": [_trial(record) for record in records],
        "versions": versions(),
    }


def best_document(
    record: TrialRecord,
    *,
    model: Any,
    spec: dict[str, Any],
    metric: str,
    trial_dir: Path,
    trainable: str = "megatron_core",
) -> dict[str, Any]:
    """`best.yaml`: the candidate as `tuner check` and `tuner run` take it, and its figures."""
    assert record.measurement is not None
    return {
        "model": model,
        "world_size": spec["world_size"],
        "seq_length": spec["seq_length"],
        "global_batch_size": spec["global_batch_size"],
        "precision": spec["precision"],
        "device": spec["device"],
        **({} if trainable == "megatron_core" else {"trainable": trainable}),
        **({"options": dict(spec["options"])} if spec["options"] else {}),
        "config": record.ran.to_flat(),
        "run": {
            name: spec[name]
            for name in ("warmup_steps", "measure_steps", "seed", "memory_limit_bytes", "timeout_s")
        },
        "measured": {
            **measured_figures(record.measurement),
            "best_by": metric,
            "trial": record.number,
        },
        "versions": {**versions(), **dict(record.measurement.versions)},
        "launch": [
            "tuner run best.yaml",
            f"torchrun --nproc-per-node {spec['world_size']} -m trainables.{trainable} "
            f"--spec trials/{trial_dir.name}/spec.json --output rerun",
        ],
    }


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run(record: TrialRecord) -> dict[str, Any]:
    """The series of one run: loss and seconds by step, peak and seconds by rank."""
    assert record.measurement is not None
    whole = record.measurement.to_json()
    return {name: whole[name] for name in ("losses", "step_times_s", "ranks")}


def _trial(record: TrialRecord) -> dict[str, Any]:
    measured = record.measurement
    return {
        "number": record.number,
        "config": record.ran.to_flat(),
        "outcome": record.outcome,
        "reason": record.reason,
        "duration_s": record.duration_s,
        "expected": None if record.expected is None else dict(record.expected),
        "measured": None if measured is None else measured_figures(measured),
    }
