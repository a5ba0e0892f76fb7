"""Whole trials of the `megatron_core` trainable on CPU ranks, started as the tuner starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import trainables
from tuner.measurement import Measurement, Outcome, TrialResult, TrialSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SPEC = TrialSpec(
    model={
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 160,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    config={
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm"],
    },
    world_size=4,
    seq_length=64,
    global_batch_size=4,
    warmup_steps=1,
    measure_steps=3,
    precision="bf16",
    timeout_s=400,
)
SMALL = replace(SPEC, config={"use_distributed_optimizer": True}, world_size=2, measure_steps=1)


def run(spec: TrialSpec, output: Path, **placement: object) -> TrialResult:
    return trainables.get("megatron_core").run_trial(spec, output, **placement)


def measured(result: TrialResult) -> Measurement:
    assert result.measurement is not None, result.reason
    return result.measurement


def trial_processes(before: list[psutil.Process]) -> list[psutil.Process]:
    """Ranks and agents that descend from this process and are not among those `before`."""
    return [child for child in psutil.Process().children(recursive=True) if child not in before]


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> TrialResult:
    return run(SPEC, tmp_path_factory.mktemp("completed"))


def test_a_completed_trial_reports_every_figure(completed: TrialResult) -> None:
    assert completed.outcome is Outcome.COMPLETED
    result = measured(completed)
    assert len(result.step_times_s) == SPEC.measure_steps
    assert result.step_time_s == sorted(result.step_times_s)[1]
    assert result.step_time_spread_s == max(result.step_times_s) - min(result.step_times_s)
    tokens = SPEC.global_batch_size * SPEC.seq_length
    per_gpu = result.step_time_s * SPEC.world_size
    assert result.tokens_per_s_per_gpu == pytest.approx(tokens / per_gpu)
    assert result.tflops_per_gpu > 0
    assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
    assert result.peak_memory_allocated_bytes == max(
        rank.peak_memory_allocated_bytes for rank in result.ranks
    )
    assert result.versions["megatron_core"]
    assert result.losses[-1] < result.losses[0]
    assert completed.duration_s > sum(result.step_times_s)


def test_the_same_trial_by_hand_has_the_same_losses_and_peaks_and_just_fits(
    completed: TrialResult, tmp_path: Path
) -> None:
    """Started with torchrun into a new folder, under a limit equal to the first run's peak."""
    peak = measured(completed).peak_memory_allocated_bytes
    spec_file, output = tmp_path / "spec.json", tmp_path / "by hand" / "output"
    spec_file.write_text(json.dumps(replace(SPEC, memory_limit_bytes=peak).to_json()))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("-m", "trainables.megatron_core", "--spec", str(spec_file), "--output", str(output)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    again = TrialResult.from_json(json.loads((output / "result.json").read_text()))
    assert again.outcome is Outcome.COMPLETED
    assert measured(again).losses == measured(completed).losses
    assert [rank.peak_memory_allocated_bytes for rank in measured(again).ranks] == [
        rank.peak_memory_allocated_bytes for rank in measured(completed).ranks
    ]


def test_a_peak_above_the_limit_is_out_of_memory_with_its_measurement(tmp_path: Path) -> None:
    limit = 1 << 20
    result = run(replace(SMALL, memory_limit_bytes=limit, measure_steps=3), tmp_path)
    assert result.outcome is Outcome.OOM
    peak = measured(result).peak_memory_allocated_bytes
    assert peak > limit
    assert f"{peak / 2**30:.4f} GiB" in result.reason
    assert f"{limit / 2**30:.4f} GiB" in result.reason
    assert result.reason.startswith("rank ")
    # Stopped early: a single step was timed.
    assert len(measured(result).step_times_s) == 1


def test_a_field_nobody_knows_is_a_crash_that_names_the_nearest(tmp_path: Path) -> None:
    config = {**SMALL.config, "recompute_granularty": "full"}
    spec = replace(SMALL, config=config, world_size=1)
    result = run(spec, tmp_path)
    assert result.outcome is Outcome.CRASHED
    assert "'recompute_granularty'" in result.reason
    assert "did you mean 'recompute_granularity'?" in result.reason


def test_a_setting_megatron_refuses_is_a_crash_with_its_message(tmp_path: Path) -> None:
    config = {**SMALL.config, "recompute_granularity": "full"}
    spec = replace(SMALL, config=config, world_size=1)
    result = run(spec, tmp_path)
    assert result.outcome is Outcome.CRASHED
    assert "recompute_method must be" in result.reason


def test_a_loss_that_is_not_finite_is_divergence(tmp_path: Path) -> None:
    spec = replace(SMALL, config={**SMALL.config, "lr": 1e30}, precision="fp32")
    result = run(spec, tmp_path)
    assert result.outcome is Outcome.DIVERGED
    assert "loss of step" in result.reason
    assert result.measurement is None


def test_cancelling_a_running_trial_leaves_no_process(tmp_path: Path) -> None:
    cancel = threading.Event()
    before = psutil.Process().children(recursive=True)  # of other tests: dry-run workers stay
    spec = replace(SMALL, measure_steps=100_000)
    results: list[TrialResult] = []
    thread = threading.Thread(target=lambda: results.append(run(spec, tmp_path, cancel=cancel)))
    thread.start()
    deadline = threading.Event()
    while len(trial_processes(before)) < 1 + spec.world_size and not deadline.wait(0.1):
        assert thread.is_alive()
    processes = trial_processes(before)
    cancel.set()
    thread.join(timeout=60)
    assert [result.outcome for result in results] == [Outcome.INTERRUPTED]
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
