"""The dry run of the CPU's layers against real steps of Megatron-Core over gloo, rank by rank."""

from __future__ import annotations

import importlib

import pytest

CANDIDATES, SEED = 10, 3


@pytest.mark.slow
def test_every_rank_of_random_candidates_allocates_what_a_real_run_does() -> None:
    benchmark = importlib.import_module("gloo_memory")
    trials = list(benchmark.random_trials(CANDIDATES, SEED))
    dry = [benchmark.dry_ranks(trial) for trial in trials]
    summary = benchmark.summarise(trials, benchmark.measure(trials), dry)
    assert summary["failed"] == []
    assert summary["candidates"] == CANDIDATES
    assert summary["largest_static_error"] == 0.0
    assert summary["largest_error"] <= benchmark.TARGET, summary["worst"]
