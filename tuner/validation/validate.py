"""`tuner validate`: estimates against published or recorded measurements, row by row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.estimation import EstimateRequest, peak_ranks
from tuner.memory.worker_pool import DryRunError
from tuner.validation.conversion import launch_of
from tuner.validation.launch import Launch, UnmodelledError
from tuner.validation.published import (
    FIRST,
    LAST,
    MeasuredMemory,
    measured_memory,
    read_rows,
    source_of,
)
from tuner.validation.statistics import outcome_summary, relative_error, summary, summary_by

if TYPE_CHECKING:
    from tuner.memory.trace import Trace
    from tuner.validation.step_times import TimeValidation

TimeComparison = Callable[[Sequence[Mapping[str, Any]]], "TimeValidation"]

Estimator = Callable[[Launch, "list[int]"], Mapping[str, Any]]
"""Gives the estimate document of a launch, for these ranks."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row compared. Bytes; `errors` holds a fraction for each figure that was published."""

    id: str
    source: str
    measured: Mapping[str, int]
    estimated: Mapping[str, int]
    measured_oom: bool | None
    estimated_oom: bool
    cause: str | None
    assumptions: tuple[str, ...]

    @property
    def errors(self) -> dict[str, float]:
        return {
            name: relative_error(self.estimated[name], value)
            for name, value in self.measured.items()
            if name in self.estimated
        }

    def to_json(self) -> dict[str, Any]:
        """The row of the document; `measured`, `estimated` and `err` are of the main figure."""
        figure = next((name for name in _FIGURES if name in self.errors), None)
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        if figure is not None:
            row |= {
                "figure": figure,
                "measured": self.measured[figure],
                "estimated": self.estimated[figure],
                "err": self.errors[figure],
                "errors": self.errors,
            }
        if self.measured_oom is not None:
            row |= {"measured_oom": self.measured_oom, "estimated_oom": self.estimated_oom}
        if self.cause:
            row["cause"] = self.cause
        if self.assumptions:
            row["assumptions"] = list(self.assumptions)
        return row


_FIGURES = ("peak_allocated_bytes", "peak_reserved_bytes", "static_bytes")


@dataclass(frozen=True, slots=True)
class Validation:
    """Everything compared, and what was left out with the reason."""

    results: tuple[RowResult, ...]
    skipped: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """The document `tuner validate` prints."""
        return {
            "memory": self._figure("peak_allocated_bytes")
            | {
                "reserved": self._figure("peak_reserved_bytes"),
                "static": self._figure("static_bytes"),
            },
            "time": summary(()) | {"by_source": {}},
            "oom": outcome_summary(
                {
                    result.id: (result.measured_oom, result.estimated_oom)
                    for result in self.results
                    if result.measured_oom is not None
                }
            ),
            "skipped": [{"id": name, "reason": reason} for name, reason in self.skipped],
            "rows": [result.to_json() for result in self.results],
        }

    def _figure(self, name: str) -> dict[str, Any]:
        return summary_by(
            (result.source, result.errors[name])
            for result in self.results
            if name in result.errors and not result.measured_oom
        )


def validate(
    path: Path | str,
    *,
    jsonl_out: Path | str | None = None,
    estimator: Estimator | None = None,
    compare_times: TimeComparison | None = None,
) -> dict[str, Any]:
    """Compare estimates with the rows of `path`; the document of `tuner validate`.

    With `jsonl_out` the compared rows are written there too, one a line. Raises InputError where
    the file cannot be read.
    """
    from tuner.validation import step_times

    rows = list(read_rows(path))
    document = compare(rows, estimator or estimate_launch).to_json()
    times = (compare_times or step_times.compare_times)(rows)
    document["time"] = times.summary()
    document["rows"] = times.joined(document["rows"])
    named = {entry["id"] for entry in document["skipped"]}
    document["skipped"] += [
        {"id": name, "reason": reason} for name, reason in times.skipped if name not in named
    ]
    if jsonl_out is not None:
        lines = "".join(json.dumps(row) + "\n" for row in document["rows"])
        Path(jsonl_out).write_text(lines, encoding="utf-8")
    return document


def compare(rows: Iterable[Mapping[str, Any]], estimator: Estimator) -> Validation:
    """Estimate every row that can be modelled; equal launches are estimated once."""
    results: list[RowResult] = []
    skipped: list[tuple[str, str]] = []
    known: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        measured = measured_memory(row)
        if measured is None:
            continue
        try:
            launch = launch_of(row)
            ranks = ranks_of(launch, measured)
            key = json.dumps([launch.to_json(), ranks], sort_keys=True, default=str)
            if key not in known:
                known[key] = estimator(launch, ranks)
        except (UnmodelledError, InputError, DryRunError) as reason:
            skipped.append((row["id"], str(reason)))
            continue
        results.append(_result(row, launch, measured, known[key]))
    return Validation(tuple(results), tuple(skipped))


def estimate_launch(launch: Launch, ranks: list[int]) -> Mapping[str, Any]:
    """The dry-run estimate of these ranks of a launch.

    Fields that the installed Megatron-Core does not have are left out and named in the document's
    `assumptions`: published runs come from other versions.
    """
    from tuner.estimation import estimate

    if launch.framework is not None:
        trace_of = partial(other_framework_trace, launch.framework)
        return estimate(launch.to_json(), ranks=ranks, trace_of=trace_of)
    known, unknown = _known_fields(launch.config)
    document = estimate(dataclasses.replace(launch, config=known).to_json(), ranks=ranks)
    if unknown:
        document["assumptions"]["fields_left_out"] = unknown
    return document


def other_framework_trace(
    settings: Mapping[str, Any], request: EstimateRequest, rank: int
) -> Trace:
    """The trace of a rank of a run on another framework."""
    from tuner.validation.scaling import ScalingRun
    from tuner.validation.scaling.run import record_rank

    stages = request.candidate.pipeline_model_parallel_size
    stage = rank // (request.world_size // stages)
    return record_rank(ScalingRun(**settings), stage, request.gpu.architecture)


def _known_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that a candidate or the installed Megatron-Core knows, and the names of others."""
    from importlib.metadata import version

    from tuner.constraints.fields import catalogue

    candidate = {field.name for field in dataclasses.fields(Candidate)}
    minor = ".".join(version("megatron-core").split(".")[:2])
    fields = {
        name
        for name, field in catalogue().items()
        if any(known.startswith(minor) for known in field.default)
    }
    unknown = sorted(set(config) - candidate - fields)
    return {name: value for name, value in config.items() if name not in unknown}, unknown


def ranks_of(launch: Launch, measured: MeasuredMemory) -> list[int]:
    """The ranks whose peak was published."""
    if launch.framework is not None:
        return sorted({0, launch.world_size - 1} if launch.framework["stages"] > 1 else {0})
    if measured.rank == LAST:
        return [launch.world_size - 1]
    if measured.rank == FIRST and measured.allocated_bytes is not None:
        return [0]
    return peak_ranks(EstimateRequest.from_document(launch.to_json()))


def _result(
    row: Mapping[str, Any], launch: Launch, measured: MeasuredMemory, document: Mapping[str, Any]
) -> RowResult:
    published = {
        "peak_allocated_bytes": measured.allocated_bytes,
        "peak_reserved_bytes": measured.reserved_bytes,
        "static_bytes": measured.static_bytes,
    }
    estimated = {
        "peak_allocated_bytes": document["peak_allocated_bytes"],
        "peak_reserved_bytes": document["peak_reserved_bytes"],
        "static_bytes": max((rank["static_bytes"] or 0 for rank in document["ranks"]), default=0),
    }
    return RowResult(
        id=row["id"],
        source=source_of(row),
        measured={name: value for name, value in published.items() if value},
        estimated={name: value for name, value in estimated.items() if value},
        measured_oom=measured.out_of_memory,
        estimated_oom=not document["fits"],
        cause=document["memory_fit"]["cause"],
        assumptions=launch.assumptions,
    )
