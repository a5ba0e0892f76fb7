"""FLOPs against hand counts, and against published runs that give both rate and TFLOP/s."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_strategies import models

from tuner.models import ModelSpec, count_parameters, get_model, model_flops_per_step

BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df03b8355b03192d88d70f1709fedf51a/"
)
CARDS = BRIDGE + "examples/model_verification_cards/"
ARCHIVE = BRIDGE + "docs/performance-summary-archive.md"

PUBLISHED_RUNS = [
    # model, TP, sequence, tokens/s/GPU, model TFLOP/s/GPU, source
    ("deepseek-v3", 2, 4096, 1061.206, 276.03, CARDS + "deepseek-v3/card.yaml H100"),
    ("deepseek-v3", 1, 4096, 6143.635, 1597.31, CARDS + "deepseek-v3/card.yaml GB300"),
    ("gpt-oss-120b", 1, 4096, 33017.081, 1077.35, CARDS + "gpt-oss-120b/card.yaml GB300"),
    ("gpt-oss-20b", 4, 32768, 428.189, 13.43, CARDS + "gpt-oss-20b/card.yaml long context"),
    ("qwen3-30b-a3b", 1, 4096, 45086.158, 1037.27, CARDS + "qwen3-30b-a3b/card.yaml GB300"),
    ("qwen3-30b-a3b", 8, 32768, 459.374, 26.12, CARDS + "qwen3-30b-a3b/card.yaml long context"),
    ("qwen3-235b-a22b", 1, 4096, 9015.0, 1335.0, ARCHIVE + " 26.06"),
    ("kimi-k2", 1, 4096, 5372.0, 1099.0, ARCHIVE + " 26.06"),
    ("llama3.1-405b", 4, 8192, 783.0, 1976.0, ARCHIVE + " 26.06"),
    ("llama3-8b", 1, 8192, 37556.0, 1933.0, ARCHIVE + " 25.11"),
    ("llama3-70b", 1, 8192, 4312.0, 1937.0, ARCHIVE + " 25.11"),
]


@pytest.mark.parametrize("run", PUBLISHED_RUNS, ids=lambda run: f"{run[0]}-{run[2]}")
def test_flops_agree_with_published_tflops_over_token_rate(run):
    """To 0.2 %: both published figures are rounded, the coarsest to three digits."""
    name, tensor_parallel, seq_length, tokens_per_s, tflops, _ = run
    spec = get_model(name)
    flops = model_flops_per_step(spec, seq_length, 1, tensor_model_parallel_size=tensor_parallel)
    assert flops / seq_length == pytest.approx(tflops * 1e12 / tokens_per_s, rel=2e-3)


def small(**changes) -> ModelSpec:
    flat = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "vocab_size": 64,
        "make_vocab_size_divisible_by": 64,
        "position_embedding_type": "rope",
        **changes,
    }
    return ModelSpec.from_flat(flat)


def test_a_small_dense_model_counted_by_hand():
    projections = 8 * (8 + 16) + 8 * 8
    mlp = 2 * 8 * 32
    per_token = 2 * (projections + mlp) + 8 * 64
    attention = 2 * 8 * 10 * 10  # two layers; scores and values over the causal half
    assert model_flops_per_step(small(), 10, 3) == 3 * 2 * 3 * (10 * per_token + attention)


@pytest.mark.parametrize("activation", ["silu", "gelu", "quick_gelu"])
def test_any_gated_unit_has_three_gemms(activation):
    plain = model_flops_per_step(small(), 10, 1)
    gated = model_flops_per_step(small(gated_linear_unit=True, activation_func=activation), 10, 1)
    assert gated - plain == 6 * 10 * 2 * 8 * 32


def test_a_sliding_window_counts_the_pairs_inside_it():
    window = 4
    pairs = sum(min(position + 1, window) for position in range(10))
    full = model_flops_per_step(small(), 10, 1)
    windowed = model_flops_per_step(small(window_size=[window - 1, 0]), 10, 1)
    assert full - windowed == 6 * 2 * (8 * 10 * 10 - 2 * 8 * pairs)


@pytest.mark.parametrize("window", [[-1, 0], [9, 0], [100, 0]])
def test_a_window_no_shorter_than_the_sequence_changes_nothing(window):
    windowed = small(window_size=window)
    assert model_flops_per_step(windowed, 10, 1) == model_flops_per_step(small(), 10, 1)


def test_tensor_parallelism_only_pads_the_vocabulary():
    spec = small(vocab_size=65)
    one = model_flops_per_step(spec, 10, 1)
    eight = model_flops_per_step(spec, 10, 1, tensor_model_parallel_size=8)
    assert eight - one == 6 * 10 * 8 * (512 - 128)


def test_a_prediction_layer_adds_a_layer_a_projection_and_logits():
    one = model_flops_per_step(small(num_layers=1), 10, 1)
    two = model_flops_per_step(small(num_layers=2), 10, 1)
    predicted = model_flops_per_step(small(num_layers=1, mtp_num_layers=1), 10, 1)
    assert predicted - one == (two - one) + 6 * 10 * (3 * 8 + 2 * 8 * 8 + 8 * 64)


@settings(deadline=None)
@given(models, st.integers(1, 300), st.integers(1, 64))
def test_flops_grow_in_proportion_to_the_batch(spec, seq_length, batch):
    one = model_flops_per_step(spec, seq_length, 1)
    assert model_flops_per_step(spec, seq_length, batch) == batch * one
    assert isinstance(one, int)


@pytest.mark.parametrize("name", ["llama3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "qwen3-4b"])
def test_flops_are_six_for_each_weight_a_token_multiplies_and_attention(name):
    spec = get_model(name)
    counts = count_parameters(spec, vocab_size=spec.padded_vocab_size())
    head_norms = 2 * spec.kv_channels if spec.qk_layernorm else 0
    norms = spec.num_layers * (counts.layer_norms + head_norms) + counts.final_norm
    routers = counts.moe_layers * counts.router
    weights = counts.active - norms - routers
    if not spec.share_embeddings_and_output_weights:
        weights -= counts.embedding  # looked up, not multiplied
    attention = 2 * spec.num_layers * spec.kv_channels * spec.num_attention_heads * 4096**2
    assert model_flops_per_step(spec, 4096, 1) == 6 * weights * 4096 + 3 * attention


@pytest.mark.parametrize(
    ("seq_length", "batch", "tensor_parallel", "field"),
    [(0, 1, 1, "seq_length"), (1, -1, 1, "global_batch_size"), (1, 1, 0, "tensor_model_parallel")],
)
def test_sizes_below_one_are_refused(seq_length, batch, tensor_parallel, field):
    with pytest.raises(ValueError, match=field):
        model_flops_per_step(small(), seq_length, batch, tensor_model_parallel_size=tensor_parallel)
