"""One rank of a trial of a Megatron Bridge recipe.

Bridge's own `pretrain` runs; a callback measures and ends it. A build whose `pretrain` takes no
callbacks runs to its end, and its log lines are read instead.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainables.logs import MEGATRON_PATTERNS, LogFigures, LogReader, merged
from trainables.megatron_bridge.callback import MeasuredEnough, Meter, StepRecorder
from trainables.megatron_bridge.meters import CpuMeter, CudaMeter
from trainables.megatron_bridge.recipe import load_recipe, missing_environment
from trainables.megatron_bridge.settings import configure
from trainables.megatron_core.report import RankReport, package_versions, result_from_reports
from trainables.processes import die_with_parent
from trainables.progress import write_progress
from trainables.rank_program import report_result, run_program
from tuner.measurement import Outcome, TrialResult, TrialSpec

_RESTARTED = "TRIAL_RECIPE_ENVIRONMENT_OF"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank saw: by the callback, or else in the lines it printed."""

    report: RankReport
    losses: Sequence[float]
    figures: LogFigures = field(default_factory=LogFigures)


def main() -> None:
    """Run the trial in `--spec`; the first rank of each node writes `--output`/result.json."""
    die_with_parent()
    run_program("trainables.megatron_bridge", __doc__, run_rank)


def run_rank(spec_file: Path, output_dir: Path) -> None:
    """Run one rank's share of the trial described in `spec_file`."""
    spec = TrialSpec.from_json(json.loads(spec_file.read_text()))
    container = load_recipe(spec.options["recipe"])
    _have_environment(container, spec)
    import megatron.core

    warmup = configure(container, spec, megatron.core.__version__)
    meter = CpuMeter() if spec.device == "cpu" else CudaMeter()
    seen = _train(container, spec, meter, warmup, output_dir)
    result = _result(spec, _gathered(seen), _flops(container, spec), meter.notes)
    report_result(result, output_dir)


def _have_environment(container: Any, spec: TrialSpec) -> None:
    """Start this process anew where the recipe asks for variables it does not have.

    Libraries read them when they are imported. The process keeps its id, so its parent and the
    launcher see the same rank.
    """
    chosen = {**(spec.options.get("environment") or {}), **(spec.config.get("env") or {})}
    missing = missing_environment(container, chosen, os.environ)
    if not missing or os.environ.get(_RESTARTED) == str(os.getpid()):
        return
    environment = {**os.environ, **missing, _RESTARTED: str(os.getpid())}
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-m", "trainables.megatron_bridge", *sys.argv[1:]],
        environment,
    )


def _train(container: Any, spec: TrialSpec, meter: Meter, warmup: int, output_dir: Path) -> _Seen:
    """Run Bridge's training loop until enough is measured."""
    pretrain = importlib.import_module("megatron.bridge.training.pretrain").pretrain
    step_module = spec.options.get("step", "gpt_step")
    step = importlib.import_module(f"megatron.bridge.training.{step_module}").forward_step
    if "callbacks" not in inspect.signature(pretrain).parameters:
        return _read_its_lines(lambda: pretrain(container, step), spec, warmup, meter)

    def progress(steps: int) -> None:
        if int(os.environ["LOCAL_RANK"]) == 0:
            write_progress(output_dir, int(os.environ.get("GROUP_RANK", 0)), "steps", steps)

    recorder = StepRecorder(
        meter,
        warmup_steps=warmup,
        measure_steps=spec.measure_steps,
        beat_step_time_s=spec.beat_step_time_s,
        agree=_any_rank,
        progress=progress,
    )
    with suppress(MeasuredEnough):
        pretrain(container, step, callbacks=_registered(recorder))
    return _Seen(_report(recorder.step_times_s, meter), tuple(recorder.losses))


def _registered(recorder: StepRecorder) -> Any:
    """The recorder in Bridge's own manager, by the events it fires."""
    from megatron.bridge.training.callbacks import CallbackManager

    manager = CallbackManager()
    for event in ("on_train_start", "on_train_step_start", "on_train_step_end"):
        manager.register(event, getattr(recorder, event))
    return manager


def _report(step_times_s: Sequence[float], meter: Meter) -> RankReport:
    allocated, reserved, device = meter.peaks_bytes()
    return RankReport(int(os.environ["RANK"]), tuple(step_times_s), allocated, reserved, device)


class _Tee(io.TextIOBase):
    """Writes on, and hands every whole line to a reader."""

    def __init__(self, stream: Any, reader: LogReader) -> None:
        self._stream, self._reader, self._line = stream, reader, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._reader.feed(line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _read_its_lines(run: Any, spec: TrialSpec, warmup: int, meter: Meter) -> _Seen:
    reader = LogReader(MEGATRON_PATTERNS, rank=int(os.environ["RANK"]))
    with redirect_stdout(_Tee(sys.stdout, reader)):
        run()
    return _Seen(_report((), meter), (), reader.figures)


def _any_rank(answer: bool) -> bool:
    import torch

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    box = torch.tensor(int(answer), device=device)
    torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MAX)
    return bool(box.item())


def _gathered(seen: _Seen) -> list[_Seen]:
    """Every rank's sight, on every rank; Bridge may have taken down its process groups."""
    import torch

    alone = not torch.distributed.is_initialized()
    if alone:
        torch.distributed.init_process_group("gloo")
    everything = [seen] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, seen)
    if alone:
        torch.distributed.destroy_process_group()
    return everything


def _result(
    spec: TrialSpec, everything: Sequence[_Seen], flops: int, notes: dict[str, str]
) -> TrialResult:
    reports, losses = [seen.report for seen in everything], _losses(everything)
    if not any(report.step_times_s for report in reports):
        figures = merged(seen.figures for seen in everything)
        if not figures.steps:
            return TrialResult(Outcome.CRASHED, "the run ended before a step was measured")
        times = tuple(figures.measured_steps(spec.warmup_steps).values())
        losses = [loss for _, loss in sorted(figures.losses.items())]
        reports = [
            RankReport(r.rank, times, r.peak_allocated_bytes, r.peak_reserved_bytes)
            for r in reports
        ]
        notes = {**notes, "steps": "read from log lines"}
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            return TrialResult(Outcome.DIVERGED, f"the loss of step {number} is {loss}")
    return result_from_reports(spec, reports, losses, flops, {**package_versions(), **notes})


def _losses(everything: Sequence[_Seen]) -> Sequence[float]:
    """The losses of the ranks that computed them: the mean over data-parallel ranks."""
    holders = [seen.losses for seen in everything if seen.losses]
    return [sum(step) / len(step) for step in zip(*holders, strict=False)]


def _flops(container: Any, spec: TrialSpec) -> int:
    """Model FLOPs of a step as Bridge counts them for its own log lines."""
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

    return int(num_floating_point_operations(container, spec.global_batch_size))
