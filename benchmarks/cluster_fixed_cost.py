"""A CPU trial's wall time besides its steps: plain launch against forks of a warm template."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

WORLD_SIZE = 2


def measure(folder: Path, trials: int) -> dict[str, Any]:
    """Median seconds besides the steps, over `trials` trials of each kind, and where they go."""
    from trainables.launch import rank_environment
    from trainables.warm import Template, template_environment

    environment = template_environment(rank_environment(_spec(), 1))
    template = Template("trainables.megatron_core.preload", "cpu", environment)
    _run(folder / "first", template)  # waits for the template's imports
    warm = [_run(folder / f"warm-{i}", template) for i in range(trials)]
    template.close()
    plain = [_run(folder / f"plain-{i}", None) for i in range(trials)]
    return {"ranks": WORLD_SIZE, "trials": trials, "plain": _summary(plain), "warm": _summary(warm)}


def _spec() -> Any:
    from tuner.measurement import TrialSpec
    from tuner.models import get_model

    return TrialSpec(
        model=get_model("tiny-dense").to_flat(),
        config={"tensor_model_parallel_size": 1, "micro_batch_size": 1},
        world_size=WORLD_SIZE,
        seq_length=64,
        global_batch_size=4,
        precision="fp32",
        warmup_steps=2,
        measure_steps=3,
    )


def _run(folder: Path, template: Any) -> dict[str, float]:
    """Seconds by phase of one trial, its wall time, and what is left besides the steps."""
    from trainables.launch import run_trial

    result = run_trial(_spec(), folder, template=template)
    if result.outcome != "completed":
        raise SystemExit(f"a trial ended as {result.outcome}: {result.reason}")
    phases = _phases(folder)
    steps_s = phases["warm-up steps"] + phases["measured steps"]
    return {**phases, "wall": result.duration_s, "fixed": result.duration_s - steps_s}


def _phases(folder: Path) -> dict[str, float]:
    """What the first rank said of its phases."""
    for log in sorted(folder.glob("logs/**/0/stdout.log")):
        for line in log.read_text().splitlines():
            if line.startswith("seconds: "):
                return dict(json.loads(line.removeprefix("seconds: ")))
    raise SystemExit(f"no phases in {folder}")


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    return {
        f"{name.replace(' ', '_')}_s": round(statistics.median(row[name] for row in rows), 3)
        for name in rows[0]
    }
