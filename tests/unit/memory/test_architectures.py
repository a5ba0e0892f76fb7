"""Dry runs of models that are more than a transformer: their weights and what they keep."""

from __future__ import annotations

from functools import cache

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.memory import DryRun, dry_run
from tuner.memory.composition import ProfileSource, StepProfile
from tuner.memory.composition.kinds import layer_kinds, profile_model
from tuner.memory.composition.measure import profile_task, profiles_of
from tuner.models import ModelSpec, count_parameters, get_model

_LENGTH = 256
_HYBRID = {
    "hybrid_layer_pattern": "M*-E",
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
    "vocab_size": 512,
    "position_embedding_type": "none",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LINEAR_ATTENTION = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "attention_output_gate": True,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_shared_expert_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_MODELS = {"hybrid": _HYBRID, "linear attention": _LINEAR_ATTENTION}


@cache
def _run(model: str, pattern: str = "", world_size: int = 1, **config: object) -> DryRun:
    fields = _MODELS[model] | ({"hybrid_layer_pattern": pattern} if pattern else {})
    if pattern and "E" not in pattern:
        fields = {name: value for name, value in fields.items() if "moe" not in name}
    return dry_run(
        ModelSpec.from_flat(fields),
        Candidate.from_flat({"micro_batch_size": 1, **config}),
        world_size=world_size,
        seq_length=_LENGTH,
        global_batch_size=2 * world_size,
    )


@pytest.mark.parametrize("model", _MODELS)
def test_the_real_model_has_the_parameters_that_are_counted(model: str) -> None:
    run = _run(model, use_distributed_optimizer=False)
    counted = count_parameters(ModelSpec.from_flat(_MODELS[model])).total
    assert run.breakdown["weights"] == 2 * counted


@pytest.mark.parametrize("model", _MODELS)
def test_tensor_and_pipeline_parallel_ranks_hold_their_share(model: str) -> None:
    whole = _run(model, use_distributed_optimizer=False).breakdown["weights"]
    split = _run(
        model,
        world_size=4,
        use_distributed_optimizer=False,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
    )
    assert 0.15 * whole < split.breakdown["weights"] < 0.4 * whole


def test_a_mamba_layer_keeps_its_projection_the_scan_and_two_norms() -> None:
    run = _run("hybrid", "MM")
    inner, states, heads, groups = 8 * 16, 2 * 2 * 24, 8, 2
    projected = 2 * inner + states + heads
    each_token = (
        2 * 64 + 4  # the normed input and its statistic
        + 2 * projected
        + 2 * inner  # the scan before its gate
        + 2 * inner + 4 * groups  # the scan's result and the norm's statistics
        + 2 * inner  # the normed result, input of the output projection
        + 2 * 64  # the layer's output, input of the next layer's norm
    )  # fmt: skip
    kept = sum(size for name, size in run.activations.items() if ".layers.0" in name)
    assert kept == pytest.approx(_LENGTH * each_token, abs=512)


def test_a_hybrid_pattern_with_prediction_needs_a_newer_megatron_core() -> None:
    import megatron.core

    if tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 17):
        pytest.skip("this version has multi-token prediction in hybrid models")
    with pytest.raises(InputError, match="hybrid_layer_pattern"):
        _run("hybrid", "M*/*")


def test_a_profile_holds_layers_of_linear_and_of_full_attention() -> None:
    model = ModelSpec.from_flat(_LINEAR_ATTENTION)
    kinds = layer_kinds(model, {})
    assert kinds == ("experts linear",) * 3 + ("experts",)
    architecture, _, layers = profile_model(model, kinds, {})
    assert layers == ("experts",) * 2 + ("experts linear",) * 2
    assert ModelSpec.from_flat(architecture).linear_attention_freq == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "glm4.5-air", "mixtral-8x7b", "nemotron4-15b", "qwen2.5-7b"]
)
def test_layers_of_catalogue_models_are_profiled(name: str) -> None:
    """As Megatron-Core is set up without a recipe: YaRN, experts with bias, squared ReLU, ..."""
    (profile,) = profiles_of([profile_task(get_model(name), Candidate(), ProfileSource(_LENGTH))])
    assert isinstance(profile, StepProfile)
    assert all(profile.units[kind].forward_change > 0 for kind in layer_kinds(get_model(name), {}))
