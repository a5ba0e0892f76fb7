"""Jobs made ready: specs, model forms, and spaces without a valid candidate."""

import json
from pathlib import Path

import pytest
import yaml

from tuner.candidate import Candidate
from tuner.cluster.prepared import prepare
from tuner.errors import InputError
from tuner.job import parse_job
from tuner.models import get_model

JOB = {
    "name": "x",
    "model": "tiny-dense",
    "cluster": {"device": "cpu", "gpus_per_node": 4, "memory_limit_gib": 0.5},
    "workload": {"seq_length": 64, "global_batch_size": 8, "precision": "fp32"},
    "space": {"includes": ["cpu"]},
    "trainable": {"warmup_steps": 3, "measure_steps": 5, "timeout_s": 9, "seed": 7},
}


def prepared(**changes):
    job = parse_job({**JOB, **changes}, where="job.yaml")
    return prepare(job, where="job.yaml", base_folder=Path())


def test_a_spec_carries_the_job_and_the_candidate():
    candidate = Candidate.from_flat({"tensor_model_parallel_size": 2, "sequence_parallel": True})
    spec = prepared().spec_of(candidate)
    assert spec.model == get_model("tiny-dense").to_flat()
    assert spec.config == candidate.to_flat()
    assert (spec.world_size, spec.seq_length, spec.global_batch_size) == (4, 64, 8)
    assert (spec.warmup_steps, spec.measure_steps, spec.seed, spec.timeout_s) == (3, 5, 7, 9)
    assert spec.memory_limit_bytes == 2**29
    json.dumps(spec.to_json())


def test_a_world_size_axis_sizes_the_trial_and_is_no_megatron_field():
    job = prepared(space={"axes": {"world_size": [1, 2, 4]}})
    spec = job.spec_of(Candidate.from_flat({"world_size": 2}))
    assert spec.world_size == 2
    assert "world_size" not in spec.config
    assert job.placement_of(Candidate.from_flat({"world_size": 2})).ranks == (2,)


def test_models_come_by_name_by_fields_by_base_and_from_hugging_face(tmp_path: Path):
    base = prepared(model={"base": "tiny-dense", "num_layers": 6}).model
    assert base.num_layers == 6
    assert base.hidden_size == get_model("tiny-dense").hidden_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(tmp_path / "config.json")
    assert prepared(model={"hf_config": path}).model.num_query_groups == 2
    flat = get_model("tiny-dense").to_flat()
    assert prepared(model=flat).model.to_flat() == flat


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"axes": {"tensor_model_parallel_size": [3]}}}, ["space", "invalid", "rule"]),
        ({"trainable": {"name": "megatron"}}, ["trainable.name", "megatron_core"]),
        ({"model": {"base": "tiny-dense", "num_layer": 6}}, ["model", "num_layer"]),
        ({"model": {"hf_config": "x.json", "num_layers": 6}}, ["model", "hf_config"]),
        (
            {"search": {"start": [{"tensor_model_parallel_size": 4, "micro_batch_size": 3}]}},
            ["search.start[0]", "micro_batch_size"],
        ),
    ],
)
def test_what_is_wrong_with_a_job_is_named(changes, words):
    with pytest.raises(InputError) as error:
        prepared(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_job_of_the_readme_is_ready_to_run():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    text = readme.split("```yaml\n")[1].split("```")[0]
    job = parse_job(yaml.safe_load(text), where="README.md")
    ready = prepare(job, where="README.md", base_folder=Path())
    start = Candidate.from_flat(job.search.start[0])
    assert ready.checker(start) is None
    assert ready.spec_of(start).world_size == 64


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_large_shipped_spaces_hold_valid_candidates(model):
    space = "moe" if get_model(model).num_moe_experts else "dense"
    job = prepared(
        model=model,
        cluster={"nodes": 32, "gpus_per_node": 8, "gpu": "h100"},
        workload={"seq_length": 4096, "global_batch_size": 1024},
        space={"includes": [space]},
    )
    assert job.model.name == model


def test_a_placeholder_no_trial_could_fill_in_is_found_before_any_runs():
    command = {"launch": ["train.sh", "{micro_batch_sise}"]}
    with pytest.raises(InputError, match=r"launch: .*did you mean 'micro_batch_size'"):
        prepared(trainable={"name": "command", "command": command})
