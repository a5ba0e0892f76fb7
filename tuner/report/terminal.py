"""The short form of a report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.report.content import GIB, Report, Row

if TYPE_CHECKING:
    from rich.console import Console

_LEVELS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_SHOWN = 8


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """One character for each value, at most `width`; a dot stands for None.

    Longer series show the largest value of each equal part.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    count = min(width, len(values))
    drawn = []
    for part in range(count):
        first, end = part * len(values) // count, (part + 1) * len(values) // count
        within = [value for value in values[first:end] if value is not None]
        if not within:
            drawn.append("·")
            continue
        share = (max(within) - low) / span if span else 1.0
        drawn.append(_LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)])
    return "".join(drawn)


def print_short(report: Report, out: Console) -> None:
    """Verdict, gains, the course of the study, the front and the largest effects."""
    from rich.table import Table
    from rich.text import Text

    out.print(Text.assemble((report.title, "bold"), f": {report.verdict}"))
    for name, text in report.comparisons:
        out.print(f"  {name}: {text}")
    ordered = sorted(report.rows, key=lambda row: row.number)
    line = sparkline([row.value for row in ordered])
    if line:
        out.print(f"  {report.metric} by trial: {line}")
    front = sorted((row for row in report.rows if row.on_front), key=_memory)
    table = Table(title="Pareto front, leanest first", box=None, pad_edge=False)
    names = _telling_columns(front)
    for column in ("trial", "peak GiB", report.metric, *names):
        table.add_column(column, overflow="fold")
    for row in front:
        table.add_row(
            f"{row.number}{' (best)' if row.best else ''}",
            f"{_memory(row) / GIB:.4g}",
            "-" if row.value is None else f"{row.value:.4g}",
            *(row.columns.get(name, "-") for name in names),
        )
    if front:
        out.print(table)
    effects = sorted(report.effects, key=lambda one: one.change)[:_SHOWN]
    for one in effects:
        also = f" ({one.others} other fields differ)" if one.others else ""
        out.print(
            f"  {one.field}={one.value}: {one.change:+.1%} {report.metric}, "
            f"{one.more_bytes / GIB:+.3g} GiB{also}"
        )
    for problem in report.predictions.problems:
        out.print(f"  not predicted: {problem}")


def _memory(row: Row) -> int:
    return row.memory_bytes or 0


def _telling_columns(rows: Sequence[Row], most: int = 6) -> list[str]:
    """Columns whose values differ among these rows."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return [name for name in names if len({row.columns.get(name) for row in rows}) > 1][:most]
