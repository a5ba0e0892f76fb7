"""The dry run of the CPU's layers against real steps of Megatron-Core over gloo, rank by rank."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "gloo_memory.py"
CANDIDATES, SEED = 10, 3


@pytest.mark.slow
def test_every_rank_of_random_candidates_allocates_what_a_real_run_does() -> None:
    benchmark = _loaded()
    trials = list(benchmark.random_trials(CANDIDATES, SEED))
    dry = [benchmark.dry_ranks(trial) for trial in trials]
    summary = benchmark.summarise(trials, benchmark.measure(trials), dry)
    assert summary["failed"] == []
    assert summary["candidates"] == CANDIDATES
    assert summary["largest_static_error"] == 0.0
    assert summary["largest_error"] <= benchmark.TARGET, summary["worst"]


def _loaded():
    spec = importlib.util.spec_from_file_location("gloo_memory", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gloo_memory"] = module
    spec.loader.exec_module(module)
    return module
