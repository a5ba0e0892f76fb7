"""The report of a study directory, from what the study left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.errors import InputError
from tuner.files import read_text
from tuner.report.content import GIB, Report, Row, differing_fields, shown
from tuner.study_dir import StudyDirectory, open_study_directory

_FIGURES = (
    ("step time", "step_time_s", "{:.4g} s"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", "{:.4g}"),
    ("TFLOP/s/GPU", "tflops_per_gpu", "{:.4g}"),
)


def study_report(path: Path) -> Report:
    """Read a study directory. Raises InputError where it is none or has no summary yet."""
    directory = open_study_directory(path)
    try:
        summary: dict[str, Any] = json.loads(read_text(directory.summary_path))
    except InputError:
        raise InputError(
            "has no summary.json yet", where=str(path), fix=f"tuner tune --resume {path}"
        ) from None
    except ValueError:
        raise InputError("is damaged", where=str(directory.summary_path)) from None
    trials = summary["trials"]
    best = next((t for t in trials if t["number"] == summary["best"]), None)
    estimate, problem = _estimate(directory, best)
    limit = _limit_bytes(directory)
    return Report(
        title=f"Study {summary['study']}",
        metric=summary["metric"],
        verdict=_verdict(summary, best),
        answer=[] if best is None else _answer(best),
        comparisons=[] if best is None else list(_comparisons(summary["metric"], trials, best)),
        rows=_rows(summary),
        limit_bytes=limit,
        pruned=[
            (rule, count, "refused by this rule before any launch")
            for rule, count in summary.get("rejected_by_rule", {}).items()
        ],
        versions=summary["versions"],
        job=read_text(directory.job_path),
        estimate=estimate,
        estimate_problem=problem,
        notes=[f"The study ended because {summary['ended_because']}."]
        if summary.get("ended_because")
        else [],
    )


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
    settings = [(name, shown(value)) for name, value in best["config"].items() if value is not None]
    return [*figures, ("peak memory allocated", f"{peak:.4g} GiB"), *settings]


def _comparisons(
    metric: str, trials: Sequence[Mapping[str, Any]], best: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The best trial against the first that ran and against the best without recompute."""
    ran = [trial for trial in trials if trial["outcome"] == "completed" and trial["measured"]]
    plain = [trial for trial in ran if not trial["config"].get("recompute_granularity")]
    found = []
    if ran:
        found.append(("against the first trial that ran", ran[0]))
    if plain:
        control = max(plain, key=lambda trial: trial["measured"][metric])
        found.append(("against the best without recompute", control))
    return [(name, _gain(metric, best, other)) for name, other in found]


def _gain(metric: str, best: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if other["number"] == best["number"]:
        return "it is that trial"
    change = best["measured"][metric] / other["measured"][metric] - 1.0
    key = "peak_memory_allocated_bytes"
    size = (best["measured"][key] - other["measured"][key]) / GIB
    return f"{change:+.1%} {metric}, {size:+.3g} GiB (trial {other['number']})"


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


def _limit_bytes(directory: StudyDirectory) -> int | None:
    """The memory limit of the study's job, where it sets one."""
    import yaml

    job = yaml.safe_load(read_text(directory.job_path)) or {}
    for section in ("objective", "cluster"):
        limit = (job.get(section) or {}).get("memory_limit_gib")
        if limit is not None:
            return int(float(limit) * GIB)
    return None


def _estimate(
    directory: StudyDirectory, best: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, str]:
    """The prediction for the best candidate, or why there is none."""
    import yaml

    if best is None or not directory.best_path.exists():
        return None, ""
    document = yaml.safe_load(read_text(directory.best_path))
    gpu = ((yaml.safe_load(read_text(directory.job_path)) or {}).get("cluster") or {}).get("gpu")
    if gpu in (None, "cpu"):
        return None, ""
    from tuner.api import estimate

    try:
        return estimate({**document, "gpu": gpu}), ""
    except (InputError, RuntimeError) as error:
        return None, f"The best candidate could not be estimated: {error}"
