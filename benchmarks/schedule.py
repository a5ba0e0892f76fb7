"""Speed of the pipeline schedule models on one core; prints one JSON summary.

    python benchmarks/schedule.py [--seconds S]

`simulated_steps_per_s`: whole steps, every pass timed, PP 16, VPP 4, 256 micro-batches.
`candidates_per_s`: arrays of candidates with uneven stages (embedding, head, and layers that differ
by 5 %) by shape. `largest_difference`: between the two on the candidates of the second, relative.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time

import numpy as np

from tuner.timing.closed_form import pipeline_times
from tuner.timing.schedule import Pipeline, simulate

SHAPES = (
    Pipeline(1, 32),
    Pipeline(2, 16),
    Pipeline(4, 16),
    Pipeline(4, 32, 4),
    Pipeline(4, 32, 4, overlap_p2p=True),
    Pipeline(8, 32),
    Pipeline(8, 64),
    Pipeline(8, 32, 4),
    Pipeline(8, 32, 4, overlap_p2p=True),
    Pipeline(8, 64, 10, overlap_p2p=True),
    Pipeline(16, 64),
    Pipeline(16, 64, 4, overlap_p2p=True),
    Pipeline(16, 256, 4, overlap_p2p=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="Time to spend on each shape.")
    seconds = parser.parse_args().seconds
    rng = np.random.default_rng(7)
    rates, differences = {}, []
    for shape in SHAPES:
        rate, difference = _measure(shape, rng, seconds)
        rates[_name(shape)] = round(rate)
        differences.append(difference)
    print(
        json.dumps(
            {
                "command": shlex.join(["python", *sys.argv]),
                "simulated_steps_per_s": round(_simulations(rng, seconds), 1),
                "candidates_per_s": rates,
                "candidates_per_s_harmonic_mean": round(
                    len(rates) / sum(1 / rate for rate in rates.values())
                ),
                "largest_difference": max(differences),
            },
            indent=2,
        )
    )


def _simulations(rng: np.random.Generator, seconds: float) -> float:
    pipeline = Pipeline(16, 256, 4)
    forward, backward, p2p = _durations(pipeline, 1, rng)
    simulate(pipeline, forward[0], backward[0], p2p[0])
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        simulate(pipeline, forward[0], backward[0], p2p[0])
        count += 1
    return count / (time.perf_counter() - start)


def _measure(pipeline: Pipeline, rng: np.random.Generator, seconds: float) -> tuple[float, float]:
    durations = _durations(pipeline, 16384, rng)
    times = pipeline_times(pipeline, *durations)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        times = pipeline_times(pipeline, *durations)
        count += len(durations[0])
    rate = count / (time.perf_counter() - start)
    worst = 0.0
    for row in range(0, len(durations[0]), 4096):
        step = simulate(pipeline, *(values[row] for values in durations))
        worst = max(worst, float(np.abs(times.end_s[row] / step.end_s - 1).max()))
    return rate, worst


def _durations(
    pipeline: Pipeline, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forward, backward `[candidate, stage, chunk]` and transfer `[candidate]` seconds."""
    shape = (count, pipeline.stages, pipeline.chunks)
    layer = rng.uniform(0.5e-3, 2e-3, (count, 1, 1))
    forward = layer * rng.choice([1.0, 1.0, 1.05], shape)
    forward[:, 0, 0] += 0.05 * layer[:, 0, 0]
    forward[:, -1, -1] += rng.uniform(0.1, 0.6, count) * layer[:, 0, 0]
    backward = forward * rng.uniform(1.9, 2.6, (count, 1, 1))
    return forward, backward, rng.uniform(0.0, 0.05, count) * layer[:, 0, 0]


def _name(pipeline: Pipeline) -> str:
    name = f"pp{pipeline.stages}-vpp{pipeline.chunks}-m{pipeline.microbatches}"
    return name + ("-overlap" if pipeline.overlap_p2p else "")


if __name__ == "__main__":
    main()
