"""What offload adds to the predicted step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuner.candidate import Candidate
from tuner.models import get_model
from tuner.timing.calibration import starting_rates
from tuner.timing.estimate import TimeRun
from tuner.timing.offload import host_bytes_per_s, host_update_s, transfer_wait
from tuner.timing.step import BREAKDOWN

RATES = starting_rates()


def run(model: str = "tiny-dense", **changes) -> TimeRun:
    given = {"world_size": 2, "seq_length": 128, "global_batch_size": 4, "gpu": "h100"} | changes
    return TimeRun.of(get_model(model), **given)


def parts_of(timed: TimeRun, rates=RATES, **settings) -> dict[str, float]:
    times = timed.times([Candidate.from_flat(settings)], rates)
    return dict(zip(BREAKDOWN, times.parts[0].tolist(), strict=True))


def test_a_transfer_that_fits_beside_its_pass_costs_memory_bandwidth_alone() -> None:
    gpu = run().gpu
    link = host_bytes_per_s(gpu, RATES)
    waits = transfer_wait([0.0, 0.5 * link, 1.9 * link], [1.0, 1.0, 1.0], gpu, RATES)
    beside = link / gpu.memory_bandwidth_bytes_per_s
    np.testing.assert_allclose(waits, [0.0, 0.5 * beside, 1.0 + 0.9 * beside])


def test_transfers_of_the_host_optimizer_can_run_beside_it() -> None:
    gpu = run().gpu
    moved = 8 / host_bytes_per_s(gpu, RATES)
    assert host_update_s(gpu, RATES) == pytest.approx(RATES.host_update_s + moved)
    assert host_update_s(gpu, RATES, overlapped=True) == pytest.approx(RATES.host_update_s)
    slow_link = replace(RATES, host_link=1e-3)
    assert host_update_s(gpu, slow_link, overlapped=True) > RATES.host_update_s


def test_waits_for_layers_that_offload_grow_with_their_number() -> None:
    timed, slow = run(), replace(RATES, host_link=1e-4)
    assert parts_of(timed, slow)["offload"] == 0.0
    some = parts_of(timed, slow, cpu_offloading=True, cpu_offloading_num_layers=1)["offload"]
    more = parts_of(timed, slow, cpu_offloading=True, cpu_offloading_num_layers=2)["offload"]
    assert some > 0.0
    assert more == pytest.approx(2 * some, rel=0.01)


def test_more_modules_offloaded_are_longer_waited_for() -> None:
    timed, slow = run("llama3-8b", seq_length=2048), replace(RATES, host_link=1e-4)

    def waits(*modules: str) -> float:
        settings = {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}
        return parts_of(timed, slow, **settings)["offload"]

    assert 0.0 < waits("core_attn") < waits("core_attn", "attn_proj", "qkv_linear")


@pytest.mark.parametrize(
    ("fraction", "beside", "measured_s"),
    [(0.25, False, 1.871), (0.5, False, 2.484), (0.75, False, 3.187), (1.0, False, 4.189),
     (1.0, True, 3.877)],
)  # fmt: skip
def test_optimizers_on_the_host_take_as_long_as_measured(fraction, beside, measured_s) -> None:
    """Megatron Bridge, skill on CPU offload: Qwen3-30B-A3B on 16 H100, 0.996 s without."""
    timed = run("qwen3-30b-a3b", world_size=16, seq_length=4096, global_batch_size=16)
    layout = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    }
    away = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": beside,
    }
    added = parts_of(timed, **layout, **away)["optimizer"] - parts_of(timed, **layout)["optimizer"]
    assert added == pytest.approx(measured_s - 0.996, rel=0.15)
