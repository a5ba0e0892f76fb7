"""Dry runs that exchange tokens of one micro-batch beside the passes of another."""

from __future__ import annotations

from functools import cache

import pytest

from tuner.candidate import Candidate
from tuner.memory import DryRun, dry_run
from tuner.models import get_model


@cache
def run(**changed: object) -> DryRun:
    config = {
        "expert_model_parallel_size": 2,
        "micro_batch_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_moe_expert_parallel_comm": True,
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "gradient_accumulation_fusion": True,
        "moe_shared_expert_overlap": False,
    }
    return dry_run(
        get_model("tiny-moe"),
        Candidate.from_flat(config | changed),
        world_size=2,
        seq_length=256,
        global_batch_size=8,
        te_version="2.12.0",
    )


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_put_off_are_reduced_once_they_are_there(fused: bool) -> None:
    """They reach data parallelism by a hook of the layer, in place of one of the parameter."""
    later = run(delay_wgrad_compute=True, gradient_accumulation_fusion=fused)
    at_once = run(gradient_accumulation_fusion=fused)
    assert later.static_bytes == at_once.static_bytes
    assert later.peak_allocated_bytes == pytest.approx(at_once.peak_allocated_bytes, rel=0.1)
