"""What the pieces of a count add up to; that each piece is right is held against Megatron-Core."""

import dataclasses

from hypothesis import given, settings
from model_strategies import models

from tuner.models import count_parameters, get_model


@settings(deadline=None)
@given(models)
def test_the_total_is_the_sum_of_its_layers_and_ends(spec):
    counts = count_parameters(spec)
    layers = sum(
        counts.moe_layer if is_moe else counts.dense_layer for is_moe in spec.moe_layer_pattern
    )
    ends = counts.embedding + counts.position_embedding + counts.final_norm + counts.output_layer
    assert counts.total == layers + ends + counts.prediction


@settings(deadline=None)
@given(models)
def test_a_token_meets_all_parameters_unless_experts_are_left_out(spec):
    counts = count_parameters(spec)
    assert 0 < counts.active <= counts.total
    if spec.num_moe_experts:
        every_expert = dataclasses.replace(spec, moe_router_topk=spec.num_moe_experts)
        counts = count_parameters(every_expert)
    assert counts.active == counts.total


@settings(deadline=None)
@given(models)
def test_padding_the_vocabulary_adds_whole_rows(spec):
    padded = count_parameters(spec, vocab_size=spec.vocab_size + 3)
    tables = 1 if spec.share_embeddings_and_output_weights else 2
    assert padded.total - count_parameters(spec).total == 3 * tables * spec.hidden_size


def test_the_quickstart_model_has_several_million_parameters():
    assert 5e6 < count_parameters(get_model("quickstart-gpt")).total < 20e6


def test_a_prediction_layer_repeats_the_last_decoder_layer():
    spec = get_model("deepseek-v3")
    counts = count_parameters(spec)
    extra = 3 * spec.hidden_size + 2 * spec.hidden_size**2
    assert counts.prediction == counts.moe_layer + extra
