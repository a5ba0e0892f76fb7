import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest
from hf_configs import HF_CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.models import ModelSpecError, from_hf_config, get_model

MINIMAL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def read(config: object, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return from_hf_config(file)


def refusal(config: object, tmp_path: Path) -> str:
    with pytest.raises(ModelSpecError) as caught:
        read(config, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "config.json"))
    return message


@pytest.mark.parametrize("repository", HF_CONFIGS)
def test_a_published_config_reads_as_the_catalogue_model(repository, tmp_path):
    name, config = HF_CONFIGS[repository]
    spec = read(config, tmp_path)
    assert dataclasses.replace(spec, name=name) == get_model(name)


@pytest.mark.parametrize("repository", HF_CONFIGS)
def test_the_architecture_name_alone_is_enough(repository, tmp_path):
    name, config = HF_CONFIGS[repository]
    without = {key: value for key, value in config.items() if key != "model_type"}
    assert dataclasses.replace(read(without, tmp_path), name=name) == get_model(name)


def test_a_directory_is_read_and_lends_its_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIGS["Qwen/Qwen3-8B"][1]))
    assert from_hf_config(folder).name == "my-model"
    assert from_hf_config(str(folder)).hidden_size == 4096


def test_the_name_in_the_file_wins(tmp_path):
    config = {"model_type": "llama", **MINIMAL, "_name_or_path": "org/fine-tune"}
    assert read(config, tmp_path).name == "fine-tune"


def test_the_language_model_of_a_multimodal_config_is_read(tmp_path):
    inner = {"model_type": "mistral", **MINIMAL}
    spec = read(
        {"model_type": "mistral3", "tie_word_embeddings": True, "text_config": inner}, tmp_path
    )
    assert spec.num_layers == 4
    assert spec.share_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, {"num_query_groups": 8, "kv_channels": 8, "layernorm_epsilon": 1e-6}),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"num_query_groups": 8}),
        ("llama", {"mlp_bias": True, "attention_bias": True}, {"add_bias_linear": True}),
        ("mistral", {}, {"num_query_groups": 8, "window_size": (4095, 0)}),
        ("mistral", {"sliding_window": None}, {"window_size": None}),
        ("mistral", {"num_attention_heads": 16}, {"num_query_groups": 8}),
        ("qwen2", {"num_key_value_heads": 2}, {"add_qkv_bias": True, "window_size": None}),
        (
            "qwen2",
            {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 3},
            {"window_size": (4095, 0), "window_attn_skip_freq": (0, 0, 0, 1)},
        ),
        (
            "qwen3",
            {
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 6,
            },
            {"window_attn_skip_freq": 3, "kv_channels": 128, "qk_layernorm": True},
        ),
        ("mixtral", {}, {"num_moe_experts": 8, "moe_ffn_hidden_size": 128, "rotary_base": 1e6}),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
            {"moe_layer_freq": (0, 0, 0, 1), "moe_router_pre_softmax": True},
        ),
        ("qwen3_moe", {"decoder_sparse_step": 9}, {"num_moe_experts": None}),
        ("qwen3_moe", {}, {"moe_layer_freq": 1, "num_moe_experts": 128, "kv_channels": 8}),
        (
            "gpt_oss",
            {"num_key_value_heads": 8},
            {"window_size": (127, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "llama3", "factor": 4.0}},
            {"rotary_base": 7.0, "rope_scaling": True, "rope_scaling_factor": 4.0},
        ),
    ],
)
def test_what_a_file_leaves_out_is_filled_as_transformers_does(
    model_type, changes, expected, tmp_path
):
    spec = read({"model_type": model_type, **MINIMAL, **changes}, tmp_path)
    assert {field: getattr(spec, field) for field in expected} == expected


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_latent_attention_keeps_its_defaults_and_null_means_none(model_type, tmp_path):
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": None,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 2,
    }
    spec = read({"model_type": model_type, **MINIMAL, **experts}, tmp_path)
    assert spec.q_lora_rank == 1536
    assert spec.rope_type == "rope"
    assert spec.moe_layer_freq == (0, 0, 1, 0)
    assert spec.moe_shared_expert_intermediate_size is None
    assert spec.mtp_num_layers is None
    spec = read({"model_type": model_type, **MINIMAL, **experts, "q_lora_rank": None}, tmp_path)
    assert spec.q_lora_rank is None


@pytest.mark.parametrize(
    ("repository", "changes", "part"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", {"num_hidden_layers": 50}, "each of 50 layers"),
        ("nvidia/Nemotron-H-8B-Base-8K", {"use_bias": True}, "use_bias=true"),
        ("nvidia/Nemotron-H-8B-Base-8K", {"mlp_hidden_act": "silu"}, "must be relu2"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["full_attention"]}, "each of 48"),
    ],
)
def test_hybrids_refuse_what_megatron_core_lacks(repository, changes, part, tmp_path):
    assert part in refusal(HF_CONFIGS[repository][1] | changes, tmp_path)


def test_linear_attention_follows_the_kinds_of_layers_named(tmp_path):
    config = HF_CONFIGS["Qwen/Qwen3-Next-80B-A3B-Instruct"][1]
    kinds = ["linear_attention", "full_attention"] * 24
    assert read(config | {"layer_types": kinds}, tmp_path).linear_attention_freq == (1, 0) * 24


@pytest.mark.parametrize("key", MINIMAL)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_size_is_named(key, how, tmp_path):
    config = {"model_type": "llama", **MINIMAL, key: None}
    if how == "absent":
        del config[key]
    assert f"{key} is missing; set it to" in refusal(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": "64"}, ['hidden_size="64"', "positive integer"]),
        ({"hidden_size": -64}, ["hidden_size=-64", "positive integer"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "1 to 10000"]),
        ({"num_key_value_heads": 3}, ["num_query_groups=3", "num_attention_heads=8"]),
        ({"hidden_act": "mish"}, ['hidden_act="mish"', "swish"]),
        ({"hidden_act": None, "mlp_bias": 1}, ["mlp_bias=1", "true or false"]),
        ({"attention_bias": True}, ["attention_bias=true", "mlp_bias"]),
        ({"rope_theta": "big"}, ['rope_theta="big"', "finite number"]),
        ({"rope_scaling": "yarn"}, ['rope_scaling="yarn"', "object"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ["dynamic", "remove it"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({"attention_dropout": 7}, ["attention_dropout=7", "0 to 1"]),
        ({"_name_or_path": 3}, ["_name_or_path=3", "text"]),
    ],
)
def test_a_wrong_value_is_refused_with_file_key_value_and_fix(changes, parts, tmp_path):
    message = refusal({"model_type": "llama", **MINIMAL, **changes}, tmp_path)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "llamaa", **MINIMAL}, "did you mean llama?"),
        ({"model_type": "bert"}, "not an architecture read here"),
        ({"architectures": ["BertModel"]}, "not an architecture read here"),
        ({"model_type": ["llama"]}, "must be text"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of str"),
        ({"model_type": "llava", "text_config": {"model_type": "opt"}}, "text_config"),
        ({"model_type": "llava", "text_config": []}, "must be an object"),
        ({}, "model_type is missing"),
        ([], "holds list, not an object"),
        ("null", "holds NoneType, not an object"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not JSON"),
        ({"model_type": "gpt_oss", **MINIMAL, "attention_bias": False}, "must be true"),
        ({"model_type": "qwen3", **MINIMAL, "attention_bias": True}, "set it to false"),
        (
            {
                "model_type": "qwen3",
                **MINIMAL,
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "each of 4 layers",
        ),
        ({"model_type": "qwen3_moe", **MINIMAL, "mlp_only_layers": ["a"]}, "list of int"),
        ({"model_type": "deepseek_v3", **MINIMAL}, "moe_intermediate_size is missing"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line(config, part, tmp_path):
    assert part in refusal(config, tmp_path)


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path, "", "\0"):
        with pytest.raises(ModelSpecError, match=r"config\.json") as caught:
            from_hf_config(path)
        assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelSpecError, match="not JSON"):
        from_hf_config(file)


def test_an_enormous_file_is_refused_before_it_is_parsed(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as handle:
        handle.truncate(64 * 2**20)
    with pytest.raises(ModelSpecError, match="too large"):
        from_hf_config(file)


def test_no_code_beside_the_config_runs(tmp_path):
    trap = tmp_path / "trap"
    (tmp_path / "modeling.py").write_text(f"open({str(trap)!r}, 'w')")
    config = {"model_type": "llama", **MINIMAL, "auto_map": {"AutoConfig": "modeling.Config"}}
    read(config, tmp_path)
    assert not trap.exists()


KEYS = sorted({key for _, config in HF_CONFIGS.values() for key in config} | {"text_config"})
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 5000),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["silu", "yarn", "llama3", "sliding_attention", "llama", "gpt_oss"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*KEYS, "type", "factor"]), inner, max_size=4),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(HF_CONFIGS)),
    st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=4),
    st.sets(st.sampled_from(KEYS), max_size=3),
)
def test_a_damaged_config_is_read_or_refused_in_one_line(repository, damage, lost):
    config = {**HF_CONFIGS[repository][1], **damage}
    config = {key: value for key, value in config.items() if key not in lost}
    check_read_or_refused(json.dumps(config).encode())


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), json_values.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_are_read_or_refused_in_one_line(content):
    check_read_or_refused(content)


def check_read_or_refused(content: bytes) -> None:
    descriptor, path = tempfile.mkstemp(suffix=".json")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
        message = path
        try:
            spec = from_hf_config(path)
            assert spec.num_layers >= 1
        except ModelSpecError as error:
            message = str(error)
        assert message.startswith(path)
        assert "\n" not in message
        assert len(message) < 500
    finally:
        Path(path).unlink()
