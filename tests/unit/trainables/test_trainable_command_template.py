"""Launch commands: placeholders, what they become, and what is refused."""

import pytest

from trainables.command.template import Site, TemplateError, check_names, expand
from tuner.measurement import TrialSpec
from tuner.models import get_model

SITE = Site(
    nnodes=2,
    node_rank=1,
    ranks_per_node=4,
    rank=1,
    local_rank=0,
    master_addr="10.0.0.1",
    master_port=29500,
    output_dir="/study/trials/0001",
    python="/usr/bin/python3",
)
SPEC = TrialSpec(
    model=get_model("tiny-dense").to_flat(),
    config={"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 2},
    world_size=8,
    seq_length=64,
    global_batch_size=16,
    warmup_steps=2,
    measure_steps=3,
)


def test_facts_and_fields_stand_where_their_names_do():
    launch = [
        *("torchrun", "--nnodes={nnodes}", "--node-rank", "{node_rank}"),
        *("--master-addr", "{master_addr}:{master_port}", "--tp={tensor_model_parallel_size}"),
        *("{num_layers}", "{sequence_parallel}", "{data_parallel_size}x{num_microbatches}"),
        *("{steps}", "{{literal}}", "--vpp={virtual_pipeline_model_parallel_size|1}"),
    ]
    assert expand(launch, SPEC, SITE) == [
        *("torchrun", "--nnodes=2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1:29500", "--tp=2"),
        *("4", "true", "4x2", "5", "{literal}", "--vpp=1"),
    ]


def test_all_options_of_a_candidate_are_arguments_of_their_own():
    words = expand(["x", "{megatron_args}"], SPEC, SITE)
    at = words.index("--tensor-model-parallel-size")
    assert words[at + 1] == "2"
    assert "--sequence-parallel" in words
    assert "model.tensor_model_parallel_size=2" in expand(["{bridge_overrides}"], SPEC, SITE)


def test_values_stay_one_argument_whatever_they_hold():
    spec = TrialSpec.from_json(
        {**SPEC.to_json(), "config": {"note": "a b; rm -rf / $(x) --flag", "micro_batch_size": 2}}
    )
    assert expand(["--note={note}"], spec, SITE) == ["--note=a b; rm -rf / $(x) --flag"]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("{nodes_count", "single brace"),
        ("--x={megatron_args}", "argument of its own"),
        ("{no_such_thing}", "no placeholder"),
        ("{virtual_pipeline_model_parallel_size}", "unset for this candidate"),
    ],
)
def test_what_cannot_be_filled_in_is_an_error(argument, reason):
    with pytest.raises(TemplateError, match=reason):
        expand([argument], SPEC, SITE)


def test_misspelt_names_are_found_before_any_trial():
    check_names(["{nnodes}", "{tp_comm_overlap}"], ["tp_comm_overlap"])
    with pytest.raises(TemplateError, match="did you mean 'node_rank'"):
        check_names(["{node_rnk}"], [])
