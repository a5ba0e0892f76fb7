"""The benchmark's summary, from estimates given in place of dry runs."""

from __future__ import annotations

import importlib

import pytest

from tuner.validation.published import read_rows
from tuner.validation.validate import compare


@pytest.fixture(scope="module")
def benchmark():
    return importlib.import_module("memory_accuracy")


def document(peak: float, fits: bool = True) -> dict:
    return {
        "fits": fits,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak,
        "ranks": [{"static_bytes": peak / 2}],
        "memory_fit": {"cause": None if fits else "capacity"},
    }


def rows(benchmark, *names: str) -> list[dict]:
    return [row for row in read_rows(benchmark.DATA) if row["id"] in names]


MOONLIGHT = [f"mbridge-skill-000{number}" for number in range(6)]


def test_ablations_are_ordered_within_runs_that_differ_in_recompute_only(benchmark):
    chosen = rows(benchmark, *MOONLIGHT)
    measured = {row["id"]: row["measured"]["peak_mem_allocated_gb"] for row in chosen}
    peaks = iter(measured.values())
    right = compare(chosen, lambda launch, ranks: document(next(peaks) * 1e9))
    by_id = {row["id"]: row for row in chosen}
    correct, total = benchmark.ablation_pairs(by_id, right.results)
    assert correct == total > 0
    backwards = iter([-peak for peak in measured.values()])
    wrong = compare(chosen, lambda launch, ranks: document(100e9 + next(backwards) * 1e9))
    assert benchmark.ablation_pairs(by_id, wrong.results) == (0, total)


def test_targets_say_what_was_reached_and_what_was_not_measured(benchmark):
    chosen = rows(benchmark, "simumax-0000")
    peak = chosen[0]["measured"]["peak_mem_allocated_gb"] * 2**30
    near = compare(chosen, lambda launch, ranks: document(1.05 * peak))
    targets = {t["name"]: t for t in benchmark.summarise(chosen, near)["targets"]}
    assert targets["simumax worst"]["value"] == pytest.approx(0.05)
    assert targets["simumax worst"]["reached"] is True
    assert targets["simumax mean"]["reached"] is False
    assert targets["golden median"]["reached"] is None
    assert targets["runs called out of memory"]["reached"] is True


def test_a_run_called_out_of_memory_misses_its_target(benchmark):
    chosen = rows(benchmark, "simumax-0000")
    called = compare(chosen, lambda launch, ranks: document(1e12, fits=False))
    targets = {t["name"]: t for t in benchmark.summarise(chosen, called)["targets"]}
    assert targets["runs called out of memory"]["reached"] is False
    assert targets["simumax mean"]["reached"] is False


def test_finished_estimates_are_read_back_while_the_code_is_the_same(benchmark, tmp_path):
    path = tmp_path / "estimates.jsonl"
    store = benchmark.Store(path)
    store.add("a", {"fits": True})
    store.add("b", {"error": "not kept, so that it is tried again"})
    assert store.read() == {"a": {"fits": True}}
    path.write_text(path.read_text().replace('"code": "', '"code": "0'))
    assert store.read() == {}
    assert benchmark.Store(path, trusted=True).read() == {"a": {"fits": True}}
