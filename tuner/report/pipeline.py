"""A step over the pipeline as inline SVG, from a Chrome trace: one row for each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape
from typing import Any

from tuner.report.charts import WIDTH, Axis, legend, svg, tick_below

_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 20.0, 8.0, 48.0
_ROW, _BAR, _THIN = 26.0, 16.0, 5.0
_KINDS = ("forward", "recompute", "backward", "optimizer", "reduce", "gather")
_NAMES = {"reduce": "gradient reduction", "gather": "weight gathering"}
_SERIES = {
    "forward": 1, "recompute": 2, "backward": 3, "optimizer": 4, "reduce": 6, "gather": 5,
}  # fmt: skip
_PIXEL = 0.25


def pipeline_chart(trace: Mapping[str, Any]) -> str:
    """Passes of each stage over time; data-parallel transfers as thin bars below them."""
    bars = _bars(trace)
    if not bars:
        return ""
    stages = 1 + max(stage for stage, _ in bars)
    end_s = max(end for spans in bars.values() for _, end in spans)
    height = _TOP + _ROW * stages + _BOTTOM
    x = Axis(0.0, end_s, _LEFT, WIDTH - _RIGHT)
    marks = [tick_below(x, tick, height - _BOTTOM) for tick in x.ticks()]
    for stage in range(stages):
        y = _TOP + _ROW * stage + _BAR - 4
        marks.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">stage {stage}</text>')
    marks += [_path(stage, kind, spans, x) for (stage, kind), spans in sorted(bars.items())]
    marks.append(f'<text x="{WIDTH / 2}" y="{height - 10}" text-anchor="middle">seconds</text>')
    shown = [kind for kind in _KINDS if any(kind == found for _, found in bars)]
    key = legend([(_NAMES.get(kind, kind), _SERIES[kind]) for kind in shown])
    return svg(height, marks, "predicted pipeline timeline of one step") + key


def _bars(trace: Mapping[str, Any]) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """By (stage, kind), start and end of each event in seconds, in order."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        kind = str(event["name"]).split()[0]
        if event["ph"] == "X" and kind in _KINDS:
            start = event["ts"] / 1e6
            found[event["pid"], kind].append((start, start + event["dur"] / 1e6))
    return {key: sorted(spans) for key, spans in found.items()}


def _path(stage: int, kind: str, spans: list[tuple[float, float]], x: Axis) -> str:
    """One path for all bars of a stage and kind; bars closer than a pixel's part are joined."""
    thin = kind in ("reduce", "gather")
    y = _TOP + _ROW * stage + (_BAR + 1 if thin else 0)
    height = _THIN if thin else _BAR
    joined: list[list[float]] = []
    for start, end in ((x.at(start), x.at(end)) for start, end in spans):
        if joined and start - joined[-1][1] < _PIXEL and joined[-1][1] - joined[-1][0] < 2:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    drawn = "".join(
        f"M{a:.1f} {y:g}h{max(b - a, _PIXEL):.1f}v{height:g}H{a:.1f}z" for a, b in joined
    )
    spent = sum(end - start for start, end in spans)
    name = _NAMES.get(kind, kind)
    title = escape(f"stage {stage}, {name}: {spent:.4g} s in {len(spans)} parts")
    return f'<path class="part series-{_SERIES[kind]}" d="{drawn}"><title>{title}</title></path>'
