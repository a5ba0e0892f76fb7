"""One simulated trial: model FLOPs at an efficiency the layout gives, and a share of the states."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.measurement import (
    RESULT_FILE,
    SPEC_FILE,
    Measurement,
    Outcome,
    RankMeasurement,
    TrialResult,
    TrialSpec,
    write_json_atomically,
)

SPEEDUP_VARIABLE = "SIMULATED_SPEEDUP"
"""Variable of a candidate's `env`: how many times faster than real the trial goes by."""

_PEAK_FLOPS = 989e12  # bf16, dense: NVIDIA H100 SXM data sheet
_BASE_EFFICIENCY = 0.5
_START_S = 30.0
_STATE_BYTES_PER_PARAMETER = 18  # bf16 weight, fp32 gradient, master weight and two moments
_NOISE = 0.02


def run_simulated(
    spec: TrialSpec,
    output_dir: Path,
    *,
    node_rank: int = 0,
    cancel: threading.Event | None = None,
    **launch: Any,
) -> TrialResult:
    """Wait as long as the trial would take, divided by its speed-up, and report its figures.

    Takes the arguments of `trainables.launch.run_trial`; those about processes have no meaning
    here. The same spec gives the same figures. A peak above `memory_limit_bytes` is out of memory.
    """
    started = time.monotonic()
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json_atomically(output_dir / SPEC_FILE, spec.to_json())
    measurement = simulated_measurement(spec)
    speedup = float((spec.config.get("env") or {}).get(SPEEDUP_VARIABLE, 1.0))
    steps = spec.warmup_steps + spec.measure_steps
    seconds = (_START_S + steps * measurement.step_time_s) / speedup
    result = TrialResult(Outcome.COMPLETED, "", measurement)
    limit, peak = spec.memory_limit_bytes, measurement.peak_memory_allocated_bytes
    if limit is not None and peak > limit:
        result = TrialResult(Outcome.OOM, f"{peak} bytes are above {limit}", measurement)
    if seconds > spec.timeout_s:
        seconds = spec.timeout_s
        result = TrialResult(Outcome.TIMEOUT, f"not finished after timeout_s={seconds:g}")
    if (cancel or threading.Event()).wait(max(0.0, started + seconds - time.monotonic())):
        result = TrialResult(Outcome.INTERRUPTED, "cancelled")
    result = replace(result, duration_s=time.monotonic() - started)
    write_json_atomically(output_dir / RESULT_FILE, result.to_json())
    return result


def simulated_measurement(spec: TrialSpec) -> Measurement:
    """Figures of a candidate: a plain model, only good for comparing candidates roughly.

    Tensor parallelism, small micro-batches and pipeline bubbles cost time, recomputation a third
    more; states are divided over the model-parallel ranks, activations shrink with recomputation.
    """
    from tuner.candidate import Candidate
    from tuner.models.flops import model_flops_per_step
    from tuner.models.spec import MODEL_INPUTS, ModelSpec

    fields = {**spec.model, **spec.config}
    model = ModelSpec.from_flat({k: v for k, v in fields.items() if k in MODEL_INPUTS})
    candidate = Candidate.from_flat(spec.config)
    tensor = candidate.tensor_model_parallel_size
    pipeline = candidate.pipeline_model_parallel_size
    replicas = max(1, spec.world_size // candidate.model_parallel_size())
    microbatches = max(1, spec.global_batch_size // (replicas * candidate.micro_batch_size))
    recomputed = candidate.recompute_granularity is not None
    efficiency = (
        _BASE_EFFICIENCY
        * 0.94 ** (tensor.bit_length() - 1)
        * microbatches
        / (microbatches + pipeline - 1)
        * candidate.micro_batch_size
        / (candidate.micro_batch_size + 0.25)
        * (0.75 if recomputed else 1.0)
    )
    flops = model_flops_per_step(model, spec.seq_length, spec.global_batch_size)
    noise = 1 + _NOISE * (2 * _fraction(spec) - 1)
    step_time_s = flops / spec.world_size / (_PEAK_FLOPS * efficiency) * noise
    peak = _peak_bytes(spec, model, candidate, recomputed)
    times = (step_time_s,) * spec.measure_steps
    return Measurement(
        step_time_s=step_time_s,
        step_time_spread_s=0.0,
        tokens_per_s_per_gpu=spec.global_batch_size
        * spec.seq_length
        / (step_time_s * spec.world_size),
        tflops_per_gpu=flops / (step_time_s * spec.world_size) / 1e12,
        peak_memory_allocated_bytes=peak,
        peak_memory_reserved_bytes=None,
        losses=(),
        step_times_s=times,
        ranks=(RankMeasurement(0, step_time_s, peak),),
        versions={"trainable": "simulated"},
    )


def _peak_bytes(spec: TrialSpec, model: Any, candidate: Any, recomputed: bool) -> int:
    from tuner.models.parameters import count_parameters

    shards = candidate.tensor_model_parallel_size * candidate.pipeline_model_parallel_size
    states = _STATE_BYTES_PER_PARAMETER * count_parameters(model).total / shards
    tokens = spec.seq_length * candidate.micro_batch_size
    per_layer = tokens * model.hidden_size * (2 if recomputed else 34)
    return int(states + per_layer * model.num_layers / candidate.tensor_model_parallel_size)


def _fraction(spec: TrialSpec) -> float:
    """A number in [0, 1) that the candidate and the trial's size decide."""
    text = repr((sorted(spec.config.items(), key=str), spec.world_size, spec.seed))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
