"""What a report says, as values; `page` turns it into HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate in the table and in the charts.

    `memory_bytes` and `value` (the metric) are None where nothing was measured or predicted;
    `expected_s` and `step_time_s` are seconds, `expected_bytes` bytes. `columns` are the fields in
    which candidates differ.
    """

    number: int
    outcome: str
    columns: Mapping[str, str]
    memory_bytes: int | None = None
    value: float | None = None
    step_time_s: float | None = None
    expected_s: float | None = None
    expected_bytes: int | None = None
    reason: str = ""
    on_front: bool = False
    best: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. `answer` and `comparisons` are (label, text) pairs, the main thing first.

    `estimate` is the document of `tuner estimate` for the best candidate, or None; `effects` are
    (field, value, change of the metric as a fraction, change of bytes) around the best candidate;
    `pruned` are (what, how many, why).
    """

    title: str
    metric: str
    verdict: str
    answer: Sequence[tuple[str, str]]
    comparisons: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    limit_bytes: int | None
    pruned: Sequence[tuple[str, int, str]]
    versions: Mapping[str, str]
    job: str
    estimate: Mapping[str, Any] | None = None
    estimate_problem: str = ""
    effects: Sequence[tuple[str, str, float, int]] = ()
    notes: Sequence[str] = field(default=())


def differing_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields whose values are not the same in all configurations, in order of appearance."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({repr(config.get(name)) for config in configs}) > 1]


def shown(value: object) -> str:
    """A setting as people write it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "+".join(str(item) for item in value) or "-"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items()) or "-"
    return str(value)
