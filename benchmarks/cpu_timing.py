"""The loop of estimate, measurement and calibration, on real Megatron-Core steps of this CPU.

    python benchmarks/cpu_timing.py [--trials FILE] [--ranks N]

Runs candidates of a small GPT for real, calibrates on some of them, and predicts the others; prints
one JSON summary with the rank correlation of predicted and measured step times of those left out
of the fit. `--trials FILE` keeps what was measured, and reads it back where it is there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from trainables.launch import run_trial
from tuner.measurement import Outcome, TrialSpec
from tuner.models import get_model
from tuner.timing.calibration import Calibration
from tuner.timing.fitting import fit
from tuner.timing.measure import measure_machine
from tuner.timing.observations import Observation, predictor

MODEL = "quickstart-gpt"
SEQ_LENGTH, GLOBAL_BATCH_SIZE = 128, 8
FIT: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1},
    {"tensor_model_parallel_size": 2, "micro_batch_size": 2},
    {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
    {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "recompute": "full"},
)
PREDICT: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 2},
    {"micro_batch_size": 1, "recompute": "full"},
    {"micro_batch_size": 2, "recompute": "mlp"},
    {"tensor_model_parallel_size": 2, "micro_batch_size": 1},
    {"tensor_model_parallel_size": 4, "micro_batch_size": 4},
    {"tensor_model_parallel_size": 4, "micro_batch_size": 1},
    {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "micro_batch_size": 1,
    },
    {"pipeline_model_parallel_size": 4, "micro_batch_size": 2},
    {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
        "recompute": "full",
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=Path, help="Keep measured steps in this file.")
    parser.add_argument("--ranks", type=int, default=4, help="Processes of each trial.")
    arguments = parser.parse_args()
    measured = _measured(arguments.trials, arguments.ranks)
    start = _machine(arguments.trials, arguments.ranks)
    used = [_observation(case, measured, arguments.ranks) for case in FIT]
    left = [_observation(case, measured, arguments.ranks) for case in PREDICT]
    times = np.array([one.step_time_s for one in left])
    fitted = fit(start, predictor(used, start), [one.step_time_s for one in used])
    predict = predictor(left, start)
    before, after = predict(start.rates), predict(fitted.calibration.rates)
    print(
        json.dumps(
            {
                "command": shlex.join(["python", *sys.argv]),
                "fitted_to": len(used),
                "predicted": len(left),
                "rank_correlation_before": _rank_correlation(before, times),
                "rank_correlation": _rank_correlation(after, times),
                "median_abs_err": float(np.median(np.abs(after / times - 1))),
                "rows": [
                    {
                        "config": case,
                        "measured_s": round(float(t), 4),
                        "before_s": round(float(b), 4),
                        "predicted_s": round(float(p), 4),
                    }
                    for case, t, b, p in zip(PREDICT, times, before, after, strict=True)
                ],
                "fit_residuals": np.round(fitted.residuals, 3).tolist(),
                "rates": fitted.calibration.rates.to_json(),
            },
            indent=2,
        )
    )


def _rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's coefficient of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 4)


def _config(case: dict[str, Any]) -> dict[str, Any]:
    config = {"use_distributed_optimizer": True} | case
    recompute = config.pop("recompute", None)
    if config.get("tensor_model_parallel_size", 1) > 1:
        config["sequence_parallel"] = True
    if recompute == "full":
        config |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute:
        config |= {"recompute_granularity": "selective", "recompute_modules": [recompute]}
    return config


def _spec(case: dict[str, Any], ranks: int) -> TrialSpec:
    return TrialSpec(
        model=get_model(MODEL).to_flat(),
        config=_config(case),
        world_size=ranks,
        seq_length=SEQ_LENGTH,
        global_batch_size=GLOBAL_BATCH_SIZE,
        warmup_steps=2,
        measure_steps=7,
        precision="fp32",
    )


def _measured(path: Path | None, ranks: int) -> dict[str, float]:
    """Median step seconds of each case; those that `path` has are not run again."""
    found: dict[str, float] = json.loads(path.read_text()) if path and path.exists() else {}
    for case in (*FIT, *PREDICT):
        key = json.dumps(case, sort_keys=True)
        if key in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run_trial(_spec(case, ranks), Path(folder))
        if result.outcome is not Outcome.COMPLETED or result.measurement is None:
            raise SystemExit(f"{case}: {result.outcome} {result.reason}")
        found[key] = result.measurement.step_time_s
        print(f"{key}: {found[key]:.3f} s", file=sys.stderr)
        if path:
            path.write_text(json.dumps(found, indent=1))
    return found


def _machine(path: Path | None, ranks: int) -> Calibration:
    """The micro-benchmarks of this machine, kept beside the trials."""
    kept = path.with_suffix(".machine.json") if path else None
    if kept and kept.exists():
        return Calibration.load(kept)
    calibration = measure_machine("cpu", ranks=ranks).calibration
    if kept:
        calibration.save(kept)
    return calibration


def _observation(case: dict[str, Any], measured: dict[str, float], ranks: int) -> Observation:
    seconds = measured[json.dumps(case, sort_keys=True)]
    return Observation.of_trial(_spec(case, ranks), seconds)


if __name__ == "__main__":
    main()
