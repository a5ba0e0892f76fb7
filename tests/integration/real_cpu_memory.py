"""Tracked bytes of real Megatron-Core steps over gloo, one process per rank.

Run as `python real_cpu_memory.py RESULT_FOLDER` by torchrun with the trial on standard input of
`measure_ranks`; every rank writes `rank-N.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def measure_ranks(trial: dict, folder: Path, timeout_s: float = 300.0) -> list[dict]:
    """Run two steps of `trial` (the JSON form of a TrialSpec) and give each rank's bytes.

    Each has `static_bytes` after step 2 and `peak_bytes` over step 2.
    """
    spec = folder / "trial.json"
    spec.write_text(json.dumps(trial))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={trial['world_size']}",
        __file__,
        str(folder),
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    done = subprocess.run(
        command, env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [
        json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(trial["world_size"])
    ]


def main(folder: Path) -> None:
    from trainables.megatron_core.cpu_device import cpu_device, without_compilation
    from tuner.measurement import TrialSpec

    spec = TrialSpec.from_json(json.loads((folder / "trial.json").read_text()))
    with without_compilation():
        from trainables.megatron_core.plan import build_plan

        plan = build_plan(spec, use_transformer_engine=False)
    with cpu_device():
        from trainables.megatron_core.memory import StorageTracker
        from trainables.megatron_core.model import build_training_state
        from trainables.megatron_core.processes import joined_process_groups
        from trainables.megatron_core.schedule import TrainingStep

        tracker = StorageTracker()
        with joined_process_groups(plan, timeout_s=120.0):
            with tracker.tracking():
                step = TrainingStep(plan, build_training_state(plan, initialize=True))
                step(1)
                tracker.reset_peak()
                step(2)
            result = {"static_bytes": tracker.current_bytes, "peak_bytes": tracker.peak_bytes}
            (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
