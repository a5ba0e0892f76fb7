"""Dry runs of the ways to bring tokens to experts, and of what surrounds experts.

Four ranks hold two experts each; every token of 256 chooses two.
"""

from __future__ import annotations

from functools import cache

import pytest

from tuner.candidate import Candidate
from tuner.memory import DryRun, dry_run
from tuner.memory.expert_buffers import deepep_bytes, hybridep_bytes
from tuner.memory.te.deep_ep import _received_tokens
from tuner.models import ModelSpec, count_parameters, get_model

_TOKENS, _WIDTH, _EXPERT = 256, 128, 128
_MODEL = get_model("tiny-moe").to_flat()
_FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


@cache
def _run(model: str = "", **config: object) -> DryRun:
    changes = {
        "": {},
        "latent": {"moe_latent_size": 32},
        "shared": {"moe_shared_expert_intermediate_size": 128, "add_bias_linear": False},
        "prediction": {"mtp_num_layers": 1},
    }
    settings = {"micro_batch_size": 1, "expert_model_parallel_size": 4, "moe_permute_fusion": True}
    return dry_run(
        ModelSpec.from_flat(_MODEL | changes[model]),
        Candidate.from_flat(settings | config),
        world_size=4,
        seq_length=_TOKENS,
        global_batch_size=8,
    )


def _kept(run: DryRun, module: str) -> int:
    return sum(size for name, size in run.activations.items() if f".layers.0.{module}" in name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_token_dispatcher_type": "allgather"},
        _FLEX,
        _FLEX | {"moe_flex_dispatcher_backend": "hybridep"},
    ],
    ids=["alltoall", "allgather", "deepep", "hybridep"],
)
def test_experts_keep_the_same_whoever_brings_their_tokens(settings: dict) -> None:
    run = _run(**settings)
    rows = _TOKENS * 2  # choices, evenly over ranks
    assert _kept(run, "mlp.experts.linear_fc1") == 2 * rows * 2 * _EXPERT


def test_an_all_gather_keeps_the_tokens_of_every_rank() -> None:
    gathered = _kept(_run(moe_token_dispatcher_type="allgather"), "mlp")
    exchanged = _kept(_run(), "mlp")
    assert gathered - exchanged > 3 * _TOKENS * _WIDTH * 2


def test_a_token_comes_once_to_each_rank_with_any_of_its_experts() -> None:
    # Of 8 experts 2 are here; a token with 2 choices misses both with 6/8 * 5/7.
    assert _received_tokens(1024, 8, 2, 2) == round(1024 * (1 - 30 / 56))
    assert _received_tokens(1024, 8, 8, 2) == 1024


def test_buffers_of_the_flex_dispatcher_hold_what_ranks_write() -> None:
    one_token = 2 * 4096 + 8 + 128 * 12 + 128 * 4
    assert deepep_bytes(8, 4096) == 10 * 8 * (256 * one_token + 4 * 5)
    assert deepep_bytes(16, 4096) > 2 * 10 * 2 * 140 * one_token
    assert hybridep_bytes(8, 2048, 4096, 64) == 8 * 2048 * (2 * 4096 + 4 * 64 + 4 * 32)


def test_capacity_pads_what_balanced_routing_fills_less() -> None:
    padded = _run(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True)
    fc1 = "mlp.experts.linear_fc1"
    assert _kept(padded, fc1) == pytest.approx(1.25 * _kept(_run(), fc1), rel=0.02)


def test_shared_experts_may_run_beside_the_exchange() -> None:
    beside = _run("shared", moe_shared_expert_overlap=True)
    assert beside.peak_allocated_bytes == pytest.approx(
        _run("shared").peak_allocated_bytes, rel=0.01
    )


@pytest.mark.parametrize("model", ["latent", "prediction"])
def test_the_real_model_has_the_parameters_that_are_counted(model: str) -> None:
    run = _run(model, use_distributed_optimizer=False)
    changes = {"latent": {"moe_latent_size": 32}, "prediction": {"mtp_num_layers": 1}}[model]
    counts = count_parameters(ModelSpec.from_flat(_MODEL | changes))
    layers = counts.moe_layers + counts.prediction_layers
    elsewhere = layers * counts.num_experts * counts.expert * 3 // 4
    assert run.breakdown["weights"] == 2 * (counts.total - elsewhere)


def test_experts_on_fewer_channels_keep_narrower_tokens() -> None:
    narrower = 2 * _TOKENS * (_WIDTH - 32) * 2
    projected_back = _TOKENS * 32 * 2  # kept by the projection to the full width
    saved = _kept(_run(), "mlp") - _kept(_run("latent"), "mlp")
    assert saved == narrower - projected_back


@pytest.mark.parametrize(
    "name", ["moe_router_padding_for_fp8", "moe_router_padding_for_quantization"]
)
def test_routing_may_pad_for_products_in_fp8(name: str) -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    padded, plain = _run(**fp8, **{name: True}), _run(**fp8)
    assert padded.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.01)
