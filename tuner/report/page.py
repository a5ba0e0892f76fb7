"""The HTML page of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.files import write_text
from tuner.report import charts
from tuner.report.content import GIB, Effect, Report, Row
from tuner.report.pipeline import pipeline_chart

_RANKS = 16
_EFFECTS = 24


def render(report: Report) -> str:
    """The page: one document with its style, script and charts inside."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("tuner.report", "."), autoescape=True)
    template = environment.get_template("page.html.j2")
    return template.render(
        report=report,
        columns=_columns(report.rows),
        gib=lambda size: "-" if size is None else f"{size / GIB:.3g}",
        number=lambda value: "-" if value is None else f"{value:.4g}",
        style=_resource("page.css"),
        script=_resource("page.js"),
        charts=_charts(report),
    )


def write_page(report: Report, path: Path) -> None:
    """Write the page to a file. Raises InputError where it cannot be written."""
    write_text(path, render(report))


def _charts(report: Report) -> Sequence[tuple[str, str, str]]:
    """(heading, explanation, SVG) of every chart that has something to show."""
    rows = report.rows
    expected_time = [
        (row.number, row.expected_s, row.step_time_s)
        for row in rows
        if row.expected_s is not None and row.step_time_s is not None
    ]
    expected_memory = [
        (row.number, row.expected_bytes / GIB, row.memory_bytes / GIB)
        for row in rows
        if row.expected_bytes is not None and row.memory_bytes is not None
    ]
    found = [
        (
            "Throughput against memory",
            "Triangle: the best candidate. Squares: the Pareto front. Circles: the others.",
            charts.scatter(rows, report.metric, report.limit_bytes),
        ),
        *prediction_charts(report),
        *_measured_charts(report),
        (
            "What each setting does around the best candidate",
            "Change when one setting has another value; with a star, other settings change too.",
            charts.changes(_clearest(report.effects), report.metric),
        ),
        (
            "Step time, predicted and measured",
            "Points on the line were predicted exactly; below it, too slow.",
            charts.diagonal(expected_time, "s", "measured against predicted step time"),
        ),
        (
            "Peak memory, predicted and measured",
            "Points on the line were predicted exactly; below it, too much.",
            charts.diagonal(expected_memory, "GiB", "measured against predicted peak memory"),
        ),
    ]
    return [chart for chart in found if chart[2]]


def prediction_charts(report: Report) -> Sequence[tuple[str, str, str]]:
    """Charts of what was predicted for the best candidate."""
    estimate = report.predictions.estimate or {}
    stacks = [
        (f"stage {rank['stage']}", {k: v / GIB for k, v in rank["breakdown"].items() if v})
        for rank in estimate.get("ranks", ())
    ]
    limit = report.limit_bytes / GIB if report.limit_bytes else None
    time = {
        name: value
        for name, value in (estimate.get("time_breakdown") or {}).items()
        if value and name != "uncertainty"
    }
    pipeline = report.predictions.pipeline
    return [
        (
            "Memory by pipeline stage (predicted)",
            "What the peak of each stage is made of; the line is the limit.",
            charts.stacked_bars(stacks, "GiB", "predicted memory of each pipeline stage", limit),
        ),
        (
            "Memory over a step (predicted)",
            "The rank with the largest peak, event by event.",
            _memory_timeline(report.predictions.fullest),
        ),
        (
            "Where a step's time goes (predicted)",
            "Seconds of one optimizer step.",
            charts.stacked_bars(
                [("step", time)] if time else [], "s", "predicted breakdown of step time", None
            ),
        ),
        (
            "Pipeline timeline (predicted)",
            "One step, a row for each pipeline stage; gaps are pipeline bubbles.",
            "" if pipeline is None else pipeline_chart(pipeline),
        ),
    ]


def _measured_charts(report: Report) -> Sequence[tuple[str, str, str]]:
    limit = report.limit_bytes / GIB if report.limit_bytes else None
    fullest = sorted(report.ranks, key=lambda one: -one.allocated_bytes)[:_RANKS]
    peaks = [
        (f"rank {one.rank}", {"allocated": one.allocated_bytes / GIB})
        for one in sorted(fullest, key=lambda one: one.rank)
    ]
    which = f"The {_RANKS} fullest ranks" if len(report.ranks) > _RANKS else "Each rank"
    return [
        (
            "Peak memory by rank (measured)",
            f"{which} of the best run; the line is the limit.",
            charts.stacked_bars(peaks, "GiB", "measured peak memory of each rank", limit),
        ),
        (
            "Step times of the best run (measured)",
            "The slowest rank of each timed step.",
            charts.lines({"step": report.step_times_s}, "timed step", "s", "measured step times"),
        ),
    ]


def _memory_timeline(rank: Mapping[str, Any] | None) -> str:
    timeline = {} if rank is None else rank.get("timeline", {})
    if not timeline.get("allocated_bytes"):
        return ""
    series = {
        name: [value / GIB for value in timeline[f"{name}_bytes"]]
        for name in ("allocated", "reserved")
    }
    return charts.lines(series, "event", "GiB", "predicted memory over a step")


def _clearest(effects: Sequence[Effect]) -> list[Effect]:
    """Those of which most can be said: the fewest other fields differ, then the largest."""
    return sorted(effects, key=lambda one: (one.others, -abs(one.change)))[:_EFFECTS]


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.columns))


def _resource(name: str) -> str:
    return resources.files("tuner.report").joinpath(name).read_text()
