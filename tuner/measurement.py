"""What a trial is asked to run and what it reports back.

These are the two documents exchanged between the tuner and a trainable, as frozen values with a
JSON form. A trainable reads a `TrialSpec` and writes a `TrialResult`; both are plain data, so the
trainable's processes need nothing of the tuner's state.
"""

from __future__ import annotations

import enum
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
"""Files of a trial's folder: what it was asked to run, and how it ended."""


class Outcome(str, enum.Enum):
    """How a trial ended. Every trial has exactly one."""

    COMPLETED = "completed"
    OOM = "oom"  # out of device memory; on the CPU device: peak above `memory_limit_bytes`
    CRASHED = "crashed"  # a rank raised, or ended without a result
    TIMEOUT = "timeout"  # longer than `timeout_s`
    DIVERGED = "diverged"  # a loss was not finite
    HUNG = "hung"  # no step, and no phase of the start, for `hang_after_s`
    KILLED = "killed"  # a process was killed by a signal that nobody here sent
    SEGFAULT = "segfault"  # a process broke memory protection (SIGSEGV, SIGBUS, ...)
    COMMUNICATION = "communication"  # a collective failed or timed out, a peer could not be met
    NODE_LOST = "node_lost"  # a node, or the tuner's process on it, went away
    PREEMPTED = "preempted"  # a process was asked to end (SIGTERM)
    DISK_FULL = "disk_full"  # no space left, or a quota or file size reached
    INTERRUPTED = "interrupted"  # the tuner was stopped while the trial ran

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One candidate to run for real.

    `model` holds architecture fields, `config` the flat candidate; both are keyed by Megatron-Core
    field names. Sizes are in tokens (`seq_length`), sequences (`global_batch_size`), bytes and
    seconds.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    world_size: int
    seq_length: int
    global_batch_size: int
    warmup_steps: int = 1
    measure_steps: int = 3
    seed: int = 1234
    device: str = "cpu"  # "cpu" or "cuda"
    precision: str = "bf16"  # "bf16" or "fp32"
    memory_limit_bytes: int | None = None
    timeout_s: float = 600.0
    beat_step_time_s: float | None = None  # a run surely slower than this stops timing steps
    hang_after_s: float | None = None  # without a step for this long a run counts as hung
    options: Mapping[str, Any] = field(default_factory=dict)  # of the trainable, e.g. the recipe

    def to_json(self) -> dict[str, Any]:
        """The JSON form; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialSpec:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """What one rank saw. Bytes are peaks over the measured steps and the ones before them.

    `peak_device_bytes` is what the whole device held, other processes and libraries included.
    """

    rank: int
    step_time_s: float
    peak_memory_allocated_bytes: int
    peak_memory_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of a run of real steps.

    `step_times_s` are the measured steps, slowest rank each, warm-up left out; `step_time_s` is
    their median and `step_time_spread_s` their largest minus their smallest. Memory is the largest
    over ranks. `losses` holds every step's loss, warm-up included. `tflops_per_gpu` is model
    TFLOP/s as Megatron Bridge counts it (three times the forward GEMMs, causal half of attention,
    no recompute).
    """

    step_time_s: float
    step_time_spread_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    peak_memory_allocated_bytes: int
    peak_memory_reserved_bytes: int | None
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    ranks: tuple[RankMeasurement, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        values = dict(data)
        values["losses"] = tuple(values["losses"])
        values["step_times_s"] = tuple(values["step_times_s"])
        values["ranks"] = tuple(RankMeasurement(**rank) for rank in values["ranks"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The one outcome of a trial: its reason in a sentence, and its figures where it has any.

    An OOM on the CPU device still carries its measurement (the peak is what broke the limit).
    `duration_s` is wall time from launch to the end of the last process. `evidence` is a small JSON
    document on what happened: last log lines, failed ranks, figures of an allocator's message,
    nodes, earlier attempts.
    """

    outcome: Outcome
    reason: str = ""
    measurement: Measurement | None = None
    duration_s: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": str(self.outcome),
            "reason": self.reason,
            "measurement": None if self.measurement is None else self.measurement.to_json(),
            "duration_s": self.duration_s,
            **({"evidence": dict(self.evidence)} if self.evidence else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialResult:
        measurement = data.get("measurement")
        return cls(
            outcome=Outcome(data["outcome"]),
            reason=data.get("reason", ""),
            measurement=None if measurement is None else Measurement.from_json(measurement),
            duration_s=data.get("duration_s", 0.0),
            evidence=data.get("evidence", {}),
        )


def write_json_atomically(path: Path, document: object) -> None:
    """Write JSON so that a reader sees either the old file or the whole new one."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as handle:
            handle.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
