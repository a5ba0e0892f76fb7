"""How near step-time estimates come to published runs that the calibration has not seen.

    python benchmarks/timing_accuracy.py
    python benchmarks/timing_accuracy.py --write tuner/timing/data/calibrations

Rows of `benchmarks/data/published_time.jsonl.gz` (or `--data`). Sections of the printed summary:

- `held_out`: rows of Megatron Bridge's performance pages with high confidence, in two halves, every
  other row: each half is estimated with rates fitted to the other. `other_models`: each model is
  estimated with rates fitted to all others. Errors of tokens/s/GPU by GPU and precision, and by
  model; rank correlation of TFLOP/s over rows of one GPU and precision, with what of it the
  repetitions of one configuration leave reachable.
- `other_sources`: sources that no rate was fitted to, with the packaged calibrations, which are
  fitted to all performance pages (also in `what_if` and `llama3_70b_sft`).
- `what_if`: pairs of runs of one source that differ in one setting.
- `llama3_70b_sft`: the published series of Llama-3 70B fine-tuning.
- `sweeps`: layout sweeps on A100, after calibrating on five points of each.

With `--write` the calibrations fitted to all performance pages are written as package data, with
`--docs docs/timing.md` the table of held-out errors on that page is renewed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pages import put_between

from tuner.errors import InputError
from tuner.models import ModelSpec, model_flops_per_step
from tuner.timing.calibration import Calibration
from tuner.timing.fitting import fit
from tuner.timing.observations import Observation, observation_of, predictor
from tuner.timing.shipped import EVERY, documents, fit_hierarchy, shipped_calibration
from tuner.validation.published import read_rows, source_of
from tuner.validation.statistics import summary

FITTED = "mbridge-perf"
DATA = Path(__file__).parent / "data" / "published_time.jsonl.gz"
SETTINGS = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "mbs",
    "recompute_granularity",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "cuda_graph_impl",
    "cuda_graph_scope",
    "sequence_parallel",
    "dispatcher",
    "fine_grained_offload_modules",
    "cpu_offloading_num_layers",
    "pp_layout",
    "fsdp",
)
SAME_RUN = ("model", "gpu", "num_gpus", "precision", "seq_length", "gbs", "task", "source_version")
DIFFERENCE = 0.03
SWEEP_POINTS = 5

Row = Mapping[str, Any]
Calibrations = Mapping[tuple[str, str], Calibration]


class Cases:
    """Rows as observations that can be timed, and what could not be."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {row["id"]: row for row in rows}
        self.observations: dict[str, Observation] = {}
        self.skipped: dict[str, str] = {}
        start = shipped_calibration("h100")
        for row in rows:
            try:
                one = observation_of(row)
                if not np.isfinite(predictor([one], start)(start.rates)).all():
                    raise InputError("Megatron-Core would refuse its pipeline")
                self.observations[one.id] = one
            except InputError as error:
                self.skipped[row["id"]] = str(error)

    def of(self, *sources: str, confidence: str | None = None) -> list[Observation]:
        """Observations of these kinds of sources, in the order of the file."""
        return [
            one
            for one in self.observations.values()
            if source_of(self.rows[one.id]) in sources
            and (confidence is None or self.rows[one.id].get("config_confidence") == confidence)
        ]


def calibration_of(known: Calibrations, one: Observation) -> Calibration:
    """The calibration that holds for a run, from the most particular to the most general."""
    from tuner.hardware import get_gpu

    gpu = get_gpu(one.gpu)
    for key in ((gpu.name, one.precision), (gpu.name, EVERY), (gpu.architecture, EVERY)):
        if key in known:
            return known[key]
    return shipped_calibration(gpu.name, one.precision)


def seconds(known: Calibrations, observations: Sequence[Observation]) -> dict[str, float]:
    """Estimated step times by row."""
    groups: dict[int, list[Observation]] = defaultdict(list)
    chosen: dict[int, Calibration] = {}
    for one in observations:
        calibration = calibration_of(known, one)
        chosen[id(calibration)] = calibration
        groups[id(calibration)].append(one)
    found: dict[str, float] = {}
    for key, mine in groups.items():
        times = np.asarray(predictor(mine, chosen[key])(chosen[key].rates))
        found |= {one.id: float(value) for one, value in zip(mine, times, strict=True)}
    return found


def rate_errors(observations: Sequence[Observation], estimated: Mapping[str, float]) -> Any:
    """Relative errors of tokens/s/GPU by row; positive where the estimate is too fast."""
    return {one.id: one.step_time_s / estimated[one.id] - 1.0 for one in observations}


def held_out(cases: Cases) -> dict[str, Any]:
    """Every other row estimated from the rest, both ways round."""
    observations = cases.of(FITTED, confidence="high")
    estimated: dict[str, float] = {}
    for half in (0, 1):
        known = fit_hierarchy(observations[half::2])
        estimated |= seconds(known, observations[1 - half :: 2])
    return accuracy(cases, observations, estimated)


def other_models(cases: Cases) -> dict[str, Any]:
    """Every model estimated from all others."""
    observations = cases.of(FITTED, confidence="high")
    estimated: dict[str, float] = {}
    for model in sorted({cases.rows[one.id]["model"] for one in observations}):
        mine = [one for one in observations if cases.rows[one.id]["model"] == model]
        known = fit_hierarchy([one for one in observations if one not in mine])
        estimated |= seconds(known, mine)
    return accuracy(cases, observations, estimated)


def accuracy(
    cases: Cases, observations: Sequence[Observation], estimated: Mapping[str, float]
) -> dict[str, Any]:
    """Errors over all rows, by GPU and precision, by model, and the order of their speeds."""
    errors = rate_errors(observations, estimated)
    rows = cases.rows

    def by(key: Callable[[Row], str]) -> dict[str, Any]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in errors:
            groups[key(rows[name])].append(name)
        return {
            label: summary([errors[name] for name in names]) | order(cases, names, estimated)
            for label, names in sorted(groups.items())
        }

    worst = sorted(errors, key=lambda name: -abs(errors[name]))[:10]
    return summary(list(errors.values())) | {
        "by_gpu_and_precision": by(lambda row: f"{row['gpu']} {row['precision']}"),
        "by_model": by(lambda row: str(row["model"])),
        "worst": [[name, round(errors[name], 3), rows[name]["model"]] for name in worst],
    }


def order(
    cases: Cases, names: Sequence[str], estimated: Mapping[str, float]
) -> dict[str, float | int | None]:
    """How well rows are ordered by model FLOP/s: Spearman's rank correlation of estimated and
    measured, None below four rows; and what to hold it against.

    `configurations` are the different ones among the rows, `range` is the fastest row over the
    slowest, less one. `repeat_spread` is the standard deviation of the logarithm between rows of
    one configuration, which releases of the software measured anew. `reachable` is the correlation
    of a model that knows the mean of each configuration: what these repetitions leave.
    """
    measured = np.array(
        [_rate(cases, name, cases.observations[name].step_time_s) for name in names]
    )
    predicted = [_rate(cases, name, estimated[name]) for name in names]
    runs = [dict(cases.observations[name].document) | {"te_version": None} for name in names]
    texts = [json.dumps(run, sort_keys=True) for run in runs]
    _, place = np.unique(texts, return_inverse=True)
    counts = np.bincount(place)
    logs = np.log(measured)
    away = logs - (np.bincount(place, logs) / counts)[place]
    repeats = len(names) - len(counts)
    means = (np.bincount(place, measured) / counts)[place]
    enough = len(names) >= 4
    return {
        "rank_correlation": rank_correlation(measured, predicted) if enough else None,
        "reachable": rank_correlation(measured, means) if enough and len(counts) > 1 else None,
        "configurations": len(counts),
        "range": float(measured.max() / measured.min() - 1.0),
        "repeat_spread": float((away**2).sum() / repeats) ** 0.5 if repeats else None,
    }


def _rate(cases: Cases, name: str, seconds: float) -> float:
    """Model FLOP/s of each GPU."""
    one = cases.observations[name]
    return flops(one) / float(one.document["world_size"]) / seconds


def flops(one: Observation) -> float:
    """Model FLOPs of a step."""
    document = one.document
    return float(
        model_flops_per_step(
            ModelSpec.from_flat(document["model"]),
            document["seq_length"],
            document["global_batch_size"],
            tensor_model_parallel_size=document["config"].get("tensor_model_parallel_size", 1),
        )
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> Any:
        _, place, counts = np.unique(np.round(values, 12), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def other_sources(cases: Cases, known: Calibrations) -> dict[str, Any]:
    """Sources that no rate was fitted to."""
    found = {}
    for source in OTHERS:
        observations = cases.of(source)
        errors = rate_errors(observations, seconds(known, observations))
        found[source] = summary(list(errors.values())) | {
            "rows": {name: round(error, 3) for name, error in errors.items()}
        }
    return found


def what_if(cases: Cases, known: Calibrations) -> dict[str, Any]:
    """Whether the effect of changing one setting has the right sign."""
    observations = cases.of(FITTED, *OTHERS)
    estimated = seconds(known, observations)
    right, wrong = 0, []
    for first, second, setting in pairs(cases, [one.id for one in observations]):
        measured = cases.observations[second].step_time_s / cases.observations[first].step_time_s
        if abs(measured - 1.0) <= DIFFERENCE:
            continue
        change = estimated[second] / estimated[first]
        if (change - 1.0) * (measured - 1.0) > 0:
            right += 1
        else:
            wrong.append([first, second, setting, round(measured - 1, 3), round(change - 1, 3)])
    total = right + len(wrong)
    return {"pairs": total, "right": right / total if total else None, "wrong": wrong}


def pairs(cases: Cases, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Rows of one source and run that differ in one setting, and which."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name in names:
        row = cases.rows[name]
        key = (source_of(row), *(str(row.get(field)) for field in SAME_RUN))
        groups[key].append(name)
    for mine in groups.values():
        for first, second in combinations(mine, 2):
            one, other = cases.rows[first], cases.rows[second]
            differing = [name for name in SETTINGS if _setting(one, name) != _setting(other, name)]
            families = {name.split("_")[0] for name in differing}
            if len(families) == 1:
                yield first, second, ", ".join(differing)


def _setting(row: Row, name: str) -> Any:
    value = row.get(name)
    if name == "dispatcher":
        return tuple((value or {}).get(part) for part in ("type", "flex_backend"))
    return value if value not in ([], "none", 0, 1) else None


SFT_EFFECTS = {
    # row: change of TFLOP/s against the baseline that the series publishes
    "tensor parallel 8": ("mbridge-skill-0015", -0.28),
    "pipeline parallel 8": ("mbridge-skill-0014", -0.06),
    "recompute of mlp": ("mbridge-skill-0017", -0.16),
    "recompute of layernorm": ("mbridge-skill-0019", 0.0),
}
SFT_BASE = "mbridge-skill-0020"


def llama3_70b_sft(cases: Cases, known: Calibrations) -> dict[str, Any]:
    """Effects of single changes on the throughput of one run."""
    names = [SFT_BASE, *(name for name, _ in SFT_EFFECTS.values())]
    if any(name not in cases.observations for name in names):
        return {"skipped": {name: cases.skipped.get(name, "no such row") for name in names}}
    estimated = seconds(known, [cases.observations[name] for name in names])
    found = {}
    for label, (name, published) in SFT_EFFECTS.items():
        effect = estimated[SFT_BASE] / estimated[name] - 1.0
        found[label] = {
            "published": published,
            "estimated": round(effect, 4),
            "reached": abs(effect - published) <= 0.05,
        }
    return found


def sweeps(cases: Cases) -> dict[str, Any]:
    """Layout sweeps: five points calibrate the machine, the rest are estimated."""
    groups: dict[str, list[Observation]] = defaultdict(list)
    for one in cases.of("aleph"):
        groups[sweep_of(cases.rows[one.id])].append(one)
    found = {}
    for label, mine in sorted(groups.items()):
        if len(mine) < 3 * SWEEP_POINTS:
            continue
        ordered = sorted(mine, key=lambda one: one.step_time_s)
        places = np.linspace(0, len(ordered) - 1, SWEEP_POINTS).round().astype(int)
        points = [ordered[place] for place in places]
        start = replace(shipped_calibration(points[0].gpu), residual_spread=0.07)
        measured = [one.step_time_s for one in points]
        known = fit(start, sweep_predictor(cases, points), measured).calibration
        rest = [one for one in mine if one not in points]
        times = sweep_predictor(cases, rest)(known.rates)
        real = np.array([one.step_time_s for one in rest])
        best = float(real[times.argmin()] / real.min() - 1.0)
        found[label] = {
            "rows": len(rest),
            "rank_correlation": rank_correlation(real, times),
            "best_above_measured_best": best,
        }
    return found


def sweep_predictor(cases: Cases, observations: Sequence[Observation]) -> Callable[..., Any]:
    """Step times of sweep rows by the layers and the schedule of the framework that ran them."""
    from tuner.hardware import get_gpu
    from tuner.timing.topology import Links
    from tuner.validation.conversion import launch_of
    from tuner.validation.scaling import ScalingRun
    from tuner.validation.scaling.timing import step_parts

    launches = [launch_of(cases.rows[one.id]) for one in observations]

    def predict(rates: Any) -> Any:
        times = []
        for launch in launches:
            gpu = get_gpu(launch.gpu)
            parts = step_parts(
                ScalingRun(**(launch.framework or {})),
                gpu=gpu,
                links=Links.of(gpu, gpus_per_node=launch.gpus_per_node),
                rates=rates,
                global_batch_size=launch.global_batch_size,
            )
            times.append(sum(parts.values()))
        return np.array(times)

    return predict


def sweep_of(row: Row) -> str:
    """The data sheet a sweep row is from: one model on one number of GPUs."""
    return f"{row['model']}, {row['num_gpus']} GPUs, sequence {row['seq_length']}"


TABLE_START, TABLE_END = "<!-- held-out errors: start -->", "<!-- held-out errors: end -->"


def write_table(page: Path, accuracies: Mapping[str, Any]) -> None:
    """Put the held-out errors between the marks of a page."""
    lines = [
        "| rows | n | median error | 90th percentile | largest | rank correlation | reachable |"
        " range | repeats |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        _line("all", accuracies),
    ]
    for group in ("by_gpu_and_precision", "by_model"):
        lines += [_line(label, figures) for label, figures in accuracies[group].items()]
    put_between(page, TABLE_START, TABLE_END, lines)


def _line(label: str, figures: Mapping[str, Any]) -> str:
    errors = [f"{100 * figures[name]:.1f} %" for name in ("median_abs_err", "p90_abs_err")]
    errors.append(f"{100 * figures['max_abs_err']:.1f} %")
    order = [figures.get(name) for name in ("rank_correlation", "reachable")]
    shown = ["" if value is None else f"{value:.2f}" for value in order]
    apart = [figures.get(name) for name in ("range", "repeat_spread")]
    shown += ["" if value is None else f"{100 * value:.1f} %" for value in apart]
    return " | ".join([f"| {label}", str(figures["n"]), *errors, *shown]) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path, help="folder of the packaged calibrations")
    parser.add_argument("--docs", type=Path, help="page whose table of held-out errors is renewed")
    parser.add_argument("--section", action="append", choices=SECTIONS)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    chosen = options.section or list(SECTIONS)
    sources = {source for name in chosen for source in SOURCES[name]}
    if options.write:
        sources.add(FITTED)
    cases = Cases([row for row in read_rows(options.data) if source_of(row) in sources])
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "rows": len(cases.observations),
        "skipped": cases.skipped,
    }
    known: Calibrations = {}  # nothing: the packaged calibrations hold
    if options.write:
        known = fit_hierarchy(cases.of(FITTED, confidence="high"))
        options.write.mkdir(parents=True, exist_ok=True)
        for device, content in documents(known).items():
            (options.write / f"{device}.json").write_text(json.dumps(content, indent=1) + "\n")
    for name in chosen:
        function = SECTIONS[name]
        document[name] = function(cases, known) if name in NEEDS_FIT else function(cases)
    document["seconds"] = round(time.perf_counter() - started, 1)
    if options.docs and "held_out" in document:
        write_table(options.docs, document["held_out"])
    print(json.dumps(document, indent=1))
    return 0


OTHERS = ("mbridge-card", "mbridge-skill", "simumax")
SOURCES = {
    "held_out": (FITTED,),
    "other_models": (FITTED,),
    "other_sources": OTHERS,
    "what_if": (FITTED, *OTHERS),
    "llama3_70b_sft": ("mbridge-skill",),
    "sweeps": ("aleph",),
}
"""The kinds of rows that a section looks at."""

NEEDS_FIT = ("other_sources", "what_if", "llama3_70b_sft")
SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "held_out": held_out,
    "other_models": other_models,
    "other_sources": other_sources,
    "what_if": what_if,
    "llama3_70b_sft": llama3_70b_sft,
    "sweeps": sweeps,
}

if __name__ == "__main__":
    sys.exit(main())
