"""Megatron Bridge: overrides, YAML and Python of one candidate, and the way back."""

from __future__ import annotations

import types

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.formats import export_document
from tuner.formats.hydra import read_value, write_value
from tuner.formats.reader import read_configuration

FLAT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp"],
    "overlap_grad_reduce": True,
    "attention_backend": "flash",
    "pipeline_dtype": "bf16",
    "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def test_unset_fields_undo_those_of_the_recipe() -> None:
    words = export_document(FLAT, "bridge-cli", mcore="0.18").arguments
    assert "model.virtual_pipeline_model_parallel_size=null" in words
    assert "model.pipeline_model_parallel_layout=null" in words
    assert "comm_overlap=null" in words  # else the recipe's would decide overlap_grad_reduce
    assert "mixed_precision=null" in words


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_without_the_recipes_mixed_precision_types_are_written(precision: str) -> None:
    document = {"config": {"grad_reduce_in_fp32": False}, "precision": precision}
    words = export_document(document, "bridge-cli", mcore="0.18").arguments
    assert "mixed_precision=null" in words
    for section in ("model", "optimizer"):
        assert f"{section}.bf16={str(precision == 'bf16').lower()}" in words
        dtype = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[precision]
        assert any(w.startswith(f"++{section}.params_dtype=") and dtype in w for w in words)


def test_the_old_spelling_of_graphs_in_a_recipe_is_taken_back() -> None:
    flat = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    new = export_document(flat, "bridge-cli", mcore="0.18").arguments
    assert "model.cuda_graph_scope=null" in new
    assert "model.cuda_graph_modules=[attn]" in new
    assert not any(
        "cuda_graph_modules" in w
        for w in export_document(flat, "bridge-cli", mcore="0.17").arguments
    )


def test_a_candidate_that_says_nothing_of_precision_keeps_that_of_the_recipe() -> None:
    words = export_document({"micro_batch_size": 2}, "bridge-cli", mcore="0.18").arguments
    assert "train.micro_batch_size=2" in words
    assert not [word for word in words if word.startswith(("mixed_precision", "comm_overlap"))]


@pytest.mark.parametrize("to", ["bridge-cli", "bridge-yaml", "yaml"])
def test_what_is_written_is_read_back(to: str) -> None:
    text = export_document(FLAT, to, mcore="0.18").text
    config = read_configuration(text, mcore="0.18")["config"]
    wanted = {name: value for name, value in FLAT.items() if name != "env"}
    assert {name: config[name] for name in wanted} == wanted


def test_python_edits_a_container() -> None:
    flat = {
        name: FLAT[name] for name in FLAT if name not in ("attention_backend", "pipeline_dtype")
    }
    text = export_document(flat, "bridge-python", mcore="0.18").text
    scope: dict = {}
    exec(compile(text, "exported.py", "exec"), scope)
    container = types.SimpleNamespace(
        **{part: types.SimpleNamespace() for part in ("model", "ddp", "optimizer", "train")}
    )
    assert scope["apply"](container) is container
    assert container.model.recompute_modules == ["core_attn", "mlp"]
    assert container.ddp.overlap_grad_reduce is True
    assert scope["ENV"] == FLAT["env"]


def test_bridge_yaml_is_told_from_the_tuners_own() -> None:
    text = yaml.safe_dump({"model": {"tensor_model_parallel_size": 4}, "train": {"seed": 1}})
    document = read_configuration(text, mcore="0.18")
    assert document["frontend"] == "bridge"
    assert document["config"] == {"tensor_model_parallel_size": 4}


def test_runner_options_and_overrides_of_one_line() -> None:
    line = "torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b_pretrain_config -tp 4"
    document = read_configuration(f"{line} model.sequence_parallel=true", mcore="0.18")
    assert document["model"] == "llama3-8b"
    assert document["world_size"] == 8
    assert document["config"] == {"tensor_model_parallel_size": 4, "sequence_parallel": True}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_override_values_survive_writing_and_reading(value: object) -> None:
    assert read_value(write_value(value)) == value


def test_an_open_bracket_is_an_error() -> None:
    with pytest.raises(InputError, match="missing"):
        read_value("[a, b")


@pytest.mark.parametrize("text", ["[a{}b]", "[a,}p]", "{a:1]", "[" * 5000])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_value(text)


def test_a_form_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="bridge-cli"):
        export_document({}, "bridge-cly", mcore="0.18")


def test_the_canonical_candidate_is_exported() -> None:
    flat = {**FLAT, "recompute_num_layers": 3}  # not read under selective recompute
    text = export_document(flat, "yaml", mcore="0.18").text
    config = yaml.safe_load(text)["config"]
    assert config == Candidate.from_flat(flat).to_flat(mcore="0.18.0")
