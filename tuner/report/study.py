"""The report of a study directory, from what the study left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import InputError
from tuner.files import read_text, read_yaml_mapping
from tuner.measurement import Outcome
from tuner.report.comparison import best_comparisons, effects_of, ran
from tuner.report.content import (
    GIB,
    Predictions,
    RankPeak,
    Report,
    Row,
    differing_fields,
    settings_of,
    shown,
)
from tuner.report.predictions import Told, predict
from tuner.study_dir import StudyDirectory, open_study_directory

_FIGURES = (
    ("step time", "step_time_s", "{:.4g} s"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", "{:.4g}"),
    ("TFLOP/s/GPU", "tflops_per_gpu", "{:.4g}"),
)
_OUTCOMES = {
    Outcome.OOM.value: "ran out of device memory, or above the memory limit",
    Outcome.CRASHED.value: "a rank failed",
    Outcome.TIMEOUT.value: "took longer than the trainable's timeout",
    Outcome.DIVERGED.value: "a loss was not finite",
    Outcome.INTERRUPTED.value: "the tuner was stopped while it ran",
}


def study_report(path: Path, told: Told = lambda _: None, *, predictions: bool = True) -> Report:
    """Read a study directory, and predict its best candidate where that is possible and wanted.

    Raises InputError where it is none or has no summary yet.
    """
    directory = open_study_directory(path)
    summary = read_summary(directory)
    job = read_yaml_mapping(directory.job_path)
    trials = summary["trials"]
    best = next((t for t in trials if t["number"] == summary["best"]), None)
    run = summary.get("best_run") or {}
    return Report(
        title=f"Study {summary['study']}",
        metric=summary["metric"],
        verdict=_verdict(summary, best),
        answer=[] if best is None else _answer(best),
        settings=[] if best is None else settings_of(best["config"]),
        comparisons=list(best_comparisons(summary, has_start=_has_start(job))),
        rows=_rows(summary),
        limit_bytes=_limit_bytes(job),
        pruned=_pruned(summary),
        versions={**summary["versions"], **_environment(directory, job)},
        job=read_text(directory.job_path),
        predictions=_predictions(directory, job, best, told) if predictions else Predictions(),
        effects=effects_of(trials, best, summary["metric"]),
        ranks=[
            RankPeak(one["rank"], one["peak_memory_allocated_bytes"], one["step_time_s"])
            for one in run.get("ranks", ())
        ],
        step_times_s=run.get("step_times_s", ()),
        notes=[f"The study ended because: {summary['ended_because']}."]
        if summary.get("ended_because")
        else [],
    )


def read_summary(directory: StudyDirectory) -> dict[str, Any]:
    """The study's summary document. Raises InputError where it is missing or damaged."""
    try:
        summary: dict[str, Any] = json.loads(read_text(directory.summary_path))
    except InputError:
        raise InputError(
            "has no summary.json yet",
            where=str(directory.path),
            fix=f"tuner tune --resume {directory.path}",
        ) from None
    except ValueError:
        raise InputError("is damaged", where=str(directory.summary_path)) from None
    return summary


def _verdict(summary: Mapping[str, Any], best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "No candidate ran within the memory limit."
    value = best["measured"][summary["metric"]]
    return f"Trial {best['number']} is the best: {summary['metric']} {value:.4g}."


def _answer(best: Mapping[str, Any]) -> list[tuple[str, str]]:
    measured = best["measured"]
    figures = [
        (name, form.format(measured[key]))
        for name, key, form in _FIGURES
        if measured.get(key) is not None
    ]
    peak = measured["peak_memory_allocated_bytes"] / GIB
    return [*figures, ("peak memory allocated", f"{peak:.4g} GiB")]


def _rows(summary: Mapping[str, Any]) -> list[Row]:
    trials = summary["trials"]
    names = differing_fields([trial["config"] for trial in trials])
    front = set(summary["pareto"])
    rows = []
    for trial in trials:
        measured, expected = trial["measured"] or {}, trial.get("expected") or {}
        rows.append(
            Row(
                number=trial["number"],
                outcome=trial["outcome"],
                columns={name: shown(trial["config"].get(name)) for name in names},
                memory_bytes=measured.get("peak_memory_allocated_bytes"),
                value=measured.get(summary["metric"]),
                step_time_s=measured.get("step_time_s"),
                expected_s=expected.get("step_time_s"),
                expected_bytes=expected.get("peak_bytes"),
                reason=trial["reason"] or "",
                on_front=trial["number"] in front,
                best=trial["number"] == summary["best"],
            )
        )
    return rows


def _pruned(summary: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Trials that gave no figures, then candidates that rules refused before any launch."""
    from tuner.constraints.docs import describe_rules

    rejected = summary.get("rejected_by_rule", {})
    says = {str(rule["id"]): str(rule["what"]) for rule in describe_rules()} if rejected else {}
    outcomes = Counter(t["outcome"] for t in summary["trials"] if not ran(t))
    return [
        *((name, count, _OUTCOMES.get(name, "")) for name, count in outcomes.most_common()),
        *(
            (f"rule {rule}", count, says.get(rule, "refused by this rule before any launch"))
            for rule, count in rejected.items()
        ),
    ]


def _has_start(job: Mapping[str, Any]) -> bool:
    return bool((job.get("search") or {}).get("start"))


def _limit_bytes(job: Mapping[str, Any]) -> int | None:
    """The memory limit of the study's job, where it sets one."""
    limit = (job.get("cluster") or {}).get("memory_limit_gib")
    return None if limit is None else int(float(limit) * GIB)


def _environment(directory: StudyDirectory, job: Mapping[str, Any]) -> dict[str, str]:
    """The cluster of the job, and the versions that the best run itself reported."""
    cluster = job.get("cluster") or {}
    found = {f"cluster.{name}": str(value) for name, value in cluster.items()}
    best = _best_document(directory)
    return found | {name: str(value) for name, value in (best.get("versions") or {}).items()}


def _best_document(directory: StudyDirectory) -> dict[str, Any]:
    return read_yaml_mapping(directory.best_path) if directory.best_path.exists() else {}


def _predictions(
    directory: StudyDirectory,
    job: Mapping[str, Any],
    best: Mapping[str, Any] | None,
    told: Told,
) -> Predictions:
    """What is predicted for the best candidate; nothing on a cluster without a known GPU."""
    cluster = job.get("cluster") or {}
    document = _best_document(directory)
    if best is None or not document or cluster.get("gpu") in (None, "cpu"):
        return Predictions()
    from tuner.configuration import resolve_model

    run = {name: cluster[name] for name in ("gpu", "gpus_per_node") if cluster.get(name)}
    try:
        model = resolve_model(document["model"], directory.job_folder)
    except InputError as error:
        return Predictions(problems=(f"model: {error}",))
    return predict({**document, "model": model.to_flat(), **run}, told)
