"""The checker's answers: versions, unknown fields, rewrites, capabilities, fixes, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.constraints import Capabilities, InputError, apply_fix, check, describe, fix
from tuner.constraints.docs import render

DENSE = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "bf16": True,
    "params_dtype": "bf16",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "world_size": 8,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "seq_length": 4096,
}


def rules(config, kind="error", **ask):
    return [v.rule for v in check(config, **ask).violations if v.kind == kind]


def test_plain_dense_model_is_valid():
    assert check(DENSE).valid
    assert check(DENSE).rewrites == {}


@pytest.mark.parametrize("version", ["0.16", "0.16.0", "v0.17.1", "core_v0.18.0", "0.19"])
def test_minor_and_patch_versions_are_understood(version):
    assert check(DENSE, mcore=version).valid


def test_unknown_version_names_the_supported_ones():
    with pytest.raises(ValueError, match=r"0\.16\.1.*0\.19\.2"):
        check(DENSE, mcore="0.12")


def test_unknown_front_end_names_the_known_ones():
    with pytest.raises(ValueError, match="megatron-lm"):
        check(DENSE, frontend="nemo")


def test_misspelt_field_gets_the_nearest_name():
    (error,) = check({**DENSE, "tensor_model_paralel_size": 2}).errors
    assert error.rule == "V01"
    assert "tensor_model_parallel_size" in error.message


def test_field_of_a_later_version_says_where_it_exists():
    (error,) = check({**DENSE, "activation_offload_fraction": 0.5}, mcore="0.18").errors
    assert "0.19.2" in error.message


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads"])
def test_missing_model_field_is_reported(name):
    config = {key: value for key, value in DENSE.items() if key != name}
    assert rules(config) == ["T02"]


@pytest.mark.parametrize("config", [None, [], "a", 3])
def test_what_is_no_mapping_is_an_input_error(config):
    with pytest.raises(InputError):
        check(config)


def test_full_recompute_needs_method_and_count():
    assert rules({**DENSE, "recompute_granularity": "full"}) == ["R03", "R04"]


def test_empty_module_list_is_valid_with_advice():
    result = check({**DENSE, "recompute_granularity": "selective", "recompute_modules": []})
    assert result.valid
    assert "N07" in [v.rule for v in result.violations]


def test_recomputed_module_lies_inside_or_outside_the_graph():
    moe = {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
    graph = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]}
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert rules({**DENSE, **moe, **graph, **recompute}) == ["G21"]
    assert rules({**DENSE, **moe, **graph}) == []


def test_both_graph_spellings_are_one_run_in_each_version():
    old = {**DENSE, "cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
    new = {**DENSE, "cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    assert check(old, mcore="0.16").valid
    assert rules(new, mcore="0.16") == ["V01", "G01"]
    result = check(old, mcore="0.18")
    assert result.valid
    assert result.rewrites == {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": None}
    assert check(new, mcore="0.18").valid


def test_rewrite_message_shows_before_and_after():
    result = check({**DENSE, "sequence_parallel": True}, frontend="megatron-lm")
    (rewrite,) = [v for v in result.violations if v.kind == "rewrite"]
    assert rewrite.fix == {"sequence_parallel": False}
    assert "True becomes False" in rewrite.message


def test_one_candidate_refused_rewritten_and_accepted_by_three_front_ends():
    candidate = {**DENSE, "sequence_parallel": True}
    assert rules(candidate, mcore="0.18", frontend="mcore") == ["P01"]
    assert check(candidate, mcore="0.18", frontend="bridge").rewrites["sequence_parallel"] is False
    assert check(candidate, mcore="0.18", frontend="megatron-lm").valid


def test_unknown_machine_is_asked_nothing():
    graphs = {**DENSE, "cuda_graph_impl": "transformer_engine"}
    assert check(graphs).valid
    assert check(graphs, capabilities=Capabilities()).valid
    assert rules(graphs, capabilities=Capabilities(cuda=False)) == ["K01"]
    assert rules(graphs, capabilities=Capabilities(transformer_engine="none")) == ["G33"]


def test_blackwell_is_read_from_the_machine_when_the_run_does_not_say():
    config = {
        **DENSE,
        "cuda_graph_impl": "local",
        "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }
    assert rules(config) == ["G28"]
    assert rules(config, capabilities=Capabilities(compute_capability=(10, 0))) == []


def test_fix_changes_as_little_as_possible():
    found = fix({**DENSE, "recompute_granularity": "full", "sequence_parallel": True})
    assert found.result.valid
    assert len(found.changes) <= 3
    assert found.to_json()["valid"] is True


def test_valid_candidate_is_returned_unchanged_by_fix():
    found = fix(DENSE)
    assert found.changes == {}
    assert found.config == DENSE


def test_apply_fix_removes_fields_the_version_does_not_have():
    config = {**DENSE, "cuda_graph_modules": ["attn"]}
    assert check(apply_fix(config, check(config))).valid


def test_result_is_json():
    result = check({**DENSE, "tensor_model_parallel_size": 3, "env": {"A": "1"}})
    text = json.loads(json.dumps(result.to_json()))
    assert set(text) == {"valid", "violations", "rewrites"}
    assert set(text["violations"][0]) == {
        *("rule", "kind", "fields", "message", "fix", "reference"),
    }


def test_check_starts_without_numpy_and_torch():
    code = (
        "import sys; from tuner.constraints import check; check({'num_layers': 1}); "
        "print([m for m in ('numpy', 'torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_documentation_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "constraints.md"
    assert page.read_text(encoding="utf-8") == render()


def test_every_rule_is_described():
    described = describe()
    assert len(described) > 300
    assert all(entry["what"] and entry["reference"] for entry in described)


def test_a_run_that_fails_after_upstreams_checks_is_valid_and_said_to_fail():
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "use_te_rng_tracker": True}
    whole = {"cuda_graph_impl": "full_iteration", "check_for_nan_in_loss": False}
    result = check({**DENSE, **experts, **whole}, mcore="0.18.0")
    found = {violation.rule: violation for violation in result.violations}
    assert result.valid
    assert found["G40"].doomed
    assert [violation.rule for violation in result.failures] == ["G40"]
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    again = check({**DENSE, **experts, **whole, **padded}, mcore="0.18.0")
    assert "G40" not in {violation.rule for violation in again.violations}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "O32"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, None),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, None),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "pipeline_model_parallel_size": 4,
            },
            "O32",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "pipeline_model_parallel_size": 1,
            },
            None,
        ),
        ({"cuda_graph_impl": "local", "pipeline_model_parallel_size": 1}, "O33"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, None),
    ],
)
def test_fine_grained_offload_fails_where_layers_run_out_of_turn(settings, rule):
    """As dry runs of Megatron-Core 0.16.1 do."""
    full = settings.get("recompute_granularity") == "full"
    config = {
        "num_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "seq_length": 2048,
        "world_size": 8,
        "global_batch_size": 16,
        "micro_batch_size": 1,
        "pipeline_model_parallel_size": 2,
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        **settings,
        **({"recompute_num_layers": 1} if full else {}),
    }
    found = {violation.rule for violation in check(config, mcore="0.16.1").failures}
    assert found & {"O32", "O33"} == ({rule} if rule else set())
