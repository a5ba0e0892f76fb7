"""How long a proposal and its answer take in a large study.

    python benchmarks/search_speed.py --trials 5000 --in-flight 200

Fills a study on SQLite with finished trials and opens trials in flight, then asks and tells a few
more. Candidates are those of a space of layouts, recomputation, graphs and offload; their estimates
and the errors of these are drawn at random, since only their number matters here. Prints one JSON
summary: milliseconds of `ask` and `tell` (wall clock and of the processor), whether a second driver
of the same study proposes anything that is in flight, and whether the same study asked again with
the same seed proposes the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from tuner.candidate import Candidate
from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult
from tuner.search.engine import Engine, TrialCosts
from tuner.search.estimates import Estimates
from tuner.search.records import RUNNING
from tuner.search.samplers import RESIDUAL
from tuner.search.space import parse_space
from tuner.search.study import open_study

AXES: dict[str, Any] = {
    "tensor_model_parallel_size": [1, 2, 4, 8],
    "pipeline_model_parallel_size": [1, 2, 4, 8],
    "context_parallel_size": [1, 2, 4],
    "micro_batch_size": [1, 2, 4, 8],
    "recompute_granularity": [None, "selective"],
    "recompute_modules": {
        "subsets": ["core_attn", "mlp", "layernorm"],
        "when": {"recompute_granularity": "selective"},
    },
    "cuda_graph_impl": ["none", "transformer_engine"],
    "cuda_graph_modules": {
        "values": [[], ["attn"], ["mlp"]],
        "when": {"cuda_graph_impl": "transformer_engine"},
    },
    "optimizer_cpu_offload": [False, True],
    "optimizer_offload_fraction": {
        "values": [0.25, 0.5, 1.0],
        "when": {"optimizer_cpu_offload": True},
    },
}
SPACE = parse_space({"axes": AXES}, where="search_speed")
LIMIT = 80
ERROR = 0.05


class Landscape:
    """Candidates with estimates and outcomes, all drawn from one seed."""

    def __init__(self, count: int) -> None:
        flats = itertools.islice(SPACE.enumerate(), count)
        self.candidates = [Candidate.from_flat(flat) for flat in flats]
        self.row = {candidate.key: row for row, candidate in enumerate(self.candidates)}
        rng = np.random.default_rng(0)
        time_parts = {"compute": rng.uniform(1, 2, count), "tensor": rng.uniform(0, 1, count)}
        memory = {"static": rng.uniform(20, 60, count), "activations": rng.uniform(5, 40, count)}
        self._parts = time_parts, memory
        self.error = np.exp(ERROR * rng.normal(size=(2, count)))

    def estimate(self, candidates: Sequence[Candidate]) -> Estimates:
        rows = [self.row[candidate.key] for candidate in candidates]
        spent, held = ({n: p[rows] for n, p in parts.items()} for parts in self._parts)
        return Estimates(
            np.sum(list(spent.values()), axis=0), np.sum(list(held.values()), axis=0), spent, held
        )

    def result(self, candidate: Candidate) -> TrialResult:
        row, own = self.row[candidate.key], self.estimate([candidate])
        step = float(own.step_time_s[0] * self.error[0, row])
        memory = int(own.memory_bytes[0] * self.error[1, row])
        rank = RankMeasurement(0, step, memory)
        measured = Measurement(
            step, 0.0, 1 / step, 1 / step, memory, None, (1.0,), (step,), (rank,)
        )
        return TrialResult(Outcome.COMPLETED if memory <= LIMIT else Outcome.OOM, "", measured, 1.0)


def opened(landscape: Landscape, storage: str) -> Any:
    """A driver of the study in `storage`."""
    engine = Engine(
        landscape.candidates,
        landscape.estimate,
        limit_bytes=float(LIMIT),
        costs=TrialCosts(lambda candidate: 64),
    )
    return open_study(
        storage,
        "speed",
        SPACE,
        lambda candidate: None,
        metric="tflops_per_gpu",
        memory_limit_bytes=LIMIT,
        sampler=RESIDUAL,
        seed=1,
        engine=engine,
    )


def fill(landscape: Landscape, storage: str, trials: int) -> None:
    """Put finished trials of random candidates into the study, as drivers record them."""
    opened(landscape, storage)
    study = optuna.load_study(study_name="speed", storage=storage)
    recorded = []
    for candidate in random.Random(0).sample(landscape.candidates, trials):
        flat, labels = candidate.to_flat(), SPACE.labels(candidate.to_flat())
        result = landscape.result(candidate)
        assert result.measurement is not None
        told = {
            "outcome": result.outcome.value,
            "reason": "",
            "duration_s": 1.0,
            "measurement": result.measurement.to_json(),
        }
        asked = {"key": candidate.key, "candidate": flat, "outcome": RUNNING}
        recorded.append(
            optuna.trial.create_trial(
                params=labels,
                distributions=SPACE.distributions(labels),
                value=1.0,
                user_attrs={"trial": asked, "result": told},
            )
        )
    study.add_trials(recorded)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call gives, with its milliseconds by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def told(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Median and worst of (clock, processor) milliseconds."""
    wall, cpu = zip(*values, strict=True)
    return {
        "median_ms": round(statistics.median(wall), 1),
        "worst_ms": round(max(wall), 1),
        "median_cpu_ms": round(statistics.median(cpu), 1),
        "worst_cpu_ms": round(max(cpu), 1),
    }


def measure(landscape: Landscape, storage: str, in_flight: int, rounds: int) -> dict[str, Any]:
    """Ask and tell in a study that has `in_flight` trials running."""
    driver, other = opened(landscape, storage), opened(landscape, storage)
    running = [driver.ask() for _ in range(in_flight)]
    again = opened(landscape, storage).ask()
    asks, tells = [], []
    first = None
    for _ in range(rounds):
        proposal, *spent = timed(driver.ask)
        first = first or proposal
        asks.append(tuple(spent))
        running.append(proposal)
        done = running.pop(0)
        result = landscape.result(done.candidate)
        _, *spent = timed(lambda done=done, result=result: driver.tell(done.number, result))
        tells.append(tuple(spent))
    flying = {proposal.candidate.key for proposal in running}
    beside = other.ask()
    return {
        "ask": told(asks),
        "tell": told(tells),
        "second_driver_repeats": beside.candidate.key in flying,
        "third_driver_repeats": again.candidate.key in flying,
    }


def proposals(landscape: Landscape, folder: str, count: int) -> list[str]:
    """The first proposals of a fresh study, each answered before the next."""
    driver = opened(landscape, f"sqlite:///{folder}/fresh.db")
    keys = []
    for _ in range(count):
        proposal = driver.ask()
        keys.append(proposal.candidate.key)
        driver.tell(proposal.number, landscape.result(proposal.candidate))
    return keys


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5_000)
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    landscape = Landscape(options.trials + 4 * options.in_flight)
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder) / 'study.db'}"
        fill(landscape, storage, options.trials)
        found = measure(landscape, storage, options.in_flight, options.rounds)
    orders = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            orders.append(proposals(landscape, folder, 6))
    print(
        json.dumps(
            {
                **found,
                "same_seed_same_proposals": orders[0] == orders[1],
                "trials": options.trials,
                "in_flight": options.in_flight,
                "candidates": len(landscape.candidates),
                "command": shlex.join(
                    ["python", "benchmarks/search_speed.py", *(arguments or sys.argv[1:])]
                ),
            },
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
