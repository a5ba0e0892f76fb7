import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_strategies import flat_models, models

from tuner.models import MODEL_FIELDS, ModelSpec, ModelSpecError, get_model

TINY = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "position_embedding_type": "rope",
}
EXPERTS = {**TINY, "num_moe_experts": 8, "add_bias_linear": False}


def refusal(changes: dict, base: dict = TINY) -> str:
    with pytest.raises(ModelSpecError) as caught:
        ModelSpec.from_flat({**base, **changes}, name="m")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model 'm': ")
    return message


def test_sizes_left_out_are_derived_as_megatron_core_does():
    spec = ModelSpec.from_flat({**EXPERTS, "hidden_size": 66}, name="m")
    assert spec.num_query_groups == 4
    assert spec.kv_channels == 16
    assert spec.ffn_hidden_size == 264
    assert spec.moe_ffn_hidden_size == 264


def test_latent_attention_defaults_to_rmsnorm():
    assert ModelSpec.from_flat(TINY).normalization == "LayerNorm"
    latent = ModelSpec.from_flat({**TINY, "multi_latent_attention": True})
    assert latent.normalization == "RMSNorm"


@settings(deadline=None)
@given(flat_models())
def test_a_spec_survives_the_way_to_flat_json_and_back(flat):
    spec = ModelSpec.from_flat(flat, name="random")
    text = json.dumps(spec.to_flat())
    assert ModelSpec.from_flat(json.loads(text), name="random") == spec


@settings(deadline=None)
@given(flat_models())
def test_flat_fields_keep_what_was_given(flat):
    spec = ModelSpec.from_flat(flat)
    result = spec.to_flat()
    defaults = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    for key, value in flat.items():
        given_value = tuple(value) if isinstance(value, list) else value
        assert result.get(key, defaults[key]) in (value, given_value)


@settings(deadline=None)
@given(models)
def test_flat_fields_are_known_and_sizes_always_stand(spec):
    flat = spec.to_flat()
    assert set(flat) <= set(MODEL_FIELDS)
    sizes = {"num_layers", "hidden_size", "num_query_groups", "kv_channels", "ffn_hidden_size"}
    assert sizes | {"vocab_size", "normalization"} <= set(flat)


def test_latent_fields_stand_in_the_flat_form_even_at_their_defaults():
    spec = ModelSpec.from_flat({**TINY, "multi_latent_attention": True, "q_lora_rank": None})
    flat = spec.to_flat()
    assert flat["q_lora_rank"] is None
    assert flat["kv_lora_rank"] == 512
    assert "kv_lora_rank" not in ModelSpec.from_flat(TINY).to_flat()


@settings(deadline=None)
@given(
    st.sampled_from(MODEL_FIELDS),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.one_of(st.integers(-2, 3), st.text(max_size=2)), max_size=5),
        st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    ),
)
def test_any_value_in_any_field_is_taken_or_refused_in_one_line(field, value):
    message = ""
    try:
        spec = ModelSpec.from_flat({**TINY, field: value}, name="m")
        assert ModelSpec.from_flat(spec.to_flat(), name="m") == spec
    except ModelSpecError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400


def test_a_misspelt_field_names_the_nearest_one():
    assert "did you mean num_query_groups" in refusal({"num_query_group": 2})


@pytest.mark.parametrize("key", [3, "", "x" * 200])
def test_an_unknown_field_of_any_kind_is_refused(key):
    assert "unknown field" in refusal({key: 1})


@pytest.mark.parametrize(
    "field", ["num_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_size_is_named(field, how):
    flat = {**TINY, field: None}
    if how == "absent":
        del flat[field]
    with pytest.raises(ModelSpecError, match=f"{field} is missing; set it to a positive integer"):
        ModelSpec.from_flat(flat)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": "4096"}, ["hidden_size='4096'", "positive integer"]),
        ({"hidden_size": 4096.0}, ["hidden_size=4096.0", "positive integer"]),
        ({"hidden_size": True}, ["hidden_size=True", "positive integer"]),
        ({"num_layers": 0}, ["num_layers=0", "1 to 10000"]),
        ({"num_layers": 2**40}, ["num_layers", "1 to 10000"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0", "positive integer"]),
        ({"gated_linear_unit": "yes"}, ["gated_linear_unit='yes'", "true or false"]),
        ({"activation_func": "swiglu"}, ["activation_func='swiglu'", "silu"]),
        ({"layernorm_epsilon": float("nan")}, ["layernorm_epsilon=nan", "positive number"]),
        ({"hidden_dropout": 1.5}, ["hidden_dropout=1.5", "0 to 1"]),
        ({"window_size": [1, 2, 3]}, ["window_size=(1, 2, 3)", "two integers"]),
        ({"moe_layer_freq": [0, 2, 0, 1]}, ["moe_layer_freq", "0 and 1"]),
        ({"num_query_groups": 3}, ["num_query_groups=3", "divide num_attention_heads=4"]),
        (
            {"position_embedding_type": "learned_absolute"},
            ["max_position_embeddings=None", "position_embedding_type"],
        ),
        ({"kv_lora_rank": 64}, ["kv_lora_rank=64", "multi_latent_attention"]),
        ({"moe_ffn_hidden_size": 64}, ["moe_ffn_hidden_size=64", "num_moe_experts"]),
        (
            {"window_size": [8, 0], "window_attn_skip_freq": [1, 0]},
            ["window_attn_skip_freq=(1, 0)", "2 entries", "num_layers=4"],
        ),
        (
            {"multi_latent_attention": True, "attention_output_gate": True},
            ["attention_output_gate=True", "multi_latent_attention"],
        ),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_fix(changes, parts):
    message = refusal(changes)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"moe_router_topk": 9}, ["moe_router_topk=9", "num_moe_experts=8"]),
        ({"moe_layer_freq": [0, 1]}, ["2 entries", "num_layers=4"]),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            ["add_bias_linear=True", "moe_shared_expert_intermediate_size"],
        ),
        ({"moe_router_num_groups": 3}, ["moe_router_num_groups=3", "num_moe_experts=8"]),
        ({"moe_router_group_topk": 2}, ["moe_router_group_topk=2", "moe_router_num_groups"]),
    ],
)
def test_contradictions_among_experts_are_refused(changes, parts):
    message = refusal(changes, EXPERTS)
    assert all(part in message for part in parts), message


def test_replacing_a_field_is_checked_too():
    with pytest.raises(ModelSpecError, match="num_query_groups=3"):
        dataclasses.replace(get_model("tiny-gqa"), num_query_groups=3)


@pytest.mark.parametrize(
    ("frequency", "pattern"),
    [(1, "1111"), (2, "1010"), (3, "1001"), ([0, 1, 1, 0], "0110")],
)
def test_expert_layers_follow_moe_layer_freq(frequency, pattern):
    spec = ModelSpec.from_flat({**EXPERTS, "moe_layer_freq": frequency})
    assert spec.moe_layer_pattern == tuple(flag == "1" for flag in pattern)


@pytest.mark.parametrize(
    ("frequency", "pattern"),
    [(None, "11111"), (1, "00000"), (2, "10101"), (4, "11101"), ([0, 1, 1, 0], "01100")],
)
def test_windowed_layers_follow_window_attn_skip_freq_through_prediction_layers(frequency, pattern):
    spec = ModelSpec.from_flat(
        {**TINY, "window_size": [8, 0], "window_attn_skip_freq": frequency, "mtp_num_layers": 1}
    )
    assert spec.window_layer_pattern == tuple(flag == "1" for flag in pattern)


@pytest.mark.parametrize(
    ("vocabulary", "tensor_parallel", "padded"),
    [(100, 1, 128), (128, 1, 128), (129, 1, 256), (100, 8, 1024), (50257, 8, 51200)],
)
def test_the_vocabulary_is_padded_for_tensor_parallelism(vocabulary, tensor_parallel, padded):
    spec = ModelSpec.from_flat({**TINY, "vocab_size": vocabulary})
    assert spec.padded_vocab_size(tensor_parallel) == padded
