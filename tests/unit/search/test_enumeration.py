"""Enumerated spaces against the scalar checker on every point."""

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.search.enumeration import enumerate_space, factor_space
from tuner.search.planning.estimator import OFFLOAD_FIELDS
from tuner.search.space import parse_space
from tuner.search.validity import ValidityChecker

MODEL = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 4096,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bf16": True,
    "params_dtype": "bf16",
    "pipeline_dtype": "bf16",
    "seq_length": 1024,
    "global_batch_size": 32,
}
GRAPHS = {
    "tensor_model_parallel_size": [1, 2],
    "pipeline_model_parallel_size": [1, 2],
    "virtual_pipeline_model_parallel_size": {
        "values": [None, 2],
        "when": {"pipeline_model_parallel_size": [2]},
    },
    "micro_batch_size": [1, 2],
    "recompute_granularity": [None, "full"],
    "recompute_method": {"values": ["block"], "when": {"recompute_granularity": "full"}},
    "recompute_num_layers": {"values": [1, 2], "when": {"recompute_granularity": "full"}},
    "cuda_graph_impl": ["none", "transformer_engine", "full_iteration"],
    "cuda_graph_modules": {
        "values": [[], ["attn"]],
        "when": {"cuda_graph_impl": "transformer_engine"},
    },
    "use_te_rng_tracker": {
        "values": [True],
        "when": {"cuda_graph_impl": ["transformer_engine", "full_iteration"]},
    },
    "env.PYTORCH_CUDA_ALLOC_CONF": [None, "expandable_segments:True"],
    "env.NCCL_GRAPH_REGISTER": {
        "values": ["0"],
        "when": {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    },
}


def checker(mcore: str) -> ValidityChecker:
    return ValidityChecker(fixed=MODEL, world_size=8, mcore=mcore)


@pytest.mark.parametrize("mcore", ["0.16.1", "0.18.0"])
def test_columns_hold_exactly_the_points_that_the_checker_accepts(mcore: str):
    space = parse_space({"axes": GRAPHS}, where="space")
    check = checker(mcore)
    points = [Candidate.from_flat(flat) for flat in space.enumerate()]
    expected = {c.key for c in points if check(c) is None}
    found = enumerate_space(space, check)
    keys = [found.candidate(row).key for row in range(len(found))]
    assert 0 < len(expected) < len(points)
    assert set(keys) == expected
    assert len(keys) == len(set(keys))
    assert found.enumerated == len(points)


def test_fixed_graph_fields_are_spelt_for_the_rules_and_left_as_they_are_in_candidates():
    axes = {"tensor_model_parallel_size": [1, 2], "cuda_graph_modules": [["attn"], ["mlp"]]}
    fixed = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
    space = parse_space({"axes": axes, "fixed": fixed}, where="space")
    found = enumerate_space(space, checker("0.16.1"))
    modules = {found.candidate(row).cuda_graph_modules for row in range(len(found))}
    assert modules == {("attn",), ("mlp",)}
    assert all(
        found.candidate(row).cuda_graph_impl == "transformer_engine" for row in range(len(found))
    )


def test_a_variable_that_depends_on_a_setting_is_refused_by_name():
    axes = {
        "micro_batch_size": [1, 2],
        "env.NCCL_MAX_CTAS": {"values": ["8"], "when": {"micro_batch_size": 1}},
    }
    with pytest.raises(InputError, match=r"env\.NCCL_MAX_CTAS.*micro_batch_size"):
        enumerate_space(parse_space({"axes": axes}, where="space"), checker("0.16.1"))


@pytest.mark.parametrize("mcore", ["0.16.1", "0.18.0"])
def test_a_factored_space_holds_the_same_candidates(mcore: str) -> None:
    space = parse_space(
        {
            "axes": {
                **GRAPHS,
                "cpu_offloading": [False, True],
                "cpu_offloading_num_layers": {"values": [2], "when": {"cpu_offloading": True}},
                "optimizer_cpu_offload": [False, True],
                "optimizer_offload_fraction": {
                    "values": [0.5, 1.0],
                    "when": {"optimizer_cpu_offload": True},
                },
            }
        },
        where="here",
    )
    factored = factor_space(space, checker(mcore), OFFLOAD_FIELDS)
    pairs = [
        factored.candidate(head, tail)
        for head in range(len(factored.head))
        for tail in range(len(factored.tail))
        if factored.head_group[head] == factored.tail_group[tail]
    ]
    whole = enumerate_space(space, checker(mcore))
    assert len(factored.tail) < len(factored.head)
    assert len(pairs) == len(whole) == len(factored)
    assert set(pairs) == {whole.candidate(row) for row in range(len(whole))}


@pytest.mark.parametrize("mcore", ["0.16.1", "0.18.0"])
def test_graphs_that_cannot_hold_the_experts_are_left_out(mcore: str) -> None:
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_grouped_gemm": True}
    check = ValidityChecker(fixed={**MODEL, **experts}, world_size=8, mcore=mcore)
    found = enumerate_space(parse_space({"axes": GRAPHS}, where="space"), check)
    spelt = [found.candidate(row).to_flat(mcore=mcore) for row in range(len(found))]
    assert any(flat.get("cuda_graph_impl", "none") == "transformer_engine" for flat in spelt)
    assert all(
        flat.get("cuda_graph_impl", "none") in ("none", "transformer_engine") for flat in spelt
    )
