"""Hybrid models and linear attention: patterns, sizes and arithmetic."""

import pytest

from tuner.models import (
    ModelSpec,
    ModelSpecError,
    count_parameters,
    get_model,
    model_flops_per_step,
)
from tuner.models.hybrid import parse_pattern

HYBRID = {
    "hybrid_layer_pattern": "M*-E/*-/*-",
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 24,
    "mamba_num_groups": 2,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "activation_func": "squared_relu",
    "vocab_size": 128,
    "position_embedding_type": "none",
}


def test_a_pattern_names_layers_stages_and_prediction():
    pattern = parse_pattern("M*|-E/*-/*-")
    assert (pattern.decoder, pattern.prediction, pattern.depths) == ("M*-E", "*-", 2)
    assert pattern.all_layers == "M*-E*-*-"


@pytest.mark.parametrize("text", ["", "MXM", "M/*/-", "/M", "M/"])
def test_a_pattern_without_sense_is_refused(text):
    with pytest.raises(ModelSpecError, match="hybrid_layer_pattern"):
        ModelSpec.from_flat({**HYBRID, "hybrid_layer_pattern": text})


def test_layers_and_prediction_follow_from_the_pattern():
    spec = ModelSpec.from_flat(HYBRID)
    assert (spec.num_layers, spec.mtp_num_layers, spec.is_hybrid_model) == (4, 2, True)
    assert spec.moe_layer_pattern == (False, False, False, True)


def test_the_older_name_of_the_pattern_means_the_same():
    older = {k: v for k, v in HYBRID.items() if k != "hybrid_layer_pattern"}
    older["hybrid_override_pattern"] = HYBRID["hybrid_layer_pattern"]
    assert ModelSpec.from_flat(older) == ModelSpec.from_flat(HYBRID)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 5}, "hybrid_layer_pattern"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"hybrid_layer_pattern": "ME", "num_moe_experts": None}, "num_moe_experts"),
        ({"mamba_num_groups": 3}, "mamba_num_groups"),
        ({"hybrid_layer_pattern": None, "num_layers": 2}, "mamba_"),
        ({"experimental_attention_variant": "gated_delta_net"}, "linear_attention_freq"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads"),
    ],
)
def test_contradictions_name_the_field(change, field):
    fields = {**HYBRID, **change}
    if fields.get("num_moe_experts") is None:
        fields.pop("moe_ffn_hidden_size")
    with pytest.raises(ModelSpecError, match=field):
        ModelSpec.from_flat(fields)


def test_each_kind_of_layer_counts_its_own_weights():
    counts = count_parameters(ModelSpec.from_flat(HYBRID))
    inner, states, heads = 8 * 16, 2 * 2 * 24, 8
    assert counts.mamba == (
        64 * (2 * inner + states + heads)  # gate, input, state maps, step sizes
        + 5 * (inner + states)  # convolution of four and its bias
        + 3 * heads
        + inner  # norm
        + inner * 64
    )
    assert counts.layer_norms == 64
    assert counts.mixture == 4 * 64 + 4 * 2 * 64 * 48 + 2 * 64 * 80
    attention = 64 * (128 + 2 * 64) + 128 * 64
    mlp = 2 * 64 * 96
    decoder = counts.mamba + attention + mlp + counts.mixture + 4 * 64
    prediction = attention + mlp + 2 * 64 + 3 * 64 + 2 * 64 * 64
    assert counts.total == decoder + 2 * prediction + 64 + 2 * 128 * 64


def test_prediction_layers_may_be_one_layer_repeated():
    once = count_parameters(ModelSpec.from_flat({**HYBRID, "mtp_use_repeated_layer": True}))
    twice = count_parameters(ModelSpec.from_flat(HYBRID))
    assert twice.total - once.total == once.prediction_layer


def test_experts_may_work_on_fewer_channels():
    spec = ModelSpec.from_flat({**HYBRID, "moe_latent_size": 16})
    counts = count_parameters(spec)
    assert counts.expert == 2 * 16 * 48
    assert counts.latent_projections == 2 * 64 * 16


def test_flops_of_a_hybrid_step_are_those_of_its_layers():
    """The terms of Bridge's `hybrid_flops`; its Mamba layers are twice the hidden size wide."""
    spec, length = ModelSpec.from_flat(HYBRID), 32
    mamba = 2 * 64 * (4 * 64 + 2 * 2 * 24 + 8) + 7 * 128 * 24 + 2 * 128 * 64
    attention = 4 * 64 * 32 * (4 + 2) + 2 * 32 * 4 * length
    mlp, mixture = 4 * 64 * 96, 4 * 64 * (48 * 2 + 80)
    layers = mamba + 3 * attention + 3 * mlp + mixture
    logits = 2 * 64 * 128 * 3
    assert model_flops_per_step(spec, length, 5) == 3 * 5 * length * (layers + logits)


def test_linear_attention_takes_the_place_of_most_attention_layers():
    spec = get_model("qwen3-next-80b-a3b")
    assert sum(spec.linear_attention_pattern) == 36
    assert not spec.linear_attention_pattern[3]
    counts = count_parameters(spec)
    keys, values = 16 * 128, 32 * 128
    assert counts.linear_attention == (
        2048 * (2 * keys + 2 * values + 64) + 4 * (2 * keys + values) + 64 + 128 + values * 2048
    )
    # Linear attention's work does not grow with the square of the length.
    short, long = (model_flops_per_step(spec, length, 1) for length in (1024, 2048))
    assert long - 2 * short == 3 * 12 * 2 * 256 * 16 * (2048**2 - 2 * 1024**2)
