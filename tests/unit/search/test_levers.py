"""Levers of a configuration."""

from tuner.candidate import Candidate
from tuner.models import get_model
from tuner.search.levers import SAVES, SPEEDS, levers

DENSE, EXPERTS = get_model("llama3-8b"), get_model("deepseek-v3")


def test_a_lever_that_would_change_nothing_is_not_offered():
    plain = Candidate.from_flat({"micro_batch_size": 1})
    names = {lever.name for lever in levers(plain, DENSE)}
    assert "recompute core_attn" in names
    assert not names & {"half the micro-batch", "recompute nothing", "distributed optimizer"}
    for lever in levers(plain, DENSE):
        assert lever.applied(plain) != plain


def test_modules_are_added_to_those_recomputed_already_and_each_may_be_kept_instead():
    flat = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    found = {lever.name: lever for lever in levers(Candidate.from_flat(flat), DENSE)}
    added = found["recompute layernorm"].applied(Candidate.from_flat(flat))
    assert added.recompute_modules == ("core_attn", "layernorm", "mlp")
    kept = found["keep what mlp computed"]
    assert kept.aim == SPEEDS
    assert kept.applied(Candidate.from_flat(flat)).recompute_modules == ("core_attn",)


def test_experts_have_levers_of_their_own():
    dense, experts = (
        {lever.name for lever in levers(Candidate.from_flat({}), model)}
        for model in (DENSE, EXPERTS)
    )
    assert {"recompute moe_act", "recompute mla_up_proj", "twice the expert parallelism"} <= experts
    assert not {"recompute moe_act", "twice the expert parallelism"} & dense


def test_a_pipeline_is_halved_with_the_same_chunks_and_one_stage_has_none():
    flat = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    candidate = Candidate.from_flat(flat)
    found = {lever.name: lever for lever in levers(candidate, DENSE)}
    half = found["half the pipeline parallelism"].applied(candidate)
    assert (half.pipeline_model_parallel_size, half.virtual_pipeline_model_parallel_size) == (2, 4)
    two = Candidate.from_flat({**flat, "pipeline_model_parallel_size": 2})
    lever = next(x for x in levers(two, DENSE) if x.name == "half the pipeline parallelism")
    assert lever.applied(two).virtual_pipeline_model_parallel_size is None


def test_graphs_are_taken_away_to_save_memory_and_added_to_save_time():
    graphed = {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True}
    without = next(
        x for x in levers(Candidate.from_flat(graphed), DENSE) if x.name == "no CUDA graphs"
    )
    assert without.aim == SAVES
    assert without.applied(Candidate.from_flat(graphed)) == Candidate.from_flat({})
