"""The report of a plan: the same page as a study's, of predictions only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.report.content import (
    GIB,
    Effect,
    Predictions,
    Report,
    Row,
    differing_fields,
    settings_of,
    shown,
)
from tuner.report.predictions import Told, predict

if TYPE_CHECKING:
    from tuner.cluster.prepared import PreparedJob

_METRIC = "tflops_per_gpu"
_COUNTS = (
    ("invalid", "refused by the rules"),
    ("not_required", "valid, but not what the job requires"),
    ("not_estimated", "valid, but nothing estimates them"),
    ("oom", "predicted peak above the memory limit"),
)


def plan_report(
    answer: Mapping[str, Any],
    prepared: PreparedJob,
    job_text: str,
    told: Told = lambda _: None,
) -> Report:
    """The report of a document of `tuner plan` and of the job it was made for."""
    from tuner.summary import versions

    candidates = answer["candidates"]
    best = candidates[0] if candidates else None
    predictions = (
        Predictions() if best is None else predict(_document(prepared, best["config"]), told)
    )
    return Report(
        title=f"Plan of {answer['job']} for {answer['world_size']} {answer['gpu']}",
        metric=_METRIC,
        verdict=_verdict(best),
        answer=[] if best is None else _figures(best["estimate"]),
        settings=[] if best is None else settings_of(best["config"]),
        comparisons=[] if best is None else list(_comparisons(answer, prepared)),
        rows=_rows(answer),
        limit_bytes=None if best is None else best["estimate"]["limit_bytes"],
        pruned=_pruned(answer["counts"], answer["not_estimated_because"]),
        versions=versions(),
        job=job_text,
        predictions=predictions,
        effects=_effects(answer),
        notes=[*answer["explanation"]["text"], "All figures are predictions."],
    )


def _document(prepared: PreparedJob, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `tuner estimate` takes for a candidate of the job."""
    cluster, workload = prepared.job.cluster, prepared.job.workload
    return {
        "model": prepared.model.to_flat(),
        "config": dict(config),
        "world_size": cluster.world_size,
        "seq_length": workload.seq_length,
        "global_batch_size": workload.global_batch_size,
        "gpu": cluster.gpu,
        "gpus_per_node": cluster.gpus_per_node,
        "precision": workload.precision,
    }


def _verdict(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "No candidate is predicted to fit."
    found = best["estimate"]
    return (
        f"Best prediction: {found['tflops_per_gpu']:.4g} TFLOP/s/GPU, "
        f"{found['peak_allocated_bytes'] / GIB:.4g} GiB."
    )


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = [
        ("step time", f"{found['step_time_s']:.4g} s"),
        ("tokens/s/GPU", f"{found['tokens_per_s_per_gpu']:.4g}"),
        ("TFLOP/s/GPU", f"{found['tflops_per_gpu']:.4g}"),
        ("peak memory allocated", f"{found['peak_allocated_bytes'] / GIB:.4g} GiB"),
    ]
    if found["mfu"] is not None:
        figures.insert(3, ("MFU", f"{found['mfu']:.1%}"))
    return figures


def _comparisons(answer: Mapping[str, Any], prepared: PreparedJob) -> Iterator[tuple[str, str]]:
    """The best candidate against the job's first starting point, and against no recompute."""
    best = answer["candidates"][0]
    for flat in prepared.job.search.start[:1]:
        yield "against your starting point", _against_start(best, _document(prepared, flat))
    knob = answer["explanation"]["knobs"].get("recompute_granularity")
    if knob is not None and knob["value"] is not None and knob["other"] is None:
        gain, less = knob["slower"], -knob["more_bytes"] / GIB
        yield "against the best without recompute", f"{gain:+.1%} {_METRIC}, {less:+.3g} GiB"
    elif best["config"].get("recompute_granularity") is None:
        yield "against the best without recompute", "it is that candidate"


def _against_start(best: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    from tuner.errors import InputError
    from tuner.estimation_composed import estimate_composed
    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError

    try:
        start = estimate_composed(document)
    except (InputError, UnsupportedError, DryRunError, ValueError) as error:
        return f"that cannot be estimated: {error}"
    size = (best["estimate"]["peak_allocated_bytes"] - start["peak_allocated_bytes"]) / GIB
    fits = "" if start["fits"] else "; the starting point is predicted not to fit"
    if start.get("step_time_s") is None:
        return f"{size:+.3g} GiB{fits}"
    gain = start["step_time_s"] / best["estimate"]["step_time_s"] - 1.0
    return f"{gain:+.1%} {_METRIC}, {size:+.3g} GiB{fits}"


def _rows(answer: Mapping[str, Any]) -> list[Row]:
    """Best candidates first, then those of the Pareto front that are not among them."""
    front = [one["config"] for one in answer["pareto"]]
    best = answer["candidates"]
    shown_configs = [one["config"] for one in best]
    entries = [*best, *(one for one in answer["pareto"] if one["config"] not in shown_configs)]
    names = differing_fields([one["config"] for one in entries])
    rows = []
    for number, one in enumerate(entries):
        found, confirmed = one["estimate"], one["confirmed"] or {}
        rows.append(
            Row(
                number=number,
                outcome="confirmed by dry run" if confirmed.get("fits") else "predicted",
                columns={name: shown(one["config"].get(name)) for name in names},
                memory_bytes=found["peak_allocated_bytes"],
                value=found[_METRIC],
                step_time_s=found["step_time_s"],
                on_front=one["config"] in front,
                best=number == 0 and bool(best),
            )
        )
    return rows


def _pruned(
    counts: Mapping[str, int], problems: Mapping[str, int]
) -> Sequence[tuple[str, int, str]]:
    left = [(name.replace("_", " "), counts[name], why) for name, why in _COUNTS if counts[name]]
    return [*left, *(("not estimated", count, why) for why, count in problems.items())]


def _effects(answer: Mapping[str, Any]) -> list[Effect]:
    """The fastest candidate with another value of each field, against the best."""
    knobs = answer["explanation"]["knobs"]
    return [
        Effect(
            name,
            shown(knob["other"]),
            1.0 / (1.0 + knob["slower"]) - 1.0,
            int(knob["more_bytes"]),
            _others(answer["candidates"][0]["config"], knob["config"], name),
        )
        for name, knob in knobs.items()
    ]


def _others(best: Mapping[str, Any], other: Mapping[str, Any], name: str) -> int:
    return len([field for field in differing_fields([best, other]) if field != name])


def write_plan_report(
    answer: Mapping[str, Any],
    prepared: PreparedJob,
    job: Path,
    out: Path,
    told: Told = lambda _: None,
) -> None:
    """Write the page of a plan. Raises InputError where `out` cannot be written."""
    from tuner.report.page import write_page

    write_page(plan_report(answer, prepared, job.read_text(encoding="utf-8"), told), out)
