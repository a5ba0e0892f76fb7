"""How near memory estimates come to published runs, by source.

    python benchmarks/memory_accuracy.py --jobs 2 --estimates /tmp/estimates.jsonl

Estimates every row of `benchmarks/data/published_memory.jsonl.gz` (or of `--data`) that can be
modelled, by a dry run of the ranks whose peak was published, and prints one JSON summary: errors of
peak, reserved and static bytes by source, the ordering inside ablations of recompute and offload,
fit against out-of-memory, the targets with what was reached, and what was left out with the reason.
With `--estimates` finished estimates are kept in a file and read back by the next run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tuner.errors import InputError
from tuner.models import ModelSpec, count_parameters
from tuner.validation.conversion import launch_of
from tuner.validation.launch import Launch, UnmodelledError
from tuner.validation.published import measured_memory, read_rows, source_of
from tuner.validation.statistics import ordered_pairs, outcome_summary, summary
from tuner.validation.validate import RowResult, Validation, compare, estimate_launch, ranks_of

DATA = Path(__file__).parent / "data" / "published_memory.jsonl.gz"
BILLION = 10**9
ABLATED = ("recompute_", "cpu_offloading", "fine_grained", "offload_modules", "optimizer_cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary; 0 when every target that was measured is reached, else 1."""
    options = _options(arguments)
    rows = [row for row in read_rows(options.data) if _chosen(row, options.source)]
    started = time.perf_counter()
    known = estimates(rows, options.jobs, options.estimates)
    validation = compare(rows, _Known(known))
    document = summarise(rows, validation)
    document |= {
        "seconds": round(time.perf_counter() - started, 1),
        "command": shlex.join(["python", *sys.argv]),
    }
    print(json.dumps(document, indent=1))
    return int(any(target["reached"] is False for target in document["targets"]))


def estimates(
    rows: Sequence[Mapping[str, Any]], jobs: int, store: Path | None
) -> dict[str, dict[str, Any]]:
    """The estimate of every distinct launch, or the error that it ended with, by `key_of`."""
    known = _read_store(store)
    wanted: dict[str, tuple[Launch, list[int]]] = {}
    for row in rows:
        measured = measured_memory(row)
        try:
            launch = launch_of(row)
            ranks = ranks_of(launch, measured) if measured else []
        except (UnmodelledError, InputError):
            continue
        key = key_of(launch, ranks)
        if ranks and key not in known:
            wanted[key] = (launch, ranks)
    if not wanted:
        return known
    tasks = [(key, *asked) for key, asked in wanted.items()]
    with get_context("spawn").Pool(jobs) as pool:
        for count, (key, document) in enumerate(pool.imap_unordered(_estimate, tasks), start=1):
            known[key] = document
            _append(store, key, document)
            print(f"{count}/{len(wanted)} {document.get('error', '')}", file=sys.stderr)
    return known


def _estimate(task: tuple[str, Launch, list[int]]) -> tuple[str, dict[str, Any]]:
    """One estimate in a process of its own; what went wrong is an answer too."""
    key, launch, ranks = task
    try:
        document = dict(estimate_launch(launch, ranks))
    except Exception as error:
        return key, {"error": f"{type(error).__name__}: {error}"}
    for rank in document["ranks"]:
        rank.pop("timeline", None)
    return key, document


def key_of(launch: Launch, ranks: list[int]) -> str:
    """Equal for launches that are estimated alike."""
    return json.dumps([launch.to_json(), ranks], sort_keys=True, default=str)


class _Known:
    """Estimates that were made before, as an estimator."""

    def __init__(self, known: Mapping[str, dict[str, Any]]) -> None:
        self._known = known

    def __call__(self, launch: Launch, ranks: list[int]) -> Mapping[str, Any]:
        document = self._known[key_of(launch, ranks)]
        if "error" in document:
            raise UnmodelledError(document["error"])
        return document


def summarise(rows: Sequence[Mapping[str, Any]], validation: Validation) -> dict[str, Any]:
    """Figures, targets, rows (without those of the sweeps), and what was left out."""
    document = validation.to_json()
    by_id = {row["id"]: row for row in rows}
    large = {name for name, row in by_id.items() if _parameters(row) > BILLION}
    right, total = ablation_pairs(by_id, validation.results)
    document["golden_above_1b"] = summary(_peak_errors(validation, "mcore-golden", large))
    document["ablations"] = {"right": right, "pairs": total}
    sweeps = [result for result in validation.results if result.source == "aleph"]
    document["sweep_oom"] = outcome_summary(
        {r.id: (bool(r.measured_oom), r.estimated_oom) for r in sweeps}
    )
    document["targets"] = targets(document, validation)
    document["rows"] = [row for row in document["rows"] if row["source"] != "aleph"]
    return document


def targets(document: Mapping[str, Any], validation: Validation) -> list[dict[str, Any]]:
    """What must hold, what was reached, and whether that is enough; null where not measured."""
    by_source = document["memory"]["by_source"]
    bridge = _peak_errors(validation, "mbridge-card") + _peak_errors(validation, "mbridge-skill")
    pairs = document["ablations"]
    figures = [
        ("simumax mean", 0.03, by_source.get("simumax", {}).get("mean_abs_err")),
        ("simumax worst", 0.08, by_source.get("simumax", {}).get("max_abs_err")),
        ("golden above 1 B mean", 0.05, document["golden_above_1b"].get("mean_abs_err")),
        ("golden median", 0.08, by_source.get("mcore-golden", {}).get("median_abs_err")),
        ("bridge median", 0.08, summary(bridge)["median_abs_err"]),
        ("golden static median", 0.02, _static_median(document)),
    ]
    found = [
        {"name": name, "at_most": limit, "value": value, "reached": _at_most(value, limit)}
        for name, limit, value in figures
    ]
    ordering = pairs["right"] / pairs["pairs"] if pairs["pairs"] else None
    accuracy = document["sweep_oom"]["balanced_accuracy"]
    false_oom = [name for name in document["oom"]["false_oom"] if not name.startswith("aleph")]
    return [
        *found,
        {
            "name": "ablation ordering",
            "at_least": 0.9,
            "value": ordering,
            "reached": None if ordering is None else ordering >= 0.9,
        },
        {
            "name": "sweep balanced accuracy",
            "at_least": 0.92,
            "value": accuracy,
            "reached": None if accuracy is None else accuracy >= 0.92,
        },
        {
            "name": "runs called out of memory",
            "at_most": 0,
            "value": len(false_oom),
            "reached": not false_oom,
        },
    ]


def ablation_pairs(
    rows: Mapping[str, Mapping[str, Any]], results: Sequence[RowResult]
) -> tuple[int, int]:
    """Pairs ordered as measured, and all pairs, within rows that differ in recompute or offload."""
    groups: dict[str, list[RowResult]] = {}
    for result in results:
        if "peak_allocated_bytes" in result.errors:
            groups.setdefault(_without_ablated(rows[result.id]), []).append(result)
    right = total = 0
    for group in groups.values():
        measured = {r.id: float(r.measured["peak_allocated_bytes"]) for r in group}
        estimated = {r.id: float(r.estimated["peak_allocated_bytes"]) for r in group}
        one, two = ordered_pairs(measured, estimated)
        right, total = right + one, total + two
    return right, total


def _without_ablated(row: Mapping[str, Any]) -> str:
    launch = launch_of(row).to_json()
    launch["config"] = {
        name: value for name, value in launch["config"].items() if not name.startswith(ABLATED)
    }
    return json.dumps([source_of(row), launch], sort_keys=True, default=str)


def _peak_errors(validation: Validation, source: str, among: set[str] | None = None) -> list[float]:
    return [
        result.errors["peak_allocated_bytes"]
        for result in validation.results
        if result.source == source
        and "peak_allocated_bytes" in result.errors
        and not result.measured_oom
        and (among is None or result.id in among)
    ]


def _static_median(document: Mapping[str, Any]) -> float | None:
    golden = document["memory"]["static"]["by_source"].get("mcore-golden", {})
    median: float | None = golden.get("median_abs_err")
    return median


def _at_most(value: float | None, limit: float) -> bool | None:
    return None if value is None else value <= limit


def _parameters(row: Mapping[str, Any]) -> int:
    try:
        return count_parameters(ModelSpec.from_flat(launch_of(row).model)).total
    except (UnmodelledError, ValueError):
        return 0


def _chosen(row: Mapping[str, Any], sources: Sequence[str]) -> bool:
    return not sources or source_of(row) in sources


def _read_store(store: Path | None) -> dict[str, dict[str, Any]]:
    if store is None or not store.exists():
        return {}
    lines = store.read_text(encoding="utf-8").splitlines()
    return {entry["key"]: entry["document"] for entry in map(json.loads, lines)}


def _append(store: Path | None, key: str, document: Mapping[str, Any]) -> None:
    if store is not None and "error" not in document:
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "document": document}) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=DATA, help="rows to compare with")
    parser.add_argument("--source", action="append", default=[], help="only this kind of rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--estimates", type=Path, help="file that keeps finished estimates")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
