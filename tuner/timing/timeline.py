"""A predicted step as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process per pipeline stage, with a thread for the passes, one for transfers between stages and
one for data parallelism. Trace Event Format: complete events ("X"), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from tuner.timing.schedule import Pipeline, SimulatedStep
    from tuner.timing.tail import StepEnd

_COMPUTE, _TRANSFER, _DATA = 0, 1, 2
_THREADS = ("compute", "pipeline transfers", "data parallel")

_COLOURS = {
    # names Chrome's viewer has colours for; Perfetto colours by name of the slice
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "recompute": "thread_state_iowait",
    "optimizer": "thread_state_unknown",
}


@dataclass(frozen=True, slots=True)
class Slice:
    """One bar: seconds on a thread of a stage."""

    stage: int
    thread: int
    name: str
    start_s: float
    seconds: float
    arguments: tuple[tuple[str, Any], ...] = ()


def trace_document(
    pipeline: Pipeline,
    step: SimulatedStep,
    p2p_s: ArrayLike,
    *,
    recompute_s: ArrayLike | None = None,
    end: StepEnd | None = None,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON document of a step.

    `recompute_s` `[stage, chunk]` is the part of a backward pass that runs forward work again,
    `end` what follows the pipeline (of one candidate). `about` is kept as the trace's metadata.
    """
    stages = pipeline.stages
    p2p = np.broadcast_to(np.asarray(p2p_s, dtype=np.float64), (stages,))
    shape = (stages, pipeline.chunks)
    again = np.broadcast_to(np.asarray(0.0 if recompute_s is None else recompute_s), shape)
    slices = [*_passes(step, again), *_transfers(pipeline, step, p2p)]
    if end is not None:
        slices += _after(end)
    return {
        "displayTimeUnit": "ms",
        "otherData": about or {},
        "traceEvents": [*_names(stages), *(_event(one) for one in slices)],
    }


def _names(stages: int) -> Iterator[dict[str, Any]]:
    for stage in range(stages):
        yield _meta("process_name", stage, 0, {"name": f"pipeline stage {stage}"})
        yield _meta("process_sort_index", stage, 0, {"sort_index": stage})
        for thread, name in enumerate(_THREADS):
            yield _meta("thread_name", stage, thread, {"name": name})
            yield _meta("thread_sort_index", stage, thread, {"sort_index": thread})


def _meta(name: str, stage: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": stage, "tid": thread, "args": arguments}


def _event(one: Slice) -> dict[str, Any]:
    kind = one.name.split()[0]
    event: dict[str, Any] = {
        "ph": "X",
        "name": one.name,
        "cat": _THREADS[one.thread],
        "pid": one.stage,
        "tid": one.thread,
        "ts": round(one.start_s * 1e6, 3),
        "dur": round(one.seconds * 1e6, 3),
        "args": dict(one.arguments),
    }
    if kind in _COLOURS:
        event["cname"] = _COLOURS[kind]
    return event


def _passes(step: SimulatedStep, recompute_s: NDArray[np.float64]) -> Iterator[Slice]:
    """Passes in order; recompute stands at the start of its backward pass."""
    columns = step.passes
    for row in np.argsort(columns.start_s, kind="stable"):
        stage, chunk = int(columns.stage[row]), int(columns.chunk[row])
        start, end = float(columns.start_s[row]), float(columns.end_s[row])
        arguments = (("chunk", chunk), ("microbatch", int(columns.microbatch[row])))
        suffix = f"{int(columns.microbatch[row])}" + (f" chunk {chunk}" if chunk else "")
        if columns.forward[row]:
            yield Slice(stage, _COMPUTE, f"forward {suffix}", start, end - start, arguments)
            continue
        again = min(float(recompute_s[stage, chunk]), end - start)
        if again > 0:
            yield Slice(stage, _COMPUTE, f"recompute {suffix}", start, again, arguments)
        length = end - start - again
        yield Slice(stage, _COMPUTE, f"backward {suffix}", start + again, length, arguments)


def _transfers(
    pipeline: Pipeline, step: SimulatedStep, p2p_s: NDArray[np.float64]
) -> Iterator[Slice]:
    """Each pass's result on its way: from the later of its end and the receiver's last pass."""
    if not p2p_s.any():
        return
    columns = step.passes
    starts = {
        key: float(columns.start_s[row])
        for row, key in enumerate(
            zip(columns.stage, columns.forward, columns.chunk, columns.microbatch, strict=True)
        )
    }
    for row in range(len(columns.stage)):
        stage, chunk = int(columns.stage[row]), int(columns.chunk[row])
        forward, microbatch = bool(columns.forward[row]), columns.microbatch[row]
        receiver = _receiver(pipeline, stage, chunk, forward)
        if receiver is None:
            continue
        lower = stage if forward else receiver[0]
        latest = starts[receiver[0], forward, receiver[1], microbatch] - p2p_s[lower]
        sent = min(float(columns.end_s[row]), latest) if latest > 0 else latest
        name = "send forward" if forward else "send backward"
        arguments = (("to", receiver[0]), ("microbatch", int(microbatch)))
        yield Slice(stage, _TRANSFER, name, max(sent, 0.0), float(p2p_s[lower]), arguments)


def _receiver(pipeline: Pipeline, stage: int, chunk: int, forward: bool) -> tuple[int, int] | None:
    """(stage, chunk) that uses the result of a pass."""
    step = 1 if forward else -1
    position = chunk * pipeline.stages + stage + step
    if not 0 <= position < pipeline.stages * pipeline.chunks:
        return None
    return position % pipeline.stages, position // pipeline.stages


def _after(end: StepEnd) -> Iterator[Slice]:
    """Reduction of gradients, the optimizer, gathering of weights, on every stage."""
    for stage in range(end.reduce_start_s.shape[1]):
        for chunk in range(end.reduce_start_s.shape[2]):
            start = float(end.reduce_start_s[0, stage, chunk])
            length = float(end.reduce_end_s[0, stage, chunk]) - start
            if length > 0:
                yield Slice(stage, _DATA, f"reduce gradients {chunk}", start, length)
        optimizer = float(end.optimizer_start_s[0])
        length = float(end.optimizer_end_s[0, stage]) - optimizer
        yield Slice(stage, _COMPUTE, "optimizer", optimizer, length)
        gather = float(end.gather_s[0, stage])
        if gather > 0:
            yield Slice(
                stage, _DATA, "gather weights", float(end.optimizer_end_s[0, stage]), gather
            )
