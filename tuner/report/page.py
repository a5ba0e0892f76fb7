"""The HTML page of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from tuner.report import charts
from tuner.report.content import GIB, Report, Row


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
        *_estimate_charts(report),
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


def _estimate_charts(report: Report) -> Sequence[tuple[str, str, str]]:
    estimate = report.estimate
    if estimate is None:
        return []
    ranks = estimate.get("ranks", [])
    stacks = [
        (f"stage {rank['stage']}", {k: v / GIB for k, v in rank["breakdown"].items() if v})
        for rank in ranks
    ]
    limit = report.limit_bytes / GIB if report.limit_bytes else None
    time = {name: value for name, value in (estimate.get("time_breakdown") or {}).items() if value}
    return [
        (
            "Memory by pipeline stage (predicted)",
            "What the peak of each stage is made of; the line is the limit.",
            charts.stacked_bars(stacks, "GiB", "predicted memory of each pipeline stage", limit),
        ),
        (
            "Memory over a step (predicted)",
            "The rank with the largest peak, event by event.",
            _memory_timeline(ranks),
        ),
        (
            "Where a step's time goes (predicted)",
            "Seconds of one optimizer step.",
            charts.stacked_bars(
                [("step", time)] if time else [], "s", "predicted breakdown of step time", None
            ),
        ),
    ]


def _memory_timeline(ranks: Sequence[Mapping[str, Any]]) -> str:
    timed = [rank for rank in ranks if rank.get("timeline", {}).get("allocated_bytes")]
    if not timed:
        return ""
    fullest = max(timed, key=lambda rank: rank["allocated_bytes"])
    timeline = fullest["timeline"]
    series = {
        name: [value / GIB for value in timeline[f"{name}_bytes"]]
        for name in ("allocated", "reserved")
    }
    return charts.lines(series, "event", "GiB", "predicted memory over a step")


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.columns))


def _resource(name: str) -> str:
    return resources.files("tuner.report").joinpath(name).read_text()
