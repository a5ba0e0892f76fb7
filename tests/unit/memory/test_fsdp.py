"""Dry runs of Megatron-FSDP over four ranks: what each holds, and what it gathers."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tuner.candidate import Candidate
from tuner.memory import DryRun, dry_run
from tuner.memory.categories import (
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    OPTIMIZER_STATE,
    WEIGHTS,
    breakdown_at,
)
from tuner.memory.errors import UnsupportedError
from tuner.models import ModelSpec, count_parameters, get_model

_MODEL = ModelSpec.from_flat(
    get_model("tiny-gqa").to_flat() | {"share_embeddings_and_output_weights": False}
)
_COUNTS = count_parameters(_MODEL)
_PADDING = 0.03
_MICROBATCHES, _LAYERS = 2, 4


@cache
def _run(sharding: str, **config: object) -> DryRun:
    settings = {
        "micro_batch_size": 1,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": sharding,
    }
    return dry_run(
        _MODEL,
        Candidate.from_flat(settings | config),
        world_size=4,
        seq_length=128,
        global_batch_size=4 * _MICROBATCHES,
    )


def _one_layer_at_a_time() -> DryRun:
    return _run(
        "optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        suggested_communication_unit_size=1,
    )


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients"),
    [("optim", 2, 4), ("optim_grads", 2, 1), ("optim_grads_params", 0.5, 1)],
)
def test_each_rank_holds_a_quarter_of_what_is_sharded(
    sharding: str, weights: float, gradients: float
) -> None:
    run = _run(sharding)
    held = breakdown_at(run.trace, len(run.trace) - 1)
    total = _COUNTS.total
    assert held[WEIGHTS] == pytest.approx(weights * total, rel=_PADDING)
    assert held[GRADIENTS] == pytest.approx(gradients * total, rel=_PADDING)
    state = held[OPTIMIZER_STATE]
    assert state == pytest.approx((4 + 8) / 4 * total, rel=_PADDING)  # main weights and moments


def test_weights_are_whole_only_while_their_layer_runs() -> None:
    run = _one_layer_at_a_time()
    trace = run.trace
    of_buckets = trace.module == trace.module_names.index(GATHERED)
    made = Counter(
        (trace.phase_names[phase], int(size))
        for phase, size in zip(trace.phase[of_buckets], trace.bytes[of_buckets], strict=True)
        if size > 0
    )
    layer = _COUNTS.attention + _COUNTS.layer_norms + _COUNTS.dense_mlp
    weights = min(size for phase, size in made if phase == "forward")
    assert weights == pytest.approx(2 * layer, rel=_PADDING)
    steps = 2
    times = steps * _MICROBATCHES * _LAYERS
    assert made["forward", weights] == made["backward", weights] == times
    assert made["backward", 2 * weights] == times  # gradients in fp32, before their reduction

    held = breakdown_at(trace, len(trace) - 1)[COMMUNICATION]
    outside_layers = _COUNTS.embedding + _COUNTS.output_layer + _COUNTS.final_norm
    assert held == pytest.approx(2 * outside_layers, rel=_PADDING)


@pytest.mark.parametrize(
    ("recipe", "architecture", "each"),
    [("tensorwise", "hopper", 1), ("tensorwise", "blackwell", 1), ("mxfp8", "blackwell", 2)],
)
def test_weights_in_eight_bits_are_sharded_too(recipe: str, architecture: str, each: float) -> None:
    """MXFP8 keeps what is read by columns apart; other transposes go when a layer is through."""
    run = dry_run(
        _MODEL,
        Candidate.from_flat(
            {
                "micro_batch_size": 1,
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
                "overlap_param_gather": True,
                "overlap_grad_reduce": True,
                "suggested_communication_unit_size": 1,
                "fp8": "e4m3" if recipe == "mxfp8" else "hybrid",
                "fp8_recipe": recipe,
                "fp8_param": True,
            }
        ),
        world_size=4,
        seq_length=128,
        global_batch_size=4 * _MICROBATCHES,
        te_version="2.12.0",
        architecture=architecture,
    )
    held = breakdown_at(run.trace, len(run.trace) - 1)[WEIGHTS]
    layers = _COUNTS.attention + _COUNTS.dense_mlp
    rest = _COUNTS.total - _LAYERS * layers
    scales = 2 * layers * _LAYERS / 32 if recipe == "mxfp8" else 0  # of whole weights, by block
    assert held == pytest.approx(each / 4 * _LAYERS * layers + 2 / 4 * rest + scales, rel=0.06)


def test_gathers_without_overlap_leave_all_weights_whole_between_steps() -> None:
    at_once = _run("optim_grads_params")
    held = breakdown_at(at_once.trace, len(at_once.trace) - 1)[COMMUNICATION]
    assert held == pytest.approx(2 * _COUNTS.total, rel=_PADDING)
    assert at_once.static_bytes > _one_layer_at_a_time().static_bytes


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"use_megatron_fsdp": True}, "data_parallel_sharding_strategy"),
        ({"use_torch_fsdp2": True, "use_distributed_optimizer": False}, "use_torch_fsdp2"),
    ],
)
def test_sharding_that_fails_upstream_is_refused_by_name(settings: dict, field: str) -> None:
    with pytest.raises(UnsupportedError, match=field):
        dry_run(
            _MODEL,
            Candidate.from_flat({"micro_batch_size": 1} | settings),
            world_size=4,
            seq_length=128,
            global_batch_size=8,
        )


def test_layers_of_transformer_engine_1_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="te_version"):
        dry_run(
            _MODEL,
            Candidate.from_flat({"micro_batch_size": 1}),
            world_size=2,
            seq_length=128,
            global_batch_size=2,
            te_version="1.13.0",
        )
