"""A report as a note in Markdown: what won, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.report.content import GIB, Effect, Report, Row

_ROWS = 12
_EFFECTS = 8


def note(report: Report) -> str:
    """The verdict, its gains, the winning settings, the front, effects and what was left out."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"## {report.title}"
    yield ""
    yield f"**{report.verdict}**"
    yield ""
    yield from (f"- {name}: {text}" for name, text in report.comparisons)
    yield from (f"- {line}" for line in report.notes)
    if report.answer:
        yield from _table("What won", ("figure", "value"), report.answer)
        yield from _table("Its settings", ("field", "value"), report.settings)
    front = sorted((row for row in report.rows if row.on_front), key=lambda r: r.memory_bytes or 0)
    names = _differing(front)
    yield from _table(
        "Pareto front, leanest first",
        ("trial", "peak GiB", report.metric, *names),
        [_front_row(row, names) for row in front[-_ROWS:]],
    )
    effects = sorted(report.effects, key=lambda one: (one.others, one.change))[:_EFFECTS]
    yield from _table(
        "Why: what other values of its settings gave",
        ("setting", report.metric, "memory (GiB)", "other fields that differ"),
        [_effect_row(one) for one in effects],
    )
    yield from _table(
        "What was left out",
        ("what", "candidates", "why"),
        [(what, str(count), why) for what, count, why in report.pruned],
    )


def _front_row(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    value = "-" if row.value is None else f"{row.value:.4g}"
    memory = f"{(row.memory_bytes or 0) / GIB:.4g}"
    return (f"{row.number}", memory, value, *(row.columns.get(name, "-") for name in names))


def _effect_row(one: Effect) -> tuple[str, ...]:
    change, size = f"{one.change:+.1%}", f"{one.more_bytes / GIB:+.3g}"
    return (f"{one.field} = {one.value}", change, size, str(one.others))


def _differing(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return [name for name in names if len({row.columns.get(name) for row in rows}) > 1]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"### {title}"
    yield ""
    yield "| " + " | ".join(heads) + " |"
    yield "| " + " | ".join("---" for _ in heads) + " |"
    yield from ("| " + " | ".join(_cell(text) for text in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
