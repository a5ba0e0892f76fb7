"""Candidates are canonical values: one key per run, whatever the spelling."""

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError


def keys_of(*flats):
    return {Candidate.from_flat(flat).key for flat in flats}


def test_module_order_and_repeats_do_not_make_another_candidate():
    selective = {"recompute_granularity": "selective"}
    assert (
        len(
            keys_of(
                {**selective, "recompute_modules": ["mlp", "core_attn"]},
                {**selective, "recompute_modules": ("core_attn", "mlp", "mlp")},
                {**selective, "recompute_modules": "mlp,core_attn"},
            )
        )
        == 1
    )


def test_old_and_new_cuda_graph_spellings_are_one_candidate():
    assert (
        len(
            keys_of(
                {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
                {"cuda_graph_impl": "full_iteration"},
                {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
            )
        )
        == 1
    )
    assert (
        len(
            keys_of(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full"},
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("mcore", "expected"),
    [
        ("0.16.1", {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}),
        ("0.17", {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}),
        ("0.18.0", {"cuda_graph_impl": "full_iteration"}),
        ("0.19.2", {"cuda_graph_impl": "full_iteration"}),
    ],
)
def test_each_version_gets_its_own_cuda_graph_spelling(mcore, expected):
    flat = Candidate.from_flat({"cuda_graph_impl": "full_iteration"}).to_flat(mcore=mcore)
    assert {k: v for k, v in flat.items() if k.startswith("cuda_graph")} == expected


def test_fields_that_megatron_does_not_read_do_not_make_another_candidate():
    assert (
        len(
            keys_of(
                {},
                {"recompute_method": "uniform", "recompute_num_layers": 3},
                {"recompute_modules": ["mlp"]},
                {"cpu_offloading_num_layers": 4},
                {"offload_modules": ["core_attn"], "optimizer_offload_fraction": 0.5},
                {"virtual_pipeline_model_parallel_size": None, "env": {}},
            )
        )
        == 1
    )


def test_selective_without_modules_is_core_attention_but_an_empty_list_is_no_recompute():
    default = Candidate.from_flat({"recompute_granularity": "selective"})
    none = Candidate.from_flat({"recompute_granularity": "selective", "recompute_modules": []})
    assert default.recompute_modules == ("core_attn",)
    assert none.to_flat()["recompute_modules"] == []
    assert default.key != none.key


def test_other_megatron_fields_pass_through_unchanged():
    flat = {
        "tp_comm_overlap": True,
        "moe_router_topk": 2,
        "pipeline_layout": [["decoder"], {"a": 1}],
    }
    candidate = Candidate.from_flat(flat)
    assert {k: candidate.to_flat()[k] for k in flat} == flat
    assert hash(candidate) == hash(Candidate.from_flat(dict(reversed(flat.items()))))


def test_flat_form_gives_back_the_same_candidate():
    flat = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 5,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "env": {"NCCL_GRAPH_REGISTER": 0},
        "x": None,
    }
    candidate = Candidate.from_flat(flat)
    assert Candidate.from_flat(candidate.to_flat()) == candidate
    assert candidate.env == (("NCCL_GRAPH_REGISTER", "0"),)


def test_labels_name_the_degrees_above_one():
    candidate = Candidate.from_flat(
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
            "cuda_graph_impl": "full_iteration",
        }
    )
    assert candidate.label(8) == "TP2 PP2 DP2 MBS1"
    assert candidate.memory_label() == "selective mlp, graph full_iteration"


@pytest.mark.parametrize(
    "flat", [{"recompute_modules": 3}, {"offload_modules": [1]}, {"env": ["A=1"]}]
)
def test_values_without_a_canonical_form_are_input_errors(flat):
    with pytest.raises(InputError):
        Candidate.from_flat(flat)
