"""What a report says, as values; `page` turns it into HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
class Effect:
    """What another value of one field does to the best candidate.

    `change` is that of the metric as a fraction, `more_bytes` that of peak memory; `others` counts
    the other fields in which the compared candidate differs from the best.
    """

    field: str
    value: str
    change: float
    more_bytes: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the models say of the best candidate, where they can.

    `estimate` is the document of `tuner estimate --method composed`, `fullest` the rank document of
    a full dry run of the stage with the largest peak (it has the memory timeline), `pipeline` the
    predicted step as a Chrome trace. `problems` says why something is missing.
    """

    estimate: Mapping[str, Any] | None = None
    fullest: Mapping[str, Any] | None = None
    pipeline: Mapping[str, Any] | None = None
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RankPeak:
    """Measured peak of one rank of the best run, in bytes."""

    rank: int
    allocated_bytes: int
    step_time_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report. `answer`, `settings` and `comparisons` are (label, text) pairs.

    `pruned` are (what, how many, why). `step_times_s` are the measured steps of the best run and
    `ranks` its ranks; both are empty for a plan.
    """

    title: str
    metric: str
    verdict: str
    answer: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    comparisons: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    limit_bytes: int | None
    pruned: Sequence[tuple[str, int, str]]
    versions: Mapping[str, str]
    job: str
    predictions: Predictions = Predictions()
    effects: Sequence[Effect] = ()
    ranks: Sequence[RankPeak] = ()
    step_times_s: Sequence[float] = ()
    notes: Sequence[str] = ()


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


def settings_of(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fields of a flat configuration that are set, and their values as they are shown."""
    return [(name, shown(value)) for name, value in config.items() if value is not None]
