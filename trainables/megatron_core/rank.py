"""One rank of a trial: set up the device, run the steps, report.

What is trained is built in `model` and `schedule`; this module is about the process around it.
"""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.device_memory import PeakSampler, device_used_bytes
from trainables.processes import die_with_parent
from trainables.progress import write_progress
from trainables.rank_program import report_result, run_program
from tuner.measurement import TrialSpec
from tuner.search.stopping import cannot_beat

if TYPE_CHECKING:
    import torch

    from trainables.megatron_core.memory import StorageTracker
    from trainables.megatron_core.plan import BuildPlan

_TRACKED_STEPS = 2
"""Steps whose memory is followed on the CPU: Adam's moments exist from the second on."""


def main() -> None:
    """Run the trial in `--spec`; the first rank of each node writes `--output`/result.json."""
    die_with_parent()
    run_program("trainables.megatron_core", __doc__, run_rank)


def run_rank(spec_file: Path, output_dir: Path) -> None:
    """Run one rank's share of the trial described in `spec_file`."""
    spec = TrialSpec.from_json(json.loads(spec_file.read_text()))
    clock = _Clock(output_dir)
    device = _CpuRank(spec) if spec.device == "cpu" else _CudaRank(spec)
    with device.importing():
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    clock.mark("import")

    from trainables.megatron_core.plan import build_plan
    from trainables.megatron_core.processes import joined_process_groups
    from trainables.megatron_core.report import RankReport, trial_result

    with device.adapted():
        plan = build_plan(spec, device.use_transformer_engine)
        with joined_process_groups(plan, spec.timeout_s):
            clock.mark("process groups")
            run = _train(spec, plan, device, clock)
            report = RankReport(
                rank=int(os.environ["RANK"]),
                step_times_s=tuple(run.step_times_s),
                peak_allocated_bytes=device.peak_allocated_bytes(),
                peak_reserved_bytes=device.peak_reserved_bytes(),
                peak_device_bytes=device.peak_device_bytes(),
            )
            result = trial_result(spec, plan, report, run.loss_shares, device.notes)
            clock.mark("report")
    report_result(result, output_dir)
    print("seconds:", json.dumps(clock.phases_s))


class _Clock:
    """Seconds spent in each phase since the process was started.

    The first rank of a node shows the launcher that it gets on, by phase and by step.
    """

    def __init__(self, output_dir: Path) -> None:
        import psutil

        self._output_dir = output_dir
        self._steps = 0
        self._shows = os.environ.get("LOCAL_RANK", "0") == "0"
        self._show("started")
        started = time.time() - psutil.Process().create_time()
        self.phases_s: dict[str, float] = {"interpreter and torch": round(started, 3)}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases_s[phase] = round(now - self._last, 3)
        self._last = now
        self._show(phase)

    def step_done(self) -> None:
        self._steps += 1
        self._show("step")

    def _show(self, phase: str) -> None:
        if self._shows:
            node_rank = int(os.environ.get("GROUP_RANK", "0"))
            write_progress(self._output_dir, node_rank, phase, self._steps)


def _cannot_win(spec: TrialSpec, run: _Run, device: _CpuRank | _CudaRank) -> bool:
    """Whether the slowest rank's steps rule out the time to beat; one answer on all ranks."""
    import torch

    if spec.beat_step_time_s is None:
        return False
    too_slow = torch.tensor(
        int(cannot_beat(run.step_times_s, spec.beat_step_time_s)), device=device.tensor_device
    )
    torch.distributed.all_reduce(too_slow, op=torch.distributed.ReduceOp.MAX)
    return bool(too_slow.item())


@dataclass(slots=True)
class _Run:
    """What the steps of one rank left behind."""

    loss_shares: list[torch.Tensor] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)


def _train(spec: TrialSpec, plan: BuildPlan, device: _CpuRank | _CudaRank, clock: _Clock) -> _Run:
    """Warm up, then time `measure_steps` steps; step numbers select the data."""
    from trainables.megatron_core.model import build_training_state
    from trainables.megatron_core.schedule import TrainingStep

    run = _Run()
    warmup = device.warmup_steps(plan)
    gc.disable()
    with device.measuring_memory():
        state = build_training_state(plan)
        device.model_is_built()
        clock.mark("build")
        step = TrainingStep(plan, state)
        for index in range(warmup):
            _timed_step(step, index, device, run)
            clock.step_done()
    clock.mark("warm-up steps")
    run.step_times_s.clear()
    # An exceeded limit decides the trial; one timed step is kept for the record.
    measured = 1 if device.is_over_limit() else spec.measure_steps
    for index in range(warmup, warmup + measured):
        _timed_step(step, index, device, run)
        clock.step_done()
        if _cannot_win(spec, run, device):
            break
    gc.enable()
    clock.mark("measured steps")
    return run


def _timed_step(step: Any, index: int, device: _CpuRank | _CudaRank, run: _Run) -> None:
    """One step between two barriers, garbage collected outside of it."""
    import torch

    gc.collect()
    torch.distributed.barrier()
    device.synchronize()
    started = time.perf_counter()
    share = step(index)
    device.synchronize()
    run.step_times_s.append(time.perf_counter() - started)
    run.loss_shares.append(share)


class _CpuRank:
    """A rank without a GPU: one thread, Gloo, memory by tracking storages."""

    def __init__(self, spec: TrialSpec) -> None:
        import torch

        torch.set_num_threads(1)
        self._spec = spec
        self._tracker: StorageTracker | None = None
        self.use_transformer_engine = False
        self.tensor_device = "cpu"
        self.notes: dict[str, str] = {"device": "cpu"}

    def importing(self) -> AbstractContextManager[None]:
        from trainables.megatron_core.cpu_device import without_compilation

        return without_compilation()

    def adapted(self) -> AbstractContextManager[None]:
        from trainables.megatron_core.cpu_device import cpu_device

        return cpu_device()

    def warmup_steps(self, plan: BuildPlan) -> int:
        return max(self._spec.warmup_steps, _TRACKED_STEPS)

    def measuring_memory(self) -> AbstractContextManager[None]:
        from trainables.megatron_core.memory import StorageTracker

        self._tracker = StorageTracker()
        return self._tracker.tracking()

    def model_is_built(self) -> None:
        assert self._tracker is not None
        self._tracker.reset_peak()

    def synchronize(self) -> None:
        pass

    def is_over_limit(self) -> bool:
        """Whether any rank's peak has passed the limit; the same answer on all ranks."""
        import torch

        if self._spec.memory_limit_bytes is None:
            return False
        peak = torch.tensor(self.peak_allocated_bytes())
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        return int(peak) > self._spec.memory_limit_bytes

    def peak_allocated_bytes(self) -> int:
        assert self._tracker is not None
        return self._tracker.peak_bytes

    def peak_reserved_bytes(self) -> int | None:
        return None

    def peak_device_bytes(self) -> int | None:
        return None


class _CudaRank:
    """A rank on a GPU: NCCL, Transformer Engine where installed, the allocator's own counts."""

    def __init__(self, spec: TrialSpec) -> None:
        import importlib.util

        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("device='cuda' but torch sees no CUDA device; use device='cpu'")
        self._spec = spec
        self.use_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
        local_rank = int(os.environ["LOCAL_RANK"])
        self.tensor_device = "cuda"
        self._whole_device: PeakSampler | None = None
        self.notes = {"device": torch.cuda.get_device_name(local_rank)}
        if not self.use_transformer_engine:
            self.notes["layers"] = "local: transformer_engine is not installed"

    def importing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def adapted(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warmup_steps(self, plan: BuildPlan) -> int:
        from trainables.megatron_core.graphs import steps_until_captured

        return max(self._spec.warmup_steps, 2, steps_until_captured(plan.transformer))

    def measuring_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def model_is_built(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        device = torch.cuda.current_device()
        self._whole_device = PeakSampler(lambda: device_used_bytes(device), "device")
        self._whole_device.__enter__()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def is_over_limit(self) -> bool:
        """A GPU enforces its own limit."""
        return False

    def peak_allocated_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def peak_reserved_bytes(self) -> int | None:
        import torch

        return torch.cuda.max_memory_reserved()

    def peak_device_bytes(self) -> int | None:
        """What NVML saw: graphs' private pools, communicators, contexts and other processes too."""
        if self._whole_device is None:
            return None
        self._whole_device.sample()
        return self._whole_device.peak_bytes or None
