"""What the tuner adds to a trial over the same candidate started by hand with torchrun.

Runs a study of real CPU trials, then each of its trials again with torchrun from the spec file the
study left, and compares wall time: for the tuner from the end of one trial to the end of the next
(so asking, placement, launch, telling and MLflow all count), by hand from start to exit of
torchrun. Run it on an otherwise idle machine. Prints one JSON summary.

    python benchmarks/overhead.py --trials 6
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import yaml

JOB = {
    "name": "overhead",
    "model": "quickstart-gpt",
    "cluster": {"device": "cpu", "gpus_per_node": 4},
    "workload": {"seq_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "space": {
        "axes": {
            "tensor_model_parallel_size": [1, 2],
            "pipeline_model_parallel_size": [1, 2],
            "micro_batch_size": [1, 2],
            "sequence_parallel": {"values": [True], "when": {"tensor_model_parallel_size": 2}},
        }
    },
    "search": {"sampler": "random", "seed": 3},
    "trainable": {"warmup_steps": 2, "measure_steps": 3, "timeout_s": 300},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=6, help="trials of the study (at most 8)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        print(json.dumps(measure(Path(folder), arguments.trials), indent=2))


def measure(folder: Path, trials: int) -> dict[str, object]:
    """The summary: medians in seconds, and each trial's pair of wall times."""
    job, study = folder / "job.yaml", folder / "study"
    job.write_text(yaml.safe_dump({**JOB, "budget": {"trials": trials}}))
    command = [sys.executable, "-c", "from tuner.cli import main; main()", "tune", str(job)]
    started = time.time()
    subprocess.run([*command, "--study", str(study)], check=True, stdout=subprocess.DEVNULL)
    whole_s = time.time() - started
    rows = []
    ends = trial_ends(study)
    for (_, before), (number, end) in itertools.pairwise(ends):
        by_hand_s = run_by_hand(study / "trials" / f"{number:04d}" / "spec.json", folder)
        rows.append({"trial": number, "tuner_s": end - before, "by_hand_s": by_hand_s})
    added = [row["tuner_s"] - row["by_hand_s"] for row in rows]
    share = [row["tuner_s"] / row["by_hand_s"] - 1 for row in rows]
    return {
        "command": "python benchmarks/overhead.py " + " ".join(sys.argv[1:]),
        "median_overhead_s": round(statistics.median(added), 3),
        "median_overhead_fraction": round(statistics.median(share), 4),
        "median_by_hand_s": round(statistics.median(row["by_hand_s"] for row in rows), 3),
        "study_s": round(whole_s, 3),
        "trials": [{k: round(v, 3) for k, v in row.items()} for row in rows],
    }


def trial_ends(study: Path) -> list[tuple[int, float]]:
    """Number and end time (seconds) of each launched trial, in order of ending."""
    stored = optuna.load_study(study_name="tuner", storage=f"sqlite:///{study}/study.db")
    ended = [
        (trial.number, trial.datetime_complete.timestamp())
        for trial in stored.trials
        if trial.user_attrs.get("result", {}).get("outcome") == "completed"
        and trial.datetime_complete is not None
    ]
    return sorted(ended, key=lambda pair: pair[1])


def run_by_hand(spec: Path, folder: Path) -> float:
    """Wall seconds of torchrun on a trial's spec."""
    ranks = json.loads(spec.read_text())["world_size"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "trainables.megatron_core"]
    command += ["--spec", str(spec), "--output", str(folder / "by-hand")]
    started = time.time()
    subprocess.run(command, check=True, capture_output=True)
    return time.time() - started


if __name__ == "__main__":
    main()
