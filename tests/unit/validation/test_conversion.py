"""Published rows as launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tuner.candidate import Candidate
from tuner.models import ModelSpec
from tuner.validation.conversion import launch_of
from tuner.validation.launch import UnmodelledError
from tuner.validation.megatron_lm import config_fields, layer_frequency, model_fields
from tuner.validation.published import read_rows, source_of

DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "published_memory.jsonl.gz"
ROWS = {row["id"]: row for row in read_rows(DATA)}

OPTIONS = {"num-layers": 16, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 100}


class TestMegatronLm:
    def test_options_left_out_have_megatron_lms_defaults(self):
        model = ModelSpec.from_flat(
            model_fields(OPTIONS | {"max-position-embeddings": 128}), name="m"
        )
        assert model.normalization == "LayerNorm"
        assert model.activation_func == "gelu"
        assert model.share_embeddings_and_output_weights
        assert model.hidden_dropout == 0.1

    def test_swiglu_is_a_gated_silu(self):
        fields = model_fields(OPTIONS | {"swiglu": True, "disable-bias-linear": True})
        assert (fields["activation_func"], fields["gated_linear_unit"]) == ("silu", True)
        assert fields["add_bias_linear"] is False

    def test_query_groups_count_only_with_group_query_attention(self):
        assert "num_query_groups" not in model_fields(OPTIONS | {"num-query-groups": 2})
        both = OPTIONS | {"num-query-groups": 2, "group-query-attention": True}
        assert model_fields(both)["num_query_groups"] == 2

    def test_layers_per_virtual_stage_become_chunks_per_rank(self):
        split = {
            "pipeline-model-parallel-size": 4,
            "num-layers-per-virtual-pipeline-stage": 1,
        }
        assert config_fields(OPTIONS | split)["virtual_pipeline_model_parallel_size"] == 4

    def test_gradients_are_reduced_in_32_bits_unless_told_otherwise(self):
        assert config_fields(OPTIONS | {"bf16": True})["grad_reduce_in_fp32"] is True
        assert (
            config_fields(OPTIONS | {"grad-reduce-in-bf16": True})["grad_reduce_in_fp32"] is False
        )

    def test_sequence_parallelism_needs_tensor_parallelism(self):
        assert config_fields(OPTIONS | {"sequence-parallel": True})["sequence_parallel"] is False

    @pytest.mark.parametrize(
        ("text", "pattern"),
        [
            ("([0]*3+[1]*2)", (0, 0, 0, 1, 1)),
            ("([0]*1+[1]*3)*1", (0, 1, 1, 1)),
            ("[0,1]*2", (0, 1, 0, 1)),
            ("2", 2),
            (1, 1),
            ([0, 1], (0, 1)),
        ],
    )
    def test_layer_patterns_are_read(self, text, pattern):
        assert layer_frequency(text) == pattern

    def test_the_layers_of_a_hybrid_model_are_those_of_its_pattern(self):
        options = OPTIONS | {"hybrid-layer-pattern": "M*-M/*", "mamba-num-heads": 8}
        fields = model_fields(options | {"spec": "[a.b hybrid_stack_spec]"})
        assert fields["hybrid_layer_pattern"] == "M*-M/*"
        assert "num_layers" not in fields

    def test_layers_of_ones_own_are_named_as_not_modelled(self):
        with pytest.raises(UnmodelledError, match="spec"):
            model_fields(OPTIONS | {"spec": "[mine my_layers]"})


def test_every_convertible_row_is_a_valid_model_and_candidate():
    counts: Counter[str] = Counter()
    for row in ROWS.values():
        try:
            launch = launch_of(row)
        except UnmodelledError:
            continue
        ModelSpec.from_flat(launch.model)
        Candidate.from_flat(launch.config)
        parts = ("tensor", "pipeline")
        size = 1
        for part in parts:
            size *= launch.config.get(f"{part}_model_parallel_size") or 1
        assert launch.world_size % size == 0
        counts[source_of(row)] += 1
    assert counts["mcore-golden"] >= 250
    assert counts["simumax"] == 24
    assert counts["aleph"] == 588
    assert counts["mbridge-skill"] >= 17


def test_a_functional_test_takes_its_options_from_the_tests_own_file():
    row = next(r for r in ROWS.values() if "gpt3_7b_tp1_pp4_memory_speed" in r["source"])
    launch = launch_of(row)
    assert launch.config["virtual_pipeline_model_parallel_size"] == 8
    assert launch.config["gradient_accumulation_fusion"] is False
    assert launch.model["vocab_size"] == 131073
    assert launch.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_functional_test_unknown_by_name_is_read_from_the_row():
    row = next(r for r in ROWS.values() if "gpt3_7b_tp1_pp4_memory_speed" in r["source"])
    known = launch_of(row)
    unknown = launch_of(row | {"source": "NVIDIA/Megatron-LM tests/.../another_test"})
    assert unknown.model == known.model
    assert unknown.config["virtual_pipeline_model_parallel_size"] == 8
    assert unknown.config["deterministic_mode"] is True
    assert "unpublished options at Megatron-LM's defaults" in unknown.assumptions


def test_retired_deterministic_tests_had_unfused_attention_only():
    row = next(r for r in ROWS.values() if r["id"] == "mcore-golden-0075")
    assert launch_of(row).config["attention_backend"] == "unfused"
    assert "attention_backend" not in launch_of(row | {"num_gpus": 8}).config


def test_unpublished_gpu_counts_are_bounded_by_the_step_time():
    row = next(r for r in ROWS.values() if r["id"] == "mcore-golden-0000")
    launch = launch_of(row)
    assert launch.world_size == 256
    assert any("not published" in note for note in launch.assumptions)


def test_bridge_rows_take_what_they_leave_out_from_the_recipe():
    row = next(r for r in ROWS.values() if r["model"] == "Moonlight-16B-A3B")
    launch = launch_of(row)
    assert launch.config["exp_avg_dtype"] == "bf16"
    assert launch.config["grad_reduce_in_fp32"] is False
    assert launch.model["vocab_size"] == 163840


@pytest.mark.parametrize(
    ("overlap", "ranks", "expected"),
    [
        ({"ddp.overlap_grad_reduce": False, "comm_overlap.tp_comm_overlap": False}, 2, True),
        ({"ddp.overlap_grad_reduce": True, "comm_overlap.overlap_grad_reduce": False}, 2, False),
        ({"ddp.overlap_grad_reduce": False}, 2, False),
        ({"ddp.overlap_grad_reduce": False, "comm_overlap.tp_comm_overlap": False}, 1, False),
    ],
)
def test_an_overlap_config_of_bridge_decides_how_gradients_are_reduced(overlap, ranks, expected):
    row = next(r for r in ROWS.values() if r["model"] == "Moonlight-16B-A3B")
    shards = row["tp"] * row["pp"] * (row["cp"] or 1)
    row = row | {"overlap": overlap, "num_gpus": ranks * shards, "distributed_optimizer": True}
    assert launch_of(row).config["overlap_grad_reduce"] is expected


def test_a_peak_read_before_layers_are_captured_is_that_of_eager_steps():
    completed = launch_of(ROWS["mbridge-skill-0010"])  # "peak after iteration 2"
    assert completed.config["cuda_graph_impl"] == "none"
    assert any("captured" in note for note in completed.assumptions)
    ended_out_of_memory = launch_of(ROWS["mbridge-skill-0008"])
    assert ended_out_of_memory.config["cuda_graph_impl"] == "transformer_engine"


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ("titan-0000", "torchtitan"),
        ("mbridge-card-0010", "LoRA"),
        ("mbridge-skill-0025", "not published"),
    ],
)
def test_rows_that_cannot_be_modelled_say_why(identity, reason):
    row = ROWS.get(identity) or next(r for n, r in ROWS.items() if n.startswith(identity[:5]))
    with pytest.raises(UnmodelledError, match=reason):
        launch_of(row)
