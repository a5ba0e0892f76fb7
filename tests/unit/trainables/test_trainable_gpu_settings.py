"""The GPU benchmark's candidates without a GPU: they become arguments of the real classes."""

from __future__ import annotations

import importlib

import pytest

from trainables.device_memory import PeakSampler
from trainables.megatron_core.graphs import steps_until_captured
from trainables.megatron_core.plan import BuildPlan, build_plan
from tuner.measurement import TrialSpec

GPU = importlib.import_module("gpu.memory_and_time")


def plan_of(name: str) -> BuildPlan:
    config = {"micro_batch_size": 1, "use_distributed_optimizer": True, **GPU.CANDIDATES[name]}
    spec = TrialSpec(
        model={**GPU.MODEL, "num_layers": 8},
        config=config,
        world_size=1,
        seq_length=4096,
        global_batch_size=4,
        device="cuda",
    )
    return build_plan(spec, use_transformer_engine=True)


@pytest.mark.parametrize("name", GPU.CANDIDATES)
def test_every_candidate_becomes_arguments_of_the_installed_classes(name: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    plan = plan_of(name)
    assert plan.transformer["transformer_impl"] == "transformer_engine"
    assert DistributedDataParallelConfig(**plan.ddp).use_distributed_optimizer
    for field, value in GPU.CANDIDATES[name].items():
        holders = (plan.transformer, plan.ddp, plan.optimizer)
        if not field.startswith(("cuda_graph", "micro_batch")):
            assert next(holder[field] for holder in holders if field in holder) == value


def test_captures_are_over_before_steps_are_timed() -> None:
    assert steps_until_captured(plan_of("plain").transformer) == 0
    assert steps_until_captured(plan_of("graphed attention").transformer) == 5
    assert steps_until_captured(plan_of("whole iteration").transformer) == 5


def test_the_peak_of_a_device_is_the_largest_of_its_samples() -> None:
    samples = iter([3, 9, 4])
    sampler = PeakSampler(lambda: next(samples), "device")
    for _ in range(3):
        sampler.sample()
    assert sampler.peak_bytes == 9


def test_a_device_that_cannot_be_asked_has_no_peak() -> None:
    def gone() -> int:
        raise RuntimeError("NVML says nothing")

    with PeakSampler(gone, "device") as sampler:
        pass
    assert sampler.peak_bytes == 0
