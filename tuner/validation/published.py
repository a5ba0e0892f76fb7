"""Published, measured training runs: rows of the schema that `tuner validate` reads.

A row's `measured` holds figures as published, in the unit that `mem_unit` names. Peaks belong to
the ranks that `mem_definition` names; `raw` may hold exact bytes, per rank or of the state between
steps.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import InputError

_GIB, _GB, _MIB = 1 << 30, 10**9, 1 << 20

FIRST, LAST, LARGEST = "first", "last", "largest"
"""Which rank a published peak belongs to: rank 0, the last rank, or the largest of all."""


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What a run reported. Bytes; None is not published.

    `rank` says whose peak it is (`FIRST`, `LAST`, `LARGEST`). `static_bytes` is what stayed
    allocated after a step, on the same rank. `by_rank` maps a rank to (allocated, reserved).
    """

    rank: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    static_bytes: int | None = None
    first_step_bytes: int | None = None
    by_rank: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    out_of_memory: bool | None = None


def read_rows(path: Path | str) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file, compressed or not. Raises InputError with the line number."""
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=str(path)) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=str(path)) from error


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg}", where=where) from error
    if not isinstance(row, dict) or not isinstance(row.get("measured"), dict):
        raise InputError("a row must be an object with `measured`", where=where)
    if not isinstance(row.get("id"), str):
        raise InputError("a row needs an `id`", where=where)
    return row


def source_of(row: Mapping[str, Any]) -> str:
    """The kind of source, which is the row's id without its number."""
    return re.sub(r"-\d+$", "", row["id"])


def measured_memory(row: Mapping[str, Any]) -> MeasuredMemory | None:
    """The memory figures of a row; None where it has neither bytes nor a fit/OOM outcome."""
    measured = row["measured"]
    raw = measured.get("raw") or {}
    factor = _unit(measured.get("mem_unit"))
    peak = raw.get("mem_max_allocated_bytes")
    allocated = _scaled(measured.get("peak_mem_allocated_gb"), factor)
    found = MeasuredMemory(
        rank=_rank(measured.get("mem_definition") or ""),
        allocated_bytes=int(peak) if peak else allocated,
        reserved_bytes=_scaled(measured.get("peak_mem_reserved_gb"), factor),
        static_bytes=_integer(raw.get("mem_allocated_bytes_after_step")),
        first_step_bytes=_integer(raw.get("mem_max_allocated_bytes_first_logged")),
        by_rank=_by_rank(raw.get("peak_memory_by_rank_mb") or {}),
        out_of_memory=measured.get("oom"),
    )
    if found.allocated_bytes is None and found.reserved_bytes is None:
        return found if found.out_of_memory is not None else None
    return found


def _unit(name: str | None) -> int:
    """Bytes of the published unit. Plain "GB" is 10^9, as Megatron Bridge's logger means it."""
    return _GIB if name and name.startswith("GiB") else _GB


def _scaled(value: float | None, factor: int) -> int | None:
    return None if value is None else round(value * factor)


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rank(definition: str) -> str:
    text = definition.lower()
    if "last global rank" in text:
        return LAST
    if "all ranks" in text or "max over" in text:
        return LARGEST
    return FIRST


def _by_rank(entries: Mapping[str, Mapping[str, float]]) -> dict[int, tuple[int, int]]:
    return {
        int(rank): (round(e["max_allocated_mb"] * _MIB), round(e["max_reserved_mb"] * _MIB))
        for rank, e in entries.items()
    }
