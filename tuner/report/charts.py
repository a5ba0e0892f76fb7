"""Charts as inline SVG: colours with enough contrast for colour-blind readers, shapes beside them.

Every mark carries a `<title>`, which browsers show on hover and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tuner.report.content import GIB, Effect, Row

WIDTH, HEIGHT = 760.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 20.0, 16.0, 48.0

SERIES = 8
"""Colours `--series-1` to `--series-8` of the page's style sheet."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range, about `count` of them."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / count
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
        first = math.ceil(self.low / step)
        found = [number * step for number in range(first, math.floor(self.high / step) + 1)]
        return found or [self.low]


def scatter(rows: Sequence[Row], metric: str, limit_bytes: int | None) -> str:
    """Metric over peak memory; the Pareto front joined, the limit as a line."""
    points = [(row, row.memory_bytes, row.value) for row in rows]
    known = [(r, m / GIB, v) for r, m, v in points if m is not None and v is not None]
    if not known:
        return ""
    memories = [memory for _, memory, _ in known]
    if limit_bytes:
        memories.append(limit_bytes / GIB)
    x = _axis(memories, _LEFT, WIDTH - _RIGHT)
    y = _axis([value for *_, value in known], HEIGHT - _BOTTOM, _TOP)
    front = sorted((m, v) for row, m, v in known if row.on_front)
    line = " ".join(f"{x.at(m):.1f},{y.at(v):.1f}" for m, v in front)
    marks = [f'<polyline class="front" points="{line}"/>'] if len(front) > 1 else []
    if limit_bytes:
        marks.append(_limit(x.at(limit_bytes / GIB), limit_bytes))
    for row, memory, value in sorted(known, key=lambda item: item[0].on_front):
        marks.append(_mark(row, x.at(memory), y.at(value), f"{value:.4g} {metric}, {memory:.4g}"))
    return _frame(x, y, "peak memory (GiB)", metric, marks, f"{metric} against peak memory")


def _mark(row: Row, x: float, y: float, text: str) -> str:
    about = "; ".join(f"{name} {value}" for name, value in row.columns.items())
    title = escape(f"trial {row.number} ({row.outcome}): {text} GiB. {about}")
    kind = "best" if row.best else "on-front" if row.on_front else "plain"
    if row.best:
        shape = f'<path d="M{x:.1f} {y - 9:.1f}l8 16h-16z"/>'
    elif row.on_front:
        shape = f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
    else:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<g class="mark {kind}" data-number="{row.number}"><title>{title}</title>{shape}</g>'


def _limit(x: float, limit_bytes: int) -> str:
    return (
        f'<g class="limit"><title>memory limit {limit_bytes / GIB:.4g} GiB</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text x="{x + 4:.1f}" y="{HEIGHT - _BOTTOM - 6}">limit</text></g>'
    )


def diagonal(pairs: Sequence[tuple[int, float, float]], unit: str, what: str) -> str:
    """Measured over predicted with the line of equality; `pairs` are (number, predicted, measured).

    Empty where there is nothing to compare.
    """
    if not pairs:
        return ""
    values = [value for _, *both in pairs for value in both]
    x, y = _axis(values, _LEFT, WIDTH - _RIGHT), _axis(values, HEIGHT - _BOTTOM, _TOP)
    marks = [
        f'<line class="equal" x1="{x.at(x.low):.1f}" y1="{y.at(x.low):.1f}" '
        f'x2="{x.at(x.high):.1f}" y2="{y.at(x.high):.1f}"/>'
    ]
    for number, predicted, measured in pairs:
        error = predicted / measured - 1.0 if measured else 0.0
        title = f"trial {number}: predicted {predicted:.4g}, measured {measured:.4g} ({error:+.1%})"
        marks.append(
            f'<g class="mark plain"><title>{escape(title)}</title>'
            f'<circle cx="{x.at(predicted):.1f}" cy="{y.at(measured):.1f}" r="4"/></g>'
        )
    return _frame(x, y, f"predicted ({unit})", f"measured ({unit})", marks, what)


def stacked_bars(
    bars: Sequence[tuple[str, Mapping[str, float]]], unit: str, what: str, limit: float | None
) -> str:
    """One horizontal bar for each label, its parts side by side; `limit` is a line across."""
    if not bars:
        return ""
    parts = list(dict.fromkeys(name for _, values in bars for name in values))
    most = max([sum(values.values()) for _, values in bars] + ([limit] if limit else []))
    height = _TOP + 26 * len(bars) + _BOTTOM
    x = Axis(0.0, most * 1.02 or 1.0, 110.0, WIDTH - _RIGHT)
    marks = []
    for row, (label, values) in enumerate(bars):
        y = _TOP + 26 * row
        marks.append(f'<text x="102" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        done = 0.0
        for name, value in values.items():
            left, right = x.at(done), x.at(done + value)
            done += value
            series = parts.index(name) % SERIES + 1
            title = escape(f"{label}, {name}: {value:.4g} {unit}")
            marks.append(
                f'<rect class="part series-{series}" x="{left:.1f}" y="{y}" '
                f'width="{max(0.0, right - left):.1f}" height="20"><title>{title}</title></rect>'
            )
    bottom = height - _BOTTOM
    marks += [tick_below(x, tick, bottom) for tick in x.ticks()]
    if limit:
        marks.append(
            f'<g class="limit"><title>limit {limit:.4g} {unit}</title><line x1="{x.at(limit):.1f}" '
            f'x2="{x.at(limit):.1f}" y1="{_TOP - 6}" y2="{bottom}"/></g>'
        )
    marks.append(f'<text x="{WIDTH / 2}" y="{height - 10}" text-anchor="middle">{unit}</text>')
    return svg(height, marks, what) + legend(_numbered(parts)) + _figures(bars, parts, unit)


def lines(series: Mapping[str, Sequence[float]], x_name: str, y_name: str, what: str) -> str:
    """Values over their position, one line for each series."""
    longest = max((len(values) for values in series.values()), default=0)
    if longest < 2:
        return ""
    values = [value for line in series.values() for value in line]
    x = Axis(0.0, longest - 1.0, _LEFT, WIDTH - _RIGHT)
    y = Axis(0.0, max(values) * 1.05 or 1.0, HEIGHT - _BOTTOM, _TOP)
    marks = []
    for number, (name, line) in enumerate(series.items()):
        points = " ".join(f"{x.at(i):.1f},{y.at(v):.1f}" for i, v in enumerate(line))
        marks.append(
            f'<polyline class="line series-{number % SERIES + 1}" points="{points}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _frame(x, y, x_name, y_name, marks, what) + legend(_numbered(list(series)))


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room, start, end)


def _frame(x: Axis, y: Axis, x_name: str, y_name: str, marks: Sequence[str], what: str) -> str:
    bottom = HEIGHT - _BOTTOM
    parts = [tick_below(x, tick, bottom) for tick in x.ticks()]
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        )
    middle = (_TOP + bottom) / 2
    parts += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="rotate(-90 16 {middle})" x="16" y="{middle}" '
        f'text-anchor="middle">{escape(y_name)}</text>',
    ]
    return svg(HEIGHT, [*parts, *marks], what)


def _figures(
    bars: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[str], unit: str
) -> str:
    """The values of stacked bars as a table that opens on demand."""
    heads = "".join(f'<th scope="col">{escape(part)}</th>' for part in parts)
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td>{values.get(part, 0.0):.4g}</td>" for part in parts)
        + f"<td>{sum(values.values()):.4g}</td></tr>"
        for label, values in bars
    )
    return (
        f"<details><summary>Figures ({escape(unit)})</summary><table><thead><tr><td></td>{heads}"
        f'<th scope="col">sum</th></tr></thead><tbody>{rows}</tbody></table></details>'
    )


def changes(effects: Sequence[Effect], metric: str) -> str:
    """Diverging bars: by how much the metric changes, worst first; memory stands beside them."""
    if not effects:
        return ""
    ordered = sorted(effects, key=lambda one: one.change)
    most = max(abs(one.change) for one in ordered) or 1.0
    low, high = min(0.0, ordered[0].change), max(0.0, ordered[-1].change)
    x = Axis(low - 0.05 * most, high + 0.05 * most, 300.0, WIDTH - 90.0)
    height = _TOP + 22 * len(ordered) + _BOTTOM
    marks = [tick_below(x, tick, height - _BOTTOM, "{:+.0%}") for tick in x.ticks()]
    for row, one in enumerate(ordered):
        y = _TOP + 22 * row
        left, right = sorted((x.at(0.0), x.at(one.change)))
        label = f"{one.field} = {one.value}" + (" *" if one.others else "")
        more = f"{one.more_bytes / GIB:+.3g} GiB"
        title = escape(f"{label}: {one.change:+.2%} {metric}, {more}" + _also(one.others))
        shown = label if len(label) <= 46 else label[:45] + "…"
        marks.append(
            f'<g class="part series-{6 if one.change < 0 else 3}"><title>{title}</title>'
            f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 1.0):.1f}" height="16"/></g>'
            f'<text x="292" y="{y + 13}" text-anchor="end">{escape(shown)}</text>'
            f'<text x="{WIDTH - 4}" y="{y + 13}" text-anchor="end">{more}</text>'
        )
    name = f"change of {metric}; change of peak memory"
    marks.append(
        f'<text x="{WIDTH / 2}" y="{height - 10}" text-anchor="middle">{escape(name)}</text>'
    )
    return svg(height, marks, f"effect of single settings on {metric}")


def _also(others: int) -> str:
    return f" ({others} other fields differ too)" if others else ""


def tick_below(x: Axis, tick: float, bottom: float, form: str = "{:.4g}") -> str:
    """A vertical grid line with its value below."""
    at = x.at(tick)
    return (
        f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{form.format(tick)}</text>'
    )


def svg(height: float, marks: Sequence[str], what: str) -> str:
    """A chart with its accessible name."""
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'aria-label="{escape(what)}">{"".join(marks)}</svg>'
    )


def legend(names: Sequence[tuple[str, int]]) -> str:
    """A list of names, each with the colour of its series number."""
    items = "".join(
        f'<li><span class="key series-{series}"></span>{escape(name)}</li>'
        for name, series in names
    )
    return f'<ul class="legend">{items}</ul>'


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, number % SERIES + 1) for number, name in enumerate(names)]
