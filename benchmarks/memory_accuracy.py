"""How near memory estimates come to what runs took, and how fast they are made.

    python benchmarks/memory_accuracy.py --section published --estimates /tmp/estimates.jsonl

Sections (`--section`, all by default; each prints its targets with what was reached):

- `published`: every row of `benchmarks/data/published_memory.jsonl.gz` (or of `--data`) that can be
  modelled, by a dry run of the ranks whose peak was published: errors of peak, reserved and static
  bytes by source, the ordering inside ablations of recompute and offload, fit against
  out-of-memory, and what was left out with the reason. `--source` chooses kinds of rows. With
  `--estimates` finished estimates are kept in a file and read back while the code is the same.
- `speed`: a dry run of one rank of Llama-3 70B and its replay through the allocator, in processor
  seconds of one core, twice in processes of their own, which must allocate the same bytes.
- `gloo`: `benchmarks/gloo_memory.py`, dry runs against real runs on a CPU.

Prints one JSON summary. With `--docs docs/memory.md` the lines of the measured sources are renewed
in the table on that page.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pages import between, put_between

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
    document: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    for section in options.section or SECTIONS:
        started = time.perf_counter()
        document[section] = SECTIONS[section](options)
        document[section]["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(document, indent=1))
    reached = [t["reached"] for s in SECTIONS for t in document.get(s, {}).get("targets", [])]
    return int(False in reached)


def published(options: argparse.Namespace) -> dict[str, Any]:
    """Estimates against published rows."""
    rows = [row for row in read_rows(options.data) if _chosen(row, options.source)]
    store = Store(options.estimates, trusted=options.trust_estimates)
    known = estimates(rows, options.jobs, store)
    document = summarise(rows, compare(rows, _Known(known)))
    if options.docs:
        write_table(options.docs, rows, document)
    return document


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """A dry run and its replay, in two processes that must do the same."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "--one-run"], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(2)
    ]
    dry_run, replayed = (min(run[name] for run in runs) for name in ("dry_run_s", "replay_s"))
    same = runs[0]["digest"] == runs[1]["digest"]
    return {
        "run": "Llama-3 70B, TP4 PP4 VPP5, 16 micro-batches, rank 0",
        "runs": runs,
        "targets": [
            _at_most_target("dry run of a rank, processor seconds", 20.0, dry_run),
            _at_most_target("allocator replay, processor seconds", 5.0, replayed),
            {"name": "same bytes in both processes", "value": same, "reached": same},
        ],
    }


def one_run() -> dict[str, Any]:
    """The run of `speed`, in this process."""
    from tuner.candidate import Candidate
    from tuner.memory import steps
    from tuner.memory.allocator_replay import replay
    from tuner.memory.dryrun import dry_run_request
    from tuner.models import get_model

    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}
    candidate = Candidate.from_flat(
        layout | {"virtual_pipeline_model_parallel_size": 5, "sequence_parallel": True}
    )
    request = dry_run_request(
        get_model("llama3-70b"),
        candidate,
        rank=0,
        world_size=16,
        seq_length=4096,
        global_batch_size=16,
    )
    started = time.process_time()
    trace, _ = steps.record_steps(request)
    recorded = time.process_time()
    run = replay(trace)
    replayed = time.process_time()
    digest = hashlib.sha256(trace.block.tobytes() + trace.bytes.tobytes()).hexdigest()
    return {
        "dry_run_s": recorded - started,
        "replay_s": replayed - recorded,
        "events": len(trace),
        "peak_allocated_bytes": run.peak_allocated_bytes,
        "digest": digest,
    }


def gloo(options: argparse.Namespace) -> dict[str, Any]:
    """The summary of the comparison with real runs."""
    script = Path(__file__).with_name("gloo_memory.py")
    result = subprocess.run(
        [sys.executable, str(script)], check=False, stdout=subprocess.PIPE, text=True
    )
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


SECTIONS = {"published": published, "speed": speed, "gloo": gloo}


class Store:
    """Finished estimates in a JSON-lines file, each with the code that made it.

    Those of other code are left aside unless `trusted`. Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, *, trusted: bool = False) -> None:
        self._path, self._trusted, self._code = path, trusted, _code_version()

    def read(self) -> dict[str, dict[str, Any]]:
        """Documents by key."""
        if self._path is None or not self._path.exists():
            return {}
        entries = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
        return {
            entry["key"]: entry["document"]
            for entry in entries
            if self._trusted or entry["code"] == self._code
        }

    def add(self, key: str, document: Mapping[str, Any]) -> None:
        """Keep a document, unless it is an error."""
        if self._path is not None and "error" not in document:
            entry = {"key": key, "code": self._code, "document": document}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _code_version() -> str:
    """Changes with every source file that an estimate depends on."""
    import trainables
    import tuner

    digest = hashlib.sha256()
    for package in (tuner, trainables):
        for path in sorted(Path(package.__path__[0]).rglob("*.[py]*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def estimates(
    rows: Sequence[Mapping[str, Any]], jobs: int, store: Store
) -> dict[str, dict[str, Any]]:
    """The estimate of every distinct launch, or the error that it ended with, by `key_of`."""
    known = store.read()
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
            store.add(key, document)
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
    static = document["memory"]["static"]["by_source"].get("mcore-golden", {})
    ordering = pairs["right"] / pairs["pairs"] if pairs["pairs"] else None
    false_oom = [name for name in document["oom"]["false_oom"] if not name.startswith("aleph")]
    return [
        _at_most_target("simumax mean", 0.03, by_source.get("simumax", {}).get("mean_abs_err")),
        _at_most_target("simumax worst", 0.08, by_source.get("simumax", {}).get("max_abs_err")),
        _at_most_target(
            "golden above 1 B mean", 0.05, document["golden_above_1b"].get("mean_abs_err")
        ),
        _at_most_target(
            "golden median", 0.08, by_source.get("mcore-golden", {}).get("median_abs_err")
        ),
        _at_most_target("golden static median", 0.02, static.get("median_abs_err")),
        _at_most_target("bridge median", 0.08, summary(bridge)["median_abs_err"]),
        _at_least_target("ablation ordering", 0.9, ordering),
        _at_least_target(
            "sweep balanced accuracy", 0.92, document["sweep_oom"]["balanced_accuracy"]
        ),
        _at_most_target("runs called out of memory", 0, len(false_oom)),
    ]


def _at_most_target(name: str, limit: float, value: float | None) -> dict[str, Any]:
    reached = None if value is None else value <= limit
    return {"name": name, "at_most": limit, "value": value, "reached": reached}


def _at_least_target(name: str, limit: float, value: float | None) -> dict[str, Any]:
    reached = None if value is None else value >= limit
    return {"name": name, "at_least": limit, "value": value, "reached": reached}


TABLE_START, TABLE_END = "<!-- errors by source: start -->", "<!-- errors by source: end -->"
_TABLE_HEAD = (
    "| source | peaks | median error | mean | 90th percentile | largest | static bytes, median "
    "| called out of memory though it ran | not modelled |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)


def write_table(page: Path, rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> None:
    """Put the errors of each measured source between the marks of a page, beside the others."""
    table = between(page, TABLE_START, TABLE_END).strip().splitlines()[len(_TABLE_HEAD) :]
    lines = {line.split("|")[1].strip(): line for line in table}
    compared = document["memory"]["by_source"]
    lines |= {source: _table_line(source, rows, document) for source in compared}
    ordered = [lines[name] for name in sorted(lines)]
    put_between(page, TABLE_START, TABLE_END, [*_TABLE_HEAD, *ordered])


def _table_line(source: str, rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> str:
    own = {row["id"] for row in rows if source_of(row) == source}
    memory = document["memory"]
    peaks = memory["by_source"][source]
    static = memory["static"]["by_source"].get(source, {})
    errors = [peaks.get(f"{name}_abs_err") for name in ("median", "mean", "p90", "max")]
    shown = ["" if e is None else f"{e:.2%}" for e in (*errors, static.get("median_abs_err"))]
    false_oom = len(own.intersection(document["oom"]["false_oom"]))
    left_out = len(own.intersection(row["id"] for row in document["skipped"]))
    return " | ".join([f"| {source}", str(peaks["n"]), *shown, str(false_oom), f"{left_out} |"])


def ablation_pairs(
    rows: Mapping[str, Mapping[str, Any]], results: Sequence[RowResult]
) -> tuple[int, int]:
    """Pairs ordered as measured, and all pairs, within rows that differ in recompute or offload.

    Runs that ended out of memory are left out: their peak is that of an unfinished step.
    """
    groups: dict[str, list[tuple[str, RowResult]]] = {}
    for result in results:
        if "peak_allocated_bytes" in result.errors and not result.measured_oom:
            others, ablated = _settings(rows[result.id])
            groups.setdefault(others, []).append((ablated, result))
    right = total = 0
    for group in groups.values():
        for (one, first), (other, second) in itertools.combinations(group, 2):
            if one != other:
                ordered, pairs = ordered_pairs(*(_peaks(w, first, second) for w in _WHICH))
                right, total = right + ordered, total + pairs
    return right, total


_WHICH = ("measured", "estimated")


def _peaks(which: str, *results: RowResult) -> dict[str, float]:
    return {r.id: float(getattr(r, which)["peak_allocated_bytes"]) for r in results}


def _settings(row: Mapping[str, Any]) -> tuple[str, str]:
    """All of a launch but its recompute and offload, and these."""
    launch = launch_of(row).to_json()
    config = launch.pop("config")
    ablated = {name: value for name, value in config.items() if name.startswith(ABLATED)}
    others = [source_of(row), launch, {n: v for n, v in config.items() if n not in ablated}]
    return _text(others), _text(ablated)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _peak_errors(validation: Validation, source: str, among: set[str] | None = None) -> list[float]:
    return [
        result.errors["peak_allocated_bytes"]
        for result in validation.results
        if result.source == source
        and "peak_allocated_bytes" in result.errors
        and not result.measured_oom
        and (among is None or result.id in among)
    ]


def _parameters(row: Mapping[str, Any]) -> int:
    try:
        return count_parameters(ModelSpec.from_flat(launch_of(row).model)).total
    except (UnmodelledError, ValueError):
        return 0


def _chosen(row: Mapping[str, Any], sources: Sequence[str]) -> bool:
    return not sources or source_of(row) in sources


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--section", action="append", default=[], choices=SECTIONS, help="only this section"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="rows to compare with")
    parser.add_argument("--source", action="append", default=[], help="only this kind of rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--estimates", type=Path, help="file that keeps finished estimates")
    parser.add_argument("--docs", type=Path, help="page whose table of errors is renewed")
    parser.add_argument(
        "--trust-estimates", action="store_true", help="also those that other code made"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:] == ["--one-run"]:
        print(json.dumps(one_run()))
        raise SystemExit(0)
    raise SystemExit(main())
