"""Megatron-LM command lines: written, and read from scripts as people have them."""

from __future__ import annotations

import pytest

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.formats import export_document
from tuner.formats.reader import read_configuration
from tuner.models import ModelSpec

SCRIPT = """\
#!/bin/bash
# A launch script of the usual shape.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-2}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8  # GQA
    --seq-length 4096 --max-position-embeddings 8192 --position-embedding-type rope
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --vocab-size 128256
)
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 256 --bf16 --overlap-grad-reduce"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $TRAINING_ARGS \\
    --tensor-model-parallel-size 2 --sequence-parallel \\
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \\
    --use-distributed-optimizer --recompute-granularity selective \\
    --recompute-modules core_attn mlp --no-rope-fusion --my-own-option 3
"""


def read(text: str, **more: bool) -> dict:
    return read_configuration(text, mcore="0.17.0", **more)


def test_a_launch_script_becomes_a_configuration() -> None:
    document = read(SCRIPT)
    assert document["frontend"] == "megatron-lm"
    assert (document["world_size"], document["seq_length"]) == (16, 4096)
    assert document["model"]["num_query_groups"] == 8
    assert document["model"]["add_bias_linear"] is False
    config = document["config"]
    assert config["virtual_pipeline_model_parallel_size"] == 2
    assert config["recompute_modules"] == ["core_attn", "mlp"]
    assert config["apply_rope_fusion"] is False
    assert config["grad_reduce_in_fp32"] is True
    assert config["env"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_effective_settings_hold_what_the_command_line_adds() -> None:
    given, effective = read(SCRIPT)["config"], read(SCRIPT, effective=True)["config"]
    assert "gradient_accumulation_fusion" not in given
    assert effective["gradient_accumulation_fusion"] is True
    assert effective["overlap_p2p_comm"] is True
    assert effective["apply_rope_fusion"] is False


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(InputError, match="--num-layers"):
        read("pretrain_gpt.py --hidden-size 8 --num-layers --bf16")


@pytest.mark.parametrize(
    ("mcore", "option"),
    [("0.17", "--cuda-graph-scope attn"), ("0.18", "--cuda-graph-modules attn")],
)
def test_graph_regions_take_the_spelling_of_the_version(mcore: str, option: str) -> None:
    flat = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    exported = export_document(flat, "megatron-args", mcore=mcore)
    assert option in " ".join(exported.arguments)


def test_what_no_option_can_say_is_left_out_with_a_reason() -> None:
    exported = export_document(
        {"bf16": True, "params_dtype": "fp32"}, "megatron-args", mcore="0.19"
    )
    assert exported.left_out is not None
    assert "--bf16" in exported.left_out["params_dtype"]
    assert "# not expressed: params_dtype" in exported.text


def test_the_export_of_a_script_is_the_same_run() -> None:
    document = read(SCRIPT)
    exported = export_document(document, "megatron-args", mcore="0.17.0")
    again = read(exported.text.replace("# torchrun ...", "torchrun"))
    assert Candidate.from_flat(again["config"]) == Candidate.from_flat(document["config"])
    first, second = (ModelSpec.from_flat(one["model"], name="read") for one in (document, again))
    assert first == second


@pytest.mark.parametrize("config", [{"seq_length": "long"}, {"max_position_embeddings": "many"}])
def test_sizes_that_are_no_numbers_are_written_as_they_stand(config) -> None:
    document = {"model": "llama3-8b", "world_size": 8, "config": config}
    written = export_document(document, "megatron-args", mcore="0.16.1").text
    assert str(next(iter(config.values()))) in written


@pytest.mark.parametrize("bits", ["8", "4"])
def test_weights_kept_in_few_bits_are_read_back(bits: str) -> None:
    text = SCRIPT.replace("--bf16", f"--bf16 --fp{bits}-format e4m3 --fp{bits}-param-gather")
    read_back = read_configuration(text, mcore="0.18.0")
    assert read_back["config"][f"fp{bits}_param"] is True
    exported = export_document(read_back, "megatron-args", mcore="0.18.0")
    assert f"--fp{bits}-param-gather" in exported.arguments


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("--num-layer 12 --tp-comm-overlap", ["did you mean --num-layers?"]),
        ("pretrain_gpt.py --num-layers 2 --out-seq-length 8", ["passed by: --out-seq-length"]),
        ("torchrun --nproc-per-node 8 --rdzv-id x pretrain_gpt.py --num-layers 2", []),
        (
            "python train.py --num-layers 2 --recompute-granularty full --my-own=3 --mine",
            ["did you mean --recompute-granularity?", "passed by: --my-own, --mine"],
        ),
    ],
)
def test_options_that_megatron_lm_lacks_are_told(line, notes):
    told = read_configuration(line, mcore="0.16.1").get("notes", [])
    assert len(told) == len(notes)
    for note, expected in zip(told, notes, strict=True):
        assert note.endswith(expected)


def test_the_tuners_own_form_keeps_the_place_and_whose_rules_hold():
    document = {
        "model": "llama3-8b",
        "world_size": 8,
        "gpu": "b200",
        "gpus_per_node": 8,
        "frontend": "megatron-lm",
        "config": {"micro_batch_size": 1},
    }
    text = export_document(document, "yaml", mcore="0.16.1", where="test").text
    read = read_configuration(text, mcore="0.16.1")
    kept = ("world_size", "gpu", "gpus_per_node", "frontend")
    assert {name: read[name] for name in kept} == {name: document[name] for name in kept}
